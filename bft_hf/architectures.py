"""The table of the supported model families, one row each, and how a model finds its row."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from .anatomy import Architecture


def _named(model_type: str, prefix: str, reading: str, **names: str | float | bool | None) -> Architecture:
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

_ROUTED = (
    "K multiplies W_O e; J is the sum of the chosen experts' own, each with its weight from the router, held fixed as the norm's "
    "scale is."
)
_SANDWICHED = (
    "K multiplies norm(W_O e), and absolute R is that of norm(W_O e); J is that of norm(FFN(norm(h))), the scales of both norms "
    "held fixed, their weights 1 + w."
)
_GEMMA_NORMS: dict[str, Any] = {
    "attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_output_norm": "post_feedforward_layernorm",
    "norm_epsilon": "eps",
    "norm_offset": 1.0,
}

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
        _named(
            "phi3",
            "Phi3",
            _PLAIN + " Residual dropout acts on what enters, not on R or J; n counts the keys within the window.",
            attention_dropout="resid_attn_dropout",
            ffn_dropout="resid_mlp_dropout",
            gate_projection=None,
            fused_projection="gate_up_proj",
            activation="activation_fn",
        ),
        _named(
            "granite",
            "Granite",
            "K multiplies c W_O e, c the residual multiplier: absolute R is that of c W_O e; J is c times that of the gated FFN "
            "behind its norm.",
            residual_multiplier="residual_multiplier",
        ),
        _named(
            "gemma2",
            "Gemma2",
            _SANDWICHED + " Precisions weigh keys behind the soft cap.",
            softcap=True,
            **_GEMMA_NORMS,
        ),
        Architecture(
            "gemma3_text",
            "Gemma3TextModel",
            "Gemma3DecoderLayer",
            "Gemma3Attention",
            _SANDWICHED,
            **_GEMMA_NORMS,  # type: ignore[arg-type]
        ),
        _named(
            "olmo2",
            "Olmo2",
            "K multiplies norm(W_O e), and absolute R is that of norm(W_O e); J is that of norm(FFN(h)), with no norm before the FFN.",
            input_norm=None,
            attention_norm="post_attention_layernorm",
            ffn_norm=None,
            ffn_output_norm="post_feedforward_layernorm",
        ),
        _named("mixtral", "Mixtral", _ROUTED + " n counts the keys within the window.", experts="experts"),
        _named("qwen3_moe", "Qwen3Moe", _ROUTED, experts="experts"),
        Architecture("sasrec", "SASRecForNextItem", "SASRecLayer", "SelfAttention", built_in=True),
        Architecture("bert4rec", "BERT4RecForMaskedItem", "BERT4RecLayer", "SelfAttention", built_in=True),
        Architecture("hstu", "HSTUForNextItem", "HSTULayer", "HSTULayer", built_in=True),
    ]
}


_registered: set[str] = set()

_PARALLEL = (
    "its attention and FFN read the same state and are added to it at once, so no updated state stands between them: the filter "
    "would predict from a precision that the FFN's input never had. Choose a family with one residual after the other"
)
REFUSED = dict.fromkeys(
    ("GPTNeoXModel", "FalconModel", "PhiModel", "GPTJModel", "CodeGenModel", "CohereModel", "Cohere2Model"), _PARALLEL
)
"""Base models of families that have no clean reading as a filter, and why."""


def register_architecture(model_type: str, like: str = "llama", **names: Any) -> Architecture:
    """Add a family of transformers, or of your own, to those that `patch` knows.

    A saved model of it is loaded by a process that has registered it too. How to find out whether a row is right, and an example,
    are in docs/families.md.

    Args:
        model_type: `config.model_type` of the family.
        like: a supported family whose layers are built alike.
        **names: fields of `Architecture` in which it differs. The class names are by default what transformers would call
            them: FooModel, FooDecoderLayer and FooAttention.

    Returns:
        The family's row.

    Raises:
        ValueError: the family is supported already, `like` is not, or a name is no field of `Architecture`.
    """
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    if like not in ARCHITECTURES or ARCHITECTURES[like].built_in:
        raise ValueError(f"like={like!r} is no supported family: choose one of {', '.join(_families())}")
    known = [field.name for field in dataclasses.fields(Architecture) if field.name not in ("model_type", "built_in")]
    if unknown := sorted(set(names) - set(known)):
        raise ValueError(f"an architecture has no {unknown[0]!r}: its fields are {', '.join(known)}")
    base_model = names.setdefault("base_model", MODEL_MAPPING_NAMES.get(model_type))
    if not isinstance(base_model, str):
        raise ValueError(
            f"transformers knows no {model_type!r}: give base_model, decoder_layer and attention, the class names"
        )
    prefix = base_model.removesuffix("Model")
    names = {"decoder_layer": f"{prefix}DecoderLayer", "attention": f"{prefix}Attention", **names}
    row = dataclasses.replace(ARCHITECTURES[like], model_type=model_type, **names)
    present = ARCHITECTURES.get(model_type)
    if present is not None and present != row:
        raise ValueError(f"{model_type!r} is supported already, with another anatomy: leave out register_architecture")
    _registered.add(model_type)
    ARCHITECTURES[model_type] = row
    return row


def registered(model_type: str) -> bool:
    """Whether a family came by `register_architecture`."""
    return model_type in _registered


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
        raise ValueError(_not_found(model))
    if len(found) > 1:
        raise ValueError(f"{type(model).__name__} holds {len(found)} decoders: call patch on each of them")
    return found[0]


def _class_names(module: nn.Module) -> set[str]:
    own = {ARCHITECTURES[name].base_model for name in _registered}
    return {
        cls.__name__
        for cls in type(module).__mro__
        if cls.__module__.startswith(("transformers.", "bft_hf.")) or cls.__name__ in own
    }


def _families() -> list[str]:
    return sorted(name for name, row in ARCHITECTURES.items() if not row.built_in)


def _not_found(model: nn.Module) -> str:
    """Why no decoder was found, and what to try."""
    for module in model.modules():
        for name in _class_names(module):
            if name in REFUSED:
                return f"{name} is not supported: {REFUSED[name]}"
    start = f"{type(model).__name__} holds no decoder of a supported family ({', '.join(_families())})"
    for module in model.modules():
        layers = getattr(module, "layers", None)
        if isinstance(layers, nn.ModuleList) and len(layers):
            return (
                f"{start}. If its layers are built like those of one, try the following, and compare the model with itself "
                f"as docs/families.md does:\n{_proposal(module, layers[0])}"
            )
    return f"{start}, nor any other with its layers in `.layers`: see docs/families.md for what a family needs"


def _proposal(base: nn.Module, layer: nn.Module) -> str:
    """The two lines to try on a model whose layers are not known, as far as the layers tell."""
    rows = [row for row in ARCHITECTURES.values() if not row.built_in]
    plain = [dataclasses.replace(row, gate_projection=None) for row in rows if row.fused_projection is None]
    alike = next((row for row in [*rows, *plain] if row.fits(layer)), None)
    attention = getattr(layer, "self_attn", None)
    prefix = type(base).__name__.removesuffix("Model")
    names = {"base_model": type(base).__name__, "decoder_layer": type(layer).__name__}
    if attention is not None:
        names["attention"] = type(attention).__name__
    usual = {
        "base_model": f"{prefix}Model",
        "decoder_layer": f"{prefix}DecoderLayer",
        "attention": f"{prefix}Attention",
    }
    arguments = [repr(getattr(getattr(base, "config", None), "model_type", "its model_type"))]
    arguments += [f"like={alike.model_type if alike else 'llama'!r}"]
    arguments += [f"{field}={name!r}" for field, name in names.items() if name != usual[field]]
    comment = ""
    if alike is None:
        lack = ARCHITECTURES["llama"].missing(layer) or "parts that Llama has not"
        comment = f"  # and the names that differ: a layer of it has {lack}"
    elif alike in plain:
        arguments += ["gate_projection=None"]
    return f"    bft_hf.register_architecture({', '.join(arguments)}){comment}\n    bft_hf.patch(model)"
