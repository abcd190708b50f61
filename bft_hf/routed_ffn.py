"""The FFN of routed experts in a BFT layer: its Jacobian is the chosen experts' own, weighted as their outputs are.

f(h) = sum_e p_e E_e(norm(h)) over the experts that a token is sent to. The router's weights p are held fixed within J, as the
norm's scale is: a filter with several models of the dynamics fixes their weights for a step of the prediction too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from . import filter
from .anatomy import bare_experts
from .compat import expert_parallel
from .ffn import BFTFFN, JacobianReader
from .offload import resident
from .swap import InPlaceSubclass


class Handover:
    """What the FFN and the experts inside it pass each other in one call; both hold the same one."""

    def __init__(self) -> None:
        self.reader: JacobianReader | None = None
        self.gate_up: Tensor | None = None


class BFTRoutedFFN(BFTFFN):
    """A block of router and experts from which a reader can take the Jacobian."""

    _bft_handover: Handover

    def forward(self, hidden_states: Tensor, reader: JacobianReader | None = None) -> Tensor:
        """The family's own; its experts find the reader in the handover."""
        self._bft_handover.reader = reader
        try:
            return super().forward(hidden_states)  # type: ignore[misc]
        finally:
            self._bft_handover.reader = None

    def jacobian_sources(self) -> list[nn.Module]:
        """The experts."""
        return [self._modules[self._bft_architecture.experts]]  # type: ignore[attr-defined]

    def jacobian_coefficients(self, channel_scale: Tensor, granularity: str) -> tuple[Tensor, ...]:
        """As `filter.gated_jacobian_coefficients` of every expert, (expert, ffn[, channel])."""
        (experts,) = self.jacobian_sources()
        fused, down = expert_weights(experts, "gate_up_proj"), expert_weights(experts, "down_proj")
        by_expert = []
        for one, back in zip(fused, down, strict=True):
            gate, up = one.to(channel_scale.dtype).chunk(2)
            back = back.to(channel_scale.dtype)
            by_expert.append(filter.gated_jacobian_coefficients(gate, up, back, channel_scale, granularity))
        return tuple(torch.stack(parts) for parts in zip(*by_expert, strict=True))


class BFTExperts(InPlaceSubclass):
    """The experts, each a gated FFN, in one module of transformers; J is read from their activations as they run."""

    _bft_handover: Handover

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The family's own, by whichever implementation was chosen.

        Args:
            hidden_states: (token, channel), those of all rows behind one another.
            top_k_index: the experts a token is sent to, (token, chosen).
            top_k_weights: their weights, (token, chosen).

        Raises:
            NotImplementedError: J is asked for, and the implementation does not show the activations.
        """
        implementation = self.config._experts_implementation or "eager"  # type: ignore[attr-defined]
        handover = self._bft_handover
        reader = handover.reader
        if reader is None:
            return super().forward(hidden_states, top_k_index, top_k_weights)  # type: ignore[misc]
        if implementation not in ("eager", "batched_mm", "grouped_mm") or expert_parallel(self):  # type: ignore[arg-type]
            raise NotImplementedError(
                f"J cannot be read from experts run by {implementation!r} or in parallel: call "
                "model.set_experts_implementation('grouped_mm'), or patch with BFTConfig(propagate=False)"
            )
        experts = top_k_index.reshape(-1)
        order: Tensor | None
        gate_up: Tensor | None
        if implementation == "eager":
            output, gate_up, order = self._one_by_one(hidden_states, top_k_index, top_k_weights)
        else:
            handover.gate_up = None
            output = super().forward(hidden_states, top_k_index, top_k_weights)  # type: ignore[misc]
            gate_up, handover.gate_up = handover.gate_up, None
            order = torch.sort(experts).indices if implementation == "grouped_mm" else None
        assert gate_up is not None, "the experts did not call _apply_gate"
        with reader.gradients():
            if order is not None:
                experts = experts[order]
            diagonal = self._jacobian(gate_up, experts, reader)
            if order is not None:
                diagonal = diagonal[order.argsort()]
            diagonal = diagonal.unflatten(0, top_k_index.shape)
            weights = top_k_weights.to(diagonal.dtype)
            diagonal = (diagonal * (weights if diagonal.ndim == 2 else weights.unsqueeze(-1))).sum(1)
            reader.take(diagonal)
        return output

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        # The seam of transformers between the experts' two matmuls, in all implementations but the eager one.
        if self._bft_handover.reader is not None:
            self._bft_handover.gate_up = gate_up
        return super()._apply_gate(gate_up)  # type: ignore[misc]

    def _one_by_one(
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """MixtralExperts.forward of transformers 5.24, which has no seam: one expert after the other.

        Returns:
            The output, the experts' pre-activations by (token, choice) pair, and which pairs these are, in their order.
        """
        output = torch.zeros_like(hidden_states)
        gate_ups, pairs = [], []
        for expert in top_k_index.unique().tolist():
            position, token = torch.where(expert == top_k_index.T)
            gate_up = nn.functional.linear(hidden_states[token], self.gate_up_proj[expert])  # type: ignore[attr-defined]
            gate, up = gate_up.chunk(2, dim=-1)
            answer = nn.functional.linear(self.act_fn(gate) * up, self.down_proj[expert])  # type: ignore[attr-defined]
            answer = answer * top_k_weights[token, position, None]
            output.index_add_(0, token, answer.to(output.dtype))
            gate_ups.append(gate_up)
            pairs.append(token * top_k_index.shape[1] + position)
        return output, torch.cat(gate_ups), torch.cat(pairs)

    def _jacobian(self, gate_up: Tensor, experts: Tensor, reader: JacobianReader) -> Tensor:
        """J of the expert of each row, without the scale of the norm in front of it, (row[, channel])."""
        gate, up = gate_up.chunk(2, dim=-1)
        through_gate, through_up = reader.coefficients
        one = through_gate.new_ones(())
        activation = self.act_fn  # type: ignore[attr-defined]
        if through_gate.ndim == 2:
            # All experts' sums, of which one is taken: an expert's is one column, and the columns are few beside the channels.
            sums = filter.gated_jacobian(gate, up, activation, through_gate.T, through_up.T, one)
            return sums.gather(1, experts.unsqueeze(-1)).squeeze(-1)
        order = experts.argsort(stable=True)
        counts = torch.bincount(experts, minlength=len(through_gate)).tolist()
        parts = [
            filter.gated_jacobian(gate[rows], up[rows], activation, through_gate[expert], through_up[expert], one)
            for expert, rows in enumerate(order.split(counts))
            if len(rows)
        ]
        return torch.cat(parts)[order.argsort()]


def expert_weights(experts: nn.Module, name: str) -> Tensor:
    """The effective weights of all experts under a parameter's name, (expert, out, in): LoRA deltas on them added."""
    weight = resident(bare_experts(experts), name)
    wrapper: Any = experts
    while hasattr(wrapper, "base_layer"):
        if wrapper.parameter_name == name and not (wrapper.disable_adapters or wrapper.merged):
            for adapter in wrapper.active_adapters:
                if adapter in wrapper.lora_A:
                    weight = weight + wrapper.get_delta_weight(adapter)
        wrapper = wrapper.base_layer
    return weight
