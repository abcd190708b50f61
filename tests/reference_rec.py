"""The float64 oracle of the recommenders, plain and filtered: every residual formed, every Jacobian by autograd.

As tests/reference.py, whose softmax observation it shares; nothing here imports the library. Weights come as a state dict
under the models' names. Axes: (batch, head, token, key or channel), short B H T S D; C residual channels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from reference import Observation, Settings, Signs, attention_observation
from torch import Tensor
from torch.nn import functional

NOTHING = Settings(effective_sample_size="exact", kriging=False, gain=False, propagate=False)


@dataclass
class Filtered:
    """What the filter did, by patched layer, under the names of the library's traces; precisions (B, T[, C])."""

    precision: list[Tensor] = field(default_factory=list)
    observation_precision: list[Tensor] = field(default_factory=list)
    gain: list[Tensor] = field(default_factory=list)
    updated_precision: list[Tensor] = field(default_factory=list)
    jacobian: list[Tensor] = field(default_factory=list)
    effective_sample_size: list[Tensor] = field(default_factory=list)
    residual_variance: list[Tensor] = field(default_factory=list)


def layer_norm(x: Tensor, epsilon: float, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """(x - mean) / std, times weight, plus bias."""
    normed = (x - x.mean(-1, keepdim=True)) * inverse_std(x, epsilon)
    return normed if weight is None else normed * weight + bias


def inverse_std(x: Tensor, epsilon: float) -> Tensor:
    """1 / sqrt(variance + epsilon), (..., 1)."""
    centred = x - x.mean(-1, keepdim=True)
    return ((centred**2).mean(-1, keepdim=True) + epsilon) ** -0.5


def heads_of(x: Tensor, heads: int) -> Tensor:
    """(B, T, C) as (B, H, T, D)."""
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


def token_mean(precision: Tensor) -> Tensor:
    """lam_bar."""
    return precision.mean(-1) if precision.dim() == 3 else precision


@dataclass
class Attended:
    """What a sublayer gives to the residual, and what it says about itself."""

    output: Tensor
    precision: Tensor
    effective_sample_size: Tensor
    residual_variance: Tensor
    visible: Tensor


@dataclass
class Layer:
    """One layer's weights, the model's config, and the pass."""

    weights: Mapping[str, Tensor]
    config: Any
    settings: Settings
    visible: Tensor
    position_ids: Tensor
    timestamps: Tensor | None
    reliability: Tensor | None
    signs: Tensor | None

    def linear(self, x: Tensor, name: str) -> Tensor:
        return functional.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def norm(self, x: Tensor, name: str) -> Tensor:
        weight, bias = self.weights.get(f"{name}.weight"), self.weights.get(f"{name}.bias")
        return layer_norm(x, self.config.layer_norm_eps, weight, bias)

    def norm_factor(self, x: Tensor, name: str) -> Tensor:
        return inverse_std(x, self.config.layer_norm_eps) * self.weights[f"{name}.weight"]


def softmax_attention(layer: Layer, x: Tensor, precision: Tensor, key_precision: Tensor | None) -> Attended:
    """Multi-head attention of SASRec and BERT4Rec."""
    heads = layer.config.num_attention_heads
    seen: Observation = attention_observation(
        *(heads_of(layer.linear(x, f"attention.{name}_proj"), heads) for name in "qkv"),
        precision,
        settings=layer.settings,
        output_weight=layer.weights["attention.o_proj.weight"],
        visible=layer.visible,
        signs=layer.signs,
        reliability=layer.reliability,
        key_precision=key_precision,
    )
    output = layer.linear(seen.estimate.transpose(1, 2).flatten(2), "attention.o_proj")
    return Attended(output, seen.precision, seen.effective_sample_size, seen.residual_variance, seen.visible)


def pointwise_attention(layer: Layer, x: Tensor, precision: Tensor, key_precision: Tensor | None) -> Attended:
    """HSTU's attention, its gate and its output projection, with the sandwich estimator."""
    config, settings = layer.config, layer.settings
    heads, width = config.num_attention_heads, config.hidden_size
    projected = layer.linear(layer_norm(x, config.layer_norm_eps), "uvqk_proj")
    projected = projected * torch.sigmoid(projected)
    gate, value, query, key = (projected[..., i * width : (i + 1) * width] for i in range(4))
    value, query, key = (heads_of(part, heads) for part in (value, query, key))

    tokens = x.shape[1]
    bias = torch.stack(
        [
            torch.stack([torch.stack([_relative_bias(layer, row, t, j) for j in range(tokens)]) for t in range(tokens)])
            for row in range(x.shape[0])
        ]
    )
    scores = query @ key.transpose(-1, -2) + bias[:, None]
    visible = layer.visible
    if layer.reliability is not None:
        visible = visible & (layer.reliability > 0)[:, None, :]
    weights = scores * torch.sigmoid(scores) / config.max_position_embeddings * visible[:, None]

    trust = torch.ones(x.shape[:2], dtype=x.dtype)
    if settings.kriging:
        trust = token_mean(precision if key_precision is None else key_precision)
    if layer.reliability is not None:
        trust = trust * layer.reliability
    count = visible.sum(-1, keepdim=True).clamp(min=1)
    average = (visible * trust[:, None, :]).sum(-1, keepdim=True) / count
    weights = weights * (trust[:, None, :] / average.masked_fill(average == 0, 1.0))[:, None]

    estimate = (weights[..., None] * value[:, :, None]).sum(-2)
    mean = (visible[:, None, :, :, None] * value[:, :, None]).sum(-2) / count[:, None]
    square = weights**2
    square_sum = square.sum(-1)
    weighty = square_sum > 0
    square_sum = square_sum.masked_fill(~weighty, 1.0)
    residual = (square[..., None] * (value[:, :, None] - mean[:, :, :, None]) ** 2).sum(-2) / square_sum[..., None]
    power = residual + mean**2
    if settings.granularity == "token":
        residual, power = residual.mean(-1), power.mean(-1)
    absolute_residual = residual
    if settings.observation_units == "relative":
        residual = torch.where(power > 0, residual / power.masked_fill(power == 0, 1.0), 0.0)
    mass = weights.abs().sum(-1)
    n = (mass**2 / square_sum).masked_fill(~weighty, 1.0)

    prior = torch.ones_like(n)
    if settings.prior_scale == "neighbours":
        share = weights.abs() / mass.masked_fill(mass == 0, 1.0)[..., None]
        prior = (share / token_mean(precision)[:, None, None, :]).sum(-1)
    nu0 = settings.prior_degrees_of_freedom
    full = (lambda y: y[..., None]) if settings.granularity == "channel" else (lambda y: y)
    s_squared = (nu0 * full(prior) + full(n) * residual) / (nu0 + full(n) - 1)

    scale = inverse_std(estimate.transpose(1, 2).flatten(2), config.layer_norm_eps) * gate
    scale_squared = heads_of(scale, heads) ** 2
    output_weight = layer.weights["o_proj.weight"].detach().unflatten(-1, (heads, -1)) ** 2
    if settings.observation_units == "absolute":
        # The sandwich itself, s^2 sum a^2, then the delta method.
        variance = s_squared * full(square_sum.masked_fill(~weighty, 0.0))
        if settings.granularity == "token":
            variance = variance[..., None].expand_as(scale_squared)
        combined = torch.einsum("chd,bhtd->btc", output_weight, scale_squared * variance)
        combined = combined if settings.granularity == "channel" else combined.mean(-1)
    elif settings.granularity == "token":
        combined = (s_squared / n).mean(1)
    else:
        share = scale_squared * (absolute_residual + mean**2) * (mass**2)[..., None]
        variance = s_squared / n[..., None]
        total = torch.einsum("chd,bhtd->btc", output_weight, share)
        combined = torch.einsum("chd,bhtd->btc", output_weight, share * variance) / total.masked_fill(total == 0, 1.0)
    seen = weighty.any(1)
    row = seen if combined.dim() == 2 else seen[..., None]
    observed = torch.where(row, 1.0 / combined.masked_fill(~row, 1.0), 0.0)

    normed = layer_norm(estimate.transpose(1, 2).flatten(2), config.layer_norm_eps)
    return Attended(layer.linear(gate * normed, "o_proj"), observed, n, residual, seen)


def _relative_bias(layer: Layer, row: int, t: int, j: int) -> Tensor:
    """rab of query t and key j; what lies after the query is masked anyway."""
    distance = int(layer.position_ids[row, t] - layer.position_ids[row, j])
    bias = layer.weights["relative_bias.position"][max(distance, 0)]
    if layer.timestamps is not None:
        seconds = max(int(layer.timestamps[row, t] - layer.timestamps[row, j]), 1)
        bucket = min(int(math.log(seconds) / 0.301), layer.config.time_buckets - 1)
        bias = bias + layer.weights["relative_bias.time"][bucket]
    return bias


def feed_forward(layer: Layer, x: Tensor) -> Tensor:
    """W_d act(W_u x + b_u) + b_d."""
    activation = {"relu": functional.relu, "gelu": functional.gelu}[layer.config.hidden_act]
    return layer.linear(activation(layer.linear(x, "ffn.up_proj")), "ffn.down_proj")


def jacobian_diagonal(layer: Layer, x: Tensor, norm: str | None) -> Tensor:
    """diag of d FFN(norm(h)) / dh by autograd, with the norm's scale held fixed, (B, T, C)."""
    fixed = inverse_std(x, layer.config.layer_norm_eps)

    def dynamics(one: Tensor, scale: Tensor) -> Tensor:
        if norm is not None:
            weight, bias = layer.weights[f"{norm}.weight"], layer.weights[f"{norm}.bias"]
            one = (one - one.mean()) * scale * weight + bias
        return feed_forward(layer, one)

    full = torch.func.vmap(torch.func.jacrev(dynamics))(x.flatten(0, 1), fixed.flatten(0, 1))
    return full.diagonal(dim1=-2, dim2=-1).unflatten(0, x.shape[:2])


def reference_recommender(
    state_dict: Mapping[str, Tensor],
    config: Any,
    settings: Settings | None,
    input_ids: Tensor,
    *,
    attention_mask: Tensor | None = None,
    timestamps: Tensor | None = None,
    reliability: Tensor | None = None,
    signs: Signs | None = None,
) -> tuple[Tensor, Filtered]:
    """A recommender in evaluation mode.

    Args:
        state_dict: float64 tensors under the model's names; they may require gradients.
        config: the model's own; `model_type` says which it is. Its `bft` is not read.
        settings: the filter's, or None for the plain model.
        input_ids: (B, T).
        attention_mask: (B, T), 1 at items; None takes id 0 for padding.
        timestamps: (B, T), for HSTU's time bias.
        reliability: rho in [0, 1], (B, T).
        signs: probe signs, needed for effective_sample_size="probe".

    Returns:
        What is multiplied with the item embeddings, (B, T, C), and what the filter did.
    """
    batch, tokens = input_ids.shape
    real = (input_ids != 0) if attention_mask is None else attention_mask.bool()
    position_ids = torch.zeros_like(input_ids)  # padding is seen by nobody
    for row in range(batch):
        places = real[row].nonzero().flatten()
        first = config.max_position_embeddings - len(places) if config.positions == "from_end" else 0
        position_ids[row, places] = torch.arange(first, first + len(places))
    visible = real[:, None, :].expand(batch, tokens, tokens)
    if config.model_type != "bert4rec":
        visible = visible & torch.ones(tokens, tokens, dtype=torch.bool).tril()

    hidden = state_dict["embed_items.weight"][input_ids]
    if config.model_type != "bert4rec":
        hidden = hidden * config.hidden_size**0.5
    hidden = hidden + state_dict["embed_positions.weight"][position_ids]
    epsilon = getattr(config, "layer_norm_eps", None)
    if config.model_type == "bert4rec":
        hidden = layer_norm(hidden, epsilon, state_dict["embedding_norm.weight"], state_dict["embedding_norm.bias"])

    plain = settings is None
    settings = NOTHING if settings is None else settings
    count = config.num_hidden_layers
    patched = [] if plain else list(range(count) if settings.layers is None else settings.layers)
    filtered = Filtered()
    precision = key_precision = None
    for index in range(count):
        prefix = f"layers.{index}."
        weights = {name.removeprefix(prefix): w for name, w in state_dict.items() if name.startswith(prefix)}
        layer = Layer(weights, config, NOTHING, visible, position_ids, timestamps, None, None)
        if index not in patched:
            lam = torch.ones_like(hidden[..., 0])
            hidden, _, _ = _step(layer, hidden, lam, None, None, None, None)
            continue
        layer.settings, layer.reliability = settings, reliability
        if settings.effective_sample_size == "probe" and config.model_type != "hstu":
            assert signs is not None
            layer.signs = signs(index, position_ids, config.num_attention_heads, settings.num_probes)
        if precision is None:
            precision = _tau(weights, "", settings, hidden, input_ids)
            if settings.separate_key_precision:
                key_precision = _tau(weights, "key_", settings, hidden, input_ids)
        noise = key_noise = None
        if index != patched[-1] and settings.propagate:
            start = torch.tensor([math.log(settings.initial_process_noise)], dtype=torch.float64)
            noise = weights.get("bft.log_process_noise", start).exp()
            key_noise = weights.get("bft.log_key_process_noise", start).exp()
        hidden, precision, key_precision = _step(layer, hidden, precision, key_precision, noise, key_noise, filtered)

    if config.model_type == "sasrec":
        hidden = layer_norm(hidden, epsilon, state_dict["norm.weight"], state_dict["norm.bias"])
    elif config.model_type == "bert4rec":
        hidden = functional.gelu(functional.linear(hidden, state_dict["head.weight"], state_dict["head.bias"]))
        hidden = layer_norm(hidden, epsilon, state_dict["head_norm.weight"], state_dict["head_norm.bias"])
    return hidden, filtered


def _tau(weights: Mapping[str, Tensor], key: str, settings: Settings, hidden: Tensor, input_ids: Tensor) -> Tensor:
    """tau by token, (B, T) or (B, T, C): a constant, a table or an MLP, as the parameters' shapes say."""
    log_tau = weights.get(f"bft.log_initial_{key}precision")
    if log_tau is None:
        log_tau = torch.tensor([math.log(settings.initial_precision_value)], dtype=torch.float64)
    log_tau = log_tau[input_ids] if len(log_tau) > 1 else log_tau.expand(input_ids.shape)
    if f"bft.initial_{key}hidden" in weights:
        mean_square = (hidden**2).mean(-1, keepdim=True)
        embedding = hidden / (mean_square + torch.finfo(torch.float64).eps).sqrt()
        inner = torch.einsum("btc,hc->bth", embedding, weights[f"bft.initial_{key}hidden"])
        log_tau = log_tau + (inner * inner.sigmoid()) @ weights[f"bft.initial_{key}output"]
    return log_tau.exp() if settings.granularity == "token" else log_tau.exp()[..., None].expand(hidden.shape)


def _step(
    layer: Layer,
    hidden: Tensor,
    precision: Tensor,
    key_precision: Tensor | None,
    noise: Tensor | None,
    key_noise: Tensor | None,
    filtered: Filtered | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """One layer, as one step of the filter where `filtered` is there to take it down."""
    settings, kind = layer.settings, layer.config.model_type
    attend = pointwise_attention if kind == "hstu" else softmax_attention
    seen = attend(layer, layer.norm(hidden, "attention_norm") if kind == "sasrec" else hidden, precision, key_precision)
    gain = torch.ones_like(seen.precision)
    if filtered is not None:
        gain = seen.precision / (precision + seen.precision)
        if not settings.gain:
            gain = (seen.visible if gain.dim() == 2 else seen.visible[..., None]).double().expand_as(gain)
    updated = precision + seen.precision
    updated_key = None if key_precision is None else key_precision + seen.precision
    hidden = hidden + (gain if gain.dim() == 3 else gain[..., None]) * seen.output

    mean = (lambda x: x.mean(-1)) if settings.granularity == "token" else (lambda x: x)
    jacobian, growth_of_variance = torch.zeros_like(precision), torch.ones_like(precision)
    with torch.set_grad_enabled(settings.differentiate_jacobian):
        if kind == "bert4rec":
            normed = layer.norm(hidden, "attention_norm")
            moved = normed + feed_forward(layer, normed)
            jacobian = mean(jacobian_diagonal(layer, normed, None))
            if settings.observation_units == "absolute":
                growth_of_variance = mean(layer.norm_factor(hidden, "attention_norm") ** 2)
                growth_of_variance = growth_of_variance * mean(layer.norm_factor(moved, "ffn_norm") ** 2)
        elif kind == "sasrec":
            jacobian = mean(jacobian_diagonal(layer, hidden, "ffn_norm"))
    if kind == "bert4rec":
        hidden = layer.norm(hidden, "attention_norm")
        hidden = layer.norm(hidden + feed_forward(layer, hidden), "ffn_norm")
    elif kind == "sasrec":
        hidden = hidden + feed_forward(layer, layer.norm(hidden, "ffn_norm"))

    if filtered is not None:
        filtered.precision.append(precision)
        filtered.observation_precision.append(seen.precision)
        filtered.gain.append(gain)
        filtered.updated_precision.append(updated)
        if settings.propagate:
            filtered.jacobian.append(jacobian)
        filtered.effective_sample_size.append(seen.effective_sample_size)
        filtered.residual_variance.append(seen.residual_variance)

    def predicted(lam: Tensor, noise: Tensor | None) -> Tensor:
        return lam if noise is None else 1.0 / (growth_of_variance * (1.0 + jacobian) ** 2 / lam + noise)

    return hidden, predicted(updated, noise), None if updated_key is None else predicted(updated_key, key_noise)
