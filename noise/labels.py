"""Corruption of completion labels, fixed by a seed and each row's id."""

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, TypeVar

import numpy as np
from datasets import Dataset, Features, IterableDataset, Sequence, Value

IGNORE_INDEX = -100

AnyDataset = TypeVar("AnyDataset", Dataset, IterableDataset)


class LabelNoise:
    """One kind of label noise: which tokens take the place of the true ones.

    A new kind is one subclass with `replace`, listed in `LABEL_NOISES`. Instances travel to the workers of
    `datasets.map`, and their pickled state is part of its cache's fingerprint: keep them picklable and free of
    anything that differs between two runs.

    Attributes:
        row_wise: False, the rate is a token's probability of corruption, each token by itself; True, it is a row's,
            and the whole completion is corrupted or none of it.
    """

    row_wise: ClassVar[bool] = False

    def prepare(self, rows: Iterable[Mapping[str, Any]], eligible: "Eligible", vocabulary: np.ndarray) -> None:
        """Learn from clean rows once, before any is corrupted; here there is nothing to learn.

        What is learned must not depend on the order of the rows.

        Args:
            rows: The reference rows (a kind that iterates over them pays one pass, also when streaming).
            eligible: `eligible(labels)` gives the mask of the labels that may be corrupted.
            vocabulary: (V,) int64, sorted, the tokens a replacement may be.

        Raises:
            ValueError: The rows do not hold enough to draw from.
        """

    def replace(
        self,
        labels: np.ndarray,
        generator: np.random.Generator,
        vocabulary: np.ndarray,
        row: Mapping[str, Any],
    ) -> np.ndarray:
        """Draw a replacement for every label that may be corrupted in one row; the caller keeps those it needs.

        Args:
            labels: (N,) int64, the true tokens, in order.
            generator: The row's own; drawing from it is what keeps the result fixed by (seed, row id).
            vocabulary: (V,) int64, sorted, the tokens a replacement may be.
            row: The whole row, for kinds that look at its prompt.

        Returns:
            (N,) integers. A place that keeps its true token does not count as corrupted.
        """
        raise NotImplementedError


class Uniform(LabelNoise):
    """A token of the vocabulary other than the true one, each equally likely."""

    def replace(
        self,
        labels: np.ndarray,
        generator: np.random.Generator,
        vocabulary: np.ndarray,
        row: Mapping[str, Any],
    ) -> np.ndarray:
        place = np.searchsorted(vocabulary, labels)
        known = vocabulary[np.minimum(place, len(vocabulary) - 1)] == labels
        draw = generator.integers(0, len(vocabulary) - known)
        # Stepping over the true token's place keeps the other V - 1 equally likely; redrawing until it differs would
        # too, but with a number of draws that depends on luck.
        return vocabulary[draw + (known & (draw >= place))]


class Unigram(LabelNoise):
    """A token other than the true one, as likely as it is frequent among the reference rows' labels."""

    def prepare(self, rows: Iterable[Mapping[str, Any]], eligible: "Eligible", vocabulary: np.ndarray) -> None:
        counts: Counter[int] = Counter()
        for row in rows:
            counts.update(_answer(row, eligible).tolist())
        self.tokens = np.intersect1d(np.array(list(counts), dtype=np.int64), vocabulary)
        self.edges = np.concatenate([[0], np.cumsum([counts[token] for token in self.tokens.tolist()], dtype=np.int64)])
        if len(self.tokens) < 2:
            raise ValueError("unigram noise needs two different tokens among the labels to draw from: give more rows")

    def replace(
        self,
        labels: np.ndarray,
        generator: np.random.Generator,
        vocabulary: np.ndarray,
        row: Mapping[str, Any],
    ) -> np.ndarray:
        place = np.searchsorted(self.tokens, labels)
        known = self.tokens[np.minimum(place, len(self.tokens) - 1)] == labels
        place = np.minimum(place, len(self.tokens) - 1)
        own = np.where(known, self.edges[place + 1] - self.edges[place], 0)
        draw = generator.integers(0, self.edges[-1] - own)
        # As in Uniform: the draw steps over the true token's stretch.
        draw = draw + np.where(draw >= self.edges[place], own, 0)
        return self.tokens[np.searchsorted(self.edges, draw, side="right") - 1]


class AnswerSwap(LabelNoise):
    """Another row's answer in the place of the true one, cut or repeated to its length.

    The pool is the set of the reference rows' answers, so a frequent answer is drawn no more often than a rare one.
    """

    row_wise = True

    def prepare(self, rows: Iterable[Mapping[str, Any]], eligible: "Eligible", vocabulary: np.ndarray) -> None:
        answers = {tuple(_answer(row, eligible).tolist()) for row in rows} - {()}
        if len(answers) < 2:
            raise ValueError("answer_swap noise needs two different answers to draw from: give more rows")
        self.pool = sorted(answers)

    def replace(
        self,
        labels: np.ndarray,
        generator: np.random.Generator,
        vocabulary: np.ndarray,
        row: Mapping[str, Any],
    ) -> np.ndarray:
        start = int(generator.integers(len(self.pool)))
        for step in range(len(self.pool) if labels.size else 0):
            wrong = np.resize(np.array(self.pool[(start + step) % len(self.pool)]), labels.shape)
            # Cut to one token, many an answer begins as the true one does ("the").
            if not np.array_equal(wrong, labels):
                return wrong
        return labels


class SpanShift(LabelNoise):
    """A span of the row's own passage, as long as the answer and up to one length of it off: a slip of the annotator.

    Reads `input_ids` and, where the row has them, `passage_span` and `answer_span`: first token and the one after the
    last, of the passage and of the answer in it (-1 where unknown). Without the first, the passage is all that stands
    before the first label; without the second, a span from anywhere in it serves. A passage shorter than the answer
    is repeated.
    """

    row_wise = True

    def replace(
        self,
        labels: np.ndarray,
        generator: np.random.Generator,
        vocabulary: np.ndarray,
        row: Mapping[str, Any],
    ) -> np.ndarray:
        if "input_ids" not in row:
            raise ValueError(_missing("input_ids", list(row)))
        trained = np.flatnonzero(np.asarray(row["labels"]) != IGNORE_INDEX)
        start, end = row.get("passage_span") or (0, trained[0] if trained.size else 0)
        passage = np.asarray(row["input_ids"], dtype=np.int64)[start:end]
        if not passage.size or not labels.size:
            return labels
        if passage.size < labels.size:
            return np.resize(passage, labels.shape)
        spans = np.lib.stride_tricks.sliding_window_view(passage, labels.size)
        wrong = (spans != labels).any(axis=1)
        answer = (row.get("answer_span") or (-1, -1))[0]
        if answer >= start:
            offset = np.abs(np.arange(len(spans)) - (answer - start))
            near = wrong & (offset > 0) & (offset <= labels.size)
            wrong = near if near.any() else wrong
        choice = np.flatnonzero(wrong)
        return spans[generator.choice(choice)] if choice.size else labels


LABEL_NOISES: dict[str, type[LabelNoise]] = {
    "uniform": Uniform,
    "unigram": Unigram,
    "answer_swap": AnswerSwap,
    "span_shift": SpanShift,
}


def _answer(row: Mapping[str, Any], eligible: "Eligible") -> np.ndarray:
    labels = np.asarray(row["labels"], dtype=np.int64).reshape(-1)
    return labels[eligible(labels)]


@dataclass(frozen=True)
class Eligible:
    """Which labels may be corrupted: completion tokens that are neither padding nor an end of sequence."""

    excluded: tuple[int, ...]

    def __call__(self, labels: np.ndarray) -> np.ndarray:
        return (labels != IGNORE_INDEX) & ~np.isin(labels, self.excluded)


@lru_cache(maxsize=4)
def _vocabulary(size: int, special: tuple[int, ...]) -> np.ndarray:
    return np.setdiff1d(np.arange(size), special, assume_unique=True)


@dataclass(frozen=True)
class _Corrupt:
    """The function given to `datasets.map`; its fields are all that the result depends on."""

    noise: LabelNoise
    kind: str
    rate: float
    seed: int
    vocab_size: int
    special: tuple[int, ...]
    eligible: Eligible
    row_id_column: str

    def __call__(self, row: Mapping[str, Any]) -> dict[str, list[int] | list[bool]]:
        for column in ("labels", self.row_id_column):
            if column not in row:
                raise ValueError(_missing(column, list(row)))
        labels = np.array(row["labels"], dtype=np.int64).reshape(-1)
        places = np.flatnonzero(self.eligible(labels))
        true = labels[places]
        if true.size and (true.min() < 0 or true.max() >= self.vocab_size):
            raise ValueError(
                f"row {row[self.row_id_column]!r} has a label outside the vocabulary of {self.vocab_size} tokens: "
                "give vocab_size as len(tokenizer)"
            )
        chosen, replacements = row_generators(self.seed, self.kind, row[self.row_id_column])
        # Every place gets its draw and its replacement whatever the rate, so what is corrupted at a low rate is
        # corrupted in the same way at every higher one.
        draws = chosen.random(1 if self.noise.row_wise else true.size)
        new = np.asarray(self.noise.replace(true, replacements, _vocabulary(self.vocab_size, self.special), row))
        labels[places] = np.where(draws < self.rate, new, true)
        corrupted = np.zeros(labels.shape, dtype=bool)
        corrupted[places] = labels[places] != true
        return {"labels": labels.tolist(), "corrupted": corrupted.tolist()}


def row_generators(seed: int, kind: str, row_id: object) -> tuple[np.random.Generator, np.random.Generator]:
    """Two generators for a row, from a hash: Python's own differs between processes."""
    digest = hashlib.blake2b(f"{seed}\0{kind}\0{row_id}".encode(), digest_size=32).digest()
    keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
    return np.random.Generator(np.random.Philox(key=keys[:2])), np.random.Generator(np.random.Philox(key=keys[2:]))


def _missing(column: str, columns: list[str]) -> str:
    return f"the dataset has no column {column!r} (it has {', '.join(columns)}): tokenize the rows and keep their ids"


def check_rate(rate: float) -> float:
    """Give the rate back as a float.

    Raises:
        ValueError: It is no number in [0, 1].
    """
    try:
        number = float(rate)
    except (TypeError, ValueError):
        number = math.nan
    if not 0.0 <= number <= 1.0:
        raise ValueError(f"the noise rate must be a number in [0, 1], got {rate!r}")
    return number


def corrupt_labels(
    dataset: AnyDataset,
    rate: float,
    *,
    seed: int,
    vocab_size: int,
    kind: str = "uniform",
    eos_token_ids: Iterable[int] = (),
    pad_token_id: int | None = None,
    special_token_ids: Iterable[int] = (),
    row_id_column: str = "id",
    reference: Iterable[Mapping[str, Any]] | None = None,
    num_proc: int | None = None,
) -> AnyDataset:
    """Replace a share of the completion labels; the inputs stay clean.

    What is corrupted, and by what, is fixed by (seed, kind, row id): the same whatever the order of the rows, the
    workers, the shards, or streaming, and in every epoch. What is corrupted at one rate is corrupted in the same way
    at every higher rate.

    Args:
        dataset: Rows with `labels` (-100 where a token is not trained) and an id; "span_shift" reads `input_ids` too.
        rate: In [0, 1], the probability that a label is corrupted ("uniform", "unigram"), or that a row is, with its
            whole answer ("answer_swap", "span_shift"). At 1 every one that may be is.
        seed: Of the noise alone; it has nothing to do with the order of training.
        vocab_size: Replacements come from 0 ... vocab_size - 1: `len(tokenizer)`, not the padded embedding.
        kind: A key of `LABEL_NOISES`.
        eos_token_ids: Labels never corrupted: the tokens that end an answer.
        pad_token_id: A label never corrupted.
        special_token_ids: Tokens that never serve as a replacement.
        row_id_column: Its values, as text, key the noise: two rows with one id get the same draws.
        reference: The rows whose labels "unigram" and "answer_swap" draw from; None is `dataset` itself. Give the whole
            data set when corrupting a shard of it: then the shards agree with the whole.
        num_proc: Worker processes for a `Dataset`; has no effect on the result.

    Returns:
        A dataset of the same type with new `labels` and a column `corrupted`, a bool for each label.

    Raises:
        ValueError: A rate outside [0, 1], an unknown kind, fewer than two tokens or answers to choose from, a missing
            column, a dataset that is corrupted already, or (as it is read) a label outside the vocabulary.
    """
    rate = check_rate(rate)
    if kind not in LABEL_NOISES:
        raise ValueError(f"unknown kind of label noise {kind!r}: choose from {', '.join(sorted(LABEL_NOISES))}")
    special = tuple(sorted({int(token) for token in special_token_ids}))
    if len(_vocabulary(int(vocab_size), special)) < 2:
        raise ValueError(f"vocab_size must leave two tokens to choose from besides the special ones, got {vocab_size}")
    columns = dataset.column_names
    if columns is not None:
        if "corrupted" in columns:
            raise ValueError("the dataset has a column 'corrupted' already: corrupt the clean rows once")
        for column in ("labels", row_id_column):
            if column not in columns:
                raise ValueError(_missing(column, columns))
    excluded = {int(token) for token in eos_token_ids} | ({int(pad_token_id)} if pad_token_id is not None else set())
    eligible = Eligible(tuple(sorted(excluded)))
    noise = LABEL_NOISES[kind]()
    noise.prepare(dataset if reference is None else reference, eligible, _vocabulary(int(vocab_size), special))
    corrupt = _Corrupt(noise, kind, rate, int(seed), int(vocab_size), special, eligible, row_id_column)
    # Left to be inferred, the types would depend on the first rows written: an empty completion would become null.
    features = None
    if dataset.features is not None:
        features = Features({**dataset.features, "corrupted": Sequence(Value("bool"))})
    if isinstance(dataset, IterableDataset):
        return dataset.map(corrupt, features=features)
    return dataset.map(corrupt, features=features, num_proc=num_proc, desc=f"Corrupting labels ({kind}, {rate:g})")
