"""The gated FFN of a BFT layer: the family's own arithmetic, from which the Jacobian is read as it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from . import filter
from .ffn import BFTFFN, JacobianReader
from .weights import effective_weight


class BFTGatedFFN(BFTFFN):
    """A gated FFN, down(act(gate(x)) * up(x)), from which a reader can take the Jacobian."""

    def forward(self, hidden_states: Tensor, reader: JacobianReader | None = None) -> Tensor:
        """LlamaMLP.forward of transformers 5.24, step by step."""
        modules, anatomy = self._modules, self._bft_architecture  # type: ignore[attr-defined]
        gate, up = modules[anatomy.gate_projection](hidden_states), modules[anatomy.up_projection](hidden_states)
        product = gated_product(gate, up, getattr(self, anatomy.activation), reader)
        del gate, up  # so that the down projection finds as much memory as in the family's own expression
        return modules[anatomy.down_projection](product)

    def jacobian_sources(self) -> list[nn.Module]:
        """Gate, up and down projection."""
        modules, anatomy = self._modules, self._bft_architecture  # type: ignore[attr-defined]
        return [modules[anatomy.gate_projection], modules[anatomy.up_projection], modules[anatomy.down_projection]]

    def jacobian_coefficients(self, channel_scale: Tensor, granularity: str) -> tuple[Tensor, ...]:
        """As `filter.gated_jacobian_coefficients`."""
        gate, up, down = (effective_weight(module).to(channel_scale.dtype) for module in self.jacobian_sources())
        return filter.gated_jacobian_coefficients(gate, up, down, channel_scale, granularity)


class BFTFusedGatedFFN(BFTGatedFFN):
    """A gated FFN whose gate and up projection are one: the gate's rows first, as in Phi3."""

    def forward(self, hidden_states: Tensor, reader: JacobianReader | None = None) -> Tensor:
        """Phi3MLP.forward of transformers 5.24, step by step."""
        modules, anatomy = self._modules, self._bft_architecture  # type: ignore[attr-defined]
        gate, up = modules[anatomy.fused_projection](hidden_states).chunk(2, dim=-1)
        product = gated_product(gate, up, getattr(self, anatomy.activation), reader)
        del gate, up
        return modules[anatomy.down_projection](product)

    def jacobian_sources(self) -> list[nn.Module]:
        """The fused projection and the down projection."""
        modules, anatomy = self._modules, self._bft_architecture  # type: ignore[attr-defined]
        return [modules[anatomy.fused_projection], modules[anatomy.down_projection]]

    def jacobian_coefficients(self, channel_scale: Tensor, granularity: str) -> tuple[Tensor, ...]:
        """As `filter.gated_jacobian_coefficients`."""
        fused, down = (effective_weight(module).to(channel_scale.dtype) for module in self.jacobian_sources())
        gate, up = fused.chunk(2)
        return filter.gated_jacobian_coefficients(gate, up, down, channel_scale, granularity)


def gated_product(
    gate: Tensor, up: Tensor, activation: Callable[[Tensor], Tensor], reader: JacobianReader | None
) -> Tensor:
    """act(gate) * up, (batch, token, ffn), of which a reader takes J."""
    differentiate = reader is not None and reader.differentiate
    # The compiler chooses by itself what to recompute.
    if torch.is_grad_enabled() and filter.is_silu(activation) and not (differentiate or torch.compiler.is_compiling()):
        return GatedProduct.apply(gate, up, activation, reader)
    return _gated_product(gate, up, activation, reader)


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
        # In place: at these sizes fresh memory costs more than the arithmetic.
        through_up = nn.functional.silu(gate).mul_(grad)
        through_gate = grad * up
        torch.ops.aten.silu_backward.grad_input(through_gate, gate, grad_input=through_gate)
        return through_gate, through_up, None, None
