"""The configurations of the recommenders, with the settings that reached the published figures as defaults."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from ..config import BFTConfig

PADDING = 0
"""The id of padding."""

FIRST_ITEM = 1
"""The id of the first item."""


def filter_defaults(**overrides: Any) -> BFTConfig:
    """The filter's settings for recommenders: the unit start, one precision a channel, tau by item, and Kish's n exactly.

    A recommender begins from random weights, so there is no function to keep, and forms its attention weights anyway
    (histories are short), so nothing of them has to be estimated.

    Args:
        **overrides: fields of `BFTConfig` that shall differ.
    """
    return BFTConfig.unit(
        **{"granularity": "channel", "initial_precision": "table", "effective_sample_size": "exact", **overrides}
    )


class RecommenderConfig(PretrainedConfig):
    """What the three recommenders share.

    Item ids run from 1 to `num_items`; 0 is padding, and special tokens, where a model has them, follow the items.

    Args:
        num_items: how many items there are.
        hidden_size: C, also the width of the item embeddings by which items are scored.
        num_hidden_layers: how many blocks.
        num_attention_heads: H, a divisor of `hidden_size`.
        max_position_embeddings: the longest history that the model reads.
        positions: "from_start" counts a history's items from its first, "from_end" so that its last item always stands at
            the last position (what left-padding to full length does in the published SASRec).
        dropout: on embeddings, attention weights and what enters the residual.
        initializer_range: standard deviation of the normal start values.
        bft: the filter's settings, a `BFTConfig` or its `to_dict()`; None is the plain model.

    Raises:
        ValueError: a field has a value that is not allowed.
    """

    num_items: int = 10_000
    hidden_size: int = 64
    num_hidden_layers: int = 2
    num_attention_heads: int = 2
    max_position_embeddings: int = 50
    positions: str = "from_start"
    dropout: float = 0.2
    initializer_range: float = 0.02
    bft: BFTConfig | dict[str, Any] | None = None
    pad_token_id: int | None = PADDING

    def __post_init__(self, **kwargs: Any) -> None:
        if isinstance(self.bft, dict):
            self.bft = BFTConfig.from_dict(self.bft)
        for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it has to be at least 1")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is no multiple of num_attention_heads {self.num_attention_heads}: "
                "choose heads that divide it"
            )
        if self.positions not in ("from_start", "from_end"):
            raise ValueError(f"positions is {self.positions!r}: allowed is 'from_start' or 'from_end'")
        super().__post_init__(**kwargs)

    @property
    def vocab_size(self) -> int:
        """Rows of the item embeddings: padding, the items, and the special tokens."""
        return self.num_items + FIRST_ITEM

    @property
    def mask_token_id(self) -> int | None:
        """The id that stands for a hidden item; None for models that are trained without any."""
        return None

    def to_dict(self) -> dict[str, Any]:
        values = super().to_dict()
        if isinstance(self.bft, BFTConfig):
            values["bft"] = self.bft.to_dict()
        return values


class SASRecConfig(RecommenderConfig):
    """Configuration of `SASRecForNextItem` (Kang and McAuley 2018, arXiv 1808.09781).

    Args:
        intermediate_size: F, width of the FFN.
        hidden_act: the FFN's activation.
        layer_norm_eps: epsilon of the norms.
        scale_embeddings: multiply item embeddings by sqrt(C) before positions are added.
        **kwargs: see `RecommenderConfig`.
    """

    model_type = "sasrec"

    intermediate_size: int = 64
    hidden_act: str = "relu"
    layer_norm_eps: float = 1e-8
    scale_embeddings: bool = True


class BERT4RecConfig(RecommenderConfig):
    """Configuration of `BERT4RecForMaskedItem` (Sun et al. 2019, arXiv 1904.06690).

    Args:
        intermediate_size: F, width of the FFN.
        hidden_act: the activation of the FFN and of the head.
        layer_norm_eps: epsilon of the norms.
        mask_probability: share of items that cloze training hides: .2 for long histories (ML-1M); for short ones Sun et al. hide .6, others .2.
        **kwargs: see `RecommenderConfig`.
    """

    model_type = "bert4rec"

    intermediate_size: int = 256
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-12
    mask_probability: float = 0.2

    def __post_init__(self, **kwargs: Any) -> None:
        if not 0 < self.mask_probability < 1:
            raise ValueError(f"mask_probability is {self.mask_probability}: it has to be in (0, 1)")
        super().__post_init__(**kwargs)

    @property
    def vocab_size(self) -> int:
        return self.num_items + FIRST_ITEM + 1

    @property
    def mask_token_id(self) -> int | None:
        return self.num_items + FIRST_ITEM


class HSTUConfig(RecommenderConfig):
    """Configuration of `HSTUForNextItem` (Zhai et al. 2024, arXiv 2402.17152).

    Args:
        layer_norm_eps: epsilon of the norms.
        attention_dropout: on the attention weights; `dropout` is on the gated output.
        scale_embeddings: multiply item embeddings by sqrt(C) before positions are added.
        time_buckets: how many buckets the time bias has; 0 leaves it out, for data without timestamps.
        **kwargs: see `RecommenderConfig`.
    """

    model_type = "hstu"

    hidden_size: int = 50
    num_attention_heads: int = 1
    max_position_embeddings: int = 200
    layer_norm_eps: float = 1e-6
    attention_dropout: float = 0.0
    scale_embeddings: bool = True
    time_buckets: int = 0
