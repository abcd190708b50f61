"""`bft-audit`: rank the rows and tokens of a training set by how wrong their labels look to a model trained on it.

The rows that a run of `bft-sft` was trained on:

    bft-audit --model_name_or_path outputs/run --dataset train.jsonl --output_dir outputs/audit

How well that works, on rows into which 10 % wrong labels are put:

    bft-audit --model_name_or_path outputs/run --dataset train.jsonl --noise 0.1 --output_dir outputs/check

Several such checks (seeds) put together, with intervals:

    bft-audit compare outputs/check outputs/check-2 outputs/check-3

Which answers of a model to withhold, from `bft-sft --record_uncertainty`:

    bft-audit selective outputs/run/predictions.jsonl

Into `--output_dir` go rows and tokens, ranked, as CSV and Parquet, audit.json and audit.html, a page that needs no network.
"""

import argparse
import math
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .arguments import looks_like_file
from .command import OneLineParser, UsageError, console_script, one_line, say
from .intervals import written
from .suspicion import AGGREGATES, COMBINED, DEFAULT_AGGREGATE, DEFAULT_SCORE, SUSPICIONS

AUDIT_FORMAT = 1
SUMMARY = {"loss": "the plain loss, since no score was found to do better (docs/audit.md)"}


def parser() -> argparse.ArgumentParser:
    """The flags of `bft-audit` without a subcommand."""
    result = OneLineParser(
        prog="bft-audit",
        usage="bft-audit --model_name_or_path MODEL --dataset FILE [--FLAG VALUE ...]\n"
        "       bft-audit compare DIR [DIR ...]\n       bft-audit selective PREDICTIONS [PREDICTIONS ...]",
        allow_abbrev=False,
        description="Rank the rows and tokens of a training set by how wrong their labels look to a model trained on it.",
    )
    add = result.add_argument
    add("--model_name_or_path", required=True, metavar="MODEL", help="A Hub id or folder: a model or a PEFT adapter.")
    add("--base_model", metavar="MODEL", help="The adapter's base. Default: what the adapter's own files name.")
    add("--dataset", required=True, help="Questions, as bft-sft reads them: SQuAD JSON, JSONL, .gz, a Hub id, or demo.")
    add("--split", help="train, validation or all. Default: all of a file, train of a data set of the Hub or demo.")
    add("--train_examples", type=int, metavar="N", help="Only this many, those that bft-sft draws with --seed.")
    add("--max_context_chars", type=int, metavar="N", help="Leave out questions whose passage is longer.")
    add("--max_length", type=int, metavar="N", help="Most tokens of a row; longer passages are cut as in training.")
    add("--seed", type=int, default=42, metavar="N", help="Of the sample and of --noise, as in bft-sft. Default 42.")
    add("--output_dir", metavar="DIR", help="Default outputs/audit-<model>.")
    add("--overwrite", action="store_true", help="Replace an earlier audit's files in --output_dir.")
    add(
        "--score",
        default=DEFAULT_SCORE,
        choices=[*SUSPICIONS, COMBINED],
        metavar="SCORE",
        help=f"What ranks: {', '.join([*SUSPICIONS, COMBINED])}. Default {DEFAULT_SCORE}, which docs/audit.md measures.",
    )
    add(
        "--row_score",
        default=DEFAULT_AGGREGATE,
        choices=AGGREGATES,
        metavar="HOW",
        help=f"A row's score: the {' or '.join(AGGREGATES)} of its tokens'. Default {DEFAULT_AGGREGATE}.",
    )
    add("--top", type=int, default=200, metavar="N", help="Rows on the page; the tables hold all. Default 200.")
    check = result.add_argument_group("checking against known corruption")
    add = check.add_argument
    add(
        "--noise",
        type=float,
        nargs="+",
        default=[],
        metavar="RATE",
        help="Corrupt this share of the labels, as bft-sft does. Several rates or kinds: a folder for each, one pass for all.",
    )
    add(
        "--noise_kind",
        nargs="+",
        default=["uniform"],
        metavar="KIND",
        help="As in bft-sft, or several. Default uniform.",
    )
    add(
        "--noise_inputs",
        action="store_true",
        help="Put the wrong tokens into the inputs too, as a wrong text would be.",
    )
    add("--distractors", type=int, default=0, metavar="K", help="Put so many passages without the answer beside each.")
    add("--distractor_source", default="bm25", metavar="SOURCE", help="bm25, random or ctxs. Default bm25.")
    add("--gold_position", default="random", metavar="PLACE", help="first, middle, last or random. Default random.")
    add("--resamples", type=int, default=1000, metavar="N", help="Of the bootstrap over rows. Default 1000.")
    known = result.add_argument_group(f"the score {COMBINED}")
    add = known.add_argument
    add(
        "--calibration_examples", type=int, default=100, metavar="N", help="Rows it learns its weights on. Default 100."
    )
    add(
        "--calibration_noise",
        type=float,
        default=0.1,
        metavar="RATE",
        help="Share of their labels corrupted. Default .1.",
    )
    device = result.add_argument_group("device")
    add = device.add_argument
    add("--batch_size", type=int, default=16, metavar="N", help="Rows at once. Default 16.")
    add("--bf16", action=argparse.BooleanOptionalAction, help="bfloat16 autocast. Default: on a GPU that has it.")
    add("--use_cpu", action="store_true", help="Leave the accelerator alone.")
    add("--trust_remote_code", action="store_true", help="Run code that the model's repository brings.")
    return result


@console_script("bft-audit", extra="audit")
def main(argv: list[str]) -> None:
    """Run the command on these words, the program's name left out."""
    if argv[:1] == ["selective"]:
        from .selective import run as run_selective

        run_selective(argv[1:])
    elif argv[:1] == ["compare"]:
        _compare(compare_parser().parse_args(argv[1:]))
    else:
        _run(_checked(parser().parse_args(argv)), shlex.join(["bft-audit", *argv]))


def _checked(options: argparse.Namespace) -> argparse.Namespace:
    """Refuse what can be refused before anything heavy is imported."""
    for name in (
        "train_examples",
        "max_context_chars",
        "max_length",
        "top",
        "resamples",
        "calibration_examples",
        "batch_size",
    ):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name} must be a positive integer, got {value}")
    for name, values in {"noise": options.noise, "calibration_noise": [options.calibration_noise]}.items():
        for value in values:
            if not (math.isfinite(value) and 0.0 < value <= 1.0):
                raise UsageError(f"--{name} must be a number in (0, 1], got {value}")
    for name in ("noise", "noise_kind"):
        values = getattr(options, name)
        if len(set(values)) < len(values):
            raise UsageError(f"--{name} names {max(values, key=values.count)} twice")
    if options.distractors < 0:
        raise UsageError(f"--distractors must be 0 or a positive integer, got {options.distractors}")
    if options.noise_inputs and not options.noise:
        raise UsageError("--noise_inputs puts nothing into the inputs without --noise RATE")
    options.model_name_or_path = os.path.expanduser(options.model_name_or_path)
    path = Path(options.model_name_or_path)
    if not path.is_dir() and (path.exists() or looks_like_file(options.model_name_or_path)):
        raise UsageError(f"--model_name_or_path {path}: no such folder (nor can it be a Hub id)")
    dataset = Path(options.dataset).expanduser()
    if not dataset.exists() and looks_like_file(options.dataset):
        raise UsageError(f"--dataset {options.dataset}: no such file")
    if options.split is None:
        options.split = "all" if dataset.is_file() else "train"
    options.output_dir = Path(options.output_dir or Path("outputs", f"audit-{path.name}")).expanduser()
    if options.output_dir.exists() and not options.output_dir.is_dir():
        raise UsageError(f"--output_dir {options.output_dir} is a file: give a folder")
    if options.output_dir.is_dir() and any(options.output_dir.iterdir()) and not options.overwrite:
        raise UsageError(f"--output_dir {options.output_dir} exists and is not empty: give another one, or --overwrite")
    return options


def _run(options: argparse.Namespace, command: str) -> None:
    start = time.perf_counter()
    from . import audit_tables as tables
    from .loading import load_trained
    from .results import library_versions

    say(f"Loading {options.model_name_or_path}")
    try:
        model, tokenizer = load_trained(
            options.model_name_or_path, base_model=options.base_model, trust_remote_code=options.trust_remote_code
        )
        prepared = tables.prepare(options, tokenizer)
        scorer = tables.Scorer(model, tokenizer, options)
        scored, passages = scorer([rows for some in prepared for rows in (some.tokenized, some.copies)])
        if scored[0].empty:
            raise UsageError(f"{options.dataset}: no row has a token that is trained")
        audits: list[tuple[tables.Rows, Any, dict[str, Any]]] = []
        for rows, tokens, known in zip(prepared, scored[::2], scored[1::2], strict=True):
            weights = tables.add_suspicions(tokens, known, rows, scorer.vocab_size, options)
            found = tables.detection([tokens], options.resamples) if rows.known else None
            noise = tables.noise_summary(tokens, rows, options) if rows.known else None
            audits.append((rows, tokens, {"noise": noise, "combined_weights": weights, "detection": found}))
        passages = passages if options.distractors else None
        distractors = None if passages is None else tables.passage_detection(passages, options.resamples)
    except (
        ValueError,
        OSError,
    ) as error:  # of the data, the model, the noise: each message is one line with its remedy
        raise UsageError(one_line(error)) from error
    for rows, tokens, findings in audits:
        folder = options.output_dir / rows.name if len(audits) > 1 else options.output_dir
        ranked = tables.rank_rows(tokens, rows, options)
        result = {
            "format": AUDIT_FORMAT,
            "command": command,
            "model": options.model_name_or_path,
            "dataset": options.dataset,
            "split": options.split,
            "seed": options.seed,
            "score": options.score,
            "row_score": options.row_score,
            "rows": len(ranked),
            "tokens": len(tokens),
            "truncated_rows": int(ranked["truncated"].sum()),
            **findings,
            "distractors": distractors,
            "device": str(model.device),
            "bf16": scorer.bf16,
            "versions": library_versions(),
            "seconds": round(time.perf_counter() - start, 1),
        }
        tables.write(folder, tokens, ranked, result, options, passages)
        if rows.known:
            print_detection(
                findings["detection"], f"{rows.name}: finding {findings['noise']['corrupted_tokens']} corrupted labels"
            )
            say(verdict(findings["detection"]))
        say(
            f"Ranked {len(ranked)} rows and {len(tokens)} tokens by {SUMMARY.get(options.score, options.score)}; the most "
            f"suspicious row is {ranked['id'].iloc[0]!r}\nWritten to {folder}"
        )
    if distractors:
        for name, row in distractors.items():
            say(f"Distractors among the passages by low {name}: AUROC {_cell(row['auroc'])}, chance is .5")


def print_detection(found: dict[str, Any], title: str) -> None:
    """How well each score finds the corruption, as tables on stdout, with 95 % intervals.

    Args:
        found: What `audit_tables.detection` gives.
        title: Above them.
    """
    from rich.console import Console
    from rich.table import Table

    for level, scores in found.items():
        table = Table("score", title=f"{title}: {level.replace('_', ' ')}", title_justify="left")
        for heading in ("AUROC", "minus loss", "average precision", "minus loss"):
            table.add_column(heading, justify="right")
        for name, row in sorted(scores.items(), key=lambda item: -item[1]["auroc"][0]):
            cells = [
                _cell(row.get(key))
                for key in ("auroc", "auroc_minus_loss", "average_precision", "average_precision_minus_loss")
            ]
            table.add_row(name, *cells)
        Console(width=max(100, Console().width)).print(table)


def _cell(estimate: Sequence[float] | None) -> str:
    return "" if estimate is None else written(*estimate)


def verdict(found: dict[str, Any]) -> str:
    """Whether anything found the corruption better than the plain loss, by an interval above zero."""
    gains = {
        f"{name} ({level.replace('_', ' ')}, {metric.replace('_', ' ')})": row[f"{metric}_minus_loss"][1]
        for level, scores in found.items()
        for name, row in scores.items()
        for metric in ("auroc", "average_precision")
        if f"{metric}_minus_loss" in row
    }
    better = [name for name, low in gains.items() if low > 0]
    if not better:
        return "No score found the corruption better than the plain loss by an interval above zero."
    return (
        f"Better than the plain loss, by an interval above zero: {', '.join(better)}. Of {len(gains)} comparisons, "
        "uncorrected: one in forty would be by chance."
    )


def compare_parser() -> argparse.ArgumentParser:
    """The flags of `bft-audit compare`."""
    result = OneLineParser(
        prog="bft-audit compare",
        allow_abbrev=False,
        description="Put checks (audits with --noise) of several seeds together: means over them, with intervals of a "
        "bootstrap over checks and rows.",
    )
    result.add_argument("folders", nargs="+", metavar="DIR", help="--output_dir of each check.")
    result.add_argument("--resamples", type=int, default=1000, metavar="N", help="Of the bootstrap. Default 1000.")
    result.add_argument("--markdown", action="store_true", help="Tables in Markdown.")
    return result


def _compare(options: argparse.Namespace) -> None:
    from . import audit_tables as tables

    if options.resamples < 1:
        raise UsageError(f"--resamples must be a positive integer, got {options.resamples}")
    runs = [tables.read_check(Path(folder)) for folder in options.folders]
    try:
        found = tables.detection(runs, options.resamples)
    except ValueError as error:
        raise UsageError(one_line(error)) from error
    title = f"{len(runs)} checks, {sum(int(run['corrupted'].sum()) for run in runs)} corrupted labels"
    if options.markdown:
        say(tables.markdown(found))
    else:
        print_detection(found, title)
    say(verdict(found))


if __name__ == "__main__":
    sys.exit(main())
