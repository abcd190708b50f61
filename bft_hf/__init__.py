"""Bayesian Filtering Transformers for the Hugging Face stack: fine-tuning that knows which tokens to trust."""

from .config import BFTConfig
from .patching import bft_parameters, get_config, is_patched, param_groups, patch, patched, unpatch
from .tracing import Trace, record

__version__ = "0.1.0.dev0"

__all__ = [
    "BFTConfig",
    "Trace",
    "bft_parameters",
    "get_config",
    "is_patched",
    "param_groups",
    "patch",
    "patched",
    "record",
    "unpatch",
]
