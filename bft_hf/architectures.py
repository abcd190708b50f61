"""The anatomy of the supported model families as data: where a decoder layer keeps its norms, attention and FFN."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Architecture:
    """One model family. Names are class names of transformers and attribute names of its decoder layer.

    Attributes:
        model_type: `config.model_type` of the family.
        base_model: class that holds the decoder layers in `.layers`.
        decoder_layer: class of a decoder layer: h + attention(norm(h)), then h + FFN(norm(h)).
        attention: class of the attention; its forward calls `ALL_ATTENTION_FUNCTIONS` and `cache.update`.
        input_norm: the RMS norm before the attention.
        self_attention: the attention; its output projection is `output_projection`, its output enters the residual as it is.
        ffn_norm: the RMS norm before the FFN; its epsilon is `norm_epsilon`.
        ffn: the gated FFN `down_projection(activation(gate_projection(x)) * up_projection(x))`.
        built_in: the family is one of bft_hf.rec: its models take the filter by `add_filter` and give it back by `remove_filter`,
            and the names above are not read.
    """

    model_type: str
    base_model: str
    decoder_layer: str
    attention: str
    input_norm: str = "input_layernorm"
    self_attention: str = "self_attn"
    output_projection: str = "o_proj"
    ffn_norm: str = "post_attention_layernorm"
    norm_epsilon: str = "variance_epsilon"
    ffn: str = "mlp"
    gate_projection: str = "gate_proj"
    up_projection: str = "up_proj"
    down_projection: str = "down_proj"
    activation: str = "act_fn"
    built_in: bool = False


ARCHITECTURES: dict[str, Architecture] = {
    row.model_type: row
    for row in [
        Architecture("llama", "LlamaModel", "LlamaDecoderLayer", "LlamaAttention"),
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
