"""Weights that are elsewhere between calls, offloaded or sharded, and forwards that accelerate's hooks wrapped."""

from __future__ import annotations

import types

import torch
from torch import Tensor, nn


def resident(module: nn.Module, name: str) -> Tensor:
    """A parameter with its values: of an offloaded module, fetched from where the hook keeps them; of a sharded one, whole."""
    parameter = getattr(module, name)
    if hasattr(parameter, "full_tensor"):  # FSDP2 outside the module's own forward
        if torch.is_grad_enabled():
            raise RuntimeError(
                "differentiate_jacobian reads the weights of a module that FSDP2 shards by itself: apply fully_shard to the "
                "decoder layers, not to modules within them"
            )
        return parameter.full_tensor()
    if getattr(parameter, "ds_shape", parameter.shape) != parameter.shape:
        raise RuntimeError(
            f"DeepSpeed ZeRO-3 has put away {name} of a {type(module).__name__}, which the filter reads after the module's own "
            "forward: use ZeRO-2 or FSDP2"
        )
    hook = getattr(module, "_hf_hook", None)
    if not parameter.is_meta or getattr(hook, "weights_map", None) is None:
        return parameter
    return hook.weights_map[name].to(hook.execution_device)  # type: ignore[union-attr]


def execution_device(module: nn.Module) -> torch.device:
    """The device on which a module computes."""
    device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
    return next(module.parameters()).device if device is None else torch.device(device)


def has_foreign_forward(module: nn.Module) -> bool:
    """Whether the instance carries a forward that neither its class nor an accelerate hook put there."""
    return "forward" in vars(module) and "_old_forward" not in vars(module)


def rebind_forward(module: nn.Module) -> None:
    """After a change of class, let accelerate's wrapper call the new class's forward: it keeps the old one, bound."""
    if "_old_forward" in vars(module):
        module._old_forward = types.MethodType(type(module).forward, module)


def keep_resident(module: nn.Module) -> None:
    """Bring a module's offloaded parameters back for good: for small ones that are read outside a forward."""
    hook = getattr(module, "_hf_hook", None)
    if hook is None:
        return
    from accelerate.hooks import remove_hook_from_module

    values = {name: resident(module, name) for name, _ in module.named_parameters(recurse=False)}
    remove_hook_from_module(module)
    for name, value in values.items():
        setattr(module, name, nn.Parameter(value.detach().clone(), requires_grad=value.requires_grad))
