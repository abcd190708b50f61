"""One layer of a recommender as one step of the filter: what it reads, what its gain does, what it hands on."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from .. import filter
from ..sample_size import NUM_PROBES
from ..state import BFTState, Precisions, full_precision, state_dtype
from ..tracing import Trace


class Pass(NamedTuple):
    """One forward pass: what every layer of it shares.

    Attributes:
        input_ids: item ids, (batch, token).
        position_ids: an item's place in its history, (batch, token).
        visible: which key a query sees, (batch, token, key).
        seeing: which queries see a key at all, (batch, token); None when all do, as in a causal batch padded on the right.
        timestamps: seconds, (batch, token), or None.
        token_reliability: rho in [0, 1], (batch, token); None is 1 everywhere. Keys of reliability 0 are not visible.
        traces: the recorders that are running.
    """

    input_ids: Int[Tensor, "batch token"]
    position_ids: Int[Tensor, "batch token"]
    visible: Bool[Tensor, "batch token key"]
    seeing: Bool[Tensor, "batch token"] | None = None
    timestamps: Int[Tensor, "batch token"] | None = None
    token_reliability: Float[Tensor, "batch token"] | None = None
    traces: tuple[Trace, ...] = ()


class FilterStep:
    """Observe, update, predict in one layer of one pass. Everything is float32, or float64 where the model is.

    Args:
        state: the layer's child `bft`.
        hidden_states: what enters the layer, (batch, token, channel).
        run: the pass.
        precisions: what the patched layer before has predicted; None in the first one.

    Attributes:
        inference: whether the pass has no gradients.
        key_precision: lam_bar rho of the tokens as keys, (batch, token); None where it is 1 everywhere.
    """

    def __init__(self, state: BFTState, hidden_states: Tensor, run: Pass, precisions: Precisions | None) -> None:
        self.state = state
        self.run = run
        self.dtype = state_dtype(hidden_states)
        self.precisions = precisions or state.initial_precisions(hidden_states, run.input_ids)
        self.key_precision: Tensor | None = None
        if state.config.kriging:
            self.key_precision = filter.mean_precision(self.precisions[-1])
        if run.token_reliability is not None:
            reliability = run.token_reliability.to(self.dtype)
            self.key_precision = reliability if self.key_precision is None else self.key_precision * reliability
        self.observation: filter.Observation | None = None
        self.inference = not torch.is_grad_enabled()
        self._gain: Tensor | None = None
        self._updated: Tensor | None = None
        self._handed_on: Precisions = ()

    @property
    def key_variance(self) -> Float[Tensor, "batch token"] | None:
        """1 / lam_bar, for prior_scale "neighbours"; else None."""
        if self.state.config.prior_scale != "neighbours":
            return None
        return 1 / filter.mean_precision(self.precisions[0])

    def observe(
        self,
        weights: Float[Tensor, "batch head token key"],
        value: Float[Tensor, "batch head key head_dim"],
        projection: nn.Module,
    ) -> Float[Tensor, "batch head token head_dim"]:
        """Take in softmax attention; also computes the kriging estimate.

        Args:
            weights: kriging weights, 0 where nothing is visible, without dropout.
            value: the values.
            projection: the output projection, of weight W_O.

        Returns:
            e, which equals `weights @ value`.
        """
        config = self.state.config
        square = value.square()
        if config.granularity == "token":
            square = square.mean(-1, keepdim=True)
        columns = [value, square]
        probes, key_variance = self._probes(value), self.key_variance
        if probes is not None:
            columns.append(probes)
        if key_variance is not None:
            columns.append(key_variance[:, None, :, None].expand(-1, value.shape[1], -1, 1))
        sums = (weights @ torch.cat(columns, dim=-1)).transpose(1, 2)
        estimate, second_moment, *others = sums.split([column.shape[-1] for column in columns], dim=-1)

        seeing = self.run.seeing
        if probes is None:
            square_sum = torch.linalg.vecdot(weights, weights).transpose(1, 2)
            sample_size = 1 / (square_sum if seeing is None else torch.where(seeing.unsqueeze(-1), square_sum, 1))
        else:
            count = self.run.visible.sum(-1).clamp_min(1)
            sample_size = filter.probe_effective_sample_size(others[0], count.unsqueeze(-1))
        self.observation = filter.observe(
            estimate,
            second_moment.squeeze(-1) if config.granularity == "token" else second_moment,
            sample_size,
            config,
            output_weight=self.state.read_output_weight(projection),
            neighbour_variance=None if key_variance is None else others[-1].squeeze(-1),
            visible=seeing,
        )
        return estimate.transpose(1, 2)

    def _probes(self, value: Tensor) -> Tensor | None:
        """The signs by which n is estimated, (batch, head, key, probe); None if it is taken exactly."""
        if self.state.config.effective_sample_size == "exact":
            return None
        signs = filter.probe_signs(self.state.layer_index, self.run.position_ids, value.shape[1], NUM_PROBES)
        return signs.to(value.dtype)

    def gained(self, attended: Float[Tensor, "batch token channel"]) -> Float[Tensor, "batch token channel"]:
        """Update: K times what enters the residual, after `observation` was set."""
        assert self.observation is not None, "the attention observed nothing"
        observed = self.observation.precision
        with full_precision(attended):
            gain, updated = self.state.kalman_update(self.precisions[0], observed)
            self._gain, self._updated = gain, updated
            self._handed_on = (updated, *(lam + observed for lam in self.precisions[1:]))
            gain = self.state.scaled(gain)
            gain = gain if gain.ndim == attended.ndim else gain.unsqueeze(-1)
            return gain.to(attended.dtype) * attended

    def rescale(self, factor: Callable[[], Tensor]) -> None:
        """The precisions after a norm that stands on the residual stream itself.

        In relative units nothing happens: signal and error are scaled alike. In absolute units the variance is multiplied
        with the square of the norm's factor, by the delta method with the norm's scale held fixed.

        Args:
            factor: gives g / std by channel, (batch, token, channel).
        """
        config = self.state.config
        if config.observation_units == "relative" or not self.state.predicts:
            return
        with torch.set_grad_enabled(self.differentiates):
            square = factor().square()
            square = square if config.granularity == "channel" else square.mean(-1)
        # A channel that the norm's weight has switched off carries no signal; its precision stays finite.
        self._handed_on = tuple(lam / square.clamp_min(filter.SMALLEST_VARIANCE) for lam in self._handed_on)

    def predict(self, jacobian: Callable[[], Tensor] | None = None) -> Precisions:
        """Predict: the precisions that the next patched layer starts from, and one more entry in every trace.

        Args:
            jacobian: gives J, (batch, token[, channel]); None without an FFN, where J is 0.
        """
        state = self.state
        assert self.observation is not None and self._gain is not None and self._updated is not None
        value: Tensor | None = None
        if state.predicts or (self.run.traces and state.config.propagate):
            with full_precision(self._updated), torch.set_grad_enabled(self.differentiates):
                value = torch.zeros_like(self._updated) if jacobian is None else jacobian()
        for trace in self.run.traces:
            trace.add(state.layer_index, self.precisions[0], self.observation, self._gain, value, self._updated)
        if not state.predicts:
            return self._handed_on
        assert value is not None
        return state.predict(self._handed_on, value)

    @property
    def differentiates(self) -> bool:
        """Whether gradients flow through J."""
        return self.state.config.differentiate_jacobian and not self.inference


def start_step(
    state: BFTState | None, hidden_states: Tensor, run: Pass, precisions: Precisions | None
) -> FilterStep | None:
    """The step of a layer, or None where it has no filter."""
    if state is None:
        return None
    with full_precision(hidden_states):
        return FilterStep(state, hidden_states, run, precisions)


def inverse_std(hidden_states: Float[Tensor, "*batch channel"], norm: nn.LayerNorm) -> Float[Tensor, "*batch"]:
    """1 / std of a layer norm's input, its epsilon included."""
    variance = hidden_states.to(state_dtype(hidden_states)).var(-1, correction=0)
    return torch.rsqrt(variance + norm.eps)
