"""The recommenders against their float64 oracle: values, and gradients to every parameter, for all kinds of settings."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from reference import Settings
from reference_rec import reference_recommender
from tiny_recommenders import NUM_ITEMS, all_kinds, batch, make
from torch.testing import assert_close

import bft_hf
from bft_hf import BFTConfig
from bft_hf.filter import probe_signs
from bft_hf.rec import filter_defaults
from bft_hf.sample_size import NUM_PROBES

TIGHT = 1e-9


def settings_of(config: BFTConfig) -> Settings:
    names = {name for name in vars(config) if name in Settings.__dataclass_fields__}
    return Settings(**{name: getattr(config, name) for name in names}, num_probes=NUM_PROBES)


def compare(kind: str, config: BFTConfig | None, padding: str = "left", extra: Any = None, **fields: Any) -> None:
    """Hidden states, all that record() shows and the gradients of a loss, model against oracle."""
    model = make(kind, config, **fields)
    inputs, extra = batch(kind, padding), extra or {}
    kept = inputs["attention_mask"].bool()
    labels = torch.randint(1, NUM_ITEMS + 1, kept.shape, generator=torch.Generator().manual_seed(6))
    labels = labels.masked_fill(~kept, -100)
    if config is None:
        output, trace = model(**inputs, **extra, labels=labels), None
    else:
        with bft_hf.record(model) as trace:
            output = model(**inputs, **extra, labels=labels)
    state = {name: value.detach().clone().requires_grad_() for name, value in model.state_dict().items()}
    oracle_extra = {name.removeprefix("token_"): value for name, value in extra.items()}
    hidden, filtered = reference_recommender(
        state,
        model.config,
        None if config is None else settings_of(config),
        **inputs,
        **oracle_extra,
        signs=probe_signs,
    )
    assert_close(output.last_hidden_state[kept], hidden[kept], rtol=TIGHT, atol=TIGHT)
    if trace is not None:
        for name in ("precision", "observation_precision", "gain", "updated_precision", "jacobian"):
            for ours, theirs in zip(getattr(trace, name), getattr(filtered, name), strict=True):
                assert_close(
                    ours[kept], theirs.detach()[kept], rtol=TIGHT, atol=TIGHT, msg=lambda m, n=name: f"{n}: {m}"
                )
        for name in ("effective_sample_size", "residual_variance"):
            for ours, theirs in zip(getattr(trace, name), getattr(filtered, name), strict=True):
                ours, theirs = ours.transpose(1, 2)[kept], theirs.detach().transpose(1, 2)[kept]
                assert_close(ours, theirs, rtol=TIGHT, atol=TIGHT, msg=lambda m, n=name: f"{n}: {m}")

    scores = hidden[kept] @ state["embed_items.weight"].T
    scores = scores + state["bias"] if kind == "bert4rec" else scores
    loss = torch.nn.functional.cross_entropy(scores[:, 1 : NUM_ITEMS + 1], labels[kept] - 1)
    assert_close(output.loss, loss, rtol=TIGHT, atol=TIGHT)
    output.loss.backward()
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        expected = state[name].grad
        if name == "embed_items.weight":  # torch gives the row of padding none, whoever asks for it
            expected = expected.clone()
            expected[0] = parameter.grad[0]
        # Softmax does not see what is added to all keys of a query.
        assert parameter.grad.abs().max() > 1e-12 or name.endswith("k_proj.bias"), f"{name} is dead"
        scale = expected.abs().max().item()
        tolerance = {"rtol": 1e-8, "atol": 1e-8 * scale + 1e-14}
        assert_close(parameter.grad, expected, **tolerance, msg=lambda m, n=name: f"gradient of {n}: {m}")


def matrix() -> list[BFTConfig]:
    """Granularity x units x prior, each with every other setting at its default and changed alone or in pairs."""
    variants: list[dict[str, Any]] = [
        {"initial_precision": start, "separate_key_precision": separate}
        for start, separate in itertools.product(("constant", "table", "mlp"), (False, True))
    ]
    variants += [{"kriging": False}, {"gain": False}, {"propagate": False}, {"differentiate_jacobian": True}]
    variants += [
        {"separate_key_precision": True, "gain": False},
        {"separate_key_precision": True, "propagate": False},
        {"effective_sample_size": "probe"},
        {"prior_degrees_of_freedom": 3.5},
    ]
    return [
        filter_defaults(granularity=granularity, observation_units=units, prior_scale=prior, **variant)
        for granularity in ("token", "channel")
        for units in ("relative", "absolute")
        for prior in ("unit", "neighbours")
        for variant in variants
    ]


def short_name(config: BFTConfig) -> str:
    default = vars(filter_defaults())
    return "-".join(f"{name}={value}" for name, value in vars(config).items() if value != default[name]) or "default"


@all_kinds
@pytest.mark.parametrize("config", matrix(), ids=short_name)
def test_matrix(kind: str, config: BFTConfig) -> None:
    compare(kind, config)


@all_kinds
@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_plain_models_and_padding(kind: str, padding: str) -> None:
    compare(kind, None, padding)
    compare(kind, filter_defaults(), padding)


@all_kinds
@pytest.mark.parametrize("granularity", ["token", "channel"])
@pytest.mark.parametrize("kriging", [True, False])
def test_token_reliability(kind: str, granularity: str, kriging: bool) -> None:
    reliability = torch.rand(3, 7, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    reliability[:, ::3] = 0
    reliability[0, :4] = 0  # the first queries of a causal row see nothing reliable
    for padding in ("none", "left"):
        config = filter_defaults(granularity=granularity, kriging=kriging)
        compare(kind, config, padding, {"token_reliability": reliability})


@all_kinds
@pytest.mark.parametrize("layers", [(0,), (1, 2), (0, 2)])
def test_some_layers_only(kind: str, layers: tuple[int, ...]) -> None:
    compare(kind, filter_defaults(layers=layers))


@all_kinds
def test_positions_from_the_end(kind: str) -> None:
    for padding in ("none", "left", "right"):
        compare(kind, filter_defaults(), padding, positions="from_end")


def test_gelu_in_sasrec() -> None:
    compare("sasrec", filter_defaults(differentiate_jacobian=True), hidden_act="gelu")


@pytest.mark.parametrize("config", [None, filter_defaults()], ids=["plain", "filter"])
def test_time_bias(config: BFTConfig | None) -> None:
    seconds = torch.randint(1, 10**6, (3, 7), generator=torch.Generator().manual_seed(2)).cumsum(1)
    seconds[:, 3] = seconds[:, 2]
    for padding in ("none", "left", "right"):
        compare("hstu", config, padding, {"timestamps": seconds}, time_buckets=40)
