"""How far rounding and probing move the filter on a real model: the tables of docs/method.md.

    python benchmarks/numerics.py --text ../shared/data/squad/dev-v1.1-a.json.gz --output build/numerics

SmolLM2-135M, patched at the unit start, reads real text. Four tables: the error of bfloat16 and float16 models by layer,
against the same model in float64 (which the tests hold to the oracle at 1e-9); the probe's error in the gain by the
number of heads and probes, against "exact"; gain and effective sample size by layer and position; and the gain by sample size.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import bft_hf
from bft_hf import BFTConfig
from bft_hf.filter import estimate_variance, update
from bft_hf.recipes.models import load_model_and_tokenizer
from bft_hf.sample_size import ESTIMATORS

FIELDS = ("gain", "precision", "effective_sample_size", "residual_variance", "jacobian")


def main() -> None:
    """Print the tables and write them, with the raw numbers, to a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--text", type=Path, required=True, help="SQuAD JSON, .gz or not, whose passages are read")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--tables", nargs="*", choices=["dtypes", "probes", "profile", "gain_by_n"])
    parser.add_argument("--output", type=Path, default=Path("build/numerics"))
    arguments = parser.parse_args()
    model, tokenizer = load_model_and_tokenizer(arguments.model)
    ids = tokenizer(passages(arguments.text), return_tensors="pt").input_ids[:, : arguments.tokens]
    makers = {"dtypes": dtype_errors, "probes": probe_errors, "profile": gain_profile, "gain_by_n": gain_by_sample_size}
    tables = {name: make(model, ids) for name, make in makers.items() if name in (arguments.tables or makers)}
    arguments.output.mkdir(parents=True, exist_ok=True)
    for name, rows in tables.items():
        text = markdown(rows)
        print(f"\n{name}, {ids.shape[1]} tokens\n\n{text}")
        (arguments.output / f"{name}.md").write_text(text)
        (arguments.output / f"{name}.json").write_text(json.dumps(rows, indent=1))


def passages(path: Path) -> str:
    """The passages of a SQuAD file as one text."""
    data = json.loads((gzip.open if path.suffix == ".gz" else open)(path, "rb").read())["data"]
    return "\n\n".join(paragraph["context"] for article in data for paragraph in article["paragraphs"])


@torch.no_grad()
def run(model: Any, ids: Tensor, config: BFTConfig) -> tuple[dict[str, list[Tensor]], Tensor]:
    """What record() shows, in float64, and the log-probabilities of the text's own tokens."""
    with bft_hf.patched(model, config), bft_hf.record(model) as trace:
        logits = model(ids, use_cache=False).logits
    scores = logits[:, :-1].double().log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return {name: [value.double() for value in getattr(trace, name)] for name in FIELDS}, scores


def dtype_errors(model: Any, ids: Tensor) -> list[dict[str, Any]]:
    """By layer: median and 99th percentile of |K - K of float64|, and the mean relative error of lam and n."""
    original = model.dtype
    reference, reference_scores = run(model.double(), ids, BFTConfig.unit())
    results = {
        dtype: run(model.to(dtype), ids, BFTConfig.unit()) for dtype in (torch.float32, torch.bfloat16, torch.float16)
    }
    model.to(original)
    rows: list[dict[str, Any]] = []
    for layer in range(len(reference["gain"])):
        row: dict[str, Any] = {"layer": layer}
        for dtype, (values, _) in results.items():
            short = str(dtype).removeprefix("torch.")
            error = (values["gain"][layer] - reference["gain"][layer]).abs()
            row[f"{short} |dK| median"] = error.median().item()
            row[f"{short} |dK| 99 %"] = error.quantile(0.99).item()
            for name in ("precision", "effective_sample_size"):
                relative = (values[name][layer] / reference[name][layer] - 1).abs()
                row[f"{short} {name} rel."] = relative.mean().item()
        rows.append(row)
    last: dict[str, Any] = {"layer": "loss"}
    for dtype, (_, scores) in results.items():
        last[f"{str(dtype).removeprefix('torch.')} |dK| median"] = (reference_scores - scores).mean().item()
    return [*rows, last]


def probe_errors(model: Any, ids: Tensor) -> list[dict[str, Any]]:
    """Root mean square of K(probe) - K(exact), by heads averaged and probes; all layers, with the exact run's lam.

    Heads beyond the model's are those of neighbouring layers taken together: what a wider layer would average.
    """
    exact, exact_scores = run(model, ids, BFTConfig.unit(effective_sample_size="exact"))
    probe = ESTIMATORS["probe"]
    usual = probe.num_channels
    rows = []
    for probes in (1, 3, 7, 15, 31):
        probe.num_channels = probes
        values, scores = run(model, ids, BFTConfig.unit())
        row: dict[str, Any] = {"probes m": probes}
        for heads in (1, 3, 9, 18, 36):
            errors = [
                gain_of_heads(exact, exact["effective_sample_size"], layer, heads)
                - gain_of_heads(exact, values["effective_sample_size"], layer, heads)
                for layer in range(len(exact["gain"]) - heads // 9)
            ]
            row[f"{heads} heads"] = torch.stack(errors).square().mean().sqrt().item()
        row["loss - exact loss"] = (exact_scores - scores).mean().item()
        rows.append(row)
    probe.num_channels = usual
    return rows


def gain_of_heads(exact: dict[str, list[Tensor]], sizes: list[Tensor], layer: int, heads: int) -> Tensor:
    """K as a layer with these heads would have it, (batch, token)."""
    layers = range(layer, layer + max(1, heads // 9))
    size = torch.cat([sizes[index] for index in layers], dim=1)[:, :heads]
    residual = torch.cat([exact["residual_variance"][index] for index in layers], dim=1)[:, :heads]
    variance = estimate_variance(residual, size, 1.0, 1.0).mean(1)
    return update(exact["precision"][layer], 1 / variance)[0]


def gain_profile(model: Any, ids: Tensor) -> list[dict[str, Any]]:
    """Mean gain, effective sample size, Jacobian and precision by layer; gain by position in the text."""
    values, _ = run(model, ids, BFTConfig.unit(effective_sample_size="exact"))
    rows = []
    for layer in range(len(values["gain"])):
        gain = values["gain"][layer][0]
        row: dict[str, Any] = {"layer": layer, "K": gain.mean().item()}
        for start, stop in ((0, 1), (1, 16), (16, 128), (128, 1024), (1024, 1 << 30)):
            if start < gain.shape[0]:
                row[f"K at {start}-{min(stop, gain.shape[0]) - 1}"] = gain[start:stop].mean().item()
        row["n"] = values["effective_sample_size"][layer].mean().item()
        row["n at the end"] = values["effective_sample_size"][layer][..., -128:].mean().item()
        row["RSS"] = values["residual_variance"][layer].mean().item()
        row["J"] = values["jacobian"][layer].mean().item()
        row["lam"] = values["precision"][layer].mean().item()
        rows.append(row)
    return rows


def gain_by_sample_size(model: Any, ids: Tensor) -> list[dict[str, Any]]:
    """Mean K of all layers and tokens by 1 / mean over heads of 1/n, the effective sample size that a layer's K sees."""
    values, _ = run(model, ids, BFTConfig.unit(effective_sample_size="exact"))
    gain = torch.cat([layer.flatten() for layer in values["gain"]])
    size = torch.cat([1 / (1 / layer).mean(1).flatten() for layer in values["effective_sample_size"]])
    edges = [1, 1.25, 1.5, 2, 3, 5, 10, 20, 50, 100, float("inf")]
    rows: list[dict[str, Any]] = []
    for low, high in itertools.pairwise(edges):
        inside = (size >= low) & (size < high)
        if inside.any():
            low_k, high_k = gain[inside].quantile(torch.tensor([0.1, 0.9], dtype=gain.dtype)).tolist()
            name = f"{low:g} to {high:g}" if high < edges[-1] else f"from {low:g}"
            share = inside.double().mean().item()
            rows.append(
                {"n": name, "share": share, "mean K": gain[inside].mean().item(), "K 10 %": low_k, "K 90 %": high_k}
            )
    return rows


def markdown(rows: list[dict[str, Any]]) -> str:
    """A table whose columns are the keys of all rows."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    for row in rows:
        cells = [f"{row[c]:.3g}" if isinstance(row.get(c), float) else str(row.get(c, "")) for c in columns]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
