"""Other engines refuse a patched checkpoint, by the marks it carries; unpatched, it is a plain one for all of them.

Neither vLLM nor SGLang, TGI or llama.cpp runs here. Each test holds a checkpoint to the condition that the engine's source has.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

import bft_hf
from bft_hf import BFTConfig

IDS = torch.arange(3, 12)[None]

QUANTISATION_METHODS = {
    *(
        "aqlm",
        "auto-round",
        "awq",
        "awq_marlin",
        "bitblas",
        "bitnet",
        "bitsandbytes",
        "compressed-tensors",
        "eetq",
        "exl2",
    ),
    *(
        "experts_int8",
        "fbgemm_fp8",
        "fp8",
        "gguf",
        "gptq",
        "gptq_marlin",
        "hqq",
        "ipex",
        "marlin",
        "modelopt",
        "moe_wna16",
    ),
    *("mxfp4", "petit_nvfp4", "ptpc_fp8", "qoq", "quark", "squeezellm", "torchao", "tpu_int8", "w4afp8", "w8a8_fp8"),
}
"""Methods that vLLM, SGLang, TGI or llama.cpp know; of any other they say that it is unknown or not supported."""


@pytest.fixture
def patched(tiny_llama: Callable[..., Any], tmp_path: Path) -> tuple[Any, Path]:
    model = bft_hf.patch(tiny_llama(), BFTConfig.unit(initial_process_noise=0.5))
    model.save_pretrained(tmp_path / "patched")
    return model, tmp_path / "patched"


@pytest.fixture
def exported(patched: tuple[Any, Path], tmp_path: Path) -> Path:
    model, _ = patched
    bft_hf.unpatch(model).save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def unmapped(folder: Path) -> list[str]:
    """Tensors that llama.cpp's converter cannot name, by gguf-py's own table."""
    gguf = pytest.importorskip("gguf", reason="gguf is not installed: pip install 'bft-hf[demo]'")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config_of(folder)["num_hidden_layers"])
    tensors = load_file(folder / "model.safetensors")
    return [name for name in tensors if names.get_name(name, try_suffixes=(".weight", ".bias")) is None]


def test_checkpoint_has_tensor_names_that_llama_cpp_refuses(patched: tuple[Any, Path]) -> None:
    """Its converter: `Can not map tensor`. (Before that, of the quantisation: `Quant method is not yet supported`.)"""
    lost = unmapped(patched[1])
    assert len(lost) == 3 and all(".bft." in name for name in lost)


def test_checkpoint_has_an_activation_that_vllm_and_sglang_refuse(patched: tuple[Any, Path]) -> None:
    """Their LlamaMLP: `if hidden_act != "silu": raise ValueError`, with the name, and so our instruction, in the message."""
    activation = config_of(patched[1])["hidden_act"]
    assert activation != "silu" and "import bft_hf" in activation


def test_checkpoint_has_an_activation_that_transformers_and_tgi_refuse(patched: tuple[Any, Path]) -> None:
    """TGI and every loader that looks ACT2FN up: KeyError. In a fresh process, since this one has imported bft_hf."""
    script = "import sys; from transformers.activations import ACT2FN; ACT2FN[sys.argv[1]]"
    activation = config_of(patched[1])["hidden_act"]
    done = subprocess.run([sys.executable, "-c", script, activation], capture_output=True, text=True)
    assert done.returncode == 1 and "KeyError" in done.stderr and "import bft_hf" in done.stderr


def test_checkpoint_has_a_quantisation_method_that_engines_refuse(patched: tuple[Any, Path]) -> None:
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    method = config_of(patched[1])["quantization_config"]["quant_method"]
    assert method == "bft_hf" and method not in QUANTISATION_METHODS
    assert method in AUTO_QUANTIZER_MAPPING  # by importing bft_hf, and only so: tests/test_hub.py loads without it


def test_adapter_has_modules_to_save_which_vllm_refuses(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    """Its PEFTHelper: `vLLM only supports modules_to_save being None`."""
    lora = LoraConfig(target_modules="all-linear", modules_to_save=["bft"], task_type="CAUSAL_LM")
    get_peft_model(bft_hf.patch(tiny_llama(), BFTConfig.unit()), lora).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["modules_to_save"] == ["bft"]


def test_exported_checkpoint_is_plain_for_all_of_them(exported: Path) -> None:
    config = config_of(exported)
    assert config["hidden_act"] == "silu" and config["architectures"] == ["LlamaForCausalLM"]
    assert not {"quantization_config", "bft_config"} & set(config)
    assert not unmapped(exported)


def test_what_an_export_loses(patched: tuple[Any, Path], tiny_llama: Callable[..., Any]) -> None:
    """The filter: the exported model is the plain one with the same weights, and answers otherwise unless Q was large."""
    model, _ = patched
    with torch.no_grad():
        before = model(IDS).logits
        after = bft_hf.unpatch(model)(IDS).logits
        assert torch.equal(after, tiny_llama()(IDS).logits)
        assert (before - after).abs().max() > 0.1
        near = bft_hf.patch(model, BFTConfig.identity())(IDS).logits
    assert (near - after).abs().max() < 0.01 * (before - after).abs().max()


def test_merged_adapter_is_exported_with_its_weights(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    lora = LoraConfig(
        target_modules="all-linear", modules_to_save=["bft"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    torch.manual_seed(0)
    merged = get_peft_model(bft_hf.patch(tiny_llama(), BFTConfig.unit()), lora).merge_and_unload()
    bft_hf.unpatch(merged).save_pretrained(tmp_path)
    assert not unmapped(tmp_path) and config_of(tmp_path)["hidden_act"] == "silu"
    weight = load_file(tmp_path / "model.safetensors")["model.layers.0.mlp.gate_proj.weight"]
    assert not torch.equal(weight, tiny_llama().state_dict()["model.layers.0.mlp.gate_proj.weight"])
