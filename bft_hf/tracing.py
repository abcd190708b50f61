"""record(): what the filter computes, layer by layer, while a patched model runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .architectures import find_base_model
from .filter import Observation


@dataclass
class Trace:
    """Lists by patched layer, detached. A further forward pass (a step of generate) grows each tensor along its tokens.

    Attributes:
        layers: indices of the patched layers.
        precision: lam that the layer starts from, (batch, token[, channel]).
        observation_precision: lam_obs of the attention, alike.
        gain: K, the share of the attention's output that enters the residual, alike.
        updated_precision: lam' after the update, alike; of the last layer, a token's final precision.
        jacobian: J of the FFN, alike.
        effective_sample_size: Kish's n, (batch, head, token).
        residual_variance: RSS in the configured units, (batch, head, token[, head_dim]).
    """

    layers: list[int] = field(default_factory=list)
    precision: list[Tensor] = field(default_factory=list)
    observation_precision: list[Tensor] = field(default_factory=list)
    gain: list[Tensor] = field(default_factory=list)
    updated_precision: list[Tensor] = field(default_factory=list)
    jacobian: list[Tensor] = field(default_factory=list)
    effective_sample_size: list[Tensor] = field(default_factory=list)
    residual_variance: list[Tensor] = field(default_factory=list)

    @property
    def final_precision(self) -> Tensor:
        """lam' of the last patched layer, (batch, token[, channel])."""
        return self.updated_precision[-1]

    def add(
        self,
        layer_index: int,
        precision: Tensor,
        observation: Observation,
        gain: Tensor,
        jacobian: Tensor | None,
        updated_precision: Tensor,
    ) -> None:
        """Record one layer of one pass. Recomputation within a backward pass is left out."""
        if torch._C._current_graph_task_id() != -1:
            return
        if layer_index not in self.layers:
            self.layers.append(layer_index)
        index = self.layers.index(layer_index)
        values: dict[str, tuple[Tensor | None, int]] = {
            "precision": (precision, 1),
            "observation_precision": (observation.precision, 1),
            "gain": (gain, 1),
            "updated_precision": (updated_precision, 1),
            "jacobian": (jacobian, 1),
            "effective_sample_size": (observation.effective_sample_size.transpose(1, 2), 2),
            "residual_variance": (observation.residual_variance.transpose(1, 2), 2),
        }
        for name, (value, token_dim) in values.items():
            if value is not None:
                _grow(getattr(self, name), index, value.detach(), token_dim)


def _grow(values: list[Tensor], index: int, value: Tensor, token_dim: int) -> None:
    if index == len(values):
        values.append(value.clone())
    elif values[index].shape[0] == value.shape[0]:
        values[index] = torch.cat([values[index], value], dim=token_dim)
    else:
        raise ValueError(
            f"record() holds a batch of {values[index].shape[0]} and got one of {value.shape[0]}: "
            "record each batch in a `with` of its own"
        )


@contextmanager
def record(model: nn.Module) -> Iterator[Trace]:
    """Record what the filter computes in every pass of a patched model within the block.

    Args:
        model: a patched model, bare or wrapped.

    Yields:
        A `Trace`, filled as the model runs. Outside the block nothing is recorded and nothing is paid.

    Raises:
        ValueError: the model is not patched.
    """
    base, _ = find_base_model(model)
    if getattr(base, "_bft_traces", None) is None:
        raise ValueError(
            f"{type(model).__name__} is not patched, so there is nothing to record: call bft_hf.patch first"
        )
    trace = Trace()
    base._bft_traces.append(trace)
    try:
        yield trace
    finally:
        # By identity: a dataclass of tensors has no useful equality.
        base._bft_traces[:] = [other for other in base._bft_traces if other is not trace]
