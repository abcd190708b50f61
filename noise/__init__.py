"""Noise to train against: corrupted labels, and passages that do not hold the answer."""
