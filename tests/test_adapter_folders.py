"""An adapter's folder says that its base must be patched; loading it on a plain base complains or patches it first."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import lora_config
from huggingface_hub import ModelCard
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

import bft_hf
from bft_hf import BFTConfig

IDS = torch.randint(3, 128, (2, 9), generator=torch.Generator().manual_seed(61))
CONFIG = BFTConfig.unit(initial_process_noise=2.0, layers=(0, 2))


def adapt(model: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    model = get_peft_model(model, lora_config(**options)).eval()
    with torch.no_grad():
        for parameter in bft_hf.bft_parameters(model).values():
            parameter += 0.3
    return model


def answer(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


@pytest.fixture
def adapter(tiny_llama: Callable[..., Any], tmp_path: Path) -> tuple[Any, Path]:
    """An adapted model on a base patched in memory, and its folder."""
    model = adapt(bft_hf.patch(tiny_llama(), CONFIG))
    model.save_pretrained(tmp_path / "adapter")
    return model, tmp_path / "adapter"


def test_the_folder_holds_the_configuration_and_a_card(adapter: tuple[Any, Path]) -> None:
    _, folder = adapter
    assert BFTConfig.from_json_string((folder / "bft_config.json").read_text()) == CONFIG
    card = ModelCard.load(folder / "README.md")
    assert "patched first" in card.text and {"bft", "lora"} <= set(card.data.tags) and "PEFT" in card.text


def test_one_call_patches_a_plain_base_and_loads(adapter: tuple[Any, Path], tiny_llama: Callable[..., Any]) -> None:
    model, folder = adapter
    base = tiny_llama()
    loaded = bft_hf.load_adapter(base, folder)
    assert isinstance(loaded, PeftModel) and loaded.get_base_model() is base
    assert bft_hf.get_config(loaded) == CONFIG and torch.equal(answer(loaded), answer(model))
    assert torch.equal(answer(bft_hf.load_adapter(bft_hf.patch(tiny_llama(), CONFIG), folder)), answer(model))
    trainable = bft_hf.load_adapter(tiny_llama(), folder, is_trainable=True, adapter_name="other")
    assert all(p.requires_grad for p in bft_hf.bft_parameters(trainable).values())
    assert trainable.active_adapter == "other"


@pytest.mark.parametrize("older", [False, True], ids=["with bft_config.json", "without"])
@pytest.mark.parametrize("way", ["from_pretrained", "load_adapter", "transformers"])
def test_on_a_plain_base_it_complains(
    way: str, older: bool, adapter: tuple[Any, Path], tiny_llama: Callable[..., Any]
) -> None:
    _, folder = adapter
    if older:
        (folder / "bft_config.json").unlink()
        if way == "transformers":
            pytest.skip("transformers' own load_adapter does not say which keys it dropped")
    load = {
        "from_pretrained": lambda: PeftModel.from_pretrained(tiny_llama(), folder),
        "load_adapter": lambda: adapt(tiny_llama(), modules_to_save=None).load_adapter(folder, "second"),
        "transformers": lambda: tiny_llama().load_adapter(str(folder)),
    }
    with pytest.raises(ValueError, match=r"bft_hf\.load_adapter"):
        load[way]()


def test_auto_class_with_a_base_that_is_plain_on_disk_complains(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    adapt(bft_hf.patch(base, CONFIG)).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match="patched by bft_hf"):
        AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")


def test_a_base_patched_otherwise_is_refused(adapter: tuple[Any, Path], tiny_llama: Callable[..., Any]) -> None:
    _, folder = adapter
    other = bft_hf.patch(tiny_llama(), BFTConfig.unit(layers=(0, 1)))
    with pytest.raises(ValueError, match="another configuration"):
        PeftModel.from_pretrained(other, folder)
    with pytest.raises(ValueError, match="unpatch"):
        bft_hf.load_adapter(bft_hf.patch(tiny_llama(), BFTConfig.unit()), folder)
    (folder / "bft_config.json").unlink()
    with pytest.raises(ValueError, match="no place"):
        PeftModel.from_pretrained(bft_hf.patch(tiny_llama(), BFTConfig.unit(layers=(0,))), folder)
    with pytest.raises(ValueError, match=r"no bft_config\.json"):
        bft_hf.load_adapter(tiny_llama(), folder)


def test_frozen_filter_is_told_by_the_configuration_alone(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    model = get_peft_model(bft_hf.patch(tiny_llama(), CONFIG), LoraConfig(r=2, target_modules="all-linear"))
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="patched by bft_hf"):
        PeftModel.from_pretrained(tiny_llama(), tmp_path)
    assert torch.equal(answer(bft_hf.load_adapter(tiny_llama(), tmp_path)), answer(model))


def test_plain_adapters_are_saved_and_loaded_as_ever(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    model = get_peft_model(tiny_llama(), LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    model.save_pretrained(tmp_path)
    assert not (tmp_path / "bft_config.json").exists() and "bft" not in (tmp_path / "README.md").read_text()
    assert torch.equal(answer(PeftModel.from_pretrained(tiny_llama(), tmp_path)), answer(model))
    on_patched = PeftModel.from_pretrained(bft_hf.patch(tiny_llama(), BFTConfig.unit()), tmp_path)
    assert bft_hf.is_patched(on_patched) and answer(on_patched).isfinite().all()


def test_two_adapters_two_folders(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    model = adapt(bft_hf.patch(tiny_llama(), CONFIG))
    model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["bft"]))
    model.save_pretrained(tmp_path)
    for folder in (tmp_path, tmp_path / "second"):
        assert json.loads((folder / "bft_config.json").read_text())["layers"] == [0, 2]
    only = tmp_path / "only"
    model.save_pretrained(only, selected_adapters=["second"])
    assert not (only / "bft_config.json").exists() and (only / "second" / "bft_config.json").exists()


def test_saving_without_trained_filter_parameters_warns(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    """LoRA before patch: tau and Q train, and PEFT does not know them."""
    model = bft_hf.patch(get_peft_model(tiny_llama(), LoraConfig(r=2, target_modules="all-linear")), CONFIG)
    with pytest.warns(UserWarning, match="call bft_hf.patch before"):
        model.save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*bft_hf.patch")  # PEFT has warnings of its own
        adapt(bft_hf.patch(tiny_llama(), CONFIG)).save_pretrained(tmp_path)


def test_saved_model_has_a_card_where_there_was_none(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    model = bft_hf.patch(tiny_llama(), CONFIG)
    model.save_pretrained(tmp_path / "one")
    assert "Bayesian Filtering Transformer" in (tmp_path / "one" / "README.md").read_text()
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "README.md").write_text("mine")
    model.save_pretrained(tmp_path / "two")
    assert (tmp_path / "two" / "README.md").read_text() == "mine"
    bft_hf.unpatch(model).save_pretrained(tmp_path / "three")
    assert not (tmp_path / "three" / "README.md").exists()


@pytest.mark.parametrize("name", ["log", "weight", "modules_to_save"])
def test_adapters_whose_names_are_words_in_our_parameters_come_back(
    name: str, tiny_llama: Callable[..., Any], tmp_path: Path
) -> None:
    """peft #2772: a key's word, if it is "weight" or the adapter's name, was replaced wherever it stood in the key."""
    torch.manual_seed(0)
    lora = LoraConfig(target_modules="all-linear", modules_to_save=["bft"], init_lora_weights=False)
    base = bft_hf.patch(tiny_llama(), CONFIG)
    assert not any("weight" in path for path in bft_hf.bft_parameters(base))
    model = get_peft_model(base, lora, adapter_name=name).eval()
    with torch.no_grad():
        for parameter in bft_hf.bft_parameters(model).values():
            parameter += 0.3
    model.save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*adapter keys.*")
        again = bft_hf.load_adapter(tiny_llama(), tmp_path / name, adapter_name=name)
    assert torch.equal(answer(again), answer(model))


def test_an_adapter_named_like_our_module_is_refused_by_peft_itself(tiny_llama: Callable[..., Any]) -> None:
    lora = LoraConfig(target_modules="all-linear", modules_to_save=["bft"])
    with pytest.raises(ValueError, match="adapter name, 'bft', does not conflict"):
        get_peft_model(bft_hf.patch(tiny_llama(), CONFIG), lora, adapter_name="bft")


def test_an_adapter_of_transformers_own_is_refused_by_a_plain_base(
    tiny_llama: Callable[..., Any], tmp_path: Path
) -> None:
    """model.add_adapter, without a PeftModel: the folder says the same, and loads through bft_hf.load_adapter."""
    lora = LoraConfig(target_modules="all-linear", modules_to_save=["bft"], init_lora_weights=False)
    torch.manual_seed(0)
    model = bft_hf.patch(tiny_llama(), CONFIG)
    try:
        tiny_llama().add_adapter(lora)
    except ValueError as error:
        pytest.skip(f"transformers' add_adapter does not run with this PEFT: {error}")
    model.add_adapter(lora)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"bft_hf\.load_adapter"):
        tiny_llama().load_adapter(str(tmp_path))
    with pytest.raises(ValueError, match=r"use bft_hf\.load_adapter"):
        bft_hf.patch(tiny_llama(), CONFIG).load_adapter(str(tmp_path))
    assert torch.equal(answer(bft_hf.load_adapter(tiny_llama(), tmp_path)), answer(model))
