"""The reliability of passages, from the scores that a retriever gave them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset

from .bm25 import BM25Index

FLOOR = 0.05


def reliability_of_scores(scores: Sequence[float], floor: float = FLOOR) -> list[float]:
    """Map retrieval scores of the passages of one prompt to reliability: s / max(s), but no less than `floor`.

    Relative to the best passage, because a score means nothing across questions. The floor keeps any passage readable: words
    may fail to match where the sense does. A score below zero counts as zero, and without a positive one all are 1.
    """
    values = np.maximum(np.asarray(scores, dtype=np.float64), 0.0)
    best = values.max(initial=0.0)
    return np.maximum(values / best, floor).tolist() if best > 0 else [1.0] * len(values)


def with_reliability(passages: Sequence[Mapping[str, Any]], reliability: Sequence[float]) -> dict[str, Any]:
    """The column `passages` of a row, with one number for each passage."""
    return {"passages": [{**passage, "reliability": [one]} for passage, one in zip(passages, reliability, strict=True)]}


def check_rating(dataset: Dataset, floor: float) -> None:
    """Raise ValueError where there are no passages to rate, or the least reliability is outside [0, 1]."""
    if not 0.0 <= floor <= 1.0:
        raise ValueError(f"the least reliability must be in [0, 1], got {floor}")
    if "passages" not in dataset.column_names:
        raise ValueError("the dataset has no column 'passages': add_distractors makes it (also for 0 of them)")


@dataclass(frozen=True)
class _Rate:
    """The function given to `datasets.map`."""

    index: BM25Index
    floor: float

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        passages = list(row["passages"])
        scores = [passage["score"] for passage in passages]
        if any(score is None for score in scores):
            scores = self.index.scores_of(row["question"], [passage["text"] for passage in passages])
        scored = [{**passage, "score": score} for passage, score in zip(passages, scores, strict=True)]
        return with_reliability(scored, reliability_of_scores(scores, self.floor))


def retriever_reliability(
    dataset: Dataset,
    *,
    floor: float = FLOOR,
    cache_dir: str | Path | None = None,
    progress: bool = True,
    num_proc: int | None = None,
) -> Dataset:
    """Set the reliability of each row's passages by their retrieval scores, gold passage and distractors alike.

    A row whose passages all have a score keeps those. Elsewhere BM25 scores all passages of the row for its question, over
    all passages of the data set: a gold passage that was put in by hand has no score, and one rule for it and another for the
    distractors would tell the model which one is gold.

    Args:
        dataset: Rows with `question` and the `passages` of `add_distractors`.
        floor: The least reliability; see `reliability_of_scores`.
        cache_dir: Of BM25 indices; None: `bft_hf/bm25` in the Hugging Face home.
        progress: Show progress while an index is built.
        num_proc: Worker processes; has no effect on the result.

    Returns:
        The dataset with other numbers in `passages`.

    Raises:
        ValueError: There are no passages, or `floor` is outside [0, 1].
    """
    check_rating(dataset, floor)
    texts = sorted({passage["text"] for row in dataset["passages"] for passage in row})
    index = BM25Index(texts, cache_dir=cache_dir, progress=progress)
    index.load()
    rate = _Rate(index, float(floor))
    return dataset.map(rate, features=dataset.features, num_proc=num_proc, desc="Rating passages")
