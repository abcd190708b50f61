"""The anatomy of the supported model families as data: where a decoder layer keeps its norms, attention and FFN."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


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
    built_in: bool = False

    @property
    def dressed(self) -> bool:
        """Whether anything but the outputs themselves enters the residual, or one of the first two norms is missing."""
        between = (
            self.attention_norm,
            self.attention_dropout,
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


def _named(model_type: str, prefix: str, reading: str, **names: str | float | None) -> Architecture:
    """A row whose classes are called as transformers calls them."""
    return Architecture(
        model_type,
        f"{prefix}Model",
        f"{prefix}DecoderLayer",
        f"{prefix}Attention",
        reading,
        **names,  # type: ignore[arg-type]
    )


_PLAIN = "K multiplies W_O e; J is that of the gated FFN behind its norm."

ARCHITECTURES: dict[str, Architecture] = {
    row.model_type: row
    for row in [
        _named("llama", "Llama", _PLAIN),
        _named("mistral", "Mistral", _PLAIN + " n counts the keys within the window."),
        _named("qwen2", "Qwen2", _PLAIN),
        _named("qwen3", "Qwen3", _PLAIN),
        _named("smollm3", "SmolLM3", _PLAIN),
        _named(
            "gemma",
            "Gemma",
            "K multiplies W_O e; J is that of the gated FFN (GELU) behind its norm, whose weight is 1 + w.",
            norm_epsilon="eps",
            norm_offset=1.0,
        ),
        Architecture("sasrec", "SASRecForNextItem", "SASRecLayer", "SelfAttention", built_in=True),
        Architecture("bert4rec", "BERT4RecForMaskedItem", "BERT4RecLayer", "SelfAttention", built_in=True),
        Architecture("hstu", "HSTUForNextItem", "HSTULayer", "HSTULayer", built_in=True),
    ]
}


def find_base_model(model: nn.Module) -> tuple[nn.Module, Architecture]:
    """The module inside `model` (or itself) that holds decoder layers of a supported family, and the family.

    Args:
        model: a transformers model, bare or under a head, PEFT or any other wrapper.

    Raises:
        ValueError: no supported family is in it, or more than one model of one; the message says what to do.
    """
    rows = {row.base_model: row for row in ARCHITECTURES.values()}
    found = [(module, rows[name]) for module in model.modules() for name in _class_names(module) if name in rows]
    if not found:
        raise ValueError(
            f"{type(model).__name__} holds no decoder of a supported family ({', '.join(sorted(ARCHITECTURES))}): "
            "a further Llama-like family is one row in bft_hf/architectures.py"
        )
    if len(found) > 1:
        raise ValueError(f"{type(model).__name__} holds {len(found)} decoders: call patch on each of them")
    return found[0]


def _class_names(module: nn.Module) -> set[str]:
    return {cls.__name__ for cls in type(module).__mro__ if cls.__module__.startswith(("transformers.", "bft_hf."))}
