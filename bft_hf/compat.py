"""Every place where versions of transformers differ, each with the version at which its shim can go."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn


def cache_argument(names: Sequence[str]) -> str:
    """The name by which a decoder layer takes the key/value cache, among those of its forward's arguments.

    "past_key_values" until 5.23, "cache" from 5.24 on; delete when 5.24 is the oldest supported transformers.
    """
    return "cache" if "cache" in names else "past_key_values"


def attention_function(attention: type[nn.Module], implementation: str | None) -> Callable[..., Any]:
    """The attention function that an unpatched attention of this class would call for `implementation`.

    "eager" is not in the registry: it is a function of the module that defines the class.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    eager = sys.modules[attention.__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager)


def expert_parallel(experts: nn.Module) -> bool:
    """Whether a module of routed experts holds but a part of them.

    It does not tell until 5.12 at least; 5.24 has `_is_expert_parallel`. Delete when that is the oldest supported transformers.
    """
    return getattr(experts, "_is_expert_parallel", False)


def forget_static_cache(model: nn.Module) -> None:
    """Drop the static cache that generate keeps on a model, with heads as wide as they were before a patch.

    5.24 makes a new one each time; delete when it is the oldest supported transformers.
    """
    vars(model).pop("_cache", None)


class SizeCheck:
    """Makes the loader report tensors of a wrong size although there is a quantizer (ours, which converts nothing).

    Until 5.16 at least, a loader with a quantizer puts a checkpoint's tensor in whatever its size, silently; 5.24 asks the
    quantizer first. Stands before `mark_tied_weights_as_initialized`, the first thing the loader calls once the tensors are
    in; delete when 5.24 is the oldest supported transformers.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.sizes = {name: parameter.shape for name, parameter in model.named_parameters(remove_duplicate=False)}
        model.mark_tied_weights_as_initialized = self

    def __call__(self, loading_info: Any) -> None:
        """Compare, and leave what has the wrong size to the loader's own treatment of missing tensors."""
        del self.model.mark_tied_weights_as_initialized
        for name, size in self.sizes.items():
            loaded = self.model.get_parameter(name)
            if loaded.shape != size:
                loading_info.mismatched_keys.add((name, loaded.shape, size))
                module, _, attribute = name.rpartition(".")
                empty = torch.empty(size, dtype=loaded.dtype, device="meta")
                setattr(self.model.get_submodule(module), attribute, nn.Parameter(empty, loaded.requires_grad))
        self.model.mark_tied_weights_as_initialized(loading_info)
