"""One new token a row, without gradients and under the default settings: the filter's step in few operations.

A decoded token costs little arithmetic and much dispatching, so here the same quantities as in `attention` and `filter` are
formed with far fewer calls, and what all layers share is made once a pass. Whatever this does not cover (a mask, a
reliability, a recording, another setting) takes the general path, to which a test holds it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from . import filter
from .attention import query_constant, widened
from .config import BFTConfig
from .sample_size import NUM_PROBES
from .state import BFTState
from .stream import Stream


def covers(config: BFTConfig, stream: Stream, hidden_states: Tensor) -> bool:
    """Whether the layers of this pass may take the short way; a layer that sees a mask does not."""
    return (
        hidden_states.shape[1] == 1
        and hidden_states.dtype in (torch.float32, torch.bfloat16)
        and not (torch.is_grad_enabled() or torch.compiler.is_compiling())
        and not torch.is_autocast_enabled(hidden_states.device.type)
        and not stream.traces
        and stream.calibration is None
        and stream.token_reliability is None
        and (config.granularity, config.observation_units, config.prior_scale) == ("token", "relative", "unit")
        and (config.prior_degrees_of_freedom, config.effective_sample_size) == (1, "probe")
        and config.kriging
        and config.gain
        and not config.separate_key_precision
    )


def plain(layer_arguments: dict[str, Any]) -> bool:
    """Whether a layer was given no mask, as where the token sees every key, and positions."""
    return layer_arguments.get("attention_mask") is None and layer_arguments.get("position_ids") is not None


class SharedByLayers:
    """What the layers' attentions append, made once a pass: rows that are ready but for the two numbers a layer writes.

    Args:
        state: of any patched layer.
        position_ids: (batch or 1, 1).
        key: a layer's new keys, (batch, kv_head, 1, head_dim).
        scaling: of the attention's logits.

    Attributes:
        beside_key: by slot, (batch, kv_head, 1, width - head_dim), of which `key_bias` is the first channel, (batch, kv_head).
        beside_value: by slot, alike; `moment` is its first channel, (batch, kv_head, 1, 1), and the signs are in the next.
        beside_query: (batch, head, 1, width - head_dim), once a query has been seen.
    """

    def __init__(self, state: BFTState, position_ids: Tensor, key: Tensor, scaling: float) -> None:
        batch, heads, _, self.head_dim = key.shape
        width = widened(state.config, self.head_dim) - self.head_dim
        constant = query_constant(scaling)
        self.bias_unit = scaling * constant
        keys, values = key.new_zeros(2, len(state.layers), batch, heads, 1, width).unbind()
        values[..., 1 : 1 + NUM_PROBES] = filter.probe_signs(state.layers, position_ids, heads, NUM_PROBES)
        self.beside_key, self.key_bias = keys.unbind(), keys[..., 0, 0].unbind()
        self.beside_value, self.moment = values.unbind(), values[..., :1].unbind()
        self.beside_query = nn.functional.pad(key.new_full((batch, 1, 1, 1), constant), (0, width - 1))
        self.zero, self.one = key.new_zeros((), dtype=torch.float32), key.new_ones((), dtype=torch.float32)


class OneTokenCall:
    """Stands for the cache and for the `KrigingCall` in one attention of one token.

    Args:
        cache: the real cache, or None.
        state: of the layer.
        stream: the running pass; keeps what layers share.
        position_ids: (batch or 1, 1).
        key_bias: log lam_bar of the token as a key, near zero, (batch, 1).
        scaling: of the attention's logits.

    Attributes:
        variance: Var~ of the attention's output, (batch, 1), once the attention has run.
    """

    variance: Tensor

    def __init__(
        self, cache: Any, state: BFTState, stream: Stream, position_ids: Tensor, key_bias: Tensor, scaling: float
    ) -> None:
        self._cache = cache
        self._state = state
        self._stream = stream
        self._position_ids = position_ids
        self._key_bias = key_bias
        self._scaling = scaling

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Widen the new key and value, (batch, kv_head, 1, head_dim), and let the real cache store them."""
        shared = self._stream.shared
        if shared is None:
            shared = self._stream.shared = SharedByLayers(self._state, self._position_ids, key, self._scaling)
        slot = self._state.slot
        shared.key_bias[slot].copy_(self._key_bias if shared.bias_unit == 1 else self._key_bias / shared.bias_unit)
        norm = torch.linalg.vector_norm(value, dim=-1, keepdim=True, dtype=torch.float32)
        torch.addcmul(shared.zero, norm, norm, value=1 / shared.head_dim, out=shared.moment[slot])
        key = torch.cat([key, shared.beside_key[slot]], dim=-1)
        value = torch.cat([value, shared.beside_value[slot]], dim=-1)
        return (key, value) if self._cache is None else self._cache.update(key, value, *args, **kwargs)

    def attend(
        self, function: Callable[..., Any], module: nn.Module, query: Tensor, key: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Call the attention function on the widened query; Var~ follows from what it returns.

        Var~ is the mean over heads of (RSS / m2 + p) p, with RSS / m2 = 1 - |e|^2 / (D m2) and p = sum_j w_j^2.

        Returns:
            The kriging estimate, (batch, 1, head, head_dim), and the weights where the function has any.
        """
        shared = self._stream.shared
        assert shared is not None
        if shared.beside_query.shape[1] != query.shape[1]:
            shared.beside_query = shared.beside_query.expand(-1, query.shape[1], -1, -1)
        query = torch.cat([query, shared.beside_query], dim=-1)
        output, weights = function(module, query, key, *args, **kwargs)
        head_dim = shared.head_dim
        estimate, extras = output[..., :head_dim], output[..., head_dim:].float()
        norm = torch.linalg.vector_norm(estimate, dim=-1, dtype=torch.float32)
        # Without any value power the quotient is no number, and nothing is unexplained.
        unexplained = torch.addcdiv(shared.one, norm * norm, extras[..., 0], value=-1 / head_dim)
        unexplained = unexplained.clamp_min_(0).nan_to_num_(0)
        probes = torch.linalg.vector_norm(extras[..., 1 : 1 + NUM_PROBES], dim=-1)
        square_sum = torch.addcmul(shared.zero, probes, probes, value=1 / NUM_PROBES).clamp_(1 / key.shape[2], 1)
        self.variance = unexplained.add_(square_sum).mul_(square_sum).mean(-1)
        return estimate, weights
