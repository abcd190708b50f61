"""Decoding modes and caches beyond plain greedy: each gives what passes without a cache give, or is refused by name."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import make_tiny_llama
from test_generation import cache_argument, greedy_by_full_passes, moved, settings, tiny_batch
from torch.testing import assert_close
from transformers import Cache, CompileConfig, DynamicCache, QuantizedCache, StaticCache
from transformers.cache_utils import DynamicSlidingWindowLayer, QuantizedLayer, StaticSlidingWindowLayer

import bft_hf
from bft_hf import BFTConfig


@pytest.fixture
def model() -> Any:
    """A tiny Llama, patched, tau and Q moved off their start values."""
    return moved(bft_hf.patch(make_tiny_llama(), BFTConfig.unit()))


def reliability_of(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """A reliability that hides or doubts other positions in every row of `tiny_batch`."""
    rho = torch.ones(inputs["input_ids"].shape)
    rho[0, 1:4] = 0
    rho[1, 4] = 0.25
    rho[2, 5] = 0
    return rho


def one(row: int, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A row of a left-padded batch by itself, pads taken off."""
    kept = inputs["attention_mask"][row].bool()
    return {name: value[row : row + 1, kept] for name, value in inputs.items()}


def positions_of(mask: torch.Tensor) -> torch.Tensor:
    return (mask.cumsum(-1) - 1).clamp_min(0)


def log_likelihood(model: Any, sequences: torch.Tensor, mask: torch.Tensor, new: int) -> torch.Tensor:
    """Sum of the log-probabilities of the last `new` tokens, by one pass without a cache, as min_new_tokens changes them."""
    mask = torch.cat([mask, torch.ones(mask.shape[0], new, dtype=mask.dtype)], dim=1)
    with torch.no_grad():
        logits = model(
            input_ids=sequences, attention_mask=mask, position_ids=positions_of(mask), use_cache=False
        ).logits
    logs = logits[:, -new - 1 : -1].log_softmax(-1)
    return logs.gather(-1, sequences[:, -new:, None]).squeeze(-1).sum(-1)


# Sampling and beams


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_sampled_sequences_of_one_prompt_are_those_without_a_cache(cache: str, model: Any) -> None:
    """lightning-pose #448: with several prompts, several sequences of each and a batch of one, rows keep apart."""
    fields: dict[str, Any] = {"do_sample": True, "num_return_sequences": 3, "top_k": 20, "top_p": 0.95}
    for inputs in (tiny_batch(), one(1, tiny_batch())):
        samples = []
        for chosen in ({"cache_implementation": cache}, {"use_cache": False}):
            torch.manual_seed(5)
            samples.append(model.generate(**inputs, generation_config=settings(**fields, **chosen)))
        assert torch.equal(*samples)
        assert len({tuple(row.tolist()) for row in samples[0]}) == 3 * len(inputs["input_ids"])


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_beam_scores_are_the_likelihoods_of_one_pass(cache: str, model: Any) -> None:
    """unsloth #923, transformers #46612: a state that beams do not reorder gives plausible tokens and wrong scores."""
    inputs = tiny_batch()
    beams = settings(
        num_beams=4,
        num_return_sequences=2,
        cache_implementation=cache,
        length_penalty=0.0,
        min_new_tokens=None,
        eos_token_id=None,
        return_dict_in_generate=True,
        output_scores=True,
    )
    model.generation_config.eos_token_id = None
    output = model.generate(**inputs, generation_config=beams)
    mask = inputs["attention_mask"].repeat_interleave(2, dim=0)
    assert_close(output.sequences_scores, log_likelihood(model, output.sequences, mask, 16), rtol=1e-4, atol=1e-4)
    parents = output.beam_indices[:, :16] - torch.arange(0, 12, 4).repeat_interleave(2)[:, None]
    assert (parents.diff(dim=1) != 0).any()  # beams did change places


def test_reordered_cache_continues_the_reordered_rows(model: Any) -> None:
    """unsloth #923, transformers #46612: precision, value power and probes follow the rows of the cache."""
    ids = torch.randint(3, 128, (3, 8), generator=torch.Generator().manual_seed(21))
    order = torch.tensor([2, 0, 0])
    with torch.no_grad():
        cache = DynamicCache(config=model.config)
        model(ids[:, :7], **cache_argument(model, cache))
        cache.reorder_cache(order)
        with bft_hf.record(model) as trace:
            continued = model(ids[:, 7:], **cache_argument(model, cache)).logits
        with bft_hf.record(model) as expected:
            whole = model(torch.cat([ids[order, :7], ids[:, 7:]], dim=1)).logits
    assert_close(continued, whole[:, 7:], rtol=1e-5, atol=2e-5)
    for ours, theirs in zip(trace.gain, expected.gain, strict=True):
        assert_close(ours, theirs[:, 7:], rtol=1e-5, atol=1e-5)


def test_beams_of_a_left_padded_batch_are_those_of_its_rows(model: Any) -> None:
    """unsloth #3699, transformers #30378: what stands to the left of a row leaves no trace in its beams."""
    inputs = tiny_batch()
    fields: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 2}
    together = model.generate(**inputs, generation_config=settings(**fields))[:, 7:]
    for row in range(3):
        single = one(row, inputs)
        alone = model.generate(**single, generation_config=settings(**fields))[:, single["input_ids"].shape[1] :]
        assert torch.equal(alone, together[2 * row : 2 * row + 2])


def test_sampled_beams_with_a_cache_are_those_without(model: Any) -> None:
    samples = []
    for use_cache in (True, False):
        torch.manual_seed(3)
        samples.append(
            model.generate(**tiny_batch(), generation_config=settings(num_beams=3, do_sample=True, use_cache=use_cache))
        )
    assert torch.equal(*samples)


def test_classifier_free_guidance_keeps_a_cache_of_its_own(model: Any) -> None:
    guided = [
        model.generate(**one(0, tiny_batch()), generation_config=settings(guidance_scale=1.7, use_cache=use_cache))
        for use_cache in (True, False)
    ]
    assert torch.equal(*guided)
    assert not torch.equal(guided[0], model.generate(**one(0, tiny_batch()), generation_config=settings()))


# Assisted decoding


class Crops:
    """Counts how often, under it, a dynamic cache is rolled back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        crop = DynamicCache.crop

        def counting(cache: Any, length: int) -> None:
            before = cache.get_seq_length()
            crop(cache, length)
            self.count += cache.get_seq_length() < before

        monkeypatch.setattr(DynamicCache, "crop", counting)


HELPERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "plain assistant": lambda model: {"assistant_model": assistant()},
    "patched assistant": lambda model: {"assistant_model": moved(bft_hf.patch(assistant(), BFTConfig.unit()))},
    "the unpatched model": lambda model: {"assistant_model": assistant(seed=0)},
    "prompt lookup": lambda model: {"prompt_lookup_num_tokens": 3},
    "early exit": lambda model: {"assistant_early_exit": 2},
}


def assistant(seed: int = 1) -> Any:
    helper = make_tiny_llama(seed=seed)
    helper.generation_config.num_assistant_tokens = 4
    helper.generation_config.num_assistant_tokens_schedule = "constant"
    return helper


@pytest.mark.parametrize("helper", HELPERS)
def test_rejected_drafts_leave_no_trace(helper: str, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers PR #46937: tokens and scores after a rejected draft are those of passes without a cache."""
    inputs = one(0, tiny_batch())
    inputs["input_ids"] = inputs["input_ids"].repeat(1, 3)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    expected = greedy_by_full_passes(model, inputs, 16)
    crops = Crops(monkeypatch)
    output = model.generate(
        **inputs,
        **HELPERS[helper](model),
        generation_config=settings(return_dict_in_generate=True, output_logits=True),
    )
    sequences = output.sequences[:, : expected.shape[1]]  # transformers 5.12 may go a token beyond the length
    assert torch.equal(sequences, expected)
    assert crops.count > 0
    with torch.no_grad():
        whole = model(expected, use_cache=False).logits[:, 20:-1]
    assert_close(torch.stack(output.logits, dim=1)[:, :16], whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("helper", HELPERS)
def test_token_reliability_holds_in_assisted_decoding(helper: str, model: Any) -> None:
    ids = tiny_batch()["input_ids"][:1].repeat(1, 3)
    rho = torch.ones(1, 21)
    rho[:, 3:12] = 0
    expected = model.generate(ids, token_reliability=rho, generation_config=settings(use_cache=False))
    output = model.generate(ids, token_reliability=rho, **HELPERS[helper](model), generation_config=settings())
    assert torch.equal(output[:, : expected.shape[1]], expected)
    assert not torch.equal(expected, model.generate(ids, generation_config=settings()))


# Caches


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("with_reliability", [False, True])
@pytest.mark.parametrize("chunk", [1, 3])
def test_prefill_in_chunks_changes_no_token(chunk: int, with_reliability: bool, cache: str, model: Any) -> None:
    inputs: dict[str, Any] = tiny_batch()
    if with_reliability:
        inputs["token_reliability"] = reliability_of(inputs)
    expected = model.generate(**inputs, generation_config=settings(use_cache=False))
    chunked = model.generate(**inputs, generation_config=settings(cache_implementation=cache, prefill_chunk_size=chunk))
    assert torch.equal(chunked, expected)


def compile_settings(backend: str) -> dict[str, Any]:
    compile_config = CompileConfig(backend=backend, mode=None, fullgraph=False)
    compile_config._compile_all_devices = True  # transformers compiles by itself on accelerators alone
    return {"cache_implementation": "static", "compile_config": compile_config, "disable_compile": False}


def compiled_graphs(model: Any, backend: str) -> int:
    """Decode with a compiled static cache, compare with passes without a cache, and count the graphs it took."""
    expected = greedy_by_full_passes(model, tiny_batch(), 8)
    torch.compiler.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    compiled = model.generate(
        **tiny_batch(), generation_config=settings(**compile_settings(backend), max_new_tokens=8, min_new_tokens=8)
    )
    torch.compiler.reset()
    assert torch.equal(compiled, expected)
    return counters["stats"]["unique_graphs"]


def test_compiled_decoding_with_a_static_cache_changes_no_token_and_needs_no_more_graphs_than_plain() -> None:
    """transformers #48141, #36484: a static cache under torch.compile, without a recompilation by layer or step."""
    model = make_tiny_llama(num_hidden_layers=2)
    plain = compiled_graphs(model, "eager")
    moved(bft_hf.patch(model, BFTConfig.unit()))
    assert 0 < compiled_graphs(model, "eager") <= plain
    assert 0 < compiled_graphs(model, "aot_eager") <= plain


def test_static_cache_of_an_earlier_generate_is_not_taken_over() -> None:
    """transformers #48141: until 5.12 at least, generate keeps its static cache on the model, with heads of another width."""
    model = make_tiny_llama()
    static = settings(cache_implementation="static", max_new_tokens=4, min_new_tokens=4)
    plain = model.generate(**tiny_batch(), generation_config=static)
    moved(bft_hf.patch(model, BFTConfig.unit()))
    expected = greedy_by_full_passes(model, tiny_batch(), 4)
    assert torch.equal(model.generate(**tiny_batch(), generation_config=static), expected)
    bft_hf.unpatch(model)
    assert torch.equal(model.generate(**tiny_batch(), generation_config=static), plain)


@pytest.mark.parametrize("sample_size", ["probe", "exact"])
def test_static_cache_holds_nothing_over_after_reset(sample_size: str) -> None:
    """transformers #48141: the room beyond the tokens seen so far, and what an earlier text left there, is not evidence."""
    model = moved(bft_hf.patch(make_tiny_llama(), BFTConfig.unit(effective_sample_size=sample_size)))
    cache = StaticCache(config=model.config, max_cache_len=32)
    other = torch.randint(3, 128, (3, 9), generator=torch.Generator().manual_seed(4))
    ids = torch.randint(3, 128, (3, 8), generator=torch.Generator().manual_seed(5))
    with torch.no_grad(), bft_hf.record(model) as expected:
        whole = model(ids).logits
    with torch.no_grad():
        model(other, **cache_argument(model, cache))
        cache.reset()
        with bft_hf.record(model) as trace:
            steps = [
                model(ids[:, start:stop], **cache_argument(model, cache)).logits
                for start, stop in ((0, 4), (4, 7), (7, 8))
            ]
    assert_close(torch.cat(steps, 1), whole, rtol=1e-5, atol=2e-5)
    for name in ("gain", "precision", "effective_sample_size"):
        for ours, theirs in zip(getattr(trace, name), getattr(expected, name), strict=True):
            assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("with_reliability", [False, True])
@pytest.mark.parametrize("layer", [DynamicSlidingWindowLayer, StaticSlidingWindowLayer])
@pytest.mark.parametrize("prefill", [3, 7])
def test_sliding_window_cache_is_a_band_of_the_mask(
    prefill: int, layer: type, with_reliability: bool, model: Any
) -> None:
    """A cache that keeps the last keys hides the others: the same as one pass under a mask that hides them."""
    window, tokens = 5, 12
    ids = torch.randint(3, 128, (2, tokens), generator=torch.Generator().manual_seed(6))
    seen = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    seen[prefill:] &= ~torch.ones(tokens, tokens, dtype=torch.bool).tril(-window)[prefill:]
    rho: dict[str, Any] = {}
    if with_reliability:
        rho["token_reliability"] = torch.ones(2, tokens)
        rho["token_reliability"][0, 1:4] = 0
        rho["token_reliability"][1, 7] = 0
    cache = DynamicCache(config=model.config)
    fields = {"sliding_window": window}
    if layer is StaticSlidingWindowLayer:
        fields["max_cache_len"] = 16
    cache.layers = [layer(**fields) for _ in range(3)]
    with torch.no_grad():
        with bft_hf.record(model) as expected:
            whole = model(ids, attention_mask=seen.expand(2, 1, -1, -1), use_cache=False, **rho).logits
        steps = []
        with bft_hf.record(model) as trace:
            for start, stop in [(0, prefill), *((i, i + 1) for i in range(prefill, tokens))]:
                step_rho = {name: value[:, :stop] for name, value in rho.items()}
                positions = torch.arange(start, stop)[None]
                steps.append(
                    model(ids[:, start:stop], position_ids=positions, **cache_argument(model, cache), **step_rho).logits
                )
    assert_close(torch.cat(steps, 1), whole, rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(trace.gain, expected.gain, strict=True):
        assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cache", ["offloaded", "offloaded_static"])
def test_offloaded_caches_do_what_they_do_for_a_plain_model(cache: str) -> None:
    plain = make_tiny_llama()
    try:
        plain.generate(**tiny_batch(), generation_config=settings(cache_implementation=cache))
    except Exception as error:
        pytest.skip(f"transformers' {cache} cache does not run here: {error}")
    model = moved(bft_hf.patch(plain, BFTConfig.unit()))
    expected = greedy_by_full_passes(model, tiny_batch(), 16)
    assert torch.equal(model.generate(**tiny_batch(), generation_config=settings(cache_implementation=cache)), expected)


def float8_cache(model: Any) -> Any:
    """The quantized cache of transformers that needs no further package; skips where there is none."""
    try:
        return QuantizedCache("fp8", model.config)
    except ValueError as error:
        pytest.skip(f"this transformers has no float8 cache: {error}")


@pytest.mark.parametrize("hidden", [False, True])
def test_float8_cache_is_about_as_near_as_for_a_plain_model(hidden: bool) -> None:
    model = make_tiny_llama()
    plain = distance_with(float8_cache(model), model, {"attention_mask": MASK_OF_HIDDEN.long()} if hidden else {})
    moved(bft_hf.patch(model, BFTConfig.unit()))
    ours = distance_with(float8_cache(model), model, {"token_reliability": MASK_OF_HIDDEN} if hidden else {})
    assert 0 < ours < 2 * plain, (ours, plain)


class IntegerLayer(QuantizedLayer):
    """What quanto and hqq do, in plain torch: groups of 64 numbers in a row share one range of 2^bits steps."""

    def __init__(self, bits: int) -> None:
        super().__init__(residual_length=2)
        self.bits = bits

    def _quantize(self, tensor: torch.Tensor, axis: int) -> Any:
        flat = tensor.flatten()
        groups = torch.nn.functional.pad(flat, (0, -len(flat) % 64)).view(-1, 64)
        low, high = groups.aminmax(dim=1, keepdim=True)
        step = ((high - low) / (2**self.bits - 1)).clamp_min(1e-8)
        return ((groups - low) / step).round() * step + low, tensor.shape

    def _dequantize(self, quantized: Any) -> torch.Tensor:
        groups, shape = quantized
        return groups.flatten()[: shape.numel()].view(shape)


def distance_with(cache: Any, model: Any, hidden: dict[str, torch.Tensor]) -> float:
    """How far decoding with a lossy cache takes the logits from those without a cache, relative to their norm."""
    ids = torch.randint(3, 128, (2, 14), generator=torch.Generator().manual_seed(7))
    positions = torch.arange(14)[None]
    with torch.no_grad():
        whole = model(ids, position_ids=positions, use_cache=False, **hidden).logits[:, 8:]
        steps = [
            model(
                ids[:, start:stop],
                position_ids=positions[:, start:stop],
                **cache_argument(model, cache),
                **{name: value[:, :stop] for name, value in hidden.items()},
            ).logits
            for start, stop in [(0, 8), *((i, i + 1) for i in range(8, 14))]
        ]
    return float((torch.cat(steps[1:], 1) - whole).norm() / whole.norm())


MASK_OF_HIDDEN = torch.ones(2, 14)
MASK_OF_HIDDEN[:, 2:5] = 0


@pytest.mark.parametrize("granularity", ["token", "channel"])
@pytest.mark.parametrize("bits", [4, 8])
def test_integer_quantized_cache_is_about_as_near_as_for_a_plain_model(bits: int, granularity: str) -> None:
    model = make_tiny_llama()
    plain = distance_with(Cache(layers=[IntegerLayer(bits) for _ in range(3)]), model, {})
    moved(bft_hf.patch(model, BFTConfig.unit(granularity=granularity)))
    ours = distance_with(Cache(layers=[IntegerLayer(bits) for _ in range(3)]), model, {})
    assert 0 < ours < 2 * plain, (ours, plain)


@pytest.mark.parametrize("bits", [4, 8])
def test_hidden_keys_in_an_integer_quantized_cache_are_refused_and_its_remedy_works(bits: int) -> None:
    model = make_tiny_llama()
    plain = distance_with(
        Cache(layers=[IntegerLayer(bits) for _ in range(3)]), model, {"attention_mask": MASK_OF_HIDDEN.long()}
    )
    moved(bft_hf.patch(model, BFTConfig.unit()))
    cache = Cache(layers=[IntegerLayer(bits) for _ in range(3)])
    with pytest.raises(ValueError, match=r"quantized cache.*attention_mask"):
        distance_with(cache, model, {"token_reliability": MASK_OF_HIDDEN})
    by_mask = distance_with(
        Cache(layers=[IntegerLayer(bits) for _ in range(3)]), model, {"attention_mask": MASK_OF_HIDDEN.long()}
    )
    assert by_mask < 2 * plain, (by_mask, plain)


def test_quantized_cache_without_its_package_is_refused_by_transformers(model: Any) -> None:
    with pytest.raises(ImportError, match=r"quanto|hqq"):
        model.generate(**tiny_batch(), generation_config=settings(cache_implementation="quantized"))


def test_a_turn_after_a_crop_is_that_of_a_fresh_cache(model: Any) -> None:
    """transformers PR #46937: as a chat does that takes its last answer back, in a batch with padding."""
    inputs = tiny_batch()
    cache = DynamicCache(config=model.config)
    first = model.generate(**inputs, generation_config=settings(), **cache_argument(model, cache))
    cache.crop(10 - cache.get_seq_length())
    question = torch.randint(3, 128, (3, 4), generator=torch.Generator().manual_seed(12))
    turn = {
        "input_ids": torch.cat([first[:, :10], question], dim=1),
        "attention_mask": torch.cat([inputs["attention_mask"], torch.ones(3, 7, dtype=torch.long)], dim=1),
    }
    expected = greedy_by_full_passes(model, turn, 16)
    assert torch.equal(model.generate(**turn, generation_config=settings(), **cache_argument(model, cache)), expected)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_reliability_of_the_first_turn_holds_in_the_second(kind: str, model: Any) -> None:
    inputs = tiny_batch()
    rho = reliability_of(inputs)
    if kind == "dynamic":
        cache = DynamicCache(config=model.config)
    else:
        cache = StaticCache(config=model.config, max_cache_len=60)
    first = model.generate(
        **inputs, token_reliability=rho, generation_config=settings(), **cache_argument(model, cache)
    )
    question = torch.randint(3, 128, (3, 5), generator=torch.Generator().manual_seed(12))
    turn = {
        "input_ids": torch.cat([first, question], dim=1),
        "attention_mask": torch.cat([inputs["attention_mask"], torch.ones(3, 21, dtype=torch.long)], dim=1),
        "token_reliability": torch.cat([rho, torch.ones(3, 21)], dim=1),
    }
    expected = model.generate(**turn, generation_config=settings(use_cache=False))
    assert torch.equal(model.generate(**turn, generation_config=settings(), **cache_argument(model, cache)), expected)


def test_continuous_batching_is_refused_and_its_remedies_work(model: Any) -> None:
    """Its paged cache has heads of the config's width, and its loop runs in a thread that only logs what goes wrong."""
    prompts = [[3, 4, 5], [6, 7]]
    for start in (
        lambda: model.generate_batch(prompts, generation_config=settings()),
        lambda: model.init_continuous_batching(generation_config=settings()),
        lambda: model.continuous_batching_context_manager(generation_config=settings()).__enter__(),
    ):
        with pytest.raises(NotImplementedError, match=r"padded batch, or bft_hf\.unpatch") as error:
            start()
        assert "\n" not in str(error.value)
    assert model.generate(**tiny_batch(), generation_config=settings()).shape == (3, 23)
    bft_hf.unpatch(model)
    assert model.init_continuous_batching.__func__ is type(model).init_continuous_batching


# Inputs


@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize("with_reliability", [False, True])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate_from_embeddings_is_generate_from_ids(
    cache: str, with_reliability: bool, with_mask: bool, model: Any
) -> None:
    inputs: dict[str, Any] = tiny_batch() if with_mask else {"input_ids": tiny_batch()["input_ids"] + 3}
    if not with_mask:
        inputs["input_ids"] = inputs["input_ids"].clamp_max(127)
    hidden = {"token_reliability": reliability_of(inputs)} if with_reliability else {}
    chosen = settings(cache_implementation=cache)
    expected = model.generate(**inputs, **hidden, generation_config=chosen)[:, 7:]
    embeddings = model.get_input_embeddings()(inputs.pop("input_ids")).detach()
    output = model.generate(inputs_embeds=embeddings, **inputs, **hidden, generation_config=chosen)
    assert torch.equal(output, expected)


def test_embeddings_without_ids_are_refused_by_a_table(tiny_llama: Callable[..., Any]) -> None:
    model = bft_hf.patch(tiny_llama(), BFTConfig.unit(initial_precision="table"))
    embeddings = model.get_input_embeddings()(tiny_batch()["input_ids"]).detach()
    with pytest.raises(ValueError, match="pass input_ids"):
        model.generate(inputs_embeds=embeddings, generation_config=settings())


def test_reliability_of_a_batch_is_that_of_its_rows(model: Any) -> None:
    """lightning-pose #448: in a batch of several every row has a reliability of its own."""
    inputs = tiny_batch()
    rho = reliability_of(inputs)
    together = model.generate(**inputs, token_reliability=rho, generation_config=settings())[:, 7:]
    for row in range(3):
        single = one(row, inputs | {"token_reliability": rho})
        alone = model.generate(**single, generation_config=settings())[:, single["input_ids"].shape[1] :]
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("granularity", ["token", "channel"])
def test_one_row_of_positions_serves_a_batch(granularity: str) -> None:
    """lightning-pose #448: position_ids of (1, token) and of (batch, token) are the same, in every row."""
    model = moved(bft_hf.patch(make_tiny_llama(), BFTConfig.unit(granularity=granularity)))
    ids = torch.randint(3, 128, (3, 9), generator=torch.Generator().manual_seed(9))
    positions = torch.arange(4, 13)[None]
    with torch.no_grad():
        shared = model(ids, position_ids=positions).logits
        own = model(ids, position_ids=positions.expand(3, -1)).logits
        rows = [model(ids[row : row + 1], position_ids=positions).logits for row in range(3)]
    assert_close(shared, own, rtol=0, atol=1e-6)
    assert_close(torch.cat(rows), own, rtol=1e-5, atol=1e-5)


def test_generate_still_checks_the_names_it_is_given(model: Any) -> None:
    """transformers PR #27865: a lost signature would let a misspelt argument pass, or refuse upstream's own."""
    with pytest.raises(ValueError, match="token_reliabilty"):
        model.generate(**tiny_batch(), token_reliabilty=torch.ones(3, 7), generation_config=settings())
    plain = make_tiny_llama()
    for name in ("forward", "generate", "prepare_inputs_for_generation"):
        names = set(inspect.signature(getattr(model, name)).parameters)
        assert names >= set(inspect.signature(getattr(plain, name)).parameters), name


def test_modes_that_transformers_moved_to_the_hub_fail_as_for_a_plain_model(model: Any) -> None:
    modes: list[dict[str, Any]] = [
        {"penalty_alpha": 0.6, "top_k": 4},
        {"dola_layers": "low"},
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    ]
    for mode in modes:
        errors = []
        for candidate in (make_tiny_llama(), model):
            with pytest.raises(Exception) as error:
                candidate.generate(**tiny_batch(), generation_config=settings(**mode))
            errors.append((type(error.value), str(error.value)))
        assert errors[0] == errors[1]
