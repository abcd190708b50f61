"""The effective weight of a linear module, adapters included, and a cache for what is derived from weights."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from .offload import resident

_kept: weakref.WeakSet[DerivedFromWeights] = weakref.WeakSet()


def forget_derived(*_: Any) -> None:
    """Drop every kept value: for events that change weights without a sign (fused optimizers leave `_version` alone)."""
    for holder in list(_kept):
        holder.forget()
    _kept.clear()


register_optimizer_step_post_hook(forget_derived)


def effective_weight(module: nn.Module) -> Tensor:
    """The matrix that a linear module multiplies with, (out, in): LoRA deltas added, quantised weights dequantised.

    Args:
        module: nn.Linear, a PEFT LoRA layer around one, or any module that is linear (plus a bias) in its input.

    Returns:
        The weight in the module's own dtype. Gradients flow where the module is a plain nn.Linear or a LoRA layer.
    """
    if type(module) is nn.Linear:
        return resident(module, "weight")
    base = module.get_base_layer() if _is_lora(module) else None
    if type(base) is nn.Linear and not _lora_variants(module):
        weight = resident(base, "weight")
        if module.disable_adapters or module.merged:
            return weight
        for adapter in module.active_adapters:
            if adapter in module.lora_A:
                delta = resident(module.lora_B[adapter], "weight") @ resident(module.lora_A[adapter], "weight")
                weight = weight + (delta * module.scaling[adapter]).to(weight.dtype)
        return weight
    return _probe_weight(module)


def _is_lora(module: nn.Module) -> bool:
    return hasattr(module, "get_base_layer") and hasattr(module, "lora_A")


def _lora_variants(module: nn.Module) -> bool:
    """DoRA and other variants do more than add a low-rank product; transposed weights are none of nn.Linear's."""
    return bool(getattr(module, "lora_variant", None)) or bool(getattr(module, "use_dora", {}).get("default"))


@torch.no_grad()
def _probe_weight(module: nn.Module) -> Tensor:
    """Read any linear module by its answers to the unit vectors; evaluation mode keeps adapter dropout out of it."""
    parameters = list(module.parameters())
    # A quantised module may hold integers alone; it takes float32 and computes in what it was told to.
    dtype = next((p.dtype for p in parameters if p.is_floating_point()), torch.float32)
    device = parameters[0].device
    base = module.get_base_layer() if hasattr(module, "get_base_layer") else module
    training = module.training
    module.eval()
    try:
        zero = torch.zeros(1, base.in_features, dtype=dtype, device=device)
        unit = torch.eye(base.in_features, dtype=dtype, device=device)
        return (module(unit) - module(zero)).T
    finally:
        module.train(training)


def weight_state(module: nn.Module) -> tuple[Any, ...]:
    """What tells that `effective_weight(module)` may differ from before, as far as the module shows it.

    A weak reference equals another as long as both are alive and of the same tensor: a new tensor may come to stand at the
    address, and get the id, of one that was freed.
    """
    if type(module) is nn.Linear:
        weight = module.weight
        return _Identity(weight), weight.data_ptr(), weight._version
    tensors = tuple((_Identity(tensor), tensor.data_ptr(), tensor._version) for tensor in module.parameters())
    if not hasattr(module, "get_base_layer"):
        return tensors
    scaling = tuple(sorted(getattr(module, "scaling", {}).items()))
    return tensors, module.disable_adapters, tuple(module.active_adapters), tuple(module.merged_adapters), scaling


class _Identity:
    """A weak reference that compares by identity, where a tensor's own equality would compare elements."""

    def __init__(self, tensor: Tensor) -> None:
        self._reference = weakref.ref(tensor)

    def __eq__(self, other: object) -> bool:
        mine = self._reference()
        return mine is not None and isinstance(other, _Identity) and other._reference() is mine

    __hash__ = None  # type: ignore[assignment]


class DerivedFromWeights:
    """A value computed from the weights of some modules, kept until one of them may have changed.

    It is dropped by pickling and deep copies: a copy derives its own.
    """

    def __init__(self) -> None:
        self._key: tuple[Any, ...] | None = None
        self._value: Any = None

    def forget(self) -> None:
        """Drop the value."""
        self._key = self._value = None

    def get(self, modules: Sequence[nn.Module], compute: Callable[[], Any], inference: bool = False) -> Any:
        """The kept value, or `compute()` without gradient when a weight of `modules` may have changed since.

        Args:
            modules: whose weights the value is computed from.
            compute: computes it.
            inference: whether the caller's pass has no gradients. Compiled code cannot compare weights: in inference it takes
                the value that an eager pass left, if any event that changes weights has not dropped it; else it computes.
        """
        if torch.compiler.is_compiling():
            if inference and self._value is not None:
                return self._value
            with torch.no_grad():
                return compute()
        key = tuple(map(weight_state, modules))
        if key != self._key:
            with torch.no_grad():
                self._value = compute()
            self._key = key
            _kept.add(self)
        return self._value

    def __reduce__(self) -> tuple[Any, ...]:
        return DerivedFromWeights, ()
