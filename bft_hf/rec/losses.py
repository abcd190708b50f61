"""Softmax cross entropy over a catalogue of items: exact in blocks of positions, or on sampled items with logQ correction."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK_BYTES = 1 << 22
"""Default size of a block of logits: 4 MiB stay in a CPU's caches, where the passes of a softmax are cheap."""


class _BlockedCrossEntropy(torch.autograd.Function):
    """The sum over positions, whose gradients are formed in the forward pass, block by block.

    With Z = H E^T + b and P = softmax(Z): dL/dH = (P - Y) E, dL/dE = (P - Y)^T H, dL/db = (P - Y)^T 1, Y being one-hot. So
    logits are formed once, nothing of them is kept, and backward only scales what forward left.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, block: int, dtype: torch.dtype
    ) -> Tensor:
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight) if need_weight else None
        grad_bias = torch.zeros_like(bias) if need_bias and bias is not None else None
        items = weight.to(dtype)
        loss = hidden.new_zeros(())
        for start in range(0, len(targets), block):
            span = slice(start, start + block)
            rows, labels = hidden[span], targets[span]
            logits = rows.to(dtype) @ items.T
            if bias is not None:
                logits += bias.to(dtype)
            of_label = logits.gather(1, labels[:, None]).to(loss.dtype)
            largest = logits.amax(dim=1, keepdim=True)
            exponentials = logits.sub_(largest).exp_()
            total = exponentials.sum(dim=1, keepdim=True, dtype=loss.dtype)
            loss += (total.log() + largest - of_label).sum()
            # (P - Y) is never formed: P is divided on its thin side, and Y adds or takes away single rows.
            if grad_hidden is not None:
                grad_hidden[span] = (exponentials @ items).to(loss.dtype) / total - weight[labels]
            if grad_weight is not None:
                grad_weight += exponentials.T @ (rows / total).to(dtype)
                grad_weight.index_add_(0, labels, rows, alpha=-1)
            if grad_bias is not None:
                grad_bias += exponentials.T @ total.reciprocal().squeeze(1).to(dtype)
                grad_bias.index_add_(0, labels, torch.ones_like(total[:, 0]), alpha=-1)
        ctx.gradients = (grad_hidden, grad_weight, grad_bias)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        gradients = tuple(None if gradient is None else gradient * grad_loss for gradient in ctx.gradients)
        return (*gradients, None, None, None)


def blocked_cross_entropy(
    hidden: Float[Tensor, "position channel"],
    weight: Float[Tensor, "item channel"],
    targets: Int[Tensor, " position"],
    bias: Float[Tensor, " item"] | None = None,
    block_bytes: int = BLOCK_BYTES,
    dtype: torch.dtype | None = None,
) -> Float[Tensor, ""]:
    """Sum over positions of the softmax cross entropy over all items, in memory that does not grow with the positions.

    The value and the gradients of `F.cross_entropy(hidden @ weight.T + bias, targets, reduction="sum")`. Beyond the inputs
    and their gradients it holds one block of logits, of at most `block_bytes` but no less than one position's: the logits of
    a batch of 1,500 positions over the 12,101 items of Amazon Beauty would be 73 MB, and as much again for their gradient.

    Args:
        hidden: States from which the next item is predicted.
        weight: Embeddings of the items that compete.
        targets: Row of `weight` that follows each position.
        bias: Of the items.
        block_bytes: Size of the block.
        dtype: Of the logits and of the factors of the three products; by default the weight's. With bfloat16, which recent CPUs
            and GPUs multiply several times faster, a logit of 8 is rounded to a multiple of 1/32; sums stay in the weight's.

    Returns:
        The sum, to be divided by whatever number of positions is meant. Gradients of gradients are not available.
    """
    dtype = weight.dtype if dtype is None else dtype
    block = max(1, block_bytes // (len(weight) * dtype.itemsize))
    with torch.autocast(hidden.device.type, enabled=False):  # a sum of exponentials over a catalogue wants float32
        return _BlockedCrossEntropy.apply(hidden.to(weight.dtype), weight, bias, targets, block, dtype)


def sampled_cross_entropy(
    hidden: Float[Tensor, "position channel"],
    weight: Float[Tensor, "item channel"],
    targets: Int[Tensor, " position"],
    negatives: Int[Tensor, " sample"],
    log_q: Float[Tensor, " item"],
    bias: Float[Tensor, " item"] | None = None,
) -> Float[Tensor, ""]:
    """Sum over positions of the cross entropy of the target against items sampled once for all of them.

    A sampled item j stands for 1 / (S q_j) items, so its logit is z_j - log(S q_j) (logQ correction; Bengio and Senécal 2008):
    the sum of exponentials is then an unbiased estimate of the whole catalogue's. The target enters by itself, so that
    samples that hit it are left out, and the others stand for the catalogue without it.

    Args:
        hidden: As in `blocked_cross_entropy`.
        weight: As there.
        targets: As there.
        negatives: Rows of `weight` drawn with replacement from q, S of them.
        log_q: log q of every item.
        bias: Of the items.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        hidden = hidden.to(weight.dtype)
        logits = hidden @ weight[negatives].T
    if bias is not None:
        logits = logits + bias[negatives]
    logits = logits - (log_q[negatives] + torch.tensor(len(negatives), dtype=log_q.dtype).log()).to(logits.dtype)
    logits = logits.masked_fill(negatives[None] == targets[:, None], -torch.inf)
    of_target = (hidden * weight[targets]).sum(dim=1)
    if bias is not None:
        of_target = of_target + bias[targets]
    everything = torch.cat([of_target[:, None], logits], dim=1)
    return (torch.logsumexp(everything, dim=1) - of_target).sum()


def proposal(item_frequency: Tensor, power: float = 0.5) -> Float[Tensor, " item"]:
    """log q of the distribution that negatives are drawn from: frequency, counted from 1, to a power.

    Args:
        item_frequency: Actions in training of every item.
        power: 0 draws all items alike, 1 as often as they occur.

    Returns:
        In float64, normalised.
    """
    return torch.log_softmax(power * torch.log1p(item_frequency.double()), dim=0)
