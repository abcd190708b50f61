"""patch and unpatch: turn the decoder layers of a model into filter steps, in place, and back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn

from .anatomy import Architecture, bare_experts
from .architectures import find_base_model
from .compat import forget_static_cache
from .config import BFTConfig
from .dressed import BFTDressedDecoderLayer
from .gated_ffn import BFTFusedGatedFFN, BFTGatedFFN
from .layer import BFTAttention, BFTDecoderLayer
from .methods import override_methods, restore_methods
from .offload import execution_device, has_foreign_forward, rebind_forward
from .routed_ffn import BFTExperts, BFTRoutedFFN, Handover
from .state import BFTState
from .stream import start_stream
from .swap import InPlaceSubclass, is_swapped, restore_class, swap_class
from .ungated_ffn import BFTPlainFFN

Model = TypeVar("Model", bound=nn.Module)

KEEP_FLOAT32 = "bft"
"""The module that `from_pretrained(dtype=...)` leaves in float32."""


def patch(model: Model, config: BFTConfig | None = None) -> Model:
    """Turn the decoder layers of a model into Bayesian filter steps, in place.

    Call it before Trainer, SFTTrainer and get_peft_model. Classes keep their names, parameters their names and identity;
    each patched layer gains a child module `bft`. A model that is patched with the same configuration is left as it is.

    Args:
        model: a model of a supported family: bare, with any head, or within PEFT or another wrapper.
        config: settings, by default `BFTConfig()`, near the pretrained function, and for the recommenders of bft_hf.rec their own.

    Returns:
        The same object.

    Raises:
        ValueError: the family is not supported, `config.layers` names a layer the model lacks, the model is patched with
            another configuration, or its layers carry a forward of their own that would go around the patch.
    """
    base, architecture = find_base_model(model)
    if config is None:
        config = base.default_filter() if architecture.built_in else BFTConfig()
    present = get_config(model)
    if present == config:
        return model
    if present is not None:
        raise ValueError("the model is patched with another configuration: call bft_hf.unpatch(model) first")
    if architecture.built_in:
        base.add_filter(config)
        return model
    indices = layer_indices(base, config)
    for index in indices:
        _check_layer(base.layers[index], index, architecture)

    embeddings = base.get_input_embeddings()
    for slot, index in enumerate(indices):
        layer = base.layers[index]
        device = execution_device(getattr(layer, architecture.input_norm or architecture.layer_parts[1]))
        state = BFTState(
            config, architecture, indices, slot, base.config.hidden_size, embeddings.num_embeddings, device
        )
        state.train(layer.training)
        layer.add_module("bft", state)
        for module, mixin in _swapped_modules(layer, architecture):
            swap_class(module, mixin)
            rebind_forward(module)
        _introduce(layer, architecture)
    base.register_forward_pre_hook(start_stream, with_kwargs=True)
    base._bft_traces = []
    base._bft_calibration = None
    base._bft_config = config
    for module in _pretrained_models(model):
        module._keep_in_fp32_modules_strict = {*(module._keep_in_fp32_modules_strict or ()), KEEP_FLOAT32}
        override_methods(module)
        forget_static_cache(module)
    return model


def unpatch(model: Model) -> Model:
    """Undo `patch` exactly: the same classes, state-dict keys and logits as before. An unpatched model is left as it is.

    What training changed in the model's own weights stays; what the filter learned is dropped.

    Args:
        model: the patched model, or the same model within a wrapper.

    Returns:
        The same object.

    Raises:
        ValueError: something else changed the layers' classes after the patch.
    """
    base, architecture = find_base_model(model)
    if get_config(model) is None:
        return model
    if architecture.built_in:
        base.remove_filter()
        return model
    for index, layer in enumerate(base.layers):
        if isinstance(layer, BFTDecoderLayer) and not is_swapped(layer):
            raise ValueError(
                f"layers.{index} is a {type(layer).__name__}, put over the patch (FSDP2 does so): gather its state dict, "
                "load it into a patched model built anew, and unpatch that"
            )
    for layer in base.layers:
        if isinstance(layer, BFTDecoderLayer):
            for module, _ in _swapped_modules(layer, architecture):
                restore_class(module)
                rebind_forward(module)
            _forget(layer, architecture)
            del layer.bft
    for key, hook in list(base._forward_pre_hooks.items()):
        if hook is start_stream:
            del base._forward_pre_hooks[key]
            base._forward_pre_hooks_with_kwargs.pop(key, None)
    del base._bft_traces, base._bft_calibration, base._bft_config
    for module in _pretrained_models(model):
        module._keep_in_fp32_modules_strict = set(module._keep_in_fp32_modules_strict) - {KEEP_FLOAT32}
        restore_methods(module)
        forget_static_cache(module)
    return model


@contextmanager
def patched(model: Model, config: BFTConfig | None = None) -> Iterator[Model]:
    """`with patched(model, config):` patches for the length of the block, exceptions included.

    Raises:
        ValueError: as `patch`, and when the model is patched already.
    """
    if is_patched(model):
        raise ValueError("the model is patched already: use it as it is, or call bft_hf.unpatch(model) first")
    patch(model, config)
    try:
        yield model
    finally:
        unpatch(model)


def is_patched(model: nn.Module) -> bool:
    """Whether `model`, or the model inside it, is patched."""
    return get_config(model) is not None


def get_config(model: nn.Module) -> BFTConfig | None:
    """The configuration a model is patched with, or None."""
    configs = [vars(module)["_bft_config"] for module in model.modules() if "_bft_config" in vars(module)]
    return configs[0] if configs else None


def set_config(model: nn.Module, config: BFTConfig) -> None:
    """Put another configuration in the place of a patched model's, one under which it has the same parameters."""
    for module in model.modules():
        if "_bft_config" in vars(module):
            module._bft_config = config
        elif isinstance(module, BFTState):
            module.config = config


def bft_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The filter's own parameters (log tau and log Q) by their names in `model`; under PEFT, the ones that train."""
    states = {f"{name}." for name, module in model.named_modules() if isinstance(module, BFTState)}
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if any(name.startswith(state) for state in states) and ".original_module." not in name
    }


def param_groups(
    model: nn.Module, learning_rate: float, bft_learning_rate: float = 2e-2, weight_decay: float = 0.0
) -> list[dict[str, Any]]:
    """Optimizer groups: weights with decay, biases and norms without, and the filter's own with their own learning rate.

    At a fine-tuning rate of 2e-5, log Q would move by .002 in 100 steps of Adam: it would stay where it started.

    Args:
        model: a patched model.
        learning_rate: for the model's own parameters.
        bft_learning_rate: for log tau and log Q, without weight decay.
        weight_decay: for weights, as Trainer applies it.

    Returns:
        Groups of the parameters that require grad, for any torch optimizer; the filter's is named "bft".
    """
    ours = {id(parameter) for parameter in bft_parameters(model).values()}
    decay: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    filter_parameters: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            group = filter_parameters if id(parameter) in ours else decay if parameter.ndim > 1 else plain
            group.append(parameter)
    groups = [
        {"params": decay, "lr": learning_rate, "weight_decay": weight_decay, "name": "weights"},
        {"params": plain, "lr": learning_rate, "weight_decay": 0.0, "name": "biases_and_norms"},
        {"params": filter_parameters, "lr": bft_learning_rate, "weight_decay": 0.0, "name": "bft"},
    ]
    return [group for group in groups if group["params"]]


def layer_indices(base: nn.Module, config: BFTConfig) -> list[int]:
    """Indices of the layers that a configuration patches.

    Raises:
        ValueError: the model lacks one of them, or has none at all, or `gain_scale` counts others.
    """
    count = len(base.layers)
    indices = list(range(count)) if config.layers is None else list(config.layers)
    if not count:
        raise ValueError(f"{type(base).__name__} has no decoder layers: there is nothing to patch")
    if indices[-1] >= count:
        raise ValueError(f"BFTConfig.layers is {config.layers!r}: this model has layers 0 to {count - 1}")
    if config.gain_scale is not None and len(config.gain_scale) != len(indices):
        raise ValueError(f"BFTConfig.gain_scale has {len(config.gain_scale)} factors for {len(indices)} patched layers")
    return indices


def _swapped_modules(layer: nn.Module, architecture: Architecture) -> list[tuple[nn.Module, type[InPlaceSubclass]]]:
    ffn = getattr(layer, architecture.ffn)
    modules: list[tuple[nn.Module, type[InPlaceSubclass]]] = [
        (layer, BFTDressedDecoderLayer if architecture.dressed else BFTDecoderLayer),
        (getattr(layer, architecture.self_attention), BFTAttention),
        (ffn, _ffn_mixin(architecture, ffn)),
    ]
    if architecture.routes(ffn):
        modules.append((bare_experts(getattr(ffn, str(architecture.experts))), BFTExperts))
    return modules


def _ffn_mixin(architecture: Architecture, ffn: nn.Module) -> type[InPlaceSubclass]:
    if architecture.routes(ffn):
        return BFTRoutedFFN
    if architecture.fused_projection is not None:
        return BFTFusedGatedFFN
    return BFTPlainFFN if architecture.gate_projection is None else BFTGatedFFN


def _introduce(layer: nn.Module, architecture: Architecture) -> None:
    """Tell a layer's FFN its anatomy, and experts and the FFN around them of each other."""
    ffn: Any = getattr(layer, architecture.ffn)
    ffn._bft_architecture = architecture
    if architecture.routes(ffn):
        experts: Any = bare_experts(getattr(ffn, str(architecture.experts)))
        ffn._bft_handover = experts._bft_handover = Handover()


def _forget(layer: nn.Module, architecture: Architecture) -> None:
    """Undo `_introduce`."""
    ffn: Any = getattr(layer, architecture.ffn)
    del ffn._bft_architecture
    if architecture.routes(ffn):
        del ffn._bft_handover, bare_experts(getattr(ffn, str(architecture.experts)))._bft_handover


def _check_layer(layer: nn.Module, index: int, architecture: Architecture) -> None:
    if (missing := architecture.missing(layer)) is not None:
        raise ValueError(
            f"layers.{index} has {missing}: the anatomy of {architecture.model_type!r} does not fit it, see docs/families.md"
        )
    expected: dict[str, str | None] = {
        "": architecture.decoder_layer,
        architecture.self_attention: architecture.attention,
        architecture.ffn: None,
    }
    if architecture.routes(getattr(layer, architecture.ffn)):
        expected[f"{architecture.ffn}.{architecture.experts}"] = None
    for path, name in expected.items():
        module = layer.get_submodule(path)
        where = f"layers.{index}{'.' if path else ''}{path}"
        if name is not None and type(module).__name__ != name:
            raise ValueError(f"{where} is a {type(module).__name__}, not a {name}: undo what replaced it, then patch")
        if has_foreign_forward(module):
            raise ValueError(
                f"{where} carries a forward of its own (another patch), which would go around the filter: "
                "undo it, call bft_hf.patch, then apply the other patch to what is left"
            )
    if hasattr(layer, "bft"):
        raise ValueError(f"layers.{index} has a child named 'bft' that is not ours: rename it")


def _pretrained_models(model: nn.Module) -> list[nn.Module]:
    from transformers import PreTrainedModel

    return [module for module in model.modules() if isinstance(module, PreTrainedModel)]
