"""Model cards: valid metadata, metrics in model-index form, and code in them that runs."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from huggingface_hub.repocard_data import model_index_to_eval_results
from peft import LoraConfig, get_peft_model

import bft_hf
from bft_hf import BFTConfig
from bft_hf.cards import GENERATED, card_of, is_hub_id, model_card, write_missing_card

CONFIG = BFTConfig.unit(initial_process_noise=2.0, layers=(0, 2))
METRICS = {"exact match": 0.5, "F1": 0.625, "answer NLL": 1.25}


def code(card: ModelCard) -> str:
    """The Python in a card."""
    (block,) = re.findall(r"```python\n(.*?)```", card.text, flags=re.S)
    return block


@pytest.fixture
def full() -> ModelCard:
    return model_card(
        CONFIG,
        "someone/llama-bft",
        base_model="TinyLlama/TinyLlama-1.1B-Chat-v1.0",
        datasets=["rajpurkar/squad"],
        training="- One epoch.",
        noise={"rate": 0.3, "kind": "token", "corrupted_labels": 30, "eligible_labels": 100},
        evaluation=METRICS,
        evaluated_on="rajpurkar/squad",
        tags=["trl", "sft"],
        sections={"Limits": "One seed ranks nothing."},
    )


def test_metadata_is_what_the_hub_reads(full: ModelCard, tmp_path: Path) -> None:
    full.save(tmp_path / "README.md")
    data = ModelCard.load(tmp_path / "README.md").data.to_dict()
    assert data["tags"] == ["bft", "bft-hf", "trl", "sft"]
    assert data["base_model"] == "TinyLlama/TinyLlama-1.1B-Chat-v1.0"
    assert data["datasets"] == ["rajpurkar/squad"] and data["library_name"] == "transformers"
    assert data["pipeline_tag"] == "text-generation"
    name, results = model_index_to_eval_results(data["model-index"])
    assert name == "llama-bft" and {r.metric_name: r.metric_value for r in results} == METRICS
    assert {r.metric_type for r in results} == {"exact_match", "f1", "answer_nll"}
    assert {(r.dataset_type, r.dataset_name, r.task_type) for r in results} == {
        ("rajpurkar/squad", "rajpurkar/squad", "text-generation")
    }


def test_text_tells_what_it_is_how_it_was_made_and_its_configuration(full: ModelCard) -> None:
    text = full.text
    for words in (
        "Bayesian Filtering Transformer",
        "2605.18832",
        "noise 0.3 (token)",
        "30 of 100",
        "One seed",
        "0.625",
    ):
        assert words in text, words
    (block,) = re.findall(r"```json\n(.*?)```", text, flags=re.S)
    assert BFTConfig.from_json_string(block) == CONFIG
    headings = re.findall(r"^## (.*)$", text, flags=re.M)
    assert headings == ["How to load", "Training", "Evaluation", "Limits", "BFT configuration"]
    assert "import bft_hf" in code(full) and "bft_hf.unpatch" in text


def test_what_is_unknown_is_left_out() -> None:
    card = model_card(BFTConfig.unit(), "a")
    assert set(card.data.to_dict()) == {"tags", "library_name", "pipeline_tag"}
    assert re.findall(r"^## (.*)$", card.text, flags=re.M) == ["How to load", "BFT configuration"]
    assert "None" not in card.text.replace('"layers": null', "")
    with pytest.raises(ValueError, match="evaluated_on"):
        model_card(BFTConfig.unit(), "a", evaluation={"F1": 1.0})


def test_a_plain_baseline_is_not_tagged_as_ours() -> None:
    card = model_card(
        None, "someone/sft", base_model="owner/base", evaluation={"F1": 0.5}, evaluated_on="own questions"
    )
    assert card.data.tags is None and "bft_hf" not in card.text and "baseline" in card.text
    assert card.data.to_dict()["model-index"][0]["results"][0]["dataset"] == {
        "type": "own-questions",
        "name": "own questions",
    }


def test_a_number_that_is_none_does_not_spoil_the_metadata() -> None:
    card = model_card(BFTConfig.unit(), "a", evaluation={"F1": float("nan"), "NLL": 2.0}, evaluated_on="d")
    (result,) = card.data.to_dict()["model-index"][0]["results"]
    assert result["metrics"][0]["name"] == "NLL" and "| F1 | nan |" in card.text


def test_only_hub_ids_are_base_models(tmp_path: Path) -> None:
    (tmp_path / "owner").mkdir()
    for name, known in {"owner/model": True, "model": False, str(tmp_path): False, "a/b/c": False}.items():
        assert is_hub_id(name) == known
        card = model_card(BFTConfig.unit(), "a", base_model=name)
        assert ("base_model" in card.data.to_dict()) == known
        assert str(tmp_path.parent) not in card.text  # a home folder is nobody's business
    assert not is_hub_id(None)


def test_code_in_the_card_of_a_model_runs(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    model = bft_hf.patch(tiny_llama(), CONFIG)
    model.save_pretrained(tmp_path)
    scope: dict[str, Any] = {}
    exec(code(card_of(model, str(tmp_path))), scope)
    assert bft_hf.get_config(scope["model"]) == CONFIG


def test_code_in_the_card_of_an_adapter_runs(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path / "base")
    base = bft_hf.patch(type(tiny_llama()).from_pretrained(tmp_path / "base"), CONFIG)
    model = get_peft_model(
        base,
        LoraConfig(
            target_modules="all-linear", modules_to_save=["bft"], init_lora_weights=False, task_type="CAUSAL_LM"
        ),
    )
    model.save_pretrained(tmp_path / "adapter")
    card = card_of(model, str(tmp_path / "adapter"))
    assert card.data.library_name == "peft" and "lora" in card.data.tags and "patched first" in card.text
    scope: dict[str, Any] = {}
    exec(code(card), scope)
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        assert torch.equal(scope["model"].eval()(input_ids=ids).logits, model.eval()(input_ids=ids).logits)


def test_missing_card_is_written_and_no_other_touched(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    model, readme = bft_hf.patch(tiny_llama(), CONFIG), tmp_path / "README.md"
    write_missing_card(model, tmp_path, "someone/model")
    assert ModelCard.load(readme).data.tags == ["bft", "bft-hf"] and "# model\n" in readme.read_text()
    for text in ("---\ntags:\n- mine\n---\n\nMy own words.\n", "No front matter at all.\n"):
        readme.write_text(text)
        write_missing_card(model, tmp_path)
        assert readme.read_text() == text
    # The sentence is transformers', as long as its source says so.
    from transformers.utils import hub

    assert GENERATED in Path(str(hub.__file__)).read_text()
    readme.write_text(f"---\ntags:\n- mine\n---\n\n# Model Card\n\n{GENERATED}\n")
    write_missing_card(model, tmp_path)
    assert ModelCard.load(readme).data.tags == ["bft", "bft-hf", "mine"]
    assert json.dumps(2.0) in readme.read_text()


def test_plain_model_has_no_such_card(tiny_llama: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="not patched"):
        card_of(tiny_llama(), "a")
