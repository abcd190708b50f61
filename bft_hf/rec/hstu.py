"""HSTU: gated layers whose attention weights are pointwise and do not sum to one, trained to predict the next item."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from .configuration import HSTUConfig
from .layers import Pass
from .modeling_common import RecommenderModel


class RelativeBias(nn.Module):
    """rab, what is added to the scores of all heads of one layer: by distance in the history and, with timestamps, in time.

    Time differences fall into buckets of equal width in log seconds, 2.3 of them a factor of 2 as published. They are taken
    between the query's item and the key's: the published code takes the query's successor, whose time is part of what is to
    be predicted.
    """

    BUCKETS_A_UNIT = 1 / 0.301
    """Buckets a unit of the natural logarithm of seconds."""

    def __init__(self, config: HSTUConfig) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.empty(config.max_position_embeddings))
        self.time = nn.Parameter(torch.empty(config.time_buckets)) if config.time_buckets else None

    def forward(self, run: Pass) -> Float[Tensor, "batch 1 token key"]:
        """The bias for each query and key; keys after the query are masked anyway."""
        distance = run.position_ids.unsqueeze(-1) - run.position_ids.unsqueeze(-2)
        bias = self.position[distance.clamp(0, len(self.position) - 1)]
        if self.time is not None:
            assert run.timestamps is not None
            seconds = (run.timestamps.unsqueeze(-1) - run.timestamps.unsqueeze(-2)).clamp_min(1)
            buckets = (seconds.double().log() * self.BUCKETS_A_UNIT).long()
            bias = bias + self.time[buckets.clamp_max(len(self.time) - 1)]
        return bias.unsqueeze(1)


class HSTULayer(nn.Module):
    """h + W_o dropout(U * norm(A V)), with [U, V, Q, K] = SiLU(norm(h) W) and A = SiLU(Q K^T + rab) / n; no FFN.

    n is the longest history that the model reads, so a row's padding does not change its weights. The norms have no
    weights, and scores are not divided by sqrt(D).
    """

    def __init__(self, config: HSTUConfig) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.longest = config.max_position_embeddings
        width = config.hidden_size
        self.input_norm = nn.LayerNorm(width, eps=config.layer_norm_eps, elementwise_affine=False)
        self.uvqk_proj = nn.Linear(width, 4 * width, bias=False)
        self.relative_bias = RelativeBias(config)
        self.attention_dropout = nn.Dropout(config.attention_dropout)
        self.attention_norm = nn.LayerNorm(width, eps=config.layer_norm_eps, elementwise_affine=False)
        self.o_proj = nn.Linear(width, width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden_states: Tensor, run: Pass) -> Tensor:
        """One layer, (batch, token, channel)."""
        projected = nn.functional.silu(self.uvqk_proj(self.input_norm(hidden_states)))
        gate, *heads = projected.chunk(4, dim=-1)
        value, query, key = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in heads)
        scores = query @ key.transpose(-1, -2) + self.relative_bias(run)
        weights = (nn.functional.silu(scores) / self.longest).masked_fill(~run.visible.unsqueeze(1), 0)
        attended = (self.attention_dropout(weights) @ value).transpose(1, 2).flatten(2)
        return hidden_states + self.o_proj(self.dropout(gate * self.attention_norm(attended)))


class HSTUForNextItem(RecommenderModel):
    """HSTU (Zhai et al. 2024, arXiv 2402.17152) as a next-item model.

    A time bias needs `config.time_buckets` (128 as published) and `timestamps` in every call; most public data sets have no
    timestamps, and the position bias is then all there is.
    """

    config_class = HSTUConfig
    config: HSTUConfig

    def __init__(self, config: HSTUConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(HSTULayer(config) for _ in range(config.num_hidden_layers))
        self.post_init()

    def _start_pass(self, input_ids: Tensor, *arguments: Tensor | None) -> Pass:
        run = super()._start_pass(input_ids, *arguments)
        if bool(self.config.time_buckets) != (run.timestamps is not None):
            raise ValueError(
                "this HSTU has a time bias: pass timestamps, or build it with time_buckets=0"
                if self.config.time_buckets
                else "this HSTU has no time bias: leave timestamps out, or build it with time_buckets=128"
            )
        return run

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, RelativeBias):
            for parameter in module.parameters():
                if not getattr(parameter, "_is_hf_initialized", False):
                    parameter.normal_(std=self.config.initializer_range)
