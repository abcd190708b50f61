"""The anatomy of a model family: what its decoder layers call their parts, and whether a layer has them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

EXPERT_PARTS = ("gate_up_proj", "down_proj", "act_fn", "config")
"""What is read of a module of routed experts."""

ROUTER = "gate"
"""What stands beside the experts in transformers."""


@dataclass(frozen=True)
class Architecture:
    """One model family. Names are class names of transformers and attribute names of its decoder layer.

    A layer adds attention(norm(h)) to h, and then FFN(norm(h)). What a family has none of is None here. What stands between an
    output and the residual stands there in this order: its norm, the residual multiplier, its dropout.

    Attributes:
        model_type: `config.model_type` of the family.
        base_model: class that holds the decoder layers in `.layers`.
        decoder_layer: class of a decoder layer.
        attention: class of the attention; its forward calls `ALL_ATTENTION_FUNCTIONS` and `cache.update`.
        reading: what K multiplies, and where J is taken, in a sentence.
        input_norm: the RMS norm before the attention.
        self_attention: the attention.
        output_projection: of the attention.
        attention_norm: an RMS norm on the attention's output.
        attention_dropout: a dropout on the attention's output.
        softcap: whether the attention gives its attention function a `softcap` of the scores.
        residual_multiplier: a number of the layer by which both outputs are multiplied.
        ffn_norm: the RMS norm before the FFN.
        ffn: the FFN.
        ffn_output_norm: an RMS norm on the FFN's output.
        ffn_dropout: a dropout on the FFN's output.
        norm_epsilon: the epsilon of an RMS norm.
        norm_offset: added to the weight of every RMS norm before it multiplies.
        gate_projection: of a gated FFN, `down(activation(gate(x)) * up(x))`; None in a plain one, `down(activation(up(x)))`.
        up_projection: of the FFN.
        down_projection: of the FFN.
        fused_projection: gate and up projection as one, the gate's rows first; the two names above are not read then.
        activation: of the FFN.
        experts: of an FFN of routed experts, gated ones with the projections fused; in an FFN without it the names above are read.
        built_in: the family is one of bft_hf.rec: its models take the filter by `add_filter` and give it back by `remove_filter`,
            and the names above are not read.
    """

    model_type: str
    base_model: str
    decoder_layer: str
    attention: str
    reading: str = ""
    input_norm: str | None = "input_layernorm"
    self_attention: str = "self_attn"
    output_projection: str = "o_proj"
    attention_norm: str | None = None
    attention_dropout: str | None = None
    softcap: bool = False
    residual_multiplier: str | None = None
    ffn_norm: str | None = "post_attention_layernorm"
    ffn: str = "mlp"
    ffn_output_norm: str | None = None
    ffn_dropout: str | None = None
    norm_epsilon: str = "variance_epsilon"
    norm_offset: float = 0.0
    gate_projection: str | None = "gate_proj"
    up_projection: str = "up_proj"
    down_projection: str = "down_proj"
    fused_projection: str | None = None
    activation: str = "act_fn"
    experts: str | None = None
    built_in: bool = False

    @property
    def dressed(self) -> bool:
        """Whether a layer is more, or less, than h + attention(norm(h)) and then h + FFN(norm(h))."""
        between = (
            self.attention_norm,
            self.attention_dropout,
            self.softcap,
            self.residual_multiplier,
            self.ffn_output_norm,
            self.ffn_dropout,
        )
        return any(between) or self.input_norm is None or self.ffn_norm is None

    @property
    def ffn_parts(self) -> tuple[str, ...]:
        """The names within the FFN that are read."""
        if self.fused_projection is not None:
            return self.fused_projection, self.down_projection, self.activation
        gate = () if self.gate_projection is None else (self.gate_projection,)
        return *gate, self.up_projection, self.down_projection, self.activation

    @property
    def layer_parts(self) -> tuple[str, ...]:
        """The names within the decoder layer that are read."""
        names = (
            self.input_norm,
            self.self_attention,
            self.attention_norm,
            self.attention_dropout,
            self.residual_multiplier,
            self.ffn_norm,
            self.ffn,
            self.ffn_output_norm,
            self.ffn_dropout,
        )
        return tuple(name for name in names if name is not None)

    @property
    def norms(self) -> tuple[str, ...]:
        """The RMS norms of the decoder layer."""
        names = (self.input_norm, self.attention_norm, self.ffn_norm, self.ffn_output_norm)
        return tuple(name for name in names if name is not None)

    def missing(self, layer: nn.Module) -> str | None:
        """What is named here and not in a decoder layer, or is there and is no RMS norm, in words; None if all is well."""
        for name in self.layer_parts:
            if not hasattr(layer, name):
                return f"no {name!r}"
        if not hasattr(getattr(layer, self.self_attention), self.output_projection):
            return f"no '{self.self_attention}.{self.output_projection}'"
        path, ffn, parts = self.ffn, getattr(layer, self.ffn), self.ffn_parts
        if self.routes(ffn):
            beside = [name for name, _ in ffn.named_children() if name not in (ROUTER, self.experts)]
            if beside:
                return f"'{path}.{beside[0]}' beside the experts, whose J is not read"
            path, ffn, parts = f"{path}.{self.experts}", getattr(ffn, str(self.experts)), EXPERT_PARTS
            ffn = bare_experts(ffn)
            if getattr(ffn, "is_transposed", False) or getattr(ffn, "has_bias", False):
                return f"transposed weights or biases in '{path}'"
        for name in parts:
            if not hasattr(ffn, name):
                return f"no '{path}.{name}'"
        for name in self.norms:
            norm = getattr(layer, name)
            if getattr(norm, "weight", None) is None:
                return f"no '{name}.weight'"
            if getattr(norm, "bias", None) is not None or isinstance(norm, nn.LayerNorm):
                return f"a layer norm as {name!r}, where the filter reads RMS norms"
            if not hasattr(norm, self.norm_epsilon):
                return f"no '{name}.{self.norm_epsilon}'"
        return None

    def routes(self, ffn: nn.Module) -> bool:
        """Whether an FFN is one of routed experts."""
        return self.experts is not None and hasattr(ffn, self.experts)

    def fits(self, layer: nn.Module) -> bool:
        """Whether a decoder layer has everything that is named here, and no part beside it."""
        if self.missing(layer) is not None:
            return False
        ffn = getattr(layer, self.ffn)
        within = {ROUTER, self.experts} if self.routes(ffn) else set(self.ffn_parts)
        children = {name for name, _ in layer.named_children()}
        return children <= set(self.layer_parts) and {name for name, _ in ffn.named_children()} <= within


def bare_experts(experts: nn.Module) -> nn.Module:
    """The experts within PEFT's wrappers around single parameters of theirs."""
    while hasattr(experts, "base_layer"):
        experts = experts.base_layer  # type: ignore[assignment]
    return experts
