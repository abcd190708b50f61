"""The sandwich estimator's pure functions: against direct forms, against softmax's estimator, and against chance."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from bft_hf import filter, sandwich
from bft_hf.config import BFTConfig

bounded = settings(derandomize=True, max_examples=25, deadline=None)


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def causal(tokens: int) -> Tensor:
    return torch.ones(1, tokens, tokens, dtype=torch.bool).tril()


@bounded
@given(st.integers(0, 1000), st.floats(1e-6, 1e6))
def test_equal_precisions_change_no_weight(seed: int, precision: float) -> None:
    weights, shares = draw(seed, 2, 3, 5, 5).tril(), sandwich.equal_shares(causal(5), torch.float64)
    unit = torch.eye(5, dtype=torch.float64).expand(
        2, 3, 5, 5
    )  # of these values the estimate is the weights themselves
    lam = torch.full((2, 5), precision, dtype=torch.float64)
    assert_close(sandwich.kriging_estimate(weights, unit, shares, lam), weights)
    lam[:, 1] *= 3
    kriging = sandwich.kriging_estimate(weights, unit, shares, lam)
    odds = (kriging[..., 1] / kriging[..., 0]) / (weights[..., 1] / weights[..., 0])
    assert_close(odds[..., 1:], torch.full_like(odds[..., 1:], 3))


@bounded
@given(st.integers(0, 1000), st.sampled_from(["token", "channel"]))
def test_moments_by_the_direct_form(seed: int, granularity: str) -> None:
    plain, value, lam = draw(seed, 2, 3, 5, 5).tril(), draw(seed + 1, 2, 3, 5, 4) + 2, draw(seed + 2, 2, 5).exp()
    shares = sandwich.equal_shares(causal(5), torch.float64)
    moments = sandwich.moments(plain, value, shares, granularity, lam)
    means = torch.stack([lam[:, : t + 1].mean(1) for t in range(5)], dim=1)
    weights = plain * lam[:, None, None, :] / means[:, None, :, None]
    assert_close(sandwich.kriging_estimate(plain, value, shares, lam), weights @ value)
    for t in range(5):
        seen, square = value[:, :, : t + 1], weights[:, :, t, : t + 1].square()
        mean = seen.mean(2, keepdim=True)
        share = (square / square.sum(-1, keepdim=True)).unsqueeze(-1)
        residual, power = (share * (seen - mean).square()).sum(2), mean.squeeze(2).square()
        if granularity == "token":
            residual, power = residual.mean(-1), power.mean(-1)
        assert_close(moments.residual_variance[:, t], residual, rtol=1e-6, atol=1e-13)
        assert_close(moments.second_moment[:, t], residual + power)
        size = weights[:, :, t].abs().sum(-1)
        assert_close(moments.mass[:, t], size)
        assert_close(moments.effective_sample_size[:, t], size.square() / square.sum(-1))


@pytest.mark.parametrize("granularity", ["token", "channel"])
@pytest.mark.parametrize("units", ["relative", "absolute"])
def test_equal_weights_observe_what_softmax_attention_does(granularity: str, units: str) -> None:
    """With weights of 1 / n the plain mean is the estimate, so both estimators have to agree."""
    config = BFTConfig.unit(granularity=granularity, observation_units=units, prior_degrees_of_freedom=2.5)
    visible, value, output_weight = causal(5), draw(0, 2, 3, 5, 4), draw(1, 12, 12)
    weights = (visible / visible.sum(-1, keepdim=True)).double().unsqueeze(1).expand(2, 3, -1, -1)
    estimate = weights @ value
    second = weights @ (value.square() if granularity == "channel" else value.square().mean(-1, keepdim=True))
    softmax = filter.observe(
        estimate.transpose(1, 2),
        second.transpose(1, 2) if granularity == "channel" else second.squeeze(-1).transpose(1, 2),
        1 / weights.square().sum(-1).transpose(1, 2),
        config,
        output_weight=output_weight,
    )
    moments = sandwich.moments(weights, value, sandwich.equal_shares(visible, torch.float64), granularity)
    ones = torch.ones(2, 5, 3, 4, dtype=torch.float64)
    pointwise = sandwich.observe(moments, config, ones, output_weight)
    for ours, theirs in zip(pointwise, softmax, strict=True):
        assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    scaled = sandwich.observe(moments, config, 2 * ones, output_weight)
    share = 0.25 if units == "absolute" else 1.0
    assert_close(scaled.precision, share * pointwise.precision)


@pytest.mark.parametrize("mean", [0.0, 3.0])
def test_the_residual_variance_is_right_on_average(mean: float) -> None:
    """E R = sigma^2 (1 - 1/n) for independent values, wherever their mean lies; about the weighted sum it is not."""
    weights = torch.tensor([0.4, -0.05, 0.3, 0.02, 0.1, 0.2], dtype=torch.float64).expand(1, 1, 6, 6)
    value = mean + 1.5 * draw(4, 1, 1, 6, 40_000)
    everything = torch.ones(1, 6, 6, dtype=torch.bool)
    residual = sandwich.moments(
        weights, value, sandwich.equal_shares(everything, torch.float64), "token"
    ).residual_variance
    expected = torch.full_like(residual, 1.5**2 * (1 - 1 / 6))
    assert_close(residual, expected, rtol=0.02, atol=0)


def test_no_weight_at_all_is_no_observation() -> None:
    weights = torch.zeros(1, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    value, output_weight = draw(0, 1, 2, 3, 4), draw(1, 8, 8)
    for granularity in ("token", "channel"):
        for units in ("relative", "absolute"):
            config = BFTConfig.unit(granularity=granularity, observation_units=units)
            moments = sandwich.moments(weights, value, sandwich.equal_shares(causal(3), torch.float64), granularity)
            scale = torch.ones(1, 3, 2, 4, dtype=torch.float64)
            precision = sandwich.observe(moments, config, scale, output_weight).precision
            assert (precision == 0).all()
            (gradient,) = torch.autograd.grad(precision.sum(), weights)
            assert gradient.isfinite().all()
