"""The figures of README.md and docs/method.md, from one pass of a real model: `python docs/figures.py`.

SmolLM2-135M-Instruct at the unit start reads LICENSE, and two sentences about rivers. Its weights come with `make test-slow`.
"""

import argparse
from pathlib import Path
from typing import Any

import matplotlib
import torch
from torch import Tensor

import bft_hf
from bft_hf.recipes.models import load_model_and_tokenizer

matplotlib.use("agg")
import matplotlib.pyplot as plt

REPOSITORY = Path(__file__).resolve().parents[1]
RIVERS = "The Rhine ends in the North Sea. The Danube ends in the Black Sea. In what sea does the Danube end? In the"
GROUPS = {"0": (0, 1), "1 to 15": (1, 16), "16 to 127": (16, 128), "128 to 1,023": (128, 1024)}
STYLE = {
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.constrained_layout.use": True,
    "font.size": 9,
    "svg.fonttype": "none",
    "svg.hashsalt": "bft",  # the same bytes from the same numbers
}


def run(model: Any, tokenizer: Any, text: str, length: int) -> tuple[list[str], bft_hf.Trace]:
    """The tokens of a text and what the filter made of them."""
    tokens = tokenizer(text, return_tensors="pt", truncation=True, max_length=length)
    with bft_hf.record(model) as trace, torch.no_grad():
        model(**tokens)
    return [tokenizer.decode([token]) for token in tokens["input_ids"][0]], trace


def by_layer(values: list[Tensor]) -> Tensor:
    """The first row of a batch, (layer, token)."""
    return torch.stack([value[0] for value in values])


def gain_of_a_text(words: list[str], trace: bft_hf.Trace) -> plt.Figure:
    """Tokens by layers, shaded by gain."""
    gain = by_layer(trace.gain)
    figure, axes = plt.subplots(figsize=(8.2, 3.1))
    image = axes.imshow(gain, aspect="auto", cmap="magma", vmin=0.4, vmax=1, interpolation="nearest")
    axes.set_xticks(
        range(len(words)), [word.strip() for word in words], rotation=55, ha="right", rotation_mode="anchor"
    )
    axes.set_ylabel("layer")
    axes.spines[:].set_visible(False)
    figure.colorbar(image, label="gain K", pad=0.01)
    return figure


def gain_by_layer(trace: bft_hf.Trace) -> plt.Figure:
    """Mean gain of a layer, by place in the text."""
    gain = by_layer(trace.gain)
    figure, axes = plt.subplots(figsize=(5.2, 3))
    for shade, (name, (first, last)) in zip((0.85, 0.65, 0.4, 0.1), GROUPS.items(), strict=True):
        axes.plot(trace.layers, gain[:, first:last].mean(1), color=matplotlib.colormaps["viridis"](shade), label=name)
    axes.set(xlabel="layer", ylabel="mean gain K", ylim=(0.45, 1.01))
    axes.legend(title="position", frameon=False, loc="lower left", ncols=2)
    return figure


def gain_by_sample_size(trace: bft_hf.Trace) -> plt.Figure:
    """K against n, a point a layer and token, and what the formula gives for the mean RSS and precision."""
    gain = by_layer(trace.gain)
    size = 1 / (1 / torch.stack([n[0] for n in trace.effective_sample_size])).mean(1)
    shown = torch.randperm(gain.numel(), generator=torch.Generator().manual_seed(0))[:3000]
    layers = torch.arange(len(gain))[:, None].expand_as(gain)
    figure, axes = plt.subplots(figsize=(5.2, 3))
    points = axes.scatter(
        size.flatten()[shown], gain.flatten()[shown], c=layers.flatten()[shown], s=3, cmap="viridis", linewidths=0,
        rasterized=True,
    )  # fmt: skip
    rss = torch.stack([value[0] for value in trace.residual_variance]).mean()
    precision = by_layer(trace.precision).mean()
    n = torch.logspace(0, 3, 200)
    variance = rss / n + 1 / n**2
    axes.plot(n, 1 / (1 + precision * variance), color="black", linewidth=1, label="K = 1/(1 + λ(RSS/n + 1/n²))")
    axes.set(xscale="log", xlabel="effective sample size n", ylabel="gain K", ylim=(0.45, 1.01))
    axes.legend(frameon=False, loc="lower right")
    figure.colorbar(points, label="layer", pad=0.01)
    return figure


def precision_of_a_text(words: list[str], trace: bft_hf.Trace, layers: int = 10) -> plt.Figure:
    """λ of three tokens through the first layers: up at each update, down at each prediction."""
    before, updated = by_layer(trace.precision)[:layers], by_layer(trace.updated_precision)[:layers]
    steps = torch.stack([before, updated], dim=1).flatten(0, 1)
    places = [layer + half for layer in range(layers) for half in (0.0, 0.5)]
    figure, axes = plt.subplots(figsize=(5.2, 3))
    for shade, token in zip((0.8, 0.5, 0.15), (0, len(words) // 2, len(words) - 1), strict=True):
        label = f"{words[token].strip()!r}, position {token}"
        axes.plot(places, steps[:, token], ".-", color=matplotlib.colormaps["viridis"](shade), linewidth=1, label=label)
    axes.set(xlabel="layer", ylabel="precision λ", yscale="log", xticks=range(layers))
    axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3)
    return figure


def main() -> int:
    """Run the model and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "docs" / "images")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    model, tokenizer = load_model_and_tokenizer(arguments.model)
    bft_hf.patch(model)
    words, rivers = run(model, tokenizer, RIVERS, 64)
    _, licence = run(model, tokenizer, (REPOSITORY / "LICENSE").read_text(encoding="utf-8"), 1024)
    with plt.rc_context(STYLE):
        for name, figure in {
            "gain-of-a-text": gain_of_a_text(words, rivers),
            "precision-of-a-text": precision_of_a_text(words, rivers),
            "gain-by-layer": gain_by_layer(licence),
            "gain-by-sample-size": gain_by_sample_size(licence),
        }.items():
            figure.savefig(arguments.output / f"{name}.svg", metadata={"Date": None}, dpi=150)
            print(arguments.output / f"{name}.svg")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
