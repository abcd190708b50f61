"""What the three recommenders share: from item ids to hidden states, scores and a loss."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.utils import ModelOutput

from ..architectures import ARCHITECTURES
from ..config import BFTConfig
from ..patching import layer_indices
from ..state import BFTState
from ..stream import check_reliability
from .cards import write_missing_card
from .configuration import FIRST_ITEM, PADDING, RecommenderConfig, filter_defaults
from .recommend import RecommenderMixin
from .step import Pass


@dataclass
class RecommenderOutput(ModelOutput):
    """What a recommender returns.

    Attributes:
        loss: cross entropy over all items, averaged over the labelled positions; with labels only.
        last_hidden_state: what is multiplied with the item embeddings, (batch, token, channel).
        logits: scores of all ids, (batch, token, id), -inf where an id is no item; with `return_logits` only.
    """

    loss: Float[Tensor, ""] | None = None
    last_hidden_state: Float[Tensor, "batch token channel"] | None = None
    logits: Float[Tensor, "batch token id"] | None = None


class RecommenderModel(RecommenderMixin, PreTrainedModel):
    """Base of the recommenders: item embeddings, positions, layers, scores.

    Subclasses build `layers` and, where they need one, a head, and end their `__init__` with `post_init()`. A layer has a
    child `bft` that is None in a plain model, and a `BFTState` where the layer is a step of the filter.

    Attributes:
        objective: "next_item" for causal models, "cloze" for bidirectional ones.
    """

    config: RecommenderConfig
    config_class = RecommenderConfig
    base_model_prefix = ""
    main_input_name = "input_ids"
    objective: ClassVar[str] = "next_item"
    layers: nn.ModuleList

    def __init__(self, config: RecommenderConfig) -> None:
        super().__init__(config)
        self.embed_items = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=PADDING)
        self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)

    def post_init(self) -> None:
        """Add the filter of `config.bft`, then let transformers initialise what no checkpoint brings."""
        if self.config.bft is not None:
            self.add_filter(self.config.bft)
        super().post_init()

    def default_filter(self) -> BFTConfig:
        """What `bft_hf.patch(model)` means for a recommender."""
        return filter_defaults()

    def add_filter(self, config: BFTConfig | dict[str, Any]) -> None:
        """Make the layers steps of the filter; `bft_hf.patch` calls it.

        Raises:
            ValueError: `config.layers` or `config.gain_scale` does not fit the model.
        """
        config = BFTConfig.from_dict(config) if isinstance(config, dict) else config
        indices = layer_indices(self, config)
        architecture = ARCHITECTURES[self.config.model_type]
        weight = self.embed_items.weight
        for slot, index in enumerate(indices):
            state = BFTState(config, architecture, indices, slot, self.config.hidden_size, weight.shape[0])
            self.layers[index].bft = state.to(weight.device).train(self.training)
        self._bft_traces: list[Any] = []
        self._bft_config = config
        self._set_filter_config(config)

    def remove_filter(self) -> None:
        """Undo `add_filter`; `bft_hf.unpatch` calls it."""
        for layer in self.layers:
            layer.bft = None
        del self._bft_traces, self._bft_config
        self._set_filter_config(None)

    def _set_filter_config(self, config: BFTConfig | None) -> None:
        if self.config.bft != config:
            self.config = copy.copy(self.config)  # plain models may share it
            self.config.bft = config

    def forward(
        self,
        input_ids: Int[Tensor, "batch token"],
        attention_mask: Tensor | None = None,
        position_ids: Int[Tensor, "batch token"] | None = None,
        timestamps: Int[Tensor, "batch token"] | None = None,
        labels: Int[Tensor, "batch token"] | None = None,
        token_reliability: Float[Tensor, "batch token"] | None = None,
        return_logits: bool = False,
    ) -> RecommenderOutput:
        """Hidden states of histories, and a loss where there are labels.

        Args:
            input_ids: item ids, oldest first; 0 is padding, on either side.
            attention_mask: 1 at items and 0 at padding; None takes id 0 for padding.
            position_ids: places in the history; None counts the items as `config.positions` says.
            timestamps: seconds, for models with a time bias.
            labels: the item to be predicted at each position; -100 where there is none.
            token_reliability: rho in [0, 1] for each item as evidence, for models with a filter.
            return_logits: whether to return the scores of all items at all positions.

        Raises:
            ValueError: a history is longer than the model reads, or an argument is not one for this model.
        """
        run = self._start_pass(input_ids, attention_mask, position_ids, timestamps, token_reliability)
        hidden_states = self._embed(run)
        precisions = None
        for layer in self.layers:
            hidden_states, precisions = layer(hidden_states, run, precisions)
        hidden_states = self._head(hidden_states)
        loss = logits = None
        if labels is not None:
            labelled = labels != -100
            items = self.score(hidden_states[labelled])
            loss = nn.functional.cross_entropy(items, labels[labelled])
        if return_logits:
            logits = self.score(hidden_states)
        return RecommenderOutput(loss=loss, last_hidden_state=hidden_states, logits=logits)

    def item_embeddings(self) -> Float[Tensor, "id channel"]:
        """The vectors that score items, one row an id: 0 is padding, 1 to num_items the items, special tokens above."""
        return self.embed_items.weight

    def item_bias(self) -> Float[Tensor, " id"] | None:
        """What is added to the scores, one number an id; None if nothing is."""
        return None

    def score(self, hidden_states: Float[Tensor, "*batch channel"]) -> Float[Tensor, "*batch id"]:
        """Scores of all ids, -inf where an id is no item."""
        scores = nn.functional.linear(hidden_states, self.item_embeddings(), self.item_bias())
        ids = torch.arange(scores.shape[-1], device=scores.device)
        return scores.masked_fill((ids < FIRST_ITEM) | (ids >= FIRST_ITEM + self.config.num_items), -torch.inf)

    def save_pretrained(self, save_directory: Any, is_main_process: bool = True, **kwargs: Any) -> None:
        """Save the model, its map of items and, where there is none, a model card."""
        super().save_pretrained(save_directory, is_main_process=is_main_process, **kwargs)
        if is_main_process and os.path.isdir(save_directory):
            write_missing_card(self, save_directory, kwargs.get("repo_id"))

    def _upload_modified_files(self, working_dir: Any, repo_id: str, *args: Any, **kwargs: Any) -> Any:
        # The last that push_to_hub calls: it has just put its generated card over ours.
        write_missing_card(self, working_dir, repo_id)
        if self.item_map is not None:  # save_pretrained(push_to_hub=True) uploads before it has saved the map
            self.item_map.save(working_dir)
        return super()._upload_modified_files(working_dir, repo_id, *args, **kwargs)

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Module:
        """Refused with a ValueError: items are numbered by `config.num_items`, and special ids follow them."""
        raise ValueError(
            "a recommender's catalogue is fixed: build a model with a larger config.num_items and train it"
        )

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_items

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embed_items = value

    def _start_pass(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        timestamps: Tensor | None,
        token_reliability: Tensor | None,
    ) -> Pass:
        longest = self.config.max_position_embeddings
        real = input_ids.ne(PADDING) if attention_mask is None else attention_mask.bool()
        if position_ids is None:
            lengths = real.sum(-1, keepdim=True)
            # Batches are padded to any width: what counts is how many items a history has.
            if input_ids.shape[-1] > longest and int(lengths.max()) > longest:
                raise ValueError(
                    f"a history has {int(lengths.max())} items and the model reads {longest}: pass the last {longest}, or "
                    "raise max_position_embeddings"
                )
            position_ids = real.cumsum(-1) - 1
            if self.config.positions == "from_end":
                position_ids = position_ids + longest - lengths
            position_ids = position_ids.clamp(0, longest - 1)
        if token_reliability is not None:
            if self.config.bft is None:
                raise ValueError("a plain model takes no token_reliability: call bft_hf.patch(model) first")
            check_reliability(token_reliability, *input_ids.shape)
            real = real & (token_reliability > 0)
        traces = tuple(getattr(self, "_bft_traces", ()))
        visible = self._visible(real)
        seeing = visible.any(-1)
        all_see = None if bool(seeing.all()) else seeing
        return Pass(input_ids, position_ids, visible, all_see, timestamps, token_reliability, traces)

    def _visible(self, real: Bool[Tensor, "batch token"]) -> Bool[Tensor, "batch token key"]:
        tokens = real.shape[-1]
        visible = real.unsqueeze(-2).expand(-1, tokens, -1)
        return visible.tril() if self.objective == "next_item" else visible

    def _embed(self, run: Pass) -> Tensor:
        embedded = self.embed_items(run.input_ids)
        if getattr(self.config, "scale_embeddings", False):
            embedded = embedded * self.config.hidden_size**0.5
        return self.dropout(embedded + self.embed_positions(run.position_ids))

    def _head(self, hidden_states: Tensor) -> Tensor:
        """From the last layer's output to what is multiplied with the item embeddings."""
        return hidden_states

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        std = self.config.initializer_range
        if isinstance(module, nn.Linear):
            init.normal_(module.weight, std=std)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, std=std)
            if module.padding_idx is not None and not getattr(module.weight, "_is_hf_initialized", False):
                init.zeros_(module.weight[module.padding_idx])
        elif isinstance(module, BFTState):
            module.reset_missing()
        elif isinstance(module, nn.LayerNorm) and module.elementwise_affine:
            init.ones_(module.weight)
            init.zeros_(module.bias)
