"""A Trainer callback that reports what the filter does, layer by layer, to whatever `report_to` names."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback
from transformers.integrations import get_reporting_integration_callbacks

from .architectures import find_base_model
from .filter import Observation
from .patching import bft_parameters, is_patched

QUANTITIES = ("gain", "precision", "effective_sample_size")
_PROCESS_NOISE = re.compile(r"\.(\d+)\.bft\.(?:modules_to_save\.[^.]+\.)?log_process_noise$")


class BFTCallback(TrainerCallback):
    """Reports mean gain, precision, effective sample size and the process noise Q of every patched layer.

    ```python
    trainer = SFTTrainer(model, args=SFTConfig(report_to="tensorboard", logging_steps=10), ...)
    trainer.add_callback(BFTCallback(trainer))
    trainer.train()
    ```

    At each of the Trainer's logging steps the integrations of `report_to` receive `bft/<quantity>/layer_<index>` (under
    "train/", as all that they log), and so does `trainer.state.log_history`. The progress bar is spared: a model of 22 layers
    has 88 such numbers. The means are taken in the training pass itself, over the step's real tokens (and heads, and channels)
    on this process, where padding is known by the attention mask. They have no influence on gradients or on random numbers, and
    steps that are not logged pay nothing. Under torch.compile a measured step is a graph of its own: compiled once more, and
    equal to rounding.

    A model that is not patched is left alone, so that a baseline can be trained by the same script.

    Args:
        trainer: the Trainer that the callback is added to. As with TRL's own callbacks, the callback has to know it: nothing
            else leads to the other callbacks, which do the reporting.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self._means: _LayerMeans | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        step = state.global_step + 1
        at_interval = args.logging_strategy == "epoch" or step % max(1, state.logging_steps) == 0
        if args.logging_strategy == "no" or not (at_interval or (step == 1 and args.logging_first_step)):
            return
        self._stop()
        if is_patched(model):
            self._means = _LayerMeans(model)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._stop()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._stop()
        self._means = None

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, model: Any = None, **kwargs: Any) -> None:
        if self._means is None or not logs or "loss" not in logs:  # an evaluation, or the summary at the end
            return
        values = {
            f"bft/{quantity}/layer_{layer:02d}": value
            for quantity, by_layer in {**self._means.read(), "process_noise": process_noise(model)}.items()
            for layer, value in by_layer.items()
        }
        self._means = None
        if state.log_history:
            state.log_history[-1].update(values)
        reporters = tuple(get_reporting_integration_callbacks(args.report_to))
        for callback in self.trainer.callback_handler.callbacks:
            if isinstance(callback, reporters):
                callback.on_log(args, state, control, logs=dict(values), model=model, **kwargs)

    def _stop(self) -> None:
        if self._means is not None:
            self._means.stop()


def process_noise(model: nn.Module) -> dict[int, float]:
    """Q by layer index, the mean over channels; layers without one, as the last, are left out."""
    noise = {}
    for name, parameter in bft_parameters(model).items():
        if (layer := _PROCESS_NOISE.search(name)) is not None:
            # Under FSDP2 a shard of a parameter may be empty.
            whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            noise[int(layer[1])] = whole.detach().double().exp().mean().item()
    return noise


class _LayerMeans:
    """Stands among a base model's traces and keeps sums instead of tensors, without waiting for the device."""

    def __init__(self, model: nn.Module) -> None:
        self._base, _ = find_base_model(model)
        self._sums: dict[int, Tensor] = {}
        self._mask: Tensor | None = None
        self._base._bft_traces.append(self)
        self._handle = self._base.register_forward_pre_hook(self._read_mask, with_kwargs=True)

    def _read_mask(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mask = args[1] if len(args) > 1 else kwargs.get("attention_mask")
        self._mask = mask if isinstance(mask, Tensor) and mask.ndim == 2 else None

    def add(
        self,
        layer_index: int,
        precision: Tensor,
        observation: Observation,
        gain: Tensor,
        jacobian: Tensor | None,
        updated_precision: Tensor,
    ) -> None:
        """Take in one layer of one pass, as `Trace.add`; recomputation within a backward pass is left out."""
        if torch._C._current_graph_task_id() != -1:
            return
        with torch.no_grad():
            by_token = [
                value.detach().flatten(2).mean(-1) if value.ndim > 2 else value.detach()
                for value in (gain, precision, observation.effective_sample_size)
            ]
            seen = torch.ones_like(by_token[0])
            if self._mask is not None and self._mask.shape == seen.shape:
                seen = self._mask.to(seen)
            sums = torch.stack([*((value * seen).sum() for value in by_token), seen.sum()])
            known = self._sums.get(layer_index)
            self._sums[layer_index] = sums if known is None else known + sums

    def stop(self) -> None:
        """Leave the traces."""
        self._handle.remove()
        self._base._bft_traces[:] = [trace for trace in self._base._bft_traces if trace is not self]

    def read(self) -> dict[str, dict[int, float]]:
        """Mean by quantity and layer index."""
        means: dict[str, dict[int, float]] = {quantity: {} for quantity in QUANTITIES}
        for layer, sums in self._sums.items():
            *totals, tokens = sums.tolist()
            for quantity, total in zip(QUANTITIES, totals, strict=True):
                means[quantity][layer] = total / max(tokens, 1)
        return means
