"""SASRec: a causal transformer with norms before its sublayers, trained to predict the next item."""

from __future__ import annotations

from torch import Tensor, nn

from .configuration import SASRecConfig
from .layers import FeedForward, Pass, SelfAttention
from .modeling_common import RecommenderModel


class SASRecLayer(nn.Module):
    """h + attention(norm(h)), then h + FFN(norm(h))."""

    def __init__(self, config: SASRecConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.attention = SelfAttention(config)
        self.ffn_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.ffn = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden_states: Tensor, run: Pass) -> Tensor:
        """One layer, (batch, token, channel)."""
        hidden_states = hidden_states + self.dropout(self.attention(self.attention_norm(hidden_states), run))
        output, _ = self.ffn(self.ffn_norm(hidden_states))
        return hidden_states + self.dropout(output)


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
