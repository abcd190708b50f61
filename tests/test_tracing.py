"""record(): what it shows, when it grows, and that it leaves nothing behind."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import make_tiny_llama
from transformers import LlamaForSequenceClassification, LlamaModel

import bft_hf
from bft_hf import BFTConfig, Trace

IDS = torch.randint(3, 128, (2, 9), generator=torch.Generator().manual_seed(41))
TOKENWISE = ("precision", "observation_precision", "gain", "updated_precision", "jacobian")
HEADWISE = ("effective_sample_size", "residual_variance")


def fields(trace: Trace) -> dict[str, list[torch.Tensor]]:
    return {name: getattr(trace, name) for name in TOKENWISE + HEADWISE}


def test_every_field_is_a_list_by_layer_of_detached_tensors(tiny_llama: Callable[..., Any]) -> None:
    model = bft_hf.patch(tiny_llama(), BFTConfig.unit())
    with bft_hf.record(model) as trace:
        output = model(IDS)
    assert output.logits.requires_grad
    assert trace.layers == [0, 1, 2]
    for name, values in fields(trace).items():
        assert len(values) == 3
        for value in values:
            assert value.shape == ((2, 9) if name in TOKENWISE else (2, 4, 9)), name
            assert value.dtype == torch.float32 and not value.requires_grad and value.isfinite().all()
    assert trace.final_precision is trace.updated_precision[-1]


def test_fields_satisfy_the_method(tiny_llama: Callable[..., Any]) -> None:
    model = bft_hf.patch(tiny_llama(), BFTConfig.unit(initial_precision_value=0.5, initial_process_noise=2.0))
    with bft_hf.record(model) as trace:
        model(IDS)
    for layer in range(3):
        lam, observed, gain = (getattr(trace, name)[layer] for name in TOKENWISE[:3])
        torch.testing.assert_close(gain, observed / (lam + observed))
        torch.testing.assert_close(trace.updated_precision[layer], lam + observed)
        n, rss = trace.effective_sample_size[layer], trace.residual_variance[layer]
        torch.testing.assert_close(observed, 1 / (rss / n + 1 / n**2).mean(1))
        if layer < 2:
            predicted = 1 / ((1 + trace.jacobian[layer]) ** 2 / trace.updated_precision[layer] + 2.0)
            torch.testing.assert_close(trace.precision[layer + 1], predicted)
    assert (trace.precision[0] == 0.5).all() and trace.gain[1].std() > 1e-3


def test_recording_changes_no_logit(tiny_llama: Callable[..., Any]) -> None:
    model = bft_hf.patch(tiny_llama(), BFTConfig.unit())
    expected = model(IDS).logits
    with bft_hf.record(model):
        assert torch.equal(model(IDS).logits, expected)


@pytest.mark.parametrize("model_class", [LlamaModel, LlamaForSequenceClassification])
def test_other_heads_record_alike(model_class: type, tiny_llama: Callable[..., Any]) -> None:
    model = bft_hf.patch(tiny_llama(model_class=model_class), BFTConfig.unit())
    with bft_hf.record(model) as trace:
        model(IDS)
    assert len(trace.gain) == 3 and trace.gain[0].shape == (2, 9)


def test_recorded_layers_are_the_patched_ones(tiny_llama: Callable[..., Any]) -> None:
    model = bft_hf.patch(tiny_llama(), BFTConfig.unit(layers=(0, 2)))
    with bft_hf.record(model) as trace:
        model(IDS)
    assert trace.layers == [0, 2] and len(trace.gain) == 2


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_fields_grow_under_generate(cache: str, tiny_llama: Callable[..., Any]) -> None:
    model = bft_hf.patch(tiny_llama(), BFTConfig.unit())
    with bft_hf.record(model) as trace:
        ids = model.generate(IDS, max_new_tokens=5, min_new_tokens=5, do_sample=False, cache_implementation=cache)
    assert ids.shape == (2, 14)
    with bft_hf.record(model) as whole:
        model(ids[:, :-1])  # the last token was never an input
    for name, values in fields(trace).items():
        for value, expected in zip(values, getattr(whole, name), strict=True):
            assert value.shape[-1] == 13
            torch.testing.assert_close(
                value, expected.detach(), rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
            )


def test_left_padding_has_gain_zero_and_keeps_its_precision(tiny_llama: Callable[..., Any]) -> None:
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0
    for implementation in ("sdpa", "eager"):
        model = bft_hf.patch(tiny_llama(attn_implementation=implementation), BFTConfig.unit())
        with bft_hf.record(model) as trace:
            model(IDS, attention_mask=mask)
        for layer in range(3):
            assert (trace.gain[layer][0, :3] == 0).all() and (trace.observation_precision[layer][0, :3] == 0).all()
            assert torch.equal(trace.updated_precision[layer][0, :3], trace.precision[layer][0, :3])
            assert (trace.gain[layer][mask.bool()] > 0).all()


def test_nested_records_each_hold_their_own_passes(tiny_llama: Callable[..., Any]) -> None:
    model = bft_hf.patch(tiny_llama(), BFTConfig.unit())
    with bft_hf.record(model) as outer:
        model(IDS[:, :4])
        with bft_hf.record(model) as inner:
            model(IDS[:, 4:])
        model(IDS[:, :2])
    model(IDS)
    assert inner is not outer
    assert [gain.shape[1] for gain in outer.gain] == [4 + 5 + 2] * 3
    assert [gain.shape[1] for gain in inner.gain] == [5] * 3
    assert torch.equal(outer.gain[1][:, 4:9], inner.gain[1])


def test_equal_nested_records_end_one_at_a_time(tiny_llama: Callable[..., Any]) -> None:
    """Two empty traces compare equal; the inner one's end must not take the outer one away."""
    model = bft_hf.patch(tiny_llama(), BFTConfig.unit())
    with bft_hf.record(model) as outer:
        with bft_hf.record(model) as inner:
            pass
        model(IDS)
    assert len(outer.gain) == 3 and not inner.gain


def test_two_models_record_apart(tiny_llama: Callable[..., Any]) -> None:
    first, second = bft_hf.patch(tiny_llama(), BFTConfig.unit()), bft_hf.patch(tiny_llama(seed=1), BFTConfig.unit())
    with bft_hf.record(first) as trace:
        second(IDS)
        assert not trace.gain
        first(IDS)
    assert [gain.shape for gain in trace.gain] == [(2, 9)] * 3


def test_an_exception_ends_the_recording(tiny_llama: Callable[..., Any]) -> None:
    model = bft_hf.patch(tiny_llama(), BFTConfig.unit())
    with pytest.raises(IndexError), bft_hf.record(model) as trace:
        model(IDS).logits[9]
    before = trace.gain[0]
    model(IDS)
    assert trace.gain[0] is before and before.shape == (2, 9)
    with bft_hf.record(model) as after:
        model(IDS)
    assert after.gain[0].shape == (2, 9)


def test_nothing_is_kept_after_the_block(tiny_llama: Callable[..., Any]) -> None:
    model = bft_hf.patch(tiny_llama(), BFTConfig.unit())
    with bft_hf.record(model) as trace:
        model(IDS)
    gone = weakref.ref(trace)
    del trace
    gc.collect()
    assert gone() is None


def test_without_a_record_no_trace_and_no_stream_is_kept(
    tiny_llama: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = bft_hf.patch(tiny_llama(), BFTConfig.unit())
    streams = []
    start = bft_hf.stream.Stream.__init__

    def watched(self: Any, *args: Any, **kwargs: Any) -> None:
        streams.append(weakref.ref(self))
        start(self, *args, **kwargs)

    monkeypatch.setattr(bft_hf.stream.Stream, "__init__", watched)
    monkeypatch.setattr(Trace, "add", lambda *args: pytest.fail("a pass outside record() was recorded"))
    traces = []
    monkeypatch.setattr(Trace, "__init__", lambda self: traces.append(self))
    with torch.no_grad():
        model(IDS)
    gc.collect()
    assert len(streams) == 1 and streams[0]() is None
    assert not traces


def test_without_a_record_the_last_layers_jacobian_is_not_computed(
    tiny_llama: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = bft_hf.patch(tiny_llama(), BFTConfig.unit())
    calls = []
    mean = bft_hf.filter.gated_jacobian
    monkeypatch.setattr(bft_hf.filter, "gated_jacobian", lambda *args: calls.append(1) or mean(*args))
    model(IDS)
    assert len(calls) == 2
    with bft_hf.record(model):
        model(IDS)
    assert len(calls) == 5


def test_a_plain_model_is_refused_and_names_patch(tiny_llama: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"bft_hf\.patch"), bft_hf.record(tiny_llama()):
        pass
    unpatched = bft_hf.unpatch(bft_hf.patch(tiny_llama(), BFTConfig.unit()))
    with pytest.raises(ValueError, match=r"bft_hf\.patch"), bft_hf.record(unpatched):
        pass


def test_batches_of_two_sizes_in_one_record_are_refused(tiny_llama: Callable[..., Any]) -> None:
    model = bft_hf.patch(tiny_llama(), BFTConfig.unit())
    with bft_hf.record(model):
        model(IDS)
        with pytest.raises(ValueError, match="batch"):
            model(IDS[:1])
    model(IDS[:1])


def test_a_model_copied_while_recording_does_not_write_into_the_originals_trace(tiny_llama: Callable[..., Any]) -> None:
    model = bft_hf.patch(tiny_llama(), BFTConfig.unit())
    with bft_hf.record(model) as trace:
        other = copy.deepcopy(model)
        other(IDS)
        assert not trace.gain
        model(IDS)
    assert trace.gain[0].shape == (2, 9)


def test_bfloat16_model_records_float32() -> None:
    model = bft_hf.patch(make_tiny_llama(dtype=torch.bfloat16), BFTConfig.unit())
    with bft_hf.record(model) as trace:
        model(IDS)
    assert {value.dtype for values in fields(trace).values() for value in values} == {torch.float32}


def test_switches_show_what_they_switch_off(tiny_llama: Callable[..., Any]) -> None:
    model = bft_hf.patch(tiny_llama(), BFTConfig.unit(gain=False))
    with bft_hf.record(model) as trace:
        model(IDS)
    assert all((gain == 1).all() for gain in trace.gain)
    model = bft_hf.patch(bft_hf.unpatch(model), BFTConfig.unit(propagate=False))
    with bft_hf.record(model) as trace:
        model(IDS)
    assert not trace.jacobian
    assert all(torch.equal(trace.precision[i + 1], trace.updated_precision[i]) for i in range(2))
