"""The texts that are looked at: from the command line, from a file, or questions as `bft-sft` formats them."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..arguments import SFTArguments, distractor_sources
from ..command import UsageError, as_usage_error, say
from ..filter_flags import FILTER_FLAGS, check_filter_flags

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

BEFORE = 4
"""So many tokens in front of one are decoded with it: what a token's text is depends on its neighbours."""


@dataclass(frozen=True)
class Text:
    """A text as the model reads it.

    Attributes:
        name: What to call it.
        input_ids: Its tokens.
        tokens: The text of each.
        parts: What each belongs to: "text"; of a question "prompt", "gold passage", "distractor" or "answer".
        cut: Whether something was left out to keep within --max_length.
    """

    name: str
    input_ids: list[int]
    tokens: list[str]
    parts: list[str]
    cut: bool


def read_texts(options: argparse.Namespace, tokenizer: "PreTrainedTokenizerBase", most: int) -> list[Text]:
    """Read and tokenize what --text, --file or --dataset names.

    Args:
        options: Of `bft-inspect`.
        tokenizer: The model's.
        most: Most tokens of a text.

    Raises:
        UsageError: A file that cannot be read, a text without a token, a data set without enough questions, a question that
            does not fit.
    """
    if options.dataset is not None:
        return _questions(options, tokenizer, most)
    if options.text is not None:
        name, content = "--text", options.text
    else:
        name, content = options.file, read_file(options.file)
    ids = list(tokenizer(content)["input_ids"])
    if not ids or not content.strip():
        raise UsageError(f"{name}: there is no text in it")
    kept = ids[:most]
    return [Text(name, kept, token_texts(tokenizer, kept), ["text"] * len(kept), len(kept) < len(ids))]


def read_file(path: str) -> str:
    """The text of a file, or of standard input for "-".

    Raises:
        UsageError: It is not there, or is no text in UTF-8.
    """
    with as_usage_error(f"--file {path}: ", OSError, UnicodeDecodeError):
        if path == "-":
            return sys.stdin.read()
        return Path(path).expanduser().read_text(encoding="utf-8-sig")


def question_arguments(options: argparse.Namespace) -> SFTArguments:
    """The flags that `bft-sft` has too, checked as it checks them.

    Raises:
        UsageError: As `bft-sft`.
    """
    names = ["distractors", "distractor_source", "gold_position", "max_context_chars"]
    names += FILTER_FLAGS
    arguments = SFTArguments(**{name: getattr(options, name) for name in names if hasattr(options, name)})
    distractor_sources(arguments)
    check_filter_flags(arguments)
    return arguments


def _questions(options: argparse.Namespace, tokenizer: "PreTrainedTokenizerBase", most: int) -> list[Text]:
    from ..question_files import DataError
    from ..questions import tokenize_example

    with as_usage_error("", DataError, ValueError, OSError):
        rows = _rows(options)
        examples = [
            tokenize_example(tokenizer, row, most, spans=tokenizer.is_fast)  # type: ignore[arg-type]
            for row in rows
        ]
    return [
        Text(
            str(row["id"]),
            example["input_ids"],
            token_texts(tokenizer, example["input_ids"]),
            _parts(example),
            example["truncated"],
        )
        for row, example in zip(rows, examples, strict=True)  # type: ignore[call-overload]
    ]


def _rows(options: argparse.Namespace) -> "Dataset":
    from bft_hf.noise.distractors import DISTRACTOR_SOURCES, as_corpus, passages_of

    from ..data import with_passages
    from ..question_files import read_passages, read_questions

    arguments = question_arguments(options)
    source = read_questions(options.dataset, split=options.split)
    rows = source.sample(options.examples, options.max_context_chars, options.seed)
    if not options.distractors:
        return rows
    names, file = distractor_sources(arguments)
    corpus: Any = ()
    if any(DISTRACTOR_SOURCES[name].needs_corpus for name in names):
        corpus = as_corpus(passages_of(source.rows) if file is None else read_passages(file))
    return with_passages(rows, options.distractors, corpus, arguments, seed=options.seed)[0]


def _parts(example: dict[str, Any]) -> list[str]:
    parts = ["prompt" if label < 0 else "answer" for label in example["labels"]]
    spans = zip(example.get("passage_spans", []), example.get("passage_gold", []), strict=True)
    for (first, last), gold in spans:
        parts[first:last] = ["gold passage" if gold else "distractor"] * (last - first)
    return parts


def token_texts(tokenizer: "PreTrainedTokenizerBase", ids: Sequence[int]) -> list[str]:
    """What each token adds to the text; a token that adds nothing by itself, by its name in the vocabulary."""
    texts = []
    for place in range(len(ids)):
        start = max(0, place - BEFORE)
        before = tokenizer.decode(ids[start:place], clean_up_tokenization_spaces=False) if place else ""
        whole = tokenizer.decode(ids[start : place + 1], clean_up_tokenization_spaces=False)
        text = str(whole)[len(before) :]
        texts.append(text or str(tokenizer.convert_ids_to_tokens(ids[place])))
    return texts


def say_what_was_cut(texts: Sequence[Text], most: int) -> None:
    """A line where something was left out."""
    cut = sum(text.cut for text in texts)
    if cut:
        which = f"{cut} of {len(texts)} texts are" if len(texts) > 1 else "The text is"
        say(f"{which} longer than {most} tokens and cut there: --max_length, or the model's positions")
