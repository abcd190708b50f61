"""Observing attention whose weights do not sum to one (HSTU): the sandwich estimator, as pure functions on tensors.

Weights a_tj may be negative and of any size; the estimate is their plain sum e_t = sum_j a_tj v_j, of variance
s^2 sum_j a_tj^2. The residual variance is taken about the plain mean of the visible values: about the weighted mean, which
is none, it would be biased.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from .config import BFTConfig
from .filter import Observation, combine_heads, estimate_variance, observation_precision, relative_variance


class Moments(NamedTuple):
    """What the sandwich reads off one attention call, head-wise tensors as (batch, token, head[, head_dim]).

    Attributes:
        residual_variance: R, the weighted mean of (v_j - m)^2 with weights a_tj^2; with "token" averaged over the head.
        second_moment: R + m^2, alike: the value power of which R is the unexplained part.
        effective_sample_size: n_e = (sum_j |a_tj|)^2 / sum_j a_tj^2.
        mass: sum_j |a_tj|.
        visible: False where a query has no weight at all, (batch, token).
    """

    residual_variance: Tensor
    second_moment: Tensor
    effective_sample_size: Float[Tensor, "batch token head"]
    mass: Float[Tensor, "batch token head"]
    visible: Bool[Tensor, "batch token"]


def equal_shares(
    visible: Bool[Tensor, "batch token key"], dtype: torch.dtype = torch.float32
) -> Float[Tensor, "batch token key"]:
    """One over the number of keys a query sees, at each of them: the weights of a plain mean."""
    return visible.to(dtype) / visible.sum(-1, keepdim=True).clamp_min(1)


def kriging_estimate(
    weights: Float[Tensor, "batch head token key"],
    value: Float[Tensor, "batch head key head_dim"],
    shares: Float[Tensor, "batch token key"],
    key_precision: Float[Tensor, "batch key"] | None = None,
) -> Float[Tensor, "batch head token head_dim"]:
    """e_t = sum_j a_tj v_j with kriging weights a_tj lam_bar_j / (mean of lam_bar over the visible keys).

    Equal precisions change nothing, whatever they are. lam_bar stands with the values, so no (token, key) is formed for it.

    Args:
        weights: a before kriging, 0 where a key is not visible.
        value: v.
        shares: what `equal_shares` gives.
        key_precision: lam_bar; None is 1 everywhere.
    """
    if key_precision is None:
        return weights @ value
    weighed = weights @ (value * key_precision[:, None, :, None])
    return weighed * _inverse_mean(shares, key_precision).unsqueeze(1)


def moments(
    weights: Float[Tensor, "batch head token key"],
    value: Float[Tensor, "batch head key head_dim"],
    shares: Float[Tensor, "batch token key"],
    granularity: str,
    key_precision: Float[Tensor, "batch key"] | None = None,
) -> Moments:
    """Residual variance about the plain mean by the expanded square, so that no (token, key, head_dim) is formed.

    R = sum_j p_j v_j^2 - 2 m sum_j p_j v_j + m^2 with p_j = a_j^2 / sum a^2 and m the plain mean of the visible values.

    Args:
        weights: a before kriging, 0 where a key is not visible.
        value: v.
        shares: what `equal_shares` gives.
        granularity: "token" or "channel".
        key_precision: lam_bar; None is 1 everywhere.
    """
    mean = shares.unsqueeze(1) @ value
    lam = value.new_ones(1, 1, weights.shape[-1], 1) if key_precision is None else key_precision[:, None, :, None]
    lam = lam.expand(*value.shape[:-1], 1)
    mass = (weights.abs() @ lam).squeeze(-1)
    power = lam.square()
    sums = weights.square() @ torch.cat([power * value, power * value.square(), power], dim=-1)
    first, second, square_sum = sums.split([value.shape[-1], value.shape[-1], 1], dim=-1)
    weighty = square_sum > 0
    square_sum = torch.where(weighty, square_sum, 1)
    residual = (second - 2 * mean * first) / square_sum + mean.square()
    explained = mean.square()
    if granularity == "token":
        residual, explained = residual.mean(-1), explained.mean(-1)
    residual = residual.clamp_min(0)
    weighty, square_sum = weighty.squeeze(-1), square_sum.squeeze(-1)
    sample_size = torch.where(weighty, mass.square() / square_sum, 1)
    if key_precision is not None:  # a constant factor of all weights of a row: only their size knows of it
        mass = mass * _inverse_mean(shares, key_precision).transpose(1, 2)
    return Moments(
        residual.transpose(1, 2),
        (residual + explained).transpose(1, 2),
        sample_size.transpose(1, 2),
        mass.transpose(1, 2),
        weighty.any(1),
    )


def _inverse_mean(
    shares: Float[Tensor, "batch token key"], key_precision: Float[Tensor, "batch key"]
) -> Float[Tensor, "batch token 1"]:
    """1 / (mean of lam_bar over the visible keys); 1 where none is visible, or none is to be relied on."""
    mean = shares @ key_precision.unsqueeze(-1)
    return 1 / torch.where(mean > 0, mean, 1)


def observe(
    moments: Moments,
    config: BFTConfig,
    scale: Float[Tensor, "batch token head head_dim"],
    output_weight: Float[Tensor, "channel head*head_dim"],
    neighbour_variance: Float[Tensor, "batch token head"] | None = None,
) -> Observation:
    """How precise W_o (scale * e) is: the sandwich variance s^2 sum_j a_j^2, carried on by the delta method.

    With p_j = |a_j| / sum |a| as weights that do sum to one, s^2 sum_j a_j^2 = (sum |a|)^2 s^2 / n_e: the variance of a
    normalised estimate with n_e effective observations, times the square of its size. So both units mean what they do for
    softmax attention, and Var~_i = sum_k W_o[i,k]^2 scale_k^2 Var_k.

    Args:
        moments: what `moments` gave.
        config: `granularity`, `observation_units`, `prior_scale` and `prior_degrees_of_freedom` are read.
        scale: what stands between estimate and output projection, as a factor: the gate u over the norm's std.
        output_weight: W_o; it gets no gradient from here.
        neighbour_variance: sum_j p_j / lam_bar_j, needed with prior_scale "neighbours".
    """
    relative = config.observation_units == "relative"
    residual = moments.residual_variance
    if relative:
        residual = relative_variance(residual, moments.second_moment)
    prior: Tensor | float = 1.0
    if config.prior_scale == "neighbours":
        assert neighbour_variance is not None, "prior_scale 'neighbours' needs the neighbours' variance"
        prior = neighbour_variance
    variance = estimate_variance(residual, moments.effective_sample_size, prior, config.prior_degrees_of_freedom)
    size = (moments.mass.unsqueeze(-1) * scale).square()
    if relative and config.granularity == "token":
        combined = combine_heads(variance, "token", "relative")
    elif relative:
        combined = combine_heads(variance, "channel", "relative", output_weight, moments.second_moment * size)
    else:
        by_channel = variance if config.granularity == "channel" else variance.unsqueeze(-1)
        combined = combine_heads(by_channel * size, "channel", "absolute", output_weight)
        combined = combined if config.granularity == "channel" else combined.mean(-1)
    precision = observation_precision(combined, moments.visible)
    return Observation(precision, residual, moments.effective_sample_size)
