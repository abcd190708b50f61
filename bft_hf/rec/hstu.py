"""HSTU: gated layers whose attention weights are pointwise and do not sum to one, trained to predict the next item."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from .. import sandwich
from ..state import BFTState, Precisions, full_precision
from .configuration import HSTUConfig
from .modeling_common import RecommenderModel
from .step import FilterStep, Pass, inverse_std, start_step


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

    With a filter, h + K W_o(...), where the observation comes from the sandwich estimator (`bft_hf.sandwich`) and is carried
    through norm, gate and output projection by the delta method. Without an FFN nothing moves the state between two layers:
    the Jacobian is 0, and the prediction adds Q.
    """

    bft: BFTState | None

    def __init__(self, config: HSTUConfig) -> None:
        super().__init__()
        self.register_module("bft", None)
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

    def forward(
        self, hidden_states: Tensor, run: Pass, precisions: Precisions | None
    ) -> tuple[Tensor, Precisions | None]:
        """One layer: hidden states (batch, token, channel), and the precisions that stand beside them."""
        step = start_step(self.bft, hidden_states, run, precisions)
        projected = nn.functional.silu(self.uvqk_proj(self.input_norm(hidden_states)))
        gate, *heads = projected.chunk(4, dim=-1)
        value, query, key = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in heads)
        scores = query @ key.transpose(-1, -2) + self.relative_bias(run)
        weights = (nn.functional.silu(scores) / self.longest).masked_fill(~run.visible.unsqueeze(1), 0)
        if step is None:
            attended = (self.attention_dropout(weights) @ value).transpose(1, 2).flatten(2)
        else:
            with full_precision(hidden_states):
                attended = self._observe(weights.to(step.dtype), value.to(step.dtype), gate.to(step.dtype), run, step)
            attended = attended.to(value.dtype)
        output = self.o_proj(self.dropout(gate * self.attention_norm(attended)))
        if step is None:
            return hidden_states + output, precisions
        hidden_states = hidden_states + step.gained(output)
        return hidden_states, step.predict()

    def _observe(self, weights: Tensor, value: Tensor, gate: Tensor, run: Pass, step: FilterStep) -> Tensor:
        """Kriging with weights that do not sum to one; gives A V, (batch, token, channel), and `step` its observation."""
        shares = sandwich.equal_shares(run.visible, step.dtype)
        attended = sandwich.kriging_estimate(weights, value, shares, step.key_precision).transpose(1, 2).flatten(2)
        moments = sandwich.moments(weights, value, shares, step.state.config.granularity, step.key_precision)
        neighbours = None
        if step.key_variance is not None:
            neighbours = self._neighbour_variance(weights, step)
        scale = gate * inverse_std(attended, self.attention_norm).unsqueeze(-1)
        step.observation = sandwich.observe(
            moments,
            step.state.config,
            scale.unflatten(-1, (self.num_heads, -1)),
            step.state.read_output_weight(self.o_proj),
            neighbours,
        )
        if self.training and self.attention_dropout.p:
            # Dropout acts on what enters the residual, never on the statistics.
            dropped = self.attention_dropout(weights)
            attended = sandwich.kriging_estimate(dropped, value, shares, step.key_precision).transpose(1, 2).flatten(2)
        return attended

    @staticmethod
    def _neighbour_variance(weights: Tensor, step: FilterStep) -> Tensor:
        """sum_j p_j / lam_bar_j, p_j being the kriging weights' share of their mass; (batch, token, head)."""
        size = weights.abs()
        if step.key_precision is not None:
            size = size * step.key_precision[:, None, None, :]
        total = size.sum(-1)
        assert step.key_variance is not None
        weighed = (size @ step.key_variance[:, None, :, None]).squeeze(-1)
        return (weighed / torch.where(total > 0, total, 1)).transpose(1, 2)


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
