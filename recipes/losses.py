"""The losses of the rival methods, each a function of the log-probability that the model gives to a label."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

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


# By the value of `token_loss`: the function, and the field of BFTSFTConfig that holds each of its settings.
TOKEN_LOSSES: dict[str, tuple[Callable[..., Tensor], dict[str, str]]] = {
    "focal": (focal, {"gamma": "focal_gamma"}),
    "gce": (generalised_cross_entropy, {"q": "gce_q"}),
    "sce": (symmetric_cross_entropy, {"alpha": "sce_alpha", "beta": "sce_beta"}),
}


def token_loss(config: Any) -> Callable[[Tensor], Tensor] | None:
    """The loss of a label that a `BFTSFTConfig` asks for, or None where it is TRL's own.

    Args:
        config: Its `token_loss` and the fields of that loss are read; a config without them is TRL's.
    """
    name = getattr(config, "token_loss", None)
    if name is None:
        return None
    function, settings = TOKEN_LOSSES[name]
    return partial(function, **{key: getattr(config, field) for key, field in settings.items()})


def mean_token_loss(loss: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """A token loss as the `compute_loss_func` of a Trainer, for a TRL whose models give logits.

    Args:
        loss: Of the log-probabilities of labels.

    Returns:
        A function of (outputs, labels, num_items_in_batch) that sums over the labels that are not -100, of which alone
        log-probabilities are made, and divides by `num_items_in_batch` or their number.
    """

    def compute(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        logits, targets = outputs.logits[:, -labels.shape[1] : -1], labels[:, 1:]  # virtual tokens have no labels
        kept = targets != -100
        log_probs = -cross_entropy(logits[kept].float(), targets[kept], reduction="none")
        count = kept.sum() if num_items_in_batch is None else torch.as_tensor(num_items_in_batch)
        return loss(log_probs).sum() / count.clamp(min=1).to(log_probs.device)

    return compute
