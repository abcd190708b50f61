"""Figures of a report as SVG, the same bytes from the same numbers."""

import io
from typing import TYPE_CHECKING, Any

from .class_tables import RATIO
from .comparison import Condition, Estimate, describe
from .intervals import Interval

if TYPE_CHECKING:
    from .class_tables import Classes
    from .report import Report

# Okabe and Ito's colours, told apart by colour-blind eyes too; the marker says it once more.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = "osD^v<>"
UNCHANGED = Interval(0.0, 0.0, 0.0, 1.0, 0, 0)
STYLE: dict[Any, Any] = {"svg.hashsalt": "bft", "svg.fonttype": "none", "font.size": 9, "axes.spines.top": False}


def draw(report: "Report") -> dict[str, bytes]:
    """Every figure of a report, by file name."""
    import matplotlib as mpl

    with mpl.rc_context(STYLE):
        figures = {}
        less = f"less {report.comparison.baseline}"
        for metric, axis in report.places:
            figures[f"{metric}_over_{axis}.svg"] = _over_axis(
                report,
                axis,
                {metric: report.means[metric], f"{metric} {less}": report.differences[metric]},
                change=False,
            )
            change, (steps, against) = f"{metric}: change", report.steps[metric, axis]
            if steps:
                figures[f"{metric}_change_over_{axis}.svg"] = _over_axis(
                    report, axis, {change: steps, f"{change} {less}'s": against}, change=True
                )
        for name in report.classes.drawn:
            figures[f"{name}_by_token_class.svg"] = _by_class(report.classes, name)
    return figures


def _over_axis(report: "Report", axis: str, sides: dict[str, list[Estimate]], *, change: bool) -> bytes:
    """A metric, or its change from the lowest label, over an axis: each arm's on the left, less the baseline's on the right.

    Args:
        report: With the runs.
        axis: Has numbers for labels.
        sides: By title the estimates, drawn with their intervals; a side without any is left out.
        change: They are changes, zero at the lowest label.
    """
    others: list[Condition] = list(
        dict.fromkeys(tuple(p for p in c if p[0] != axis) for c in report.comparison.conditions)
    )
    drawn = [(title, estimates) for title, estimates in sides.items() if estimates]
    figure, plots = subplots(len(others), len(drawn))
    low, high = (float(end) for end in report.comparison.ends(axis))
    arms = report.comparison.arms
    for row, rest in enumerate(others):
        for column, (title, estimates) in enumerate(drawn):
            plot = plots[row][column]
            for place, arm in enumerate(arms):
                points = [
                    (float(dict(e.condition)[axis]), e.interval)
                    for e in estimates
                    if e.arm == arm and e.interval is not None and {*rest} <= {*e.condition}
                ]
                if not points:
                    continue
                points = [(low, UNCHANGED)] * change + points
                # Side by side, or the intervals would hide each other.
                shift = (place - (len(arms) - 1) / 2) * (high - low) * 0.012
                means = [interval.mean for _, interval in points]
                ends = [[max(0.0, i.mean - i.low) for _, i in points], [max(0.0, i.high - i.mean) for _, i in points]]
                plot.errorbar(
                    [x + shift for x, _ in points],
                    means,
                    yerr=ends,
                    label=arm,
                    color=COLOURS[place % len(COLOURS)],
                    marker=MARKERS[place % len(MARKERS)],
                    markersize=4,
                    linewidth=1,
                    capsize=2,
                )
            if column or change:
                plot.axhline(0, color="0.6", linewidth=0.8, zorder=0)
            plot.set_xlabel(axis)
            plot.set_ylabel(title)
            if rest:
                plot.set_title(", ".join(f"{name}={label}" for name, label in rest), fontsize=9)
    plots[0][0].legend(frameon=False, fontsize=8)
    return svg(figure)


def _by_class(classes: "Classes", name: str) -> bytes:
    """A number by class of label: a bar an arm, its mean over runs, and a line from the lowest to the highest run."""
    kinds = [column for column in classes.columns(name) if column != RATIO]
    figure, plots = subplots(1, len(classes.conditions))
    width = 0.8 / len(classes.arms)
    for plot, condition in zip(plots[0], classes.conditions, strict=True):
        for place, arm in enumerate(classes.arms):
            shift = (place - (len(classes.arms) - 1) / 2) * width
            bars = [(x, classes.values(name, arm, condition, kind)) for x, kind in enumerate(kinds)]
            known = [(x + shift, values) for x, values in bars if values]
            means = [sum(values) / len(values) for _, values in known]
            plot.bar([x for x, _ in known], means, width, color=COLOURS[place % len(COLOURS)], label=arm)
            for x, values in known:
                plot.plot([x, x], [min(values), max(values)], color="0.4", linewidth=1)
        plot.set_xticks(range(len(kinds)), kinds)
        plot.set_title(describe(condition), fontsize=9)
    plots[0][0].set_ylabel(name)
    plots[0][0].legend(frameon=False, fontsize=8)
    return svg(figure)


def subplots(rows: int, columns: int, width: float = 4.2) -> tuple[Any, Any]:
    """A figure that no backend or window knows of, and its plots, each so many inches wide."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, 3.0 * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def svg(figure: Any) -> bytes:
    """A figure as SVG, the same bytes from the same numbers."""
    content = io.BytesIO()
    figure.savefig(content, format="svg", metadata={"Date": None, "Creator": None})
    return content.getvalue()
