"""The model card of a recommender: what it is, how it is loaded, what to ask it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import ModelCard, ModelCardData

from ..cards import GENERATED, TAGS, WHAT
from ..patching import get_config

if TYPE_CHECKING:
    from .modeling_common import RecommenderModel

FAMILIES = {
    "sasrec": "SASRec ([arXiv 1808.09781](https://arxiv.org/abs/1808.09781))",
    "bert4rec": "BERT4Rec ([arXiv 1904.06690](https://arxiv.org/abs/1904.06690))",
    "hstu": "HSTU ([arXiv 2402.17152](https://arxiv.org/abs/2402.17152))",
}


def recommender_card(model: RecommenderModel, name: str) -> ModelCard:
    """The card of a recommender, plain or patched.

    Args:
        model: the model.
        name: the Hub id or folder it goes to.
    """
    config, bft = model.config, get_config(model)
    tags = ["recommendation", "sequential-recommendation", config.model_type, *(TAGS if bft else ())]
    data = ModelCardData(library_name="transformers", tags=tags)
    family = FAMILIES.get(config.model_type, type(model).__name__)
    about = f"A sequential recommender over {config.num_items:,} items: {family}, "
    about += f"as {WHAT}" if bft else "without a filter: a baseline of Bayesian Filtering Transformers."
    times = ", timestamps=[[...]]" if getattr(config, "time_buckets", 0) else ""
    items = "names from `items.json`" if model.item_map is not None else f"ids from 1 to {config.num_items}"
    lines = [
        "import bft_hf.rec  # pip install bft-hf",
        "from transformers import AutoModel",
        "",
        f"model = AutoModel.from_pretrained({name!r})",
        f"best = model.recommend([[...]]{times}, k=10)  # histories, oldest item first",
    ]
    snippet = "\n".join(lines)
    parts = [
        f"# {Path(name).name or name}",
        about,
        "## How to use",
        f"```python\n{snippet}\n```",
        f"Items are {items}; a history is read up to its last {config.max_position_embeddings} items.",
    ]
    if bft:
        parts += ["## BFT configuration", f"```json\n{bft.to_json_string().strip()}\n```"]
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(parts) + "\n")


def write_missing_card(model: RecommenderModel, folder: str | os.PathLike[str], name: str | None = None) -> None:
    """Write README.md into a folder that has none, or none but the one transformers generates at a push.

    Args:
        model: the model.
        folder: exists.
        name: the Hub id the folder goes to; its own path by default.
    """
    path = Path(folder, "README.md")
    made = recommender_card(model, name or str(folder))
    if path.exists():
        card = ModelCard.load(path)
        if GENERATED not in card.text:
            return
        # push_to_hub(tags=...) has put its own into the generated card.
        tags = [*(made.data.to_dict().get("tags") or []), *(card.data.to_dict().get("tags") or [])]
        made.data["tags"] = list(dict.fromkeys(tags))
    made.save(path)
