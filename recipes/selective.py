"""Selective answering: which of a model's answers to withhold, and whether the filter's precision says it better."""

import argparse
import hashlib
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .command import OneLineParser, UsageError
from .detection import Comparison, Run, auroc, compare
from .intervals import hierarchical_bootstrap, written

BASELINE = "log_probability"
UNCALIBRATED = "probability_as_it_is"
FOLDS = 5
BINS = 10
COVERAGES = tuple(round(0.1 * step, 1) for step in range(1, 11))
RIGHT_F1 = 0.5

# How much a score trusts an answer. The directions are fixed here, before any data: a likely answer is trusted, a spread-out
# prediction is not, and more precision or more gain is more trust. An AUROC below one half stays below.
SCORES: dict[str, Callable[[Mapping[str, Any]], float]] = {
    "log_probability": lambda row: row["log_probability"],
    "log_probability_per_token": lambda row: row["log_probability"] / row["answer_tokens"],
    "token_entropy": lambda row: -row["token_entropy"],
    "final_precision": lambda row: row["final_precision"],
    "mean_gain": lambda row: row["mean_gain"],
}
FILTER_SCORES = ("final_precision", "mean_gain")


@dataclass(frozen=True)
class Answers:
    """The answers of one run.

    Attributes:
        source: Their file.
        ids: (answer,), of the questions.
        trust: (answer,) by score, higher is more trusted.
        wrong: (answer,) bool.
    """

    source: str
    ids: np.ndarray
    trust: dict[str, np.ndarray]
    wrong: np.ndarray


def aurc(suspicion: np.ndarray, wrong: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Area under the risk-coverage curve: the mean, over coverages 1/n ... 1, of the share of wrong answers among those given.

    The least suspicious answers are given first; answers with one and the same score come in every order alike.

    Args:
        suspicion: (answer,).
        wrong: (answer,) bool.
        weights: (resample, answer), how many times each counts, integers.

    Returns:
        (resample,); lower is better, and the share of wrong answers is what no information gives.
    """
    return np.array([selective_risk(*_repeated(suspicion, wrong, counts)).mean() for counts in weights])


def selective_risk(suspicion: np.ndarray, wrong: np.ndarray) -> np.ndarray:
    """The share of wrong answers among the 1, 2, ... n least suspicious ones."""
    order = np.argsort(suspicion, kind="stable")
    _, group = np.unique(suspicion[order], return_inverse=True)
    risk = np.bincount(group, wrong[order]) / np.bincount(group)
    return np.cumsum(risk[group]) / np.arange(1, len(order) + 1)


def _repeated(suspicion: np.ndarray, wrong: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    which = np.repeat(np.arange(len(wrong)), counts.astype(np.int64))
    return suspicion[which], wrong[which]


def expected_calibration_error(probability: np.ndarray, wrong: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Mean distance between the predicted and the actual share of wrong answers, over ten bins of equal width.

    Of a few hundred answers it is biased upwards: compare scores on the same answers alone.

    Args:
        probability: (answer,), predicted to be wrong.
        wrong: (answer,) bool.
        weights: (resample, answer).

    Returns:
        (resample,).
    """
    place = np.minimum((probability * BINS).astype(np.int64), BINS - 1)
    bins = np.eye(BINS)[place]
    distance = np.abs((weights * (wrong - probability)) @ bins)
    return distance.sum(1) / weights.sum(1)


def calibrated(suspicion: np.ndarray, wrong: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """The probability that each answer is wrong, by a logistic regression on its score that was fitted on other questions.

    Args:
        suspicion: (answer,).
        wrong: (answer,) bool.
        ids: (answer,); a question is in one fold whatever the run.

    Returns:
        (answer,).
    """
    from sklearn.linear_model import LogisticRegression

    fold = (
        np.array([int.from_bytes(hashlib.blake2b(str(i).encode(), digest_size=8).digest(), "little") for i in ids])
        % FOLDS
    )
    scaled = (suspicion - suspicion.mean()) / (suspicion.std() or 1.0)
    result = np.full(len(wrong), np.nan)
    for number in range(FOLDS):
        own, others = fold == number, fold != number
        if own.any():
            if others.any() and 0 < wrong[others].sum() < others.sum():
                model = LogisticRegression().fit(scaled[others, None], wrong[others])
                result[own] = model.predict_proba(scaled[own, None])[:, 1]
            else:
                result[own] = wrong[others].mean() if others.any() else 0.5
    return result


def read_answers(path: Path, correct: str = "exact_match") -> Answers:
    """Read the answers of a run of `bft-sft --record_uncertainty`.

    Args:
        path: predictions.jsonl, or the folder it is in.
        correct: "exact_match", or "f1" for those with an F1 of a half or more.

    Raises:
        UsageError: There is no such file, it is none, or it holds no uncertainties.
    """
    file = path / "predictions.jsonl" if path.is_dir() else path
    try:
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        answered = [row for row in rows if row["prediction"] is not None]
    except FileNotFoundError:
        raise UsageError(f"{file}: no such file") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError):
        raise UsageError(f"{file} is not a predictions.jsonl of bft-sft") from None
    scored = [row for row in answered if row.get(BASELINE) is not None and row.get("answer_tokens")]
    if len(scored) < len(answered) or not scored:
        raise UsageError(
            f"{file}: {len(scored)} of {len(answered)} answers have an uncertainty: run bft-sft with --record_uncertainty"
        )
    filtered = all(row.get(name) is not None for row in scored for name in FILTER_SCORES)
    names = [name for name in SCORES if filtered or name not in FILTER_SCORES]
    wrong = np.array([row["exact_match"] == 0 if correct == "exact_match" else row["f1"] < RIGHT_F1 for row in scored])
    if wrong.all() or not wrong.any():
        raise UsageError(
            f"{file}: {int(wrong.sum())} of {len(wrong)} answers are wrong: there is nothing to tell apart"
        )
    return Answers(
        source=str(path),
        ids=np.array([str(row["id"]) for row in scored], dtype=object),
        trust={name: np.array([SCORES[name](row) for row in scored], dtype=np.float64) for name in names},
        wrong=wrong,
    )


def measure(runs: Sequence[Answers], resamples: int = 1000) -> dict[str, Any]:
    """Compare what the scores say about which answers are wrong.

    The share of wrong answers is a mean over runs and questions and has the interval of one (`recipes.intervals`). AUROC and
    AURC are none: what an answer adds to them depends on which others are there, so that there is no table of runs by questions
    to be taken apart. They have percentiles of means that are computed anew on each draw, which with few runs are too narrow.

    Args:
        runs: Seeds of one arm, plain or patched; their scores must be the same.
        resamples: Of the bootstrap over questions, and over runs where there are several.

    Returns:
        "n", answers in all; "risk", the share of wrong ones, and "risk_interval", [low, high], or None where the runs did not
        answer the same questions once each; "best_aurc", what telling them apart perfectly would give; "scores",
        for each: "auroc" of wrong answers and "aurc", [value, low, high]; "ece" (after a calibration on other questions),
        a number; for all but the log-probability "..._minus_log_probability", [value, low, high]; and "curve", the risk at
        each of `COVERAGES`.

    Raises:
        ValueError: Runs with different scores.
    """
    ranked = [Run({n: -t for n, t in run.trust.items()}, run.wrong, run.ids) for run in runs]
    probable = []
    for run, answers in zip(ranked, runs, strict=True):
        chances = {name: calibrated(values, run.wrong, run.groups) for name, values in run.scores.items()}
        chances[UNCALIBRATED] = -np.expm1(answers.trust[BASELINE])
        probable.append(Run(chances, run.wrong, run.groups))
    order = compare(ranked, baseline=BASELINE, metrics={"auroc": auroc, "aurc": aurc}, resamples=resamples)
    error = compare(probable, baseline=BASELINE, metrics={"ece": expected_calibration_error}, resamples=resamples)
    scores = {name: _entry(name, order, error) for name in error.values}
    for name in order.values:
        curves = [selective_risk(run.scores[name], run.wrong) for run in ranked]
        scores[name]["curve"] = [float(np.mean([_at(curve, share) for curve in curves])) for share in COVERAGES]
    return {
        "n": sum(len(run.wrong) for run in runs),
        "risk": float(np.mean([run.wrong.mean() for run in runs])),
        "risk_interval": _risk_interval(runs),
        "best_aurc": float(np.mean([selective_risk(run.wrong.astype(float), run.wrong).mean() for run in runs])),
        "scores": scores,
    }


def _risk_interval(runs: Sequence[Answers]) -> list[float] | None:
    tables = [dict(zip(run.ids, run.wrong, strict=True)) for run in runs]
    if any(
        len(table) < len(run.ids) or table.keys() != tables[0].keys() for run, table in zip(runs, tables, strict=True)
    ):
        return None
    interval = hierarchical_bootstrap(np.array([[float(table[i]) for i in tables[0]] for table in tables]))
    return [interval.low, interval.high]


def _entry(name: str, *comparisons: Comparison) -> dict[str, Any]:
    entry: dict[str, Any] = {}
    for comparison in comparisons:
        for metric, estimate in comparison.values.get(name, {}).items():
            # An error of calibration is a mean of absolute values: every resample has more of it, and no interval would hold it.
            entry[metric] = estimate.value if metric == "ece" else estimate.as_list()
        for metric, estimate in comparison.differences.get(name, {}).items():
            entry[f"{metric}_minus_{BASELINE}"] = estimate.as_list()
    return entry


def _at(curve: np.ndarray, coverage: float) -> float:
    return float(curve[max(1, round(coverage * len(curve))) - 1])


def parser() -> argparse.ArgumentParser:
    """The flags of `bft-audit selective`."""
    result = OneLineParser(
        prog="bft-audit selective",
        allow_abbrev=False,
        description="How well a model's uncertainties tell its wrong answers from its right ones: risk-coverage, AUROC, ECE.",
    )
    add = result.add_argument
    add(
        "predictions",
        nargs="+",
        metavar="PREDICTIONS",
        help="predictions.jsonl, or its folder; several: seeds of one arm.",
    )
    add(
        "--correct",
        choices=("exact_match", "f1"),
        default="exact_match",
        help="When an answer is right; f1: .5 or more.",
    )
    add("--resamples", type=int, default=1000, metavar="N", help="Of the bootstrap. Default 1000.")
    add("--output", metavar="FILE", help="Write the numbers as JSON.")
    add("--markdown", action="store_true", help="The table in Markdown.")
    return result


def run(argv: Sequence[str]) -> None:
    """Run the subcommand.

    Raises:
        UsageError: It cannot run as given.
    """
    from .results import write_json

    options = parser().parse_args(argv)
    if options.resamples < 1:
        raise UsageError(f"--resamples must be a positive integer, got {options.resamples}")
    runs = [read_answers(Path(path).expanduser(), options.correct) for path in options.predictions]
    if options.output and not Path(options.output).absolute().parent.is_dir():
        raise UsageError(f"--output {options.output}: there is no such folder")
    try:
        found = measure(runs, options.resamples)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if options.output:
        made = {"command": shlex.join(["bft-audit", "selective", *argv]), "resamples": options.resamples}
        answers = {"files": [run.source for run in runs], "correct": options.correct}
        write_json(Path(options.output), {**made, **answers, **found})
    report(found, markdown=options.markdown)


HEADINGS = {
    "AUROC of wrong answers": "auroc",
    "minus log p": f"auroc_minus_{BASELINE}",
    "AURC (lower is better)": "aurc",
    "minus log p ": f"aurc_minus_{BASELINE}",
    "ECE": "ece",
}


def report(found: Mapping[str, Any], *, markdown: bool = False) -> None:
    """Print the table, the risk at some coverages, and what follows from them."""
    scores = found["scores"]
    cells = {
        name: [_cell(row.get(key)) for key in HEADINGS.values()]
        + [" ".join(f"{row['curve'][COVERAGES.index(c)]:.2f}" for c in (0.2, 0.5, 0.8)) if "curve" in row else ""]
        for name, row in scores.items()
    }
    headings = ["score", *HEADINGS, "risk at .2 .5 .8"]
    known = found["risk_interval"]
    risk = written(found["risk"], *known) if known else f"{found['risk']:.3f}"
    title = (
        f"{found['n']} answers, {risk} wrong; AURC without information {found['risk']:.3f}, at best "
        f"{found['best_aurc']:.3f}"
    )
    if markdown:
        lines = [f"{title}:", "", f"| {' | '.join(headings)} |", "|" + " --- |" * len(headings)]
        print("\n".join([*lines, *(f"| {name} | {' | '.join(row)} |" for name, row in cells.items()), ""]))
    else:
        from rich.console import Console
        from rich.table import Table

        table = Table(*headings, title=title, title_justify="left")
        for name, row in cells.items():
            table.add_row(name, *row)
        Console(width=max(140, Console().width)).print(table)
    better = [name for name, row in scores.items() if row.get(f"auroc_minus_{BASELINE}", [0.0, 0.0, 0.0])[1] > 0]
    print(
        f"Better than the log-probability at telling wrong answers, by an interval above zero: {', '.join(better)}."
        if better
        else "No score tells wrong answers better than the answer's log-probability by an interval above zero."
    )


def _cell(estimate: Sequence[float] | float | None) -> str:
    if isinstance(estimate, float):
        return f"{estimate:.3f}"
    return "" if estimate is None else written(*estimate)
