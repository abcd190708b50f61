"""Kriging attention: widens Q, K and V so that one attention call also delivers what the filter observes.

The model's own attention forward stays in charge. It is handed a cache whose `update` widens keys and values before the
real cache sees them, and an attention function that widens the query, calls the function the user chose and reads the
extra channels back. The log-precision of a key is one more key channel (the query holds a constant there), its value
power and its probe signs are further value channels; being part of the cached keys and values, they follow every
reorder, crop and beam search.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from .compat import attention_function
from .config import BFTConfig
from .sample_size import ESTIMATORS
from .state import full_precision, state_dtype
from .stream import Stream
from .visibility import Visibility

ATTENTION = "bft_kriging"
"""The name under which `kriging_attention` stands in transformers' registry of attention functions."""

HIDDEN = -1e4
"""log rho of a key with reliability 0: no weight in any dtype, and finite, since 0 * -inf would be NaN in a gradient."""

WIDTH_MULTIPLE = 8
"""Fused attention kernels want head widths in multiples of eight, and one width for Q, K and V."""

HALF_MOMENT_SCALE = 2.0**-8
"""|v|^2 / D overflows float16 at an RMS of 256; scaled, at 4096."""


class KrigingOutput(NamedTuple):
    """What one attention call delivered, head-wise tensors as (batch, token, head[, head_dim]).

    Attributes:
        estimate: e, the kriging estimate before the output projection, without attention dropout; in the model's dtype.
        second_moment: sum_j w_j |v_j|^2 / D, or sum_j w_j v_j^2 per head channel.
        effective_sample_size: Kish's n, (batch, token, head).
        neighbour_variance: sum_j w_j / lam_bar_j, with prior_scale "neighbours" only.
        visible: which queries see a reliable key at all, (batch or 1, token); None when all do.
    """

    estimate: Tensor
    second_moment: Tensor
    effective_sample_size: Tensor
    neighbour_variance: Tensor | None
    visible: Tensor | None


class AttentionCall(Protocol):
    """What `kriging_attention` needs to know of a call: `KrigingCall`, or the shorter one of `one_token`."""

    def attend(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Widen the query, call the attention function, and keep what its output delivers."""


class KrigingCall:
    """One attention call of one layer: how to widen its inputs, and, afterwards, what it delivered.

    Args:
        config: the model's BFT settings.
        stream: the running forward pass.
        slot: which patched layer this is.
        layers: indices of all patched layers.
        position_ids: (batch or 1, token).
        key_bias: log lam_bar of the tokens as keys, near zero, (batch, token); None without kriging.
        reliability: rho of the tokens, (batch, token); None is 1 everywhere.
        key_variance: 1 / lam_bar, (batch, token), for prior_scale "neighbours".

    Attributes:
        output: what the call delivered, once it has.
        update_scale: 1 / rms by which a norm on the attention's output divides it, (batch, token), where the units see that.
    """

    def __init__(
        self,
        config: BFTConfig,
        stream: Stream,
        slot: int,
        layers: tuple[int, ...],
        position_ids: Tensor,
        key_bias: Tensor | None,
        reliability: Tensor | None = None,
        key_variance: Tensor | None = None,
    ) -> None:
        self.config = config
        self.stream = stream
        self.slot = slot
        self.layers = layers
        self.position_ids = position_ids
        self.key_bias = key_bias
        self.unreliable: Tensor | None = None
        if reliability is not None:
            self.unreliable = reliability == 0
            log_reliability = torch.where(
                self.unreliable, HIDDEN, reliability.clamp_min(torch.finfo(torch.float32).tiny).log()
            )
            self.key_bias = log_reliability if key_bias is None else key_bias + log_reliability
        self.key_variance = key_variance
        self.estimator = ESTIMATORS[config.effective_sample_size]
        self.output: KrigingOutput | None = None
        self.update_scale: Tensor | None = None

    def moment_channels(self, head_dim: int) -> int:
        """How many value channels carry v^2: one, or every head channel's own."""
        return 1 if self.config.granularity == "token" else head_dim

    def width(self, head_dim: int) -> int:
        """The common width of the widened Q, K and V."""
        return widened(self.config, head_dim)

    def widen_key_value(self, key: Tensor, value: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
        """Append the filter's channels to new keys and values, both (batch, kv_head, token, head_dim)."""
        heads, head_dim = value.shape[1], value.shape[3]
        width = self.width(head_dim)
        if self.unreliable is not None:
            # Where every visible key is unreliable softmax still hands out weights of sum one: to nothing, then.
            value = value.masked_fill(self.unreliable[:, None, :, None], 0)

        dtype = state_dtype(value)
        if self.config.granularity == "token":
            norm = torch.linalg.vector_norm(value, dim=-1, keepdim=True, dtype=dtype)
            moment = norm * norm / head_dim
        else:
            moment = value.to(dtype).square()
        if value.dtype == torch.float16:
            moment = moment * HALF_MOMENT_SCALE
        extra_value = [moment]
        signs = self.estimator.channels(self.stream, self.slot, self.layers, self.position_ids, heads)
        if signs is not None:
            extra_value.append(signs if len(signs) == len(value) else signs.expand(len(value), -1, -1, -1))
        if self.key_variance is not None:
            extra_value.append(_headwise(self.key_variance, heads))

        if self.key_bias is None:
            key = nn.functional.pad(key, (0, width - head_dim))
        else:
            unit = scaling * query_constant(scaling)
            bias = self.key_bias if unit == 1 else self.key_bias / unit
            zeros = self.stream.row(key, 0.0, width - head_dim - 1).expand(*key.shape[:-1], -1)
            key = torch.cat([key, _headwise(bias.to(key.dtype), heads), zeros], dim=-1)
        used = sum(channel.shape[-1] for channel in extra_value)
        if width > head_dim + used:
            extra_value.append(self.stream.row(value, 0.0, width - head_dim - used).expand(*value.shape[:-1], -1))
        return key, torch.cat([value, *(channel.to(value.dtype) for channel in extra_value)], dim=-1)

    def widen_query(self, query: Tensor, scaling: float) -> Tensor:
        """Append the constant that reads the key's bias channel, (batch, head, token, head_dim).

        It also stands there without a bias of this pass: cached keys may hold one from a pass that had token_reliability.
        The other new channels are zero, since a quantised cache does not hold the key's zeros exactly.
        """
        head_dim = query.shape[-1]
        row = self.stream.row(query, query_constant(scaling), self.width(head_dim) - head_dim)
        if query.shape[2] == 1:
            return torch.cat([query, row.expand(*query.shape[:-1], -1)], dim=-1)
        # Laid out by token, then head, as the family's own query: the attention's output follows, and is not copied again.
        by_token = query.transpose(1, 2)
        return torch.cat([by_token, row.expand(*by_token.shape[:-1], -1)], dim=-1).transpose(1, 2)

    def attend(
        self,
        function: Callable[..., Any],
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        *,
        scaling: float,
        dropout: float,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Call an attention function on the widened query, and keep what its output delivers.

        Returns:
            The kriging estimate (batch, token, head, head_dim), and the kriging weights where the function has any.
        """
        head_dim = query.shape[-1]
        query = self.widen_query(query, scaling)
        attend = functools.partial(function, module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        flash_positions = self.position_ids if "flash" in (module.config.bft_implementation or "") else None
        visibility = Visibility(attention_mask, query, key, flash_positions, _is_causal(module, kwargs))
        return self._deliver(attend, dropout, query, key, visibility, scaling, head_dim)

    def _deliver(
        self, attend: Callable[..., Any], dropout: float, query: Tensor, key: Tensor, *reading: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Call `attend` with its inputs bound, and keep what `read` finds in its output; results as of the method above."""
        output, weights = attend(dropout=0.0)
        with full_precision(output):
            self.output = self.read(output, query, key, *reading)
        if not dropout:
            return self.output.estimate, weights
        # Dropout acts on what enters the residual, never on the statistics: dropped weights could make RSS negative.
        output, weights = attend(dropout=dropout)
        return output[..., : self.output.estimate.shape[-1]], weights

    def read(
        self,
        output: Tensor,
        query: Tensor,
        key: Tensor,
        visibility: Visibility,
        scaling: float,
        head_dim: int,
        softcap: float | None = None,
    ) -> KrigingOutput:
        """Split what the attention function returned, (batch, token, head, width), into the filter's quantities."""
        dtype = state_dtype(output)
        visible_keys, visible = self.stream.visible_keys(visibility)
        sizes = [self.moment_channels(head_dim), self.estimator.num_channels, int(self.key_variance is not None)]
        # Splitting twice, the gradient is put together once each time; a slice of its own would fill a whole tensor with zeros.
        estimate, extras = output.split([head_dim, output.shape[-1] - head_dim], dim=-1)
        moment, probes, variance, _ = extras.to(dtype).split([*sizes, extras.shape[-1] - sum(sizes)], dim=-1)
        if output.dtype == torch.float16:
            moment = moment / HALF_MOMENT_SCALE
        sample_size = self.estimator.read(
            probes,
            visible_keys,
            query=query,
            key=key,
            visibility=visibility,
            scaling=scaling,
            dtype=dtype,
            cap=None if softcap is None else (softcap, head_dim),
        )
        return KrigingOutput(
            estimate=estimate,
            second_moment=moment.squeeze(-1) if self.config.granularity == "token" else moment,
            effective_sample_size=sample_size,
            neighbour_variance=variance.squeeze(-1) if self.key_variance is not None else None,
            visible=visible,
        )


class SoftcappedCall(KrigingCall):
    """An attention call whose scores s become c tanh(s / c): precisions weigh what comes of that, so they go around the cap.

    Cached keys hold their precision in their own channel as ever; here it is read from there and joins the mask, which attention
    functions add behind the cap.
    """

    def attend(
        self,
        function: Callable[..., Any],
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        *,
        scaling: float,
        dropout: float,
        softcap: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """As `KrigingCall.attend`.

        Raises:
            NotImplementedError: the attention function is a kernel that takes no such mask.
        """
        implementation = module.config.bft_implementation
        # sdpa caps nothing, and in newer transformers says so and stops.
        if softcap is None or implementation == "sdpa":
            options = {**kwargs, "scaling": scaling, "dropout": dropout, "softcap": softcap}
            return super().attend(function, module, query, key, value, attention_mask, **options)
        # A function of somebody's own can say so by an attribute.
        if not getattr(function, "adds_mask_behind_cap", implementation in (None, "eager")):
            raise NotImplementedError(
                f"{implementation} attention takes no key precisions behind a soft cap of the scores: call "
                "model.set_attn_implementation('eager'), or set config.attn_logit_softcapping to None before the model is made"
            )
        head_dim, width = query.shape[-1], key.shape[-1]
        bias = key[:, :1, None, :, head_dim] * (scaling * query_constant(scaling))
        mask = bias
        if attention_mask is not None:
            mask = (attention_mask[..., : key.shape[2]] + bias).clamp_min(torch.finfo(bias.dtype).min)
        unbiased = nn.functional.pad(query, (0, width - head_dim))
        options = {**kwargs, "scaling": scaling, "softcap": softcap}
        attend = functools.partial(function, module, unbiased, key, value, mask, **options)
        visibility = Visibility(attention_mask, query, key, causal=_is_causal(module, kwargs))
        return self._deliver(
            attend, dropout, self.widen_query(query, scaling), key, visibility, scaling, head_dim, softcap
        )


def _is_causal(module: nn.Module, options: Mapping[str, Any]) -> bool:
    """Whether a call without a mask is causal, as transformers' attention functions decide it."""
    asked = options.get("is_causal")
    return bool(getattr(module, "is_causal", True) if asked is None else asked)


def widened(config: BFTConfig, head_dim: int) -> int:
    """The common width of the widened Q, K and V of heads of width `head_dim`."""
    values = head_dim + (1 if config.granularity == "token" else head_dim)
    values += ESTIMATORS[config.effective_sample_size].num_channels + (config.prior_scale == "neighbours")
    return -(-values // WIDTH_MULTIPLE) * WIDTH_MULTIPLE


def query_constant(scaling: float) -> float:
    """A power of two near 1 / scaling: exact in every dtype, and the key channel holds numbers of the bias's own size."""
    return 2.0 ** round(-math.log2(scaling))


def _headwise(per_token: Tensor, heads: int) -> Tensor:
    """(batch, token) as one channel of every head, (batch, head, token, 1)."""
    return per_token.unsqueeze(1).unsqueeze(-1).expand(-1, heads, -1, -1)


class WideningCache:
    """Stands in for the cache in one call of an attention's forward; with no cache it only widens."""

    def __init__(self, cache: Any, call: KrigingCall, scaling: float) -> None:
        self._cache = cache
        self._call = call
        self._scaling = scaling

    def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Widen new keys and values, then let the real cache store them; returns all of them."""
        with full_precision(value):
            key, value = self._call.widen_key_value(key, value, self._scaling)
        if self._cache is None:
            return key, value
        return self._cache.update(key, value, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


def kriging_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    bft_call: AttentionCall | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention function of patched layers, by transformers' interface: calls the user's own on widened inputs.

    Returns:
        The kriging estimate (batch, token, head, head_dim), and the kriging weights where the user's function has any.
    """
    original = module._bft_original_class
    implementation = module.config.bft_implementation
    attend = attention_function(original, implementation)
    if bft_call is None:  # somebody runs the attention by itself, outside its decoder layer
        return attend(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return bft_call.attend(
        attend, module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
    )


class KrigingConfig:
    """An attention's view of the model's config, in which the attention function is ours; all else is the config's.

    The config itself keeps the user's `_attn_implementation`: masks are made for it, and a later
    `set_attn_implementation` is followed, since nothing is copied.
    """

    def __init__(self, config: Any) -> None:
        object.__setattr__(self, "_config", config)

    @property
    def _attn_implementation(self) -> str:
        register_attention()  # here, so that a process which only unpickles a patched model has it too
        return ATTENTION

    @property
    def bft_implementation(self) -> str | None:
        """The attention function the user chose."""
        return self._config._attn_implementation

    def __getattr__(self, name: str) -> Any:
        config = self.__dict__.get("_config")  # the compiler follows this, and no object.__getattribute__
        if config is None:  # while a copy is being made
            raise AttributeError(name)
        return getattr(config, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._config, name, value)


_registered = False


def register_attention() -> None:
    """Put `kriging_attention` into transformers' registry, once a process; late, since that imports all of modelling."""
    global _registered
    if not _registered:
        from transformers import AttentionInterface

        AttentionInterface.register(ATTENTION, kriging_attention)
        _registered = True
