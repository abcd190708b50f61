"""What travels beside the hidden states through one forward pass: the precision, and facts that all layers share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from .tracing import Trace

STREAM = "bft_stream"
"""The keyword under which the base model's forward hands the stream to its layers."""


class Stream:
    """One forward pass. Layers read and write it by slot: patched layer i reads slot i and writes slot i + 1.

    `log_scale[i]` is about the size of log lam_bar in slot i, a constant of the parameters. Slots keep every layer's input, so recomputing a layer under activation checkpointing reads what its first run read.
    """

    def __init__(self, traces: list[Trace], token_reliability: Tensor | None = None) -> None:
        self.traces = traces
        self.token_reliability = token_reliability
        self.grad_enabled = torch.is_grad_enabled()
        self.in_checkpoint = False
        self.log_scale: dict[int, Tensor] = {}
        self._slots: dict[int, tuple[Tensor, ...]] = {}
        self._visible: tuple[tuple[Any, int, int], Tensor] | None = None

    def read(self, slot: int) -> tuple[Tensor, ...] | None:
        """The precisions that patched layer `slot` starts from; None for the first one, which makes its own."""
        return self._slots.get(slot)

    def write(self, slot: int, precisions: tuple[Tensor, ...]) -> None:
        """Hand precisions to patched layer `slot`."""
        self._slots[slot] = precisions

    def visible_keys(self, attention_mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor:
        """How many keys each query sees, (batch or 1, token); counted once for all layers that share a mask.

        Args:
            attention_mask: (batch, 1, token, key), boolean or additive, or None for the causal case.
            query: (batch, head, token, head_dim).
            key: (batch, head, key, head_dim).
        """
        tokens, keys = query.shape[2], key.shape[2]
        if self._visible is not None:
            (mask, *sizes), visible = self._visible
            if mask is attention_mask and sizes == [tokens, keys]:
                return visible
        if isinstance(attention_mask, Tensor):
            visible = mask_to_bool(attention_mask, keys).sum(-1)[:, 0]
        elif attention_mask is None and tokens == 1:
            visible = torch.full((1, 1), keys, device=query.device)
        else:
            # No mask means plain causal attention over keys that begin with these tokens (also in a static cache).
            visible = torch.arange(1, tokens + 1, device=query.device)[None]
        self._visible = ((attention_mask, tokens, keys), visible)
        return visible


def mask_to_bool(attention_mask: Tensor, num_keys: int) -> Tensor:
    """An attention mask as True for visible keys; additive masks hide a key by the most negative number or -inf."""
    mask = attention_mask[..., :num_keys]
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def start_stream(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook of the base model: a new stream for every pass."""
    reliability = kwargs.pop("token_reliability", None)
    traces = list(getattr(module, "_bft_traces", ()))
    return args, {**kwargs, STREAM: Stream(traces, reliability)}
