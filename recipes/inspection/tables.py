"""What was seen of texts as numbers: a table by layer on the terminal, and CSV and JSON by token."""

import csv
import io
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from .look import Look

NAMES = ("precision", "observation_precision", "gain", "jacobian", "updated_precision")
MEASURES = ("precision", "gain", "effective_sample_size", "jacobian")
"""What is shown by layer; everything else is in the files by token."""


def measure(look: Look, name: str) -> np.ndarray | None:
    """A quantity by layer and token, (layer, token): n's mean over heads; None where the model has none."""
    if name == "effective_sample_size":
        return look.sample_size.mean(1)
    return look.values.get(name)


def by_layer(looks: Sequence[Look]) -> list[dict[str, Any]]:
    """A row for each layer: of each of `MEASURES` the mean over all tokens, and the 10th and 90th percentile."""
    rows: list[dict[str, Any]] = []
    for place, layer in enumerate(looks[0].layers):
        row: dict[str, Any] = {"layer": layer}
        for name in MEASURES:
            found = [values[place] for look in looks if (values := measure(look, name)) is not None]
            if found:
                together = np.concatenate(found).astype(float)
                low, high = np.percentile(together, [10, 90])
                row |= {name: float(together.mean()), f"{name}_p10": float(low), f"{name}_p90": float(high)}
        rows.append(row)
    return rows


def by_part(looks: Sequence[Look]) -> list[dict[str, Any]]:
    """A row for each part of the texts (question, passages, answer): its tokens, and the means over them and all layers."""
    parts = np.concatenate([np.array(look.text.parts) for look in looks])
    rows = []
    for part in dict.fromkeys(parts.tolist()):
        row: dict[str, Any] = {"part": part, "tokens": int((parts == part).sum())}
        for name in (*MEASURES, "updated_precision"):
            found = [values for look in looks if (values := measure(look, name)) is not None]
            if found:
                values = np.concatenate(found, axis=1)
                row[name] = float((values[-1] if name == "updated_precision" else values)[..., parts == part].mean())
        rows.append(row)
    return rows


def print_tables(looks: Sequence[Look]) -> None:
    """The tables by layer and, of questions, by part."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=max(112, Console().width))
    headings = dict(zip(MEASURES, ("precision", "gain", "n", "J"), strict=True))
    tokens = sum(len(look.text.tokens) for look in looks)
    table = Table(title=f"Means over {tokens} tokens, and their 10th and 90th percentiles", title_justify="left")
    table.add_column("layer", no_wrap=True)
    for name in MEASURES:
        table.add_column(headings[name], justify="right", no_wrap=True)
        table.add_column("10 %, 90 %", justify="right", style="dim", no_wrap=True)
    for row in by_layer(looks):
        cells = []
        for name in MEASURES:
            has = name in row
            cells += [f"{row[name]:.3g}" if has else "-"]
            cells += [f"{row[f'{name}_p10']:.2g}, {row[f'{name}_p90']:.2g}" if has else "-"]
        table.add_row(str(row["layer"]), *cells)
    console.print(table)
    parts = by_part(looks)
    if len(parts) == 1:
        return
    table = Table("part", title="Means over layers and the tokens of a part", title_justify="left")
    for heading in ("tokens", *headings.values(), "final precision"):
        table.add_column(heading, justify="right")
    for row in parts:
        numbers = [f"{row[name]:.3g}" if name in row else "-" for name in (*MEASURES, "updated_precision")]
        table.add_row(row["part"], str(row["tokens"]), *numbers)
    console.print(table)


def tokens_csv(looks: Sequence[Look]) -> str:
    """A line for each text, token and layer; what is by head is the mean over heads."""
    content = io.StringIO()
    writer = csv.writer(content, lineterminator="\n")
    names = (*NAMES, "effective_sample_size", "residual_variance")
    writer.writerow(["text", "position", "token_id", "token", "part", "layer", *names])
    for look in looks:
        columns = [look.values.get(name) for name in NAMES]
        columns += [look.sample_size.mean(1), look.residual_variance.mean(1)]
        text = look.text
        for position, (token_id, token, part) in enumerate(zip(text.input_ids, text.tokens, text.parts, strict=True)):
            for place, layer in enumerate(look.layers):
                numbers = ["" if values is None else f"{values[place, position]:.6g}" for values in columns]
                writer.writerow([text.name, position, token_id, token, part, layer, *numbers])
    return content.getvalue()


def tokens_json(looks: Sequence[Look]) -> str:
    """A list with an object for each text: its tokens, and by layer and token what `tokens_csv` has, n by head too."""
    texts = []
    for look in looks:
        layers = []
        for place, layer in enumerate(look.layers):
            row: dict[str, Any] = {name: _rounded(values[place]) for name, values in look.values.items()}
            row["effective_sample_size"] = _rounded(look.sample_size[place])
            row["residual_variance"] = _rounded(look.residual_variance[place])
            layers.append({"layer": layer, **row})
        text = look.text
        texts.append(
            {
                "name": text.name,
                "input_ids": text.input_ids,
                "tokens": text.tokens,
                "parts": text.parts,
                "layers": layers,
            }
        )
    return json.dumps(texts, ensure_ascii=False, separators=(",", ":")) + "\n"


def _rounded(values: np.ndarray) -> Any:
    """Nested lists of numbers with six digits; null for one that is not finite."""
    if values.ndim > 1:
        return [_rounded(row) for row in values]
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in values.tolist()]
