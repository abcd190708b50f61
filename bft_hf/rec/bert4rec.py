"""BERT4Rec: a bidirectional transformer with norms after its residuals, trained to fill in hidden items."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from ..state import BFTState, Precisions
from .configuration import BERT4RecConfig
from .layers import FeedForward, SelfAttention
from .modeling_common import RecommenderModel
from .step import Pass, inverse_std, start_step


class BERT4RecLayer(nn.Module):
    """norm(h + attention(h)), then norm(h + FFN(h)); with a filter, norm(h + K attention(h)).

    Where the update and the norms stand. A Kalman update is a step from the prior towards the observation, and the place
    where the two meet is the sum h + K a. So the gain stands inside the norm; K = 1 is BERT4Rec, K = 0 leaves norm(h). The
    norm that follows is a deterministic map of the new state, as the FFN is, and like the FFN's own norm its scale g / std
    counts as constant within the step. What it does to the precision depends on the units:

    - relative: an error is measured against the signal it is part of. The norm multiplies both with g / std, so the
      precision passes unchanged.
    - absolute: the variance is multiplied with (g / std)^2. The norm after the FFN is part of the dynamics, so its
      factor stands with (1 + J)^2, and Q is added behind both: lam'' is at most 1/Q here too.

    lam'' = 1 / ((s_1 s_2 (1 + J))^2 / lam' + Q), with s_1 = s_2 = 1 in relative units and g / std of the two norms in
    absolute ones; that the norms also take a mean away is an effect of order 1/C on the variance and left out. No norm
    stands in front of the FFN, so its Jacobian has no scale in it.
    """

    bft: BFTState | None

    def __init__(self, config: BERT4RecConfig) -> None:
        super().__init__()
        self.register_module("bft", None)
        self.attention = SelfAttention(config)
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.ffn = FeedForward(config)
        self.ffn_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, hidden_states: Tensor, run: Pass, precisions: Precisions | None
    ) -> tuple[Tensor, Precisions | None]:
        """One layer: hidden states (batch, token, channel), and the precisions that stand beside them."""
        step = start_step(self.bft, hidden_states, run, precisions)
        attended = self.dropout(self.attention(hidden_states, run, step))
        updated = hidden_states + (attended if step is None else step.gained(attended))
        hidden_states = self.attention_norm(updated)
        output, preactivation = self.ffn(hidden_states)
        moved = hidden_states + self.dropout(output)
        if step is not None:
            step.rescale(lambda: _norm_scale(updated, self.attention_norm))
            step.rescale(lambda: _norm_scale(moved, self.ffn_norm))
            precisions = step.predict(lambda: self.ffn.jacobian(preactivation, step))
        return self.ffn_norm(moved), precisions


def _norm_scale(hidden_states: Tensor, norm: nn.LayerNorm) -> Tensor:
    """g / std, (batch, token, channel)."""
    scale = inverse_std(hidden_states, norm).unsqueeze(-1)
    return scale * norm.weight.to(scale.dtype)


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
