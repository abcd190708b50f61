"""The rivals' losses against their formulas, written out over the whole vocabulary in float64."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from bft_hf.recipes.losses import (
    SCE_LOG_ZERO,
    TOKEN_LOSSES,
    excess_of_labels,
    focal,
    forward_correction,
    generalised_cross_entropy,
    label_losses,
    label_smoothing,
    mean_token_loss,
    symmetric_cross_entropy,
    token_loss,
)

SETTINGS: dict[str, dict[str, float]] = {
    "focal": {"focal_gamma": 1.5},
    "gce": {"gce_q": 0.6},
    "sce": {"sce_alpha": 0.3, "sce_beta": 0.8},
    "forward_correction": {"noise_floor": 0.3 / (0.7 * 11)},
    "label_smoothing": {"smoothing_epsilon": 0.2},
}


def config(name: str) -> Any:
    return SimpleNamespace(token_loss=name, **SETTINGS[name])


def formula(name: str, logits: Tensor, label: int) -> Tensor:
    """The loss of one label as its paper writes it: from the whole distribution and the one-hot label."""
    p = logits.softmax(-1)
    q = torch.eye(len(logits), dtype=logits.dtype)[label]
    if name == "focal":
        return -((1 - p[label]) ** 1.5) * p[label].log()
    if name == "gce":
        return (1 - p[label] ** 0.6) / 0.6
    if name == "sce":
        reverse = -(p * torch.where(q > 0, 0.0, SCE_LOG_ZERO)).sum()
        return 0.3 * -(q * p.log()).sum() + 0.8 * reverse
    if name == "forward_correction":
        transition = 0.7 * torch.eye(11, dtype=logits.dtype) + 0.3 / 11  # from the right token (row) to the label
        return math.log(0.7 + 0.3 / 11) - (p @ transition @ q).log()  # the constant makes it 0 at p = 1
    return -(((1 - 0.2) * q + 0.2 / len(logits)) * p.log()).sum()


def gradients_of(loss: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    leaf = at.clone().requires_grad_()
    return torch.autograd.grad(loss(leaf), leaf)[0]


@pytest.fixture
def problem() -> dict[str, Any]:
    """Two rows of seven tokens over a vocabulary of eleven, with labels of which some are -100."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(2, 7, 11, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 11, (2, 7), generator=generator)
    labels[0, :3] = labels[1, 4:] = -100
    return {"logits": logits, "labels": labels}


def expected_loss(name: str, logits: Tensor, labels: Tensor, count: int | None = None) -> Tensor:
    terms = [
        formula(name, logits[row, token - 1], int(labels[row, token]))
        for row in range(labels.shape[0])
        for token in range(1, labels.shape[1])
        if labels[row, token] != -100
    ]
    return torch.stack(terms).sum() / (len(terms) if count is None else count)


@pytest.mark.parametrize("count", [None, 17])
@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_values_and_gradients_are_the_formulas(name: str, count: int | None, problem: dict[str, Any]) -> None:
    loss = mean_token_loss(token_loss(config(name)))
    labels = problem["labels"]

    def ours(logits: Tensor) -> Tensor:
        return loss(SimpleNamespace(logits=logits), labels, count)

    def theirs(logits: Tensor) -> Tensor:
        return expected_loss(name, logits, labels, count)

    torch.testing.assert_close(ours(problem["logits"]), theirs(problem["logits"]), rtol=1e-12, atol=0)
    ours_gradient, gradient = gradients_of(ours, problem["logits"]), gradients_of(theirs, problem["logits"])
    torch.testing.assert_close(ours_gradient, gradient, rtol=1e-10, atol=1e-14)
    assert not ours_gradient[0, :2].any() and ours_gradient[0, 2].any()  # token 3 is the first label, seen from 2


@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_without_a_label_the_loss_is_a_differentiable_zero(name: str, problem: dict[str, Any]) -> None:
    loss = mean_token_loss(token_loss(config(name)))
    labels = torch.full_like(problem["labels"], -100)
    for count in (None, 0, torch.tensor(5)):
        gradient = gradients_of(
            lambda logits, count=count: loss(SimpleNamespace(logits=logits), labels, count), problem["logits"]
        )
        assert loss(SimpleNamespace(logits=problem["logits"]), labels, count) == 0 and not gradient.any()


@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_the_parts_of_a_batch_add_up_to_it(name: str, problem: dict[str, Any]) -> None:
    """Gradient accumulation passes the number of labels of all its passes."""
    loss, labels = mean_token_loss(token_loss(config(name))), problem["labels"]
    count = (labels[:, 1:] != -100).sum()
    whole = loss(SimpleNamespace(logits=problem["logits"]), labels)
    parts = [loss(SimpleNamespace(logits=problem["logits"][i : i + 1]), labels[i : i + 1], count) for i in range(2)]
    torch.testing.assert_close(sum(parts), whole)
    apart = [loss(SimpleNamespace(logits=problem["logits"][i : i + 1]), labels[i : i + 1]) for i in range(2)]
    assert abs(sum(apart) / 2 - whole) > 1e-4


def test_virtual_tokens_in_front_have_no_labels(problem: dict[str, Any]) -> None:
    """Learned prompts lengthen the logits and not the labels that a Trainer holds."""
    loss = mean_token_loss(token_loss(config("gce")))
    longer = torch.cat([torch.randn(2, 3, 11, dtype=torch.float64), problem["logits"]], dim=1)
    expected = loss(SimpleNamespace(logits=problem["logits"]), problem["labels"])
    assert loss(SimpleNamespace(logits=longer), problem["labels"]) == expected


@pytest.mark.parametrize(
    "loss",
    [
        focal,
        generalised_cross_entropy,
        symmetric_cross_entropy,
        forward_correction,
        lambda x: focal(x, gamma=0.3),
        lambda x: focal(x, 0.0),
    ],
    ids=["focal", "gce", "sce", "forward correction", "focal .3", "focal 0"],
)
@given(log_prob=st.floats(-80.0, 0.0))
def test_a_loss_is_finite_zero_at_certainty_and_falls_with_p(loss: Callable[[Tensor], Tensor], log_prob: float) -> None:
    """The fused head leaves log p = 0 where there is no label: the loss has to vanish there without being told."""
    for dtype in (torch.float64, torch.float32):
        at = torch.tensor(log_prob, dtype=dtype)
        gradient = gradients_of(loss, at)
        assert torch.isfinite(loss(at)) and torch.isfinite(gradient)
        assert loss(at) >= 0 and gradient <= 0
    assert loss(torch.zeros(2)).tolist() == [0.0, 0.0]


def test_settings_at_their_ends_are_the_losses_in_between() -> None:
    log_probs = torch.linspace(-9, -0.01, 50, dtype=torch.float64)
    assert torch.equal(focal(log_probs, gamma=0), -log_probs)
    torch.testing.assert_close(generalised_cross_entropy(log_probs, q=1.0), 1 - log_probs.exp())
    torch.testing.assert_close(generalised_cross_entropy(log_probs, q=1e-9), -log_probs, rtol=1e-6, atol=0)
    torch.testing.assert_close(symmetric_cross_entropy(log_probs, alpha=1, beta=0), -log_probs)
    torch.testing.assert_close(forward_correction(log_probs, floor=1e-12), -log_probs, rtol=1e-6, atol=0)
    assert torch.equal(label_smoothing(log_probs, torch.ones(50, dtype=torch.float64), epsilon=0), -log_probs)


def test_focal_loss_weighs_a_wrong_label_more_and_gce_less() -> None:
    """Against cross entropy, whose gradient by log p is -1: what docs say of the two under noise."""
    surprising, expected = torch.tensor(math.log(1e-3)), torch.tensor(math.log(0.9))

    def ratio(loss: Callable[[Tensor], Tensor]) -> float:
        return float(gradients_of(loss, surprising) / gradients_of(loss, expected))

    assert ratio(focal) > 10 and ratio(generalised_cross_entropy) == pytest.approx((1e-3 / 0.9) ** 0.7, rel=1e-4)


@given(log_prob=st.floats(-40.0, -1e-3), floor=st.floats(1e-8, 1.0))
def test_forward_correction_weighs_a_label_by_the_posterior_that_it_is_right(log_prob: float, floor: float) -> None:
    """By Bayes: p times the share that is kept, over that and the share r of wrong ones spread over V tokens."""
    gradient = gradients_of(lambda x: forward_correction(x, floor), torch.tensor(log_prob, dtype=torch.float64))
    for vocabulary in (50, 50_000):
        share = floor * vocabulary / (1 + floor * vocabulary)
        right, wrong = (1 - share) * math.exp(log_prob), share / vocabulary
        assert -float(gradient) == pytest.approx(right / (right + wrong), rel=1e-9)


@pytest.mark.parametrize("bias", [False, True])
def test_excess_is_read_off_the_head_without_its_logits(bias: bool) -> None:
    torch.manual_seed(0)
    head = nn.Linear(6, 11, bias=bias, dtype=torch.float64)
    hidden = torch.randn(2, 5, 6, dtype=torch.float64)
    labels = torch.tensor([[1, -100, 3, 10, 0], [2, 4, -100, -100, 7]])
    weights = torch.randn(2, 5, dtype=torch.float64)

    def by_logits(states: Tensor, labels: Tensor, head: nn.Linear) -> Tensor:
        logits = head(states)
        excess = logits.gather(-1, labels.clamp(min=0)[..., None])[..., 0] - logits.mean(-1)
        return excess * (labels != -100)

    outcomes = []
    for function in (excess_of_labels, by_logits):
        states = hidden.clone().requires_grad_()
        value = function(states, labels, head)
        outcomes.append((value, *torch.autograd.grad((value * weights).sum(), [states, *head.parameters()])))
    for ours, theirs in zip(*outcomes, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    assert not outcomes[0][0][labels == -100].any()


def test_excess_of_half_precision_is_single() -> None:
    head = nn.Linear(6, 11, bias=False, dtype=torch.bfloat16)
    assert excess_of_labels(torch.ones(2, 6, dtype=torch.bfloat16), torch.tensor([1, 2]), head).dtype == torch.float32


def test_dft_is_minus_p_log_p_with_a_fixed_p(problem: dict[str, Any]) -> None:
    """arXiv:2508.05629: the gradient by the logits is p times cross entropy's, p_v - y_v, and not that of -p log p."""
    logits, labels = problem["logits"].flatten(0, 1), problem["labels"].flatten().clamp(min=0)
    loss = label_losses(SimpleNamespace(token_loss=None, loss_type="dft", label_smoothing_factor=0.0))
    p = logits.softmax(-1)
    right = p.gather(-1, labels[:, None])
    torch.testing.assert_close(loss(logits, labels), -(right * right.log())[:, 0], rtol=1e-12, atol=0)
    expected = right * (p - torch.eye(11, dtype=torch.float64)[labels])
    gradient = gradients_of(lambda at: loss(at, labels).sum(), logits)
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-14)
    moving = gradients_of(lambda at: -(q := at.softmax(-1).gather(-1, labels[:, None])).mul(q.log()).sum(), logits)
    assert (gradient - moving).abs().max() > 0.1


def test_a_config_of_trls_has_no_token_loss() -> None:
    assert token_loss(SimpleNamespace(loss_type="dft")) is None and token_loss(None) is None
