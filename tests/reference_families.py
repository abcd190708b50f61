"""The float64 oracle's decoder layers: what each family of transformers does around the filter, written out plainly.

Nothing here imports the library. `Anatomy` says how a family differs from Llama, `Layer` is one layer of one configuration.
Tensors go by transformers' own names within the layer ("self_attn.q_proj.weight", ...).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Anatomy:
    """A family's decoder layer where it differs from Llama's. Norms are None where there is none.

    `query_key_norm` is "head" for a norm over each head's channels and "all" for one over all heads'.
    """

    input_norm: str | None = "input_layernorm"
    attention_norm: str | None = None
    ffn_norm: str | None = "post_attention_layernorm"
    ffn_output_norm: str | None = None
    norm_adds_one: bool = False
    query_key_norm: str | None = None


SANDWICHED = {
    "attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_output_norm": "post_feedforward_layernorm",
    "norm_adds_one": True,
}
ANATOMIES = {
    "qwen3": Anatomy(query_key_norm="head"),
    "qwen3_moe": Anatomy(query_key_norm="head"),
    "gemma": Anatomy(norm_adds_one=True),
    "gemma2": Anatomy(**SANDWICHED),
    "gemma3_text": Anatomy(query_key_norm="head", **SANDWICHED),
    "olmo2": Anatomy(
        input_norm=None,
        attention_norm="post_attention_layernorm",
        ffn_norm=None,
        ffn_output_norm="post_feedforward_layernorm",
        query_key_norm="all",
    ),
}
LLAMA = Anatomy()


@dataclass(frozen=True)
class Layer:
    """One layer of a configuration.

    Attributes:
        epsilon: Of every norm.
        head_dim: D.
        theta: Base of the rotary positions, None for none.
        anatomy: The family's.
        scaling: Factor on the attention's scores, None for 1 / sqrt(D).
        softcap: Scores s become c tanh(s / c), None for no cap.
        window: A query sees this many slots, itself included; None for all before it.
        multiplier: On both outputs, before they enter the residual.
        activation: Of the FFN.
        routed: How many experts a token is sent to.
        routing_sums_to_one: Whether the chosen experts' weights are divided by their sum.
    """

    epsilon: float
    head_dim: int = 0
    theta: float | None = None
    anatomy: Anatomy = LLAMA
    scaling: float | None = None
    softcap: float | None = None
    window: int | None = None
    multiplier: float = 1.0
    activation: str = "silu"
    routed: int = 0
    routing_sums_to_one: bool = True


def layer_of(config: Any, index: int) -> Layer:
    """What a configuration of transformers says about its layer `index`."""

    def given(name: str, otherwise: Any = None) -> Any:
        value = getattr(config, name, None)
        return otherwise if value is None else value

    types = given("layer_types")
    rope = config.rope_parameters
    if types is not None and types[index] in rope:  # each kind of layer has its own
        rope = rope[types[index]]
    theta = rope["rope_theta"]
    if given("no_rope_layers") is not None and not config.no_rope_layers[index]:
        theta = None
    window = given("sliding_window")
    if types is not None and types[index] != "sliding_attention":
        window = None
    scaling = given("attention_multiplier")
    if given("query_pre_attn_scalar") is not None:
        scaling = config.query_pre_attn_scalar**-0.5
    return Layer(
        epsilon=config.rms_norm_eps,
        head_dim=given("head_dim") or config.hidden_size // config.num_attention_heads,
        theta=theta,
        anatomy=ANATOMIES.get(given("model_type", "llama"), LLAMA),
        scaling=scaling,
        softcap=given("attn_logit_softcapping"),
        window=window,
        multiplier=given("residual_multiplier", 1.0),
        activation=given("hidden_activation") or given("hidden_act", "silu"),
        routed=given("num_experts_per_tok", 0),
        routing_sums_to_one=given("norm_topk_prob", True),
    )


def activate(x: Tensor, name: str) -> Tensor:
    """An activation by the name it has in configurations."""
    if name == "silu":
        return x * torch.sigmoid(x)
    if name == "gelu":
        return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    if name in ("gelu_pytorch_tanh", "gelu_new"):
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    if name == "relu2":
        return torch.where(x > 0, x, 0.0) ** 2
    raise ValueError(f"the oracle does not know the activation {name!r}")


def rms_norm(hidden_states: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Llama's norm and its scale 1 / rms, (..., 1)."""
    inverse_rms = (hidden_states**2).mean(-1, keepdim=True).add(epsilon).rsqrt()
    return weight * (hidden_states * inverse_rms), inverse_rms


def norm_weight(weights: Weights, name: str, layer: Layer) -> Tensor:
    """What the norm `name` multiplies channels by."""
    return weights[f"{name}.weight"] + (1.0 if layer.anatomy.norm_adds_one else 0.0)


def normed(x: Tensor, weights: Weights, name: str | None, layer: Layer) -> Tensor:
    """x behind the norm `name`, or as it is."""
    return x if name is None else rms_norm(x, norm_weight(weights, name, layer), layer.epsilon)[0]


def rotate(states: Tensor, position_ids: Tensor, theta: float | None) -> Tensor:
    """Rotary positions of the default kind on (B, H, T, D)."""
    if theta is None:
        return states
    half = states.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, dtype=states.dtype, device=states.device) / half)
    angle = position_ids[:, None, :, None].to(states.dtype) * frequency
    first, second = states[..., :half], states[..., half:]
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1)


def linear(x: Tensor, weights: Weights, name: str) -> Tensor:
    """The linear module `name`."""
    return functional.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def query_key_value(
    x: Tensor, weights: Weights, position_ids: Tensor, layer: Layer, groups: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (B, H, T, D), keys and values (B, G, T, D) of the attention's input, positions applied."""
    if "self_attn.qkv_proj.weight" in weights:
        width = groups * layer.head_dim
        query, key, value = linear(x, weights, "self_attn.qkv_proj").tensor_split((-2 * width, -width), dim=-1)
    else:
        query, key, value = (linear(x, weights, f"self_attn.{name}_proj") for name in "qkv")

    def by_head(states: Tensor, norm: str | None = None) -> Tensor:
        where = layer.anatomy.query_key_norm if norm else None
        if where == "all":
            states = normed(states, weights, f"self_attn.{norm}", layer)
        states = states.unflatten(-1, (-1, layer.head_dim)).transpose(1, 2)
        return normed(states, weights, f"self_attn.{norm}", layer) if where == "head" else states

    query, key = by_head(query, "q_norm"), by_head(key, "k_norm")
    return rotate(query, position_ids, layer.theta), rotate(key, position_ids, layer.theta), by_head(value)


def route(x: Tensor, weights: Weights, layer: Layer) -> Tensor:
    """Weights of the experts, (..., E), zero for those that a token is not sent to."""
    chances = torch.softmax(functional.linear(x, weights["mlp.gate.weight"]), dim=-1)
    kept = chances >= chances.topk(layer.routed, dim=-1).values[..., -1:]
    chosen = chances * kept
    return chosen / chosen.sum(-1, keepdim=True) if layer.routing_sums_to_one else chosen


def feed_forward(x: Tensor, weights: Weights, activation: str = "silu", routing: Tensor | None = None) -> Tensor:
    """The FFN on its input (..., C): gated, plain, with gate and up projection in one, or of experts, as its tensors are."""
    if "mlp.experts.gate_up_proj" in weights:
        # Every expert works on every token; routing has zeros for most.
        both = torch.einsum("...c,efc->...ef", x, weights["mlp.experts.gate_up_proj"])
        gate, up = both.chunk(2, dim=-1)
        answers = torch.einsum("...ef,ecf->...ec", activate(gate, activation) * up, weights["mlp.experts.down_proj"])
        assert routing is not None
        return (routing[..., None] * answers).sum(-2)
    if "mlp.gate_up_proj.weight" in weights:
        gate, up = linear(x, weights, "mlp.gate_up_proj").chunk(2, dim=-1)
    elif "mlp.gate_proj.weight" in weights:
        gate, up = linear(x, weights, "mlp.gate_proj"), linear(x, weights, "mlp.up_proj")
    else:
        return linear(activate(linear(x, weights, "mlp.up_proj"), activation), weights, "mlp.down_proj")
    return linear(activate(gate, activation) * up, weights, "mlp.down_proj")


Held = tuple[Tensor, Tensor, Tensor]
"""What J holds fixed, by token: 1 / rms before the FFN, the experts' weights, 1 / rms behind the FFN."""


def ffn_update(hidden_states: Tensor, weights: Weights, layer: Layer, held: Held | None = None) -> tuple[Tensor, Held]:
    """What the FFN adds to the residual, and what J holds fixed (ones where there is nothing to hold)."""
    anatomy, nothing = layer.anatomy, torch.ones_like(hidden_states[..., :1])
    before, routing, behind = (nothing, nothing, nothing) if held is None else held
    x = hidden_states
    if anatomy.ffn_norm is not None:
        weight = norm_weight(weights, anatomy.ffn_norm, layer)
        if held is None:
            before = rms_norm(x, weight, layer.epsilon)[1]
        x = weight * (x * before)
    if "mlp.gate.weight" in weights and held is None:
        routing = route(x, weights, layer)
    x = feed_forward(x, weights, layer.activation, routing)
    if anatomy.ffn_output_norm is not None:
        weight = norm_weight(weights, anatomy.ffn_output_norm, layer)
        if held is None:
            behind = rms_norm(x, weight, layer.epsilon)[1]
        x = weight * (x * behind)
    return layer.multiplier * x, (before, routing, behind)


def jacobian_diagonal(hidden_states: Tensor, weights: Weights, layer: Layer | float) -> Tensor:
    """diag of df/dh by autograd, f what the FFN adds to the residual, (B, T, C); a number is Llama's epsilon.

    Held fixed are the norms' scales and the weights of the experts.
    """
    if not isinstance(layer, Layer):
        layer = Layer(layer)
    _, held = ffn_update(hidden_states, weights, layer)

    def step(one: Tensor, *held_for_one: Tensor) -> Tensor:
        return ffn_update(one, weights, layer, held_for_one)[0]

    full = torch.func.vmap(torch.func.jacrev(step))(hidden_states.flatten(0, 1), *(x.flatten(0, 1) for x in held))
    return full.diagonal(dim1=-2, dim2=-1).unflatten(0, hidden_states.shape[:2])
