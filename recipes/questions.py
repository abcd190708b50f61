"""Question-answering rows: where they come from, and how they become tokens."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from .prompts import (
    INSTRUCTION,
    Prompt,
    answer_tokens,
    end_of_turn,
    format_prompt,
    passage_spans,
    prompt_reliability,
    prompt_tokens,
    row_prompt,
)
from .question_files import DEMO, DEMO_FILE, DataError, check_counts, read_questions

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "DEMO",
    "DEMO_FILE",
    "IGNORE_INDEX",
    "INSTRUCTION",
    "DataError",
    "answer_tokens",
    "end_of_turn",
    "format_prompt",
    "load_questions",
    "prompt_tokens",
    "row_prompt",
    "row_reliability",
    "tokenize_example",
    "tokenize_questions",
]

IGNORE_INDEX = -100


def load_questions(
    source: str,
    *,
    split: str,
    limit: int | None = None,
    max_context_chars: int | None = None,
    seed: int = 0,
) -> "Dataset":
    """Read question-answering rows from wherever they are.

    Args:
        source: "demo", the corpus that ships with the package; a local file, SQuAD JSON (v1.1) or JSONL with
            `question`, `context`, `answers` (a list of texts, or SQuAD's {"text": [...]}) and optionally `id`, `title` and
            `reliability`, plain or .gz; else a Hub id whose rows look like rajpurkar/squad's. In place of `context` a row
            may have `ctxs`, the list of retrieved passages that DPR, FiD and their like write: its gold passage becomes the
            context, and rows without one are left out (`read_questions` counts them).
        split: "train", "validation" or "all"; on the Hub any split of the data set. The demo has its own two. A
            local file is one list of rows: "all" is the whole of it, and "train" and "validation" divide it 9 to 1 by
            a hash, of the title where every row has one and there are 50 or more, else of the passage: the two share
            no article, or no passage.
        limit: How many rows: a random sample in random order, fixed by `seed`, so that a smaller limit gives the
            first rows of a larger one. Without it, all rows in their own order.
        max_context_chars: Leaves out rows whose passage is longer.
        seed: Of the sample.

    Returns:
        Rows with `id` (unique), `title` ("" when there is none), `context`, `question`, and `answers`, a list of one
        text or more, the first of which is the training target; and where the source has them `ctxs` and `reliability`.

    Raises:
        DataError: A file that is missing or unreadable, a malformed row (named by its number), a repeated id, no rows
            left or fewer than `limit`, or a Hub that cannot be reached.
        ValueError: `limit` or `max_context_chars` under 1, or an unknown `split` of a local source.
    """
    check_counts(limit, max_context_chars)
    return read_questions(source, split=split).sample(limit, max_context_chars, seed)


def tokenize_example(
    tokenizer: "PreTrainedTokenizerBase",
    row: Mapping[str, Any],
    max_length: int | None = None,
    *,
    reliability: bool = False,
    spans: bool = False,
) -> dict[str, Any]:
    """Turn a question into a row to train on: prompt, first reference, end-of-turn token.

    Args:
        tokenizer: The model's.
        row: With `id`, `context` (or the `passages` of `add_distractors`), `question`, `answers`.
        max_length: Most tokens in all. A longer row loses the ends of its passages, the gold one's last, and never of its
            question or answer.
        reliability: Give `reliability` too, a number a token: the passages' own, 1 elsewhere.
        spans: Say where the passages stand, as first token and the one after the last: `passage_spans` of each that is in the
            prompt, with `passage_gold`, whether it is the gold one; `passage_span` of the gold one, and `answer_span` of the
            first place in it where the first answer stands; -1, -1 where there is none.

    Returns:
        `id`; `input_ids`; `labels`, -100 over the prompt; `truncated`, whether a passage was cut or left out; of a row with
        `passages` also `gold_truncated`.

    Raises:
        DataError: Question and answer alone are longer than `max_length`.
    """
    answer = answer_tokens(tokenizer, row["answers"][0])
    room = None if max_length is None else max_length - len(answer)
    prompt, numbers = row_prompt(tokenizer, row, room)
    example: dict[str, Any] = {
        "id": row["id"],
        "input_ids": prompt.input_ids + answer,
        "labels": [IGNORE_INDEX] * len(prompt.input_ids) + answer,
        "truncated": prompt.cut,
    }
    if row.get("passages") is not None:
        example["gold_truncated"] = prompt.gold_cut
    if reliability:
        example["reliability"] = row_reliability(tokenizer, row, prompt, numbers) + [1.0] * len(answer)
    if spans:
        example |= _spans(tokenizer, row, prompt)
    return example


def row_reliability(
    tokenizer: "PreTrainedTokenizerBase", row: Mapping[str, Any], prompt: Prompt, numbers: Sequence[Sequence[float]]
) -> list[float]:
    """The reliability of a row's prompt, token by token.

    Raises:
        DataError: As `prompt_reliability`, with the row's id in front.
    """
    passages = row.get("passages")
    texts = [row["context"]] if passages is None else [passage["text"] for passage in passages]
    try:
        return prompt_reliability(tokenizer, prompt, texts, numbers)
    except DataError as error:
        raise DataError(f"row {row['id']!r}: {error}") from None


def _spans(tokenizer: "PreTrainedTokenizerBase", row: Mapping[str, Any], prompt: Prompt) -> dict[str, Any]:
    passages = row.get("passages")
    gold = [True] if passages is None else [bool(passage["gold"]) for passage in passages]
    found: dict[str, Any] = {"passage_spans": [], "passage_gold": [], "passage_span": [-1, -1], "answer_span": [-1, -1]}
    answer = row["answers"][0]
    for is_gold, text, tokens in zip(gold, prompt.passages, passage_spans(tokenizer, prompt), strict=True):
        if not tokens or text is None:
            continue
        span = [tokens[0][0], tokens[-1][0] + 1]
        found["passage_spans"].append(span)
        found["passage_gold"].append(is_gold)
        if is_gold:
            found["passage_span"] = span
            start = text.find(answer)
            inside = [place for place, first, last in tokens if first < start + len(answer) and last > start]
            if start >= 0 and inside:
                found["answer_span"] = [inside[0], inside[-1] + 1]
    return found


def tokenize_questions(
    dataset: "Dataset",
    tokenizer: "PreTrainedTokenizerBase",
    max_length: int | None = None,
    *,
    reliability: bool = False,
    spans: bool = False,
    num_proc: int | None = None,
) -> "Dataset":
    """Tokenize every row by `tokenize_example`; `sum(result["truncated"])` counts those whose passages were cut."""
    return dataset.map(
        partial(_tokenize, tokenizer=tokenizer, max_length=max_length, reliability=reliability, spans=spans),
        remove_columns=[name for name in dataset.column_names if name != "id"],
        num_proc=num_proc,
        desc="Tokenizing questions",
    )


def _tokenize(row: Mapping[str, Any], tokenizer: "PreTrainedTokenizerBase", **options: Any) -> dict[str, Any]:
    return tokenize_example(tokenizer, row, **options)
