"""Histories as tensors: windows to train on in batches of like length, and whole histories to rank from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from .data import PADDING, Split

NO_LABEL = -100
BUCKET = 16
"""Batches that are sorted by length together: enough for likeness, few enough that an epoch's batches stay random."""


def uses_time(model: Any) -> bool:
    """Whether a recommender has a time bias and so takes timestamps."""
    return bool(getattr(model.config, "time_buckets", 0))


def longest_history(model: Any) -> int:
    """How many items of a history the model can rank from; a cloze model needs one place for what is to be found."""
    return int(model.config.max_position_embeddings) - (model.objective == "cloze")


def ranking_inputs(
    model: Any, histories: Sequence[np.ndarray], timestamps: Sequence[np.ndarray] | None = None
) -> tuple[dict[str, Tensor], Int[Tensor, " batch"]]:
    """A batch whose last position of each row says what comes next.

    Args:
        model: Any recommender. For a cloze model a mask, dated like the last item, follows each history.
        histories: Item ids, oldest first, one or more each; of the longer ones the latest that fit are kept.
        timestamps: Of each item; needed by a model with a time bias, ignored by others.

    Returns:
        What to call the model with, padded on the right, and the position to read in each row.
    """
    longest, cloze = longest_history(model), model.objective == "cloze"
    rows = [np.asarray(history)[-longest:] for history in histories]
    lengths = np.array([len(row) for row in rows]) + cloze
    input_ids = np.full((len(rows), lengths.max()), PADDING, dtype=np.int64)
    for row, ids in zip(input_ids, rows, strict=True):
        row[: len(ids)] = ids
        if cloze:
            row[len(ids)] = model.config.mask_token_id
    inputs = {
        "input_ids": torch.from_numpy(input_ids),
        "attention_mask": torch.from_numpy((np.arange(lengths.max()) < lengths[:, None]).astype(np.int64)),
    }
    if uses_time(model):
        if timestamps is None:
            raise ValueError("the model has a time bias, so it needs the timestamps of the histories")
        times = np.zeros_like(input_ids)
        for row, values in zip(times, timestamps, strict=True):
            kept = np.asarray(values)[-longest:]
            row[: len(kept)] = kept
            if cloze:
                row[len(kept)] = kept[-1]
        inputs["timestamps"] = torch.from_numpy(times)
    return inputs, torch.from_numpy(lengths - 1)


@dataclass(frozen=True)
class TrainingWindows:
    """The training histories in windows no longer than the model reads, in which every item is a target once.

    Histories are cut from their end. For a causal model a window begins with the last item of the one before it, so that no
    target is lost; the first item of a history is none. For a cloze model windows share nothing.

    Attributes:
        split: The histories.
        starts: Where in `split.data.items` each window starts, shape (windows,).
        lengths: Items of each window, at least 2, shape (windows,).
        cloze: Whether items are hidden and to be found, or predicted from those before.
        mask_token_id: What hides an item; 0 for causal models, which hide none.
        mask_probability: Share of the items that is hidden, at least one a window.
        mask_last: Share of the windows in which the last item alone is hidden, as it is when ranking.
        with_time: Whether batches carry timestamps.
    """

    split: Split
    starts: np.ndarray
    lengths: np.ndarray
    cloze: bool = False
    mask_token_id: int = PADDING
    mask_probability: float = 0.0
    mask_last: float = 0.0
    with_time: bool = False

    @classmethod
    def of(cls, split: Split, model: Any, mask_last: float = 0.0) -> TrainingWindows:
        """Cut the training parts for this model.

        Raises:
            ValueError: the model needs timestamps and the data has none, or no history has two items to train on.
        """
        if uses_time(model) and split.data.timestamps is None:
            raise ValueError("a time bias needs timestamps, and the data has none: set time_buckets to 0")
        cloze, width = model.objective == "cloze", int(model.config.max_position_embeddings)
        starts, lengths = [], []
        for first, end in zip(split.data.offsets[:-1].tolist(), split.train_end.tolist(), strict=True):
            while end - first > 1:
                start = max(first, end - width - (not cloze))
                starts.append(start)
                lengths.append(end - start)
                end = start if cloze else start + 1
        if not starts:
            raise ValueError("no user has two items to train on beside the two held out: there is nothing to learn")
        return cls(
            split,
            np.array(starts),
            np.array(lengths),
            cloze,
            model.config.mask_token_id if cloze else PADDING,
            float(model.config.mask_probability) if cloze else 0.0,
            mask_last,
            uses_time(model),
        )

    @property
    def targets_per_window(self) -> float:
        """Mean number of labels a window has, in expectation where they are drawn."""
        if not self.cloze:
            return float((self.lengths - 1).mean())
        p = self.mask_probability
        drawn = self.lengths * p + (1 - p) ** self.lengths
        return float((self.mask_last + (1 - self.mask_last) * drawn).mean())

    def epoch(self, batch_size: int, rng: np.random.Generator) -> list[np.ndarray]:
        """All windows in a random order, in batches of like length.

        Windows are shuffled, sorted by length within `BUCKET` batches, and the batches are shuffled again: most histories of a
        shop have under ten items, and a few long ones would pad every batch to their length.

        Args:
            batch_size: Windows of a batch; the last one may have fewer.
            rng: Decides the order.

        Returns:
            Positions of windows, one array a batch.
        """
        order = rng.permutation(len(self.starts))
        batches = []
        for begin in range(0, len(order), BUCKET * batch_size):
            bucket = order[begin : begin + BUCKET * batch_size]
            bucket = bucket[np.argsort(self.lengths[bucket], kind="stable")]
            batches += [bucket[i : i + batch_size] for i in range(0, len(bucket), batch_size)]
        return [batches[i] for i in rng.permutation(len(batches))]

    def batch(self, windows: np.ndarray, rng: np.random.Generator) -> dict[str, Tensor]:
        """What the model is called with and the labels, `NO_LABEL` where there is none.

        Args:
            windows: Positions of windows.
            rng: Decides what is hidden.
        """
        data = self.split.data
        lengths = self.lengths[windows]
        columns = np.arange(lengths.max())
        real = columns < lengths[:, None]
        at = np.where(real, self.starts[windows][:, None] + columns, 0)
        ids = np.where(real, data.items[at], PADDING)
        times = None
        if self.with_time:
            assert data.timestamps is not None
            times = np.where(real, data.timestamps[at], 0).astype(np.int64)
        if self.cloze:
            hidden = self._hidden(real, lengths, rng)
            labels = np.where(hidden, ids, NO_LABEL)
            ids = np.where(hidden, self.mask_token_id, ids)
        else:
            labels = np.where(real[:, 1:], ids[:, 1:], NO_LABEL)
            ids, real = ids[:, :-1], real[:, 1:]
            ids = np.where(real, ids, PADDING)
            times = None if times is None else np.where(real, times[:, :-1], 0)
        values = {"input_ids": ids, "attention_mask": real.astype(np.int64), "labels": labels}
        if times is not None:
            values["timestamps"] = times
        return {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in values.items()}

    def _hidden(self, real: np.ndarray, lengths: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        draws = rng.random(real.shape)
        hidden = real & (draws < self.mask_probability)
        # Where nothing was drawn, the real item with the smallest draw.
        least = np.where(real, draws, 2.0).argmin(axis=1)
        none = ~hidden.any(axis=1)
        hidden[none, least[none]] = True
        last = rng.random(len(lengths)) < self.mask_last
        hidden[last] = False
        hidden[last, lengths[last] - 1] = True
        return hidden
