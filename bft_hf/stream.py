"""What travels beside the hidden states through one forward pass: the precision, and facts that all layers share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .visibility import Visibility

if TYPE_CHECKING:
    from .calibration import Calibration
    from .one_token import SharedByLayers
    from .state import Precisions
    from .tracing import Trace

STREAM = "bft_stream"
"""The keyword under which the base model's forward hands the stream to its layers."""


class Stream:
    """One forward pass. Layers read and write it by slot: patched layer i reads slot i and writes slot i + 1.

    Slots keep every layer's input, so recomputing a layer under activation checkpointing reads what its first run read.

    Args:
        traces: the recorders that are running.
        input_ids: (batch, token) or None.
        token_reliability: rho in [0, 1], (batch, token) or (batch, key) with the cached keys in front; None is 1 everywhere.

    Attributes:
        log_scale: by slot, about the size of log lam_bar there: a constant of the parameters, by which key biases are shifted.
        signs: the probes' signs in all patched layers, (layer, batch or 1, kv_head, token, probe).
        grad_enabled: whether the pass began with gradients.
        in_checkpoint: whether a layer runs within the model's own activation checkpointing.
        calibration: measures the gains of the pass while `calibrate` runs it.
        short: whether `one_token` covers the pass, and `shared`, what its layers share there.
        device: where the layer ran that came last.
    """

    def __init__(
        self, traces: list[Trace], input_ids: Tensor | None = None, token_reliability: Tensor | None = None
    ) -> None:
        self.traces = traces
        self.input_ids = input_ids
        self.token_reliability = token_reliability
        self.signs: Tensor | None = None
        self.log_scale: dict[int, Tensor | float] = {}
        self.grad_enabled = torch.is_grad_enabled()
        self.in_checkpoint = False
        self.calibration: Calibration | None = None
        self.short = False
        self.shared: SharedByLayers | None = None
        self.device: torch.device | None = None
        self._slots: dict[int, Precisions] = {}
        self._rows: dict[tuple[Any, ...], Tensor] = {}
        self._visible: tuple[tuple[Visibility, tuple[Tensor | int, Tensor | None]], ...] = ()

    def for_checkpoint(self, slot: int, precisions: Precisions) -> Stream:
        """A stream for one layer that runs, now or again, within the model's own activation checkpointing."""
        inner = Stream(self.traces, self.input_ids, self.token_reliability)
        inner.grad_enabled, inner.in_checkpoint = self.grad_enabled, True
        inner.signs, inner._visible = self.signs, self._visible
        inner.log_scale = {key: scale for key, scale in self.log_scale.items() if key == slot}
        if precisions:
            inner.write(slot, precisions)
        return inner

    def share(self, inner: Stream) -> None:
        """Keep what a layer's own stream worked out for all layers."""
        self.signs, self._visible = inner.signs, inner._visible

    def follow(self, slot: int, device: torch.device) -> None:
        """Bring what layer `slot` reads to its device: a device_map spreads layers over several."""
        self.device = device
        if slot in self._slots:
            self._slots[slot] = tuple(precision.to(device) for precision in self._slots[slot])
        scale = self.log_scale.get(slot)
        if isinstance(scale, Tensor):
            self.log_scale[slot] = scale.to(device)
        for name in ("input_ids", "token_reliability", "signs"):
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, tensor.to(device))
        self.shared = None

    def read(self, slot: int) -> Precisions | None:
        """The precisions that patched layer `slot` starts from; None for the first one, which makes its own."""
        return self._slots.get(slot)

    def write(self, slot: int, precisions: Precisions) -> None:
        """Hand precisions to patched layer `slot`."""
        self._slots[slot] = precisions

    def reliability(self, tokens: int) -> Tensor | None:
        """rho of the pass's own tokens, (batch, token)."""
        return None if self.token_reliability is None else self.token_reliability[:, -tokens:]

    def row(self, like: Tensor, first: float, width: int) -> Tensor:
        """(width,), `first` and then zeros, of the dtype and on the device of `like`; made once for all layers."""
        key = like.dtype, like.device, first, width
        if key not in self._rows:
            self._rows[key] = like.new_zeros(width)
            if first:
                self._rows[key][0] = first
        return self._rows[key]

    def visible_keys(self, visibility: Visibility) -> tuple[Tensor | int, Tensor | None]:
        """How many reliable keys each query sees; counted once for all layers that share a mask.

        Returns:
            The count, (batch or 1, token), as a number from 1, one int where every query sees every key; and whether it really
            is one at least, None if always.
        """
        for known, visible in self._visible:  # two where layers with and without a sliding window take turns
            if known == visibility:
                return visible
        reliable = None
        if self.token_reliability is not None:
            # Static caches have room beyond the tokens seen so far, which the mask hides; sliding ones keep the last.
            reliable = self.token_reliability[:, -visibility.keys :] > 0
            reliable = nn.functional.pad(reliable, (0, visibility.keys - reliable.shape[1]))
        count = visibility.count(reliable)
        if isinstance(count, int):
            return count, None
        seen = None if visibility.attention_mask is None and reliable is None else count > 0
        counted = count.clamp_min(1).to(torch.float32), seen
        self._visible = (*self._visible, (visibility, counted))
        return counted


def start_stream(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook of the base model: a new stream for every pass.

    Raises:
        ValueError: `token_reliability` has the wrong shape or values outside [0, 1].
    """
    kwargs = dict(kwargs)
    input_ids = args[0] if args else kwargs.get("input_ids")
    reliability = kwargs.pop("token_reliability", None)
    if reliability is not None:
        tokens = input_ids if input_ids is not None else kwargs["inputs_embeds"]
        check_reliability(reliability, tokens.shape[0], pass_length({**kwargs, "input_ids": input_ids}))
        check_cache(kwargs.get("cache", kwargs.get("past_key_values")), reliability)
    stream = Stream(list(module._bft_traces), input_ids, reliability)
    stream.calibration = module._bft_calibration
    kwargs[STREAM] = stream
    return args, kwargs


def pass_length(inputs: dict[str, Any]) -> int:
    """How many keys a pass sees: the cached tokens and its own."""
    ids = inputs.get("input_ids")
    cache = inputs.get("cache", inputs.get("past_key_values"))
    past = 0 if cache is None else int(cache.get_seq_length())
    return past + (ids if ids is not None else inputs["inputs_embeds"]).shape[1]


def check_reliability(reliability: Tensor, batch: int, keys: int) -> None:
    """Raise a ValueError unless `reliability` is (batch, keys) within [0, 1]."""
    if tuple(reliability.shape) != (batch, keys):
        raise ValueError(
            f"token_reliability has shape {tuple(reliability.shape)}: it has to be ({batch}, {keys}), one number for every "
            "token, cached ones included, as attention_mask has"
        )
    if not bool(((reliability >= 0) & (reliability <= 1)).all()):
        raise ValueError("token_reliability has values outside [0, 1]: 0 is masked as evidence, 1 is no change")


def check_cache(cache: Any, reliability: Tensor) -> None:
    """Raise a ValueError for hidden keys in a quantised cache: their bias would be the range by which others are rounded."""
    from transformers.cache_utils import QuantizedLayer

    quantized = any(isinstance(layer, QuantizedLayer) for layer in getattr(cache, "layers", ()))
    if quantized and bool((reliability == 0).any()):
        raise ValueError(
            "a quantized cache cannot hold a key with token_reliability 0 beside others: hide those positions by "
            "attention_mask, or use a dynamic or static cache"
        )
