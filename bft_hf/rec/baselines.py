"""Rankings that learn nothing: how popular an item is, and how often it followed the last item of a history."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from .data import Split
from .evaluation import Scorer


def popularity_scorer(split: Split, part: str) -> Scorer:
    """Items by how often the training parts hold them, the same for every user."""
    frequency = torch.from_numpy(split.item_frequency[1:].astype(np.float32))

    def score(users: np.ndarray) -> Tensor:
        return frequency.repeat(len(users), 1)

    return score


def transitions_scorer(split: Split, part: str) -> Scorer:
    """Items by how often they came right after the history's last item in the training parts.

    Those that came equally often, never included, go by their popularity, a part of 1 on top of the count.
    """
    items, width = split.data.items.astype(np.int64), split.data.num_items + 1
    ends = np.repeat(split.train_end, split.data.lengths)
    first = np.flatnonzero(np.arange(1, len(items) + 1) < ends)  # whose successor is of the same training part
    pairs, counts = np.unique(items[first] * width + items[first + 1], return_counts=True)
    begins = np.searchsorted(pairs, np.arange(width + 1) * width)  # of each first item's pairs
    popularity = torch.from_numpy(split.item_frequency[1:] / (split.item_frequency.max() + 1))
    last = items[split.inputs(part)[1] - 1]

    def score(users: np.ndarray) -> Tensor:
        scores = popularity.repeat(len(users), 1)
        for row, item in zip(scores.numpy(), last[users], strict=True):
            found = slice(begins[item], begins[item + 1])
            row[pairs[found] % width - 1] += counts[found]
        return scores

    return score


BASELINES: dict[str, Callable[[Split, str], Scorer]] = {
    "popularity": popularity_scorer,
    "transitions": transitions_scorer,
}
