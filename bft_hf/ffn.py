"""What a layer and its FFN tell each other: how J follows from the weights, and a reader that takes it as the FFN runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from . import filter
from .anatomy import Architecture
from .plain_ffn import plain_jacobian
from .state import full_precision
from .swap import InPlaceSubclass


class JacobianReader:
    """Reads J from an FFN's activations while they exist.

    An object of its own, since the hooks of device_map hand copies of lists to the modules they wrap.

    Args:
        coefficients: what the FFN's `jacobian_coefficients` gave.
        inverse_rms: 1 / rms of the input of the FFN's norm, (batch, token); one number where no norm stands there.
        differentiate: whether gradients flow through J.

    Attributes:
        jacobian: J, (batch, token[, channel]), once the FFN has run.
    """

    jacobian: Tensor

    def __init__(self, coefficients: tuple[Tensor, ...], inverse_rms: Tensor, differentiate: bool) -> None:
        self.coefficients = coefficients
        self.inverse_rms = inverse_rms
        self.differentiate = differentiate

    def gradients(self) -> AbstractContextManager[Any]:
        """Gradients on or off, as J is read."""
        return torch.set_grad_enabled(self.differentiate) if torch.is_grad_enabled() else nullcontext()

    def read(self, gate: Tensor, up: Tensor, activated: Tensor, activation: Callable[[Tensor], Tensor]) -> None:
        """Take J out of a gated FFN's pre-activations and activation, (batch, token, ffn) each."""
        through_gate, through_up = self.coefficients
        with full_precision(gate), self.gradients():
            self.jacobian = filter.gated_jacobian(
                gate, up, activation, through_gate, through_up, self.inverse_rms, activated
            )

    def read_plain(self, preactivation: Tensor, activation: Callable[[Tensor], Tensor]) -> None:
        """Take J out of a plain FFN's pre-activation, (batch, token, ffn)."""
        (coefficients,) = self.coefficients
        with full_precision(preactivation), self.gradients():
            self.jacobian = plain_jacobian(preactivation, activation, coefficients, self.inverse_rms)

    def take(self, diagonal: Tensor) -> None:
        """Take J as it is but for the scale of the norm in front of the FFN, (batch * token[, channel])."""
        diagonal = diagonal.unflatten(0, self.inverse_rms.shape)
        self.jacobian = diagonal
        self.scale(self.inverse_rms)

    def scale(self, factor: Tensor) -> None:
        """Multiply J by a factor a token, (batch, token): what stands between the FFN and the residual."""
        self.jacobian = self.jacobian * (factor if self.jacobian.ndim == factor.ndim else factor.unsqueeze(-1))


class BFTFFN(InPlaceSubclass):
    """Base of the mixins that put a reader into a family's own FFN."""

    _bft_architecture: Architecture

    def jacobian_sources(self) -> list[nn.Module]:
        """The modules whose weights J depends on."""
        raise NotImplementedError

    def jacobian_coefficients(self, channel_scale: Tensor, granularity: str) -> tuple[Tensor, ...]:
        """All that J needs of these weights.

        Args:
            channel_scale: the product of what multiplies each residual channel before and after the FFN (weights of norms, a
                multiplier of the residual), (channel,): on the diagonal the two meet in one channel.
            granularity: "token" or "channel".
        """
        raise NotImplementedError
