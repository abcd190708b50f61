"""Figures of a look inside and of sinks, as SVG."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..figures import COLOURS, MARKERS, STYLE, subplots, svg
from .look import Look
from .profile import t_interval
from .tables import MEASURES, by_layer, measure

LABELS = {
    "precision": "precision",
    "gain": "gain K",
    "effective_sample_size": "effective sample size n",
    "jacobian": "Jacobian J",
    "sink_rate": "sink rate",
    "first_token_mass": "weight on the first token",
    "sample_size": "effective sample size n",
    "gate": "gate",
}
WIDTH = 3.6


def draw(looks: Sequence[Look]) -> dict[str, bytes]:
    """The figures of a look, by file name: each quantity by layer, and precision and gain of the first text by layer and token."""
    import matplotlib as mpl

    with mpl.rc_context(STYLE):
        return {"layers.svg": _layers(looks), "tokens.svg": _tokens(looks[0])}


def _layers(looks: Sequence[Look]) -> bytes:
    rows = by_layer(looks)
    names = [name for name in MEASURES if name in rows[0]]
    figure, plots = subplots(1, len(names), WIDTH)
    layers = [row["layer"] for row in rows]
    for plot, name in zip(plots[0], names, strict=True):
        ends = ([row[f"{name}_{end}"] for row in rows] for end in ("p10", "p90"))
        plot.fill_between(layers, *ends, color=COLOURS[1], alpha=0.2, linewidth=0, label="10 % to 90 % of the tokens")
        plot.plot(layers, [row[name] for row in rows], color=COLOURS[1], marker=MARKERS[0], markersize=3, label="mean")
        plot.set(xlabel="layer", ylabel=LABELS[name])
        if name in ("precision", "effective_sample_size"):
            plot.set_yscale("log")
    plots[0][0].legend(frameon=False, fontsize=8)
    return svg(figure)


def _tokens(look: Look) -> bytes:
    figure, plots = subplots(2, 1, 9.0)
    for plot, name in zip(plots[:, 0], ("precision", "gain"), strict=True):
        values = measure(look, name)
        assert values is not None
        norm = "log" if name == "precision" and values.min() > 0 else None
        extent = (-0.5, values.shape[1] - 0.5, look.layers[-1] + 0.5, look.layers[0] - 0.5)
        image = plot.imshow(values, aspect="auto", interpolation="nearest", cmap="cividis", norm=norm, extent=extent)
        plot.set(xlabel="token", ylabel="layer", title=f"{LABELS[name]}: {look.text.name}")
        figure.colorbar(image, ax=plot)
    return svg(figure)


def draw_lengths(arms: dict[str, list[dict[str, Any]]], names: Sequence[str]) -> bytes:
    """A figure of quantities over context length.

    Args:
        arms: By name of a model or arm, rows with `length` and of each quantity a list of numbers (one a text, or one a seed),
            of which the mean is drawn with a 95 % interval.
        names: The quantities, each a plot; an arm without one is left out of its plot.
    """
    import matplotlib as mpl

    with mpl.rc_context(STYLE):
        figure, plots = subplots(-(-len(names) // 3), min(len(names), 3), WIDTH)
        for plot, name in zip(plots.flat, names, strict=False):
            for place, (arm, rows) in enumerate(arms.items()):
                if name not in rows[0]:
                    continue
                lengths = np.array([row["length"] for row in rows])
                means, lows, highs = np.array([t_interval(row[name]) for row in rows]).T
                style = {"color": COLOURS[place % len(COLOURS)], "marker": MARKERS[place % len(MARKERS)]}
                shift = 1 + 0.015 * (place - (len(arms) - 1) / 2)
                plot.errorbar(
                    lengths * shift,
                    means,
                    yerr=[means - lows, highs - means],
                    label=arm,
                    markersize=4,
                    linewidth=1.2,
                    **style,
                )
            plot.set_xscale("log", base=2)
            plot.set(xlabel="context length", ylabel=LABELS[name])
            if name == "sample_size":
                plot.set_yscale("log", base=2)
            elif name != "first_token_mass":
                plot.set_ylim(0, 1.05)  # shares: side by side they are to be compared
        for plot in itertools.islice(plots.flat, len(names), None):
            plot.axis("off")
        plots[0][0].legend(frameon=False, fontsize=7)
        return svg(figure)
