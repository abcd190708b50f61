"""The page of a look inside: texts shaded token by token in one HTML file that needs no network."""

import base64
import gzip
import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from ..pages import fill
from .look import Look
from .tables import measure

# Name, label, whether the shade is by logarithm, whether it is by head.
MEASURES = (
    ("precision", "precision", True, False),
    ("gain", "gain", False, False),
    ("effective_sample_size", "n", True, True),
    ("jacobian", "J", False, False),
)
LABELS = {"effective_sample_size": "effective sample size n", "jacobian": "Jacobian J"}
BOLD = ("gold passage", "answer")
GOLD = ' class="gold"'
SIGNIFICANT_BITS = 12  # of a float32's 24: four digits, and half the size once packed
VISIBLE = str.maketrans({"\n": "\u21b5\n", "\r": "\u240d", "\t": "\u21e5"})


def page(looks: Sequence[Look], result: Mapping[str, Any]) -> str:
    """Write the page.

    Every text is escaped.

    Args:
        looks: One for each text.
        result: What inspect.json holds.
    """
    meta = {
        "layers": looks[0].layers,
        "heads": looks[0].sample_size.shape[1],
        "measures": [
            {"name": name, "label": label, "log": log, "byHead": by_head} for name, label, log, by_head in MEASURES
        ],
        "texts": [
            {
                "tokens": len(look.text.tokens),
                "weighted": look.keys.shape[2],
                "keys": look.keys.shape[3],
                "parts": look.text.parts,
                "start": _start(look.text.parts),
            }
            for look in looks
        ],
    }
    model = Path(str(result["model"])).name or str(result["model"])
    return fill(
        "inspect",
        f"A look inside {model}",
        introduction=_introduction(looks, result),
        about=_about(result),
        several="" if len(looks) > 1 else " hidden",
        texts="".join(f'<option value="{place}">{escape(look.text.name)}</option>' for place, look in enumerate(looks)),
        measures="".join(
            f'<option value="{place}">{LABELS.get(name, label)}</option>'
            for place, (name, label, _, _) in enumerate(MEASURES)
        ),
        bold=" Bold are the passage with the answer, and the answer." if "answer" in looks[0].text.parts else "",
        listboxes="\n".join(_listbox(place, look) for place, look in enumerate(looks)),
        meta=json.dumps(meta, separators=(",", ":")).replace("<", "\\u003c"),
        data="\n".join(
            f'<script type="application/octet-stream" id="data-{place}">{pack(look)}</script>'
            for place, look in enumerate(looks)
        ),
    )


def _introduction(looks: Sequence[Look], result: Mapping[str, Any]) -> str:
    sentences = ["Each token is shaded by what the filter inside the model computes as it reads."]
    if result["patched_here"]:
        sentences.append("The model is a plain one, patched for this look: its filter is where it starts, not trained.")
    if any(look.text.cut for look in looks):
        sentences.append("What is too long was cut (--max_length).")
    return f"<p>{' '.join(sentences)}</p>"


def _about(result: Mapping[str, Any]) -> str:
    lines = [
        "<b>Precision</b> (an inverse variance) is what a token brings into the layer; it grows with what the token observes.",
        "<b>Gain</b> K is the share of the attention's output that the layer adds to the token, from 0 to 1.",
        "<b>n</b>, Kish's effective sample size, is how many keys that output rests on: 1 when one key has all the weight.",
        "<b>J</b> is the mean diagonal of the feed-forward's Jacobian, which stretches or shrinks what is uncertain.",
        "<b>Kriging</b> weights keys by their precision too: after it, a key that the model is sure of has gained on the others.",
    ]
    items = "".join(f"<li>{line}</li>" for line in lines)
    made = f'<p class="quiet">Made by <code>{escape(str(result["command"]))}</code></p>'
    return f"<details><summary>What the numbers mean</summary><ul>{items}</ul>{made}</details>"


def _listbox(place: int, look: Look) -> str:
    options = "".join(
        f'<span role="option" tabindex="-1" aria-selected="false"{GOLD if part in BOLD else ""}>'
        f"{escape(token.translate(VISIBLE))}</span>"
        for token, part in zip(look.text.tokens, look.text.parts, strict=True)
    )
    return (
        f'<div class="tokens" role="listbox" id="tokens-{place}" aria-label="Tokens of {escape(look.text.name)}" '
        f'aria-describedby="help" aria-orientation="horizontal" hidden>{options}</div>'
    )


def _start(parts: Sequence[str]) -> int:
    """The token that is looked at first: the one that the answer is read from, or the last."""
    return max(0, parts.index("answer") - 1) if "answer" in parts else len(parts) - 1


def pack(look: Look) -> str:
    """A text's numbers for the page: little-endian arrays, compressed, in base64.

    Float32 by layer and token in the order of `MEASURES` (NaN where there is none), what is by head by layer, head (their mean
    first) and token; then keys, weights before and weights after, uint16 by layer, head (alike), token and key, a weight in
    units of 1/65535.
    """
    shape = (len(look.layers), len(look.text.tokens))
    parts = []
    for name, _, _, by_head in MEASURES:
        if by_head:
            values = np.concatenate([look.sample_size.mean(1, keepdims=True), look.sample_size], axis=1)
        else:
            found = measure(look, name)
            values = np.full(shape, np.nan, np.float32) if found is None else found
        parts.append(_rounded(values).tobytes())
    parts.append(look.keys.astype("<u2").tobytes())
    parts += [np.rint(weights * 65535).astype("<u2").tobytes() for weights in (look.before, look.after)]
    return base64.b64encode(gzip.compress(b"".join(parts), mtime=0)).decode()


def _rounded(values: np.ndarray) -> np.ndarray:
    """Float32 with `SIGNIFICANT_BITS` bits, rounded to nearest; what is not finite stays."""
    fraction, exponent = np.frexp(values.astype(np.float32))
    scale = 2.0**SIGNIFICANT_BITS
    return np.where(np.isfinite(values), np.ldexp(np.rint(fraction * scale) / scale, exponent), values).astype("<f4")
