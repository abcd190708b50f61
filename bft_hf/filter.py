"""The Bayesian filter of a BFT layer as pure functions on tensors: observe, update, predict.

The method is that of arXiv 2605.18832, "Precision Tracked Transformer via Kalman Filtering, Kriging and Process Noise".
`lam` is a precision (inverse variance), (batch, token) with granularity "token" and (batch, token, channel) with
"channel". Head-wise tensors stand as an attention function returns them, (batch, token, head[, head_dim]). Everything is
float32 (float64 where the model is); nothing here knows transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .activations import SILU, closed_form
from .config import BFTConfig

# --- 1 Observe: attention as kriging -----------------------------------------------------------------------------------


SMALLEST_VARIANCE = 1e-18
"""Below this the variance of an attention output counts as this; its square still fits float32, for the gradient."""


class Observation(NamedTuple):
    """What one attention layer says about its own update.

    Attributes:
        precision: lam_obs, (batch, token) or (batch, token, channel).
        residual_variance: RSS in the configured units, (batch, token, head[, head_dim]).
        effective_sample_size: Kish's n, (batch, token, head).
    """

    precision: Tensor
    residual_variance: Tensor
    effective_sample_size: Tensor


def mean_precision(lam: Tensor) -> Float[Tensor, "batch token"]:
    """lam_bar, the precision that weighs a token as a key: the mean over channels, or `lam` itself if it has none."""
    return lam if lam.ndim == 2 else lam.mean(-1)


def residual_variance(
    second_moment: Float[Tensor, "batch token head ..."],
    estimate: Float[Tensor, "batch token head head_dim"],
    granularity: str,
) -> Float[Tensor, "batch token head ..."]:
    """RSS by the expanded square, so that no residual (token, key, head_dim) is formed.

    Args:
        second_moment: "token": sum_j w_tj |v_j|^2 / D, (batch, token, head). "channel": sum_j w_tj v_j^2 per head channel.
        estimate: the kriging estimate e_t = sum_j w_tj v_j.
        granularity: "token" or "channel".

    Returns:
        sum_j w_tj |v_j|^2 / D - |e_t|^2 / D, or sum_j w_tj v_j^2 - e_t^2; shaped as `second_moment`, never negative.
    """
    if granularity == "token":
        norm = torch.linalg.vector_norm(estimate, dim=-1, dtype=second_moment.dtype)
        explained = norm * norm / estimate.shape[-1]
    else:
        explained = estimate.to(second_moment.dtype).square()
    return (second_moment - explained).clamp_min(0)


def relative_variance(residual_variance: Tensor, second_moment: Tensor) -> Tensor:
    """RSS as the unexplained share of the value power, in [0, 1]; 0 where there is no power ("relative" units)."""
    return residual_variance / second_moment.masked_fill(second_moment <= 0, torch.inf)


def estimate_variance(
    residual_variance: Tensor,
    effective_sample_size: Float[Tensor, "batch token head"],
    prior_variance: Tensor | float,
    prior_degrees_of_freedom: float,
) -> Tensor:
    """Variance of the kriging estimate: REML with a conjugate scaled-inverse-chi^2 prior (nu0, s0^2).

    s^2 = (nu0 s0^2 + n RSS) / (nu0 + n - 1) is the posterior variance of one value, s^2 / n that of the estimate. With
    nu0 = 1 it is RSS / n + s0^2 / n^2: finite for every n >= 1, and s0^2 when one key takes all the weight.

    Args:
        residual_variance: RSS, (batch, token, head[, head_dim]).
        effective_sample_size: n.
        prior_variance: s0^2, a number or (batch, token, head).
        prior_degrees_of_freedom: nu0 > 0.
    """
    square_sum = effective_sample_size.reciprocal()
    if residual_variance.ndim > square_sum.ndim:
        square_sum = square_sum.unsqueeze(-1)
        if isinstance(prior_variance, Tensor):
            prior_variance = prior_variance.unsqueeze(-1)
    nu0 = prior_degrees_of_freedom
    prior = square_sum * prior_variance if isinstance(prior_variance, Tensor) or prior_variance != 1 else square_sum
    numerator = torch.add(residual_variance, prior, alpha=nu0)
    if nu0 != 1:
        numerator = numerator / (1 + (nu0 - 1) * square_sum)
    return numerator * square_sum


def combine_heads(
    variance: Float[Tensor, "batch token head ..."],
    granularity: str,
    units: str,
    output_weight: Float[Tensor, "channel head*head_dim"] | None = None,
    second_moment: Float[Tensor, "batch token head ..."] | None = None,
) -> Tensor:
    """Var~: the errors of heads add in the output projection, so their variances are combined, not their precisions.

    Args:
        variance: Var, (batch, token, head) or per head channel.
        granularity: "token" or "channel".
        units: "relative" or "absolute".
        output_weight: W_O, needed except with "token" and "relative". It gets no gradient from here.
        second_moment: sum_j w_tj v_j^2 per head channel, needed with "channel" and "relative".

    Returns:
        (batch, token) or (batch, token, channel).
    """
    if granularity == "token" and units == "relative":
        return variance.mean(-1)
    assert output_weight is not None, "W_O is needed to combine the heads"
    squared = output_weight.detach().to(variance.dtype).square()
    if granularity == "token":
        power = squared.sum(0).view(variance.shape[-1], -1).sum(-1)
        return variance @ power / output_weight.shape[0]
    if units == "absolute":
        return variance.flatten(-2) @ squared.T
    assert second_moment is not None, "relative units weigh the heads by their value power"
    power = second_moment.flatten(-2)
    total = power @ squared.T
    powered = total > 0
    combined = (power * variance.flatten(-2)) @ squared.T / torch.where(powered, total, 1)
    # A token without any value power is one about which nothing is known beyond the prior: the heads count alike.
    return torch.where(powered, combined, variance.flatten(-2).mean(-1, keepdim=True))


def observe(
    estimate: Float[Tensor, "batch token head head_dim"],
    second_moment: Float[Tensor, "batch token head ..."],
    effective_sample_size: Float[Tensor, "batch token head"],
    config: BFTConfig,
    *,
    output_weight: Float[Tensor, "channel head*head_dim"] | None = None,
    neighbour_variance: Float[Tensor, "batch token head"] | None = None,
    visible: Bool[Tensor, "batch token"] | None = None,
) -> Observation:
    """How precise an attention output is, from what one attention call delivers.

    Args:
        estimate: e_t = sum_j w_tj v_j.
        second_moment: sum_j w_tj |v_j|^2 / D ("token"), sum_j w_tj v_j^2 per head channel ("channel").
        effective_sample_size: n_t = 1 / sum_j w_tj^2.
        config: `granularity`, `observation_units`, `prior_scale` and `prior_degrees_of_freedom` are read.
        output_weight: W_O, see `combine_heads`.
        neighbour_variance: sum_j w_tj / lam_bar_j, needed with prior_scale "neighbours".
        visible: False where a query sees no reliable key: its observation precision is 0, so its gain is 0.
    """
    relative = config.observation_units == "relative"
    residual = residual_variance(second_moment, estimate, config.granularity)
    if relative:
        residual = relative_variance(residual, second_moment)
    prior: Tensor | float = 1.0
    if config.prior_scale == "neighbours":
        assert neighbour_variance is not None, "prior_scale 'neighbours' needs the neighbours' variance"
        prior = neighbour_variance
    variance = estimate_variance(residual, effective_sample_size, prior, config.prior_degrees_of_freedom)
    combined = combine_heads(variance, config.granularity, config.observation_units, output_weight, second_moment)
    return Observation(observation_precision(combined, visible), residual, effective_sample_size)


def observation_precision(variance: Tensor, visible: Bool[Tensor, "batch token"] | None = None) -> Tensor:
    """lam_obs = 1 / Var~, finite, and 0 where a query sees nothing.

    Args:
        variance: Var~, (batch, token) or (batch, token, channel).
        visible: False where a query sees no reliable key; None is True everywhere.
    """
    # An output projection of zeros has no error at all; an infinite precision would make a NaN of the gain.
    variance = variance.clamp_min(SMALLEST_VARIANCE)
    # A masked row has no weights: its zeros stand for nothing, and dividing by them would put a NaN into the gradient.
    if visible is None:
        return variance.reciprocal()
    seen = visible if variance.ndim == 2 else visible.unsqueeze(-1)
    return torch.where(seen, torch.where(seen, variance, 1).reciprocal(), 0)


def probe_signs(
    layer_index: int | Sequence[int], position_ids: Int[Tensor, "batch token"], num_heads: int, num_probes: int
) -> Float[Tensor, "... batch head token probe"]:
    """Fixed pseudo-random signs r_j = +-1 of the value channels that estimate sum_j w_j^2.

    A sign is a hash of (layer, position, head, probe), never of the cache slot: a left-padded row gets the signs of the
    same row alone, and cached decoding those of a full pass. The arithmetic stays below 2^63.

    Args:
        layer_index: index of the decoder layer, or several, which then stand in front of the result.
        position_ids: positions of the keys.
        num_heads: key/value heads; query heads that share one share its signs.
        num_probes: m, at most 32.
    """
    device = position_ids.device
    layers = torch.tensor(layer_index, device=device).unsqueeze(-1)
    salt = _mix(torch.arange(num_heads, device=device) + (layers * 8191 + 1))
    bits = _mix(_mix(position_ids).unsqueeze(-2) ^ salt[..., None, :, None])
    probes = torch.arange(num_probes, device=device)
    return ((bits.unsqueeze(-1) >> probes) & 1).to(torch.float32) * 2 - 1


def _mix(x: Tensor) -> Tensor:
    """A 32-bit integer finaliser (xor-shift and multiply, twice) in int64 arithmetic that cannot overflow."""
    mask = 0xFFFFFFFF
    x = (x + 0x9E3779B9) & mask
    x = ((x ^ (x >> 16)) * 0x45D9F3B) & mask
    x = ((x ^ (x >> 16)) * 0x45D9F3B) & mask
    return x ^ (x >> 16)


def probe_effective_sample_size(
    projections: Float[Tensor, "*batch probe"], num_keys: Tensor | int
) -> Float[Tensor, "*batch"]:
    """Kish's n from random-sign sums: E (sum_j w_j r_j)^2 = sum_j w_j^2, exactly so when one key has all the weight.

    Args:
        projections: sum_j w_j r_jm for each probe m.
        num_keys: how many keys are visible, S: sum_j w_j^2 lies in [1/S, 1]. A number, or broadcastable to the result.
    """
    norm = torch.linalg.vector_norm(projections, dim=-1)
    square_sum = norm * norm / projections.shape[-1]
    if isinstance(num_keys, Tensor):
        return square_sum.clamp_max(1).maximum(num_keys.to(projections.dtype).reciprocal()).reciprocal()
    return square_sum.clamp(1 / num_keys, 1).reciprocal()


# --- 2 Update: the residual connection as a Kalman update --------------------------------------------------------------


def update(lam: Tensor, observation_precision: Tensor) -> tuple[Tensor, Tensor]:
    """Gain K = lam_obs / (lam + lam_obs) and updated precision lam' = lam + lam_obs. K = 1 is the standard residual."""
    updated = lam + observation_precision
    return observation_precision / updated, updated


# --- 3 Predict: the FFN as a dynamics model ----------------------------------------------------------------------------


CACHED_ROWS = 256
"""Tokens whose FFN activations are worked on together on a CPU: 256 x 1536 float32 numbers are 1.5 MB."""


def predict(lam: Tensor, jacobian: Tensor | float, process_noise: Tensor | float) -> Tensor:
    """lam'' = 1 / ((1 + J)^2 / lam' + Q), at most 1/Q.

    Args:
        lam: lam', the precision after the update.
        jacobian: J, the diagonal of df/dh of the FFN f (its mean with "token"), shaped as `lam`; 0 without an FFN.
        process_noise: Q > 0, (1,) or (channel,).
    """
    growth = 1 + jacobian
    return lam / (growth * growth + process_noise * lam)


def gated_jacobian_coefficients(
    gate_weight: Float[Tensor, "ffn channel"],
    up_weight: Float[Tensor, "ffn channel"],
    down_weight: Float[Tensor, "channel ffn"],
    norm_weight: Float[Tensor, " channel"],
    granularity: str = "token",
) -> tuple[Float[Tensor, "ffn ..."], Float[Tensor, "ffn ..."]]:
    """All that J needs of a gated FFN's weights.

    Returns:
        "token": c_g[k] = sum_i W_d[i,k] W_g[k,i] g_i / C and c_u alike, (ffn,): the mean of the diagonal is the trace over
        C, and the trace needs no more. "channel": the Hadamard products W_d[i,k] W_g[k,i] g_i and alike, (ffn, channel).
    """
    through_norm = down_weight.T * norm_weight
    if granularity == "channel":
        return through_norm * gate_weight, through_norm * up_weight
    through_norm = through_norm / norm_weight.shape[0]
    return torch.linalg.vecdot(through_norm, gate_weight), torch.linalg.vecdot(through_norm, up_weight)


def gated_jacobian(
    gate: Float[Tensor, "batch token ffn"],
    up: Float[Tensor, "batch token ffn"],
    activation: Callable[[Tensor], Tensor],
    gate_coefficients: Float[Tensor, "ffn ..."],
    up_coefficients: Float[Tensor, "ffn ..."],
    inverse_rms: Float[Tensor, "batch token"],
    activated: Float[Tensor, "batch token ffn"] | None = None,
) -> Float[Tensor, "batch token ..."]:
    """Diagonal of d/dh W_d (act(W_g x) * (W_u x)), x = g h / rms with rms held fixed, or its mean over channels; exact.

    J_i = sum_k W_d[i,k] (act'(z_k) u_k W_g[k,i] + act(z_k) W_u[k,i]) g_i / rms.

    Args:
        gate: z = W_g x, before the activation.
        up: u = W_u x.
        activation: act, elementwise.
        gate_coefficients: the first result of `gated_jacobian_coefficients`; J has its dtype.
        up_coefficients: the second.
        inverse_rms: 1 / rms of the norm's input.
        activated: act(z), if the FFN has it already; read where it has J's dtype.

    Returns:
        (batch, token), or (batch, token, channel) with the coefficients of "channel".
    """
    dtype = gate_coefficients.dtype

    def rows(gate: Tensor, up: Tensor, activated: Tensor | None = None) -> Tensor:
        gate, up = gate.to(dtype), up.to(dtype)
        form = None if torch.is_grad_enabled() else closed_form(activation)
        if form is not None:
            # act'(z) u in one pass, through which autograd could not go.
            through_gate = form.times_slope(up, gate)
            activated = form.value(gate) if activated is None else activated
        else:
            activated, slope = value_and_slope(activation, gate)
            through_gate = slope * up
        return through_gate @ gate_coefficients + activated @ up_coefficients

    parts = [gate, up]
    if activated is not None and activated.dtype == dtype:  # a rounded activation would round J
        parts.append(activated)
    if torch.is_grad_enabled() or gate.device.type != "cpu" or gate.shape[:-1].numel() <= CACHED_ROWS:
        diagonal = rows(*parts)
    else:
        # A few rows at a time stay in a core's cache from one elementwise step to the next.
        blocks = zip(*(part.flatten(0, -2).split(CACHED_ROWS) for part in parts), strict=True)
        diagonal = torch.cat([rows(*block) for block in blocks]).unflatten(0, gate.shape[:-1])
    return diagonal * (inverse_rms if diagonal.ndim == inverse_rms.ndim else inverse_rms.unsqueeze(-1))


def value_and_slope(activation: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """act(x) and act'(x) of an elementwise function, in closed form where there is one, everything else by autograd.

    Where gradients are on, both results carry them (the slope's is the second derivative).
    """
    if is_silu(activation):
        sigmoid = torch.sigmoid(x)
        value = x * sigmoid
        return value, torch.addcmul(sigmoid, value, 1 - sigmoid)
    tracked = torch.is_grad_enabled() and x.requires_grad
    form = None if tracked else closed_form(activation)
    if form is not None:
        x = x.detach()
        return form.value(x), form.times_slope(torch.ones_like(x), x)
    # A tensor of inference mode can have no gradient: a copy of it can.
    with torch.inference_mode(False) if x.is_inference() else nullcontext(), torch.enable_grad():
        point = x if tracked else (x.clone() if x.is_inference() else x.detach()).requires_grad_()
        value = activation(point)
        (slope,) = torch.autograd.grad(value.sum(), point, create_graph=tracked)
    return (value, slope) if tracked else (value.detach(), slope)


def is_silu(activation: Callable[[Tensor], Tensor]) -> bool:
    """Whether an activation is SiLU, as a function or a module of torch's or of transformers'."""
    return closed_form(activation) is SILU
