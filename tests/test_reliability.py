"""token_reliability: declaring positions unreliable, in one pass, in cached decoding and in generate()."""

from typing import Any

import pytest
import torch
from conftest import make_tiny_llama
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

import bft_hf
from bft_hf import BFTConfig

CONFIGS = {
    "unit": BFTConfig.unit(),
    "exact": BFTConfig.unit(effective_sample_size="exact"),
    "no-kriging": BFTConfig.unit(kriging=False),
    "channel": BFTConfig.unit(granularity="channel"),
    "neighbours": BFTConfig.unit(prior_scale="neighbours", observation_units="absolute"),
}


def prompt() -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids (2, 12) and a reliability that hides four positions of the first row and one of the second."""
    ids = torch.randint(3, 128, (2, 12), generator=torch.Generator().manual_seed(1))
    reliability = torch.ones(2, 12)
    reliability[0, 3:7] = 0
    reliability[1, 5] = 0
    return ids, reliability


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_zero_is_masking_the_key_at_the_same_positions(config: BFTConfig, implementation: str) -> None:
    model = bft_hf.patch(make_tiny_llama(attn_implementation=implementation), config)
    ids, reliability = prompt()
    positions = torch.arange(12)[None].expand(2, 12)
    hidden = model(ids, position_ids=positions, token_reliability=reliability).logits
    masked = model(ids, position_ids=positions, attention_mask=reliability.long()).logits
    seen = reliability.bool()
    assert_close(hidden[seen], masked[seen], rtol=1e-5, atol=1e-5)
    assert (hidden - model(ids, position_ids=positions).logits)[seen].abs().max() > 1e-2


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_one_changes_nothing_and_a_half_something(config: BFTConfig) -> None:
    model = bft_hf.patch(make_tiny_llama(), config)
    ids, _ = prompt()
    plain = model(ids).logits
    assert torch.equal(model(ids, token_reliability=torch.ones(2, 12)).logits, plain)
    half = torch.ones(2, 12)
    half[:, 2] = 0.5
    assert (model(ids, token_reliability=half).logits - plain).abs().max() > 1e-3


def test_a_row_without_anything_reliable_keeps_its_hidden_state_and_precision() -> None:
    model = bft_hf.patch(make_tiny_llama(), BFTConfig.unit())
    ids, _ = prompt()
    with bft_hf.record(model) as trace:
        logits = model(ids, token_reliability=torch.zeros(2, 12)).logits
    assert logits.isfinite().all()
    for gain, before, after in zip(trace.gain, trace.precision, trace.updated_precision, strict=True):
        assert (gain == 0).all()
        assert torch.equal(before, after)


def test_gradients_stay_finite_with_hidden_keys() -> None:
    model = bft_hf.patch(make_tiny_llama(), BFTConfig.unit())
    ids, reliability = prompt()
    reliability[1] = 0
    model(ids, token_reliability=reliability, labels=ids).loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_cached_decoding_equals_one_pass(config: BFTConfig, static: bool) -> None:
    model = bft_hf.patch(make_tiny_llama(), config)
    ids, reliability = prompt()
    whole = model(ids, token_reliability=reliability).logits
    cache = StaticCache(config=model.config, max_cache_len=20) if static else DynamicCache(config=model.config)
    steps = [model(ids[:, :8], past_key_values=cache, token_reliability=reliability[:, :8]).logits]
    for end in range(9, 13):
        ids_of_step = ids[:, end - 1 : end]
        mask = torch.ones(2, end, dtype=torch.long)
        output = model(ids_of_step, attention_mask=mask, past_key_values=cache, token_reliability=reliability[:, :end])
        steps.append(output.logits)
    assert_close(torch.cat(steps, dim=1), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("beams", [1, 3])
def test_generate_hides_the_prompt_tokens_at_every_step(stories260k: Any, beams: int) -> None:
    model = bft_hf.patch(AutoModelForCausalLM.from_pretrained(stories260k), BFTConfig.unit())
    ids = torch.randint(3, 512, (2, 12), generator=torch.Generator().manual_seed(1))
    reliability = torch.ones(2, 12)
    reliability[:, 2:9] = 0
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "num_beams": beams}
    hidden = model.generate(ids, token_reliability=reliability, **options)
    uncached = model.generate(ids, token_reliability=reliability, use_cache=False, **options)
    assert torch.equal(hidden, uncached)
    assert not torch.equal(hidden, model.generate(ids, **options))
    if beams == 1:
        step = ids
        for _ in range(8):
            rho = torch.nn.functional.pad(reliability, (0, step.shape[1] - 12), value=1.0)
            step = torch.cat([step, model(step, token_reliability=rho).logits[:, -1:].argmax(-1)], dim=1)
        assert torch.equal(hidden, step)


def test_wrong_shape_or_range_is_named() -> None:
    model = bft_hf.patch(make_tiny_llama(), BFTConfig.unit())
    ids, reliability = prompt()
    with pytest.raises(ValueError, match=r"shape \(2, 11\).*\(2, 12\)"):
        model(ids, token_reliability=reliability[:, 1:])
    for value in (1.5, -0.1, float("nan")):
        with pytest.raises(ValueError, match=r"outside \[0, 1\]"):
            model(ids, token_reliability=torch.full((2, 12), value))


def test_an_unpatched_model_does_not_take_it() -> None:
    model = bft_hf.unpatch(bft_hf.patch(make_tiny_llama(), BFTConfig.unit()))
    ids, reliability = prompt()
    with pytest.raises(ValueError, match="token_reliability"):
        model.generate(ids, token_reliability=reliability, max_new_tokens=2)
