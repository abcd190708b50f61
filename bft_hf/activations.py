"""The activations that FFNs use with their slopes in closed form: autograd costs more and does not run in inference mode."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn


class ClosedForm(NamedTuple):
    """An activation whose slope is known.

    Attributes:
        name: which one.
        value: act(x).
        times_slope: (factor, x) to factor * act'(x), in one pass; not to be differentiated again.
    """

    name: str
    value: Callable[[Tensor], Tensor]
    times_slope: Callable[[Tensor, Tensor], Tensor]


_gelu_tanh = functools.partial(nn.functional.gelu, approximate="tanh")

SILU = ClosedForm("silu", nn.functional.silu, torch.ops.aten.silu_backward)
GELU = ClosedForm("gelu", nn.functional.gelu, torch.ops.aten.gelu_backward)
GELU_TANH = ClosedForm("gelu_tanh", _gelu_tanh, functools.partial(torch.ops.aten.gelu_backward, approximate="tanh"))
RELU = ClosedForm("relu", nn.functional.relu, lambda factor, x: factor * (x > 0))
SQUARED_RELU = ClosedForm(
    "squared_relu", lambda x: nn.functional.relu(x).square(), lambda factor, x: 2 * factor * nn.functional.relu(x)
)

_BY_CLASS = {
    "SiLU": SILU,
    "SiLUActivation": SILU,
    "GELUActivation": GELU,
    "GELUTanh": GELU_TANH,
    "NewGELUActivation": GELU_TANH,
    "ReLU": RELU,
    "ReLUSquaredActivation": SQUARED_RELU,
}
"""Classes of torch and of transformers. torch's GELU is not among them: it is one of two functions."""


def closed_form(activation: Callable[[Tensor], Tensor]) -> ClosedForm | None:
    """The closed form of a function or module of torch's or of transformers'; None where there is none."""
    form = _BY_CLASS.get(type(activation).__name__)
    if form is None:
        if activation is nn.functional.silu:
            return SILU
        if activation is nn.functional.relu:
            return RELU
        if isinstance(activation, nn.GELU):
            return GELU_TANH if activation.approximate == "tanh" else GELU
    return form
