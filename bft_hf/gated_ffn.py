"""The gated FFN of a BFT layer: the family's own arithmetic, from which the Jacobian is read as it runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from . import filter
from .state import BFTState, full_precision
from .swap import InPlaceSubclass


class JacobianReader:
    """Reads J from a gated FFN's activations while they exist.

    An object of its own, since the hooks of device_map hand copies of lists to the modules they wrap.

    Args:
        coefficients: what `filter.gated_jacobian_coefficients` gave.
        inverse_rms: 1 / rms of the input of the FFN's norm, (batch, token).
        differentiate: whether gradients flow through J.

    Attributes:
        jacobian: J, (batch, token[, channel]), once the FFN has run.
    """

    jacobian: Tensor

    def __init__(self, coefficients: tuple[Tensor, Tensor], inverse_rms: Tensor, differentiate: bool) -> None:
        self.coefficients = coefficients
        self.inverse_rms = inverse_rms
        self.differentiate = differentiate

    def read(self, gate: Tensor, up: Tensor, activated: Tensor, activation: Callable[[Tensor], Tensor]) -> None:
        """Take J out of the pre-activations and the activation, (batch, token, ffn) each."""
        with (
            full_precision(gate),
            torch.set_grad_enabled(self.differentiate) if torch.is_grad_enabled() else nullcontext(),
        ):
            self.jacobian = filter.gated_jacobian(gate, up, activation, *self.coefficients, self.inverse_rms, activated)


class BFTGatedFFN(InPlaceSubclass):
    """A gated FFN from which a reader can take the Jacobian."""

    bft: BFTState

    def forward(self, hidden_states: Tensor, reader: JacobianReader | None = None) -> Tensor:
        """LlamaMLP.forward of transformers 5.24, step by step."""
        gate, up = self.gate_proj(hidden_states), self.up_proj(hidden_states)  # type: ignore[attr-defined]
        activation = self.act_fn  # type: ignore[attr-defined]
        differentiate = reader is not None and reader.differentiate
        # The compiler chooses by itself what to recompute.
        if (
            torch.is_grad_enabled()
            and filter.is_silu(activation)
            and not (differentiate or torch.compiler.is_compiling())
        ):
            product = GatedProduct.apply(gate, up, activation, reader)
        else:
            product = _gated_product(gate, up, activation, reader)
        del gate, up  # so that the down projection finds as much memory as in the family's own expression
        return self.down_proj(product)  # type: ignore[attr-defined]


def _gated_product(
    gate: Tensor, up: Tensor, activation: Callable[[Tensor], Tensor], reader: JacobianReader | None
) -> Tensor:
    activated = activation(gate)
    if reader is not None:
        reader.read(gate, up, activated, activation)
    return activated * up


class GatedProduct(torch.autograd.Function):
    """silu(gate) * up, saving gate and up alone: recomputing the activation is one pass, keeping it a tensor a layer.

    What it saves pays for what the filter keeps for its own backward pass.
    """

    @staticmethod
    def forward(
        gate: Tensor, up: Tensor, activation: Callable[[Tensor], Tensor], reader: JacobianReader | None
    ) -> Tensor:
        return _gated_product(gate, up, activation, reader)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        (grad,) = grad_outputs
        if torch.is_grad_enabled():  # somebody differentiates this pass again
            activated, slope = filter.value_and_slope(nn.functional.silu, gate)
            return grad * up * slope, grad * activated, None, None
        return torch.ops.aten.silu_backward(grad * up, gate), grad * nn.functional.silu(gate), None, None
