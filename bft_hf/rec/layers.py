"""The parts of the softmax recommenders: multi-head attention and a plain FFN, with or without the filter's observation."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.activations import ACT2FN

from .. import plain_ffn
from ..state import full_precision
from ..weights import effective_weight
from .configuration import RecommenderConfig
from .step import FilterStep, Pass


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

    def forward(self, hidden_states: Tensor, run: Pass, step: FilterStep | None = None) -> Tensor:
        """Attention's output, (batch, token, channel); the layer's step, if it has one, observes it."""
        query, key, value = (
            projection(hidden_states).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        scale = query.shape[-1] ** -0.5
        if step is None:
            weights = masked_softmax(query @ key.transpose(-1, -2) * scale, run)
            attended = self.dropout(weights) @ value
        else:
            with full_precision(hidden_states):
                query, key, wide_value = (part.to(step.dtype) for part in (query, key, value))
                scores = query @ key.transpose(-1, -2) * scale
                if step.key_precision is not None:
                    bias = step.key_precision.clamp_min(torch.finfo(step.dtype).tiny).log()
                    scores = scores + bias[:, None, None, :]
                weights = masked_softmax(scores, run)
                attended = step.observe(weights, wide_value, self.o_proj)
                if self.training and self.dropout.p:
                    # Dropout acts on what enters the residual, never on the statistics: it could make RSS negative.
                    attended = self.dropout(weights) @ wide_value
            attended = attended.to(value.dtype)
        return self.o_proj(attended.transpose(1, 2).flatten(2))


def masked_softmax(scores: Float[Tensor, "batch head token key"], run: Pass) -> Float[Tensor, "batch head token key"]:
    """Softmax over the visible keys; a query that sees none has weights of 0."""
    hidden = ~run.visible.unsqueeze(1)
    weights = scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(-1)
    return weights if run.seeing is None else weights.masked_fill(hidden, 0)


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

    def jacobian(
        self, preactivation: Tensor, step: FilterStep, norm: nn.LayerNorm | None = None, scale: Tensor | None = None
    ) -> Tensor:
        """J of this FFN behind a norm whose input has the inverse std `scale`, (batch, token[, channel])."""

        def coefficients() -> Tensor:
            return plain_ffn.plain_jacobian_coefficients(
                effective_weight(self.up_proj).to(step.dtype),
                effective_weight(self.down_proj).to(step.dtype),
                None if norm is None else norm.weight.to(step.dtype),
                step.state.config.granularity,
            )

        if step.differentiates:
            known = coefficients()
        else:
            modules = [self.up_proj, self.down_proj, *([] if norm is None else [norm])]
            known = step.state.coefficients.get(modules, coefficients, step.inference)
        return plain_ffn.plain_jacobian(preactivation, self.act_fn, known, scale)
