"""The float64 oracle: the method written out slowly, with every T x S matrix formed and the Jacobian by autograd.

Nothing here imports the library. Formulas follow the method's own words (weights as a normalised product, residuals as
differences, the Jacobian as a derivative), even where the library uses an equal but faster form.

Axes are transformers' own: (batch, head, token, key or channel), short B H T S D; G counts key/value heads and C
residual channels. Precisions are inverse variances, (B, T) with one value a token or (B, T, C) with one a channel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from reference_families import (
    Layer,
    feed_forward,
    ffn_update,
    jacobian_diagonal,
    layer_of,
    linear,
    norm_weight,
    normed,
    query_key_value,
    rms_norm,
    rotate,
)
from torch import Tensor

__all__ = ["Layer", "feed_forward", "jacobian_diagonal", "rms_norm", "rotate"]  # tests take them from here

T = TypeVar("T")
Signs = Callable[[int, Tensor, int, int], Tensor]
"""Probe signs by (layer index, position_ids (B, S), number of key/value heads, number of probes) as (B, G, S, m)."""


@dataclass(frozen=True)
class Settings:
    """What a layer computes, under the library's names but its own class, and without any validation.

    `num_probes` counts the sign channels m that `signs` is asked for.
    """

    granularity: str = "token"
    initial_precision_value: float = 1.0
    initial_process_noise: float = 1.0
    prior_degrees_of_freedom: float = 1.0
    prior_scale: str = "unit"
    observation_units: str = "relative"
    effective_sample_size: str = "probe"
    kriging: bool = True
    gain: bool = True
    propagate: bool = True
    differentiate_jacobian: bool = False
    separate_key_precision: bool = False
    layers: Sequence[int] | None = None
    num_probes: int = 8

    def __post_init__(self) -> None:
        # The oracle is written by hand in tests: a misspelt word must not pass for the other choice.
        for name, allowed in (
            ("granularity", ("token", "channel")),
            ("prior_scale", ("unit", "neighbours")),
            ("observation_units", ("relative", "absolute")),
            ("effective_sample_size", ("probe", "exact")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r}: the oracle knows {allowed}.")


@dataclass
class Observation:
    """What attention says about every query token.

    Attributes:
        attention: Plain softmax weights alpha, (B, H, T, S); rows without a visible key are 0.
        weights: Kriging weights w, (B, H, T, S).
        estimate: Kriging estimate e, (B, H, T, D).
        residual_variance: RSS in the configured units, (B, H, T) or by channel (B, H, T, D).
        second_moment: m2 in value units squared, (B, H, T) or (B, H, T, D).
        effective_sample_size: n, (B, H, T).
        neighbour_variance: sum_j w_tj / lam_bar_j, (B, H, T).
        estimate_variance: Var of the estimate, (B, H, T) or (B, H, T, D).
        precision: lam_obs, (B, T) or (B, T, C); 0 where nothing is visible.
        visible: Whether a query sees a reliable key, (B, T).
    """

    attention: Tensor
    weights: Tensor
    estimate: Tensor
    residual_variance: Tensor
    second_moment: Tensor
    effective_sample_size: Tensor
    neighbour_variance: Tensor
    estimate_variance: Tensor
    precision: Tensor
    visible: Tensor


@dataclass
class LayerStep:
    """One step of the filter; `precision` is lam as the layer reads it, `next_precision` what the next one reads."""

    hidden_states: Tensor
    precision: Tensor
    updated_precision: Tensor
    next_precision: Tensor
    key_precision: Tensor | None
    next_key_precision: Tensor | None
    gain: Tensor
    jacobian: Tensor | None
    observation: Observation


@dataclass
class ReferenceOutput:
    """The model's output, and by layer what the filter did (None at layers that are not patched).

    Attributes:
        logits: (B, T, vocabulary).
        hidden_states: The embeddings, then each layer's output, the last one after the final norm.
        precision: lam as each layer reads it, (B, T) or (B, T, C).
        updated_precision: lam' after the update, same shape.
        observation_precision: lam_obs, same shape.
        gain: K, same shape.
        effective_sample_size: n, (B, H, T).
        residual_variance: RSS in the configured units, (B, H, T) or (B, H, T, D).
        jacobian: J, (B, T) or (B, T, C); None everywhere with propagate=False.
        weights: Kriging weights, (B, H, T, S).
        key_precision: lam^key as each layer reads it, None without separate_key_precision.
    """

    logits: Tensor
    hidden_states: list[Tensor] = field(default_factory=list)
    precision: list[Tensor | None] = field(default_factory=list)
    updated_precision: list[Tensor | None] = field(default_factory=list)
    observation_precision: list[Tensor | None] = field(default_factory=list)
    gain: list[Tensor | None] = field(default_factory=list)
    effective_sample_size: list[Tensor | None] = field(default_factory=list)
    residual_variance: list[Tensor | None] = field(default_factory=list)
    jacobian: list[Tensor | None] = field(default_factory=list)
    weights: list[Tensor | None] = field(default_factory=list)
    key_precision: list[Tensor | None] = field(default_factory=list)


def _token_mean(precision: Tensor) -> Tensor:
    """lam_bar: the mean over channels, or lam itself when there is one value a token."""
    return precision.mean(-1) if precision.dim() == 3 else precision


def _given(value: T | None, name: str) -> T:
    if value is None:
        raise ValueError(f"These settings need {name}.")
    return value


def _ratio(numerator: Tensor, denominator: Tensor, otherwise: Tensor | float) -> Tensor:
    """numerator / denominator, and `otherwise` where the denominator is 0, with finite gradients on both sides."""
    zero = denominator == 0
    return torch.where(zero, otherwise, numerator / denominator.masked_fill(zero, 1.0))


def attention_observation(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    precision: Tensor,
    *,
    settings: Settings,
    output_weight: Tensor | None = None,
    visible: Tensor | None = None,
    signs: Tensor | None = None,
    reliability: Tensor | None = None,
    key_precision: Tensor | None = None,
    num_keys: Tensor | int | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
) -> Observation:
    """Attention as kriging (step 1 of the method).

    Args:
        query: (B, H, T, D), positions applied.
        key: (B, G, S, D), positions applied; query head h reads key/value head h // (H // G).
        value: (B, G, S, D).
        precision: lam of the keys' tokens, (B, S) or (B, S, C).
        settings: The configuration.
        output_weight: W_O, (C, H * D); needed unless token and relative. Never gets a gradient.
        visible: Which key a query may see, bool (B, T, S); None is all of them.
        signs: Probe signs (B, G, S, m), needed for effective_sample_size="probe".
        reliability: rho in [0, 1], (B, S).
        key_precision: lam^key, the shape of precision, needed with separate_key_precision.
        num_keys: S of the probe's clamp [1/S, 1], (B, T) or a number; None counts the keys each query can weigh.
        scaling: Factor on the scores, None for 1 / sqrt(D).
        softcap: Scores s of the model become c tanh(s / c); precisions weigh what comes of that.

    Returns:
        The observation.
    """
    batch, heads, tokens, head_dim = query.shape
    groups, keys = key.shape[1], key.shape[2]
    of_query = lambda x: x.repeat_interleave(heads // groups, dim=1)  # noqa: E731
    key, value = of_query(key), of_query(value)
    if visible is None:
        visible = query.new_ones(batch, tokens, keys, dtype=torch.bool)
    visible = visible.expand(batch, tokens, keys)
    if reliability is not None:
        visible = visible & (reliability > 0)[:, None, :]
    seen = visible.any(-1)

    scores = query @ key.transpose(-1, -2) * (head_dim**-0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible[:, None], -torch.inf)
    largest = scores.amax(-1, keepdim=True).detach()
    mass = (scores - largest.masked_fill(largest == -torch.inf, 0.0)).exp()
    attention = _ratio(mass, mass.sum(-1, keepdim=True), 0.0)

    product = mass
    if settings.kriging:
        bias = _given(key_precision, "key_precision") if settings.separate_key_precision else precision
        product = product * _token_mean(bias)[:, None, None, :]
    if reliability is not None:
        product = product * reliability[:, None, None, :]
    weights = _ratio(product, product.sum(-1, keepdim=True), 0.0)
    estimate = weights @ value

    # The direct forms, (B, H, T, S, D): the library may only use what is linear in w.
    residual = (value[:, :, None] - estimate[:, :, :, None]) ** 2
    second_moment = (weights[..., None] * value[:, :, None] ** 2).sum(-2)
    residual_variance = (weights[..., None] * residual).sum(-2)
    if settings.granularity == "token":
        second_moment, residual_variance = second_moment.mean(-1), residual_variance.mean(-1)
    if settings.observation_units == "relative":
        residual_variance = _ratio(residual_variance, second_moment, 0.0)

    if settings.effective_sample_size == "exact":
        squares = (weights**2).sum(-1)
        squares = squares.masked_fill(~seen[:, None], 1.0)
    else:
        projections = weights @ of_query(_given(signs, "signs").to(weights.dtype))
        if num_keys is None:
            num_keys = visible.sum(-1).clamp(min=1)
        floor = 1.0 / torch.as_tensor(num_keys, dtype=weights.dtype)
        floor = floor[:, None] if floor.dim() else floor
        squares = (projections**2).mean(-1)
        squares = torch.minimum(torch.maximum(squares, floor), torch.ones_like(squares))
    sample_size = 1.0 / squares

    neighbour_variance = (weights / _token_mean(precision)[:, None, None, :]).sum(-1)
    prior_variance = neighbour_variance if settings.prior_scale == "neighbours" else torch.ones_like(sample_size)
    if settings.granularity == "channel":
        n, s0_squared = sample_size[..., None], prior_variance[..., None]
    else:
        n, s0_squared = sample_size, prior_variance
    nu0 = settings.prior_degrees_of_freedom
    s_squared = (nu0 * s0_squared + n * residual_variance) / (nu0 + n - 1.0)
    estimate_variance = s_squared / n

    combined = _combine_heads(estimate_variance, second_moment, output_weight, settings)
    row = seen if combined.dim() == 2 else seen[..., None]
    observation_precision = torch.where(row, 1.0 / combined.masked_fill(~row, 1.0), 0.0)
    return Observation(
        attention=attention,
        weights=weights,
        estimate=estimate,
        residual_variance=residual_variance,
        second_moment=second_moment,
        effective_sample_size=sample_size,
        neighbour_variance=neighbour_variance,
        estimate_variance=estimate_variance,
        precision=observation_precision,
        visible=seen,
    )


def _combine_heads(variance: Tensor, second_moment: Tensor, output_weight: Tensor | None, settings: Settings) -> Tensor:
    """Var~, (B, T) or (B, T, C), from the heads' variances: errors of heads add in the output projection."""
    if settings.granularity == "token" and settings.observation_units == "relative":
        return variance.mean(1)
    heads = variance.shape[1]
    squared = _given(output_weight, "output_weight").detach().unflatten(-1, (heads, -1)) ** 2
    if settings.granularity == "token":
        return torch.einsum("chd,bht->bt", squared, variance) / squared.shape[0]
    if settings.observation_units == "absolute":
        return torch.einsum("chd,bhtd->btc", squared, variance)
    numerator = torch.einsum("chd,bhtd->btc", squared, second_moment * variance)
    power = torch.einsum("chd,bhtd->btc", squared, second_moment)
    # Where no value has any power the weights m2 say nothing; equal weights are their limit.
    unweighted = torch.einsum("chd,bhtd->btc", squared, variance)
    equal = _ratio(unweighted, squared.sum((1, 2)), variance.mean((1, 3))[..., None])
    return _ratio(numerator, power, equal)


def reference_layer(
    hidden_states: Tensor,
    precision: Tensor,
    weights: Mapping[str, Tensor],
    config: Any,
    settings: Settings,
    *,
    index: int = 0,
    position_ids: Tensor,
    visible: Tensor,
    process_noise: Tensor | None,
    key_precision: Tensor | None = None,
    key_process_noise: Tensor | None = None,
    signs: Tensor | None = None,
    reliability: Tensor | None = None,
    num_keys: Tensor | int | None = None,
) -> LayerStep:
    """One patched layer: observe, update, predict.

    Args:
        hidden_states: (B, T, C).
        precision: lam, (B, T) or (B, T, C) by the granularity.
        weights: The layer's tensors under transformers' names within the layer ("self_attn.q_proj.weight", ...).
        config: The model's configuration, of transformers.
        settings: The filter's.
        index: Of the layer.
        position_ids: (B, T).
        visible: bool (B, T, T), without what a window hides.
        process_noise: Q, (1,) or (C,); None in the last patched layer, whose prediction is not made.
        key_precision: lam^key, with separate_key_precision.
        key_process_noise: Its Q.
        signs: (B, G, T, m).
        reliability: rho, (B, T).
        num_keys: See attention_observation.

    Returns:
        The step.
    """
    layer = layer_of(config, index)
    anatomy = layer.anatomy
    if layer.window is not None:
        slots = torch.arange(visible.shape[-1])
        visible = visible & (slots[:, None] - slots < layer.window)
    query, key, value = query_key_value(
        normed(hidden_states, weights, anatomy.input_norm, layer),
        weights,
        position_ids,
        layer,
        getattr(config, "num_key_value_heads", 0),
    )
    # From the heads' values to the update that enters the residual; a norm's scale follows once the update is there.
    output_weight = layer.multiplier * weights["self_attn.o_proj.weight"]
    if anatomy.attention_norm is not None:
        output_weight = norm_weight(weights, anatomy.attention_norm, layer)[:, None] * output_weight
    observation = attention_observation(
        query,
        key,
        value,
        precision,
        settings=settings,
        output_weight=output_weight,
        visible=visible,
        signs=signs,
        reliability=reliability,
        key_precision=key_precision,
        num_keys=num_keys,
        scaling=layer.scaling,
        softcap=layer.softcap,
    )
    attended = linear(observation.estimate.transpose(1, 2).flatten(2), weights, "self_attn.o_proj")
    if anatomy.attention_norm is not None:
        attended, inverse_rms = rms_norm(attended, norm_weight(weights, anatomy.attention_norm, layer), layer.epsilon)
        if settings.observation_units == "absolute":
            scale = inverse_rms if settings.granularity == "channel" else inverse_rms.squeeze(-1)
            observation = replace(observation, precision=observation.precision / scale**2)
    update = layer.multiplier * attended

    observed = observation.precision
    gain = observed / (precision + observed)
    if not settings.gain:
        gain = torch.ones_like(gain) * (observation.visible if gain.dim() == 2 else observation.visible[..., None])
    hidden_states = hidden_states + (gain if gain.dim() == 3 else gain[..., None]) * update
    updated = precision + observed
    updated_key = None if key_precision is None else key_precision + observed

    jacobian = None
    if settings.propagate:
        if settings.differentiate_jacobian:
            jacobian = jacobian_diagonal(hidden_states, weights, layer)
        else:
            jacobian = jacobian_diagonal(
                hidden_states.detach(), {name: tensor.detach() for name, tensor in weights.items()}, layer
            ).detach()
        if settings.granularity == "token":
            jacobian = jacobian.mean(-1)
    hidden_states = hidden_states + ffn_update(hidden_states, weights, layer)[0]

    def predicted(lam: Tensor, noise: Tensor | None) -> Tensor:
        if noise is None or jacobian is None:
            return lam
        return 1.0 / ((1.0 + jacobian) ** 2 / lam + noise)

    return LayerStep(
        hidden_states=hidden_states,
        precision=precision,
        updated_precision=updated,
        next_precision=predicted(updated, process_noise),
        key_precision=key_precision,
        next_key_precision=None if updated_key is None else predicted(updated_key, key_process_noise),
        gain=gain,
        jacobian=jacobian,
        observation=observation,
    )


def plain_layer(
    hidden_states: Tensor,
    weights: Mapping[str, Tensor],
    config: Any,
    *,
    index: int = 0,
    position_ids: Tensor,
    visible: Tensor,
) -> Tensor:
    """One layer without the filter: the degenerate case in which precision plays no part."""
    nothing = Settings(effective_sample_size="exact", kriging=False, gain=False, propagate=False)
    step = reference_layer(
        hidden_states,
        torch.ones_like(hidden_states[..., 0]),
        weights,
        config,
        nothing,
        index=index,
        position_ids=position_ids,
        visible=visible,
        process_noise=None,
    )
    return step.hidden_states


def causal_visibility(tokens: int, attention_mask: Tensor | None = None) -> Tensor:
    """bool (B, T, T): keys not later than the query and not padding; attention_mask is (B, T) with 1 at real tokens."""
    visible = torch.ones(tokens, tokens, dtype=torch.bool).tril()[None]
    return visible if attention_mask is None else visible & attention_mask.bool()[:, None, :]


def reference_model(
    state_dict: Mapping[str, Tensor],
    config: Any,
    settings: Settings,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    signs: Signs | None = None,
    reliability: Tensor | None = None,
    *,
    visible: Tensor | None = None,
    log_initial_precision: Tensor | None = None,
    log_initial_key_precision: Tensor | None = None,
    num_keys: Tensor | int | None = None,
) -> ReferenceOutput:
    """A whole patched model for causal language modelling, without cache and dropout.

    Args:
        state_dict: float64 tensors under the patched model's names; they may require gradients. The filter's own are
            `model.layers.{i}.bft.log_process_noise` (all patched layers but the last), `.log_initial_precision` (the
            first), and `.log_key_process_noise`, `.log_initial_key_precision` with separate_key_precision. When it
            holds none of them, or none that could matter, the settings' start values stand in.
        config: A configuration of transformers with default rotary positions.
        settings: The configuration.
        input_ids: (B, T).
        attention_mask: (B, T), 1 at real tokens.
        position_ids: (B, T) or (1, T); None counts slots from 0, as transformers' forward does.
        signs: Probe signs, needed for effective_sample_size="probe".
        reliability: rho in [0, 1], (B, T).
        visible: bool (B, T, T) in place of the causal mask and attention_mask.
        log_initial_precision: log tau in place of the state dict's, broadcastable to (B, T) or (B, T, C).
        log_initial_key_precision: Likewise of lam^key.
        num_keys: See attention_observation.

    Returns:
        Logits, hidden states, and the filter's quantities by layer.

    Raises:
        ValueError: The config asks for something the oracle does not know.
        KeyError: A filter parameter that matters under the settings is missing while others are there.
    """
    ropes = [rope for rope in config.rope_parameters.values() if isinstance(rope, dict)] or [config.rope_parameters]
    if any(rope["rope_type"] != "default" for rope in ropes):
        raise ValueError("The oracle knows default rotary positions alone.")
    batch, tokens = input_ids.shape
    if position_ids is None:
        position_ids = torch.arange(tokens)[None]
    position_ids = position_ids.expand(batch, tokens)
    if visible is None:
        visible = causal_visibility(tokens, attention_mask)
    visible = visible.expand(batch, tokens, tokens)
    count = config.num_hidden_layers
    patched = sorted(range(count) if settings.layers is None else (i % count for i in settings.layers))
    shape = (batch, tokens) if settings.granularity == "token" else (batch, tokens, config.hidden_size)
    own_keys = any(".bft." in name for name in state_dict)
    state_matters = settings.gain or (
        settings.kriging and (not settings.separate_key_precision or settings.prior_scale == "neighbours")
    )

    def parameter(layer: int, name: str, start: float, matters: bool) -> Tensor:
        full_name = f"model.layers.{layer}.bft.{name}"
        if full_name in state_dict:
            return state_dict[full_name].exp()
        if own_keys and matters:
            raise KeyError(f"{full_name} is missing from the state dict although it matters under {settings}.")
        return torch.tensor([start], dtype=torch.float64)

    def initial(name: str, matters: bool) -> Tensor:
        tau = parameter(patched[0], name, settings.initial_precision_value, matters)
        return tau.expand(shape)

    if log_initial_precision is not None:
        precision = log_initial_precision.exp().expand(shape)
    else:
        precision = initial("log_initial_precision", state_matters)
    key_precision = None
    if settings.separate_key_precision and log_initial_key_precision is not None:
        key_precision = log_initial_key_precision.exp().expand(shape)
    elif settings.separate_key_precision:
        key_precision = initial("log_initial_key_precision", settings.kriging)

    hidden_states = state_dict["model.embed_tokens.weight"][input_ids]
    if config.model_type.startswith("gemma"):
        hidden_states = hidden_states * config.hidden_size**0.5
    elif getattr(config, "embedding_multiplier", None) is not None:
        hidden_states = hidden_states * config.embedding_multiplier
    steps: list[LayerStep | None] = []
    outputs = [hidden_states]
    for layer in range(count):
        prefix = f"model.layers.{layer}."
        weights = {
            name.removeprefix(prefix): tensor
            for name, tensor in state_dict.items()
            if name.startswith(prefix) and ".bft." not in name
        }
        if layer not in patched:
            hidden_states = plain_layer(
                hidden_states, weights, config, index=layer, position_ids=position_ids, visible=visible
            )
            steps.append(None)
            outputs.append(hidden_states)
            continue
        noise = key_noise = None
        if layer != patched[-1] and settings.propagate:
            # Without gain, what a key precision of its own takes over is all that lam can show, a layer later.
            read = state_matters and (settings.gain or not settings.separate_key_precision or layer != patched[-2])
            noise = parameter(layer, "log_process_noise", settings.initial_process_noise, read)
            if settings.separate_key_precision:
                key_noise = parameter(layer, "log_key_process_noise", settings.initial_process_noise, settings.kriging)
        layer_signs = None
        if settings.effective_sample_size == "probe":
            layer_signs = _given(signs, "signs")(layer, position_ids, config.num_key_value_heads, settings.num_probes)
        step = reference_layer(
            hidden_states,
            precision,
            weights,
            config,
            settings,
            index=layer,
            position_ids=position_ids,
            visible=visible,
            process_noise=noise,
            key_precision=key_precision,
            key_process_noise=key_noise,
            signs=layer_signs,
            reliability=reliability,
            num_keys=num_keys,
        )
        hidden_states, precision, key_precision = step.hidden_states, step.next_precision, step.next_key_precision
        steps.append(step)
        outputs.append(hidden_states)

    outputs[-1] = normed(hidden_states, state_dict, "model.norm", layer_of(config, 0))
    head = state_dict.get("lm_head.weight")
    if head is None or config.tie_word_embeddings:
        head = state_dict["model.embed_tokens.weight"]

    logits = outputs[-1] @ head.T / (getattr(config, "logits_scaling", None) or 1.0)
    if getattr(config, "final_logit_softcapping", None) is not None:
        logits = config.final_logit_softcapping * torch.tanh(logits / config.final_logit_softcapping)

    def by_layer(read: Callable[[LayerStep], Tensor | None]) -> list[Tensor | None]:
        return [None if step is None else read(step) for step in steps]

    return ReferenceOutput(
        logits=logits,
        hidden_states=outputs,
        precision=by_layer(lambda step: step.precision),
        updated_precision=by_layer(lambda step: step.updated_precision),
        observation_precision=by_layer(lambda step: step.observation.precision),
        gain=by_layer(lambda step: step.gain),
        effective_sample_size=by_layer(lambda step: step.observation.effective_sample_size),
        residual_variance=by_layer(lambda step: step.observation.residual_variance),
        jacobian=by_layer(lambda step: step.jacobian),
        weights=by_layer(lambda step: step.observation.weights),
        key_precision=by_layer(lambda step: step.key_precision),
    )


reference_llama = reference_model
