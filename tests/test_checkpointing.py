"""Gradient checkpointing: the same gradients, by value, for every parameter, or a refusal that names the remedy."""

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.checkpoint import checkpoint

import bft_hf
from bft_hf import BFTConfig

IDS = torch.randint(3, 128, (2, 11), generator=torch.Generator().manual_seed(21))
MASK = torch.ones_like(IDS)
MASK[0, :4] = 0
LABELS = IDS.masked_fill(MASK == 0, -100)

CONFIGS = {
    "unit": BFTConfig.unit(),
    "exact": BFTConfig.unit(effective_sample_size="exact"),
    "neighbours": BFTConfig.unit(prior_scale="neighbours"),
    "differentiated": BFTConfig.unit(differentiate_jacobian=True),
    "no propagation": BFTConfig.unit(propagate=False),
    "some layers": BFTConfig.unit(layers=(0, 2)),
    "later layers": BFTConfig.unit(layers=(1, 2)),
    "channel": BFTConfig.unit(granularity="channel"),
    "table": BFTConfig.unit(initial_precision="table"),
    "mlp": BFTConfig.unit(initial_precision="mlp"),
    "key precision": BFTConfig.unit(separate_key_precision=True),
}


@pytest.fixture(autouse=True)
def _no_reentrant_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*use_reentrant.*")
        yield


def moved(model: Any) -> Any:
    """Move the filter's parameters off their start values."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in bft_hf.bft_parameters(model).values():
            parameter += 0.5 * torch.randn(parameter.shape, generator=generator)
    return model


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """Gradients of the loss on a left-padded batch, by name."""
    model.train()
    model.zero_grad()
    model(input_ids=IDS, attention_mask=MASK, labels=LABELS, use_cache=False).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = gradient.abs().max().item()
        assert scale > 0, f"{name} is dead"
        torch.testing.assert_close(
            ours[name], gradient, rtol=1e-6, atol=1e-6 * scale, msg=lambda m, n=name: f"{n}: {m}"
        )


class Runs:
    """Counts how often a layer's attention runs, to see that checkpointing really recomputes."""

    def __init__(self, model: Any) -> None:
        self.count = 0
        for layer in bft_hf.architectures.find_base_model(model)[0].layers:
            layer.self_attn.register_forward_pre_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.count += 1


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_equal_those_without_checkpointing(
    name: str, use_reentrant: bool, tiny_llama: Callable[..., Any]
) -> None:
    model = moved(bft_hf.patch(tiny_llama(), CONFIGS[name]))
    expected = gradients(model)
    assert expected.keys() == dict(model.named_parameters()).keys()
    runs = Runs(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    ours = gradients(model)
    assert runs.count == 6  # three layers, each run twice
    assert_same(ours, expected)
    model.gradient_checkpointing_disable()
    runs.count = 0
    assert_same(gradients(model), expected)
    assert runs.count == 3


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_enabled_before_patch_also_works(use_reentrant: bool, tiny_llama: Callable[..., Any]) -> None:
    expected = gradients(bft_hf.patch(tiny_llama(), BFTConfig.unit()))
    model = tiny_llama()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    plain = gradients(model)
    bft_hf.patch(model, BFTConfig.unit())
    runs = Runs(model)
    assert_same(gradients(model), expected)
    assert runs.count == 6
    # And unpatched again it is the plain, checkpointed model.
    bft_hf.unpatch(model)
    runs.count = 0
    again = gradients(model)
    assert runs.count == 6
    assert again.keys() == plain.keys() and all(torch.equal(again[name], plain[name]) for name in plain)


def test_the_comparison_would_see_a_lost_precision_gradient(tiny_llama: Callable[..., Any]) -> None:
    model = moved(bft_hf.patch(tiny_llama(), BFTConfig.unit()))
    expected = gradients(model)
    write = bft_hf.stream.Stream.write
    with pytest.MonkeyPatch.context() as patcher:
        patcher.setattr(
            bft_hf.stream.Stream,
            "write",
            lambda self, slot, precisions: write(self, slot, tuple(p.detach() for p in precisions)),
        )
        detached = gradients(model)
    with pytest.raises(AssertionError):
        assert_same(detached, expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_dropout_is_replayed(use_reentrant: bool, tiny_llama: Callable[..., Any]) -> None:
    model = moved(bft_hf.patch(tiny_llama(attention_dropout=0.3), BFTConfig.unit()))
    torch.manual_seed(0)
    expected = gradients(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    torch.manual_seed(0)
    assert_same(gradients(model), expected)
    torch.manual_seed(1)
    assert any((gradients(model)[name] - expected[name]).abs().max() > 1e-3 for name in expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_frozen_base_with_lora(use_reentrant: bool, tiny_llama: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    model = moved(bft_hf.patch(tiny_llama(), BFTConfig.unit()))
    model = get_peft_model(
        model,
        LoraConfig(
            r=2, target_modules="all-linear", init_lora_weights=False, modules_to_save=["bft"], task_type="CAUSAL_LM"
        ),
    )
    model.enable_input_require_grads()
    expected = gradients(model)
    assert expected.keys() == {name for name, p in model.named_parameters() if p.requires_grad}
    assert sum(".bft." in name for name in expected) == 3 and all("lora" in n or ".bft." in n for n in expected)
    runs = Runs(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    assert_same(gradients(model), expected)
    assert runs.count == 6


def outside_checkpoint(model: Any, use_reentrant: bool) -> None:
    """Wrap each layer's forward as FSDP's, DeepSpeed's and home-made checkpointing do, around a layer that is patched."""
    for layer in model.model.layers:

        def forward(hidden_states: torch.Tensor, *args: Any, _run: Any = layer.forward, **kwargs: Any) -> torch.Tensor:
            return checkpoint(functools.partial(_run, **kwargs), hidden_states, *args, use_reentrant=use_reentrant)

        layer.forward = forward


def test_foreign_reentrant_checkpointing_is_refused_and_names_the_remedy(tiny_llama: Callable[..., Any]) -> None:
    model = moved(bft_hf.patch(tiny_llama(), BFTConfig.unit()))
    outside_checkpoint(model, use_reentrant=True)
    with pytest.raises(RuntimeError, match="use_reentrant=False") as error:
        gradients(model)
    assert "\n" not in str(error.value)


def test_foreign_checkpointing_without_reentrance_gives_the_same_gradients(tiny_llama: Callable[..., Any]) -> None:
    model = moved(bft_hf.patch(tiny_llama(), BFTConfig.unit()))
    expected = gradients(model)
    runs = Runs(model)
    outside_checkpoint(model, use_reentrant=False)
    assert_same(gradients(model), expected)
    assert runs.count == 6


def test_evaluation_under_no_grad_is_not_refused(tiny_llama: Callable[..., Any]) -> None:
    model = bft_hf.patch(tiny_llama(), BFTConfig.unit())
    with torch.no_grad():
        expected = model(IDS).logits
    outside_checkpoint(model, use_reentrant=True)
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, expected)


@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_recomputation_is_not_recorded(use_reentrant: bool | None, tiny_llama: Callable[..., Any]) -> None:
    model = moved(bft_hf.patch(tiny_llama(), BFTConfig.unit())).train()
    with bft_hf.record(model) as once, torch.no_grad():
        model(IDS, attention_mask=MASK)
    if use_reentrant is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    with bft_hf.record(model) as trace:
        loss = model(IDS, attention_mask=MASK, labels=LABELS).loss
        loss.backward()
    for name in (
        "precision",
        "gain",
        "jacobian",
        "effective_sample_size",
        "residual_variance",
        "observation_precision",
    ):
        assert len(getattr(trace, name)) == 3
        for ours, expected in zip(getattr(trace, name), getattr(once, name), strict=True):
            assert not ours.requires_grad
            torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_generation_works_while_checkpointing_is_enabled(use_reentrant: bool, tiny_llama: Callable[..., Any]) -> None:
    model = moved(bft_hf.patch(tiny_llama(), BFTConfig.unit()))
    expected = model.generate(IDS, max_new_tokens=5, do_sample=False)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    assert torch.equal(model.generate(IDS, max_new_tokens=5, do_sample=False), expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_two_passes_before_one_backward(use_reentrant: bool, tiny_llama: Callable[..., Any]) -> None:
    """A reward model or a contrastive loss runs the model twice: each pass recomputes from its own precisions."""
    model = moved(bft_hf.patch(tiny_llama(), BFTConfig.unit())).train()

    def run() -> dict[str, torch.Tensor]:
        model.zero_grad()
        first = model(IDS, attention_mask=MASK, labels=LABELS).loss
        second = model(IDS.flip(0), attention_mask=MASK.flip(0), labels=LABELS.flip(1).clamp_min(3)).loss
        (first - 0.5 * second).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    expected = run()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    assert_same(run(), expected)


def test_without_checkpointing_a_layer_has_no_checkpointing_function_as_a_plain_one(
    tiny_llama: Callable[..., Any],
) -> None:
    layer = bft_hf.patch(tiny_llama(), BFTConfig.unit()).model.layers[0]
    assert not hasattr(layer, "_gradient_checkpointing_func")
    model = bft_hf.patch(tiny_llama(), BFTConfig.unit())
    model.gradient_checkpointing_enable()
    assert callable(model.model.layers[0]._gradient_checkpointing_func)
