"""The BFT decoder layer: the anatomy of a transformer layer in, one step of the Bayesian filter out.

Patching swaps classes in place: the layer, its attention and its FFN become subclasses of what they were, under the old
names (libraries look classes up by name). Their parameters are untouched; new ones live in the layer's child `bft`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from . import filter, one_token
from .anatomy import Architecture
from .attention import KrigingCall, KrigingConfig, WideningCache
from .compat import cache_argument
from .ffn import JacobianReader
from .offload import resident
from .one_token import OneTokenCall
from .state import BFTState, Precisions, full_precision, state_dtype
from .stream import STREAM, Stream
from .swap import InPlaceSubclass


class BFTAttention(InPlaceSubclass):
    """An attention that reads its config through `KrigingConfig`; its forward is the family's own."""

    @property
    def config(self) -> KrigingConfig:
        return KrigingConfig(self.__dict__["config"])

    @config.setter
    def config(self, config: Any) -> None:
        self.__dict__["config"] = config


class BFTDecoderLayer(InPlaceSubclass):
    """A decoder layer as observe, update, predict; a mixin in front of the family's own decoder layer."""

    bft: BFTState
    _bft_argument_names: tuple[str, ...]
    _bft_cache_argument: str
    _call_class: type[KrigingCall] = KrigingCall

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if hasattr(cls, "_bft_original_class"):  # in front of a family's own class, that is
            names = list(inspect.signature(inspect.unwrap(cls._bft_original_class.forward)).parameters)  # type: ignore[attr-defined]
            cls._bft_argument_names = tuple(names[2:])  # after self and the hidden states
            cls._bft_cache_argument = cache_argument(names)
        super().__init_subclass__(**kwargs)

    @property
    def _gradient_checkpointing_func(self) -> Callable[..., Any]:
        # As with a plain layer, until checkpointing is switched on.
        if "_gradient_checkpointing_func" not in self.__dict__:
            raise AttributeError("_gradient_checkpointing_func")
        return functools.partial(_checkpoint, self.bft, self.__dict__["_gradient_checkpointing_func"])

    @_gradient_checkpointing_func.setter
    def _gradient_checkpointing_func(self, checkpoint: Callable[..., Any]) -> None:
        self.__dict__["_gradient_checkpointing_func"] = checkpoint

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """One filter step. Arguments and result are those of the family's own decoder layer.

        Raises:
            RuntimeError: the layer runs outside its model, or under reentrant checkpointing that is not the model's own.
        """
        modules = self._modules  # type: ignore[attr-defined]  # attributes of a module are found at ten times the price
        state = modules["bft"]
        anatomy = state.architecture
        if args:
            kwargs.update(zip(self._bft_argument_names, args, strict=False))
        stream = self._stream(kwargs.pop(STREAM, None))
        if stream.device != hidden_states.device:
            stream.follow(state.slot, hidden_states.device)
        if state.slot == 0:
            stream.short = not anatomy.softcap and one_token.covers(state.config, stream, hidden_states)
        # Observe
        attention = modules[anatomy.self_attention]
        with full_precision(hidden_states):
            precisions = stream.read(state.slot)
            if precisions is None:
                precisions = state.initial_precisions(hidden_states, stream.input_ids)
                stream.log_scale[state.slot] = state.initial_log_scale()
            if stream.short and one_token.plain(kwargs):
                return self._one_token_step(hidden_states, precisions[0], stream, kwargs)
            call = self._kriging_call(precisions, hidden_states, stream, kwargs)
        name = self._bft_cache_argument
        kwargs[name] = WideningCache(kwargs.pop(name, None), call, attention.scaling)
        update = self._attend(modules, anatomy, hidden_states, call, kwargs)

        # Update
        with full_precision(hidden_states):
            observation = self._observe(call, attention)
            gain, updated = state.kalman_update(precisions[0], observation.precision)
            scale = self._scaled(gain, stream)
            if scale.ndim < hidden_states.ndim:
                scale = scale.unsqueeze(-1)
            dtype = hidden_states.dtype
            hidden_states = torch.addcmul(hidden_states, update.to(dtype), scale.to(dtype))
            all_updated = (updated, *(lam + observation.precision for lam in precisions[1:]))

        # Predict
        shown = bool(stream.traces) and state.config.propagate
        reader = self._jacobian_reader(hidden_states) if state.predicts or shown else None
        output = self._feed_forward(modules, anatomy, hidden_states, reader)
        jacobian = None if reader is None else reader.jacobian
        with full_precision(hidden_states):
            stream.write(state.slot + 1, self._predict(all_updated, jacobian))
        stream.log_scale[state.slot + 1] = state.next_log_scale()
        for trace in stream.traces:
            trace.add(state.layer_index, precisions[0], observation, gain, jacobian, updated)
        return hidden_states + output

    def _one_token_step(self, hidden_states: Tensor, lam: Tensor, stream: Stream, kwargs: dict[str, Any]) -> Tensor:
        """The same step where `one_token` covers it."""
        modules = self._modules  # type: ignore[attr-defined]
        state = modules["bft"]
        anatomy, slot = state.architecture, state.slot
        attention = modules[anatomy.self_attention]
        name = self._bft_cache_argument
        key_bias = lam.log() - stream.log_scale[slot]
        call = OneTokenCall(kwargs.get(name), state, stream, kwargs["position_ids"], key_bias, attention.scaling)
        kwargs[name] = call
        update = self._attend(modules, anatomy, hidden_states, call, kwargs)
        gain, updated = filter.update(lam, call.variance.reciprocal())
        scale = self._scaled(gain, stream).to(hidden_states.dtype)
        hidden_states = torch.addcmul(hidden_states, update, scale.unsqueeze(-1))
        reader = self._jacobian_reader(hidden_states) if state.predicts else None
        output = self._feed_forward(modules, anatomy, hidden_states, reader)
        stream.write(slot + 1, self._predict((updated,), None if reader is None else reader.jacobian))
        stream.log_scale[slot + 1] = state.next_log_scale()
        return hidden_states + output

    def _attend(
        self,
        modules: dict[str, nn.Module],
        anatomy: Architecture,
        hidden_states: Tensor,
        call: KrigingCall | OneTokenCall,
        kwargs: dict[str, Any],
    ) -> Tensor:
        """The update that enters the residual where the gain is 1; what it is made of is left in `call`."""
        normed = modules[anatomy.input_norm](hidden_states)  # type: ignore[index]
        return modules[anatomy.self_attention](hidden_states=normed, bft_call=call, **kwargs)[0]

    def _feed_forward(
        self,
        modules: dict[str, nn.Module],
        anatomy: Architecture,
        hidden_states: Tensor,
        reader: JacobianReader | None,
    ) -> Tensor:
        """What the FFN adds to the residual; J is left in `reader`."""
        return modules[anatomy.ffn](modules[anatomy.ffn_norm](hidden_states), reader)  # type: ignore[index]

    def _scaled(self, gain: Tensor, stream: Stream) -> Tensor:
        """The gain as it multiplies the attention's output, measured meanwhile if the model is being calibrated."""
        if stream.calibration is None:
            return self.bft.scaled(gain)
        return gain * stream.calibration.scale(self.bft.slot, gain)

    def _predict(self, updated: Precisions, jacobian: Tensor | None) -> Precisions:
        if not self.bft.predicts:
            return updated
        assert jacobian is not None
        return self.bft.predict(updated, jacobian)

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
                "does: use model.gradient_checkpointing_enable(), wrap the layers with use_reentrant=False, or, where a "
                "trainer forces it (PEFT under ZeRO-3), use ZeRO-2 or FSDP2, or turn checkpointing off"
            )
        return stream

    def _kriging_call(
        self, precisions: Precisions, hidden_states: Tensor, stream: Stream, kwargs: dict[str, Any]
    ) -> KrigingCall:
        state = self.bft
        position_ids = kwargs.get("position_ids")
        if position_ids is None:
            position_ids = torch.arange(hidden_states.shape[1], device=hidden_states.device)[None]
        key_bias = key_variance = None
        if state.config.kriging:
            # Softmax does not see a shift, and a bias near zero keeps its digits in a bfloat16 key.
            key_bias = filter.mean_precision(precisions[-1]).log() - stream.log_scale[state.slot]
        if state.config.prior_scale == "neighbours":
            key_variance = 1 / filter.mean_precision(precisions[0])
        reliability = stream.reliability(hidden_states.shape[1])
        return self._call_class(
            state.config, stream, state.slot, state.layers, position_ids, key_bias, reliability, key_variance
        )

    def _observe(self, call: KrigingCall, attention: nn.Module) -> filter.Observation:
        assert call.output is not None, "the attention did not call its attention function"
        estimate, moment, sample_size, neighbours, visible = call.output
        output_weight = None
        if (self.bft.config.granularity, self.bft.config.observation_units) != ("token", "relative"):
            output_weight = self._output_weight(getattr(attention, self.bft.architecture.output_projection))
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

    def _output_weight(self, projection: nn.Module) -> Tensor:
        """W_O as the filter sees it: from the heads' values to the update that enters the residual."""
        return self.bft.read_output_weight(projection)

    def _jacobian_reader(self, hidden_states: Tensor) -> JacobianReader:
        """What reads J from the FFN; the norm's scale, held fixed within J, is read from the norm's input here."""
        state, anatomy = self.bft, self.bft.architecture
        modules = self._modules  # type: ignore[attr-defined]
        ffn = modules[anatomy.ffn]
        norms = self._jacobian_norms(modules, anatomy)

        def coefficients() -> tuple[Tensor, ...]:
            scale = self._channel_scale(norms, anatomy, hidden_states)
            return ffn.jacobian_coefficients(scale, state.config.granularity)

        inference = not torch.is_grad_enabled()
        differentiate = state.config.differentiate_jacobian and not inference
        with full_precision(hidden_states), nullcontext() if inference else torch.set_grad_enabled(differentiate):
            if differentiate:
                derived = coefficients()
            else:
                derived = state.coefficients.get([*ffn.jacobian_sources(), *norms], coefficients, inference)
            scale = self._input_scale(modules, anatomy, hidden_states)
        return JacobianReader(derived, scale, differentiate)

    def _jacobian_norms(self, modules: dict[str, nn.Module], anatomy: Architecture) -> list[nn.Module]:
        """The norms whose weights J depends on."""
        return [modules[anatomy.ffn_norm]]  # type: ignore[index]

    def _channel_scale(self, norms: list[nn.Module], anatomy: Architecture, like: Tensor) -> Tensor:
        """What multiplies each channel before and after the FFN, (channel,), in full precision."""
        return norm_weight(norms[0], anatomy).to(state_dtype(like))

    def _input_scale(self, modules: dict[str, nn.Module], anatomy: Architecture, hidden_states: Tensor) -> Tensor:
        """What the norm before the FFN multiplies each token by, (batch, token)."""
        return inverse_rms(hidden_states, modules[anatomy.ffn_norm], anatomy)  # type: ignore[index]


def norm_weight(norm: nn.Module, anatomy: Architecture) -> Tensor:
    """What an RMS norm multiplies each channel by, (channel,)."""
    weight = resident(norm, "weight")
    return weight + anatomy.norm_offset if anatomy.norm_offset else weight


def inverse_rms(hidden_states: Tensor, norm: nn.Module, anatomy: Architecture) -> Tensor:
    """1 / rms of an RMS norm's input, its epsilon included, (batch, token), in full precision."""
    length = torch.linalg.vector_norm(hidden_states, dim=-1, dtype=state_dtype(hidden_states))
    return torch.rsqrt(length * length / hidden_states.shape[-1] + getattr(norm, anatomy.norm_epsilon))


def _checkpoint(
    state: BFTState, checkpoint: Callable[..., Any], run: functools.partial, hidden_states: Tensor, *precisions: Tensor
) -> Any:
    """Activation checkpointing of one layer with the precision as a visible input and output.

    Reentrant checkpointing differentiates only what enters and leaves by argument and result: a precision that travelled
    through the stream alone would silently take its gradient along. And the compiler takes a checkpointed function whole
    only if it changes nothing outside itself: the layer runs on a stream of its own.
    """
    keywords = getattr(run, "keywords", None)
    if not isinstance(keywords, dict) or STREAM not in keywords:
        # The function was read from a layer, wrapped and put back: the call around this one carries the precision.
        return checkpoint(run, hidden_states, *precisions)
    stream: Stream = keywords[STREAM]
    slot = state.slot

    def run_with_precision(hidden_states: Tensor, *precisions: Tensor) -> tuple[Tensor, ...]:
        inner = stream.for_checkpoint(slot, precisions)
        output = run(hidden_states, **{STREAM: inner})
        if not torch.compiler.is_compiling():
            stream.share(inner)
        # The scale too is made in there: outside, FSDP2 may have put the layer's parameters away again.
        return output, torch.as_tensor(inner.log_scale[slot + 1]), *(inner.read(slot + 1) or ())

    output, log_scale, *written = checkpoint(run_with_precision, hidden_states, *(stream.read(slot) or ()))
    stream.write(slot + 1, tuple(written))
    stream.log_scale[slot + 1] = log_scale.detach()
    return output
