"""A look at one text: what the filter computes by layer and token, and the keys with the greatest weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import bft_hf

from .profile import by_token
from .texts import Text
from .weights import attention_weights

TOP_KEYS = 12
"""Of a query's keys so many are kept, by the greater of their weights before and after kriging."""


@dataclass(frozen=True)
class Look:
    """What was seen of one text, as arrays of float32.

    Attributes:
        text: The text.
        layers: Indices of the patched layers.
        values: By name `precision`, `observation_precision`, `gain`, `jacobian`, `updated_precision`, (layer, token): what
            `bft_hf.record` gives, means over channels. Without propagation there is no `jacobian`.
        sample_size: n as the model uses it, (layer, head, token).
        residual_variance: (layer, head, token), means over head channels.
        first: The first token whose weights were kept; they are those of all tokens from there on.
        keys: Places of the keys with the greatest weights, (layer, 1 + head, token, key): of the mean over heads, then of
            each head. Int64.
        before: Their weights before kriging, alike.
        after: Their weights after it, alike.
    """

    text: Text
    layers: tuple[int, ...]
    values: dict[str, np.ndarray]
    sample_size: np.ndarray
    residual_variance: np.ndarray
    first: int
    keys: np.ndarray
    before: np.ndarray
    after: np.ndarray


class _Keys:
    """Keeps the greatest weights of each layer."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.layers: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def __call__(self, layer: int, before: Tensor, after: Tensor) -> None:
        both = [_with_mean(weights[0, :, self.first :]) for weights in (before, after)]
        keys = torch.maximum(*both).topk(min(TOP_KEYS, both[0].shape[-1])).indices
        before, after = (weights.gather(-1, keys).cpu() for weights in both)
        self.layers[layer] = keys.cpu(), before, after


def _with_mean(weights: Tensor) -> Tensor:
    return torch.cat([weights.mean(0, keepdim=True), weights])


@torch.no_grad()
def look(model: Any, text: Text, weight_tokens: int) -> Look:
    """Run a text through a patched model.

    Args:
        model: Patched.
        text: Within the model's positions.
        weight_tokens: Of so many tokens, the last ones, the weights are kept; 0 for none.
    """
    kept = _Keys(max(0, len(text.input_ids) - weight_tokens))
    ids = torch.tensor([text.input_ids], device=model.device)
    with attention_weights(model, kept), bft_hf.record(model) as trace:
        model(input_ids=ids, use_cache=False)
    names = ("precision", "observation_precision", "gain", "jacobian", "updated_precision")
    found = {name: [by_token(value[0]) for value in getattr(trace, name)] for name in names}
    layers = tuple(trace.layers)
    keys, before, after = (torch.stack([kept.layers[layer][place] for layer in layers]).numpy() for place in range(3))
    return Look(
        text=text,
        layers=layers,
        values={name: _array(values) for name, values in found.items() if values},
        sample_size=_array([value[0] for value in trace.effective_sample_size]),
        residual_variance=_array(
            [value[0] if value.ndim == 3 else value[0].mean(-1) for value in trace.residual_variance]
        ),
        first=kept.first,
        keys=keys,
        before=before,
        after=after,
    )


def _array(values: list[Tensor]) -> np.ndarray:
    return torch.stack(values).float().cpu().numpy()
