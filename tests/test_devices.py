"""Layers on several devices, as device_map spreads a large model: nothing of one device meets something of another.

No machine here has two devices, so tensors are torch's fake ones, which know where they are and refuse to mix but hold no numbers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from conftest import make_tiny_llama
from packaging import version
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import DynamicCache, StaticCache

import bft_hf
from bft_hf import BFTConfig, stream

FIRST, SECOND = torch.device("cpu"), torch.device("cpu:1")
IDS = (2, 5)


def spread(model: Any, mode: FakeTensorMode) -> Any:
    """The model with its last two layers on another device, and accelerate's hooks, which move what a layer is given."""
    for name, module in model.named_modules():
        device = SECOND if name.startswith(("model.layers.1", "model.layers.2")) else FIRST
        with mode:
            for key, tensor in module._parameters.items():
                if tensor is not None:
                    new = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
                    module._parameters[key] = nn.Parameter(new, tensor.requires_grad)
            for key, tensor in module._buffers.items():
                module._buffers[key] = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    with mode:
        for index, layer in enumerate(model.model.layers):
            add_hook_to_module(layer, AlignDevicesHook(execution_device=SECOND if index else FIRST))
        add_hook_to_module(model.model.norm, AlignDevicesHook(execution_device=FIRST))
    return model


CONFIGS = {
    "plain": None,
    "unit": BFTConfig.unit(),
    "channel, table, exact, absolute": BFTConfig.unit(
        granularity="channel",
        initial_precision="table",
        effective_sample_size="exact",
        observation_units="absolute",
    ),
    "neighbours, key precision, MLP": BFTConfig.unit(
        prior_scale="neighbours", separate_key_precision=True, initial_precision="mlp"
    ),
    "layers": BFTConfig.unit(layers=(1, 2)),
}


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("name", CONFIGS)
def test_a_pass_over_two_devices_mixes_none_of_their_tensors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mode = FakeTensorMode()
    model = make_tiny_llama()
    if CONFIGS[name] is not None:
        bft_hf.patch(model, CONFIGS[name])
    spread(model, mode)
    make = torch.tensor  # whose fake leaves the device's index away

    def tensor(*args: Any, device: torch.device | None = None, **kwargs: Any) -> torch.Tensor:
        made = make(*args, **kwargs)
        return made if device is None else torch.empty(made.shape, dtype=made.dtype, device=device)

    monkeypatch.setattr(torch, "tensor", tensor)
    monkeypatch.setattr(stream, "check_reliability", lambda *_: None)  # reads numbers, and there are none
    with mode, torch.no_grad():
        ids = torch.ones(IDS, dtype=torch.long)
        caches: list[Any] = [DynamicCache(config=model.config)]
        if version.parse(transformers.__version__) >= version.parse(
            "5.24"
        ):  # before, a fake static cache mixes by itself
            caches.append(StaticCache(model.config, 16))
        outputs = [
            model(ids, labels=ids, use_cache=False),
            model(ids, attention_mask=torch.ones(IDS, dtype=torch.long), use_cache=False),
            *(model(part, past_key_values=cache) for cache in caches for part in (ids, ids[:, :1])),
            model(ids[:, :1], use_cache=False),
        ]
        if name != "plain":
            with bft_hf.record(model):
                outputs.append(model(ids, token_reliability=torch.ones(IDS), use_cache=False))
    assert all(output.logits.device == FIRST for output in outputs)
    for cache in caches:
        assert [layer.keys.device for layer in cache.layers] == [FIRST, SECOND, SECOND]


def test_fake_tensors_would_have_told() -> None:
    with FakeTensorMode(), pytest.raises(RuntimeError, match="device"):
        torch.ones(2, device=FIRST) + torch.ones(2, device=SECOND)
