"""The Jacobian of a plain FFN, W_d act(W_u x + b_u) + b_d, as the filter's prediction needs it: pure functions on tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from .activations import RELU, closed_form
from .filter import value_and_slope


def plain_jacobian_coefficients(
    up_weight: Float[Tensor, "ffn channel"],
    down_weight: Float[Tensor, "channel ffn"],
    norm_weight: Float[Tensor, " channel"] | None = None,
    granularity: str = "token",
    centred: bool = True,
) -> Float[Tensor, "ffn ..."]:
    """All that J needs of a plain FFN's weights.

    Args:
        up_weight: W_u.
        down_weight: W_d.
        norm_weight: g of the norm in front of the FFN; None if there is none.
        granularity: "token" or "channel".
        centred: whether that norm takes the mean away, as layer norm does. Taking the mean is linear, so it is part of J.

    Returns:
        "channel": W_d[i,k] (W_u[k,i] g_i - mean_j W_u[k,j] g_j), (ffn, channel). "token": their mean over channels, (ffn,).
    """
    inner = up_weight
    if norm_weight is not None:
        inner = inner * norm_weight
        if centred:
            inner = inner - inner.mean(-1, keepdim=True)
    if granularity == "channel":
        return down_weight.T * inner
    return torch.linalg.vecdot(down_weight.T, inner) / up_weight.shape[1]


def plain_jacobian(
    preactivation: Float[Tensor, "batch token ffn"],
    activation: Callable[[Tensor], Tensor],
    coefficients: Float[Tensor, "ffn ..."],
    inverse_scale: Float[Tensor, "batch token"] | None = None,
) -> Float[Tensor, "batch token ..."]:
    """Diagonal of d/dh W_d act(W_u norm(h)) with the norm's scale held fixed, or its mean over channels; exact.

    J_i = sum_k W_d[i,k] act'(z_k) (W_u[k,i] g_i - mean_j W_u[k,j] g_j) / std.

    Args:
        preactivation: z = W_u norm(h) + b_u.
        activation: act, elementwise. Dropout on its output has no part in J.
        coefficients: what `plain_jacobian_coefficients` gives; J has its dtype.
        inverse_scale: 1 / std of the norm's input; None without a norm.

    Returns:
        (batch, token), or (batch, token, channel) with the coefficients of "channel".
    """
    z = preactivation.to(coefficients.dtype)
    form = closed_form(activation)
    # ReLU's slope has no slope of its own, so it is the same with and without gradients.
    slope = (z > 0).to(z.dtype) if form is RELU else value_and_slope(activation, z)[1]
    diagonal = slope @ coefficients
    if inverse_scale is None:
        return diagonal
    return diagonal * (inverse_scale if diagonal.ndim == inverse_scale.ndim else inverse_scale.unsqueeze(-1))
