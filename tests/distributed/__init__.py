"""What the processes run that test_distributed.py launches."""
