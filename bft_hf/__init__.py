"""Bayesian Filtering Transformers for the Hugging Face stack: fine-tuning that knows which tokens to trust."""

import importlib
from typing import TYPE_CHECKING, Any

from . import guards as _guards  # noqa: F401 - its import puts up the checks around PEFT and Trainer
from .architectures import register_architecture
from .calibration import calibrate
from .config import BFTConfig
from .patching import bft_parameters, get_config, is_patched, param_groups, patch, patched, unpatch
from .tracing import Trace, record

if TYPE_CHECKING:
    from .adapters import load_adapter
    from .callbacks import BFTCallback
    from .cards import model_card

__version__ = "0.1.0.dev0"

__all__ = [
    "BFTCallback",
    "BFTConfig",
    "Trace",
    "bft_parameters",
    "calibrate",
    "get_config",
    "is_patched",
    "load_adapter",
    "model_card",
    "param_groups",
    "patch",
    "patched",
    "record",
    "register_architecture",
    "unpatch",
]

# What needs Trainer, PEFT or huggingface_hub is imported when it is asked for.
_LATER = {"BFTCallback": "callbacks", "load_adapter": "adapters", "model_card": "cards"}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_LATER[name]}", __name__), name)
