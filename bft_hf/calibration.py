"""calibrate(): the gain of every layer scaled so that, on average, the pretrained attention update enters the residual whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .architectures import find_base_model
from .patching import get_config, set_config
from .state import BFTState


class Calibration:
    """Measures each patched layer's mean gain while a model runs.

    It scales the gain at once, so that the next layer is measured on what it will see.

    Attributes:
        tokens: which tokens of the running batch count, (batch, token); None is all.
    """

    def __init__(self, layers: int) -> None:
        self.tokens: Tensor | None = None
        self._sums = [0.0] * layers
        self._counts = [0.0] * layers

    def scale(self, slot: int, gain: Tensor) -> float:
        """The inverse of the mean gain of the batches up to this one, K (batch, token[, channel])."""
        kept = gain if self.tokens is None else gain[self.tokens]
        self._sums[slot] += float(kept.sum(dtype=torch.float64))
        self._counts[slot] += kept.numel()
        return self._counts[slot] / self._sums[slot]

    def scales(self) -> tuple[float, ...]:
        """What `scale` gives after the last batch, by patched layer."""
        return tuple(count / total for count, total in zip(self._counts, self._sums, strict=True))


@torch.no_grad()
def calibrate(model: nn.Module, batches: Iterable[Mapping[str, Any]]) -> tuple[float, ...]:
    """Scale the gain of every patched layer to a mean of 1, so that the pretrained function is kept on average.

    The unit start multiplies each attention update by K < 1, which costs a pretrained model a part of what it knows; the
    default start keeps it nearly, but there the gain hardly moves. Calibrated, the update is (K / mean K) W_O a: the same as K
    with W_O / mean K as the output projection, and the gain keeps its full sensitivity. W_O itself stays as it is, so
    `unpatch` remains exact. The scales stand in the model's BFTConfig (`gain_scale`) and are saved with it.

    Args:
        model: a patched model, before training.
        batches: inputs of its forward, each with `input_ids` and, if rows are padded, `attention_mask`. A thousand tokens
            are enough; take the task's own rows, since the gain depends on how attention spreads. Where a batch has `labels`
            (-100 for a token that is not trained), the mean is over the tokens that predict one. Tensors are moved to the
            model's device.

    Returns:
        The scale of each patched layer, in order.

    Raises:
        ValueError: the model is not patched, is a recommender, is calibrated already, has its gain switched off, there is no batch, or one without any label.
    """
    config = get_config(model)
    if config is None:
        raise ValueError(
            f"{type(model).__name__} is not patched, so there is no gain to calibrate: call bft_hf.patch first"
        )
    if config.gain_scale is not None:
        raise ValueError("the model is calibrated already: unpatch it and patch it with gain_scale=None to start again")
    if not config.gain:
        raise ValueError("the gain is switched off (BFTConfig.gain): there is nothing to calibrate")
    base, architecture = find_base_model(model)
    if architecture.built_in:
        raise ValueError(
            "a recommender is trained from scratch: there is no pretrained function to keep by calibration"
        )
    states = [module for module in model.modules() if isinstance(module, BFTState)]
    calibration = Calibration(len(states[0].layers))
    device = base.get_input_embeddings().weight.device
    training = {module: module.training for module in base.modules()}
    base.eval()
    base._bft_calibration = calibration
    empty = True
    try:
        for batch in batches:
            inputs = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
            calibration.tokens = _counted(inputs.pop("labels", None), inputs.get("attention_mask"))
            base(**inputs, use_cache=False)
            empty = False
    finally:
        base._bft_calibration = None
        for module, mode in training.items():
            module.training = mode
    if empty:
        raise ValueError("calibrate() got no batch: give it a list of tokenized rows")
    scales = calibration.scales()
    set_config(model, dataclasses.replace(config, gain_scale=scales))
    return scales


def _counted(labels: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """Which tokens count, (batch, token): those whose next token is a label, else those that are not padding."""
    if labels is not None:
        kept = torch.zeros_like(labels, dtype=torch.bool)
        kept[:, :-1] = labels[:, 1:] != -100
        if not bool(kept.any()):
            raise ValueError("a batch for calibrate() has labels of -100 alone: leave such rows out, or give no labels")
        return kept
    return mask.bool() if mask is not None and mask.ndim == 2 else None
