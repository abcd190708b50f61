"""The Jacobian of a plain FFN against autograd, behind a layer norm, an RMS norm and none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from bft_hf.plain_ffn import plain_jacobian, plain_jacobian_coefficients

CHANNELS, WIDTH = 6, 9


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("activation", [nn.functional.relu, nn.ReLU(), nn.functional.gelu, nn.SiLU(), torch.tanh])
@pytest.mark.parametrize("norm", ["layer", "rms", "none"])
def test_is_the_diagonal_of_the_jacobian(activation: Callable[[Tensor], Tensor], norm: str) -> None:
    up, up_bias, down, weight = draw(0, WIDTH, CHANNELS), draw(1, WIDTH), draw(2, CHANNELS, WIDTH), draw(3, CHANNELS)
    hidden = draw(4, 2, 3, CHANNELS)
    centre = hidden.mean(-1, keepdim=True) if norm == "layer" else torch.zeros(2, 3, 1, dtype=torch.float64)
    inverse_scale = None if norm == "none" else ((hidden - centre).square().mean(-1, keepdim=True) + 1e-5).rsqrt()

    def normed(x: Tensor, scale: Tensor | None) -> Tensor:
        if scale is None:
            return x
        return (x - x.mean() if norm == "layer" else x) * scale * weight

    expected = torch.empty_like(hidden)
    preactivation = torch.empty(2, 3, WIDTH, dtype=torch.float64)
    for row in range(2):
        for token in range(3):
            scale = None if inverse_scale is None else inverse_scale[row, token]
            z = lambda x, scale=scale: normed(x, scale) @ up.T + up_bias  # noqa: E731
            full = torch.autograd.functional.jacobian(lambda x, z=z: activation(z(x)) @ down.T, hidden[row, token])
            expected[row, token] = full.diagonal()
            preactivation[row, token] = z(hidden[row, token])

    norm_weight = None if norm == "none" else weight
    scale = None if inverse_scale is None else inverse_scale.squeeze(-1)
    for granularity in ("channel", "token"):
        coefficients = plain_jacobian_coefficients(up, down, norm_weight, granularity, centred=norm == "layer")
        jacobian = plain_jacobian(preactivation, activation, coefficients, scale)
        assert_close(jacobian, expected if granularity == "channel" else expected.mean(-1), rtol=1e-6, atol=1e-10)


def test_gradients_flow_where_they_are_asked_for() -> None:
    up, down = draw(0, WIDTH, CHANNELS).requires_grad_(), draw(1, CHANNELS, WIDTH).requires_grad_()
    hidden = draw(2, 2, CHANNELS).requires_grad_()

    def jacobian(hidden: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return plain_jacobian(hidden @ up.T, nn.functional.gelu, plain_jacobian_coefficients(up, down, None, "channel"))

    assert torch.autograd.gradcheck(jacobian, (hidden, up, down))
