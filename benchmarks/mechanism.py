"""What a trained recommender's filter does with rare and popular items: gain and learned tau by quartile, over the seeds of packed runs.

    python benchmarks/mechanism.py docs/results/rec-sports-sasrec docs/results/rec-instruments-hstu --output docs/images/rec-mechanism.svg

Means over seeds with intervals of 95 % by Student's t over seeds alone: items are the same in each. Numbers are what bft-rec writes
as `filter` into results.json, over the items of 2,048 test histories.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

QUARTILES = ("Q0", "Q1", "Q2", "Q3")


def read(folder: Path) -> list[dict[str, Any]]:
    """The `filter` of every packed run of a folder that has one."""
    runs = [json.loads(gzip.decompress(path.read_bytes())) for path in sorted(folder.glob("*.json.gz"))]
    return [run["results"]["filter"] for run in runs if run["results"].get("filter")]


def rows(filters: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """By name of a line (log tau, gain by layer) a table (seed, quartile)."""
    found = {"log tau": np.array([[run["log_initial_precision"][q] for q in QUARTILES] for run in filters])}
    for layer in range(len(filters[0]["gain"]["Q0"])):
        found[f"gain, layer {layer}"] = np.array([[run["gain"][q][layer] for q in QUARTILES] for run in filters])
    return found


def interval(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean over seeds, the first axis, and half the width of its interval."""
    error = values.std(axis=0, ddof=1) / len(values) ** 0.5
    return values.mean(axis=0), stats.t.ppf(0.975, len(values) - 1) * error


def main() -> int:
    """Print a table, and draw it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", help="of packed runs, as `bft-bench pack` makes them")
    parser.add_argument("--output", type=Path, help="SVG file")
    arguments = parser.parse_args()
    tables = {folder.name.removeprefix("rec-"): rows(read(folder)) for folder in arguments.folders}
    print(f"| runs | | {' | '.join(QUARTILES)} | Q0 less Q3 |\n| --- | --- | {' | '.join(['---:'] * 4)} | --- |")
    for name, lines in tables.items():
        for what, values in lines.items():
            mean, half = interval(values)
            change, spread = interval(values[:, 0] - values[:, -1])
            cells = [f"{value:.3f} ± {width:.3f}" for value, width in zip(mean, half, strict=True)]
            ends = f"{change:+.3f} [{change - spread:+.3f}, {change + spread:+.3f}]"
            print(f"| {name} | {what} | {' | '.join(cells)} | {ends} |")
    if arguments.output:
        draw(tables, arguments.output)
    return 0


def draw(tables: dict[str, dict[str, np.ndarray]], path: Path) -> None:
    """Log tau left, gains right, a row of panels a folder."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "bft", "font.size": 9}):
        figure = Figure(figsize=(7, 2.6 * len(tables)), layout="constrained")
        panels = figure.subplots(len(tables), 2, squeeze=False)
        for (name, lines), (left, right) in zip(tables.items(), panels, strict=True):
            for what, values in lines.items():
                axes = left if what == "log tau" else right
                mean, half = interval(values)
                axes.errorbar(QUARTILES, mean, half, marker="o", capsize=3, label=what)
            left.set(title=name, ylabel="log τ")
            right.set(title=name, ylabel="gain K", ylim=(0, 1))
            right.legend()
        figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    sys.exit(main())
