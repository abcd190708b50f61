"""What a model thinks of every trained token: one forward pass over labelled rows, patched model or plain."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

IGNORE_INDEX = -100
CHUNK = 512  # labels whose distributions are looked at together: 100 MB with a vocabulary of 49 thousand


@dataclass(frozen=True)
class RowScores:
    """The trained tokens of a row, in order; every array has one entry a token unless it says otherwise.

    A label is predicted by the state of the token before it. `precision` and `gain` are that state's, so they know the prompt
    and the tokens up to there, and not the label. `input_precision` and `input_gain` are of the token that stands at the
    label's own place in the input, which is the label unless only the labels were corrupted.

    Attributes:
        id: The row's.
        positions: Where the labels stand in `input_ids`.
        labels: Token ids.
        loss: -log p(label), in nats.
        entropy: Of the predicted distribution, in nats.
        rivals: The likeliest token other than the label.
        rival_loss: -log p of it, in nats.
        precision: Final precision, lam' of the last patched layer (the mean over channels); None for a plain model.
        gain: K by patched layer, (token, layer); or None.
        input_precision: As `precision`.
        input_gain: As `gain`.
        passages: For each span of the row's `passage_spans`: "precision", the mean final precision of its tokens, and
            "gain", their mean gain over tokens and layers. Empty for a plain model.
    """

    id: str
    positions: np.ndarray
    labels: np.ndarray
    loss: np.ndarray
    entropy: np.ndarray
    rivals: np.ndarray
    rival_loss: np.ndarray
    precision: np.ndarray | None
    gain: np.ndarray | None
    input_precision: np.ndarray | None
    input_gain: np.ndarray | None
    passages: list[dict[str, float]]

    @property
    def probability(self) -> np.ndarray:
        """p(label)."""
        return np.exp(-self.loss)

    @property
    def mean_gain(self) -> np.ndarray | None:
        """The gain's mean over layers."""
        return None if self.gain is None else self.gain.mean(1)


def score_rows(
    model: Any,
    rows: Iterable[Mapping[str, Any]],
    *,
    batch_size: int = 16,
    pad_token_id: int = 0,
    progress: bool = True,
    desc: str = "Scoring",
) -> list[RowScores]:
    """Score every trained token in one forward pass, without gradients and without logits of untrained positions.

    Rows that differ in nothing but their labels, such as copies with other labels corrupted, share a pass.

    Args:
        model: A causal language model on whatever device, patched or plain, PEFT's wrapper included; put into eval mode
            meanwhile. Run it under `torch.autocast` where it was trained so.
        rows: Tokenized: `input_ids` and `labels` (-100 where a token is not trained), and optionally `id`,
            `passage_spans` (first token and the one after the last, for each passage) and `reliability` (one number a
            token, or one for the prompt, as `collator.by_token` has it; for a patched model).
        batch_size: Rows at once, those of like length together.
        pad_token_id: What fills up the shorter rows; it is masked.
        progress: Show a progress bar.
        desc: In front of it.

    Returns:
        A `RowScores` for each row, in the rows' order. The first token of a row has nothing before it that could predict it,
        and is left out.

    Raises:
        ValueError: A row whose `labels` are not as many as its `input_ids`, or that is empty; a reliability that does not fit.
    """
    import torch
    from tqdm.auto import tqdm

    from .evaluation import batches, eval_mode

    rows = list(rows)
    for number, row in enumerate(rows):
        if len(row["input_ids"]) != len(row["labels"]) or not len(row["input_ids"]):
            raise ValueError(
                f"row {row.get('id', number)!r} needs one label for each of its input_ids, and at least one"
            )
    inputs: dict[Any, list[int]] = {}
    for number, row in enumerate(rows):
        inputs.setdefault((tuple(row["input_ids"]), _trust(row)), []).append(number)
    # Longest first: a batch that does not fit into memory fails at once, not at the end.
    order = sorted(inputs.values(), key=lambda numbers: -len(rows[numbers[0]]["input_ids"]))
    scored: dict[int, RowScores] = {}
    with (
        torch.inference_mode(),
        eval_mode(model),
        tqdm(total=len(order), desc=desc, unit="row", disable=not progress) as done,
    ):
        for batch in batches(order, batch_size):
            scored.update(_score_batch(model, rows, batch, pad_token_id))
            done.update(len(batch))
    return [scored[number] for number in range(len(rows))]


def answer_uncertainty(
    model: Any,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    *,
    token_reliability: Sequence[Sequence[float]] | None = None,
    batch_size: int = 16,
    pad_token_id: int = 0,
    progress: bool = False,
    desc: str = "Uncertainty",
) -> list[dict[str, float | int | None]]:
    """How sure a model is of answers that it gave, by one forward pass over prompts and answers.

    Args:
        model: As for `score_rows`; the one that gave them.
        prompts: Token ids of each prompt.
        answers: Token ids of each answer as they were generated, the token that ended it included.
        token_reliability: Of each prompt's tokens, where the answers were generated with it.
        batch_size: Answers at once.
        pad_token_id: What fills up the shorter rows.
        progress: Show a progress bar.
        desc: In front of it.

    Returns:
        For each answer: "log_probability", the sum over its tokens, in nats; "token_entropy", the mean over its tokens of the
        predicted distributions' entropy, in nats; "final_precision" and "mean_gain", means over the states that its tokens
        were read from (the latter over layers too), None for a plain model; "answer_tokens", how many there are. All but
        the last are None for an answer of no token.
    """
    rows: list[dict[str, Any]] = [
        {"input_ids": [*prompt, *answer], "labels": [IGNORE_INDEX] * len(prompt) + [*answer]}
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    if token_reliability is not None:
        for row, trust, answer in zip(rows, token_reliability, answers, strict=True):
            row["reliability"] = [*trust, *[1.0] * len(answer)]
    scored = score_rows(model, rows, batch_size=batch_size, pad_token_id=pad_token_id, progress=progress, desc=desc)
    return [
        {
            "log_probability": -float(row.loss.sum()) if len(row.loss) else None,
            "token_entropy": _mean(row.entropy),
            "final_precision": _mean(row.precision),
            "mean_gain": _mean(row.gain),
            "answer_tokens": len(row.loss),
        }
        for row in scored
    ]


def _mean(values: np.ndarray | None) -> float | None:
    return float(values.mean()) if values is not None and values.size else None


def _score_batch(
    model: Any, rows: Sequence[Mapping[str, Any]], batch: Sequence[Sequence[int]], pad: int
) -> Iterator[tuple[int, RowScores]]:
    """Run a batch of inputs, each given by the numbers of the rows that have it."""
    import torch

    import bft_hf

    patched = bft_hf.is_patched(model)
    firsts = [rows[numbers[0]] for numbers in batch]
    longest = max(len(row["input_ids"]) for row in firsts)
    device = model.device
    inputs = {
        "input_ids": _padded([row["input_ids"] for row in firsts], longest, pad).to(device),
        "attention_mask": _padded([[1] * len(row["input_ids"]) for row in firsts], longest, 0).to(device),
    }
    if patched and any(row.get("reliability") is not None for row in firsts):
        trust = [_trust(row) or [1.0] * len(row["input_ids"]) for row in firsts]
        inputs["token_reliability"] = _padded(trust, longest, 1.0).to(device)
    # The state at `place` predicts the label at `place + 1`.
    places = {
        number: np.flatnonzero(np.asarray(rows[number]["labels"])[1:] != IGNORE_INDEX)
        for numbers in batch
        for number in numbers
    }
    kept = torch.zeros(len(batch), longest - 1, dtype=torch.bool)
    for place, numbers in enumerate(batch):
        for number in numbers:
            kept[place, places[number]] = True
    with bft_hf.record(model) if patched else nullcontext() as trace, head_only_at(model, kept):
        logits = model(**inputs, use_cache=False, return_dict=True).logits[0]
    precision = gain = None
    if trace is not None:
        # Prompt tuning puts virtual tokens in front, which are none of the row's: the row's own are the last.
        precision = _by_token(trace.final_precision)[:, -longest:].cpu().numpy()
        gain = torch.stack([_by_token(layer).cpu() for layer in trace.gain], -1)[:, -longest:].numpy()
    at = (kept.flatten().cumsum(0) - 1).reshape(kept.shape).numpy()
    for place, numbers in enumerate(batch):
        for number in numbers:
            row, here = rows[number], places[number]
            labels = np.asarray(row["labels"], dtype=np.int64)[here + 1]
            states: dict[str, Any] = dict.fromkeys(("precision", "gain", "input_precision", "input_gain"))
            passages = []
            if precision is not None and gain is not None:
                states = {"precision": precision[place, here], "gain": gain[place, here]}
                states |= {"input_precision": precision[place, here + 1], "input_gain": gain[place, here + 1]}
                passages = [
                    {"precision": float(precision[place, a:b].mean()), "gain": float(gain[place, a:b].mean())}
                    for a, b in row.get("passage_spans") or ()
                ]
            yield (
                number,
                RowScores(
                    id=str(row.get("id", number)),
                    positions=here + 1,
                    labels=labels,
                    passages=passages,
                    **_statistics(logits, at[place, here], labels),
                    **states,
                ),
            )


def _trust(row: Mapping[str, Any]) -> tuple[float, ...] | None:
    """The reliability of each of a row's tokens, or None."""
    if row.get("reliability") is None:
        return None
    from .collator import by_token  # which imports TRL

    return tuple(by_token(row))


def _padded(sequences: Sequence[Sequence[Any]], length: int, fill: float) -> "torch.Tensor":
    import torch

    return torch.tensor([[*sequence, *[fill] * (length - len(sequence))] for sequence in sequences])


def _by_token(values: "torch.Tensor") -> "torch.Tensor":
    """(batch, token) of (batch, token[, channel]), float64 as all the columns are."""
    return (values if values.ndim == 2 else values.mean(-1)).double()


@contextmanager
def head_only_at(model: Any, kept: "torch.Tensor") -> Iterator[None]:
    """Let the LM head see the kept positions alone, as one row of a batch of one.

    Args:
        model: Its base model's last hidden states are replaced on their way to the head.
        kept: (batch, token - 1), of all tokens but the last.
    """
    top = model.get_base_model() if hasattr(model, "get_base_model") else model

    def keep(module: Any, args: Any, output: Any) -> Any:
        states = output.last_hidden_state[:, -kept.shape[1] - 1 :]
        output.last_hidden_state = states[:, :-1][kept.to(states.device)][None]
        return output

    handle = top.base_model.register_forward_hook(keep)
    try:
        yield
    finally:
        handle.remove()


def _statistics(logits: "torch.Tensor", places: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
    """The columns of `RowScores` that need the predicted distributions, a chunk of labels at a time.

    Args:
        logits: (kept position, vocabulary).
        places: (label,), which of the positions predicts it.
        labels: (label,).
    """
    import torch

    columns: dict[str, list[Any]] = {"loss": [], "entropy": [], "rivals": [], "rival_loss": []}
    for start in range(0, len(labels), CHUNK):
        some = logits[torch.from_numpy(places[start : start + CHUNK]).to(logits.device)]
        wanted = torch.from_numpy(labels[start : start + CHUNK]).to(logits.device)[:, None]
        log_probs = some.to(torch.promote_types(some.dtype, torch.float32)).log_softmax(-1)
        rival = log_probs.scatter(-1, wanted, -torch.inf).max(-1)
        for name, values in {
            "loss": -log_probs.gather(-1, wanted)[:, 0],
            "entropy": torch.special.entr(log_probs.exp()).sum(-1),
            "rivals": rival.indices,
            "rival_loss": -rival.values,
        }.items():
            columns[name].append(values.cpu().numpy())
    return {
        name: np.concatenate([np.empty(0), *values]).astype(np.int64 if name == "rivals" else np.float64)
        for name, values in columns.items()
    }
