"""torch.compile on a patched model: one graph, made once, with the values of eager."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_tiny_llama
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import Trainer, TrainingArguments

import bft_hf
from bft_hf import BFTConfig

IDS = torch.randint(3, 128, (2, 11), generator=torch.Generator().manual_seed(51))
MASK = torch.ones_like(IDS)
MASK[0, :4] = 0
BATCH = {"input_ids": IDS, "attention_mask": MASK, "labels": IDS.masked_fill(MASK == 0, -100), "use_cache": False}

CONFIGS = {
    "unit": BFTConfig.unit(),
    "channel, MLP": BFTConfig.unit(granularity="channel", initial_precision="mlp"),
    "exact, neighbours": BFTConfig.unit(effective_sample_size="exact", prior_scale="neighbours"),
    "absolute, key precision, table": BFTConfig.unit(
        observation_units="absolute", separate_key_precision=True, initial_precision="table"
    ),
    "Jacobian differentiated": BFTConfig.unit(differentiate_jacobian=True),
}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def make(config: BFTConfig | None = None, layers: int = 2, **options: Any) -> Any:
    """A patched model with the filter's parameters off their start values."""
    model = bft_hf.patch(make_tiny_llama(num_hidden_layers=layers, **options), config)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in bft_hf.bft_parameters(model).values():
            parameter += 0.5 * torch.randn(parameter.shape, generator=generator)
    return model


def step(run: Any, model: Any, **batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of one training step."""
    model.zero_grad()
    loss = run(**(BATCH | batch)).loss
    loss.backward()
    return loss.detach().clone(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def logits(run: Any, **batch: Any) -> Tensor:
    with torch.no_grad():
        return run(**(BATCH | batch)).logits.clone()


def assert_same_step(ours: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    torch.testing.assert_close(ours[0], expected[0], rtol=1e-5, atol=1e-5)
    for name, gradient in expected[1].items():
        scale = gradient.abs().max().item()
        assert scale > 0, f"{name} is dead"
        torch.testing.assert_close(
            ours[1][name], gradient, rtol=1e-4, atol=1e-5 * scale, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("name", CONFIGS)
def test_one_graph_with_eagers_values(name: str) -> None:
    """fullgraph=True turns every graph break into an error; a second and third step compile nothing."""
    model = make(CONFIGS[name])
    counter = CompileCounterWithBackend(
        "aot_eager" if name == "unit" else "eager"
    )  # the first takes five times as long
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    optimizer = torch.optim.AdamW(bft_hf.param_groups(model, 1e-3))
    model.train()
    seen = []
    for _ in range(3):
        expected = step(model, model)
        assert_same_step(step(compiled, model), expected)
        optimizer.step()
        seen.append(expected[0].item())
    assert counter.frame_count == 1
    assert seen[0] - seen[2] > 1e-3
    model.eval()
    torch.testing.assert_close(logits(compiled), logits(model), rtol=1e-5, atol=1e-5)
    assert counter.frame_count == 2


def test_inductor_computes_what_eager_does() -> None:
    model = make()
    compiled = torch.compile(model, fullgraph=True)
    model.train()
    assert_same_step(step(compiled, model), step(model, model))
    model.eval()
    torch.testing.assert_close(logits(compiled), logits(model), rtol=1e-5, atol=1e-5)
    bft_hf.unpatch(model)
    assert (logits(model) - logits(make())).abs().max() > 1e-2


def test_reliability_and_a_missing_mask_compile() -> None:
    model = make()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter)
    reliability = torch.ones(2, 11)
    reliability[:, 3:5] = 0.5
    with torch.no_grad():
        ours = compiled(input_ids=IDS, use_cache=False, token_reliability=reliability).logits
        expected = model(input_ids=IDS, use_cache=False, token_reliability=reliability).logits
        plain = model(input_ids=IDS, use_cache=False).logits
        torch.testing.assert_close(compiled(input_ids=IDS, use_cache=False).logits, plain, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    assert (expected - plain).abs().max() > 1e-3


@pytest.mark.parametrize("warm", [False, True], ids=["compiled at once", "after an eager evaluation"])
def test_alternating_training_and_evaluation_compiles_twice(warm: bool) -> None:
    """transformers #36484: recompilation in every step. Once for training, once for evaluation, once for kept values."""
    model = make()
    if warm:
        logits(model.eval())
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    optimizer = torch.optim.AdamW(bft_hf.param_groups(model, 1e-3))
    counts = []
    for _ in range(5):
        compiled.train()
        step(compiled, model)
        optimizer.step()
        compiled.eval()
        ours = logits(compiled)
        counts.append(counter.frame_count)
        model.train()  # a change of mode also drops what the filter keeps
        model.eval()
        torch.testing.assert_close(ours, logits(model), rtol=1e-5, atol=1e-5)
        if not warm:
            model.train()
            model.eval()
    assert counts[0] == 2 and counts[-1] <= 3 and counts[-1] == counts[1]


def test_lengths_that_vary_compile_once_more() -> None:
    model = make().train()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for length in (11, 13, 17, 9, 22):
        ids = torch.randint(3, 128, (2, length))
        batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
        loss = compiled(**batch, use_cache=False).loss
        torch.testing.assert_close(loss, model(**batch, use_cache=False).loss, rtol=1e-5, atol=1e-5)
    assert counter.frame_count == 2


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_layers_compiled_one_by_one_compile_once_each(training: bool) -> None:
    """transformers #36484: a graph for every layer, as docs/serving.md tells, and none in a second step."""
    model = make(layers=4).train(training)
    expected = step(model, model) if training else logits(model)
    counter = CompileCounterWithBackend("eager")
    for layer in model.model.layers:
        layer.compile(backend=counter, fullgraph=True)
    for _ in range(2):
        if training:
            assert_same_step(step(model, model), expected)
        else:
            torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5)
    assert counter.frame_count == 4


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.filterwarnings("ignore:.*deprecated")
def test_checkpointing_compiles_without_a_graph_break(use_reentrant: bool) -> None:
    """A precision that is lost between two graphs gives gradients 8 % off and no error: values are compared."""
    model = make().train()
    expected = step(model, model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    counter = CompileCounterWithBackend("eager" if use_reentrant else "aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for _ in range(2):
        assert_same_step(step(compiled, model), expected)
    assert counter.frame_count == 1


def test_trainer_with_torch_compile_follows_eager(tmp_path: Path) -> None:
    def run(**options: Any) -> list[float]:
        model = make()
        rows = [{"input_ids": row, "labels": row} for row in IDS.repeat(3, 1)]
        arguments = TrainingArguments(
            str(tmp_path),
            max_steps=3,
            logging_steps=1,
            per_device_train_batch_size=2,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            **options,
        )
        optimizer = torch.optim.AdamW(bft_hf.param_groups(model, 1e-3))
        trainer = Trainer(model, arguments, train_dataset=rows, optimizers=(optimizer, None))
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    expected = run()
    assert run(torch_compile=True, torch_compile_backend="eager") == pytest.approx(expected, abs=1e-5)
    assert expected[0] - expected[2] > 1e-2


def test_unpatched_after_compiling_is_plain_again() -> None:
    model = make_tiny_llama()
    expected = logits(model)
    bft_hf.patch(model, BFTConfig.unit())
    compiled = torch.compile(model, backend="eager")
    assert (logits(compiled) - expected).abs().max() > 1e-2
    bft_hf.unpatch(model)
    assert torch.equal(logits(compiled), expected)
