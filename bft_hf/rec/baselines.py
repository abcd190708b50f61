"""Rankings that learn nothing: how popular an item is, and how often it followed the items of a history."""

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


BASELINES: dict[str, Callable[[Split, str], Scorer]] = {"popularity": popularity_scorer}
