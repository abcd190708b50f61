"""Answers scored: greedy generation, exact match, F1, and the negative log-likelihood of the reference."""

import contextlib
import re
import string
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True)
class Evaluation:
    """What `evaluate_answers` measured.

    Attributes:
        exact_match: Share of the generated answers equal to a reference after SQuAD's normalisation, in [0, 1]; None
            where none was generated.
        f1: Mean over generated answers of the word overlap's F1 with the best reference, in [0, 1]; or None.
        answer_nll: Mean over questions of the mean over tokens of -log p(token), in nats, of the first reference and
            the end-of-turn token after it, given the prompt and the tokens before.
        n: Questions.
        n_generated: The first so many of them, those that were answered too.
        predictions: The generated answers, in the order of the rows.
        per_question: For each row, in order: id, prediction, answers, exact_match, f1, answer_nll, truncated (whether
            a passage was cut to fit, or left out). Prediction, exact_match and f1 are None where no answer was generated.
            Of rows with `passages` also gold_truncated and distractors_given, how many are in the prompt.
    """

    exact_match: float | None
    f1: float | None
    answer_nll: float
    n: int
    n_generated: int
    predictions: list[str]
    per_question: list[dict[str, Any]]

    def summary(self) -> dict[str, float | int | None]:
        """The numbers without the rows."""
        return {name: getattr(self, name) for name in ("exact_match", "f1", "answer_nll", "n", "n_generated")}


def normalize_answer(text: str) -> str:
    """Lower case, no ASCII punctuation, no English articles, single blanks (SQuAD's evaluate-v1.1.py)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, references: Sequence[str]) -> float:
    """Score 1.0 when the prediction equals any reference after normalisation, else 0.0."""
    normalized = normalize_answer(prediction)
    return float(any(normalized == normalize_answer(reference) for reference in references))


def f1(prediction: str, references: Sequence[str]) -> float:
    """Score the F1 of the words shared with the best reference, in [0, 1].

    Where nothing is left of a text after normalisation ("The"), it is 1.0 if nothing is left of both, as in SQuAD's
    evaluate-v2.0.py; v1.1 gave 0.0 there beside an exact match of 1.
    """
    return max(_overlap(prediction, reference) for reference in references)


def prepare_questions(
    tokenizer: "PreTrainedTokenizerBase",
    rows: Sequence[Mapping[str, Any]],
    *,
    max_new_tokens: int,
    max_length: int | None,
    reliability: bool = False,
) -> tuple[list[list[int]], list[list[int]], list[dict[str, Any]], list[list[float]] | None]:
    """What `evaluate_answers` asks, from the same arguments.

    Returns:
        By row: the prompt's token ids, the reference's, what is noted of the row, and the reliability of the prompt's tokens
        (None where it is not asked for).

    Raises:
        ValueError: No rows, (as DataError) a question that does not fit without any passage, or reliability that does not fit.
    """
    from bft_hf.recipes.questions import answer_tokens, row_prompt, row_reliability

    if not rows:
        raise ValueError("there is no question to evaluate on")
    answers = [answer_tokens(tokenizer, row["answers"][0]) for row in rows]
    prompts: list[list[int]] = []
    notes: list[dict[str, Any]] = []
    trust: list[list[float]] | None = [] if reliability else None
    for row, answer in zip(rows, answers, strict=True):
        room = None if max_length is None else max_length - max(max_new_tokens, len(answer))
        prompt, numbers = row_prompt(tokenizer, row, room)
        prompts.append(prompt.input_ids)
        notes.append({"truncated": prompt.cut})
        if row.get("passages") is not None:
            gold = sum(bool(passage["gold"]) for passage in row["passages"])
            notes[-1] |= {"gold_truncated": prompt.gold_cut, "distractors_given": len(prompt.kept) - gold}
        if trust is not None:
            trust.append(row_reliability(tokenizer, row, prompt, numbers))
    return prompts, answers, notes, trust


def evaluate_answers(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    rows: Iterable[Mapping[str, Any]],
    *,
    batch_size: int = 16,
    max_new_tokens: int = 32,
    max_length: int | None = None,
    generate_first: int | None = None,
    reliability: bool = False,
    record_uncertainty: bool = False,
    progress: bool = True,
    desc: str = "Evaluating",
) -> Evaluation:
    """Score every question's reference by its likelihood, and greedy answers by EM and F1.

    Args:
        model: A causal language model, on whatever device; a PEFT model too. It is put into eval mode meanwhile.
        tokenizer: The model's.
        rows: What `load_questions` gives: id, context, question, answers; or what `add_distractors` makes of it.
        batch_size: Questions at once, left-padded, those of like length together.
        max_new_tokens: Where a generated answer is cut.
        max_length: Most tokens of prompt and answer together; longer passages are cut as in training. None: the
            model's own limit.
        generate_first: Answer only the first so many rows: on a CPU generation takes several times as long as the
            likelihood. None: all; 0: none.
        reliability: Hand the passages' reliability to the model, which is patched then.
        record_uncertainty: Add to each answer's row how sure the model was of it, as `scores.answer_uncertainty` says.
        progress: Show a progress bar.
        desc: In front of it.

    Raises:
        ValueError: As `prepare_questions`.
    """
    import torch
    from tqdm.auto import tqdm

    from bft_hf.recipes.questions import end_of_turn

    rows = list(rows)
    max_length = max_length or getattr(model.config, "max_position_embeddings", None)
    prompts, answers, notes, trust = prepare_questions(
        tokenizer, rows, max_new_tokens=max_new_tokens, max_length=max_length, reliability=reliability
    )
    # Longest first: a batch that does not fit into memory fails at once, not at the end.
    order = sorted(range(len(rows)), key=lambda place: -len(prompts[place]))
    answered = [place for place in order if generate_first is None or place < generate_first]
    ends = sorted({end_of_turn(tokenizer), *_as_list(tokenizer.eos_token_id)})
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else ends[0]
    losses: dict[int, float] = {}
    generated: dict[int, list[int]] = {}
    bar = partial(tqdm, unit="question", disable=not progress)

    def trusted(batch: Sequence[int]) -> list[list[float]] | None:
        return None if trust is None else [trust[place] for place in batch]

    with torch.inference_mode(), eval_mode(model):
        with bar(total=len(rows), desc=f"{desc}: likelihood") as done:
            for batch in batches(order, batch_size):
                contexts, targets = [prompts[place] for place in batch], [answers[place] for place in batch]
                losses.update(zip(batch, sequence_nll(model, contexts, targets, pad, trusted(batch)), strict=True))
                done.update(len(batch))
        if answered:
            with (
                _greedy(model, max_new_tokens, ends, pad) as config,
                bar(total=len(answered), desc=f"{desc}: answers") as done,
            ):
                for batch in batches(answered, batch_size):
                    made = _generate(model, [prompts[place] for place in batch], config, ends, pad, trusted(batch))
                    generated.update(zip(batch, made, strict=True))
                    done.update(len(batch))
    predictions = {place: _text(tokenizer, tokens, ends) for place, tokens in generated.items()}
    if record_uncertainty and answered:
        from bft_hf.recipes.scores import answer_uncertainty

        found = answer_uncertainty(
            model,
            [prompts[place] for place in answered],
            [generated[place] for place in answered],
            token_reliability=trusted(answered),
            batch_size=batch_size,
            pad_token_id=pad,
            progress=progress,
            desc=f"{desc}: uncertainty",
        )
        sure = dict(zip(answered, found, strict=True))
        for place, note in enumerate(notes):
            note |= sure.get(place, dict.fromkeys(found[0]))
    per_question = [
        {
            "id": row["id"],
            "prediction": predictions.get(place),
            "answers": list(row["answers"]),
            "exact_match": exact_match(predictions[place], row["answers"]) if place in predictions else None,
            "f1": f1(predictions[place], row["answers"]) if place in predictions else None,
            "answer_nll": losses[place],
            **notes[place],
        }
        for place, row in enumerate(rows)
    ]
    return Evaluation(
        exact_match=_mean(question["exact_match"] for question in per_question),
        f1=_mean(question["f1"] for question in per_question),
        answer_nll=sum(losses.values()) / len(rows),
        n=len(rows),
        n_generated=len(predictions),
        predictions=[predictions[place] for place in sorted(predictions)],
        per_question=per_question,
    )


def batches(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    """The items in their order, `size` at a time."""
    return (items[start : start + size] for start in range(0, len(items), size))


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _overlap(prediction: str, reference: str) -> float:
    predicted, true = normalize_answer(prediction).split(), normalize_answer(reference).split()
    if not predicted or not true:
        return float(predicted == true)
    shared = sum((Counter(predicted) & Counter(true)).values())
    return 2 * shared / (len(predicted) + len(true)) if shared else 0.0


def _left_padded(
    sequences: Sequence[Sequence[int]], pad: int, device: "torch.device"
) -> tuple["torch.Tensor", "torch.Tensor"]:
    """Token ids and attention mask, both (batch, longest)."""
    import torch

    longest = max(len(sequence) for sequence in sequences)
    ids = torch.full((len(sequences), longest), pad)
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        ids[row, longest - len(sequence) :] = torch.tensor(sequence)
        mask[row, longest - len(sequence) :] = 1
    return ids.to(device), mask.to(device)


def _trust(trust: Sequence[Sequence[float]] | None, longest: int, device: "torch.device") -> dict[str, "torch.Tensor"]:
    """`token_reliability`, (batch, longest), of sequences padded on the left; nothing where there is none."""
    import torch

    if trust is None:
        return {}
    rows = [[1.0] * (longest - len(row)) + list(row) for row in trust]
    return {"token_reliability": torch.tensor(rows, device=device)}


def _generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    config: Any,
    ends: Sequence[int],
    pad: int,
    trust: Sequence[Sequence[float]] | None = None,
) -> list[list[int]]:
    """The tokens of each answer, the one that ended it included."""
    ids, mask = _left_padded(prompts, pad, model.device)
    extra = _trust(trust, ids.shape[1], model.device)
    output = model.generate(input_ids=ids, attention_mask=mask, generation_config=config, **extra)
    answers = []
    for tokens in output[:, ids.shape[1] :].tolist():
        stop = next((place for place, token in enumerate(tokens) if token in ends), len(tokens))
        answers.append(tokens[: stop + 1])
    return answers


def _text(tokenizer: "PreTrainedTokenizerBase", tokens: Sequence[int], ends: Sequence[int]) -> str:
    ended = bool(tokens) and tokens[-1] in ends
    return tokenizer.decode(list(tokens[:-1] if ended else tokens), skip_special_tokens=True).strip()


def sequence_nll(
    model: Any,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    pad: int,
    trust: Sequence[Sequence[float]] | None = None,
) -> list[float]:
    """Mean negative log-likelihood of each answer's tokens, in nats.

    Padding on the left lines the answers up at the right end, so that `logits_to_keep` spares the prompt's logits,
    which with a large vocabulary would take more memory than all the rest.
    """
    import torch

    ids, mask = _left_padded(
        [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)], pad, model.device
    )
    keep = max(len(answer) for answer in answers) + 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    if trust is not None:
        trust = [[*row, *[1.0] * len(answer)] for row, answer in zip(trust, answers, strict=True)]
    extra = _trust(trust, ids.shape[1], model.device)
    output = model(
        input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False, logits_to_keep=keep, **extra
    )
    logits = output.logits[:, -keep:-1]
    losses = []
    for row, answer in enumerate(answers):
        target = torch.tensor(answer, device=logits.device)
        losses.append(torch.nn.functional.cross_entropy(logits[row, -len(answer) :].float(), target).item())
    return losses


@contextlib.contextmanager
def eval_mode(model: Any) -> Iterator[None]:
    """Put a model into eval mode, and each of its modules back into its own afterwards."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, was_training in training.items():
            module.training = was_training


@contextlib.contextmanager
def _greedy(model: Any, max_new_tokens: int, ends: Sequence[int], pad: int) -> Iterator[Any]:
    """Give settings for greedy decoding, with the model's own out of the way meanwhile.

    `generate` fills whatever a given config leaves open from the model's: a chat model's sampling, repetition penalty
    or length limits would leak into the measurement, and warn about each other.
    """
    from transformers import GenerationConfig

    config = GenerationConfig(
        do_sample=False,
        num_beams=1,
        max_new_tokens=max_new_tokens,
        eos_token_id=list(ends),
        pad_token_id=pad,
        use_cache=True,
    )
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    holders = [inner] + ([model] if inner is not model and "generation_config" in vars(model) else [])
    before = [holder.generation_config for holder in holders]
    for holder in holders:
        holder.generation_config = GenerationConfig(pad_token_id=pad, eos_token_id=list(ends))
    try:
        yield config
    finally:
        for holder, own in zip(holders, before, strict=True):
            holder.generation_config = own


def _as_list(value: int | Sequence[int] | None) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)
