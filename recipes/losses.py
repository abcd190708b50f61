"""The losses of the rival methods, each a function of the log-probability that the model gives to a label."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from .arguments import PLAIN_LOSSES

# log 0 in the reverse cross entropy, as in the paper. Only its product with beta counts, so it is no setting of its own.
SCE_LOG_ZERO = -4.0


def focal(log_probs: Tensor, gamma: float = 2.0) -> Tensor:
    """Focal loss, -(1 - p)^gamma log p (arXiv:1708.02002, equation 4; gamma 2 is its best).

    It weighs up what the model finds surprising, wrong labels included: a weak rival under noise.

    Args:
        log_probs: log p of each label, in nats, any shape; 0 where there is none.
        gamma: 0 is cross entropy.

    Returns:
        The loss of each label, 0 where log p is 0.
    """
    # At p = 1 the gradient of (1 - p)^gamma would be infinite for gamma < 1, and infinity times log p = 0 is not a number.
    miss = (-torch.expm1(log_probs)).clamp(min=torch.finfo(log_probs.dtype).tiny)
    return -(miss**gamma) * log_probs


def generalised_cross_entropy(log_probs: Tensor, q: float = 0.7) -> Tensor:
    """Generalised cross entropy, (1 - p^q) / q (arXiv:1805.07836; q .7 in its experiments).

    The gradient is p^q times cross entropy's: a label that the model finds impossible does not move it.

    Args:
        log_probs: log p of each label, in nats, any shape; 0 where there is none.
        q: In (0, 1]; 1 is the mean absolute error 1 - p, towards 0 it becomes cross entropy.

    Returns:
        The loss of each label, 0 where log p is 0 and 1 / q at most.
    """
    return -torch.expm1(q * log_probs) / q


def symmetric_cross_entropy(log_probs: Tensor, alpha: float = 0.1, beta: float = 1.0) -> Tensor:
    """Symmetric cross entropy, alpha CE + beta RCE (arXiv:1908.06112; its weights for CIFAR-10).

    The reverse cross entropy -sum_v p_v log y_v of a one-hot y, with log 0 := A, is -A (1 - p): it needs p of the label alone.

    Args:
        log_probs: log p of each label, in nats, any shape; 0 where there is none.
        alpha: Weight of cross entropy.
        beta: Weight of the reverse cross entropy.

    Returns:
        The loss of each label, 0 where log p is 0.
    """
    return -alpha * log_probs + beta * SCE_LOG_ZERO * torch.expm1(log_probs)


def forward_correction(log_probs: Tensor, floor: float = 1e-5) -> Tensor:
    """Cross entropy of what wrong labels make of the model's distribution (arXiv:1609.03683, its forward correction, for uniform noise).

    If a share r of the labels was replaced by any of V tokens, the probability of a label is (1 - r) p + r / V, and its
    -log is, up to a constant, -log (p + c) with c = r / ((1 - r) V). The gradient is p / (p + c) times cross entropy's, which
    is the posterior probability that the label is right: a label far above c counts in full, one far below it not at all.

    Args:
        log_probs: log p of each label, in nats, any shape; 0 where there is none.
        floor: c, above 0. 1e-5 is r = .33 of a vocabulary of 50,000 or .24 of one of 32,000.

    Returns:
        log (1 + c) - log (p + c), the loss of each label, 0 where log p is 0 and log (1 + 1 / c) at most.
    """
    log_floor = log_probs.new_tensor(math.log(floor))
    return torch.logaddexp(torch.zeros_like(log_probs), log_floor) - torch.logaddexp(log_probs, log_floor)


def label_smoothing(log_probs: Tensor, excess: Tensor, epsilon: float = 0.1) -> Tensor:
    """Cross entropy against (1 - epsilon) one-hot + epsilon uniform (arXiv:1512.00567, section 7; epsilon .1 there).

    -(1 - epsilon) log p_y - epsilon mean_v log p_v = -log p_y + epsilon (z_y - mean_v z_v), z the logits: no logit but the
    label's and their mean is needed.

    Args:
        log_probs: log p of each label, in nats, any shape; 0 where there is none.
        excess: z_y - mean_v z_v of each label, as `excess_of_labels`; 0 where there is none.
        epsilon: 0 is cross entropy.

    Returns:
        The loss of each label, 0 where both are 0.
    """
    return -log_probs + epsilon * excess


def excess_of_labels(hidden_states: Tensor, labels: Tensor, head: nn.Linear) -> Tensor:
    """By how much a label's logit exceeds the mean over the vocabulary, without the other logits.

    Logits are linear in the hidden state, so their mean is that of the head's mean row.

    Args:
        hidden_states: What the head reads, (..., channel).
        labels: The token that follows each, (...), or -100.
        head: Gives the logits, without a scale or cap after it.

    Returns:
        z_y - mean_v z_v, (...), at least float32; 0 where the label is -100.
    """
    known = labels.clamp(min=0)
    direction = head.weight[known] - head.weight.mean(0)
    excess = torch.linalg.vecdot(_at_least_single(hidden_states), _at_least_single(direction))
    if head.bias is not None:
        excess = excess + head.bias[known] - head.bias.mean()
    return excess.masked_fill(labels == -100, 0.0)


def _at_least_single(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


@dataclass(frozen=True)
class TokenLoss:
    """A row of `TOKEN_LOSSES`.

    Attributes:
        function: Of the labels' log-probabilities and, where it needs it, their `excess`.
        settings: The field of BFTSFTConfig for each of its keywords.
        needs_excess: Whether it does.
    """

    function: Callable[..., Tensor]
    settings: dict[str, str]
    needs_excess: bool = False


TOKEN_LOSSES: dict[str, TokenLoss] = {
    "focal": TokenLoss(focal, {"gamma": "focal_gamma"}),
    "gce": TokenLoss(generalised_cross_entropy, {"q": "gce_q"}),
    "sce": TokenLoss(symmetric_cross_entropy, {"alpha": "sce_alpha", "beta": "sce_beta"}),
    "forward_correction": TokenLoss(forward_correction, {"floor": "noise_floor"}),
    "label_smoothing": TokenLoss(label_smoothing, {"epsilon": "smoothing_epsilon"}, needs_excess=True),
}


def token_loss(config: Any) -> TokenLoss | None:
    """The loss that a `BFTSFTConfig` asks for, its settings bound, or None where it is TRL's own.

    Args:
        config: Its `token_loss` and the fields of that loss are read; a config without them is TRL's.
    """
    name = getattr(config, "token_loss", None)
    if name is None:
        return None
    row = TOKEN_LOSSES[name]
    values = {key: getattr(config, field) for key, field in row.settings.items()}
    return replace(row, function=partial(row.function, **values))


def mean_token_loss(loss: TokenLoss) -> Callable[..., Tensor]:
    """A token loss as the `compute_loss_func` of a Trainer, for a TRL whose models give logits.

    Args:
        loss: Its settings bound.

    Returns:
        A function of (outputs, labels, num_items_in_batch) that sums over the labels that are not -100, of which alone
        log-probabilities are made, and divides by `num_items_in_batch` or their number.
    """

    def compute(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        logits, targets = outputs.logits[:, -labels.shape[1] : -1], labels[:, 1:]  # virtual tokens have no labels
        kept = targets != -100
        total = _of_logits(loss, logits[kept], targets[kept]).sum()
        count = kept.sum() if num_items_in_batch is None else torch.as_tensor(num_items_in_batch)
        return total / count.clamp(min=1).to(total.device)

    return compute


def label_losses(config: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss that a `BFTSFTConfig` trains with, TRL's own included, as a function of whole logits.

    Args:
        config: Read for `token_loss`, `loss_type` and `label_smoothing_factor`.

    Returns:
        A function of logits (label, vocabulary) and labels (label,) to losses (label,), in nats, at least float32. Their sum
        over a batch is the number of its labels times what the trainer minimises.

    Raises:
        ValueError: A `loss_type` that is not known here.
    """
    loss, smoothing = token_loss(config), config.label_smoothing_factor
    if loss is not None:
        return partial(_of_logits, loss)
    if config.loss_type == "dft":
        return partial(_of_logits, TokenLoss(lambda log_probs: -log_probs.detach().exp() * log_probs, {}))
    if config.loss_type not in PLAIN_LOSSES:
        raise ValueError(f"the loss of a single label is not known for loss_type={config.loss_type}")
    return lambda logits, labels: cross_entropy(
        _at_least_single(logits), labels, reduction="none", label_smoothing=smoothing
    )


def _of_logits(loss: TokenLoss, logits: Tensor, labels: Tensor) -> Tensor:
    """The loss of each label, (label,), from logits (label, vocabulary)."""
    logits = _at_least_single(logits)
    log_probs = -cross_entropy(logits, labels, reduction="none")
    extra = {}
    if loss.needs_excess:
        extra["excess"] = logits.gather(-1, labels[:, None])[:, 0] - logits.mean(-1)
    return loss.function(log_probs, **extra)
