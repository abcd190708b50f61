"""Sigmoid gates on the output of attention: a module to train with, and what the gates of a model are as it runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

FORMS = ("head", "element")

See = Callable[[int, Tensor], None]
"""Called with a layer's index and its gates, (batch, token, gate)."""


class SigmoidGate(nn.Module):
    """sigmoid(x W_g) on the output of attention before its output projection, of what the attention reads (arXiv:2505.06708).

    Args:
        width: Of the hidden states x.
        heads: Of the attention.
        head_dim: Of each.
        form: "head", one gate a head, or "element", one a head and channel.
    """

    def __init__(self, width: int, heads: int, head_dim: int, form: str) -> None:
        super().__init__()
        if form not in FORMS:
            raise ValueError(f"form is {form!r}: allowed is one of {', '.join(FORMS)}")
        self.repeats = head_dim if form == "head" else 1
        self.projection = nn.Linear(width, heads if form == "head" else heads * head_dim, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """The gate of each token, (batch, token, head or head * head_dim)."""
        return self.projection(hidden_states).sigmoid()


def add_gates(model: Any, form: str, std: float = 0.02) -> None:
    """Put a gate on every attention of a Llama-like model, to be trained with it; patched or not.

    The gates are children of the attentions, `gate`, and act through hooks on these and on their output projections.

    Args:
        model: A causal language model whose attentions are `self_attn` with an `o_proj`.
        form: As `SigmoidGate` has it.
        std: Of the first weights; every gate starts near a half.

    Raises:
        ValueError: An unknown form, or no such attention.
    """
    attentions = [module for name, module in model.named_modules() if name.endswith("self_attn")]
    if not attentions or not all(hasattr(attention, "o_proj") for attention in attentions):
        raise ValueError(f"{type(model).__name__} has no self_attn with an o_proj to put a gate on")
    for attention in attentions:
        rows = attention.o_proj.in_features // attention.head_dim
        gate = SigmoidGate(attention.o_proj.out_features, rows, attention.head_dim, form)
        nn.init.normal_(gate.projection.weight, std=std)
        attention.gate = gate.to(attention.o_proj.weight)
        _Gated(attention)


class _Gated:
    """The two hooks of one gated attention: what it reads makes the gate, what its projection reads is multiplied by it."""

    def __init__(self, attention: Any) -> None:
        self.gate = attention.gate
        self.value: Tensor | None = None
        attention.register_forward_pre_hook(self._make, with_kwargs=True)
        attention.o_proj.register_forward_pre_hook(self._apply)

    def _make(self, attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.value = self.gate(kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])

    def _apply(self, projection: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor]:
        assert self.value is not None
        return (args[0] * self.value.repeat_interleave(self.gate.repeats, dim=-1),)


@contextmanager
def gate_values(model: nn.Module, see: See) -> Iterator[int]:
    """Show the gates of every layer of a model that runs within the block.

    Args:
        model: With gates by `add_gates`, or with attentions whose query projection brings them, as Qwen3-Next's does: twice as
            wide as the queries, of each head the second half.
        see: Called once a layer and pass.

    Yields:
        How many layers have gates.
    """
    handles = []
    for module in model.modules():
        gate, query, output = (getattr(module, name, None) for name in ("gate", "q_proj", "o_proj"))
        if isinstance(gate, SigmoidGate):
            handles.append(gate.register_forward_hook(functools.partial(_show, see, module)))
        elif query is not None and output is not None and query.out_features == 2 * output.in_features:
            handles.append(query.register_forward_hook(functools.partial(_show_query, see, module)))
    try:
        yield len(handles)
    finally:
        for handle in handles:
            handle.remove()


def _show(see: See, attention: Any, module: nn.Module, args: Any, value: Tensor) -> None:
    see(attention.layer_idx, value.detach())


def _show_query(see: See, attention: Any, module: nn.Module, args: Any, value: Tensor) -> None:
    by_head = value.detach().view(*value.shape[:-1], -1, 2 * attention.head_dim)
    see(attention.layer_idx, torch.sigmoid(by_head[..., attention.head_dim :].flatten(-2)))
