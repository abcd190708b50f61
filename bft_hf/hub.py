"""Saving and loading: a patched checkpoint comes back patched, and nothing takes it for a plain model.

On disk, `config.json` of a patched model carries three things beside the model's own configuration: `bft_config`; a
`quantization_config` whose method is ours, by which transformers' own loading calls `patch` before it reads weights (for
Auto classes and concrete ones alike) and which other engines refuse; and an activation name that only exists once bft_hf
is imported, so that a plain model cannot be built from the folder by mistake. In memory none of this shows.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from .compat import SizeCheck
from .config import BFTConfig
from .offload import keep_resident
from .state import BFTState
from .swap import InPlaceSubclass, restore_class, swap_class

METHOD = "bft_hf"
ACTIVATION_FIELDS = ("hidden_activation", "hidden_act")
"""Under which name configurations keep the FFN's activation; Gemma2 and Gemma3 under the first."""

ACTIVATION_MARK = " (a bft_hf checkpoint: run `import bft_hf` before loading it)"


class MarkedConfig(InPlaceSubclass):
    """The class of a patched model's config while it is saved: what goes to the file is marked."""

    def to_json_file(self, json_file_path: Any, use_diff: bool = True) -> None:
        """Write config.json with the marks described above."""
        values = json.loads(self.to_json_string(use_diff=use_diff))  # type: ignore[attr-defined]
        name = next((name for name in ACTIVATION_FIELDS if name in values), None)
        if name is None:
            raise NotImplementedError(
                f"a {type(self).__name__} names no activation that could be marked: save the language model inside the model"
            )
        activation = values[name]
        values["quantization_config"] = {"quant_method": METHOD, "hidden_act": activation}
        values[name] = activation + ACTIVATION_MARK
        with open(json_file_path, "w", encoding="utf-8") as file:
            file.write(json.dumps(values, indent=2, sort_keys=True) + "\n")


@contextmanager
def marked(config: Any, bft_config: BFTConfig) -> Iterator[None]:
    """Let a model's config save as a patched model's within the block. Other models may share it, so no longer than that."""
    config.bft_config = bft_config.to_dict()
    swap_class(config, MarkedConfig)
    try:
        yield
    finally:
        restore_class(config)
        del config.bft_config


ADAPTER_FILE = "bft_config.json"
"""Stands beside the adapter of a patched base."""


def checkpoint_config(folder: str | os.PathLike[str]) -> BFTConfig | None:
    """The configuration with which a saved model, or the base of a saved adapter, was patched; None if it was not."""
    adapter, model = Path(folder, ADAPTER_FILE), Path(folder, "config.json")
    if adapter.exists():
        return BFTConfig.from_json_string(adapter.read_text(encoding="utf-8"))
    values = json.loads(model.read_text(encoding="utf-8")).get("bft_config") if model.exists() else None
    return None if values is None else BFTConfig.from_dict(values)


def check_resume(checkpoint: str | os.PathLike[str], config: BFTConfig | None) -> None:
    """Refuse to go on from a training checkpoint whose patch is not the model's.

    Args:
        checkpoint: a Trainer's checkpoint folder, of a whole model or of an adapter.
        config: what the model in hand is patched with, or None.

    Raises:
        ValueError: one is patched and the other is not, or they are patched differently.
    """
    if not any(Path(checkpoint, name).is_file() for name in ("config.json", "adapter_config.json")):
        return  # a sharded checkpoint of FSDP or DeepSpeed has no configuration, and loads strictly
    saved = checkpoint_config(checkpoint)
    if saved is not None and config is None:
        raise ValueError(
            f"{checkpoint} is of a patched model and this one is not: call bft_hf.patch(model) before training goes on"
        )
    if config is not None and saved is None:
        raise ValueError(
            f"{checkpoint} is of a plain model and this one is patched: go on with a plain one, or train anew"
        )
    for name, value in vars(saved).items() if saved else ():
        if value != getattr(config, name):
            raise ValueError(
                f"{checkpoint} was patched with {name}={value!r} and this model with {getattr(config, name)!r}: patch it with "
                "the checkpoint's configuration"
            )


class PendingActivation(nn.Module):
    """Stands where a patched checkpoint's activation will be, until the layers around it are patched."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Raises RuntimeError: whoever runs this built a model from a patched checkpoint's configuration alone."""
        raise RuntimeError(
            "this model was built from the configuration of a patched checkpoint, which makes a plain model: load it with "
            "from_pretrained, or build the plain model from its own configuration and call bft_hf.patch"
        )


@register_quantization_config(METHOD)
class BFTCheckpointConfig(QuantizationConfigMixin):
    """The `quantization_config` block of a patched checkpoint."""

    def __init__(self, hidden_act: str, **kwargs: Any) -> None:
        self.quant_method = METHOD
        self.hidden_act = hidden_act
        # Building the layers needs the marked name to be one.
        ACT2FN[hidden_act + ACTIVATION_MARK] = PendingActivation


@register_quantizer(METHOD)
class BFTCheckpointLoader(HfQuantizer):
    """Patches the empty model that `from_pretrained` is about to fill, then removes every trace of a quantizer."""

    requires_calibration = False

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        from .patching import patch

        config = model.config
        activation = self.quantization_config.hidden_act
        for name in ACTIVATION_FIELDS:
            if getattr(config, name, None) == activation + ACTIVATION_MARK:
                setattr(config, name, activation)
        del config.quantization_config
        for module in list(model.modules()):
            for name, child in module.named_children():
                if isinstance(child, PendingActivation):
                    setattr(module, name, ACT2FN[activation])
        bft_config = BFTConfig.from_dict(config.bft_config)
        del config.bft_config
        patch(model, bft_config)
        SizeCheck(model)
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        self.remove_quantization_config(model)
        for module in model.modules():
            if isinstance(module, BFTState):
                keep_resident(module)
        vars(model).pop("is_quantized", None)
        return model

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """A patched model saves like any other."""
        return True

    @property
    def is_trainable(self) -> bool:
        """A patched model trains like any other."""
        return True
