"""Which keys each query sees, read from whatever mask the attention function was given."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BLOCK_ROWS = 128
"""Query rows whose visibility, or scores, are held at a time where they have to be formed."""


class Visibility:
    """Which keys each query sees, by whatever the attention function was told.

    Args:
        attention_mask: (batch or 1, 1, token, key), boolean or additive; a BlockMask of flex attention; (batch, key), as flash
            attention takes it; or None.
        query: (batch, head, token, width).
        key: (batch, kv_head, key, width).
        flash_positions: position_ids where the attention is a flash kernel: it aligns causality to the last key, and with no
            mask it takes documents apart where positions start anew. None for others.
        causal: Whether no mask, or a flash kernel's, means the causal case; otherwise every query sees every key.
    """

    def __init__(
        self,
        attention_mask: Any,
        query: Tensor,
        key: Tensor,
        flash_positions: Tensor | None = None,
        causal: bool = True,
    ) -> None:
        self.attention_mask = attention_mask
        self.causal = causal
        self.tokens, self.keys, self.device = query.shape[2], key.shape[2], query.device
        self.flash = flash_positions is not None
        self.documents: Tensor | None = None
        if flash_positions is not None and attention_mask is None and self.tokens == self.keys:
            self.documents = (flash_positions.diff(dim=1, prepend=flash_positions[:, :1] - 1) != 1).cumsum(1)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Visibility)
            and self.attention_mask is other.attention_mask
            and (self.tokens, self.keys, self.flash, self.causal, self.device)
            == (other.tokens, other.keys, other.flash, other.causal, other.device)
        )

    __hash__ = None  # type: ignore[assignment]

    @property
    def sees_all(self) -> bool:
        """Whether it is known without a tensor that every query sees every key."""
        return self.attention_mask is None and (self.tokens == 1 or (not self.causal and self.documents is None))

    def row_blocks(self) -> list[slice]:
        """Blocks of query rows."""
        return [slice(at, min(at + BLOCK_ROWS, self.tokens)) for at in range(0, self.tokens, BLOCK_ROWS)]

    def rows(self, rows: slice) -> Tensor | None:
        """Whether these rows see each key, (batch or 1, row, key); None when they see all."""
        mask = self.attention_mask
        if isinstance(mask, Tensor) and mask.ndim == 4:
            return mask_to_bool(mask[:, 0, rows], self.keys)
        if mask is not None and not isinstance(mask, Tensor):
            return _block_mask_rows(mask, rows, self.keys, self.device)
        if self.sees_all:
            return None
        # A static cache's room lies behind the tokens, and only flash kernels take a longer past without a mask.
        offset = self.keys - self.tokens if self.flash else 0
        key = torch.arange(self.keys, device=self.device)
        last = torch.arange(rows.start, rows.stop, device=self.device) + offset
        seen = (key <= (last if self.causal else torch.full_like(last, self.keys))[:, None])[None]
        if mask is not None:
            seen = seen & mask[:, None, : self.keys].bool()
        if self.documents is not None:
            seen = seen & (self.documents[:, rows, None] == self.documents[:, None])
        return seen

    def keys_before(self, rows: slice) -> int:
        """How many keys, from the first, these rows see at most; all where that would have to be read from a mask."""
        if self.attention_mask is not None or self.tokens == 1 or not self.causal:
            return self.keys
        return min(self.keys, rows.stop + (self.keys - self.tokens if self.flash else 0))

    def count(self, reliable: Tensor | None) -> Tensor | int:
        """How many keys each query sees, (batch or 1, token); of the reliable ones, (batch, key), if given.

        One token that sees everything is counted without a tensor.
        """
        mask = self.attention_mask
        if isinstance(mask, Tensor) and mask.ndim == 4:
            visible = mask_to_bool(mask, self.keys)
            return (visible if reliable is None else visible & reliable[:, None, None]).sum(-1)[:, 0]
        if self.sees_all:
            return self.keys if reliable is None else reliable.sum(-1, keepdim=True)
        if mask is None and not self.flash:
            # No mask means plain causal attention over keys that begin with these tokens (also in a static cache).
            if reliable is None:
                return torch.arange(1, self.tokens + 1, device=self.device)[None]
            return reliable[:, : self.tokens].cumsum(-1)
        blocks = []
        for rows in self.row_blocks():
            seen = self.rows(rows)
            assert seen is not None
            blocks.append((seen if reliable is None else seen & reliable[:, None]).sum(-1))
        return torch.cat(blocks, dim=1)


def _block_mask_rows(mask: Any, rows: slice, keys: int, device: torch.device) -> Tensor:
    """Rows of flex attention's mask, which is a function of indices, (batch, row, key)."""
    from torch.nn.attention.flex_attention import create_mask

    def shifted(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return mask.mask_mod(batch, head, query + rows.start, key)

    return create_mask(shifted, mask.shape[0], 1, rows.stop - rows.start, keys, device)[:, 0]


def mask_to_bool(attention_mask: Tensor, num_keys: int) -> Tensor:
    """An attention mask as True for visible keys; additive masks hide a key by the most negative number or -inf."""
    mask = attention_mask[..., :num_keys]
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
