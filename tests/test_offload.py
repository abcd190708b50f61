"""Models that accelerate dispatched, before the patch or while loading a patched checkpoint."""

import copy
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from conftest import make_tiny_llama
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

import bft_hf


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(3, 128, (2, 9), generator=torch.Generator().manual_seed(4))


def test_an_offloaded_model_really_runs_patched_and_unpatches(ids: torch.Tensor) -> None:
    model = make_tiny_llama()
    plain = model(ids).logits
    expected = bft_hf.patch(copy.deepcopy(model), bft_hf.BFTConfig.unit())(ids).logits
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert model.model.layers[0].mlp.down_proj.weight.is_meta
    bft_hf.patch(model, bft_hf.BFTConfig.unit())
    assert_close(model(ids).logits, expected, rtol=0, atol=1e-6)
    assert (expected - plain).abs().max() > 1e-2
    bft_hf.unpatch(model)
    assert torch.equal(model(ids).logits, plain)


def test_hooks_on_whole_layers_call_the_patched_forward(ids: torch.Tensor) -> None:
    model = make_tiny_llama()
    expected = bft_hf.patch(copy.deepcopy(model), bft_hf.BFTConfig.unit())(ids).logits
    for layer in model.model.layers:
        accelerate.hooks.add_hook_to_module(layer, accelerate.hooks.AlignDevicesHook(execution_device="cpu"))
    bft_hf.patch(model, bft_hf.BFTConfig.unit())
    assert_close(model(ids).logits, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dispatch", ["hooks", "offload"])
def test_a_copy_of_a_dispatched_model_runs_itself_and_not_the_original(ids: torch.Tensor, dispatch: str) -> None:
    """accelerate #1835: the hook's wrapped forward of a deep copy went on calling the original's layers."""
    model = make_tiny_llama()
    if dispatch == "hooks":
        for layer in model.model.layers:
            accelerate.hooks.add_hook_to_module(layer, accelerate.hooks.AlignDevicesHook(execution_device="cpu"))
    else:
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    bft_hf.patch(model, bft_hf.BFTConfig.unit())
    expected = model(ids).logits
    twin = copy.deepcopy(model)
    assert torch.equal(twin(ids).logits, expected)
    with torch.no_grad():
        for parameter in bft_hf.bft_parameters(twin).values():
            parameter += 1
    changed = twin(ids).logits
    assert (changed - expected).abs().max() > 1e-2
    assert torch.equal(model(ids).logits, expected)
    ran = []
    for name, one in (("model", model), ("twin", twin)):
        one.model.layers[1].mlp.register_forward_hook(lambda *_, name=name: ran.append(name))
    twin(ids)
    assert ran == ["twin"]


@pytest.mark.parametrize("target", ["cpu", "disk"])
def test_a_patched_checkpoint_loads_offloaded(ids: torch.Tensor, tmp_path: Path, target: str) -> None:
    model = bft_hf.patch(make_tiny_llama(), bft_hf.BFTConfig.unit())
    with torch.no_grad():
        for number, parameter in enumerate(bft_hf.bft_parameters(model).values()):
            parameter += 0.1 * (number + 1)
    model.save_pretrained(tmp_path / "model")
    device_map: dict[str, Any] = {
        "model.embed_tokens": "cpu",
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
        "lm_head": "cpu",
    }
    device_map |= {f"model.layers.{index}": target if index else "cpu" for index in range(3)}
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=device_map, offload_folder=tmp_path / "offload"
    )
    assert_close(loaded(ids).logits, model(ids).logits, rtol=0, atol=1e-6)
