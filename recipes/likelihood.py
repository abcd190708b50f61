"""The reliability of passages from the language model itself: how likely it finds the question, given each of them."""

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from .evaluation import batches, eval_mode, sequence_nll

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FLOOR = 0.2
REQUEST = "Write a question that this passage answers."


def likelihood_reliability(
    dataset: "Dataset",
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    *,
    floor: float = FLOOR,
    batch_size: int = 16,
    max_length: int | None = None,
    progress: bool = True,
    desc: str = "Rating passages",
) -> "Dataset":
    """Set the reliability of each row's passages by how likely the model finds the row's question given each.

    The likelihood of the question is how Sachan et al. (2022, "Improving Passage Retrieval with Zero-Shot Question Generation")
    rank passages; it needs no retriever, no labels and no training. Read as p(question | passage), with every passage of a row
    as likely as another beforehand, it gives the posterior that the question was asked of that passage; reliability is that
    over the best passage's, no less than `floor`. In a data-parallel run each process rates a part.

    Args:
        dataset: Rows with `question` and the `passages` of `add_distractors`.
        model: A causal language model, before it is patched. It is put into eval mode meanwhile.
        tokenizer: The model's.
        floor: The least reliability, which keeps every passage readable: the model is often wrong.
        batch_size: Passages at once.
        max_length: Most tokens of a passage and its question; longer passages are cut. None: the model's own limit.
        progress: Show a progress bar.
        desc: In front of it.

    Returns:
        The dataset with other numbers in `passages`. Rows of one passage have 1: there is nothing to choose.

    Raises:
        ValueError: There are no passages, `floor` is outside [0, 1], or the model is patched.
    """
    from accelerate import PartialState
    from accelerate.utils import gather_object

    import bft_hf
    from bft_hf.noise.reliability import check_rating, reliability_of_scores

    check_rating(dataset, floor)
    if bft_hf.is_patched(model):
        raise ValueError("the model is patched already: passages are rated by a plain model, before bft_hf.patch")
    max_length = max_length or getattr(model.config, "max_position_embeddings", None)
    pairs = [
        (place, passage["text"], row["question"])
        for place, row in enumerate(dataset)
        if len(row["passages"]) > 1
        for passage in row["passages"]
    ]
    state = PartialState()
    with state.split_between_processes(pairs) as own:
        found = _log_likelihoods(
            model, tokenizer, own, batch_size, max_length, progress and state.is_main_process, desc
        )
    if state.num_processes > 1:
        found = gather_object(found)
    of_row: dict[int, list[float]] = {}
    for (place, _, _), value in zip(pairs, found, strict=True):
        of_row.setdefault(place, []).append(value)
    rated = {
        place: reliability_of_scores([math.exp(value - max(values)) for value in values], floor)
        for place, values in of_row.items()
    }
    return dataset.map(
        partial(_rate, rated=rated), with_indices=True, features=dataset.features, desc=None, load_from_cache_file=False
    )


def _rate(row: dict[str, Any], place: int, rated: dict[int, list[float]]) -> dict[str, Any]:
    from bft_hf.noise.reliability import with_reliability

    return with_reliability(row["passages"], rated.get(place, [1.0] * len(row["passages"])))


def _log_likelihoods(
    model: Any,
    tokenizer: "PreTrainedTokenizerBase",
    pairs: Sequence[tuple[int, str, str]],
    batch_size: int,
    max_length: int | None,
    progress: bool,
    desc: str,
) -> list[float]:
    """log p(question | passage) in nats, the sum over the question's tokens, for each pair."""
    import torch
    from tqdm.auto import tqdm

    questions = [tokenizer(f"{text.rstrip('? ')}?", add_special_tokens=False)["input_ids"] for _, _, text in pairs]
    prompts = []
    for (_, passage, _), question in zip(pairs, questions, strict=True):
        prompt = _prompt(tokenizer, passage)
        if max_length is not None and (over := len(prompt) + len(question) - max_length) > 0:
            ids = tokenizer(passage, add_special_tokens=False)["input_ids"]
            prompt = _prompt(tokenizer, tokenizer.decode(ids[: max(len(ids) - over, 0)]))
        prompts.append(prompt)
    order = sorted(range(len(pairs)), key=lambda place: -len(prompts[place]))
    found = [0.0] * len(pairs)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    with (
        torch.inference_mode(),
        eval_mode(model),
        tqdm(total=len(pairs), desc=desc, unit="passage", disable=not progress) as done,
    ):
        for batch in batches(order, batch_size):
            asked = [questions[place] for place in batch]
            means = sequence_nll(model, [prompts[place] for place in batch], asked, pad)
            for place, question, mean in zip(batch, asked, means, strict=True):
                found[place] = -mean * len(question)
            done.update(len(batch))
    return found


def _prompt(tokenizer: "PreTrainedTokenizerBase", passage: str) -> list[int]:
    text = f"Passage: {passage}\n\n{REQUEST}"
    if not tokenizer.chat_template:
        return tokenizer(f"{text}\n\nQuestion:\n")["input_ids"]
    messages = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer(rendered, add_special_tokens=False)["input_ids"]
