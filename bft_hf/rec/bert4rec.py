"""BERT4Rec: a bidirectional transformer with norms after its residuals, trained to fill in hidden items."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from .configuration import BERT4RecConfig
from .layers import FeedForward, Pass, SelfAttention
from .modeling_common import RecommenderModel


class BERT4RecLayer(nn.Module):
    """norm(h + attention(h)), then norm(h + FFN(h))."""

    def __init__(self, config: BERT4RecConfig) -> None:
        super().__init__()
        self.attention = SelfAttention(config)
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.ffn = FeedForward(config)
        self.ffn_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden_states: Tensor, run: Pass) -> Tensor:
        """One layer, (batch, token, channel)."""
        hidden_states = self.attention_norm(hidden_states + self.dropout(self.attention(hidden_states, run)))
        output, _ = self.ffn(hidden_states)
        return self.ffn_norm(hidden_states + self.dropout(output))


class BERT4RecForMaskedItem(RecommenderModel):
    """BERT4Rec (Sun et al. 2019, arXiv 1904.06690).

    Hidden items are `config.mask_token_id` in `input_ids`. To predict what follows a history, append that id and read its
    position. Scores have a bias by item.
    """

    config_class = BERT4RecConfig
    config: BERT4RecConfig
    objective = "cloze"

    def __init__(self, config: BERT4RecConfig) -> None:
        super().__init__(config)
        self.embedding_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.layers = nn.ModuleList(BERT4RecLayer(config) for _ in range(config.num_hidden_layers))
        self.head = nn.Linear(config.hidden_size, config.hidden_size)
        self.head_activation = ACT2FN[config.hidden_act]
        self.head_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        self.post_init()

    def item_bias(self) -> Tensor:
        return self.bias

    def _embed(self, run: Pass) -> Tensor:
        embedded = self.embed_items(run.input_ids) + self.embed_positions(run.position_ids)
        return self.dropout(self.embedding_norm(embedded))

    def _head(self, hidden_states: Tensor) -> Tensor:
        return self.head_norm(self.head_activation(self.head(hidden_states)))

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self and not getattr(self.bias, "_is_hf_initialized", False):
            self.bias.zero_()
