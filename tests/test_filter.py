"""The filter's pure functions against the float64 oracle, against what the method promises, and in every gradient."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from reference import (
    Settings,
    attention_observation,
    causal_visibility,
    jacobian_diagonal,
    reference_layer,
    rms_norm,
    rotate,
)
from torch import Tensor
from torch.nn import functional

from bft_hf import filter as bft
from bft_hf.config import BFTConfig

bounded = hypothesis_settings(derandomize=True, max_examples=40, deadline=None)
positive = st.floats(1e-4, 1e4)
seeds = st.integers(0, 10_000)

KINDS = list(itertools.product(("token", "channel"), ("relative", "absolute"), ("unit", "neighbours")))
all_kinds = pytest.mark.parametrize(("granularity", "units", "prior"), KINDS)
granularities = pytest.mark.parametrize("granularity", ["token", "channel"])


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The largest deviation over the largest expected entry: an entry that cancels to 0 has no digits of its own."""
    return float((actual - expected).detach().abs().max() / expected.detach().abs().max())


def config_of(granularity: str, units: str = "relative", prior: str = "unit", **more: Any) -> BFTConfig:
    return BFTConfig.unit(granularity=granularity, observation_units=units, prior_scale=prior, **more)


def settings_of(granularity: str, units: str = "relative", prior: str = "unit", **more: Any) -> Settings:
    return Settings(
        granularity=granularity,
        observation_units=units,
        prior_scale=prior,
        **({"effective_sample_size": "exact"} | more),
    )


# --- One attention layer, written with the filter's functions ---------------------------------------------------------


@dataclass
class Attention:
    """The inputs of one attention layer, heads before tokens; 4 query heads share 2 key/value heads."""

    query: Tensor
    key: Tensor
    value: Tensor
    lam: Tensor
    output_weight: Tensor
    visible: Tensor

    @classmethod
    def random(cls, granularity: str, seed: int = 0, masked_rows: int = 0) -> Attention:
        draw = generator(seed)
        normal = lambda *shape: torch.randn(*shape, generator=draw, dtype=torch.float64)  # noqa: E731
        batch, tokens, channels = 2, 7, 12
        mask = torch.ones(batch, tokens, dtype=torch.long)
        mask[1, :masked_rows] = 0
        return cls(
            query=2 * normal(batch, 4, tokens, 6),
            key=normal(batch, 2, tokens, 6),
            value=normal(batch, 2, tokens, 6) + 0.7 * normal(1, 2, 1, 6),
            lam=normal(*((batch, tokens) if granularity == "token" else (batch, tokens, channels))).exp(),
            output_weight=normal(channels, 24),
            visible=causal_visibility(tokens, mask),
        )

    def to(self, dtype: torch.dtype) -> Attention:
        return Attention(*(x if x.dtype == torch.bool else x.to(dtype) for x in vars(self).values()))

    def leaves(self) -> dict[str, Tensor]:
        """Every differentiable input as a leaf of its own."""
        for name in ("query", "key", "value", "lam", "output_weight"):
            setattr(self, name, getattr(self, name).detach().clone().requires_grad_())
        return {name: getattr(self, name) for name in ("query", "key", "value", "lam", "output_weight")}


def delivered(
    query: Tensor, key: Tensor, value: Tensor, lam: Tensor, visible: Tensor, granularity: str
) -> dict[str, Tensor]:
    """What one attention call gives to `observe`, by a plain softmax with the log precision as a bias."""
    share = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(share, 1), value.repeat_interleave(share, 1)
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5 + bft.mean_precision(lam).log()[:, None, None, :]
    seen = visible.any(-1)
    scores = scores.masked_fill(~visible[:, None], -torch.inf).masked_fill(~seen[:, None, :, None], 0.0)
    weights = scores.softmax(-1) * seen[:, None, :, None]
    powers = value.square().mean(-1, keepdim=True) if granularity == "token" else value.square()
    second_moment = (weights @ powers).transpose(1, 2)
    squares = weights.square().sum(-1) + (~seen)[:, None, :]
    return {
        "weights": weights,
        "estimate": (weights @ value).transpose(1, 2),
        "second_moment": second_moment.squeeze(-1) if granularity == "token" else second_moment,
        "effective_sample_size": (1 / squares).transpose(1, 2),
        "neighbour_variance": (weights / bft.mean_precision(lam)[:, None, None, :]).sum(-1).transpose(1, 2),
        "visible": seen,
    }


def observe(inputs: Attention, config: BFTConfig, detached: str | None = None) -> tuple[bft.Observation, Tensor]:
    """The filter's observation and estimate; `detached` names one delivered quantity to cut from the graph."""
    got = delivered(inputs.query, inputs.key, inputs.value, inputs.lam, inputs.visible, config.granularity)
    got.pop("weights")
    if detached is not None:
        got[detached] = got[detached].detach()
    estimate = got["estimate"]
    return bft.observe(**got, config=config, output_weight=inputs.output_weight), estimate


def oracle_observe(inputs: Attention, settings: Settings) -> Any:
    return attention_observation(
        inputs.query,
        inputs.key,
        inputs.value,
        inputs.lam,
        settings=settings,
        output_weight=inputs.output_weight,
        visible=inputs.visible,
    )


# --- Observe ----------------------------------------------------------------------------------------------------------


@all_kinds
@pytest.mark.parametrize("nu0", [0.5, 1.0, 4.0])
def test_observation_equals_the_oracle(granularity: str, units: str, prior: str, nu0: float) -> None:
    inputs = Attention.random(granularity, masked_rows=2)
    ours, _ = observe(inputs, config_of(granularity, units, prior, prior_degrees_of_freedom=nu0))
    oracle = oracle_observe(inputs, settings_of(granularity, units, prior, prior_degrees_of_freedom=nu0))
    torch.testing.assert_close(ours.precision, oracle.precision, rtol=1e-10, atol=0)
    torch.testing.assert_close(
        ours.effective_sample_size, oracle.effective_sample_size.transpose(1, 2), rtol=1e-10, atol=0
    )
    torch.testing.assert_close(ours.residual_variance, oracle.residual_variance.transpose(1, 2), rtol=1e-8, atol=1e-12)
    assert ours.precision[1, :2].abs().max() == 0
    assert ours.precision[1, 2:].min() > 0


def test_every_setting_of_the_observation_gives_another_precision() -> None:
    """The twin of the equality above: no setting is ignored."""
    means = {}
    for kind, nu0 in itertools.product(KINDS, (1.0, 4.0)):
        inputs = Attention.random(kind[0])
        ours, _ = observe(inputs, config_of(*kind, prior_degrees_of_freedom=nu0))
        means[(*kind, nu0)] = float(ours.precision.log().mean())
    for one, other in itertools.combinations(sorted(means.values()), 2):
        assert other - one > 1e-3


@all_kinds
def test_float32_observation_stays_float32_and_close_to_the_oracle(granularity: str, units: str, prior: str) -> None:
    inputs = Attention.random(granularity, masked_rows=2)
    ours, _ = observe(inputs.to(torch.float32), config_of(granularity, units, prior))
    oracle = oracle_observe(inputs, settings_of(granularity, units, prior))
    assert {x.dtype for x in ours} == {torch.float32}
    assert relative_error(ours.precision.double(), oracle.precision) < 2e-6


@granularities
def test_constant_precision_leaves_the_plain_attention_weights(granularity: str) -> None:
    inputs = Attention.random(granularity)
    alpha = oracle_observe(inputs, settings_of(granularity)).attention
    weights = lambda lam: delivered(  # noqa: E731
        inputs.query, inputs.key, inputs.value, lam, inputs.visible, granularity
    )["weights"]
    for constant in (1e-6, 1.0, 1e6):
        # In "channel" the channels differ from token to token and only their mean is constant.
        lam = inputs.lam / bft.mean_precision(inputs.lam).reshape(2, 7, *[1] * (inputs.lam.ndim - 2)) * constant
        torch.testing.assert_close(weights(lam), alpha, rtol=1e-10, atol=1e-12)
    assert (weights(inputs.lam) - alpha).abs().max() > 0.05


@granularities
@given(seed=seeds, factor=st.floats(1e-3, 1e3), token=st.integers(0, 5))
@bounded
def test_a_tokens_weight_odds_are_proportional_to_its_precision(
    granularity: str, seed: int, factor: float, token: int
) -> None:
    inputs = Attention.random(granularity, seed)

    def odds(lam: Tensor) -> Tensor:
        w = delivered(inputs.query, inputs.key, inputs.value, lam, inputs.visible, granularity)["weights"]
        return w[:, :, token + 1 :, token] / (w.sum(-1) - w[..., token])[:, :, token + 1 :]

    changed = inputs.lam.clone()
    changed[:, token] *= factor
    torch.testing.assert_close(odds(changed), factor * odds(inputs.lam), rtol=1e-9, atol=0)


@all_kinds
def test_vanishing_precision_is_masking(granularity: str, units: str, prior: str) -> None:
    inputs = Attention.random(granularity)
    config = config_of(granularity, units, prior)
    untouched, _ = observe(inputs, config)
    inputs.lam[:, 3] = 1e-280
    vanished, vanished_estimate = observe(inputs, config)
    inputs.lam[:, 3] = 1.0
    inputs.visible = inputs.visible & (torch.arange(7) != 3)
    masked, masked_estimate = observe(inputs, config)
    others = torch.arange(7) != 3
    torch.testing.assert_close(vanished_estimate[:, others], masked_estimate[:, others])
    assert (masked.precision - untouched.precision)[:, 4:].abs().min() > 1e-5
    if prior == "unit":
        torch.testing.assert_close(vanished.precision[:, others], masked.precision[:, others])
    else:
        # w_j / lam_bar_j tends to a share of alpha_j, not to 0: the neighbours' variance remembers such a key.
        assert (vanished.precision[:, 4:] < masked.precision[:, 4:]).all()


# --- Residual variance ------------------------------------------------------------------------------------------------


@granularities
@given(seed=seeds, offset=st.floats(-1e3, 1e3), scale=st.floats(1e-2, 1e2), concentration=st.floats(0.0, 8.0))
@bounded
def test_expanded_square_equals_the_direct_residual(
    granularity: str, seed: int, offset: float, scale: float, concentration: float
) -> None:
    draw = generator(seed)
    weights = (concentration * torch.randn(2, 3, 5, 9, generator=draw, dtype=torch.float64)).softmax(-1)
    value = offset + scale * torch.randn(2, 3, 9, 4, generator=draw, dtype=torch.float64)
    estimate = weights @ value
    direct = (weights[..., None] * (value[:, :, None] - estimate[..., None, :]) ** 2).sum(-2)
    second_moment = weights @ value.square()
    if granularity == "token":
        direct, second_moment = direct.mean(-1), second_moment.mean(-1)
    ours = bft.residual_variance(second_moment.transpose(1, 2), estimate.transpose(1, 2), granularity)
    # The float64 digits that the square of the mean leaves to the variance.
    lost = 1e-15 * float(second_moment.max())
    torch.testing.assert_close(ours, direct.transpose(1, 2), rtol=1e-6, atol=lost)
    assert ours.min() >= 0


def test_token_residual_variance_is_the_mean_over_channels() -> None:
    draw = generator(0)
    weights = torch.rand(1, 2, 3, 5, generator=draw, dtype=torch.float64)
    weights = weights / weights.sum(-1, keepdim=True)
    value = torch.randn(1, 2, 5, 4, generator=draw, dtype=torch.float64) * torch.tensor([1.0, 2.0, 3.0, 4.0])
    estimate, squares = (weights @ value).transpose(1, 2), (weights @ value.square()).transpose(1, 2)
    by_channel = bft.residual_variance(squares, estimate, "channel")
    torch.testing.assert_close(bft.residual_variance(squares.mean(-1), estimate, "token"), by_channel.mean(-1))
    assert (by_channel[..., 3] / by_channel[..., 0]).min() > 2


@pytest.mark.parametrize("units", ["relative", "absolute"])
def test_relative_units_forget_the_scale_of_the_values_and_absolute_units_keep_it(units: str) -> None:
    inputs = Attention.random("token")
    first, _ = observe(inputs, config_of("token", units))
    inputs.value = 10 * inputs.value
    second, _ = observe(inputs, config_of("token", units))
    if units == "relative":
        torch.testing.assert_close(first.precision, second.precision)
        assert second.residual_variance.max() <= 1
    else:
        torch.testing.assert_close(100 * first.residual_variance, second.residual_variance)
        assert (second.precision[:, 1:] < 0.5 * first.precision[:, 1:]).all()


def test_relative_variance_is_zero_without_power_and_has_a_finite_gradient_there() -> None:
    residual = torch.tensor([0.0, 0.5], requires_grad=True)
    second_moment = torch.tensor([0.0, 2.0], requires_grad=True)
    share = bft.relative_variance(residual, second_moment)
    assert share.tolist() == [0.0, 0.25]
    share.sum().backward()
    assert residual.grad is not None
    assert second_moment.grad is not None
    assert residual.grad.tolist() == [0.0, 0.5]
    assert second_moment.grad.tolist() == [0.0, -0.125]


# --- Variance of the estimate -----------------------------------------------------------------------------------------


@given(residual=st.floats(0, 1e4), n=st.floats(1, 1e4), prior=positive, nu0=st.floats(0.1, 10))
@bounded
def test_estimate_variance_is_the_posterior_variance_over_n(
    residual: float, n: float, prior: float, nu0: float
) -> None:
    one = lambda x: torch.full((1, 1, 1), x, dtype=torch.float64)  # noqa: E731
    ours = bft.estimate_variance(one(residual), one(n), one(prior), nu0).item()
    assert ours == pytest.approx((nu0 * prior + n * residual) / (nu0 + n - 1) / n, rel=1e-12)
    unit_information = bft.estimate_variance(one(residual), one(n), one(prior), 1.0).item()
    assert unit_information == pytest.approx(residual / n + prior / n**2, rel=1e-12)
    # However large the count of observations, they outweigh the prior in the end, and not before.
    assert bft.estimate_variance(one(residual), one(2 * n), one(prior), 1.0).item() < unit_information


@all_kinds
def test_one_key_with_all_the_weight_observes_at_the_priors_precision(granularity: str, units: str, prior: str) -> None:
    inputs = Attention.random(granularity)
    # Rows of norm 1: absolute units then neither shrink nor swell on the way through the output projection.
    inputs.output_weight = torch.eye(12, 24, dtype=torch.float64)
    ours, _ = observe(inputs, config_of(granularity, units, prior))
    prior_precision = torch.ones(2, dtype=torch.float64) if prior == "unit" else bft.mean_precision(inputs.lam)[:, 0]
    expected = prior_precision if granularity == "token" else prior_precision[:, None].expand(2, 12)
    torch.testing.assert_close(ours.precision[:, 0], expected)
    assert (ours.precision[:, 1:].reshape(2, 6, -1).mean(-1) - expected.reshape(2, -1)[:, :1]).abs().min() > 1e-3


def test_residual_over_n_minus_one_is_an_unbiased_variance_of_the_estimate() -> None:
    """Fixed weights, 40,000 sets of iid values: the mean lies within 2 % of sigma^2 sum w^2, the usual forms do not."""
    draw = generator(0)
    weights = torch.tensor([0.5, 0.2, 0.1, 0.1, 0.05, 0.05], dtype=torch.float64)
    value = 3 + 2 * torch.randn(40_000, 6, generator=draw, dtype=torch.float64)
    truth = 4 * float(weights.square().sum())
    estimate = value @ weights
    assert estimate.var().item() == pytest.approx(truth, rel=0.02)
    second_moment = value.square() @ weights
    residual = bft.residual_variance(second_moment[:, None, None], estimate[:, None, None, None], "token")
    n = torch.full_like(residual, 1 / float(weights.square().sum()))
    # A prior worth next to nothing leaves RSS / (n - 1).
    assert bft.estimate_variance(residual, n, 1.0, 1e-9).mean().item() == pytest.approx(truth, rel=0.02)
    assert abs((residual / n).mean().item() / truth - 1) > 0.2
    assert abs((residual / (6 - 1)).mean().item() / truth - 1) > 0.2


def test_concentrating_attention_does_not_send_the_observation_precision_to_infinity() -> None:
    value = torch.tensor([1.0, -1.0, 0.5, 2.0], dtype=torch.float64)
    textbook, ours = [], []
    for sharpness in (1.0, 10.0, 30.0):
        weights = (sharpness * torch.tensor([1.0, 0.5, 0.2, 0.0], dtype=torch.float64)).softmax(-1)
        estimate, second_moment = (weights @ value).view(1, 1, 1, 1), (weights @ value.square()).view(1, 1, 1)
        n = (1 / weights.square().sum()).view(1, 1, 1)
        seen = bft.observe(
            estimate, second_moment, n, config_of("token", "absolute"), output_weight=torch.ones(1, 1).double()
        )
        ours.append(seen.precision.item())
        textbook.append(3 / seen.residual_variance.item())
    assert textbook[2] > 1e5
    assert ours[2] == pytest.approx(1.0, rel=1e-4)
    assert ours[0] > ours[1] > ours[2]


# --- Heads ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("granularity", "units"),
    [("token", "relative"), ("token", "absolute"), ("channel", "relative"), ("channel", "absolute")],
)
def test_heads_are_combined_as_variances_and_not_as_precisions(granularity: str, units: str) -> None:
    draw = generator(1)
    shape = (1, 2, 3) if granularity == "token" else (1, 2, 3, 4)
    variance = torch.rand(*shape, generator=draw, dtype=torch.float64) + 0.01
    output_weight = torch.randn(5, 12, generator=draw, dtype=torch.float64)
    moment = torch.rand(*shape, generator=draw, dtype=torch.float64)
    combine = lambda x: bft.combine_heads(x, granularity, units, output_weight, moment)  # noqa: E731
    combined = combine(variance)
    # One loop a formula, straight from the method.
    for token in range(2):
        for channel in range(5 if granularity == "channel" else 1):
            terms = []
            for head, d in itertools.product(range(3), range(4)):
                if granularity == "channel":
                    share = output_weight[channel, 4 * head + d] ** 2
                    terms.append((share, moment[0, token, head, d], variance[0, token, head, d]))
                else:
                    share = (output_weight[:, 4 * head + d] ** 2).sum() / 5
                    terms.append((share, torch.tensor(1.0), variance[0, token, head]))
            if (granularity, units) == ("token", "relative"):
                expected = variance[0, token].sum() / 3
            elif units == "absolute":
                expected = torch.stack([a * v for a, _, v in terms]).sum()
            else:
                expected = sum(a * m * v for a, m, v in terms) / sum(a * m for a, m, _ in terms)
            got = combined[0, token] if granularity == "token" else combined[0, token, channel]
            torch.testing.assert_close(got, expected)
    assert (1 / combine(1 / variance) - combined).abs().min() > 1e-3


@pytest.mark.parametrize("units", ["relative", "absolute"])
def test_a_channel_hears_only_the_heads_that_write_to_it(units: str) -> None:
    variance = torch.tensor([0.2, 0.8], dtype=torch.float64).view(1, 1, 2, 1)
    moment = torch.ones_like(variance)
    output_weight = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    combined = bft.combine_heads(variance, "channel", units, output_weight, moment).flatten().tolist()
    assert combined == pytest.approx([0.2, 0.8, 0.5 if units == "relative" else 1.0])


# --- Finiteness -------------------------------------------------------------------------------------------------------


@all_kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["one key", "masked rows", "equal values", "no values", "large values", "far mean"])
def test_everything_stays_finite_in_the_forward_and_the_backward(
    granularity: str, units: str, prior: str, dtype: torch.dtype, case: str
) -> None:
    """Values as a model of that dtype holds them, the filter in float32."""
    inputs = Attention.random(granularity, masked_rows=3 if case == "masked rows" else 0)
    if case == "one key":
        inputs.visible = torch.eye(7, dtype=torch.bool).expand(2, 7, 7)
    elif case == "equal values":
        inputs.value[:] = inputs.value[:1, :, :1]
    elif case == "no values":
        inputs.value[:] = 0
    elif case == "large values":
        inputs.value *= 6e4 / inputs.value.abs().max()
    elif case == "far mean":
        inputs.value = 1000 + inputs.value
    inputs.value = inputs.value.to(dtype)
    inputs = inputs.to(torch.float32)
    leaves = inputs.leaves()
    seen, _ = observe(inputs, config_of(granularity, units, prior))
    gain, updated = bft.update(inputs.lam, seen.precision)
    predicted = bft.predict(updated, 0.1, torch.ones(1))
    for quantity in (*seen, gain, updated, predicted):
        assert quantity.isfinite().all()
    assert seen.residual_variance.min() >= 0
    assert gain.min() >= 0
    assert gain.max() <= 1
    (gain.sum() + predicted.sum()).backward()
    for name, leaf in leaves.items():
        assert leaf.grad is None or leaf.grad.isfinite().all(), name
    assert leaves["lam"].grad is not None
    assert leaves["lam"].grad.abs().max() > 0
    if case == "masked rows":
        assert gain[1, :3].abs().max() == 0
        assert torch.equal(updated[1, :3], inputs.lam[1, :3])
        assert gain[1, 3:].min() > 0
    if case in ("one key", "equal values", "no values"):
        assert seen.residual_variance.max() < (1e-5 if units == "relative" else 1e-4)


# --- Update and predict -----------------------------------------------------------------------------------------------


@given(lam=positive, observed=positive, factor=st.floats(1.01, 100))
@bounded
def test_gain_lies_in_the_unit_interval_falls_with_lam_and_rises_with_the_observation(
    lam: float, observed: float, factor: float
) -> None:
    one = lambda x: torch.tensor([[x]], dtype=torch.float64)  # noqa: E731
    gain, updated = bft.update(one(lam), one(observed))
    assert 0 <= gain.item() <= 1
    assert gain.item() == pytest.approx(observed / (lam + observed), rel=1e-12)
    assert updated.item() == pytest.approx(lam + observed, rel=1e-12)
    assert bft.update(one(lam * factor), one(observed))[0] < gain
    assert bft.update(one(lam), one(observed * factor))[0] > gain


@given(lam=st.floats(1e-30, 1e30), observed=st.floats(1e-30, 1e30))
@bounded
def test_gain_lies_in_the_unit_interval_over_the_range_of_float32(lam: float, observed: float) -> None:
    gain, updated = bft.update(torch.tensor([[lam]]), torch.tensor([[observed]]))
    assert 0 <= gain.item() <= 1
    assert updated.item() >= max(torch.tensor(lam).item(), torch.tensor(observed).item())
    assert bft.update(torch.tensor([[lam]]), torch.zeros(1, 1))[0].item() == 0


@given(lam=st.floats(1e-6, 1e20), jacobian=st.floats(-50, 50), noise=st.floats(1e-4, 1e4))
@bounded
def test_predicted_precision_never_exceeds_one_over_the_process_noise(
    lam: float, jacobian: float, noise: float
) -> None:
    lam_, jacobian_, noise_ = (torch.tensor([[x]]) for x in (lam, jacobian, noise))
    predicted = bft.predict(lam_, jacobian_, noise_[0])
    assert 0 <= predicted.item() <= (1 / noise_).item()
    double = bft.predict(lam_.double(), jacobian_.double(), noise_[0].double())
    assert double.item() == pytest.approx(1 / ((1 + jacobian_.item()) ** 2 / lam_.item() + noise_.item()), rel=1e-9)


def test_prediction_reaches_its_bound_at_a_jacobian_of_minus_one_and_only_there() -> None:
    lam = torch.full((1, 3), 2.0, dtype=torch.float64)
    jacobian = torch.tensor([[-1.0, 0.0, 1.0]], dtype=torch.float64)
    predicted = bft.predict(lam, jacobian, torch.tensor([0.25], dtype=torch.float64))
    assert predicted[0].tolist() == pytest.approx([4.0, 1 / 0.75, 1 / 2.25])


def test_process_noise_of_one_value_a_channel_reaches_its_channel() -> None:
    lam = torch.ones(2, 3, 4, dtype=torch.float64)
    noise = torch.tensor([0.5, 1.0, 2.0, 4.0], dtype=torch.float64)
    predicted = bft.predict(lam, torch.zeros_like(lam), noise)
    torch.testing.assert_close(predicted, (1 / (1 + noise)).expand(2, 3, 4))


@given(lam=positive, jacobian=st.floats(-0.9, 5), noise=positive, factor=st.floats(1.5, 100))
@bounded
def test_prediction_rises_with_lam_and_falls_with_process_noise(
    lam: float, jacobian: float, noise: float, factor: float
) -> None:
    one = lambda x: torch.tensor([[x]], dtype=torch.float64)  # noqa: E731
    predicted = bft.predict(one(lam), one(jacobian), one(noise))
    assert bft.predict(one(lam * factor), one(jacobian), one(noise)) > predicted
    assert bft.predict(one(lam), one(jacobian), one(noise * factor)) < predicted


@pytest.mark.parametrize("units", ["relative", "absolute"])
@granularities
def test_a_vague_start_and_large_process_noise_bring_the_gain_to_one(granularity: str, units: str) -> None:
    """Two steps of the filter: the start value rules the first gain, the process noise the second."""

    def gains(tau: float, noise: float) -> list[Tensor]:
        inputs, out = Attention.random(granularity), []
        inputs.lam = torch.full_like(inputs.lam, tau)
        for _ in range(2):
            seen, _ = observe(inputs, config_of(granularity, units))
            gain, updated = bft.update(inputs.lam, seen.precision)
            inputs.lam = bft.predict(updated, 0.2, torch.tensor([noise], dtype=torch.float64))
            out.append(gain)
        return out

    distances = [[1 - float(gain.min()) for gain in gains(1 / scale, scale)] for scale in (1.0, 1e2, 1e4, 1e6)]
    for coarse, fine in itertools.pairwise(distances[1:]):
        assert fine[0] < coarse[0] / 5
        assert fine[1] < coarse[1] / 5
    assert max(distances[0]) > 0.3
    assert max(distances[3]) < 1e-4
    # Each of the two alone is not enough.
    assert 1 - float(gains(1.0, 1e6)[0].min()) > 0.3
    assert 1 - float(gains(1e-6, 1.0)[1].min()) > 0.2


def test_with_the_neighbours_prior_a_vague_start_leaves_the_gain_at_a_function_of_n() -> None:
    """Equal values and precisions: 1 / lam_obs = mean over heads of 1 / (n^2 lam), so K = n^2 / (1 + n^2) for one."""
    for tau in (1e-6, 1e-2):
        inputs = Attention.random("token")
        inputs.value[:] = inputs.value[:, :, :1]
        inputs.lam = torch.full_like(inputs.lam, tau)
        seen, _ = observe(inputs, config_of("token", prior="neighbours"))
        gain, _ = bft.update(inputs.lam, seen.precision)
        variance = (1 / seen.effective_sample_size**2).mean(-1)
        torch.testing.assert_close(gain, 1 / (1 + variance))
        torch.testing.assert_close(gain[:, 0], torch.full_like(gain[:, 0], 0.5))
        unit, _ = observe(inputs, config_of("token"))
        assert (bft.update(inputs.lam, unit.precision)[0] - gain).abs().max() > 0.4


# --- Jacobian ---------------------------------------------------------------------------------------------------------


@dataclass
class FeedForward:
    """A gated FFN behind an RMSNorm with a residual stream to feed it."""

    hidden: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    norm: Tensor
    activation: Callable[[Tensor], Tensor]

    @classmethod
    def random(cls, activation: Callable[[Tensor], Tensor], seed: int = 0) -> FeedForward:
        draw = generator(seed)
        normal = lambda *shape: torch.randn(*shape, generator=draw, dtype=torch.float64)  # noqa: E731
        return cls(normal(2, 3, 5), normal(7, 5), normal(7, 5), normal(5, 7), 1 + 0.5 * normal(5), activation)

    def ours(self, granularity: str) -> Tensor:
        inverse_rms = rms_norm(self.hidden, self.norm, 1e-5)[1]
        x = self.norm * self.hidden * inverse_rms
        coefficients = bft.gated_jacobian_coefficients(self.gate, self.up, self.down, self.norm, granularity)
        return bft.gated_jacobian(
            x @ self.gate.T, x @ self.up.T, self.activation, *coefficients, inverse_rms.squeeze(-1)
        )

    def autograd(self, granularity: str, hold_scale: bool = True) -> Tensor:
        def step(one: Tensor, scale: Tensor) -> Tensor:
            if not hold_scale:
                scale = rms_norm(one, self.norm, 1e-5)[1]
            x = self.norm * one * scale
            return (self.activation(x @ self.gate.T) * (x @ self.up.T)) @ self.down.T

        scale = rms_norm(self.hidden, self.norm, 1e-5)[1]
        full = torch.func.vmap(torch.func.jacrev(step))(self.hidden.flatten(0, 1), scale.flatten(0, 1))
        diagonal = full.diagonal(dim1=-2, dim2=-1).unflatten(0, self.hidden.shape[:2])
        return diagonal.mean(-1) if granularity == "token" else diagonal

    def leaves(self) -> list[Tensor]:
        for name in ("hidden", "gate", "up", "down", "norm"):
            setattr(self, name, getattr(self, name).detach().clone().requires_grad_())
        return [self.hidden, self.gate, self.up, self.down, self.norm]


activations = pytest.mark.parametrize(
    "activation", [functional.silu, torch.nn.SiLU(), functional.gelu, torch.tanh], ids=["silu", "SiLU", "gelu", "tanh"]
)


@activations
@granularities
def test_jacobian_equals_autograd_with_the_norm_scale_held(
    granularity: str, activation: Callable[[Tensor], Tensor]
) -> None:
    ffn = FeedForward.random(activation)
    ours = ffn.ours(granularity)
    assert relative_error(ours, ffn.autograd(granularity)) < 1e-12
    assert relative_error(ours, ffn.autograd(granularity, hold_scale=False)) > 0.05


@granularities
def test_jacobian_equals_the_oracles(granularity: str) -> None:
    ffn = FeedForward.random(functional.silu, seed=4)
    weights = {
        "mlp.gate_proj.weight": ffn.gate,
        "mlp.up_proj.weight": ffn.up,
        "mlp.down_proj.weight": ffn.down,
        "post_attention_layernorm.weight": ffn.norm,
    }
    oracle = jacobian_diagonal(ffn.hidden, weights, 1e-5)
    assert relative_error(ffn.ours(granularity), oracle.mean(-1) if granularity == "token" else oracle) < 1e-12
    assert oracle.std(-1).min() > 0.1


@activations
@granularities
def test_a_differentiated_jacobian_has_autograds_gradients(
    granularity: str, activation: Callable[[Tensor], Tensor]
) -> None:
    ffn = FeedForward.random(activation, seed=2)
    leaves = ffn.leaves()
    cotangent = torch.randn(ffn.ours(granularity).shape, generator=generator(9), dtype=torch.float64)
    ours = torch.autograd.grad((ffn.ours(granularity) * cotangent).sum(), leaves)
    reference = torch.autograd.grad((ffn.autograd(granularity) * cotangent).sum(), leaves)
    for one, other in zip(ours, reference, strict=True):
        assert other.abs().max() > 0
        assert relative_error(one, other) < 1e-9


@activations
def test_value_and_slope_gives_both_with_and_without_recording(activation: Callable[[Tensor], Tensor]) -> None:
    x = torch.linspace(-6, 6, 41, dtype=torch.float64)
    expected = torch.func.vmap(torch.func.grad(activation))(x)
    with torch.no_grad():
        value, slope = bft.value_and_slope(activation, x)
    torch.testing.assert_close(value, activation(x))
    torch.testing.assert_close(slope, expected)
    assert not slope.requires_grad
    with torch.inference_mode():
        torch.testing.assert_close(bft.value_and_slope(activation, x * 1), (value, slope))
    tracked = bft.value_and_slope(activation, x.clone().requires_grad_())
    torch.testing.assert_close(tracked[1], expected)
    assert all(part.requires_grad for part in tracked)


# --- Gradients --------------------------------------------------------------------------------------------------------

GRADIENT_TOLERANCE = 1e-8


def observation_gradients(seen: Any, estimate: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor | None]:
    """Gradients of a fixed random functional of the observation precision and the estimate (B, T, H, D)."""
    draw = generator(11)
    mix = lambda x: (torch.randn(x.shape, generator=draw, dtype=torch.float64) * x).sum()  # noqa: E731
    loss = mix(seen.precision) + 0.1 * mix(estimate)
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()), allow_unused=True), strict=True))


@all_kinds
def test_observation_gradients_equal_the_oracles(granularity: str, units: str, prior: str) -> None:
    inputs = Attention.random(granularity, masked_rows=2)
    leaves = inputs.leaves()
    seen, estimate = observe(inputs, config_of(granularity, units, prior))
    ours = observation_gradients(seen, estimate, leaves)
    oracle_seen = oracle_observe(inputs, settings_of(granularity, units, prior))
    oracle = observation_gradients(oracle_seen, oracle_seen.estimate.transpose(1, 2), leaves)
    assert ours["output_weight"] is None
    assert oracle["output_weight"] is None
    for name in ("query", "key", "value", "lam"):
        assert oracle[name].abs().max() > 1e-3
        assert relative_error(ours[name], oracle[name]) < GRADIENT_TOLERANCE, name


@all_kinds
@pytest.mark.parametrize("detached", ["effective_sample_size", "second_moment", "neighbour_variance"])
def test_the_gradient_check_sees_whatever_is_cut_from_the_graph(
    granularity: str, units: str, prior: str, detached: str
) -> None:
    """The twin of the equality above: each of n, the second moment and the neighbours' variance carries gradient."""
    inputs = Attention.random(granularity)
    leaves = inputs.leaves()
    config = config_of(granularity, units, prior)
    whole = observation_gradients(*observe(inputs, config), leaves)
    cut = observation_gradients(*observe(inputs, config, detached), leaves)
    differs = max(relative_error(cut[name], whole[name]) for name in ("query", "key", "value", "lam"))
    if detached == "neighbour_variance" and prior == "unit":
        assert differs == 0
    else:
        assert differs > 1e-3


class TwoLayers:
    """Two Llama layers' tensors and the filter's parameters as leaves, every dimension small and unlike the others."""

    def __init__(self, granularity: str) -> None:
        draw = generator(21)
        normal = lambda *shape: 0.5 * torch.randn(*shape, generator=draw, dtype=torch.float64)  # noqa: E731
        channels, ffn, head_dim, heads, groups = 12, 10, 4, 4, 2
        self.heads, self.groups, self.head_dim, self.rms_norm_eps = heads, groups, head_dim, 1e-5
        self.rope_parameters = {"rope_theta": 100.0}
        self.layers = [
            {
                "input_layernorm.weight": 1 + normal(channels),
                "self_attn.q_proj.weight": 2 * normal(heads * head_dim, channels),
                "self_attn.k_proj.weight": normal(groups * head_dim, channels),
                "self_attn.v_proj.weight": normal(groups * head_dim, channels),
                "self_attn.o_proj.weight": normal(channels, heads * head_dim),
                "post_attention_layernorm.weight": 1 + normal(channels),
                "mlp.gate_proj.weight": normal(ffn, channels),
                "mlp.up_proj.weight": normal(ffn, channels),
                "mlp.down_proj.weight": normal(channels, ffn),
            }
            for _ in range(2)
        ]
        self.hidden = normal(2, 6, channels)
        shape = (1,) if granularity == "token" else (channels,)
        self.log_tau, self.log_noise = normal(1), 0.3 + normal(*shape)
        self.granularity = granularity
        mask = torch.ones(2, 6, dtype=torch.long)
        mask[1, :2] = 0
        self.visible, self.positions = causal_visibility(6, mask), torch.arange(6).expand(2, 6)
        self.shape = (2, 6) if granularity == "token" else (2, 6, channels)

    def leaves(self) -> dict[str, Tensor]:
        named = {"hidden": self.hidden, "log_tau": self.log_tau, "log_noise": self.log_noise}
        for i, layer in enumerate(self.layers):
            named |= {f"{i}.{name}": tensor for name, tensor in layer.items()}
        for tensor in named.values():
            tensor.requires_grad_()
        return named

    def oracle(self, settings: Settings) -> tuple[Tensor, Tensor]:
        hidden, lam = self.hidden, self.log_tau.exp().expand(self.shape)
        for i, layer in enumerate(self.layers):
            step = reference_layer(
                hidden,
                lam,
                layer,
                self,
                settings,
                position_ids=self.positions,
                visible=self.visible,
                process_noise=self.log_noise.exp() if i == 0 else None,
            )
            hidden, lam = step.hidden_states, step.next_precision
        return hidden, lam

    def ours(self, config: BFTConfig) -> tuple[Tensor, Tensor]:
        hidden, lam = self.hidden, self.log_tau.exp().expand(self.shape)
        for i, layer in enumerate(self.layers):
            weight = lambda name, layer=layer: layer[f"{name}.weight"]  # noqa: E731
            normed = rms_norm(hidden, weight("input_layernorm"), 1e-5)[0]
            query, key, value = (
                (normed @ weight(f"self_attn.{x}_proj").T).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
                for x in "qkv"
            )
            query, key = rotate(query, self.positions, 100.0), rotate(key, self.positions, 100.0)
            got = delivered(query, key, value, lam, self.visible, self.granularity)
            got.pop("weights")
            output_weight = weight("self_attn.o_proj")
            seen = bft.observe(**got, config=config, output_weight=output_weight)
            gain, updated = bft.update(lam, seen.precision)
            attended = got["estimate"].flatten(2) @ output_weight.T
            hidden = hidden + (gain if gain.ndim == 3 else gain.unsqueeze(-1)) * attended
            normed, inverse_rms = rms_norm(hidden, weight("post_attention_layernorm"), 1e-5)
            gate, up = normed @ weight("mlp.gate_proj").T, normed @ weight("mlp.up_proj").T
            if i == 0:
                jacobian = self.jacobian(layer, gate, up, inverse_rms.squeeze(-1))
                if not config.differentiate_jacobian:
                    jacobian = jacobian.detach()
                lam = bft.predict(updated, jacobian, self.log_noise.exp())
            else:
                lam = updated
            hidden = hidden + (functional.silu(gate) * up) @ weight("mlp.down_proj").T
        return hidden, lam

    def jacobian(self, layer: dict[str, Tensor], gate: Tensor, up: Tensor, inverse_rms: Tensor) -> Tensor:
        names = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "post_attention_layernorm")
        tensors = [layer[f"{name}.weight"] for name in names]
        coefficients = bft.gated_jacobian_coefficients(*tensors, self.granularity)
        return bft.gated_jacobian(gate, up, functional.silu, *coefficients, inverse_rms)


def two_layer_gradients(result: tuple[Tensor, Tensor], leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    draw = generator(12)
    loss = sum((torch.randn(x.shape, generator=draw, dtype=torch.float64) * x).sum() for x in result)
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


@all_kinds
@pytest.mark.parametrize("differentiate", [False, True], ids=["held-jacobian", "differentiated-jacobian"])
def test_gradients_through_two_layers_equal_the_oracles(
    granularity: str, units: str, prior: str, differentiate: bool
) -> None:
    """Hidden states, tau, Q and every weight, with a left-padded row in the batch."""
    model = TwoLayers(granularity)
    leaves = model.leaves()
    ours = model.ours(config_of(granularity, units, prior, differentiate_jacobian=differentiate))
    oracle = model.oracle(settings_of(granularity, units, prior, differentiate_jacobian=differentiate))
    for one, other in zip(ours, oracle, strict=True):
        assert relative_error(one, other) < 1e-11
    gradients, expected = two_layer_gradients(ours, leaves), two_layer_gradients(oracle, leaves)
    for name, gradient in expected.items():
        assert gradient.abs().max() > 1e-6, name
        assert relative_error(gradients[name], gradient) < GRADIENT_TOLERANCE, name


@granularities
def test_holding_the_jacobian_changes_the_gradients_and_not_the_values(granularity: str) -> None:
    model = TwoLayers(granularity)
    leaves = model.leaves()
    held, free = (model.ours(config_of(granularity, differentiate_jacobian=choice)) for choice in (False, True))
    assert torch.equal(held[0], free[0])
    gradients = [two_layer_gradients(result, leaves) for result in (held, free)]
    assert relative_error(gradients[0]["0.mlp.gate_proj.weight"], gradients[1]["0.mlp.gate_proj.weight"]) > 1e-3
    assert relative_error(gradients[0]["hidden"], gradients[1]["hidden"]) > 1e-3


# --- Probes -----------------------------------------------------------------------------------------------------------


def signs(layer: int = 0, positions: Tensor | None = None, heads: int = 3, probes: int = 8) -> Tensor:
    return bft.probe_signs(layer, torch.arange(64)[None] if positions is None else positions, heads, probes)


def agreement(one: Tensor, other: Tensor) -> float:
    return float((one == other).float().mean())


def test_signs_are_float32_plus_and_minus_ones_in_the_order_of_the_values() -> None:
    positions = torch.arange(10).expand(2, 10)
    r = bft.probe_signs(3, positions, 5, 7)
    assert r.shape == (2, 5, 10, 7)
    assert r.dtype == torch.float32
    assert set(r.unique().tolist()) == {-1.0, 1.0}
    assert torch.equal(r, bft.probe_signs(3, positions, 5, 7))


def test_signs_follow_the_position_and_not_the_slot() -> None:
    alone = signs(positions=torch.arange(6)[None])
    padded = signs(positions=torch.tensor([[1, 1, 1, 0, 1, 2, 3, 4, 5]]))
    assert torch.equal(padded[:, :, 3:], alone)
    assert torch.equal(signs(positions=torch.tensor([[5, 0, 3]])), alone[:, :, [5, 0, 3]])
    assert not torch.equal(padded[:, :, :6], alone)
    both = signs(positions=torch.tensor([[0, 1, 2], [3, 4, 5]]))
    assert torch.equal(both[1], alone[0, :, 3:])


def test_more_heads_or_probes_leave_the_first_ones_as_they_were() -> None:
    assert torch.equal(signs(heads=8)[:, :3], signs(heads=3))
    assert torch.equal(signs(probes=16)[..., :8], signs(probes=8))


def test_signs_differ_between_heads_layers_probes_and_positions() -> None:
    """Any two agree in about half of 2,048 places: within 5 standard deviations of .011."""
    positions = torch.arange(2048)[None]
    by_layer = {layer: bft.probe_signs(layer, positions, 3, 4) for layer in (0, 1, 2, 29)}
    streams = [
        by_layer[layer][0, head, :, probe] for layer, head, probe in itertools.product(by_layer, range(3), range(4))
    ]
    for one, other in itertools.combinations(streams, 2):
        assert agreement(one, other) == pytest.approx(0.5, abs=0.055)
    for stream in streams:
        assert float(stream.mean()) == pytest.approx(0.0, abs=0.11)
        for shift in (1, 2, 7, 64):
            assert agreement(stream[shift:], stream[:-shift]) == pytest.approx(0.5, abs=0.055)


def test_signs_are_the_ones_that_saved_models_were_trained_with() -> None:
    """Written down once: another hash would change what every saved checkpoint computes."""
    r = bft.probe_signs(3, torch.tensor([[0, 1, 2, 1000]]), 2, 4)
    written = ["".join("+" if x > 0 else "-" for x in row) for row in r[0].flatten(0, 1).tolist()]
    assert written == ["+--+", "+++-", "-+++", "-+--", "++--", "++-+", "-+--", "--+-"]


def projections(weights: Tensor, layers: int, heads: int, probes: int) -> Tensor:
    """sum_j w_j r_j for weights (S,) at positions 0, 1, ... as (layers * heads, probes)."""
    positions = torch.arange(len(weights))[None]
    return torch.cat(
        [torch.einsum("s,hsm->hm", weights, bft.probe_signs(i, positions, heads, probes)[0]) for i in range(layers)]
    )


def test_probes_are_exact_when_one_key_has_all_the_weight() -> None:
    weights = torch.zeros(9)
    weights[4] = 1.0
    n = bft.probe_effective_sample_size(projections(weights, 3, 4, 5), 9)
    assert torch.equal(n, torch.ones(12))
    weights[4], weights[5] = 0.9, 0.1
    n = bft.probe_effective_sample_size(projections(weights, 3, 4, 5), 9)
    assert (n - 1 / 0.82).abs().max() > 0.01


@pytest.mark.parametrize("spread", [0.0, 1.0, 3.0])
def test_squared_projections_are_unbiased_for_the_sum_of_squared_weights(spread: float) -> None:
    """48,000 probes whose squares have a relative deviation below sqrt(2): the mean within 3 % is over 4 deviations."""
    weights = (spread * torch.randn(40, generator=generator(3))).softmax(-1)
    truth = float(weights.square().sum())
    squares = projections(weights, 750, 4, 16).square()
    assert float(squares.mean()) == pytest.approx(truth, rel=0.03)
    assert spread == 0 or truth > 1.5 / 40


def test_a_heads_estimate_deviates_by_the_root_of_two_over_the_number_of_probes() -> None:
    weights = torch.full((64,), 1 / 64)
    for probes in (2, 8, 30):
        p = projections(weights, 1000, 4, probes).square().mean(-1)
        assert float(p.std() / p.mean()) == pytest.approx((2 / probes) ** 0.5, rel=0.08)


@given(seed=seeds, keys=st.integers(1, 50), scale=st.floats(0, 10))
@bounded
def test_probed_sample_size_lies_between_one_and_the_number_of_keys(seed: int, keys: int, scale: float) -> None:
    p = scale * torch.randn(6, 4, generator=generator(seed))
    n = bft.probe_effective_sample_size(p, keys)
    assert n.min() >= 1
    assert n.max() <= keys * (1 + 1e-6)
    expected = (1 / p.double().square().mean(-1)).clamp(1, keys)
    torch.testing.assert_close(n.double(), expected, rtol=1e-5, atol=0)


def test_probed_sample_size_takes_a_number_of_keys_for_each_query() -> None:
    nothing = torch.zeros(2, 3, 4)
    n = bft.probe_effective_sample_size(nothing, torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
    torch.testing.assert_close(n, torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))


def test_probed_sample_size_carries_gradient_between_its_bounds_only() -> None:
    p = torch.tensor([[0.5, 0.3], [2.0, 2.0], [0.01, 0.01]], dtype=torch.float64, requires_grad=True)
    n = bft.probe_effective_sample_size(p, 20)
    n.sum().backward()
    assert p.grad is not None
    mean_square = (0.25 + 0.09) / 2
    torch.testing.assert_close(p.grad[0], -torch.tensor([0.5, 0.3], dtype=torch.float64) / mean_square**2)
    assert p.grad[1:].abs().max() == 0


@all_kinds
def test_probed_observation_and_its_gradients_equal_the_oracles(granularity: str, units: str, prior: str) -> None:
    inputs = Attention.random(granularity)
    leaves = inputs.leaves()
    r = bft.probe_signs(2, torch.arange(7).expand(2, 7), 2, 6).double()
    got = delivered(inputs.query, inputs.key, inputs.value, inputs.lam, inputs.visible, granularity)
    projected = got.pop("weights") @ r.repeat_interleave(2, 1)
    n = bft.probe_effective_sample_size(projected, inputs.visible.sum(-1)[:, None])
    exact = got.pop("effective_sample_size")
    seen = bft.observe(
        **got,
        effective_sample_size=n.transpose(1, 2),
        config=config_of(granularity, units, prior),
        output_weight=inputs.output_weight,
    )
    settings = replace(settings_of(granularity, units, prior), effective_sample_size="probe")
    oracle_seen = attention_observation(
        inputs.query,
        inputs.key,
        inputs.value,
        inputs.lam,
        settings=settings,
        output_weight=inputs.output_weight,
        visible=inputs.visible,
        signs=r,
    )
    torch.testing.assert_close(seen.precision, oracle_seen.precision, rtol=1e-10, atol=0)
    ours = observation_gradients(seen, got["estimate"], leaves)
    oracle = observation_gradients(oracle_seen, oracle_seen.estimate.transpose(1, 2), leaves)
    for name in ("query", "key", "value", "lam"):
        assert relative_error(ours[name], oracle[name]) < GRADIENT_TOLERANCE, name
    assert (n.transpose(1, 2) - exact).abs().max() > 0.1
