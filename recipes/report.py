"""`bft-bench report`: tables, figures and what may be claimed, from the runs of a grid."""

import csv
import io
import shlex
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from .class_tables import Classes
from .command import OneLineParser, UsageError, without_flag
from .comparison import ENOUGH_SEEDS, Comparison, Estimate, describe, lower_is_better
from .grid import BOOKKEEPING, LOOKED_AT, SEED, flags_of
from .intervals import METHOD, SAMPLES, written
from .records import Record, divide, read_all, write_files


def main(argv: Sequence[str]) -> int:
    """Run `bft-bench report`; UsageErrors are the caller's to print."""
    options = _parser().parse_args(argv)
    records = read_all(options.roots)
    for name in options.axis:
        records = [part for record in records for part in divide(record, name, whole=False)]
    for name in options.by:
        records = [part for record in records for part in divide(record, name, whole=True)]
    comparison = Comparison(records, options.arms, options.baseline)
    metrics = options.metric or comparison.reported()
    unknown = [metric for metric in metrics if metric not in comparison.metrics()]
    if unknown or not metrics:
        known = ", ".join(comparison.metrics()) or "none"
        raise UsageError(
            f"not every run has {unknown[0] if unknown else 'a number'} for its questions (all have {known})"
        )
    report = Report(comparison, metrics, shlex.join(["bft-bench", "report", *without_flag(argv, "--out")]))
    text = report.markdown(figures=options.out is not None)
    if options.out is None:
        print(text, end="")
        return 0
    from .figures import draw

    files = {"report.md": text.encode(), **{name: table.encode() for name, table in report.tables().items()}}
    write_files(Path(options.out), files | draw(report))
    print(f"Written to {options.out}: report.md, {', '.join(report.tables())}, {', '.join(report.figure_names())}")
    return 0


def _parser() -> Any:
    parser = OneLineParser(
        prog="bft-bench report",
        allow_abbrev=False,
        description="Means, paired differences and changes over an axis with 95 % intervals, from folders of runs or packed runs. "
        "Markdown on stdout, or with --out a folder with report.md, CSV and figures (SVG).",
    )
    parser.add_argument("roots", nargs="+", metavar="ROOT", help="Folders of runs' folders, or of packed runs.")
    parser.add_argument("--baseline", metavar="ARM", help="Compare every arm with this one.")
    parser.add_argument("--arms", nargs="+", default=[], metavar="ARM", help="Only these, in this order. Default: all.")
    parser.add_argument(
        "--metric",
        nargs="+",
        metavar="NAME",
        help="Numbers a question has. Default: those that results.json has the mean of.",
    )
    parser.add_argument(
        "--axis", nargs="+", default=[], metavar="NAME", help="A number or label a question has that is an axis."
    )
    parser.add_argument("--by", nargs="+", default=[], metavar="NAME", help="The same, and all questions together too.")
    parser.add_argument("--out", metavar="FOLDER", help="Where files go. Default: Markdown on stdout, no figures.")
    return parser


class Report:
    """Everything computed once, and written in several forms.

    Args:
        comparison: The runs.
        metrics: What to report of them, in this order.
        command: What is typed to make this report again.
    """

    def __init__(self, comparison: Comparison, metrics: Sequence[str], command: str) -> None:
        self.comparison, self.metrics, self.command = comparison, list(metrics), command
        self.means = {metric: comparison.means(metric) for metric in metrics}
        self.compared = comparison.baseline is not None and len(comparison.arms) > 1
        self.differences = {metric: comparison.differences(metric) if self.compared else [] for metric in metrics}
        self.places = [(metric, axis) for metric in metrics for axis in comparison.numeric_axes()]
        self.changes = {place: comparison.changes(*place, against=False) for place in self.places}
        self.changed_differences = {
            place: comparison.changes(*place, against=True) if self.compared else [] for place in self.places
        }
        self.classes = Classes(comparison.records, comparison.arms)

    @cached_property
    def steps(self) -> dict[tuple[str, str], tuple[list[Estimate], list[Estimate]]]:
        """By metric and axis the changes from its lowest label to every other, and the same less the baseline's."""

        def over(metric: str, axis: str, against: bool) -> list[Estimate]:
            return self.comparison.changes(metric, axis, against=against, every=True)

        return {place: (over(*place, False), over(*place, True) if self.compared else []) for place in self.places}

    def markdown(self, *, figures: bool) -> str:
        """The report as Markdown.

        Args:
            figures: Refer to the files that `draw` makes.
        """
        parts = [
            f"    {self.command}",
            *self._runs(),
            METHOD.replace("bootstrap over", f"bootstrap ({SAMPLES:,} draws) over"),
        ]
        if len(self.comparison.seeds) < ENOUGH_SEEDS:
            parts.append(
                f"**{_count(len(self.comparison.seeds), 'seed')}: fewer than {ENOUGH_SEEDS}, so nothing here is a claim.**"
            )
        if missing := self.comparison.missing():
            parts.append(f"Not there: {'; '.join(missing)}. Differences are over the seeds that both arms have.")
        for metric in self.metrics:
            parts += self._metric(metric, figures)
        for name in self.classes.names:
            head, *lines = self.classes.table(name)
            parts += [
                f"## {name} by token class",
                self._above(self.comparison.seeds, None),
                "\n".join(map(_row, [head, ["---"] * len(head), *lines])),
                "Mean over runs (lowest to highest).",
            ]
            if figures and name in self.classes.drawn:
                parts.append(f"![{name} by token class]({name}_by_token_class.svg)")
        return "\n\n".join(parts) + "\n"

    def _metric(self, metric: str, figures: bool) -> list[str]:
        better = "lower" if lower_is_better(metric) else "higher"
        parts = [f"## {metric} ({better} is better)", self._above_all(self.means[metric]), self._mean_table(metric)]
        baseline = self.comparison.baseline
        if self.differences[metric]:
            parts += [
                f"### {metric}: less {baseline}, paired by seed and question",
                self._above_all(self.differences[metric]),
                _difference_table(self.differences[metric], metric),
            ]
        for axis in self.comparison.numeric_axes():
            low, high = self.comparison.ends(axis)
            parts += [
                f"### {metric}: change from {axis}={low} to {axis}={high}",
                self._above_all(self.changes[metric, axis]),
            ]
            parts.append(_estimate_table(self.changes[metric, axis]))
            if self.changed_differences[metric, axis]:
                parts += [
                    f"The same, less {baseline}'s:",
                    _difference_table(self.changed_differences[metric, axis], metric),
                ]
        if figures:
            parts += [
                f"![{name[:-4].replace('_', ' ')}]({name})"
                for name in self.figure_names()
                if name.startswith((f"{metric}_over", f"{metric}_change_over"))
            ]
        return parts

    def figure_names(self) -> list[str]:
        """Names of the figures, in the order in which they are drawn."""
        over = []
        for metric, axis in self.places:
            over += [f"{metric}_over_{axis}.svg"]
            over += [f"{metric}_change_over_{axis}.svg"] if self.steps[metric, axis][0] else []
        return over + [f"{name}_by_token_class.svg" for name in self.classes.drawn]

    def tables(self) -> dict[str, str]:
        """CSV by file name: every number of the report, unrounded."""
        found = {
            "means.csv": _csv(
                self.comparison.axes, [(metric, "", e) for metric in self.metrics for e in self.means[metric]]
            )
        }
        if any(self.differences.values()):
            rows = [(metric, "", e) for metric in self.metrics for e in self.differences[metric]]
            found["differences.csv"] = _csv(self.comparison.axes, rows)
        if self.changes:
            rows = [(metric, axis, e) for (metric, axis), values in self.changes.items() for e in values]
            found["changes.csv"] = _csv(self.comparison.axes, rows)
        if any(self.changed_differences.values()):
            rows = [(metric, axis, e) for (metric, axis), values in self.changed_differences.items() for e in values]
            found["changes_less_baseline.csv"] = _csv(self.comparison.axes, rows)
        for name, against in (("changes_to_each.csv", 0), ("changes_to_each_less_baseline.csv", 1)):
            rows = [(metric, axis, e) for (metric, axis), both in self.steps.items() for e in both[against]]
            found |= {name: _csv(self.comparison.axes, rows)} if rows else {}
        if self.classes.runs:
            text = io.StringIO()
            csv.writer(text, lineterminator="\n").writerows(self.classes.rows(self.comparison.axes))
            found["token_classes.csv"] = text.getvalue()
        return found

    def _runs(self) -> list[str]:
        """What was run: the flags that all runs share, and each arm's own."""
        records = list({record.name: record for record in self.comparison.records}.values())
        flags = [_shown_flags(record, self.comparison.axes) for record in records]
        shared = {name: value for name, value in flags[0].items() if all(other.get(name) == value for other in flags)}
        program = str(records[0].results.get("command", "")).split(" ")[0] or "a recipe"
        words = [program, *(f"--{name} {' '.join(value)}" for name, value in shared.items())]
        mixed = []
        lines = ["| arm | flags | seeds |", "| --- | --- | --- |"]
        for arm in self.comparison.arms:
            own = [(r, f) for r, f in zip(records, flags, strict=True) if str(r.axes.get("arm", "all")) == arm]
            texts = {" ".join(f"--{n} {' '.join(v)}" for n, v in f.items() if n not in shared) for _, f in own}
            mixed += [arm] if len(texts) > 1 else []
            seeds = sorted({str(record.seed) for record, _ in own}, key=lambda text: (len(text), text))
            lines.append(f"| {arm} | `{'` or `'.join(sorted(texts)) or ' '}` | {', '.join(seeds)} |")
        parts = [f"{_count(len(records), 'run')} of:", f"    {' '.join(words)}", "\n".join(lines)]
        if mixed:
            parts.append(
                f"**Runs of one arm have different flags ({', '.join(mixed)}): what differs by seed may be these.**"
            )
        versions = {tuple(sorted((record.results.get("versions") or {}).items())) for record in records}
        devices = {str(record.results.get("device")) for record in records}
        if len(versions) > 1 or len(devices) > 1:
            what = " and ".join(["versions of libraries"] * (len(versions) > 1) + ["devices"] * (len(devices) > 1))
            parts.append(f"The runs were made with different {what}.")
        return parts

    def _above_all(self, estimates: Sequence[Estimate]) -> str:
        known = [estimate for estimate in estimates if estimate.interval is not None]
        counts = sorted({estimate.interval.questions for estimate in known if estimate.interval})
        seeds = {seed for estimate in known for seed in estimate.seeds}
        return self._above([seed for seed in self.comparison.seeds if seed in seeds], counts)

    def _above(self, seeds: Sequence[Any], counts: Sequence[int] | None) -> str:
        n = f"; n = {' or '.join(f'{count:,}' for count in counts)}" if counts else ""
        return f"`{self.command}`; {SEED}s {', '.join(map(str, seeds)) or 'none'}{n}"

    def _mean_table(self, metric: str) -> str:
        conditions = self.comparison.conditions
        most = max(len(estimate.seeds) for estimate in self.means[metric])
        lines = [_row(["arm", *map(describe, conditions)]), _row(["---"] * (1 + len(conditions)))]
        by_place = {(estimate.arm, estimate.condition): estimate for estimate in self.means[metric]}
        for arm in self.comparison.arms:
            cells = [by_place[arm, condition] for condition in conditions]
            lines.append(_row([arm, *(_cell(estimate, most) for estimate in cells)]))
        return "\n".join(lines)


def _cell(estimate: Estimate, most: int) -> str:
    if estimate.interval is None:
        return f"({estimate.note})"
    few = f" ({_count(len(estimate.seeds), 'seed')})" if len(estimate.seeds) < most else ""
    return _interval(estimate, signed=False) + few


def _interval(estimate: Estimate, *, signed: bool) -> str:
    interval = estimate.interval
    assert interval is not None
    return written(interval.mean, interval.low, interval.high, signed=signed)


def _difference_table(estimates: Sequence[Estimate], metric: str) -> str:
    head = ["condition", "arm", "difference", "excludes zero", "p", "p (Holm)", "seeds", "n", "verdict"]
    lines = [_row(head), _row(["---"] * len(head))]
    for estimate in estimates:
        place = [describe(estimate.condition), estimate.arm]
        if estimate.interval is None:
            lines.append(_row([*place, f"({estimate.note})", *[""] * 6]))
            continue
        interval = estimate.interval
        lines.append(
            _row(
                [
                    *place,
                    _interval(estimate, signed=True),
                    "yes" if interval.excludes_zero else "no",
                    _p(interval.p),
                    _p(estimate.p_holm or 0.0),
                    str(interval.seeds),
                    f"{interval.questions:,}",
                    verdict(estimate, metric),
                ]
            )
        )
    return "\n".join(lines)


def verdict(estimate: Estimate, metric: str) -> str:
    """What a comparison says: "better", "worse" or "undecided", and whether so many seeds make it a claim."""
    assert estimate.interval is not None
    less = estimate.interval.mean < 0
    word = (
        ("better" if less == lower_is_better(metric) else "worse") if estimate.interval.excludes_zero else "undecided"
    )
    if estimate.interval.seeds < ENOUGH_SEEDS:
        return f"{word}, no claim ({_count(estimate.interval.seeds, 'seed')})"
    if estimate.interval.excludes_zero and estimate.p_holm is not None and estimate.p_holm > 0.05:
        return f"{word}, not after Holm"
    return word


def _estimate_table(estimates: Sequence[Estimate]) -> str:
    lines = [_row(["condition", "arm", "change", "seeds", "n"]), _row(["---"] * 5)]
    for estimate in estimates:
        interval = estimate.interval
        change = _interval(estimate, signed=True) if interval else f"({estimate.note})"
        counts = [str(interval.seeds), f"{interval.questions:,}"] if interval else ["", ""]
        lines.append(_row([describe(estimate.condition), estimate.arm, change, *counts]))
    return "\n".join(lines)


def _shown_flags(record: Record, axes: Sequence[str]) -> dict[str, list[str]]:
    hidden = {*BOOKKEEPING, *LOOKED_AT, *axes, SEED}
    command = str(record.results.get("command", ""))
    return {name: words for name, words in flags_of(command).items() if name not in hidden}


def _csv(axes: Sequence[str], rows: Sequence[tuple[str, str, Estimate]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["metric", "over", *axes, "arm", "mean", "low", "high", "p", "p_holm", "seeds", "n", "note"])
    for metric, over, estimate in rows:
        labels = dict(estimate.condition)
        interval = estimate.interval
        numbers = (
            [f"{v:.6g}" for v in (interval.mean, interval.low, interval.high, interval.p)] if interval else [""] * 4
        )
        corrected = "" if estimate.p_holm is None else f"{estimate.p_holm:.6g}"
        counts = [interval.seeds, interval.questions] if interval else [0, 0]
        place = [metric, over, *(labels.get(axis, "") for axis in axes), estimate.arm]
        writer.writerow([*place, *numbers, corrected, *counts, estimate.note])
    return text.getvalue()


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _p(value: float) -> str:
    return "< .001" if value < 0.001 else f"{value:.3f}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
