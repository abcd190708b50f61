"""The attention weights of a model as it runs, before and after kriging."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from bft_hf.attention import query_constant
from bft_hf.compat import attention_function

ATTENTION = "bft_seen"
"""The name under which `_seen_attention` stands in transformers' registry of attention functions."""

See = Callable[[int, Tensor, Tensor], None]
"""Called with the layer's index and the weights before and after kriging, both (batch, head, query, key), float32."""

_see: See | None = None


@contextmanager
def attention_weights(model: Any, see: See) -> Iterator[None]:
    """Show the attention weights of every layer of a model that runs within the block.

    Before kriging they are alpha, the softmax of the plain scores; after it w, with the precision of the keys as a bias, which
    are the weights that the model uses. Without a patch, and with `kriging=False`, the two are the same. Every matrix of
    tokens by tokens is formed, one layer at a time: it is up to `see` what is kept.

    Args:
        model: A causal language model of transformers, patched or plain, bare or a PEFT model.
        see: Called once a layer and pass.

    Raises:
        ValueError: The model's attention does not go through transformers' `AttentionInterface`, or blocks are nested.
    """
    global _see
    if _see is not None:
        raise ValueError("attention_weights within attention_weights: use one block at a time")
    _register()
    before = model.config._attn_implementation
    model.set_attn_implementation(ATTENTION)
    if model.config._attn_implementation != ATTENTION:
        raise ValueError(f"{type(model).__name__} has an attention of its own, whose weights cannot be seen")
    _see = see
    try:
        yield
    finally:
        _see = None
        model.set_attn_implementation(before)


def _seen_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Attention by transformers' interface that shows its weights: those of the family's own eager attention.

    A patched layer's queries and keys are wider than its heads, since the further channels hold the log-precision of the keys:
    without them the same function gives the weights before kriging.
    """
    attend = attention_function(getattr(module, "_bft_original_class", type(module)), "eager")
    kwargs["scaling"] = kwargs.get("scaling") or int(module.head_dim) ** -0.5  # type: ignore[arg-type]
    output, after = attend(module, query, key, value, attention_mask, **kwargs)
    if _see is not None:
        before, head_dim = after, int(module.head_dim)  # type: ignore[arg-type]
        if query.shape[-1] > head_dim:
            mask = attention_mask
            if kwargs.get("softcap") is not None and mask is not None:  # around a cap, precisions come with the mask
                mask = mask - key[:, :1, None, :, head_dim] * (kwargs["scaling"] * query_constant(kwargs["scaling"]))
            plain = (states[..., :head_dim] for states in (query, key, value))
            before = attend(module, *plain, mask, **kwargs)[1]
        _see(int(module.layer_idx), before.float(), after.float())  # type: ignore[arg-type]
    return output, after


_seen_attention.adds_mask_behind_cap = True  # type: ignore[attr-defined]


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register(ATTENTION, _seen_attention)
    AttentionMaskInterface.register(ATTENTION, eager_mask)
