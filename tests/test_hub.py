"""Saving and loading: a patched checkpoint comes back patched, with every tensor, and never passes for a plain model."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    Trainer,
    TrainingArguments,
)

import bft_hf
from bft_hf import BFTConfig

IDS = torch.randint(3, 128, (2, 9), generator=torch.Generator().manual_seed(31))
CONFIG = BFTConfig.unit(initial_process_noise=2.0, effective_sample_size="exact")


def trained(model: Any) -> Any:
    """Every parameter moved off its start value, as training does."""
    generator = torch.Generator().manual_seed(13)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            step = 0.9 if ".bft." in name else 0.01
            parameter += step * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return model


def answer(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS)[0]


def assert_same_model(loaded: Any, model: Any) -> None:
    """Patched alike, every tensor equal in value and dtype, the same logits."""
    assert bft_hf.get_config(loaded) == bft_hf.get_config(model) is not None
    ours, theirs = loaded.state_dict(), model.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor), name
    assert [type(m) for m in loaded.modules()] == [type(m) for m in model.modules()]
    assert torch.equal(answer(loaded), answer(model))


def in_fresh_process(script: str, *arguments: Any, check: bool = True) -> subprocess.CompletedProcess:
    """Run Python source that has imported nothing yet."""
    command = [sys.executable, "-c", "import sys, torch\ntorch.set_num_threads(1)\n" + script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert not check or done.returncode == 0, done.stderr
    return done


@pytest.fixture
def saved(tiny_llama: Callable[..., Any], tmp_path: Path) -> tuple[Any, Path]:
    """A trained patched model and the folder it was saved to."""
    model = trained(bft_hf.patch(tiny_llama(), CONFIG))
    model.save_pretrained(tmp_path / "model")
    return model, tmp_path / "model"


LOAD = """
import transformers
{imports}
folder, expected = sys.argv[1], torch.load(sys.argv[2])
for name in ("AutoModelForCausalLM", "LlamaForCausalLM"):
    model = getattr(transformers, name).from_pretrained(folder).eval()
    assert type(model).__name__ == "LlamaForCausalLM"
    state = model.state_dict()
    assert state.keys() == expected["state"].keys(), state.keys() ^ expected["state"].keys()
    assert all(torch.equal(state[key], value) for key, value in expected["state"].items())
    with torch.no_grad():
        assert torch.equal(model(expected["ids"]).logits, expected["logits"])
"""


def test_fresh_process_loads_a_patched_model_by_auto_and_concrete_class(
    saved: tuple[Any, Path], tmp_path: Path
) -> None:
    model, folder = saved
    torch.save({"state": model.state_dict(), "ids": IDS, "logits": answer(model)}, tmp_path / "expected.pt")
    patched = LOAD.format(imports="import bft_hf") + "    assert bft_hf.is_patched(model)\n"
    patched += "    assert bft_hf.get_config(model).initial_process_noise == 2.0\n"
    in_fresh_process(patched, folder, tmp_path / "expected.pt")


def test_without_the_plugin_loading_is_refused_and_the_message_names_the_import(saved: tuple[Any, Path]) -> None:
    script = """
import transformers
failed = 0
for name in ("AutoModelForCausalLM", "LlamaForCausalLM", "AutoModel", "LlamaForSequenceClassification"):
    try:
        getattr(transformers, name).from_pretrained(sys.argv[1])
    except Exception as error:
        assert "import bft_hf" in str(error), repr(error)
        failed += 1
assert failed == 4, failed
assert "bft_hf" not in sys.modules
"""
    in_fresh_process(script, saved[1])


def test_unpatched_save_is_a_plain_llama_that_loads_without_the_plugin(saved: tuple[Any, Path], tmp_path: Path) -> None:
    model, _ = saved
    bft_hf.unpatch(model)
    plain = tmp_path / "plain"
    model.save_pretrained(plain)
    assert not any("bft" in path.read_text() for path in plain.glob("*.json"))
    values = json.loads((plain / "config.json").read_text())
    assert "quantization_config" not in values and values["hidden_act"] == "silu"
    assert not any("bft" in name for name in load_file(plain / "model.safetensors"))
    torch.save({"state": model.state_dict(), "ids": IDS, "logits": answer(model)}, tmp_path / "expected.pt")
    script = LOAD.format(imports="") + 'assert "bft_hf" not in sys.modules'
    in_fresh_process(script, plain, tmp_path / "expected.pt")


def test_no_key_is_missing_unexpected_or_newly_made(saved: tuple[Any, Path]) -> None:
    model, folder = saved
    loaded, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert_same_model(loaded, model)


def test_loaded_values_are_not_initialised_again(saved: tuple[Any, Path]) -> None:
    """transformers #46620: what was loaded was overwritten by _init_weights, and the loading report was clean."""
    model, folder = saved
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    loaded.init_weights()
    for module in loaded.modules():
        if hasattr(module, "reset_missing"):
            loaded._init_weights(module)
    assert_same_model(loaded, model)
    assert all((p - 0.0).abs() > 1e-3 for p in bft_hf.bft_parameters(loaded).values())


def test_patch_adds_no_buffer_and_the_models_own_survive_loading(
    saved: tuple[Any, Path], tiny_llama: Callable[..., Any]
) -> None:
    """transformers #48892: buffers outside the state dict come out of from_pretrained as uninitialised memory."""
    plain = dict(tiny_llama().named_buffers())
    assert plain and not set(plain) & set(saved[0].state_dict())
    for model in (saved[0], AutoModelForCausalLM.from_pretrained(saved[1])):
        buffers = dict(model.named_buffers())
        assert buffers.keys() == plain.keys()
        assert all(torch.equal(buffers[name], value) for name, value in plain.items())


def test_a_lost_tensor_is_reported_missing_and_starts_at_its_start_value(saved: tuple[Any, Path]) -> None:
    from safetensors.torch import save_file

    _, folder = saved
    tensors = load_file(folder / "model.safetensors")
    lost = "model.layers.0.bft.log_process_noise"
    del tensors[lost]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    loaded, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert set(info["missing_keys"]) == {lost}
    torch.testing.assert_close(loaded.get_parameter(lost).detach(), torch.tensor([2.0]).log())


def test_loaded_model_shows_no_trace_of_a_quantizer(saved: tuple[Any, Path]) -> None:
    model, folder = saved
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    for name in ("is_quantized", "quantization_method", "hf_quantizer"):
        assert getattr(loaded, name, None) is getattr(model, name, None), name
    assert not hasattr(loaded.config, "quantization_config")
    assert loaded.config.hidden_act == "silu" and loaded.config.model_type == "llama"
    assert loaded.config.to_dict() == model.config.to_dict() | {"_name_or_path": loaded.config._name_or_path}
    assert loaded.dtype == torch.float32
    loaded.to(torch.float64).float().train()


@pytest.mark.parametrize("loader", [AutoModelForCausalLM, LlamaForCausalLM])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, "auto"])
def test_dtype_on_load_leaves_tau_and_q_exact_in_float32(loader: Any, dtype: Any, saved: tuple[Any, Path]) -> None:
    model, folder = saved
    loaded = loader.from_pretrained(folder, dtype=dtype)
    wanted = torch.float32 if dtype == "auto" else dtype
    ours = bft_hf.bft_parameters(model)
    assert bft_hf.bft_parameters(loaded).keys() == ours.keys() and len(ours) == 3
    for name, parameter in loaded.named_parameters():
        if name in ours:
            assert parameter.dtype == torch.float32 and torch.equal(parameter, ours[name])
        else:
            assert parameter.dtype == wanted, name
    assert loaded.dtype == wanted and answer(loaded).dtype == wanted
    if dtype != "auto":
        assert all(not torch.equal(value.to(dtype).float(), value) for value in ours.values())


def test_bfloat16_model_saves_and_loads_exactly(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path / "plain")  # loaded, not cast: a cast rounds the rotary frequencies as well
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.bfloat16)
    model = trained(bft_hf.patch(plain, CONFIG))
    model.save_pretrained(tmp_path)
    assert_same_model(AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto"), model)
    assert_same_model(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16), model)
    assert_same_model(AutoModelForCausalLM.from_pretrained(tmp_path), model)


def test_save_takes_what_transformers_takes_by_position(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    model = bft_hf.patch(tiny_llama(), CONFIG)
    state = {name: value * 2 if "embed" in name else value for name, value in model.state_dict().items()}
    expected = state["model.embed_tokens.weight"]
    model.save_pretrained(tmp_path, True, state)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path).model.embed_tokens.weight, expected)


def test_sharded_save(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    model = trained(bft_hf.patch(tiny_llama(), CONFIG))
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    assert_same_model(AutoModelForCausalLM.from_pretrained(tmp_path), model)


@pytest.mark.parametrize(
    "options", [{"device_map": "cpu"}, {"device_map": {"": "cpu"}}, {"device_map": "auto"}, {"low_cpu_mem_usage": True}]
)
def test_placed_and_low_memory_loading(options: dict[str, Any], saved: tuple[Any, Path]) -> None:
    model, folder = saved
    assert_same_model(AutoModelForCausalLM.from_pretrained(folder, **options), model)


def test_loading_twice_and_saving_what_was_loaded(saved: tuple[Any, Path], tmp_path: Path) -> None:
    model, folder = saved
    first, second = (AutoModelForCausalLM.from_pretrained(folder) for _ in range(2))
    assert_same_model(first, model)
    assert_same_model(second, model)
    assert first.config is not second.config
    first.save_pretrained(tmp_path / "again")
    trained(second)  # moves on; what was saved does not
    third = LlamaForCausalLM.from_pretrained(tmp_path / "again")
    assert_same_model(third, model)
    third.save_pretrained(tmp_path / "and again")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "and again" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    bft_hf.unpatch(third).save_pretrained(tmp_path / "plain")
    plain = LlamaForCausalLM.from_pretrained(tmp_path / "plain")
    assert not bft_hf.is_patched(plain) and not torch.equal(answer(plain), answer(model))


def test_folder_marks_are_in_the_file_and_not_in_memory(saved: tuple[Any, Path]) -> None:
    model, folder = saved
    values = json.loads((folder / "config.json").read_text())
    assert values["bft_config"] == CONFIG.to_dict() and values["model_type"] == "llama"
    assert values["architectures"] == ["LlamaForCausalLM"]
    assert "import bft_hf" in values["hidden_act"] and values["quantization_config"]["quant_method"] == "bft_hf"
    assert model.config.hidden_act == "silu" and not hasattr(model.config, "quantization_config")


def test_every_field_is_in_the_file_so_a_changed_default_changes_no_checkpoint(
    saved: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, folder = saved
    expected = answer(model)
    assert set(json.loads((folder / "config.json").read_text())["bft_config"]) == set(CONFIG.to_dict())
    defaults = list(BFTConfig.__init__.__defaults__)
    names = list(BFTConfig.__dataclass_fields__)
    for name, value in {"gain": False, "prior_degrees_of_freedom": 5.0, "observation_units": "absolute"}.items():
        defaults[names.index(name)] = value
    monkeypatch.setattr(BFTConfig.__init__, "__defaults__", tuple(defaults))
    assert BFTConfig().gain is False  # the default did change
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(answer(loaded), expected) and bft_hf.get_config(loaded).gain is True


def test_checkpoint_of_a_newer_major_version_is_refused(saved: tuple[Any, Path]) -> None:
    _, folder = saved
    values = json.loads((folder / "config.json").read_text())
    values["bft_config"]["bft_format"] = "99.0"
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match="pip install -U bft-hf"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_sequence_classifier_comes_back_patched(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    model = trained(bft_hf.patch(tiny_llama(model_class=LlamaForSequenceClassification, num_labels=3), CONFIG))
    model.save_pretrained(tmp_path)
    for loader in (AutoModelForSequenceClassification, LlamaForSequenceClassification):
        loaded = loader.from_pretrained(tmp_path)
        assert loaded.config.num_labels == 3
        assert_same_model(loaded, model)


@pytest.mark.parametrize("loader", [AutoModel, LlamaModel])
def test_bare_model_from_a_causal_folder_is_patched(loader: Any, saved: tuple[Any, Path]) -> None:
    model, folder = saved
    assert_same_model(loader.from_pretrained(folder), model.model)


def test_bare_model_comes_back_and_takes_a_head(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    model = trained(bft_hf.patch(tiny_llama(model_class=LlamaModel), CONFIG))
    model.save_pretrained(tmp_path)
    assert_same_model(AutoModel.from_pretrained(tmp_path), model)
    headed = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=2)
    assert_same_model(headed.model, model)


def test_tied_embeddings_stay_tied(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    model = trained(bft_hf.patch(tiny_llama(tie_word_embeddings=True), CONFIG))
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert_same_model(loaded, model)


def test_auto_config_and_auto_tokenizer_read_the_folder(saved: tuple[Any, Path], stories260k: Path) -> None:
    _, folder = saved
    config = AutoConfig.from_pretrained(folder)
    assert config.model_type == "llama" and config.bft_config == CONFIG.to_dict()
    AutoTokenizer.from_pretrained(stories260k).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (
        tokenizer.decode(tokenizer("Once upon a time").input_ids, skip_special_tokens=True).strip()
        == "Once upon a time"
    )


@pytest.mark.parametrize("loaded_before", [False, True])
def test_a_model_built_from_the_folders_config_is_never_silently_plain(
    loaded_before: bool, saved: tuple[Any, Path]
) -> None:
    script = """
import bft_hf, transformers
if sys.argv[2] == "True":
    transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
config = transformers.AutoConfig.from_pretrained(sys.argv[1])
try:
    transformers.AutoModelForCausalLM.from_config(config)(torch.tensor([[5]]))
except Exception as error:
    assert "bft_hf" in str(error), repr(error)
else:
    raise AssertionError("silently plain")
"""
    in_fresh_process(script, saved[1], loaded_before)


def test_config_passed_by_hand_loads_patched(saved: tuple[Any, Path]) -> None:
    model, folder = saved
    config = AutoConfig.from_pretrained(folder)
    assert_same_model(AutoModelForCausalLM.from_pretrained(folder, config=config), model)
    loaded = AutoModelForCausalLM.from_pretrained(
        folder, config=AutoConfig.from_pretrained(folder), attn_implementation="eager"
    )
    assert loaded.config._attn_implementation == "eager" and bft_hf.is_patched(loaded)
    torch.testing.assert_close(answer(loaded), answer(model), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("loader", [AutoModelForCausalLM, LlamaForCausalLM])
def test_a_plain_models_config_cannot_load_a_patched_folder_as_plain(
    loader: Any, saved: tuple[Any, Path], tiny_llama: Callable[..., Any]
) -> None:
    model, folder = saved
    # No config.json is read then, so nothing of ours runs: patched or not, the tensors must not vanish unreported.
    loaded, info = loader.from_pretrained(folder, config=tiny_llama().config, output_loading_info=True)
    if bft_hf.is_patched(loaded):
        assert_same_model(loaded, model)
    else:
        assert sum(".bft." in key for key in info["unexpected_keys"]) == 3


def test_model_trained_on_by_trainer_comes_back(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    model = trained(bft_hf.patch(tiny_llama(), CONFIG))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    rows = [{"input_ids": row, "labels": row} for row in IDS.repeat(3, 1)]
    arguments = TrainingArguments(
        str(tmp_path),
        max_steps=3,
        per_device_train_batch_size=2,
        save_steps=2,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    optimizer = torch.optim.AdamW(bft_hf.param_groups(model, 1e-3, 5e-2), fused=True)
    trainer = Trainer(model, arguments, train_dataset=rows, optimizers=(optimizer, None))
    trainer.train()
    for name, parameter in model.named_parameters():
        moved = (parameter - before[name]).abs().max()
        assert moved > (0.03 if ".bft." in name else 1e-5), name
    trainer.save_model(str(tmp_path / "final"))
    assert_same_model(AutoModelForCausalLM.from_pretrained(tmp_path / "final"), model)
    middle = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2")
    assert bft_hf.is_patched(middle) and not torch.equal(answer(middle), answer(model))


def test_loaded_model_trains_under_trainer(saved: tuple[Any, Path], tmp_path: Path) -> None:
    """Trainer refuses models that look quantized, and resumes from a checkpoint of a patched one."""
    _, folder = saved
    rows = [{"input_ids": row, "labels": row} for row in IDS.repeat(3, 1)]

    def train(model: Any, resume: str | None = None) -> Any:
        arguments = TrainingArguments(
            str(tmp_path / "run"),
            max_steps=4,
            per_device_train_batch_size=2,
            save_steps=2,
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            learning_rate=1e-3,
        )
        Trainer(model, arguments, train_dataset=rows).train(resume_from_checkpoint=resume)
        return model

    whole = train(AutoModelForCausalLM.from_pretrained(folder))
    resumed = train(AutoModelForCausalLM.from_pretrained(folder), str(tmp_path / "run" / "checkpoint-2"))
    assert_same_model(resumed, whole)


def test_state_dict_survives_torch_save(
    saved: tuple[Any, Path], tiny_llama: Callable[..., Any], tmp_path: Path
) -> None:
    model, _ = saved
    torch.save(model.state_dict(), tmp_path / "state.pt")
    fresh = bft_hf.patch(tiny_llama(seed=5), CONFIG)
    fresh.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert_same_model(fresh, model)


def test_loading_one_patched_folder_leaves_plain_folders_plain(
    saved: tuple[Any, Path], tiny_llama: Callable[..., Any], tmp_path: Path
) -> None:
    plain = tiny_llama(seed=3)
    plain.save_pretrained(tmp_path / "plain")
    AutoModelForCausalLM.from_pretrained(saved[1])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.bfloat16)
    assert not bft_hf.is_patched(loaded) and {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    assert torch.equal(answer(AutoModelForCausalLM.from_pretrained(tmp_path / "plain")), answer(plain))
