"""The plain FFN of a BFT layer, down(act(up(x))), from whose pre-activation the Jacobian is read as it runs."""

from __future__ import annotations

from torch import Tensor, nn

from .ffn import BFTFFN, JacobianReader
from .plain_ffn import plain_jacobian_coefficients
from .weights import effective_weight


class BFTPlainFFN(BFTFFN):
    """A plain FFN from which a reader can take the Jacobian."""

    def forward(self, hidden_states: Tensor, reader: JacobianReader | None = None) -> Tensor:
        """ArceeMLP.forward of transformers 5.24, step by step."""
        modules, anatomy = self._modules, self._bft_architecture  # type: ignore[attr-defined]
        preactivation = modules[anatomy.up_projection](hidden_states)
        activation = getattr(self, anatomy.activation)
        if reader is not None:
            reader.read_plain(preactivation, activation)
        return modules[anatomy.down_projection](activation(preactivation))

    def jacobian_sources(self) -> list[nn.Module]:
        """Up and down projection."""
        modules, anatomy = self._modules, self._bft_architecture  # type: ignore[attr-defined]
        return [modules[anatomy.up_projection], modules[anatomy.down_projection]]

    def jacobian_coefficients(self, channel_scale: Tensor, granularity: str) -> tuple[Tensor, ...]:
        """As `plain_jacobian_coefficients`, behind RMS norms alone."""
        up, down = (effective_weight(module).to(channel_scale.dtype) for module in self.jacobian_sources())
        return (plain_jacobian_coefficients(up, down, channel_scale, granularity, centred=False),)
