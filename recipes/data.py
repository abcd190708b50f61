"""The questions of a run: both sides read, and what stands beside each question's passage."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arguments import (
    BUNDLED_DATASETS,
    DEFAULT_EVAL_EXAMPLES,
    METHODS,
    Method,
    SFTArguments,
    distractor_counts,
    distractor_sources,
)
from .command import UsageError, as_usage_error

if TYPE_CHECKING:
    from datasets import Dataset

    from bft_hf.noise.passages import Passage

    Rater = Callable[[Dataset], Dataset]

EVALUATION_SEED = 0


@dataclass(frozen=True)
class Data:
    """Questions, not tokenized yet, and what results.json says about them.

    Attributes:
        train: Rows to train on.
        evaluation: Rows to evaluate on.
        description: Of both.
        train_corpus: Passages that may serve as distractors in training; empty where none are needed.
        evaluation_corpus: The same for evaluation.
    """

    train: "Dataset"
    evaluation: "Dataset"
    description: dict[str, Any]
    train_corpus: "tuple[Passage, ...]" = field(default=(), repr=False)
    evaluation_corpus: "tuple[Passage, ...]" = field(default=(), repr=False)


def load_data(methods: list[str], arguments: SFTArguments, seed: int) -> Data:
    """Read both sides.

    Args:
        methods: The arms that the data is for.
        arguments: The command's.
        seed: Of the sample of training questions.

    Raises:
        UsageError: A file with a malformed row, too few questions, an unknown kind of noise, no distractors where some are
            asked for.
    """
    import numpy

    from bft_hf.noise.distractors import DISTRACTOR_SOURCES, as_corpus, passages_of
    from bft_hf.noise.labels import LABEL_NOISES

    from .question_files import DataError, read_passages, read_questions

    if arguments.noise_kind not in LABEL_NOISES:
        raise UsageError(f"unknown --noise_kind {arguments.noise_kind!r}: choose from {', '.join(LABEL_NOISES)}")
    own_evaluation = arguments.eval_dataset is not None
    source, eval_source = arguments.dataset, arguments.eval_dataset or arguments.dataset
    with as_usage_error("", DataError, OSError):
        sides = [
            read_questions(name, split="all" if own_evaluation and is_file(name) else split)
            for name, split in ((source, "train"), (eval_source, "validation"))
        ]
        train = sides[0].sample(arguments.train_examples or None, arguments.max_context_chars, seed)
        evaluation = sides[1].sample(arguments.eval_examples or None, arguments.max_context_chars, EVALUATION_SEED)
    cut = arguments.eval_examples is None and len(evaluation) > DEFAULT_EVAL_EXAMPLES
    if cut or (arguments.eval_f1_examples is not None and not arguments.eval_examples):
        # Not as a limit above: a small file of one's own should not be refused for a default. And the questions to be
        # answered are the first ones, which in a file's own order are of one article.
        order = numpy.random.default_rng(EVALUATION_SEED).permutation(len(evaluation))
        evaluation = evaluation.select(order[: DEFAULT_EVAL_EXAMPLES if cut else None])
    description: dict[str, Any] = {
        "train": source,
        "evaluation": eval_source,
        "train_on_hub": not is_file(source) and source not in BUNDLED_DATASETS,
        "train_examples": len(train),
        "eval_examples": len(evaluation),
        "max_context_chars": arguments.max_context_chars,
    }
    if any(side.without_gold for side in sides):
        description |= {"train_without_gold": sides[0].without_gold, "eval_without_gold": sides[1].without_gold}
    counts = [distractor_counts(arguments, METHODS[method]) for method in methods]
    needed = [any(count for count, _ in counts), any(any(several) for _, several in counts)]
    names, file = distractor_sources(arguments)
    corpora: list[tuple[Passage, ...]] = [(), ()]
    with as_usage_error("--distractor_source: ", DataError):
        if any(DISTRACTOR_SOURCES[name].needs_corpus for name in names) and any(needed):
            shared = as_corpus(read_passages(file)) if file is not None else None
            corpora = [
                (as_corpus(passages_of(side.rows)) if shared is None else shared) if need else ()
                for side, need in zip(sides, needed, strict=True)
            ]
    for need, rows, name in zip(needed, (train, evaluation), (source, eval_source), strict=True):
        if need and names == ["ctxs"] and "ctxs" not in rows.column_names:
            raise UsageError(f"--distractor_source ctxs: the rows of {name} have no 'ctxs': use bm25, random or a file")
    if arguments.reliability == "column" and not any(has_reliability(rows) for rows in (train, evaluation)):
        raise UsageError(f"--reliability column: {source} has no column 'reliability'")
    return Data(train, evaluation, description, *corpora)


def has_reliability(rows: "Dataset") -> bool:
    """Whether rows say how reliable they or their passages are."""
    if "reliability" in rows.column_names:
        return True
    return "ctxs" in rows.column_names and any(ctx["reliability"] is not None for ctxs in rows["ctxs"] for ctx in ctxs)


def is_file(source: str) -> bool:
    """Whether a source is a path that exists."""
    return Path(source).expanduser().exists()


def with_passages(
    rows: "Dataset",
    k: int,
    corpus: "tuple[Passage, ...]",
    arguments: SFTArguments,
    *,
    seed: int,
    gold_probability: float = 1.0,
    reliability: bool = False,
    rate: "Rater | None" = None,
) -> tuple["Dataset", dict[str, Any] | None]:
    """Put distractors beside the passage of each question, and their reliability to them.

    Args:
        rows: Questions.
        k: Distractors for each.
        corpus: To choose from.
        arguments: Say which and where.
        seed: Of the draws.
        gold_probability: Share of the rows that keep the passage with their answer.
        reliability: Whether a model will be told; otherwise no number is worked out.
        rate: Sets the passages' reliability where the arguments ask for likelihood, which takes a model.

    Returns:
        The rows, with `passages` where there is anything beside the row's own passage or to say of it, and the report of
        `distractor_report` (None where nothing was asked for).

    Raises:
        UsageError: As `add_distractors`.
    """
    from bft_hf.noise.distractors import add_distractors, distractor_report
    from bft_hf.noise.reliability import retriever_reliability

    if not k and not reliability:
        return rows, None
    with as_usage_error("", ValueError):
        added = add_distractors(
            rows,
            k,
            seed=seed,
            source=distractor_sources(arguments)[0],
            corpus=corpus,
            gold_position=arguments.gold_position,
            gold_probability=gold_probability,
        )
        if reliability and arguments.reliability == "retriever":
            added = retriever_reliability(added)
        elif reliability and arguments.reliability == "likelihood":
            if rate is None:
                raise ValueError("--reliability likelihood: no model is there to rate the passages")
            added = rate(added)
    return added, {"distractors": k, **distractor_report(added, k)}


def training_questions(
    data: Data, arguments: SFTArguments, method: Method, seed: int, rate: "Rater | None" = None
) -> tuple["Dataset", dict[str, Any] | None]:
    """The training questions of an arm, by `with_passages`."""
    k, _ = distractor_counts(arguments, method)
    return with_passages(
        data.train,
        k,
        data.train_corpus,
        arguments,
        seed=seed,
        gold_probability=method.gold_probability,
        reliability=uses_reliability(arguments, method),
        rate=rate,
    )


def evaluation_questions(
    data: Data, arguments: SFTArguments, method: Method, rate: "Rater | None" = None
) -> dict[int, tuple["Dataset", dict[str, Any] | None]]:
    """The evaluation questions of an arm by number of distractors, each by `with_passages`; they are no seed's own."""
    _, counts = distractor_counts(arguments, method)
    told = uses_reliability(arguments, method)
    return {
        k: with_passages(
            data.evaluation, k, data.evaluation_corpus, arguments, seed=EVALUATION_SEED, reliability=told, rate=rate
        )
        for k in counts
    }


def uses_reliability(arguments: SFTArguments, method: Method) -> bool:
    """Whether the arm's model is told how reliable its passages are: a plain one cannot be."""
    return arguments.reliability is not None and method.patched
