"""What attention does by context length: weight on the first token, effective sample size, gain, and gates."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import bft_hf

from .gates import gate_values
from .weights import attention_weights

SINK = 0.3
"""A head whose mean weight on the first token exceeds this is a sink (arXiv:2410.10781)."""


@dataclass(frozen=True)
class Profile:
    """One pass over texts of one length; attention is causal, so what holds for a prefix stands in it too.

    Attributes:
        first_token: The weight on the first token, (text, layer, head, token).
        sample_size: Kish's n of the weights, 1 / sum w^2, not an estimate, (text, layer, head, token).
        gain: K, its mean over channels, (text, layer, token); None of a plain model.
        gate: The mean over the gates of a layer, (text, layer, token); None without any.
    """

    first_token: Tensor
    sample_size: Tensor
    gain: Tensor | None
    gate: Tensor | None


@torch.no_grad()
def profile(model: Any, rows: Sequence[Tensor]) -> Profile:
    """Run texts through a model, one at a time, and keep what `Profile` holds.

    Args:
        model: A causal language model, patched or plain, with gates or without.
        rows: Token ids, each (token,), all of one length.
    """
    firsts, sizes, gains, gates = [], [], [], []
    for row in rows:
        seen: dict[int, tuple[Tensor, Tensor]] = {}
        gate: dict[int, Tensor] = {}

        def see(layer: int, before: Tensor, after: Tensor, seen: dict[int, Any] = seen) -> None:
            seen[layer] = after[0, :, :, 0].clone(), after[0].square().sum(-1).reciprocal()

        def see_gate(layer: int, value: Tensor, gate: dict[int, Tensor] = gate) -> None:
            gate[layer] = value[0].float().mean(-1)

        ids = row[None].to(model.device)
        with attention_weights(model, see), gate_values(model, see_gate):
            if bft_hf.is_patched(model):
                with bft_hf.record(model) as trace:
                    model(input_ids=ids, use_cache=False)
                gains.append(torch.stack([by_token(values[0]) for values in trace.gain]))
            else:
                model(input_ids=ids, use_cache=False)
        first, size = zip(*(seen[layer] for layer in sorted(seen)), strict=True)
        firsts.append(torch.stack(first))
        sizes.append(torch.stack(size))
        if gate:
            gates.append(torch.stack([gate[layer] for layer in sorted(gate)]))
    stacked = [torch.stack(values).cpu() if values else None for values in (firsts, sizes, gains, gates)]
    assert stacked[0] is not None and stacked[1] is not None
    return Profile(stacked[0], stacked[1], stacked[2], stacked[3])


def by_token(values: Tensor) -> Tensor:
    """A number a token, of (token,) or (token, channel): the mean over channels."""
    return values if values.ndim == 1 else values.mean(-1)


def by_length(found: Profile, lengths: Sequence[int]) -> list[dict[str, Any]]:
    """A row for each context length.

    Args:
        found: Of texts at least as long as the greatest length.
        lengths: Ascending, at least 2.

    Returns:
        `length`; over the queries of the first so many tokens (but the first token, which can but see itself)
        `sink_rate`, the share of (text, layer, head) whose mean weight on the first token exceeds `SINK`, and
        `first_token_mass`, the mean of that weight; over the queries whose context is longer than half the length
        `sample_size`, `gain` and `gate`, means over all else. Each is a list of one number a text.
    """
    rows = []
    for length in lengths:
        mass = found.first_token[..., 1:length].mean(-1)
        row: dict[str, Any] = {
            "length": length,
            "sink_rate": (mass > SINK).float().mean((1, 2)).tolist(),
            "first_token_mass": mass.mean((1, 2)).tolist(),
        }
        late = slice(length // 2, length)
        row["sample_size"] = found.sample_size[..., late].mean((1, 2, 3)).tolist()
        for name, values in (("gain", found.gain), ("gate", found.gate)):
            if values is not None:
                row[name] = values[..., late].mean((1, 2)).tolist()
        rows.append(row)
    return rows


def per_doubling(rows: Sequence[dict[str, Any]], name: str) -> list[float]:
    """How much a number of `by_length` grows with each doubling of the context: a slope a text, by least squares."""
    steps = torch.tensor([math.log2(row["length"]) for row in rows], dtype=torch.float64)
    steps = steps - steps.mean()
    values = torch.tensor([row[name] for row in rows], dtype=torch.float64)
    return (steps @ values / steps.square().sum()).tolist()


def correlation(found: Profile, name: str) -> list[float]:
    """How closely a layer's gain or gate follows its n: Pearson's correlation with log n over tokens, a number a text.

    n is the mean over a layer's heads; the correlation is the mean over layers.
    """
    values = getattr(found, name).double()
    sizes = found.sample_size.double().mean(2).log()
    values, sizes = (part - part.mean(-1, keepdim=True) for part in (values, sizes))
    norms = values.square().sum(-1).sqrt() * sizes.square().sum(-1).sqrt()
    return ((values * sizes).sum(-1) / norms.clamp_min(torch.finfo(norms.dtype).tiny)).mean(1).tolist()


def t_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float, float]:
    """The mean of independent numbers and the ends of its interval by Student's t; of a single one, that one thrice."""
    from scipy.stats import t

    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, mean, mean
    half = statistics.stdev(values) / math.sqrt(len(values)) * float(t.ppf((1 + level) / 2, len(values) - 1))
    return mean, mean - half, mean + half
