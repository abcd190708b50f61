"""Model cards of patched models and of adapters on patched bases, by huggingface_hub's ModelCard."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from torch import nn

from .config import BFTConfig

TAGS = ("bft", "bft-hf")
ARXIV = "2605.18832"
GENERATED = "This model card has been automatically generated."
"""What stands in the card that transformers' push_to_hub makes for a model without one."""

WHAT = (
    "a Bayesian Filtering Transformer: every token carries a precision beside its hidden state, attention weights its "
    "neighbours by it, each layer adds its attention output with a Kalman gain, and the feed-forward network passes the "
    f"precision on with a learned process noise ([arXiv {ARXIV}](https://arxiv.org/abs/{ARXIV}))."
)
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def model_card(
    config: BFTConfig | None,
    name: str,
    *,
    base_model: str | None = None,
    adapter: bool = False,
    datasets: Sequence[str] = (),
    training: str | None = None,
    noise: Mapping[str, Any] | None = None,
    evaluation: Mapping[str, float] | None = None,
    evaluated_on: str | None = None,
    tags: Sequence[str] = (),
    loading: str | None = None,
    sections: Mapping[str, str] | None = None,
) -> ModelCard:
    """The card of a patched model, or, with `config` None, of the plain model that it is compared with.

    What is not given is not in the card: no section is empty.

    Args:
        config: what the model, or the adapter's base, is patched with.
        name: where the model is or will be, a Hub id or folder: the title and the argument of from_pretrained.
        base_model: what was fine-tuned. It enters the card's metadata if it is a Hub id, and only the text otherwise.
        adapter: whether the card is of a PEFT adapter.
        datasets: Hub ids of the training data.
        training: prose or a list in Markdown on how it was trained.
        noise: of the training labels: "rate" in [0, 1], and where known "kind", "corrupted_labels" and "eligible_labels".
        evaluation: metric by name; finite ones also enter the metadata in model-index form.
        evaluated_on: the data of `evaluation`, a Hub id or any name.
        tags: beside "bft", "bft-hf" and, of an adapter, "lora".
        loading: Python that loads the model, in place of what this function would write.
        sections: further text by heading, at the end.

    Returns:
        A card that can be saved, validated or pushed.

    Raises:
        ValueError: `evaluation` without `evaluated_on`.
    """
    if evaluation and not evaluated_on:
        raise ValueError("a card with metrics has to name the data they were measured on: give evaluated_on")
    finite = {metric: value for metric, value in (evaluation or {}).items() if math.isfinite(value)}
    data = ModelCardData(
        model_name=_title(name) if finite else None,
        base_model=base_model if is_hub_id(base_model) else None,
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        datasets=list(datasets) or None,
        tags=list(dict.fromkeys([*(TAGS if config else ()), *(["lora"] if adapter else ()), *tags])) or None,
        eval_results=[_eval_result(metric, value, str(evaluated_on)) for metric, value in finite.items()] or None,
    )
    origin = f"Made from `{base_model if is_hub_id(base_model) else _title(base_model)}`. " if base_model else ""
    if config:
        about = f"{origin}{'With its base, which has to be patched, this adapter is ' if adapter else 'This is '}{WHAT}"
    else:
        about = f"{origin}This model has no filter: it is the baseline of a comparison with Bayesian Filtering Transformers."
    parts = [f"# {_title(name)}", about, "## How to load"]
    if config and adapter:
        parts += [
            "This is an adapter of a patched model: **its base has to be patched first**, with the configuration below "
            "(`bft_config.json`). On a plain base the filter's learned parameters have nowhere to go."
        ]
    elif config:
        parts += [
            "`import bft_hf` (`pip install bft-hf`) makes the Auto classes return a patched model; without it loading "
            "refuses. Engines other than transformers refuse this checkpoint: `bft_hf.unpatch(model)` and then "
            "`save_pretrained` make a plain one, which lacks the filter."
        ]
    parts += [f"```python\n{(loading or load_snippet(config, name, base_model, adapter)).strip()}\n```"]
    if training or noise or datasets:
        parts += ["## Training", *([training] if training else []), *_data_lines(datasets, noise)]
    if evaluation:
        table = "\n".join(f"| {metric} | {value:.4g} |" for metric, value in evaluation.items())
        parts += ["## Evaluation", f"On `{evaluated_on}`:", f"| metric | value |\n|---|---|\n{table}"]
    for heading, text in (sections or {}).items():
        parts += [f"## {heading}", text]
    if config:
        parts += ["## BFT configuration", f"```json\n{config.to_json_string().strip()}\n```"]
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(parts) + "\n")


def load_snippet(config: BFTConfig | None, name: str, base_model: str | None = None, adapter: bool = False) -> str:
    """Python that loads what a card describes."""
    lines = ["import bft_hf"] if config else []
    if not adapter:
        lines += ["from transformers import AutoModelForCausalLM", ""]
        return "\n".join([*lines, f"model = AutoModelForCausalLM.from_pretrained({name!r})"])
    lines += ["from peft import PeftModel", "from transformers import AutoModelForCausalLM", ""]
    lines += [f"model = AutoModelForCausalLM.from_pretrained({base_model or 'the base model'!r})"]
    if config:
        changed = {key: value for key, value in config.to_dict().items() if value != BFTConfig().to_dict()[key]}
        arguments = ", ".join(f"{key}={value!r}" for key, value in changed.items())
        lines += [f"model = bft_hf.patch(model, bft_hf.BFTConfig({arguments}))"]
    return "\n".join([*lines, f"model = PeftModel.from_pretrained(model, {name!r})"])


def card_of(model: nn.Module, name: str) -> ModelCard:
    """What can be told of a patched model, or of a PEFT model on a patched base, by itself.

    Raises:
        ValueError: the model is not patched.
    """
    from .patching import get_config

    config = get_config(model)
    if config is None:
        raise ValueError(f"{type(model).__name__} is not patched: call bft_hf.patch first")
    adapter = hasattr(model, "peft_config") and hasattr(model, "get_base_model")
    origin = str(getattr(model.get_base_model() if adapter else model, "name_or_path", "") or "")
    return model_card(config, name, base_model=origin or None, adapter=adapter)


def write_missing_card(model: nn.Module, folder: str | os.PathLike[str], name: str | None = None) -> None:
    """Write README.md of a patched model into a folder that has none, or none but the one transformers generates.

    Args:
        model: a patched model, or a PEFT model on a patched base.
        folder: exists.
        name: the Hub id the folder goes to; its own path by default.
    """
    path = Path(folder, "README.md")
    if path.exists():
        card = ModelCard.load(path)
        if GENERATED not in card.text:
            return
        made = card_of(model, name or str(folder))
        # Tags that were asked for by push_to_hub(tags=...) or model.add_model_tags.
        tags = [*(made.data.to_dict().get("tags") or []), *(card.data.to_dict().get("tags") or [])]
        made.data["tags"] = list(dict.fromkeys(tags))
    else:
        made = card_of(model, name or str(folder))
    made.save(path)


def is_hub_id(name: str | None) -> bool:
    """Whether a name can stand as `base_model` in a card's metadata: `owner/name`, and no folder of this machine."""
    return name is not None and _HUB_ID.fullmatch(name) is not None and not os.path.exists(name)


def _title(name: str) -> str:
    return Path(name).name or name


def _eval_result(metric: str, value: float, dataset: str) -> EvalResult:
    return EvalResult(
        task_type="text-generation",
        task_name="Text generation",
        dataset_type=dataset if is_hub_id(dataset) else re.sub(r"[^\w.-]+", "-", Path(dataset).name).strip("-"),
        dataset_name=dataset,
        metric_type=re.sub(r"\W+", "_", metric).strip("_").lower(),
        metric_name=metric,
        metric_value=float(value),
    )


def _data_lines(datasets: Sequence[str], noise: Mapping[str, Any] | None) -> list[str]:
    lines = [f"- Data: {', '.join(f'`{dataset}`' for dataset in datasets)}"] if datasets else []
    if noise:
        kind = f" ({noise['kind']})" if noise.get("kind") else ""
        line = f"- Label noise {noise['rate']:g}{kind}"
        if noise.get("eligible_labels"):
            line += (
                f": {noise['corrupted_labels']} of {noise['eligible_labels']} labels replaced; the inputs stayed clean"
            )
        lines += [line]
    return ["\n".join(lines)] if lines else []
