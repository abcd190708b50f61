"""The losses over a catalogue: the blocked one is F.cross_entropy, the sampled one estimates it without bias."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from bft_hf.rec.losses import blocked_cross_entropy, proposal, sampled_cross_entropy


def problem(positions: int = 37, items: int = 23, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((positions, 8), (items, 8), (items,))
    hidden, weight, bias = (torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes)
    return hidden, weight, bias, torch.randint(items, (positions,), generator=generator)


@pytest.mark.parametrize("block_bytes", [1, 23 * 8 * 5, 1 << 20], ids=["one position", "eight blocks", "one block"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_blocked_is_cross_entropy(with_bias: bool, block_bytes: int) -> None:
    hidden, weight, bias, targets = problem()
    inputs = [hidden, weight, bias] if with_bias else [hidden, weight]
    logits = hidden @ weight.T + (bias if with_bias else 0)
    expected = F.cross_entropy(logits, targets, reduction="sum")
    loss = blocked_cross_entropy(hidden, weight, targets, bias if with_bias else None, block_bytes)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-9)
    torch.testing.assert_close(
        torch.autograd.grad(loss / 3, inputs), torch.autograd.grad(expected / 3, inputs), rtol=0, atol=1e-9
    )


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_blocked_leaves_out_what_is_frozen(frozen: str) -> None:
    hidden, weight, bias, targets = problem()
    (hidden if frozen == "hidden" else weight).requires_grad_(False)
    inputs = [value for value in (hidden, weight, bias) if value.requires_grad]
    expected = torch.autograd.grad(F.cross_entropy(hidden @ weight.T + bias, targets, reduction="sum"), inputs)
    found = torch.autograd.grad(blocked_cross_entropy(hidden, weight, targets, bias), inputs)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    with torch.no_grad():
        assert not blocked_cross_entropy(hidden, weight, targets, bias).requires_grad


def test_blocked_bears_large_logits_and_no_positions() -> None:
    hidden, weight, _, targets = problem(dtype=torch.float32)
    loss = blocked_cross_entropy(hidden * 100, weight, targets)
    expected = F.cross_entropy((hidden * 100) @ weight.T, targets, reduction="sum")
    assert torch.isfinite(loss) and loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert blocked_cross_entropy(hidden[:0], weight, targets[:0]).item() == 0


def test_blocked_in_bfloat16_is_close_and_sums_in_float32() -> None:
    hidden, weight, bias, targets = problem(400, 300, torch.float32)
    inputs = (hidden, weight, bias)
    expected = F.cross_entropy(hidden @ weight.T + bias, targets, reduction="sum")
    loss = blocked_cross_entropy(hidden, weight, targets, bias, dtype=torch.bfloat16)
    assert loss.dtype == torch.float32 and loss.item() != expected.item()
    assert loss.item() == pytest.approx(expected.item(), rel=2e-3)
    for found, wanted in zip(torch.autograd.grad(loss, inputs), torch.autograd.grad(expected, inputs), strict=True):
        assert found.dtype == torch.float32
        assert (found - wanted).norm() < 1e-2 * wanted.norm()


def test_blocked_keeps_no_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest tensor between forward and backward is a gradient, and none within is larger than the block."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            for value in result if isinstance(result, tuple | list) else [result]:
                if isinstance(value, Tensor):
                    self.size = max(self.size, value.numel())
            return result

    hidden, weight, _, targets = problem(2000, 500)
    with Largest() as blocked:
        blocked_cross_entropy(hidden, weight, targets, block_bytes=500 * 8 * 10).backward()
    with Largest() as whole:
        F.cross_entropy(hidden @ weight.T, targets).backward()
    assert blocked.size == max(hidden.numel(), weight.numel()) and whole.size == 2000 * 500


def test_autocast_does_not_reach_into_the_blocked_loss() -> None:
    hidden, weight, _, targets = problem(dtype=torch.float32)
    expected = blocked_cross_entropy(hidden, weight, targets)
    with torch.autocast("cpu", torch.bfloat16):
        assert blocked_cross_entropy(hidden, weight, targets).item() == expected.item()
        low = blocked_cross_entropy(hidden.bfloat16(), weight, targets)
    assert low.item() == pytest.approx(expected.item(), rel=1e-2)


def test_autocast_does_not_reach_into_the_sampled_loss() -> None:
    hidden, weight, _, targets = problem(dtype=torch.float32)
    negatives = torch.arange(len(weight)).repeat(2)
    log_q = torch.full((len(weight),), 1 / len(weight)).log()
    expected = sampled_cross_entropy(hidden, weight, targets, negatives, log_q)
    with torch.autocast("cpu", torch.bfloat16):
        assert sampled_cross_entropy(hidden, weight, targets, negatives, log_q).item() == expected.item()


@pytest.mark.parametrize("power", [0.0, 1.0])
def test_sampled_partition_function_is_unbiased(power: float) -> None:
    """E of the sum of exponentials beside the target's is that of the whole catalogue without it."""
    hidden, weight, bias, targets = problem(positions=3)
    log_q = proposal(torch.arange(23), power)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        logits = hidden @ weight.T + bias
        of_target = logits.gather(1, targets[:, None])[:, 0]
        mass = []
        for _ in range(1000):
            negatives = torch.multinomial(log_q.exp(), 20, replacement=True, generator=generator)
            losses = [
                sampled_cross_entropy(hidden[i : i + 1], weight, targets[i : i + 1], negatives, log_q, bias)
                for i in range(3)
            ]
            mass.append((torch.stack(losses) + of_target).exp())
        estimate = torch.stack(mass)
    expected = logits.exp().sum(dim=1)
    error = estimate.std(dim=0) / len(mass) ** 0.5
    assert (error < 0.1 * expected).all() and ((estimate.mean(dim=0) - expected).abs() < 4 * error).all()


def test_sampled_with_every_item_once_is_the_full_loss() -> None:
    hidden, weight, bias, targets = problem()
    # Uniform, drawn once each: the correction is log(S / V) = 0.
    negatives, log_q = torch.arange(23), proposal(torch.zeros(23))
    loss = sampled_cross_entropy(hidden, weight, targets, negatives, log_q, bias)
    expected = F.cross_entropy(hidden @ weight.T + bias, targets, reduction="sum")
    inputs = [hidden, weight, bias]
    assert loss.item() == pytest.approx(expected.item(), abs=1e-9)
    torch.testing.assert_close(
        torch.autograd.grad(loss, inputs), torch.autograd.grad(expected, inputs), rtol=0, atol=1e-9
    )


def test_proposal_is_a_distribution_between_uniform_and_frequency() -> None:
    frequency = torch.tensor([0, 3, 15])
    assert proposal(frequency, 0).exp().tolist() == pytest.approx([1 / 3] * 3)
    assert proposal(frequency, 1).exp().tolist() == pytest.approx([1 / 21, 4 / 21, 16 / 21])
    assert proposal(frequency, 0.5).exp().tolist() == pytest.approx([1 / 7, 2 / 7, 4 / 7])
