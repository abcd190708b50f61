"""Attention backends: eager, sdpa, flex and flash-like ones give one answer, and what the model hands out has upstream's form."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference import causal_visibility, reference_llama
from test_generation import cache_argument, greedy_by_full_passes, moved, settings, tiny_batch
from test_oracle import settings_of
from torch.nn.attention import flex_attention as torch_flex
from torch.testing import assert_close
from transformers import (
    DynamicCache,
    LlamaForQuestionAnswering,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    LlamaModel,
    StaticCache,
)
from transformers.integrations import flex_attention as transformers_flex
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import bft_hf
from bft_hf import BFTConfig
from bft_hf.filter import probe_signs

IDS = torch.randint(3, 128, (2, 9), generator=torch.Generator().manual_seed(3))

CONFIGS = {
    "unit": BFTConfig.unit(),
    "exact": BFTConfig.unit(effective_sample_size="exact"),
    "channel": BFTConfig.unit(granularity="channel"),
    "neighbours": BFTConfig.unit(prior_scale="neighbours", observation_units="absolute"),
    "no kriging": BFTConfig.unit(kriging=False),
}
FIELDS = ("precision", "observation_precision", "gain", "updated_precision", "jacobian", "effective_sample_size")


@pytest.fixture
def flex(monkeypatch: pytest.MonkeyPatch) -> None:
    """flex_attention without its compilation (half a minute on a CPU), and with gradients, which it refuses on a CPU.

    Masks and scores are those that the compiled kernel is given; only how the kernel runs is another.
    """
    create = torch_flex.create_block_mask

    def plain_mask(*args: Any, _compile: bool = False, **kwargs: Any) -> Any:
        return create(*args, **kwargs)

    def uncompiled(*args: Any, training: bool = False, **kwargs: Any) -> Any:
        return torch_flex.flex_attention(*args, **kwargs)

    from transformers import masking_utils

    monkeypatch.setattr(masking_utils, "create_block_mask", plain_mask)
    monkeypatch.setattr(transformers_flex, "compile_friendly_flex_attention", uncompiled)
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *args: None)
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def flash_like(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What a flash kernel computes by transformers' interface, in plain torch.

    The mask is (batch, key) or None, causality is aligned to the last key, and packed documents are known by position_ids.
    """
    batch, heads, tokens, _ = query.shape
    keys = key.shape[2]
    if attention_mask is not None and attention_mask.shape[1] < keys:
        keys = attention_mask.shape[1]  # a static cache's room beyond
        key, value = key[:, :, :keys], value[:, :, :keys]
    seen = torch.ones(tokens, keys, dtype=torch.bool).tril(keys - tokens).expand(batch, -1, -1)
    positions = kwargs.get("position_ids")
    if attention_mask is not None:
        assert attention_mask.shape == (batch, keys)
        seen = seen & attention_mask.bool()[:, None]
    elif positions is not None and tokens == keys:
        document = (positions.diff(dim=1, prepend=positions[:, :1] - 1) != 1).cumsum(1)
        seen = seen & (document[:, :, None] == document[:, None])
    key, value = (tensor.repeat_interleave(heads // tensor.shape[1], dim=1) for tensor in (key, value))
    scores = (query @ key.transpose(-1, -2) * scaling).masked_fill(~seen[:, None], -torch.inf)
    weights = torch.where(seen.any(-1)[:, None, :, None], scores, 0).softmax(-1) * seen[:, None]
    return (weights @ value).transpose(1, 2), None


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in above under the name of flash attention, with the masks that transformers makes for that name."""
    assert "flash_attention_2" in ALL_MASK_ATTENTION_FUNCTIONS
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "flash_attention_2", flash_like)


def on(backend: str, model: Any) -> Any:
    """Let a model's config name a backend, without the check that its package is installed."""
    model.config._attn_implementation = backend
    return model


def padded(side: str) -> dict[str, torch.Tensor]:
    if side == "none":
        return {"input_ids": tiny_batch()["input_ids"].clamp_min(3)}
    inputs = tiny_batch()
    return inputs if side == "left" else {name: value.flip(1) for name, value in inputs.items()}


def run(model: Any, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, Any]:
    """Logits and trace of a batch, pads left out of both."""
    with torch.no_grad(), bft_hf.record(model) as trace:
        logits = model(**inputs, use_cache=False).logits
    return logits, trace


def assert_same(ours: Any, theirs: Any, kept: torch.Tensor, tolerance: float = 1e-4) -> None:
    assert_close(ours[0][kept], theirs[0][kept], rtol=tolerance, atol=tolerance)
    for name in FIELDS:
        for a, b in zip(getattr(ours[1], name), getattr(theirs[1], name), strict=True):
            if name == "effective_sample_size":
                a, b = a.transpose(1, 2), b.transpose(1, 2)
            assert_close(
                a[kept], b[kept], rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.parametrize(
    ("name", "side"),
    [("unit", "none"), ("unit", "right"), ("exact", "right"), *((name, "left") for name in CONFIGS)],
)
@pytest.mark.parametrize("backend", ["sdpa", "flex_attention", "flash_attention_2"])
def test_backends_agree_with_eager(
    backend: str, name: str, side: str, flex: None, flash: None, tiny_llama: Callable[..., Any]
) -> None:
    """unsloth #3699, transformers #30378: logits and all that record() shows, with padding on either side."""
    model = moved(bft_hf.patch(tiny_llama(attn_implementation="eager"), CONFIGS[name]))
    inputs = padded(side)
    kept = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    eager = run(model, inputs)
    assert_same(run(on(backend, model), inputs), eager, kept)


@pytest.mark.parametrize("backend", ["eager", "sdpa", "flex_attention", "flash_attention_2"])
@pytest.mark.parametrize("config", [CONFIGS["unit"], CONFIGS["exact"]], ids=["unit", "exact"])
def test_padded_rows_see_nothing_on_every_backend(
    config: BFTConfig, backend: str, flex: None, flash: None, tiny_llama: Callable[..., Any]
) -> None:
    """transformers PR #25284: a row that sees no key is finite, has gain 0 and keeps its precision; gradients too."""
    model = on(backend, moved(bft_hf.patch(tiny_llama(attention_bias=True), config)))
    inputs = tiny_batch()
    pads = inputs["attention_mask"] == 0
    with bft_hf.record(model) as trace:
        output = model(**inputs, labels=inputs["input_ids"].masked_fill(pads, -100), use_cache=False)
    assert output.logits.isfinite().all()
    for gain, before, after in zip(trace.gain, trace.precision, trace.updated_precision, strict=True):
        assert (gain[pads] == 0).all() and torch.equal(before[pads], after[pads])
    output.logits.square().mean().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)


@pytest.mark.parametrize("backend", ["sdpa", "flex_attention", "flash_attention_2"])
@pytest.mark.parametrize("sample_size", ["probe", "exact"])
def test_gradients_agree_with_eager(
    sample_size: str, backend: str, flex: None, flash: None, tiny_llama: Callable[..., Any]
) -> None:
    gradients = []
    for name in ("eager", backend):
        model = tiny_llama(attn_implementation="eager")
        on(name, moved(bft_hf.patch(model, BFTConfig.unit(effective_sample_size=sample_size))))
        inputs = tiny_batch()
        labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
        model(**inputs, labels=labels, use_cache=False).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, expected in gradients[0].items():
        scale = expected.abs().max().item()
        assert_close(
            gradients[1][name], expected, rtol=1e-3, atol=1e-4 * scale, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("backend", ["sdpa", "flex_attention", "flash_attention_2"])
@pytest.mark.parametrize("sample_size", ["probe", "exact"])
def test_token_reliability_agrees_with_eager(
    sample_size: str, backend: str, flex: None, flash: None, tiny_llama: Callable[..., Any]
) -> None:
    model = tiny_llama(attn_implementation="eager")
    moved(bft_hf.patch(model, BFTConfig.unit(effective_sample_size=sample_size)))
    inputs = tiny_batch()
    kept = inputs["attention_mask"].bool()
    rho = torch.ones(3, 7)
    rho[0, 0] = rho[1, 3] = rho[2, 6] = 0  # the first row's first token then sees nothing reliable
    rho[0, 4] = 0.5
    inputs["token_reliability"] = rho
    eager = run(model, inputs)
    assert (eager[1].gain[0][0, 0] == 0).all()
    assert_same(run(on(backend, model), inputs), eager, kept)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("sample_size", ["probe", "exact"])
@pytest.mark.parametrize("backend", ["eager", "sdpa", "flex_attention", "flash_attention_2"])
def test_chunks_and_steps_on_a_cache_agree_with_one_pass(
    backend: str, sample_size: str, cache: str, flex: None, flash: None, tiny_llama: Callable[..., Any]
) -> None:
    if backend == "flash_attention_2" and cache == "static":
        pytest.skip("transformers refuses a static cache with flash attention")
    if backend == "flex_attention" and cache == "static":
        pytest.skip(
            "a plain model disagrees with itself there: its mask reads a length that the cache has changed by then"
        )
    model = tiny_llama(attn_implementation="eager")
    moved(bft_hf.patch(model, BFTConfig.unit(effective_sample_size=sample_size)))
    inputs = tiny_batch()
    kept = inputs["attention_mask"].bool()
    positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp_min(0)
    whole = run(model, inputs | {"position_ids": positions})
    on(backend, model)
    if cache == "static":
        past: Any = StaticCache(config=model.config, max_cache_len=12)
    else:
        past = DynamicCache(config=model.config)
    with torch.no_grad(), bft_hf.record(model) as trace:
        steps = [
            model(
                inputs["input_ids"][:, start:stop],
                attention_mask=inputs["attention_mask"][:, :stop],
                position_ids=positions[:, start:stop],
                **cache_argument(model, past),
            ).logits
            for start, stop in ((0, 3), (3, 5), (5, 6), (6, 7))
        ]
    assert_same((torch.cat(steps, 1), trace), whole, kept)


@pytest.mark.parametrize("backend", ["flex_attention", "flash_attention_2"])
def test_left_padded_generation_agrees_with_passes_without_a_cache(
    backend: str, flex: None, flash: None, tiny_llama: Callable[..., Any]
) -> None:
    """unsloth #3699, transformers #30378."""
    model = moved(bft_hf.patch(tiny_llama(attn_implementation="eager"), BFTConfig.unit()))
    expected = greedy_by_full_passes(model, tiny_batch(), 8)
    eight = settings(max_new_tokens=8, min_new_tokens=8)
    assert torch.equal(on(backend, model).generate(**tiny_batch(), generation_config=eight), expected)


def test_masks_of_ones_none_and_four_dimensions_agree(tiny_llama: Callable[..., Any]) -> None:
    """The same visibility given as None, as ones, as a boolean and as an additive mask, for both backends."""
    tokens = IDS.shape[1]
    seen = torch.ones(tokens, tokens, dtype=torch.bool).tril().expand(2, 1, -1, -1)
    masks = {
        "ones": torch.ones_like(IDS),
        "bool": seen,
        "lowest": torch.zeros(2, 1, tokens, tokens).masked_fill(~seen, torch.finfo(torch.float32).min),
        "infinite": torch.zeros(2, 1, tokens, tokens).masked_fill(~seen, -torch.inf),
    }
    for sample_size in ("probe", "exact"):
        model = moved(bft_hf.patch(tiny_llama(), BFTConfig.unit(effective_sample_size=sample_size)))
        expected = run(model, {"input_ids": IDS})
        everything = torch.ones_like(IDS).bool()
        for backend in ("sdpa", "eager"):
            for name, mask in masks.items():
                if (backend, name) == ("eager", "bool"):
                    continue  # transformers adds masks to eager scores: True would count as 1
                assert_same(run(on(backend, model), {"input_ids": IDS, "attention_mask": mask}), expected, everything)


@pytest.mark.parametrize("sample_size", ["probe", "exact"])
def test_without_causality_every_query_sees_every_key(sample_size: str, tiny_llama: Callable[..., Any]) -> None:
    """transformers' is_causal=False, by the call or by the configuration: no mask means that nothing is hidden."""
    model = moved(bft_hf.patch(tiny_llama(), BFTConfig.unit(effective_sample_size=sample_size)))
    everything = torch.ones(2, 1, IDS.shape[1], IDS.shape[1], dtype=torch.bool)
    real = torch.ones_like(IDS).bool()
    reliability = torch.ones(IDS.shape)
    reliability[:, 2:5] = 0
    for options in ({}, {"token_reliability": reliability}):
        expected = run(model, {"input_ids": IDS, "attention_mask": everything, **options})
        asked = run(model, {"input_ids": IDS, "is_causal": False, **options})
        assert_same(asked, expected, real)
    model.config.is_causal = False
    padded = torch.ones_like(IDS)
    padded[0, :3] = 0
    expected = run(model, {"input_ids": IDS, "attention_mask": everything & padded[:, None, None].bool()})
    assert_same(run(model, {"input_ids": IDS, "attention_mask": padded}), expected, padded.bool())


def test_flash_kernels_that_are_absent_are_refused_and_the_backend_stays(tiny_llama: Callable[..., Any]) -> None:
    model = bft_hf.patch(tiny_llama(), BFTConfig.unit())
    with torch.no_grad():
        before = model(IDS).logits
        with pytest.raises(ImportError, match=r"[Ff]lash"):
            model.set_attn_implementation("flash_attention_2")
        assert torch.equal(model(IDS).logits, before)


def test_unknown_backend_is_refused(tiny_llama: Callable[..., Any]) -> None:
    model = bft_hf.patch(tiny_llama(), BFTConfig.unit())
    with pytest.raises(ValueError, match="attn_implementation"):
        model.set_attn_implementation("no_such_backend")


def test_a_backend_registered_by_the_user_is_called(
    tiny_llama: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama import modeling_llama

    calls = []

    def mine(*args: Any, **kwargs: Any) -> Any:
        calls.append(args[1].shape)
        return modeling_llama.eager_attention_forward(*args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "mine", mine)
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "mine", ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    model = moved(bft_hf.patch(tiny_llama(attn_implementation="eager"), BFTConfig.unit()))
    expected = run(model, {"input_ids": IDS})
    model.set_attn_implementation("mine")
    with torch.no_grad():
        logits = model(IDS).logits
    assert calls == [(2, 4, 9, 16)] * 3
    assert_close(logits, expected[0])


# What the model hands out


@pytest.mark.parametrize("config", [*CONFIGS.values(), BFTConfig.unit(layers=(1,))], ids=[*CONFIGS, "one layer"])
def test_attentions_are_the_oracles_kriging_weights(config: BFTConfig, tiny_llama: Callable[..., Any]) -> None:
    model = moved(bft_hf.patch(tiny_llama(attn_implementation="eager"), config))
    mask = torch.ones_like(IDS)
    mask[1, 6:] = 0  # on the right: every row sees something
    with torch.no_grad():
        attentions = model(IDS, attention_mask=mask, output_attentions=True, use_cache=False).attentions
    state = {name: value.double() for name, value in model.state_dict().items()}
    reference = reference_llama(
        state, model.config, settings_of(config), input_ids=IDS, attention_mask=mask, signs=probe_signs
    )
    kept = causal_visibility(9, mask)[:, None].expand(-1, 4, -1, -1)
    assert len(attentions) == 3
    for ours, theirs in zip(attentions, reference.weights, strict=True):
        assert ours.shape == (2, 4, 9, 9)
        assert_close(ours.sum(-1), torch.ones(2, 4, 9))
        assert (ours[~kept] == 0).all()
        if theirs is not None:
            assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("return_dict", [False, True])
@pytest.mark.parametrize(
    "model_class",
    [LlamaModel, None, LlamaForSequenceClassification, LlamaForTokenClassification, LlamaForQuestionAnswering],
)
def test_outputs_have_the_plain_models_lengths_and_widths(
    model_class: type | None, return_dict: bool, cached: bool, tiny_llama: Callable[..., Any]
) -> None:
    """Everything at once: attentions, hidden states, cache and loss, as a tuple and as an object."""
    kind: dict[str, Any] = {} if model_class is None else {"model_class": model_class}
    model = tiny_llama(attn_implementation="eager", **kind)
    call: dict[str, Any] = {
        "output_attentions": True,
        "output_hidden_states": True,
        "return_dict": return_dict,
        "use_cache": cached,
    }
    if "labels" in inspect.signature(model.forward).parameters:
        call["labels"] = torch.zeros(2, dtype=torch.long) if "Sequence" in type(model).__name__ else IDS % 2
    shapes = []
    for patch in (False, True):
        if patch:
            moved(bft_hf.patch(model, BFTConfig.unit()))
        with torch.no_grad():
            output = model(IDS, attention_mask=torch.ones_like(IDS), **call)
        shapes.append(outline(output))
    assert shapes[0] == shapes[1]
    assert isinstance(output, tuple) is not return_dict


def outline(value: Any) -> Any:
    """Types, names, lengths and shapes of an output, without its numbers; of a cache, only how long it is."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if hasattr(value, "get_seq_length"):
        return type(value), value.get_seq_length(), len(value.layers)
    if isinstance(value, dict):
        return type(value), [(name, outline(item)) for name, item in value.items()]
    if isinstance(value, tuple | list):
        return type(value), [outline(item) for item in value]
    return type(value)


def test_last_hidden_state_is_the_last_of_the_hidden_states(tiny_llama: Callable[..., Any]) -> None:
    model = moved(bft_hf.patch(tiny_llama(model_class=LlamaModel), BFTConfig.unit()))
    with torch.no_grad():
        output = model(IDS, output_hidden_states=True)
        assert torch.equal(output.hidden_states[-1], output.last_hidden_state)
        assert torch.equal(output.hidden_states[0], model.get_input_embeddings()(IDS))
        state = {name: value.double() for name, value in model.state_dict().items()}
    state = {f"model.{name}": value for name, value in state.items()}
    reference = reference_llama(state, model.config, settings_of(BFTConfig.unit()), input_ids=IDS, signs=probe_signs)
    for ours, theirs in zip(output.hidden_states, reference.hidden_states, strict=True):
        assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4)


def test_outputs_of_generate_have_the_plain_models_shapes(tiny_llama: Callable[..., Any]) -> None:
    model = tiny_llama(attn_implementation="eager")
    asked = settings(
        max_new_tokens=4,
        min_new_tokens=4,
        return_dict_in_generate=True,
        output_attentions=True,
        output_hidden_states=True,
        output_scores=True,
        output_logits=True,
    )
    plain = outline(model.generate(**tiny_batch(), generation_config=asked))
    moved(bft_hf.patch(model, BFTConfig.unit()))
    assert outline(model.generate(**tiny_batch(), generation_config=asked)) == plain
