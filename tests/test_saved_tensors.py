"""What the patch keeps for the backward pass: O(batch x token) beside the extra channels, and no more than is listed here."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from conftest import REPOSITORY, make_tiny_llama

import bft_hf
from bft_hf import BFTConfig

CHANNELS, FFN, HEADS, KV_HEADS, HEAD_DIM, EXTRA = 32, 64, 4, 2, 8, 8

WIDENED = (2 * HEADS + 2 * KV_HEADS) * EXTRA
"""The extra channels of query, key, value and attention output."""

COPIES = HEADS * HEAD_DIM + KV_HEADS * HEAD_DIM + CHANNELS
"""The estimate without its extra channels, the value before it was widened, the attention's output for the gain."""

SMALL = 11 * HEADS + 12
"""Numbers a token, or a token and head, that the filter's own chain of operations keeps."""


COEFFICIENTS = 2 * FFN + 1
"""What is derived from a layer's weights and stays from step to step, whatever the batch; and Q."""

SIGNS = 7 * KV_HEADS / 4
"""The probes' signs, one byte each."""


def load_benchmark(name: str) -> ModuleType:
    """A module of benchmarks/."""
    folder = REPOSITORY / "benchmarks"
    if not folder.is_dir():
        pytest.skip("no benchmarks/ beside tests/, as in the sdist")
    sys.path.insert(0, str(folder))
    try:
        spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(folder))
    return module


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    """benchmarks/saved_tensors.py."""
    return load_benchmark("saved_tensors")


def a_layer_keeps(measure, patched: bool, tokens: int = 32, config: BFTConfig | None = None, **options: bool) -> float:
    """Elements a token of one layer: what a model of three has over one of two."""
    totals = []
    for layers in (2, 3):
        model = make_tiny_llama(num_hidden_layers=layers).train()
        if patched:
            bft_hf.patch(model, config)
        found = measure(model, tokens, **options)
        totals.append(found if isinstance(found, float) else sum(found.values()))
    return totals[1] - totals[0]


def test_saved_tensors_are_those_listed(benchmark: ModuleType) -> None:
    plain = a_layer_keeps(benchmark.saved, patched=False)
    patched = a_layer_keeps(benchmark.saved, patched=True)
    assert plain > 10 * CHANNELS
    # The FFN's activation is computed anew in the backward pass, which pays for most of the rest.
    assert WIDENED + COPIES - FFN < patched - plain <= WIDENED + COPIES - FFN + SMALL


@pytest.mark.parametrize("estimator", ["probe", "exact"])
def test_what_is_kept_grows_with_tokens_not_with_their_square(benchmark: ModuleType, estimator: str) -> None:
    config = BFTConfig.unit(effective_sample_size=estimator)
    short, long = (a_layer_keeps(benchmark.kept, True, tokens, config) for tokens in (32, 128))
    assert long == pytest.approx(short, abs=COEFFICIENTS / 32)


def test_under_checkpointing_a_layer_keeps_its_input_and_a_precision(benchmark: ModuleType) -> None:
    plain = a_layer_keeps(benchmark.kept, patched=False, checkpointing=True)
    patched = a_layer_keeps(benchmark.kept, patched=True, checkpointing=True)
    assert plain == pytest.approx(CHANNELS, abs=1)
    assert patched == pytest.approx(CHANNELS + 1 + SIGNS + COEFFICIENTS / 32, abs=1)


@pytest.mark.parametrize("kind", ["training step", "prefill"])
@pytest.mark.parametrize("estimator", ["probe", "exact"])
def test_peak_memory_grows_with_tokens_not_with_their_square(estimator: str, kind: str) -> None:
    """Also while a layer runs: "exact" forms the scores of a block of rows, and holds one block at a time."""
    overhead = load_benchmark("overhead")
    peaks = []
    for tokens in (256, 1024):
        config = BFTConfig(effective_sample_size=estimator)
        model = bft_hf.patch(make_tiny_llama(num_hidden_layers=2, max_position_embeddings=tokens), config)
        ids = torch.randint(3, 60, (1, tokens), generator=torch.Generator().manual_seed(0))

        def step(model: Any = model, ids: torch.Tensor = ids) -> None:
            with torch.set_grad_enabled(kind == "training step"):
                output = model(ids, labels=ids, use_cache=False)
            if output.loss.requires_grad:
                output.loss.backward()

        peaks.append(overhead.cpu_peak(step))
    assert peaks[1] < 4.5 * peaks[0]
