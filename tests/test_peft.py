"""LoRA on a patched model: tau and Q train, are saved in the adapter, and come back; merging keeps what is computed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import lora_config
from peft import (
    AutoPeftModelForCausalLM,
    IA3Config,
    LoHaConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptTuningConfig,
    VeraConfig,
    get_peft_model,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import bft_hf
from bft_hf import BFTConfig

IDS = torch.randint(3, 128, (2, 9), generator=torch.Generator().manual_seed(61))
MASK = torch.ones_like(IDS)
MASK[0, :4] = 0


def answer(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS, attention_mask=MASK).logits[MASK.bool()]


def train(model: Any, steps: int = 3) -> Any:
    optimizer = torch.optim.AdamW(bft_hf.param_groups(model, 1e-2, 0.1))
    model.train()
    for _ in range(steps):
        model(input_ids=IDS, attention_mask=MASK, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@pytest.fixture
def adapted(tiny_llama: Callable[..., Any]) -> Any:
    """LoRA and the filter's parameters, trained for three steps."""
    torch.manual_seed(0)
    model = get_peft_model(bft_hf.patch(tiny_llama(), BFTConfig.unit()), lora_config())
    return train(model)


def test_tau_and_q_train_with_the_adapter(tiny_llama: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    base = bft_hf.patch(tiny_llama(), BFTConfig.unit())
    model = get_peft_model(base, lora_config())
    assert bft_hf.is_patched(model) and bft_hf.get_config(model) == BFTConfig.unit()
    ours = bft_hf.bft_parameters(model)
    assert len(ours) == 3 and all(p.requires_grad and p.dtype == torch.float32 for p in ours.values())
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert set(ours) < trainable and all("lora_" in name for name in trainable - set(ours))
    start, logits = {name: p.detach().clone() for name, p in ours.items()}, answer(model)
    train(model)
    assert all((p - start[name]).abs() > 0.02 for name, p in ours.items())
    assert (answer(model) - logits).abs().max() > 1e-3


def test_trained_tau_and_q_are_what_the_filter_uses(adapted: Any) -> None:
    with torch.no_grad(), bft_hf.record(adapted) as trace:
        adapted(input_ids=IDS, attention_mask=MASK)
    tau = next(p for name, p in bft_hf.bft_parameters(adapted).items() if "initial_precision" in name).exp()
    torch.testing.assert_close(trace.precision[0], tau.detach().expand(2, 9))
    assert abs(tau.item() - 1) > 0.02


def test_adapter_folder_holds_them_and_they_come_back(
    adapted: Any, tiny_llama: Callable[..., Any], tmp_path: Path
) -> None:
    adapted.save_pretrained(tmp_path)
    stored = {
        name: value for name, value in load_file(tmp_path / "adapter_model.safetensors").items() if ".bft." in name
    }
    trained = [p.detach() for p in bft_hf.bft_parameters(adapted).values()]
    assert len(stored) == 3 and sorted(v.item() for v in stored.values()) == sorted(p.item() for p in trained)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["modules_to_save"] == ["bft"]

    restored = PeftModel.from_pretrained(bft_hf.patch(tiny_llama(), BFTConfig.unit()), tmp_path)
    assert torch.equal(answer(restored), answer(adapted))
    for name, parameter in bft_hf.bft_parameters(restored).items():
        assert parameter.dtype == torch.float32 and torch.equal(parameter, bft_hf.bft_parameters(adapted)[name])
    other = PeftModel.from_pretrained(bft_hf.patch(tiny_llama(seed=1), BFTConfig.unit()), tmp_path)
    assert not torch.equal(answer(other), answer(adapted))


def test_adapter_on_a_saved_patched_base(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    bft_hf.patch(tiny_llama(), BFTConfig.unit()).save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = train(get_peft_model(base, lora_config()))
    model.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    assert torch.equal(answer(again), answer(model))
    auto = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    assert bft_hf.is_patched(auto) and torch.equal(answer(auto), answer(model))


def test_without_modules_to_save_they_are_frozen(tiny_llama: Callable[..., Any]) -> None:
    model = get_peft_model(bft_hf.patch(tiny_llama(), BFTConfig.unit()), lora_config(modules_to_save=None))
    assert bft_hf.is_patched(model) and not any(p.requires_grad for p in bft_hf.bft_parameters(model).values())
    assert "bft" not in {group["name"] for group in bft_hf.param_groups(model, 1e-3)}
    train(model)


@pytest.mark.parametrize("safe", [False, True])
def test_merged_model_keeps_the_patch_and_the_logits(safe: bool, adapted: Any, tmp_path: Path) -> None:
    expected = answer(adapted)
    trained = sorted(p.item() for p in bft_hf.bft_parameters(adapted).values())
    merged = adapted.merge_and_unload(safe_merge=safe)
    assert bft_hf.is_patched(merged) and not any("lora" in name for name, _ in merged.named_modules())
    torch.testing.assert_close(answer(merged), expected, rtol=1e-4, atol=1e-4)
    assert sorted(p.item() for p in bft_hf.bft_parameters(merged).values()) == trained
    merged.save_pretrained(tmp_path)
    assert torch.equal(answer(AutoModelForCausalLM.from_pretrained(tmp_path)), answer(merged))


OTHER_ADAPTERS = {
    "IA3": lambda: IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], **SAVED),
    "LoHa": lambda: LoHaConfig(r=2, target_modules=["gate_proj"], init_weights=False, **SAVED),
    "VeRA": lambda: VeraConfig(r=2, target_modules=["gate_proj"], **SAVED),
}
SAVED: dict[str, Any] = {"modules_to_save": ["bft"], "task_type": "CAUSAL_LM"}


@pytest.mark.parametrize("kind", OTHER_ADAPTERS)
def test_other_adapters_merge_too(kind: str, tiny_llama: Callable[..., Any]) -> None:
    base = bft_hf.patch(tiny_llama(), BFTConfig.unit())
    keys = list(base.state_dict())
    model = train(get_peft_model(base, OTHER_ADAPTERS[kind]()))
    expected, trained = answer(model), sorted(p.item() for p in bft_hf.bft_parameters(model).values())
    merged = model.merge_and_unload()
    torch.testing.assert_close(answer(merged), expected, rtol=1e-4, atol=1e-4)
    assert list(merged.state_dict()) == keys
    assert sorted(p.item() for p in bft_hf.bft_parameters(merged).values()) == trained


def test_prefix_tuning_is_refused_and_prompt_tuning_is_not(tiny_llama: Callable[..., Any]) -> None:
    """A prefix is keys without a precision; a prompt is tokens as others are."""
    for config in (PrefixTuningConfig, PromptTuningConfig):
        options = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4}
        plain = get_peft_model(tiny_llama(), config(**options)).eval()
        patched = get_peft_model(bft_hf.patch(tiny_llama(), BFTConfig.unit()), config(**options)).eval()
        assert plain(input_ids=IDS).logits.isfinite().all()
        if config is PromptTuningConfig:
            assert patched(input_ids=IDS).logits.isfinite().all()
        else:
            with pytest.raises(NotImplementedError, match="use LoRA or prompt tuning"):
                patched(input_ids=IDS)


def test_unload_gives_back_the_patched_base_as_it_was(tiny_llama: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    base = bft_hf.patch(tiny_llama(), BFTConfig.unit())
    expected, keys = answer(base), list(base.state_dict())
    model = train(get_peft_model(base, lora_config()))
    assert not torch.equal(answer(model), expected)
    unloaded = model.unload()
    assert bft_hf.is_patched(unloaded) and list(unloaded.state_dict()) == keys
    assert all("bft" not in name or p.dtype == torch.float32 for name, p in unloaded.named_parameters())


def test_disabled_adapter_is_the_patched_base(tiny_llama: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    base = bft_hf.patch(tiny_llama(), BFTConfig.unit())
    expected = answer(base)
    model = train(get_peft_model(base, lora_config()))
    on = answer(model)
    with model.disable_adapter():
        torch.testing.assert_close(answer(model), expected, rtol=1e-5, atol=1e-5)
        assert (answer(model) - on).abs().max() > 1e-3
    assert torch.equal(answer(model), on)


def test_unpatch_within_an_adapter_gives_the_plain_adapted_model(tiny_llama: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    plain = get_peft_model(tiny_llama(), lora_config(modules_to_save=None))
    expected = answer(plain)
    for modules in (["bft"], None):
        torch.manual_seed(0)
        model = get_peft_model(bft_hf.patch(tiny_llama(), BFTConfig.unit()), lora_config(modules_to_save=modules))
        model.load_state_dict(plain.state_dict(), strict=False)
        assert not torch.equal(answer(model), expected)
        assert bft_hf.unpatch(model) is model and not bft_hf.is_patched(model)
        assert torch.equal(answer(model), expected)


def test_patching_a_peft_model_runs_the_filter(tiny_llama: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    model = get_peft_model(tiny_llama(), lora_config(modules_to_save=None))
    plain = answer(model)
    assert bft_hf.patch(model, BFTConfig.unit()) is model and bft_hf.is_patched(model)
    after = answer(model)
    assert (after - plain).abs().max() > 1e-3
    patched_first = get_peft_model(bft_hf.patch(tiny_llama(), BFTConfig.unit()), lora_config(modules_to_save=None))
    patched_first.load_state_dict(model.state_dict())
    assert torch.equal(answer(patched_first), after)
    assert torch.equal(answer(bft_hf.unpatch(model)), plain)


def test_two_adapters_each_have_their_own_tau_and_q(adapted: Any) -> None:
    first = answer(adapted)
    adapted.add_adapter("second", lora_config())
    adapted.set_adapter("second")
    train(adapted, 2)
    second = answer(adapted)
    assert (first - second).abs().max() > 1e-3
    adapted.set_adapter("default")
    assert torch.equal(answer(adapted), first)
    adapted.set_adapter("second")
    assert torch.equal(answer(adapted), second)
    precision = []
    for adapter in ("default", "second"):
        adapted.set_adapter(adapter)
        with torch.no_grad(), bft_hf.record(adapted) as trace:
            adapted(input_ids=IDS)
        precision.append(trace.precision[0])
    assert (precision[0] - precision[1]).abs().max() > 0.02


def test_casting_an_adapted_model_keeps_them_in_float32(adapted: Any) -> None:
    before = {name: p.detach().clone() for name, p in bft_hf.bft_parameters(adapted).items()}
    adapted.to(torch.bfloat16)
    for name, parameter in bft_hf.bft_parameters(adapted).items():
        assert parameter.dtype == torch.float32 and torch.equal(parameter, before[name])
    assert answer(adapted).dtype == torch.bfloat16


def test_adapted_bfloat16_base_trains(tiny_llama: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    model = get_peft_model(bft_hf.patch(tiny_llama(dtype=torch.bfloat16), BFTConfig.unit()), lora_config())
    assert all(p.dtype == torch.float32 for p in bft_hf.bft_parameters(model).values())
    start = [p.item() for p in bft_hf.bft_parameters(model).values()]
    train(model)
    moved = [abs(p.item() - s) for p, s in zip(bft_hf.bft_parameters(model).values(), start, strict=True)]
    assert min(moved) > 0.02 and answer(model).isfinite().all()


def test_generation_of_an_adapted_model_with_a_cache_equals_without(adapted: Any) -> None:
    inputs = {"input_ids": IDS, "attention_mask": MASK, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(adapted.generate(**inputs), adapted.generate(**inputs, use_cache=False))


def test_trainer_trains_and_saves_the_adapter(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = get_peft_model(bft_hf.patch(tiny_llama(), BFTConfig.unit()), lora_config())
    start = {name: p.detach().clone() for name, p in bft_hf.bft_parameters(model).items()}
    rows = [{"input_ids": row, "labels": row} for row in IDS.repeat(3, 1)]
    arguments = TrainingArguments(
        str(tmp_path / "run"),
        max_steps=3,
        per_device_train_batch_size=2,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        gradient_checkpointing=True,
    )
    optimizer = torch.optim.AdamW(bft_hf.param_groups(model, 1e-3, 5e-2))
    trainer = Trainer(model, arguments, train_dataset=rows, optimizers=(optimizer, None))
    trainer.train()
    assert all((p - start[name]).abs() > 0.03 for name, p in bft_hf.bft_parameters(model).items())
    trainer.save_model(str(tmp_path / "adapter"))
    torch.manual_seed(0)
    again = PeftModel.from_pretrained(bft_hf.patch(tiny_llama(), BFTConfig.unit()), tmp_path / "adapter")
    assert torch.equal(answer(again), answer(model))
