"""Every place where versions of transformers differ, each with the version at which its shim can go."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

from torch import nn


def cache_argument(decoder_layer: type[nn.Module]) -> str:
    """The name by which a decoder layer takes the key/value cache.

    "past_key_values" until 5.23, "cache" from 5.24 on; delete when 5.24 is the oldest supported transformers.
    """
    parameters = inspect.signature(inspect.unwrap(decoder_layer.forward)).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def attention_function(attention: type[nn.Module], implementation: str | None) -> Callable[..., Any]:
    """The attention function that an unpatched attention of this class would call for `implementation`.

    "eager" is not in the registry: it is a function of the module that defines the class.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    eager = sys.modules[attention.__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager)
