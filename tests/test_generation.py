"""Generation with a cache: the same tokens as without one, for every cache, padding and search."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import lora_config
from peft import get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, GenerationConfig, StaticCache

import bft_hf
from bft_hf import BFTConfig

PROMPTS = ["Once upon a time, there was a little girl", "Tom and his dog went to the big", "One day"]


@pytest.fixture
def stories(stories260k: Path) -> tuple[Any, Any]:
    """stories260K, patched, tau and Q moved off their start values, and its tokenizer, padding on the left."""
    tokenizer = AutoTokenizer.from_pretrained(stories260k, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(stories260k, dtype=torch.float32).eval()
    return moved(bft_hf.patch(model, BFTConfig.unit())), tokenizer


def moved(model: Any) -> Any:
    """Move tau and Q off their start values, each to its own."""
    with torch.no_grad():
        for i, parameter in enumerate(bft_hf.bft_parameters(model).values()):
            parameter += 0.8 - 0.3 * i
    return model


def tiny_batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 128, (3, 7), generator=torch.Generator().manual_seed(8))
    mask = torch.ones_like(ids)
    for row, pads in enumerate((0, 2, 5)):
        ids[row, :pads], mask[row, :pads] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def settings(**fields: Any) -> GenerationConfig:
    return GenerationConfig(
        **({"do_sample": False, "max_new_tokens": 16, "min_new_tokens": 16, "pad_token_id": 0} | fields)
    )


def greedy_by_full_passes(model: Any, inputs: dict[str, torch.Tensor], steps: int) -> torch.Tensor:
    """Greedy decoding without any cache and without `generate`; like min_new_tokens, it never ends early."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    for _ in range(steps):
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        with torch.no_grad():
            logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[:, -1]
        logits[:, model.config.eos_token_id] = -torch.inf
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
    return ids


def cache_argument(model: Any, cache: Any) -> dict[str, Any]:
    """The cache under the name that this version of transformers takes it by."""
    import inspect

    names = inspect.signature(type(model).forward).parameters
    return {"cache" if "cache" in names else "past_key_values": cache}


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_greedy_with_a_cache_equals_greedy_without(cache: str, backend: str, tiny_llama: Callable[..., Any]) -> None:
    model = tiny_llama(attn_implementation=backend)
    inputs = tiny_batch()
    plain = model.generate(**inputs, generation_config=settings())
    moved(bft_hf.patch(model, BFTConfig.unit()))
    expected = greedy_by_full_passes(model, inputs, 16)
    assert torch.equal(model.generate(**inputs, generation_config=settings(cache_implementation=cache)), expected)
    assert torch.equal(model.generate(**inputs, generation_config=settings(use_cache=False)), expected)
    assert not torch.equal(plain, expected)  # the filter had a say in these tokens


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_batch_of_one_and_rows_of_a_padded_batch_agree(cache: str, tiny_llama: Callable[..., Any]) -> None:
    model = moved(bft_hf.patch(tiny_llama(), BFTConfig.unit()))
    inputs = tiny_batch()
    together = model.generate(**inputs, generation_config=settings(cache_implementation=cache))[:, 7:]
    for row, pads in enumerate((0, 2, 5)):
        alone = model.generate(
            inputs["input_ids"][row : row + 1, pads:], generation_config=settings(cache_implementation=cache)
        )
        assert torch.equal(alone[0, 7 - pads :], together[row])
    assert len({tuple(row.tolist()) for row in together}) == 3


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_beams_with_a_cache_equal_beams_without(cache: str, tiny_llama: Callable[..., Any]) -> None:
    model = moved(bft_hf.patch(tiny_llama(), BFTConfig.unit()))
    fields: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 3}
    without = model.generate(**tiny_batch(), generation_config=settings(use_cache=False, **fields))
    cached = model.generate(**tiny_batch(), generation_config=settings(cache_implementation=cache, **fields))
    assert torch.equal(cached, without)
    assert not torch.equal(
        without[::3], model.generate(**tiny_batch(), generation_config=settings())
    )  # beams do search


CONFIGS = {
    "exact": BFTConfig.unit(effective_sample_size="exact"),
    "neighbours": BFTConfig.unit(prior_scale="neighbours"),
    "absolute": BFTConfig.unit(observation_units="absolute"),
    "no kriging": BFTConfig.unit(kriging=False),
    "no gain": BFTConfig.unit(gain=False),
    "some layers": BFTConfig.unit(layers=(0, 2)),
    "channel": BFTConfig.unit(granularity="channel"),
    "table": BFTConfig.unit(initial_precision="table"),
    "mlp": BFTConfig.unit(initial_precision="mlp"),
    "key precision": BFTConfig.unit(separate_key_precision=True),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_setting_decodes_with_a_cache_as_without(name: str, tiny_llama: Callable[..., Any]) -> None:
    model = tiny_llama()
    plain = model.generate(**tiny_batch(), generation_config=settings())
    moved(bft_hf.patch(model, CONFIGS[name]))
    expected = greedy_by_full_passes(model, tiny_batch(), 16)
    for cache in ("dynamic", "static"):
        assert torch.equal(
            model.generate(**tiny_batch(), generation_config=settings(cache_implementation=cache)), expected
        )
    assert not torch.equal(plain, expected)


def test_logits_by_steps_equal_those_of_one_pass(tiny_llama: Callable[..., Any]) -> None:
    model = moved(bft_hf.patch(tiny_llama(), BFTConfig.unit()))
    inputs = tiny_batch()
    positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp_min(0)
    with torch.no_grad():
        whole = model(**inputs, position_ids=positions).logits
        cache = DynamicCache(config=model.config)
        steps = [
            model(
                input_ids=inputs["input_ids"][:, start:stop],
                attention_mask=inputs["attention_mask"][:, :stop],
                position_ids=positions[:, start:stop],
                **cache_argument(model, cache),
            ).logits
            for start, stop in ((0, 3), (3, 4), (4, 7))
        ]
    kept = inputs["attention_mask"].bool()
    torch.testing.assert_close(torch.cat(steps, 1)[kept], whole[kept], rtol=1e-5, atol=2e-5)


def test_cropped_cache_continues_like_a_fresh_one(tiny_llama: Callable[..., Any]) -> None:
    model = moved(bft_hf.patch(tiny_llama(), BFTConfig.unit()))
    ids = tiny_batch()["input_ids"][:1]
    other = torch.randint(3, 128, (1, 4), generator=torch.Generator().manual_seed(11))
    with torch.no_grad():
        cache = DynamicCache(config=model.config)
        model(input_ids=ids, **cache_argument(model, cache))
        cache.crop(-3)
        continued = model(input_ids=other, **cache_argument(model, cache)).logits
        fresh = model(input_ids=torch.cat([ids[:, :4], other], dim=1)).logits[:, 4:]
        uncropped = model(input_ids=torch.cat([ids, other], dim=1)).logits[:, 7:]
    torch.testing.assert_close(continued, fresh, rtol=1e-5, atol=2e-5)
    assert (continued - uncropped).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_second_turn_on_the_same_cache(kind: str, tiny_llama: Callable[..., Any]) -> None:
    model = moved(bft_hf.patch(tiny_llama(), BFTConfig.unit()))
    inputs = tiny_batch()
    if kind == "dynamic":
        cache = DynamicCache(config=model.config)
    else:
        cache = StaticCache(config=model.config, max_cache_len=40)
    first = model.generate(**inputs, generation_config=settings(), **cache_argument(model, cache))
    question = torch.randint(3, 128, (3, 5), generator=torch.Generator().manual_seed(12))
    turn = {
        "input_ids": torch.cat([first, question], dim=1),
        "attention_mask": torch.cat([inputs["attention_mask"], torch.ones(3, 16 + 5, dtype=torch.long)], dim=1),
    }
    expected = greedy_by_full_passes(model, turn, 8)
    eight = settings(max_new_tokens=8, min_new_tokens=8)
    second = model.generate(**turn, generation_config=eight, **cache_argument(model, cache))
    assert torch.equal(second, expected)
    assert torch.equal(model.generate(**turn, generation_config=eight), expected)


def test_prompt_lookup_rolls_the_cache_back_and_changes_no_token(tiny_llama: Callable[..., Any]) -> None:
    model = moved(bft_hf.patch(tiny_llama(), BFTConfig.unit()))
    ids = tiny_batch()["input_ids"][:1].repeat(1, 3)
    expected = greedy_by_full_passes(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, 16)
    ours = model.generate(ids, generation_config=settings(prompt_lookup_num_tokens=3))
    assert torch.equal(ours[:, : expected.shape[1]], expected)  # transformers 5.12 may go a token beyond the length


def test_assisted_decoding_changes_no_token(tiny_llama: Callable[..., Any]) -> None:
    model, assistant = moved(bft_hf.patch(tiny_llama(), BFTConfig.unit())), tiny_llama(seed=1)
    ids = tiny_batch()["input_ids"][:1]
    expected = greedy_by_full_passes(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, 16)
    for helper in (assistant, bft_hf.patch(assistant, BFTConfig.unit())):
        assert torch.equal(model.generate(ids, generation_config=settings(), assistant_model=helper), expected)


def test_chunked_prefill_of_an_adapted_models_static_cache(tiny_llama: Callable[..., Any]) -> None:
    """PEFT wraps the filter's parameters that it trains: the cache is allocated before a key is seen."""
    model = get_peft_model(moved(bft_hf.patch(tiny_llama(), BFTConfig.unit(layers=(0, 2)))), lora_config()).eval()
    options = {"cache_implementation": "static", "prefill_chunk_size": 4, "disable_compile": True}
    expected = model.generate(**tiny_batch(), generation_config=settings(use_cache=False))
    assert torch.equal(model.generate(**tiny_batch(), generation_config=settings(**options)), expected)


def test_sampling_with_a_cache_equals_sampling_without(tiny_llama: Callable[..., Any]) -> None:
    model = moved(bft_hf.patch(tiny_llama(), BFTConfig.unit()))
    samples = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        samples.append(model.generate(**tiny_batch(), generation_config=settings(do_sample=True, use_cache=use_cache)))
    assert torch.equal(*samples)


def test_cache_of_a_plain_model_is_not_confused_with_ours(tiny_llama: Callable[..., Any]) -> None:
    model = tiny_llama()
    inputs = tiny_batch()
    plain = model.generate(**inputs, generation_config=settings())
    bft_hf.patch(model, BFTConfig.unit()).generate(**inputs, generation_config=settings())
    assert torch.equal(bft_hf.unpatch(model).generate(**inputs, generation_config=settings()), plain)


def test_cache_holds_one_widened_key_and_value(tiny_llama: Callable[..., Any]) -> None:
    model = bft_hf.patch(tiny_llama(), BFTConfig.unit())
    with torch.no_grad():
        cache = DynamicCache(config=model.config)
        model(**tiny_batch(), **cache_argument(model, cache))
    for layer in cache.layers:
        assert layer.keys.shape == layer.values.shape == (3, 2, 7, 16)  # 8 channels of the head, 8 of the filter
    assert cache.get_seq_length() == 7


def test_stories260k_greedy_and_beams_on_real_text(stories: tuple[Any, Any]) -> None:
    model, tokenizer = stories
    inputs = dict(tokenizer(PROMPTS, return_tensors="pt", padding=True))
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    assert (inputs["attention_mask"] == 0).any()
    width = inputs["input_ids"].shape[1]
    expected = greedy_by_full_passes(model, inputs, 24)
    fields: dict[str, Any] = {"max_new_tokens": 24, "min_new_tokens": 24}
    for cache in ("dynamic", "static"):
        assert torch.equal(
            model.generate(**inputs, generation_config=settings(cache_implementation=cache, **fields)), expected
        )
    for row, prompt in enumerate(PROMPTS):
        alone = tokenizer(prompt, return_tensors="pt")["input_ids"]
        new = model.generate(alone, generation_config=settings(**fields))[0, alone.shape[1] :]
        assert torch.equal(new, expected[row, width:])
    beams = [
        model.generate(**inputs, generation_config=settings(num_beams=3, use_cache=cached, **fields))
        for cached in (True, False)
    ]
    assert torch.equal(*beams)
    text = tokenizer.batch_decode(expected[:, width:])
    assert len(set(text)) == 3
    bft_hf.unpatch(model)
    assert not torch.equal(greedy_by_full_passes(model, inputs, 24), expected)
