"""SASRec: a causal transformer with norms before its sublayers, trained to predict the next item."""

from __future__ import annotations

from torch import Tensor, nn

from ..state import BFTState, Precisions
from .configuration import SASRecConfig
from .layers import FeedForward, SelfAttention
from .modeling_common import RecommenderModel
from .step import FilterStep, Pass, inverse_std, start_step


class SASRecLayer(nn.Module):
    """h + attention(norm(h)), then h + FFN(norm(h)); with a filter, the attention's output times its gain."""

    bft: BFTState | None

    def __init__(self, config: SASRecConfig) -> None:
        super().__init__()
        self.register_module("bft", None)
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.attention = SelfAttention(config)
        self.ffn_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.ffn = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, hidden_states: Tensor, run: Pass, precisions: Precisions | None
    ) -> tuple[Tensor, Precisions | None]:
        """One layer: hidden states (batch, token, channel), and the precisions that stand beside them."""
        step = start_step(self.bft, hidden_states, run, precisions)
        attended = self.dropout(self.attention(self.attention_norm(hidden_states), run, step))
        hidden_states = hidden_states + (attended if step is None else step.gained(attended))
        output, preactivation = self.ffn(self.ffn_norm(hidden_states))
        if step is not None:
            precisions = step.predict(lambda: self._jacobian(hidden_states, preactivation, step))
        return hidden_states + self.dropout(output), precisions

    def _jacobian(self, hidden_states: Tensor, preactivation: Tensor, step: FilterStep) -> Tensor:
        scale = inverse_std(hidden_states, self.ffn_norm)
        return self.ffn.jacobian(preactivation, step, self.ffn_norm, scale)


class SASRecForNextItem(RecommenderModel):
    """SASRec (Kang and McAuley 2018, arXiv 1808.09781) with shared item embeddings.

    The norms stand before both sublayers and on queries, keys and values alike, as in later transformers; the original
    norms the queries alone.
    """

    config_class = SASRecConfig
    config: SASRecConfig

    def __init__(self, config: SASRecConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(SASRecLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.post_init()

    def _head(self, hidden_states: Tensor) -> Tensor:
        return self.norm(hidden_states)
