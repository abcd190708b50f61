"""Small random recommenders and batches for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import bft_hf
from bft_hf import BFTConfig
from bft_hf.rec import (
    BERT4RecConfig,
    BERT4RecForMaskedItem,
    HSTUConfig,
    HSTUForNextItem,
    SASRecConfig,
    SASRecForNextItem,
)

KINDS = {
    "sasrec": (SASRecConfig, SASRecForNextItem),
    "bert4rec": (BERT4RecConfig, BERT4RecForMaskedItem),
    "hstu": (HSTUConfig, HSTUForNextItem),
}
NUM_ITEMS = 12
all_kinds = pytest.mark.parametrize("kind", KINDS)


def make(kind: str, bft: BFTConfig | None = None, dtype: torch.dtype = torch.float64, **fields: Any) -> Any:
    """A small random recommender in evaluation mode: 3 layers of width 8, wide weights, norms and filter off their starts."""
    config_class, model_class = KINDS[kind]
    fields = {
        "num_items": NUM_ITEMS,
        "hidden_size": 8,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "max_position_embeddings": 9,
        "initializer_range": 0.4,
        **({"intermediate_size": 10} if kind != "hstu" else {}),
        **fields,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = model_class(config_class(**fields, bft=bft)).to(dtype)
        ours = set(bft_hf.bft_parameters(model))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in ours or "norm" in name or "bias" in name:
                    parameter += 0.3 * torch.randn(parameter.shape, dtype=torch.float64).to(parameter)
    return model.to(dtype).eval()


def batch(kind: str = "sasrec", padding: str = "left") -> dict[str, torch.Tensor]:
    """Histories of three lengths, (3, 7), and for cloze models a hidden item in each."""
    ids = torch.randint(1, NUM_ITEMS + 1, (3, 7), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    for row, pads in enumerate((0, 2, 6)):
        if padding == "left":
            mask[row, :pads] = 0
        elif padding == "right":
            mask[row, 7 - pads :] = 0
    ids = ids * mask
    if kind == "bert4rec":
        ids[:, 3] = torch.where(mask[:, 3] > 0, NUM_ITEMS + 1, ids[:, 3])
    return {"input_ids": ids, "attention_mask": mask}
