"""The short way of a decoded token against the general path: the same numbers, and not taken where it does not hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import make_tiny_llama
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM

import bft_hf
from bft_hf import BFTConfig, one_token


def make_model(config: BFTConfig | None = None, **changes: Any) -> LlamaForCausalLM:
    model = bft_hf.patch(make_tiny_llama(**changes), config)
    for index, parameter in enumerate(bft_hf.bft_parameters(model).values()):
        parameter.data.add_(0.3 * index - 0.4)
    return model


@torch.no_grad()
def decode(model: LlamaForCausalLM, batch: int = 2, tokens: int = 4) -> tuple[list[Tensor], DynamicCache]:
    """Logits of tokens decoded one by one behind a prompt, and the cache."""
    ids = torch.randint(3, 128, (batch, 12 + tokens), generator=torch.Generator().manual_seed(1))
    cache = DynamicCache(config=model.config)
    model(ids[:, :12], past_key_values=cache)
    return [model(ids[:, [12 + at]], past_key_values=cache).logits for at in range(tokens)], cache


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with every attention that goes the short way."""
    taken: list[int] = []
    update = one_token.OneTokenCall.update

    def counted(self: one_token.OneTokenCall, *args: Tensor, **kwargs: object) -> tuple[Tensor, Tensor]:
        taken.append(self._state.slot)
        return update(self, *args, **kwargs)

    monkeypatch.setattr(one_token.OneTokenCall, "update", counted)
    return taken


@pytest.mark.parametrize(
    ("changes", "tolerance"),
    [
        ({}, 1e-6),
        ({"head_dim": 12}, 1e-6),  # 1 / sqrt(12) is no power of two
        ({"config": BFTConfig.unit(gain_scale=(1.5, 1.2, 1.1))}, 1e-6),
        ({"config": BFTConfig.unit(propagate=False)}, 1e-6),
        ({"config": BFTConfig.unit(layers=(1, 2), initial_precision="mlp")}, 1e-6),
        ({"dtype": torch.bfloat16}, 2e-2),
    ],
    ids=["defaults", "head_dim", "gain_scale", "propagate", "layers", "bfloat16"],
)
def test_same_logits_and_cache_as_the_general_path(
    changes: dict, tolerance: float, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(**changes)
    short, short_cache = decode(model)
    patched_layers = len(changes.get("config", BFTConfig.unit()).layers or range(3))
    assert len(calls) == 4 * patched_layers
    monkeypatch.setattr(one_token, "covers", lambda *_: False)
    general, general_cache = decode(model)
    assert len(calls) == 4 * patched_layers
    torch.testing.assert_close(
        torch.stack(short), torch.stack(general), rtol=0, atol=tolerance * general[0].abs().max().item()
    )
    for a, b in zip(short_cache.layers, general_cache.layers, strict=True):
        torch.testing.assert_close(a.keys, b.keys, rtol=0, atol=tolerance * b.keys.abs().max().item())
        torch.testing.assert_close(a.values, b.values, rtol=0, atol=tolerance * b.values.abs().max().item())


def test_values_without_power_leave_nothing_unexplained(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    model.model.layers[1].self_attn.v_proj.weight.data.zero_()
    short, _ = decode(model)
    assert calls
    monkeypatch.setattr(one_token, "covers", lambda *_: False)
    general, _ = decode(model)
    torch.testing.assert_close(torch.stack(short), torch.stack(general), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "config",
    [
        BFTConfig.unit(granularity="channel"),
        BFTConfig.unit(observation_units="absolute"),
        BFTConfig.unit(prior_scale="neighbours"),
        BFTConfig.unit(prior_degrees_of_freedom=2.0),
        BFTConfig.unit(effective_sample_size="exact"),
        BFTConfig.unit(kriging=False),
        BFTConfig.unit(gain=False),
        BFTConfig.unit(separate_key_precision=True),
    ],
    ids=lambda config: next(f"{k}={v}" for k, v in vars(config).items() if v != getattr(BFTConfig.unit(), k)),
)
def test_other_settings_take_the_general_path(config: BFTConfig, calls: list[int]) -> None:
    decode(make_model(config=config))
    assert not calls


@torch.no_grad()
def test_masks_reliability_and_recordings_take_the_general_path(calls: list[int]) -> None:
    model = make_model()
    ids = torch.randint(3, 128, (2, 6))
    padded = torch.ones(2, 7, dtype=torch.long)
    padded[0, 0] = 0
    reliability = torch.ones(2, 7)
    reliability[1, 2] = 0.5

    def pass_with(**kwargs: Tensor) -> None:
        cache = DynamicCache(config=model.config)
        model(ids, past_key_values=cache)
        model(ids[:, -1:], past_key_values=cache, **kwargs)

    pass_with(attention_mask=padded)
    pass_with(token_reliability=reliability)
    with bft_hf.record(model):
        pass_with()
    with torch.autocast("cpu", torch.bfloat16):
        pass_with()
    with torch.enable_grad():
        pass_with()
    assert not calls
    pass_with()
    assert calls == [0, 1, 2]
