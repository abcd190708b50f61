"""The BFT decoder layer: the anatomy of a transformer layer in, one step of the Bayesian filter out.

Patching swaps classes in place: the layer, its attention and its FFN become subclasses of what they were, under the old
names (libraries look classes up by name). Their parameters are untouched; new ones live in the layer's child `bft`.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from . import filter
from .architectures import Architecture
from .attention import KrigingCall, KrigingConfig, WideningCache
from .compat import cache_argument
from .config import BFTConfig
from .stream import STREAM, Stream
from .weights import DerivedFromWeights, bump_generation, effective_weight


class BFTState(nn.Module):
    """What one patched layer adds: its learned process noise and, in the first patched layer, the initial precision.

    Both are stored as logarithms and stay float32 whatever the model is cast to.

    Args:
        config: the model's BFT settings.
        architecture: the family's anatomy.
        layer_index: index of the decoder layer.
        slot: which patched layer this is, counted from 0.
        last: whether no patched layer follows. The last one has no process noise: nothing reads what it would predict.
        device: where the parameters live.
    """

    def __init__(
        self,
        config: BFTConfig,
        architecture: Architecture,
        layer_index: int,
        slot: int,
        last: bool,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.architecture = architecture
        self.layer_index = layer_index
        self.slot = slot
        self.coefficients = DerivedFromWeights()
        self.predicts = config.propagate and not last
        like = {"dtype": torch.float32, "device": device}
        if slot == 0:
            self.log_initial_precision = nn.Parameter(torch.full((1,), math.log(config.initial_precision_value), **like))
        if self.predicts:
            self.log_process_noise = nn.Parameter(torch.full((1,), math.log(config.initial_process_noise), **like))

    def initial_precision(self, hidden_states: Tensor) -> Tensor:
        """tau for every token, (batch, token)."""
        return self.log_initial_precision.to(state_dtype(hidden_states)).exp().expand(hidden_states.shape[:-1])

    def process_noise(self, dtype: torch.dtype) -> Tensor:
        """Q, (1,)."""
        return self.log_process_noise.to(dtype).exp()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> BFTState:
        # model.to(bfloat16) or .half() must not round log tau and log Q: follow the device, keep the precision.
        def keep_precision(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            narrowed = moved.is_floating_point() and torch.finfo(moved.dtype).bits < 32
            return tensor.to(moved.device) if narrowed else moved

        return super()._apply(keep_precision, recurse)

    def train(self, mode: bool = True) -> BFTState:
        bump_generation()
        return super().train(mode)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        bump_generation()
        super()._load_from_state_dict(*args, **kwargs)


def state_dtype(hidden_states: Tensor) -> torch.dtype:
    """The dtype of precisions beside hidden states: float32, or float64 where the model is."""
    return torch.promote_types(hidden_states.dtype, torch.float32)


class InPlaceSubclass:
    """Base of the mixins that `swap_class` puts in front of a module's own class; pickling and copying keep the swap."""

    _bft_original_class: type[nn.Module]
    _bft_mixin: type

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        _, _, *state = super().__reduce_ex__(protocol)  # type: ignore[misc]
        return _new_swapped, (self._bft_original_class, self._bft_mixin), *state


def swap_class(instance: Any, mixin: type) -> None:
    """Make `instance` an instance of `mixin` and its own class, under that class's name. Other instances are untouched."""
    instance.__class__ = _swapped_class(type(instance), mixin)


def restore_class(instance: Any) -> None:
    """Undo `swap_class`."""
    instance.__class__ = instance._bft_original_class


@functools.cache
def _swapped_class(original: type, mixin: type) -> type:
    names = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "_bft_original_class": original,
        "_bft_mixin": mixin,
    }
    return type(original.__name__, (mixin, original), names)


def _new_swapped(original: type, mixin: type) -> Any:
    cls = _swapped_class(original, mixin)
    return cls.__new__(cls)


class BFTAttention(InPlaceSubclass):
    """An attention that reads its config through `KrigingConfig`; its forward is the family's own."""

    @property
    def config(self) -> KrigingConfig:
        return KrigingConfig(self.__dict__["config"])

    @config.setter
    def config(self, config: Any) -> None:
        self.__dict__["config"] = config


class BFTGatedFFN(InPlaceSubclass):
    """A gated FFN that hands out its pre-activations, from which the Jacobian follows."""

    bft: BFTState

    def forward(self, hidden_states: Tensor, activations: list[Tensor] | None = None) -> Tensor:
        """LlamaMLP.forward of transformers 5.24, in three statements; `activations` receives gate and up."""
        gate, up = self.gate_proj(hidden_states), self.up_proj(hidden_states)  # type: ignore[attr-defined]
        if activations is not None:
            activations.extend((gate, up))
        return self.down_proj(self.act_fn(gate) * up)  # type: ignore[attr-defined]


class BFTDecoderLayer(InPlaceSubclass):
    """A decoder layer as observe, update, predict; a mixin in front of the family's own decoder layer."""

    bft: BFTState

    @property
    def _gradient_checkpointing_func(self) -> Callable[..., Any]:
        return functools.partial(_checkpoint, self.bft.slot, self.__dict__["_gradient_checkpointing_func"])

    @_gradient_checkpointing_func.setter
    def _gradient_checkpointing_func(self, checkpoint: Callable[..., Any]) -> None:
        self.__dict__["_gradient_checkpointing_func"] = checkpoint

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """One filter step. Arguments and result are those of the family's own decoder layer.

        Raises:
            RuntimeError: the layer runs outside its model, or under reentrant checkpointing that is not the model's own.
        """
        state, anatomy = self.bft, self.bft.architecture
        kwargs.update(zip(_positional_names(self._bft_original_class), args, strict=False))
        stream = self._stream(kwargs.pop(STREAM, None))
        precisions = stream.read(state.slot)
        lam = state.initial_precision(hidden_states) if precisions is None else precisions[0]

        # Observe
        attention = getattr(self, anatomy.self_attention)
        call = self._kriging_call(lam, hidden_states, stream, kwargs)
        name = cache_argument(self._bft_original_class)
        kwargs[name] = WideningCache(kwargs.pop(name, None), call, attention.scaling)
        normed = getattr(self, anatomy.input_norm)(hidden_states)
        update, _ = attention(hidden_states=normed, bft_call=call, **kwargs)
        observation = self._observe(call, attention)

        # Update
        gain, updated = filter.update(lam, observation.precision)
        if state.config.gain:
            hidden_states = torch.addcmul(hidden_states, update, gain.unsqueeze(-1).to(update.dtype))
        else:
            gain = torch.ones_like(gain)
            hidden_states = hidden_states + update

        # Predict
        shown = bool(stream.traces) and state.config.propagate
        activations: list[Tensor] | None = [] if state.predicts or shown else None
        ffn = getattr(self, anatomy.ffn)
        output = ffn(getattr(self, anatomy.ffn_norm)(hidden_states), activations)
        jacobian = self._jacobian(hidden_states, ffn, activations) if activations else None
        predicted = filter.predict(updated, jacobian, state.process_noise(updated.dtype)) if state.predicts else updated
        stream.write(state.slot + 1, (predicted,))
        if state.predicts:
            # lam'' is at most 1/Q, so log lam'' + log Q is a key bias near zero; softmax does not see the shift.
            stream.log_scale[state.slot + 1] = -state.log_process_noise.detach()
        for trace in stream.traces:
            trace.add(state.layer_index, lam, observation, gain, jacobian, updated)
        return hidden_states + output

    def _stream(self, stream: Stream | None) -> Stream:
        if stream is None:
            if self.bft.slot:
                raise RuntimeError(
                    f"decoder layer {self.bft.layer_index} needs the precision of the patched layer before it: "
                    "call the model, not the layer"
                )
            return Stream([])
        if stream.grad_enabled and not torch.is_grad_enabled() and not stream.in_checkpoint:
            raise RuntimeError(
                "a patched layer runs without gradients inside a pass that has them, as reentrant activation checkpointing "
                "does: use model.gradient_checkpointing_enable(), or wrap the layers with use_reentrant=False"
            )
        return stream

    def _kriging_call(self, lam: Tensor, hidden_states: Tensor, stream: Stream, kwargs: dict[str, Any]) -> KrigingCall:
        state = self.bft
        position_ids = kwargs.get("position_ids")
        if position_ids is None:
            position_ids = torch.arange(hidden_states.shape[1], device=hidden_states.device)[None]
        lam_bar = filter.mean_precision(lam)
        bias = None
        if state.config.kriging:
            scale = state.log_initial_precision.detach().mean() if state.slot == 0 else stream.log_scale.get(state.slot, 0)
            bias = lam_bar.log() - scale
        variance = 1 / lam_bar if state.config.prior_scale == "neighbours" else None
        return KrigingCall(state.config, stream, state.layer_index, position_ids, bias, variance)

    def _observe(self, call: KrigingCall, attention: nn.Module) -> filter.Observation:
        assert call.output is not None, "the attention did not call its attention function"
        estimate, moment, sample_size, neighbours, visible = call.output
        output_weight = None
        if (self.bft.config.granularity, self.bft.config.observation_units) != ("token", "relative"):
            output_weight = effective_weight(getattr(attention, self.bft.architecture.output_projection))
        if visible is not None:
            visible = visible.expand(estimate.shape[:2])
        return filter.observe(
            estimate,
            moment,
            sample_size,
            self.bft.config,
            output_weight=output_weight,
            neighbour_variance=neighbours,
            visible=visible,
        )

    def _jacobian(self, hidden_states: Tensor, ffn: nn.Module, activations: list[Tensor]) -> Tensor:
        state, anatomy = self.bft, self.bft.architecture
        norm = getattr(self, anatomy.ffn_norm)
        projections = [getattr(ffn, name) for name in (anatomy.gate_projection, anatomy.up_projection, anatomy.down_projection)]
        differentiate = state.config.differentiate_jacobian
        dtype = state_dtype(hidden_states)

        def coefficients() -> tuple[Tensor, Tensor]:
            weights = [effective_weight(projection).to(dtype) for projection in projections]
            return filter.gated_jacobian_coefficients(*weights, norm.weight.to(dtype))

        with torch.set_grad_enabled(differentiate and torch.is_grad_enabled()):
            if differentiate:
                gate_coefficients, up_coefficients = coefficients()
            else:
                gate_coefficients, up_coefficients = state.coefficients.get([*projections, norm], coefficients)
            residual = hidden_states.to(dtype)
            mean_square = torch.linalg.vecdot(residual, residual) / residual.shape[-1]
            inverse_rms = torch.rsqrt(mean_square + getattr(norm, anatomy.norm_epsilon))
            gate, up = (x.to(dtype) for x in activations)
            activation = getattr(ffn, anatomy.activation)
            return filter.gated_jacobian_mean(gate, up, activation, gate_coefficients, up_coefficients, inverse_rms)


@functools.cache
def _positional_names(decoder_layer: type[nn.Module]) -> list[str]:
    """Names of the decoder layer's arguments after the hidden states."""
    return list(inspect.signature(inspect.unwrap(decoder_layer.forward)).parameters)[2:]


def _checkpoint(slot: int, checkpoint: Callable[..., Any], run: functools.partial, hidden_states: Tensor) -> Tensor:
    """Activation checkpointing of one layer with the precision as a visible input and output.

    Reentrant checkpointing differentiates only what enters and leaves by argument and result: a precision that travelled
    through the stream alone would silently take its gradient along.
    """
    stream: Stream = run.keywords[STREAM]

    def run_with_precision(hidden_states: Tensor, *precisions: Tensor) -> tuple[Tensor, ...]:
        if precisions:
            stream.write(slot, precisions)
        outside, stream.in_checkpoint = stream.in_checkpoint, True
        try:
            output = run(hidden_states)
        finally:
            stream.in_checkpoint = outside
        return output, *(stream.read(slot + 1) or ())

    output, *precisions = checkpoint(run_with_precision, hidden_states, *(stream.read(slot) or ()))
    stream.write(slot + 1, tuple(precisions))
    return output
