"""Estimators of Kish's effective sample size n = 1 / sum_j w_j^2 of an attention row, one small class each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .filter import probe_effective_sample_size, probe_signs
from .state import full_precision
from .stream import Stream
from .visibility import Visibility

NUM_PROBES = 7
"""m: with the moment channel they fill the eight channels by which the values are widened, so they cost nothing more."""


Cap = tuple[float, int]
"""A soft cap c of the model's own scores s, which become c tanh(s / c), and how many channels they are made of; further ones,
which carry a key's bias, are not capped."""


class Probe:
    """Random signs as value channels: sum_j w_j r_j squared estimates sum_j w_j^2 within the one attention call."""

    num_channels = NUM_PROBES

    def channels(
        self, stream: Stream, slot: int, layers: tuple[int, ...], position_ids: Tensor, num_heads: int
    ) -> Tensor:
        """Signs (batch, head, token, num_channels) to append to the values; those of all layers are made at once."""
        if stream.signs is None:
            signs = probe_signs(layers, position_ids, num_heads, self.num_channels)
            # Those of a prompt for all layers would weigh something; those of one token need no conversion a layer.
            stream.signs = signs if position_ids.shape[-1] == 1 else signs.to(torch.int8)
        return stream.signs[slot]

    def read(self, projections: Tensor, visible_keys: Tensor | int, **_: Any) -> Tensor:
        """n (batch, token, head) from what the sign channels came back as, (batch, token, head, num_channels)."""
        return probe_effective_sample_size(projections, _by_head(visible_keys))


class Exact:
    """sum_j w_j^2 itself, by a second pass over the scores in blocks of query rows: the reference, O(token * key)."""

    num_channels = 0

    def channels(self, *_: Any) -> None:
        """No channels are needed."""

    def read(
        self,
        projections: Tensor,
        visible_keys: Tensor | int,
        *,
        query: Tensor,
        key: Tensor,
        visibility: Visibility,
        scaling: float,
        dtype: torch.dtype,
        cap: Cap | None = None,
    ) -> Tensor:
        """n (batch, token, head) from query (batch, head, token, width) and key (batch, kv_head, key, width)."""
        square_sum = _SquareSum.apply(query, key, visibility, scaling, dtype, cap).transpose(1, 2)
        # Rows that see nothing have no weights; their count stands as 1.
        visible_keys = _by_head(visible_keys)
        if isinstance(visible_keys, Tensor):
            return square_sum.maximum(visible_keys.reciprocal()).reciprocal()
        return square_sum.clamp_min(1 / visible_keys).reciprocal()


ESTIMATORS: dict[str, Probe | Exact] = {"probe": Probe(), "exact": Exact()}


def _by_head(visible_keys: Tensor | int) -> Tensor | int:
    return visible_keys.unsqueeze(-1) if isinstance(visible_keys, Tensor) else visible_keys


class _SquareSum(torch.autograd.Function):
    """sum_j softmax_j(s)^2 in blocks of query rows; the backward forms the same blocks again.

    With p = sum_j w_j^2, dp / ds_j = 2 w_j (w_j - p).
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        visibility: Visibility,
        scaling: float,
        dtype: torch.dtype,
        cap: Cap | None,
    ) -> Tensor:
        ctx.save_for_backward(query, key)
        ctx.visibility, ctx.scaling, ctx.dtype, ctx.cap = visibility, scaling, dtype, cap
        blocks = []
        for rows in visibility.row_blocks():
            weights, seen, _ = _weights(query, key, visibility, scaling, dtype, rows, cap)
            blocks.append((torch.linalg.vector_norm(weights, dim=-1).square() * seen).flatten(1, 2))
        return torch.cat(blocks, dim=-1)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        with full_precision(grad_outputs[0]):
            return _SquareSum._backward(ctx, *grad_outputs)

    @staticmethod
    def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key = ctx.saved_tensors
        grad_query = torch.empty_like(query)
        grad_key = torch.zeros_like(key, dtype=ctx.dtype)
        groups = key.shape[1]
        for rows in ctx.visibility.row_blocks():
            weights, seen, slope = _weights(query, key, ctx.visibility, ctx.scaling, ctx.dtype, rows, ctx.cap)
            grad_rows = grad[..., rows].unflatten(1, (groups, -1)).to(ctx.dtype) * (2 * ctx.scaling) * seen
            square_sum = torch.linalg.vector_norm(weights, dim=-1, keepdim=True).square()
            grad_scores = (weights - square_sum).mul_(weights).mul_(grad_rows.unsqueeze(-1))
            by_query = query[:, :, rows].unflatten(1, (groups, -1)).to(ctx.dtype)
            keys = key[:, :, : weights.shape[-1]].to(ctx.dtype)
            block, block_key = _times(grad_scores, keys), _over_rows(grad_scores, by_query)
            if slope is not None:
                width = ctx.cap[1]
                capped = grad_scores.mul_(slope)
                block[..., :width] = _times(capped, keys[..., :width])
                block_key[..., :width] = _over_rows(capped, by_query[..., :width])
            grad_query[:, :, rows] = block.flatten(1, 2).to(query.dtype)
            grad_key[:, :, : weights.shape[-1]] += block_key
        return grad_query, grad_key.to(key.dtype), None, None, None, None


def _weights(
    query: Tensor,
    key: Tensor,
    visibility: Visibility,
    scaling: float,
    dtype: torch.dtype,
    rows: slice,
    cap: Cap | None,
) -> tuple[Tensor, Tensor | int, Tensor | None]:
    """Softmax weights of a block of rows, (batch, kv_head, heads a kv_head, row, key), of the first keys where none sees more.

    Also whether each row sees anything, (batch or 1, 1, 1, row), 1 where all do: the weights of one that does not mean nothing. And
    the slope of the capped scores by the model's own, where they are capped.
    """
    stop = visibility.keys_before(rows)
    queries = query[:, :, rows].unflatten(1, (key.shape[1], -1)).to(dtype)
    keys = key[:, :, :stop].to(dtype).transpose(-1, -2)
    slope = None
    if cap is None:
        scores = _times(queries * scaling, keys)
    else:
        limit, width = cap
        bounded = _times(queries[..., :width] * (scaling / limit), keys[..., :width, :]).tanh_()
        scores = _times(queries[..., width:] * scaling, keys[..., width:, :]).add_(bounded, alpha=limit)
        slope = 1 - bounded * bounded
    mask = visibility.attention_mask
    if isinstance(mask, Tensor) and mask.ndim == 4 and mask.is_floating_point():
        scores = scores.add_(mask[:, :, rows, :stop].unsqueeze(1).to(dtype))
    visible = visibility.rows(rows)
    if visible is None:
        return scores.softmax(-1), 1, slope
    visible = visible[:, None, None, :, :stop]
    # The most negative number, no infinity: a row that sees nothing then has weights without NaN.
    scores = scores.masked_fill_(~visible, torch.finfo(dtype).min)
    return scores.softmax(-1), visible.any(-1), slope


def _times(rows: Tensor, matrix: Tensor) -> Tensor:
    """(batch, kv_head, heads, row, n) times (batch, kv_head, n, m), as one product a kv_head."""
    return (rows.flatten(2, 3) @ matrix).unflatten(2, rows.shape[2:4])


def _over_rows(left: Tensor, right: Tensor) -> Tensor:
    """Sum over heads and rows of the outer products of (batch, kv_head, heads, row, n) and (..., m): (batch, kv_head, n, m)."""
    return left.flatten(2, 3).transpose(-1, -2) @ right.flatten(2, 3)
