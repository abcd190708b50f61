"""Corrupted labels beside clean ones after training: loss, gain, precision and the gradient that each asks for."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .evaluation import eval_mode
from .scores import IGNORE_INDEX, RowScores, head_only_at, score_rows

if TYPE_CHECKING:
    import torch
    from datasets import Dataset

CLASSES = ("clean", "corrupted")


def choose_rows(
    clean: "Dataset", noisy: "Dataset", count: int, spared: Collection[int], seed: int
) -> list[dict[str, Any]]:
    """Some training rows, the same ones for every arm of a seed, with what is known of their labels.

    Args:
        clean: Tokenized rows before corruption.
        noisy: The same after it, with the column `corrupted`.
        count: How many; all of them where there are no more.
        spared: Tokens that are never corrupted as labels. They end answers, which any model learns soon, so they would flatter
            the clean class.
        seed: Of the choice.

    Returns:
        Rows of `noisy` with a list `eligible`: whether each label could have been corrupted.
    """
    places = np.sort(np.random.default_rng(seed).permutation(len(noisy))[:count])
    labels = clean.select(places)["labels"]
    return [
        {**row, "eligible": [label != IGNORE_INDEX and label not in spared for label in before]}
        for row, before in zip(noisy.select(places), labels, strict=True)
    ]


def token_classes(
    model: Any,
    rows: Sequence[Mapping[str, Any]],
    label_loss: "Callable[[torch.Tensor, torch.Tensor], torch.Tensor]",
    *,
    batch_size: int = 16,
    pad_token_id: int = 0,
    progress: bool = True,
    desc: str = "Token classes",
) -> dict[str, dict[str, float]]:
    """What a model makes of labels that were corrupted and of those that could have been and were not.

    theta are the parameters that are trained, tau and Q left out, so that a patched and a plain arm have the same; l_t is the
    loss of label t as the arm trains it, alone and not divided by anything. The model is in eval mode: no dropout, no NEFTune.
    The gradient is of one label at a time, which costs a backward pass each: the norm of a class' summed gradient would
    depend on how many labels the class has, since what differs between labels cancels.

    Args:
        model: A causal language model, patched or plain, PEFT's wrapper included. Run it under `torch.autocast` where it was
            trained so; it is left as it was, without a gradient.
        rows: From `choose_rows`: `input_ids`, `labels`, `corrupted`, `eligible` and, for a patched model, `reliability`.
        label_loss: The arm's, from `losses.label_losses`.
        batch_size: Rows at once, where no gradient is needed.
        pad_token_id: As for `scores.score_rows`.
        progress: Show a progress bar.
        desc: In front of it.

    Returns:
        For "clean" and "corrupted", left out where there is no such label, means over its labels:

        - "labels": how many there are;
        - "nll": -log p(label), in nats, and "probability": p(label), whatever the arm's loss;
        - "gain": K of the state that predicts the label, over patched layers too, and "precision": its final precision; of
          patched models;
        - "gradient": |d l_t / d theta|, the Euclidean norm;
        - "cosine_with_clean", of "corrupted" where both classes are there: the cosine between the gradients summed over each
          class. 1 pulls the same way, below 0 undoes what the clean labels teach.

    Raises:
        ValueError: No parameter but tau and Q is trained.
    """
    import torch
    from tqdm.auto import tqdm

    scored = score_rows(
        model, rows, batch_size=batch_size, pad_token_id=pad_token_id, progress=progress, desc=f"{desc}: loss"
    )
    # Under autocast an older torch (2.13 does not) uses weights again that score_rows cast without a graph: no gradient.
    torch.clear_autocast_cache()
    parameters = _trained(model)
    columns: dict[str, dict[str, list[Any]]] = {}
    sums: dict[str, list[torch.Tensor | None]] = {}
    with eval_mode(model), tqdm(total=len(rows), desc=f"{desc}: gradients", unit="row", disable=not progress) as done:
        for row, scores in zip(rows, scored, strict=True):
            wanted = [place for place, position in enumerate(scores.positions) if row["eligible"][position]]
            kinds = [CLASSES[bool(row["corrupted"][scores.positions[place]])] for place in wanted]
            losses = _losses(model, row, scores, label_loss)
            for kind, place in zip(kinds, wanted, strict=True):
                gradient = _gradient(losses[place], parameters)
                sums[kind] = _add(sums.get(kind), gradient)
                found = columns.setdefault(kind, {})
                for name, value in _numbers(scores, place).items():
                    found.setdefault(name, []).append(value)
                found.setdefault("gradient", []).append(_product(gradient, gradient) ** 0.5)
            done.update()
    classes = {
        kind: {"labels": len(columns[kind]["nll"])}
        | {name: float(np.mean(values)) for name, values in columns[kind].items()}
        for kind in CLASSES
        if kind in columns
    }
    if len(classes) == len(CLASSES):
        own, other = (sums[kind] for kind in CLASSES)
        norms = (_product(own, own) * _product(other, other)) ** 0.5
        classes["corrupted"]["cosine_with_clean"] = _product(own, other) / norms if norms else 0.0
    return classes


def summary(classes: Mapping[str, Mapping[str, float]]) -> str | None:
    """One line on a run's gradients, or None where a class is missing."""
    clean, corrupted = (classes.get(kind) for kind in CLASSES)
    if clean is None or corrupted is None or not clean["gradient"]:
        return None
    return (
        f"a corrupted label's gradient is {corrupted['gradient'] / clean['gradient']:.2f} times a clean one's "
        f"({corrupted['labels']} and {clean['labels']} labels), cosine {corrupted['cosine_with_clean']:.2f}"
    )


def _trained(model: Any) -> "list[torch.nn.Parameter]":
    import bft_hf

    own = {id(parameter) for parameter in bft_hf.bft_parameters(model).values()}
    found = [p for p in model.parameters() if p.requires_grad and id(p) not in own]
    if not found:
        raise ValueError("no weight is trained but tau and Q, so there is no gradient to look at")
    return found


def _losses(
    model: Any,
    row: Mapping[str, Any],
    scores: RowScores,
    label_loss: "Callable[[torch.Tensor, torch.Tensor], torch.Tensor]",
) -> "torch.Tensor":
    """The loss of each trained label of a row, (label,), with its graph."""
    import torch

    import bft_hf

    ids = torch.tensor([row["input_ids"]], device=model.device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if row.get("reliability") is not None and bft_hf.is_patched(model):
        from .collator import by_token  # which imports TRL

        inputs["token_reliability"] = torch.tensor([by_token(row)], device=model.device)
    kept = torch.zeros(1, ids.shape[1] - 1, dtype=torch.bool)
    kept[0, scores.positions - 1] = True
    with head_only_at(model, kept):
        logits = model(**inputs, use_cache=False, return_dict=True).logits[0]
    return label_loss(logits, torch.from_numpy(scores.labels).to(logits.device))


def _gradient(loss: "torch.Tensor", parameters: "Sequence[torch.Tensor]") -> "list[torch.Tensor | None]":
    import torch

    return [*torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)]


def _add(
    total: "list[torch.Tensor | None] | None", gradient: "Sequence[torch.Tensor | None]"
) -> "list[torch.Tensor | None]":
    """The sum, in float32 whatever the parameters are in: many small terms would be lost in bfloat16."""
    if total is None:
        return [None if part is None else part.float().clone() for part in gradient]
    return [
        old if part is None else part.float().clone() if old is None else old.add_(part)
        for old, part in zip(total, gradient, strict=True)
    ]


def _product(one: "Iterable[torch.Tensor | None]", other: "Iterable[torch.Tensor | None]") -> float:
    """The inner product of two gradients, None being zero."""
    import torch

    parts = [
        torch.linalg.vecdot(a.float().flatten(), b.float().flatten()).double()
        for a, b in zip(one, other, strict=True)
        if a is not None and b is not None
    ]
    return float(sum(part.item() for part in parts))


def _numbers(scores: RowScores, place: int) -> dict[str, float]:
    numbers = {"nll": scores.loss[place], "probability": scores.probability[place]}
    if scores.precision is not None and scores.mean_gain is not None:
        numbers |= {"gain": scores.mean_gain[place], "precision": scores.precision[place]}
    return numbers
