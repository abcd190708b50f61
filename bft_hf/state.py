"""What a patched layer adds to a model: the learned precisions and process noises, as float32 logarithms."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from . import filter
from .anatomy import Architecture
from .config import BFTConfig
from .weights import DerivedFromWeights, effective_weight, forget_derived

MLP_WIDTH = 16
"""Hidden width of the MLP from embedding to initial precision: .01 % of SmolLM2-135M's parameters."""


Precisions = tuple[Tensor, ...]
"""What travels from layer to layer, one or two tensors (batch, token[, channel]): first the filter's own precision, last
the one by which keys are weighed. They are one and the same unless keys have a precision of their own."""


class BFTState(nn.Module):
    """The child `bft` of a patched layer: its process noise and, in the first patched layer, the initial precision.

    Parameters without influence under the settings are not created; a constant then stands in.

    Args:
        config: the model's BFT settings.
        architecture: the family's anatomy.
        layers: indices of the patched layers. The last has no process noise: nothing reads what it would predict.
        slot: which of them this is, counted from 0.
        hidden_size: C.
        vocab_size: rows of the table, with initial_precision "table".
        device: where the parameters live.
    """

    weight = None
    """PEFT's `merge_and_unload`, except LoRA's, takes the `weight` of whatever it has saved."""

    def __init__(
        self,
        config: BFTConfig,
        architecture: Architecture,
        layers: Sequence[int],
        slot: int,
        hidden_size: int,
        vocab_size: int,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.architecture = architecture
        self.layers = tuple(layers)
        self.layer_index = layers[slot]
        self.slot = slot
        self.coefficients = DerivedFromWeights()
        self.output_weight = DerivedFromWeights()
        num_slots = len(layers)
        self.predicts = config.propagate and slot < num_slots - 1

        # Which slots read a precision so that it shows: as the prior of a gain and as a key's weight all do; as the variance
        # prior of the observation that a key of its own takes over, all but the last. A constant that is the same for every
        # key moves no weight, so a single layer shows nothing of it as a key.
        keys_matter = config.kriging and (num_slots > 1 or config.initial_precision != "constant")
        separate = config.separate_key_precision and keys_matter
        readers = {"": 0, "key_": num_slots}
        if config.gain or (keys_matter and not separate):
            readers[""] = num_slots
        elif separate and config.prior_scale == "neighbours":
            readers[""] = num_slots - 1
        self.tracked = ["", "key_"] if separate else [""]

        self._starts = self._start_values(readers, hidden_size, vocab_size)
        for name, start in self._starts.items():
            self.register_parameter(name, nn.Parameter(start().to(device, torch.float32)))

    def _start_values(
        self, readers: dict[str, int], hidden_size: int, vocab_size: int
    ) -> dict[str, Callable[[], Tensor]]:
        config = self.config
        starts: dict[str, Callable[[], Tensor]] = {}
        channels = hidden_size if config.granularity == "channel" else 1
        rows = vocab_size if config.initial_precision == "table" else 1
        for key in self.tracked:
            if self.slot == 0 and readers[key]:
                start = math.log(config.initial_precision_value)
                starts[f"log_initial_{key}precision"] = functools.partial(torch.full, (rows,), start)
                if config.initial_precision == "mlp":
                    scales = {"hidden": 1 / math.sqrt(hidden_size), "output": 0.01}
                    shapes = {"hidden": (MLP_WIDTH, hidden_size), "output": (MLP_WIDTH,)}
                    for name, scale in scales.items():
                        seed = len(key + name)
                        starts[f"initial_{key}{name}"] = functools.partial(_normal, shapes[name], scale, seed)
            if self.predicts and self.slot + 1 < readers[key]:
                start = math.log(config.initial_process_noise)
                starts[f"log_{key}process_noise"] = functools.partial(torch.full, (channels,), start)
        return starts

    @torch.no_grad()
    def reset_missing(self) -> None:
        """Start values for the parameters that a checkpoint did not have, as transformers' loader marks them."""
        for name, start in self._starts.items():
            parameter = self.get_parameter(name)
            if not getattr(parameter, "_is_hf_initialized", False):
                parameter.copy_(start())

    def initial_precisions(self, hidden_states: Tensor, input_ids: Tensor | None) -> Precisions:
        """tau for every token, as `tracked` names them.

        Args:
            hidden_states: what enters the first patched layer, (batch, token, channel): the embeddings, if that is layer 0.
            input_ids: (batch, token), needed with a table.

        Raises:
            ValueError: a table and no input_ids.
        """
        return tuple(self._initial_precision(key, hidden_states, input_ids) for key in self.tracked)

    def _initial_precision(self, key: str, hidden_states: Tensor, input_ids: Tensor | None) -> Tensor:
        dtype = state_dtype(hidden_states)
        shape = hidden_states.shape if self.config.granularity == "channel" else hidden_states.shape[:-1]
        log_tau = getattr(self, f"log_initial_{key}precision", None)
        if log_tau is None:
            return torch.full(shape, self.config.initial_precision_value, dtype=dtype, device=hidden_states.device)
        log_tau = log_tau.to(dtype)
        if self.config.initial_precision == "table":
            if input_ids is None:
                raise ValueError(
                    "initial_precision='table' looks a precision up by token id: pass input_ids, not inputs_embeds, or patch "
                    "with initial_precision='constant' or 'mlp'"
                )
            log_tau = log_tau[input_ids]
        elif self.config.initial_precision == "mlp":
            embedding = nn.functional.rms_norm(hidden_states.to(dtype), hidden_states.shape[-1:])
            hidden = nn.functional.silu(embedding @ getattr(self, f"initial_{key}hidden").to(dtype).T)
            log_tau = log_tau + hidden @ getattr(self, f"initial_{key}output").to(dtype)
        tau = log_tau.exp()
        return (tau.unsqueeze(-1) if tau.ndim > 1 and len(shape) > 2 else tau).expand(shape)

    def initial_log_scale(self) -> Tensor | float:
        """About the log of the first layer's key precision: what its bias is shifted by, see `Stream.log_scale`."""
        log_tau = getattr(self, f"log_initial_{self.tracked[-1]}precision", None)
        return math.log(self.config.initial_precision_value) if log_tau is None else log_tau.detach().mean()

    def process_noise(self, key: str, dtype: torch.dtype) -> Tensor | float:
        """Q, (1,) or (channel,). `key` is "" for the filter's own precision and "key_" for the keys'."""
        noise = getattr(self, f"log_{key}process_noise", None)
        return self.config.initial_process_noise if noise is None else noise.to(dtype).exp()

    def kalman_update(self, lam: Tensor, observation_precision: Tensor) -> tuple[Tensor, Tensor]:
        """Gain K and updated precision lam'; with the gain switched off K is 1 wherever something was observed."""
        gain, updated = filter.update(lam, observation_precision)
        return (gain if self.config.gain else (observation_precision > 0).to(gain.dtype)), updated

    def scaled(self, gain: Tensor) -> Tensor:
        """The gain as it multiplies the attention's output: over its calibrated mean, where the model is calibrated."""
        return gain if self.config.gain_scale is None else gain * self.config.gain_scale[self.slot]

    def predict(self, updated: Precisions, jacobian: Tensor) -> Precisions:
        """lam'' of every precision that is tracked."""
        return tuple(
            filter.predict(lam, jacobian, self.process_noise(key, lam.dtype))
            for key, lam in zip(self.tracked, updated, strict=True)
        )

    def read_output_weight(self, projection: nn.Module) -> Tensor:
        """W_O, the effective one, so a merged or trained adapter counts; kept until it may have changed. Not to be differentiated."""
        return self.output_weight.get(
            [projection], lambda: effective_weight(projection), inference=not torch.is_grad_enabled()
        )

    def next_log_scale(self) -> Tensor | float:
        """About the log of the key precision that this layer predicts: lam'' is at most 1/Q."""
        if not self.predicts:
            return 0.0
        noise = getattr(self, f"log_{self.tracked[-1]}process_noise", None)
        if noise is None:
            return -math.log(self.config.initial_process_noise)
        return -noise.detach() if noise.numel() == 1 else -noise.detach().mean()

    def resize_table(self, rows: int) -> None:
        """Follow a vocabulary that was resized: new items start at the mean of the known ones."""
        for key in ("", "key_"):
            name = f"log_initial_{key}precision"
            table = getattr(self, name, None)
            if table is not None and table.shape[0] != rows:
                resized = table.detach().mean().repeat(rows)
                kept = min(rows, table.shape[0])
                resized[:kept] = table.detach()[:kept]
                setattr(self, name, nn.Parameter(resized, requires_grad=table.requires_grad))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> BFTState:
        # model.to(bfloat16) or .half() must not round log tau and log Q: follow the device, keep the precision.
        def keep_precision(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            narrowed = moved.is_floating_point() and torch.finfo(moved.dtype).bits < 32
            return tensor.to(moved.device) if narrowed else moved

        return super()._apply(keep_precision, recurse)

    def train(self, mode: bool = True) -> BFTState:
        forget_derived()
        return super().train(mode)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        forget_derived()
        super()._load_from_state_dict(*args, **kwargs)


def _normal(shape: tuple[int, ...], scale: float, seed: int) -> Tensor:
    # A generator of its own: patching neither reads nor moves the caller's random state.
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def state_dtype(hidden_states: Tensor) -> torch.dtype:
    """The dtype of precisions beside hidden states: float32, or float64 where the model is."""
    return torch.promote_types(hidden_states.dtype, torch.float32)


def full_precision(tensor: Tensor) -> AbstractContextManager[Any]:
    """Keeps autocast out of the filter: what Trainer's bf16=True turns on would round its matmuls to bfloat16."""
    device = tensor.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()
