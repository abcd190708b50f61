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


class WeightState:
    """What tells that `effective_weight(module)` may differ from before, as far as the module shows it.

    Tensors are known by weak references: a new one may come to stand at the address, and get the id, of one that was freed.
    """

    def __init__(self, module: nn.Module) -> None:
        self.tensors = [(weakref.ref(tensor), tensor.data_ptr(), tensor._version) for tensor in _tensors(module)]
        self.adapters = _adapters(module)

    def holds(self, module: nn.Module) -> bool:
        """Whether `module` still shows this state."""
        tensors = _tensors(module)
        if len(tensors) != len(self.tensors) or self.adapters != _adapters(module):
            return False
        for tensor, (reference, address, version) in zip(tensors, self.tensors, strict=True):
            if reference() is not tensor or tensor.data_ptr() != address or tensor._version != version:
                return False
        return True


def _tensors(module: nn.Module) -> list[Tensor]:
    if module._modules:
        return list(module.parameters())
    # Without a walk through children that are not there: this is asked for every token.
    return [tensor for tensor in module._parameters.values() if tensor is not None]


def _adapters(module: nn.Module) -> tuple[Any, ...] | None:
    if not module._modules or not hasattr(module, "get_base_layer"):
        return None
    scaling = tuple(sorted(getattr(module, "scaling", {}).items()))
    return module.disable_adapters, tuple(module.active_adapters), tuple(module.merged_adapters), scaling


class DerivedFromWeights:
    """A value computed from the weights of some modules, kept until one of them may have changed.

    It is dropped by pickling and deep copies: a copy derives its own.
    """

    def __init__(self) -> None:
        self._states: list[WeightState] | None = None
        self._value: Any = None

    def forget(self) -> None:
        """Drop the value."""
        self._states = self._value = None

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
        if self._states is None or not all(map(WeightState.holds, self._states, modules)):
            with torch.no_grad():
                value = compute()
            states = [WeightState(module) for module in modules]
            if not all(state.tensors for state in states):
                return value  # nn.DataParallel's copies share this holder and show none of their parameters
            self._value, self._states = value, states
            _kept.add(self)
        return self._value

    def __reduce__(self) -> tuple[Any, ...]:
        return DerivedFromWeights, ()
