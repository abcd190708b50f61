"""A BFT decoder layer between whose outputs and the residual something stands: a norm, a multiplier, a dropout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from . import filter
from .anatomy import Architecture
from .attention import KrigingCall, SoftcappedCall
from .ffn import JacobianReader
from .layer import BFTDecoderLayer, inverse_rms, norm_weight
from .state import full_precision, state_dtype
from .weights import effective_weight


class BFTDressedDecoderLayer(BFTDecoderLayer):
    """K multiplies the update that enters the residual, and its variance and J are those of what enters.

    A norm on the attention's output divides by the RMS of that very update and multiplies by its weight; the RMS is held fixed,
    as that of the norm before the FFN is within J. Relative units are shares of the update's own power, so they are free of
    all of it; absolute ones are scaled with the update.
    """

    @property
    def _call_class(self) -> type[KrigingCall]:  # type: ignore[override]
        return SoftcappedCall if self.bft.architecture.softcap else KrigingCall

    def _attend(
        self,
        modules: dict[str, nn.Module],
        anatomy: Architecture,
        hidden_states: Tensor,
        call: Any,
        kwargs: dict[str, Any],
    ) -> Tensor:
        if anatomy.input_norm is not None:
            hidden_states = modules[anatomy.input_norm](hidden_states)
        update, _ = modules[anatomy.self_attention](hidden_states=hidden_states, bft_call=call, **kwargs)
        if anatomy.attention_norm is not None:
            norm = modules[anatomy.attention_norm]
            if self.bft.config.observation_units == "absolute":
                with full_precision(update):
                    call.update_scale = inverse_rms(update, norm, anatomy)
            update = norm(update)
        return self._dressed(update, modules, anatomy, anatomy.attention_dropout)

    def _feed_forward(
        self,
        modules: dict[str, nn.Module],
        anatomy: Architecture,
        hidden_states: Tensor,
        reader: JacobianReader | None,
    ) -> Tensor:
        if anatomy.ffn_norm is not None:
            hidden_states = modules[anatomy.ffn_norm](hidden_states)
        output = modules[anatomy.ffn](hidden_states, reader)
        if anatomy.ffn_output_norm is not None:
            norm = modules[anatomy.ffn_output_norm]
            if reader is not None:
                with full_precision(output), reader.gradients():
                    reader.scale(inverse_rms(output, norm, anatomy))
            output = norm(output)
        return self._dressed(output, modules, anatomy, anatomy.ffn_dropout)

    def _dressed(
        self, output: Tensor, modules: dict[str, nn.Module], anatomy: Architecture, dropout: str | None
    ) -> Tensor:
        if anatomy.residual_multiplier is not None:
            output = output * getattr(self, anatomy.residual_multiplier)
        return output if dropout is None else modules[dropout](output)

    def _multiplier(self, anatomy: Architecture) -> float:
        return 1.0 if anatomy.residual_multiplier is None else getattr(self, anatomy.residual_multiplier)

    def _observe(self, call: KrigingCall, attention: nn.Module) -> filter.Observation:
        observation = super()._observe(call, attention)
        if call.update_scale is None:
            return observation
        precision, scale = observation.precision, call.update_scale
        if precision.ndim > scale.ndim:
            scale = scale.unsqueeze(-1)
        return observation._replace(precision=precision / (scale * scale))

    def _output_weight(self, projection: nn.Module) -> Tensor:
        state, anatomy = self.bft, self.bft.architecture
        if state.config.observation_units == "relative":  # shares do not see a factor a channel
            return super()._output_weight(projection)
        norm = None if anatomy.attention_norm is None else self._modules[anatomy.attention_norm]  # type: ignore[attr-defined]

        def scaled() -> Tensor:
            weight = effective_weight(projection) * self._multiplier(anatomy)
            return weight if norm is None else weight * norm_weight(norm, anatomy).unsqueeze(-1)

        sources = [projection] if norm is None else [projection, norm]
        return state.output_weight.get(sources, scaled, inference=not torch.is_grad_enabled())

    def _jacobian_norms(self, modules: dict[str, nn.Module], anatomy: Architecture) -> list[nn.Module]:
        return [modules[name] for name in (anatomy.ffn_norm, anatomy.ffn_output_norm) if name is not None]

    def _channel_scale(self, norms: list[nn.Module], anatomy: Architecture, like: Tensor) -> Tensor:
        scale = torch.full(like.shape[-1:], self._multiplier(anatomy), dtype=state_dtype(like), device=like.device)
        for norm in norms:
            scale = scale * norm_weight(norm, anatomy).to(scale.dtype)
        return scale

    def _input_scale(self, modules: dict[str, nn.Module], anatomy: Architecture, hidden_states: Tensor) -> Tensor:
        if anatomy.ffn_norm is None:
            return hidden_states.new_ones((), dtype=state_dtype(hidden_states))
        return inverse_rms(hidden_states, modules[anatomy.ffn_norm], anatomy)
