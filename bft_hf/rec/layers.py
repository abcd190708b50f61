"""The parts of the softmax recommenders: multi-head attention and a plain FFN, with or without the filter's observation."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers.activations import ACT2FN

from ..tracing import Trace
from .configuration import RecommenderConfig


class Pass(NamedTuple):
    """One forward pass: what every layer of it shares.

    Attributes:
        input_ids: item ids, (batch, token).
        position_ids: an item's place in its history, (batch, token).
        visible: which key a query sees, (batch, token, key).
        timestamps: seconds, (batch, token), or None.
        token_reliability: rho in [0, 1], (batch, token); None is 1 everywhere.
        traces: the recorders that are running.
    """

    input_ids: Int[Tensor, "batch token"]
    position_ids: Int[Tensor, "batch token"]
    visible: Bool[Tensor, "batch token key"]
    timestamps: Int[Tensor, "batch token"] | None = None
    token_reliability: Float[Tensor, "batch token"] | None = None
    traces: tuple[Trace, ...] = ()


class SelfAttention(nn.Module):
    """Multi-head softmax attention that forms its weights: histories are short, and the filter reads them exactly."""

    def __init__(self, config: RecommenderConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.o_proj = nn.Linear(width, width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden_states: Tensor, run: Pass) -> Tensor:
        """Attention's output, (batch, token, channel)."""
        query, key, value = (
            projection(hidden_states).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        weights = masked_softmax(query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5, run.visible)
        return self.o_proj((self.dropout(weights) @ value).transpose(1, 2).flatten(2))


def masked_softmax(
    scores: Float[Tensor, "batch head token key"], visible: Bool[Tensor, "batch token key"]
) -> Float[Tensor, "batch head token key"]:
    """Softmax over the visible keys; a query that sees none has weights of 0."""
    hidden = ~visible.unsqueeze(1)
    return scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(hidden, 0)


class FeedForward(nn.Module):
    """W_d act(W_u x + b_u) + b_d, with dropout on the activations."""

    def __init__(self, config: RecommenderConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size)
        self.act_fn = ACT2FN[config.hidden_act]
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """The output (batch, token, channel), and what enters the activation, (batch, token, ffn)."""
        preactivation = self.up_proj(hidden_states)
        return self.down_proj(self.dropout(self.act_fn(preactivation))), preactivation
