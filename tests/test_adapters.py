"""LoRA in every order, place and state: the filter follows the weights in force, and tau and Q go where they should."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import lora_config
from peft import AutoPeftModelForCausalLM, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import bft_hf
from bft_hf import BFTConfig
from bft_hf.state import BFTState

IDS = torch.randint(3, 128, (2, 9), generator=torch.Generator().manual_seed(61))
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
# Absolute units read W_O as well as the FFN's weights.
CONFIG = BFTConfig.unit(observation_units="absolute", initial_process_noise=0.5)


def adapt(model: Any, seed: int = 0, **options: Any) -> Any:
    """LoRA with random weights, and the filter's parameters moved off their start."""
    torch.manual_seed(seed)
    return move(get_peft_model(model, lora_config(**options)).eval())


def move(model: Any, step: float = 0.3) -> Any:
    with torch.no_grad():
        for parameter in bft_hf.bft_parameters(model).values():
            if parameter.requires_grad:
                parameter += step
    return model


def run(model: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, and J and the observation precision of every layer."""
    with torch.no_grad(), bft_hf.record(model) as trace:
        logits = model(input_ids=IDS).logits
    return logits, torch.stack(trace.jacobian), torch.stack(trace.observation_precision)


def assert_close(ours: tuple[torch.Tensor, ...], theirs: tuple[torch.Tensor, ...]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


def dense(model: Any) -> Any:
    """A copy in which the adapter is part of ordinary weights: nothing of PEFT is left to be read wrongly."""
    merged = copy.deepcopy(model).merge_and_unload()
    assert not any(isinstance(module, BaseTunerLayer) for module in merged.modules())
    assert all(type(module) is torch.nn.Linear for name, module in merged.named_modules() if name.endswith("_proj"))
    return merged


@pytest.mark.parametrize("variant", [{}, {"use_dora": True}, {"use_rslora": True, "lora_alpha": 4}], ids=str)
@pytest.mark.parametrize("targets", [ATTENTION, MLP, ["down_proj"], "all-linear"], ids=str)
def test_filter_follows_the_effective_weight(
    targets: Any, variant: dict[str, Any], tiny_llama: Callable[..., Any]
) -> None:
    base = bft_hf.patch(tiny_llama(), CONFIG)
    plain = run(base)
    model = adapt(base, target_modules=targets, **variant)
    adapted = run(model)
    assert_close(adapted, run(dense(model)))
    changed = [(mine - other).abs().max() for mine, other in zip(adapted, plain, strict=True)]
    assert min(changed) > 1e-3


def test_jacobian_follows_every_change_of_state_on_one_model(tiny_llama: Callable[..., Any]) -> None:
    """The coefficients are kept between passes: each step of this tour would show a stale one."""
    base = bft_hf.patch(tiny_llama(), CONFIG)
    plain = run(base)
    model = adapt(base)
    first = run(model)
    model.add_adapter("second", lora_config(target_modules=MLP))
    assert_close(run(model), first)
    model.set_adapter("second")
    second = run(move(model, -0.4))
    assert_close(second, run(dense(model)))
    with model.disable_adapter():
        assert_close(run(model), plain)
    assert_close(run(model), second)
    model.set_adapter("default")
    assert_close(run(model), first)
    model.merge_adapter()
    assert_close(run(model), first)
    model.unmerge_adapter()
    assert_close(run(model), first)
    with torch.no_grad():  # as an optimizer that leaves no trace in the tensors' versions
        model.base_model.model.model.layers[0].mlp.gate_proj.lora_B["default"].weight.data.mul_(3)
    moved = run(model.train().eval())
    assert (moved[1] - first[1]).abs().max() > 1e-3
    assert_close(moved, run(dense(model)))
    for one, other in ((first, second), (first, plain), (second, plain)):
        assert (one[1] - other[1]).abs().max() > 1e-3
    model.delete_adapter("second")
    assert_close(run(model), moved)


@pytest.mark.parametrize("targets", [ATTENTION, MLP, "all-linear"], ids=str)
def test_lora_before_patch_is_lora_after_patch(targets: Any, tiny_llama: Callable[..., Any]) -> None:
    after = adapt(bft_hf.patch(tiny_llama(), CONFIG), target_modules=targets, modules_to_save=None)
    torch.manual_seed(0)
    before = get_peft_model(tiny_llama(), lora_config(target_modules=targets, modules_to_save=None)).eval()
    assert bft_hf.patch(before, CONFIG) is before
    before.load_state_dict(after.state_dict())
    for mine, other in zip(run(before), run(after), strict=True):
        assert torch.equal(mine, other)
    # What was there when PEFT froze the base is frozen, what came later is not.
    assert all(parameter.requires_grad for parameter in bft_hf.bft_parameters(before).values())
    assert not any(parameter.requires_grad for parameter in bft_hf.bft_parameters(after).values())


def test_all_linear_wraps_nothing_of_ours(tiny_llama: Callable[..., Any]) -> None:
    for config in (
        BFTConfig.unit(),
        BFTConfig.unit(initial_precision="mlp"),
        BFTConfig.unit(initial_precision="table"),
    ):
        base = bft_hf.patch(tiny_llama(), config)
        names = {f"base_model.model.{name}" for name in bft_hf.bft_parameters(base)}
        model = adapt(base, modules_to_save=None)
        assert set(bft_hf.bft_parameters(model)) == names
        wrapped = [name for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)]
        assert len(wrapped) == 3 * 7 and not any("bft" in name for name in wrapped)


def test_patch_finds_the_decoder_under_peft_and_never_skips_it(tiny_llama: Callable[..., Any]) -> None:
    """transformers #34016: a patch that looked at the outer class did nothing on a PeftModel."""
    model = adapt(tiny_llama(), modules_to_save=None)
    bft_hf.patch(model, BFTConfig.unit())
    assert sum(isinstance(module, BFTState) for module in model.modules()) == 3
    assert len(run(model)[1]) == 3


def test_modules_to_save_of_others_stay_theirs(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    model = adapt(
        bft_hf.patch(tiny_llama(), BFTConfig.unit()), target_modules=ATTENTION, modules_to_save=["lm_head", "bft"]
    )
    with torch.no_grad():
        model.get_submodule("base_model.model.lm_head.modules_to_save.default").weight.mul_(2)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "adapter_model.safetensors")
    assert sum(".bft." in name for name in stored) == 3 and sum("lm_head" in name for name in stored) == 1
    again = PeftModel.from_pretrained(bft_hf.patch(tiny_llama(), BFTConfig.unit()), tmp_path)
    assert torch.equal(run(again)[0], run(model)[0])
    assert_close(run(dense(model)), run(model))


def test_modules_to_save_may_hold_an_mlp(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    """Liger #631: a ModulesToSaveWrapper where the patch expects the module itself."""
    model = adapt(bft_hf.patch(tiny_llama(), CONFIG), target_modules=ATTENTION, modules_to_save=["mlp", "bft"])
    started = run(model)
    with torch.no_grad():
        model.get_submodule("base_model.model.model.layers.1.mlp.modules_to_save.default").up_proj.weight.mul_(1.5)
    changed = run(model)
    assert (changed[1] - started[1])[1].abs().max() > 1e-3
    assert_close(changed, run(dense(model)))
    with model.disable_adapter():
        assert_close(run(model), run(bft_hf.patch(tiny_llama(), CONFIG)))
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(bft_hf.patch(tiny_llama(), CONFIG), tmp_path)
    assert torch.equal(run(again)[0], changed[0])


def test_two_adapters_come_back_each_with_its_own_tau_and_q(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    bft_hf.patch(tiny_llama(), BFTConfig.unit()).save_pretrained(tmp_path / "base")
    model = adapt(AutoModelForCausalLM.from_pretrained(tmp_path / "base"))
    model.add_adapter("second", lora_config(target_modules=MLP))
    answers = {}
    for name, step in (("default", 0.1), ("second", -0.5)):
        model.set_adapter(name)
        answers[name] = run(move(model, step))[0]
    model.save_pretrained(tmp_path / "adapters")
    for folder in (tmp_path / "adapters", tmp_path / "adapters" / "second"):
        assert sum(".bft." in name for name in load_file(folder / "adapter_model.safetensors")) == 3
    again = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapters")
    again.load_adapter(tmp_path / "adapters" / "second", "second")
    for name in ("second", "default", "second"):
        again.set_adapter(name)
        assert torch.equal(run(again)[0], answers[name])
    assert (answers["default"] - answers["second"]).abs().max() > 1e-3


def test_weighted_mixtures_of_adapters_are_refused_by_peft_itself(tiny_llama: Callable[..., Any]) -> None:
    """Of two taus there is no obvious mixture; PEFT says so for all modules_to_save."""
    model = adapt(bft_hf.patch(tiny_llama(), BFTConfig.unit()))
    model.add_adapter("second", lora_config())
    with pytest.raises(ValueError, match="modules_to_save"):
        model.add_weighted_adapter(["default", "second"], [0.5, 0.5], "mixed", combination_type="linear")


@pytest.mark.parametrize("targets", [ATTENTION, "all-linear"], ids=str)
def test_tied_embeddings_survive_adapter_and_merge(
    targets: Any, tiny_llama: Callable[..., Any], tmp_path: Path
) -> None:
    """transformers #45127, peft #2777: the tie collapses."""
    model = adapt(bft_hf.patch(tiny_llama(tie_word_embeddings=True), CONFIG), target_modules=targets)
    inner = model.get_base_model()
    assert inner.lm_head.weight is inner.model.embed_tokens.weight
    expected = run(model)
    merged = model.merge_and_unload()
    assert merged.lm_head.weight is merged.model.embed_tokens.weight and bft_hf.is_patched(merged)
    assert_close(run(merged), expected)
    merged.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(run(loaded)[0], run(merged)[0])


SIZES = {"hidden_size": 64, "intermediate_size": 128}


def load_quantised(folder: Path, bits: int) -> Any:
    """By bitsandbytes; skips where it is not installed."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: 4-bit and 8-bit bases are untested here")
    from transformers import BitsAndBytesConfig

    options: dict[str, Any] = (
        {"load_in_8bit": True} if bits == 8 else {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    )
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=BitsAndBytesConfig(**options), dtype=torch.float32, device_map="cpu"
    )


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_base_is_read_dequantised(bits: int, tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    """peft #842: 4-bit weights read raw."""
    from bft_hf.weights import effective_weight

    tiny_llama(**SIZES).save_pretrained(tmp_path)
    quantised = load_quantised(tmp_path, bits)
    dense_model = tiny_llama(**SIZES)
    assert type(quantised.model.layers[0].mlp.gate_proj) is not torch.nn.Linear
    with torch.no_grad():
        for mine, other in zip(quantised.model.layers, dense_model.model.layers, strict=True):
            for path in [*(f"self_attn.{name}" for name in ATTENTION), *(f"mlp.{name}" for name in MLP)]:
                weight = effective_weight(mine.get_submodule(path))
                original = other.get_submodule(path).weight
                assert weight.shape == original.shape
                assert (weight - original).abs().mean() < 0.15 * original.abs().mean()
                original.copy_(weight)
        # Their kernels round activations, to bfloat16 or to eight bits: how much that makes, the plain models tell.
        rounding = float((quantised(IDS).logits - dense_model(IDS).logits).abs().mean())
    assert rounding < 0.2
    model = bft_hf.patch(quantised, CONFIG)
    logits, jacobian, precision = run(model)
    for mine, other in zip((logits, jacobian, precision), run(bft_hf.patch(dense_model, CONFIG)), strict=True):
        assert (mine - other).abs().mean() < 3 * rounding * other.abs().mean().clamp_min(1)
    adapted = get_peft_model(model, lora_config(init_lora_weights=True)).train()
    assert torch.allclose(run(adapted.eval())[1], jacobian, atol=1e-4)
    adapted.train()(input_ids=IDS, labels=IDS).loss.backward()
    assert all(parameter.grad is not None for parameter in bft_hf.bft_parameters(adapted).values())


def test_quantised_model_saved_whole_is_refused_and_its_adapter_comes_back(
    tiny_llama: Callable[..., Any], tmp_path: Path
) -> None:
    tiny_llama(**SIZES).save_pretrained(tmp_path / "base")
    model = bft_hf.patch(load_quantised(tmp_path / "base", 8), CONFIG)
    with pytest.raises(NotImplementedError, match="save its adapter"):
        model.save_pretrained(tmp_path / "whole")
    assert not (tmp_path / "whole").exists()
    adapted = adapt(model)
    adapted.save_pretrained(tmp_path / "adapter")
    again = bft_hf.load_adapter(load_quantised(tmp_path / "base", 8), tmp_path / "adapter")
    assert_close(run(again), run(adapted))
    assert (run(adapted)[0] - run(adapted.unload())[0]).abs().max() > 1e-3


def test_quantising_a_patched_checkpoint_as_it_loads_is_refused(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    """Load the plain base quantised and patch that, or the patched checkpoint as it is: docs/serving.md."""
    bft_hf.patch(tiny_llama(**SIZES), BFTConfig.unit()).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="BFTCheckpointConfig"):
        load_quantised(tmp_path, 8)
