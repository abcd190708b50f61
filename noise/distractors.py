"""Distractor passages beside the gold one of a question, fixed by a seed and each row's id."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from datasets import Dataset, Features, IterableDataset, Value
from datasets import Sequence as ListOf

from .bm25 import BM25Index
from .labels import AnyDataset, check_rate, row_generators
from .passages import Passage, as_passage, gold_place, holds_answer, same_passage

GOLD_POSITIONS = ("first", "middle", "last", "random")


class DistractorSource:
    """Where distractors come from, best first. A new one is one subclass with `candidates`, in `DISTRACTOR_SOURCES`.

    Instances travel to the workers of `datasets.map`, and their pickled state is part of its cache's fingerprint.

    Args:
        corpus: The passages to choose from, for a source that `needs_corpus`; sorted, each text once.
        cache_dir: Of indices on disk; None is the default.
        progress: Show progress while an index is built.
    """

    needs_corpus: ClassVar[bool] = True

    def __init__(self, corpus: Sequence[Passage], cache_dir: str | Path | None, progress: bool) -> None:
        self.corpus = corpus

    def candidates(self, row: Mapping[str, Any], generator: np.random.Generator) -> Iterator[Passage]:
        """Give passages for a row, the best first, without regard to answers or the gold passage."""
        raise NotImplementedError


class BM25(DistractorSource):
    """The passages of other articles that share most with the question, by BM25; those that share no word are none."""

    def __init__(self, corpus: Sequence[Passage], cache_dir: str | Path | None, progress: bool) -> None:
        super().__init__(corpus, cache_dir, progress)
        self.index = BM25Index([passage.text for passage in corpus], cache_dir=cache_dir, progress=progress)
        self.index.load()

    def candidates(self, row: Mapping[str, Any], generator: np.random.Generator) -> Iterator[Passage]:
        scores = self.index.scores(row["question"])
        # Stable, so that passages of one score keep the corpus' order whatever the count that is asked for.
        for place in np.argsort(-scores, kind="stable"):
            if scores[place] <= 0:
                return
            if _other_article(row, self.corpus[place]):
                yield self.corpus[place]._replace(score=float(scores[place]))


class Random(DistractorSource):
    """Passages of other articles, each equally likely."""

    def candidates(self, row: Mapping[str, Any], generator: np.random.Generator) -> Iterator[Passage]:
        for place in generator.permutation(len(self.corpus)):
            if _other_article(row, self.corpus[place]):
                yield self.corpus[place]


class Retrieved(DistractorSource):
    """The passages listed in the row's own `ctxs`, as they stand there, or by `rank` where all have one."""

    needs_corpus = False

    def candidates(self, row: Mapping[str, Any], generator: np.random.Generator) -> Iterator[Passage]:
        ctxs = list(row.get("ctxs") or ())
        gold = gold_place(ctxs, row["answers"])
        others = [ctx for place, ctx in enumerate(ctxs) if place != gold]
        if all(ctx.get("rank") is not None for ctx in others):
            others.sort(key=lambda ctx: ctx["rank"])
        yield from map(as_passage, others)


DISTRACTOR_SOURCES: dict[str, type[DistractorSource]] = {"bm25": BM25, "ctxs": Retrieved, "random": Random}


def _other_article(row: Mapping[str, Any], passage: Passage) -> bool:
    return not passage.article or passage.article != row.get("title")


@dataclass(frozen=True)
class _Add:
    """The function given to `datasets.map`; its fields are all that the result depends on."""

    sources: tuple[DistractorSource, ...]
    k: int
    seed: int
    gold_position: str
    gold_probability: float
    row_id_column: str

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        for column in (self.row_id_column, "question", "answers"):
            if column not in row:
                raise ValueError(f"the dataset has no column {column!r} (it has {', '.join(row)})")
        row_id = row[self.row_id_column]
        gold = _gold(row)
        if gold is None:
            raise ValueError(f"row {row_id!r} has no gold passage: leave out rows without one")
        places, draws = row_generators(self.seed, "distractors", row_id)
        # Both are drawn whatever the flags say, so that neither moves the other.
        position, kept = places.random(), places.random() < self.gold_probability
        chosen: list[Passage] = []
        refused = {"refused_answer": 0, "refused_gold": 0}
        seen: set[str] = set()
        for passage in (passage for source in self.sources for passage in source.candidates(row, draws)):
            if len(chosen) == self.k:
                break
            if passage.text in seen:
                continue
            seen.add(passage.text)
            if same_passage(passage.text, gold["text"]):
                refused["refused_gold"] += 1
            elif holds_answer(passage.text, row["answers"]):
                refused["refused_answer"] += 1
            else:
                chosen.append(passage)
        passages = [{"text": p.text, "gold": False, "score": p.score, "reliability": [p.reliability]} for p in chosen]
        if kept:
            count = len(passages)
            place = {"first": 0, "middle": (count + 1) // 2, "last": count}.get(self.gold_position)
            passages.insert(int(position * (count + 1)) if place is None else place, gold)
        return {"passages": passages, **refused}


def _gold(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """The gold passage: the row's `context`, or else the gold one of its `ctxs`."""
    ctxs = list(row.get("ctxs") or ())
    place = gold_place(ctxs, row["answers"])
    listed = None if place is None else as_passage(ctxs[place])
    if row.get("context"):
        score = listed.score if listed is not None and listed.text == row["context"] else None
        own = row.get("reliability")
        own = [1.0] if own is None else list(own) if isinstance(own, Sequence) else [float(own)]
        return {"text": row["context"], "gold": True, "score": score, "reliability": own}
    if listed is None:
        return None
    return {"text": listed.text, "gold": True, "score": listed.score, "reliability": [listed.reliability]}


def as_corpus(passages: Iterable[str | Mapping[str, Any] | Passage]) -> tuple[Passage, ...]:
    """Make a corpus: each text once, sorted, so that nothing depends on the order they came in."""
    found: dict[str, str] = {}
    for raw in passages:
        passage = raw if isinstance(raw, Passage) else as_passage(raw)
        found[passage.text] = min(passage.article, found.get(passage.text, passage.article))
    return tuple(Passage(text, found[text]) for text in sorted(found))


def passages_of(rows: Iterable[Mapping[str, Any]]) -> Iterator[Passage]:
    """All the passages that rows hold: their `context`, from the article `title`, and their `ctxs`."""
    for row in rows:
        if row.get("context"):
            yield Passage(row["context"], row.get("title") or "")
        yield from map(as_passage, row.get("ctxs") or ())


def add_distractors(
    dataset: AnyDataset,
    k: int,
    *,
    seed: int,
    source: str | Sequence[str] = "bm25",
    corpus: Iterable[str | Mapping[str, Any] | Passage] | None = None,
    gold_position: str = "random",
    gold_probability: float = 1.0,
    row_id_column: str = "id",
    cache_dir: str | Path | None = None,
    progress: bool = True,
    num_proc: int | None = None,
) -> AnyDataset:
    """Put k passages without the answer beside each row's gold one.

    A passage that holds an answer, by `holds_answer`, is never taken, nor one that is the gold passage, part of it, or
    around it, nor one twice. What a row gets is fixed by (seed, row id): the same whatever the order of the rows, the
    workers, the shards (given `corpus`), or streaming; the distractors at one k are the first of those at a higher one, in
    the same order; neither `gold_position` nor `gold_probability` changes them.

    Args:
        dataset: Rows with an id, `question`, `answers` (texts) and the gold passage: `context`, optionally with `title`,
            its article, and `reliability`; or `ctxs`, the list that DPR, FiD and their like write (`gold_place` says which
            of them is gold).
        k: Distractors for a row; it gets fewer where its sources hold no more.
        seed: Of the draws.
        source: A key of `DISTRACTOR_SOURCES`, or several: each next one fills up what the ones before leave.
        corpus: Passages for "bm25" and "random": texts, or mappings with `text` and `title`. None: those of `dataset`, its
            contexts and `ctxs`, at the cost of one pass. A row never gets one from its own article.
        gold_position: Where the gold passage stands: "first", "middle", "last", or "random", a place drawn for each row.
        gold_probability: The probability that a row keeps its gold passage (RAFT, arXiv:2403.10131, trains at .8).
        row_id_column: Its values, as text, key the draws.
        cache_dir: Of BM25 indices; None: `bft_hf/bm25` in the Hugging Face home.
        progress: Show progress while an index is built.
        num_proc: Worker processes for a `Dataset`; has no effect on the result.

    Returns:
        A dataset of the same type with the columns `passages`, a list in the prompt's order of `text`, `gold`, `score` (of
        the retriever, or None) and `reliability` (one number, or one a token); `refused_answer` and `refused_gold`, how many
        better candidates were passed over for holding an answer and for being the gold passage.

    Raises:
        ValueError: A wrong argument, no corpus; or (as it is read) a row without gold passage, or without a column.
    """
    if isinstance(k, bool) or not isinstance(k, int) or k < 0:
        raise ValueError(f"the number of distractors must be an integer from 0, got {k!r}")
    names = [source] if isinstance(source, str) else list(source)
    unknown = [name for name in names if name not in DISTRACTOR_SOURCES]
    if unknown or not names:
        known = ", ".join(DISTRACTOR_SOURCES)
        raise ValueError(f"unknown source of distractors {(unknown or [''])[0]!r}: choose from {known}")
    if gold_position not in GOLD_POSITIONS:
        raise ValueError(f"unknown gold_position {gold_position!r}: choose from {', '.join(GOLD_POSITIONS)}")
    passages: tuple[Passage, ...] = ()
    if k and any(DISTRACTOR_SOURCES[name].needs_corpus for name in names):
        passages = as_corpus(passages_of(dataset) if corpus is None else corpus)
        if not passages:
            raise ValueError("there is no passage to choose distractors from: give a corpus")
    sources = tuple(DISTRACTOR_SOURCES[name](passages, cache_dir, progress) for name in names) if k else ()
    add = _Add(sources, k, int(seed), gold_position, check_rate(gold_probability), row_id_column)
    features = None
    if dataset.features is not None:
        passage = {"text": Value("string"), "gold": Value("bool"), "score": Value("float64")}
        added = {"passages": [{**passage, "reliability": ListOf(Value("float64"))}]}
        counts = {name: Value("int64") for name in ("refused_answer", "refused_gold")}
        features = Features({**dataset.features, **added, **counts})
    if isinstance(dataset, IterableDataset):
        return dataset.map(add, features=features)
    return dataset.map(add, features=features, num_proc=num_proc, desc=f"Adding distractors ({', '.join(names)}, {k})")


def distractor_report(dataset: Dataset, k: int) -> dict[str, int]:
    """Count what `add_distractors` did.

    Returns:
        "rows"; "added", passages in all; "short_rows", those with fewer than k; "without_gold", those that lost their gold
        passage to `gold_probability`; "refused_answer" and "refused_gold", candidates passed over.
    """
    passages = dataset["passages"]
    added = [sum(not passage["gold"] for passage in row) for row in passages]
    return {
        "rows": len(dataset),
        "added": sum(added),
        "short_rows": sum(count < k for count in added),
        "without_gold": sum(len(row) == count for row, count in zip(passages, added, strict=True)),
        "refused_answer": sum(dataset["refused_answer"]),
        "refused_gold": sum(dataset["refused_gold"]),
    }
