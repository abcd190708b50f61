"""Question-answering rows: where they come from, and how they become tokens."""

import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

IGNORE_INDEX = -100
DEMO = "demo"
DEMO_FILE = Path(__file__).parent / "data" / "demo.jsonl.gz"
SPLITS = ("train", "validation", "all")
HELD_OUT = 10  # one article in so many of a single file is its validation split
ENOUGH_TITLES = 50  # fewer articles than this could leave a split without any

INSTRUCTION = "Answer the question with the shortest span of the passage that answers it, copied word for word."


class DataError(ValueError):
    """The data cannot be used; the message is one line and names the remedy."""


class _Malformed(Exception):
    """What is wrong with a row, before its place is known."""


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
            `question`, `context`, `answers` (a list of texts, or SQuAD's {"text": [...]}) and optionally `id` and
            `title`, plain or .gz; else a Hub id whose rows look like rajpurkar/squad's.
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
        text or more, the first of which is the training target.

    Raises:
        DataError: A file that is missing or unreadable, a malformed row (named by its number), a repeated id, no rows
            left or fewer than `limit`, or a Hub that cannot be reached.
        ValueError: `limit` or `max_context_chars` under 1, or an unknown `split` of a local source.
    """
    for name, value in (("limit", limit), ("max_context_chars", max_context_chars)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    rows = _read(source, split)
    _check_ids(source, rows)
    total = len(rows)
    if not total:
        raise DataError(f"{source}: no questions in its {split} split")
    if max_context_chars is not None:
        rows = [row for row in rows if len(row["context"]) <= max_context_chars]
    if len(rows) < (limit or 1):
        which = f" have a passage of at most {max_context_chars} characters" if max_context_chars else " are there"
        raise DataError(
            f"{source}: {len(rows)} of {total} questions of its {split} split{which}, {limit or 1} were asked for: "
            "ask for fewer examples or allow longer passages"
        )
    if limit is not None:
        import numpy as np

        rows = [rows[place] for place in np.random.default_rng(seed).permutation(len(rows))[:limit]]
    return _dataset(rows)


def format_prompt(tokenizer: "PreTrainedTokenizerBase", context: str, question: str) -> str:
    """Write the prompt of a question, up to where the answer starts: the only place where it is written.

    With a chat template: the instruction as the system message (in front of the user's, for templates without a system
    role), passage and question as the user's, and the template's generation prompt. Without: the same texts in
    paragraphs. That form ends in a line break, so that an answer starts a line in both, and no tokenizer has a blank
    to merge into its first word.
    """
    user = f"Passage: {context}\n\nQuestion: {question}"
    if not tokenizer.chat_template:
        return f"{INSTRUCTION}\n\n{user}\n\nAnswer:\n"
    return _render(tokenizer, user)


def prompt_tokens(
    tokenizer: "PreTrainedTokenizerBase", context: str, question: str, max_tokens: int | None = None
) -> tuple[list[int], bool]:
    """Tokenize a prompt, cutting words off the end of the passage, and never of anything else, until it fits.

    Returns:
        The token ids, and whether the passage was cut.

    Raises:
        DataError: It does not fit without any passage either.
    """
    tokens = _encode_prompt(tokenizer, format_prompt(tokenizer, context, question))
    if max_tokens is None or len(tokens) <= max_tokens:
        return tokens, False
    ends = [0, *(word.end() for word in re.finditer(r"\S+", context))]
    low, high = 0, len(ends) - 1  # ends[low] fits once the loop is over, ends[high] does not
    tokens = _encode_prompt(tokenizer, format_prompt(tokenizer, "", question))
    if len(tokens) > max_tokens:
        raise DataError(f"the question alone takes {len(tokens)} tokens where {max_tokens} are left: raise max_length")
    while high - low > 1:
        middle = (low + high) // 2
        attempt = _encode_prompt(tokenizer, format_prompt(tokenizer, context[: ends[middle]], question))
        if len(attempt) <= max_tokens:
            low, tokens = middle, attempt
        else:
            high = middle
    return tokens, True


def answer_tokens(tokenizer: "PreTrainedTokenizerBase", answer: str) -> list[int]:
    """Tokenize an answer and end it with the end-of-turn token, which is trained like the rest.

    By itself, apart from the prompt: tokenized together, the last characters of the one could merge with the first of
    the other into a token that no prompt ends with when the model generates.
    """
    return [*tokenizer(answer, add_special_tokens=False)["input_ids"], end_of_turn(tokenizer)]


def end_of_turn(tokenizer: "PreTrainedTokenizerBase") -> int:
    """Find the token that ends an answer: the first special one the chat template puts after an assistant's message.

    Without a template, or where it puts none, the end-of-sequence token.

    Raises:
        DataError: There is neither.
    """
    if tokenizer.chat_template:
        mark = "ANSWER"
        messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": mark}]
        after = str(tokenizer.apply_chat_template(messages, tokenize=False)).rpartition(mark)[2]
        special = set(tokenizer.all_special_ids) | set(getattr(tokenizer, "added_tokens_decoder", {}))
        for token in tokenizer(after, add_special_tokens=False)["input_ids"]:
            if token in special:
                return token
    if tokenizer.eos_token_id is None:
        raise DataError("the tokenizer has no end-of-sequence token to end an answer with: set tokenizer.eos_token")
    return tokenizer.eos_token_id


def tokenize_example(
    tokenizer: "PreTrainedTokenizerBase", row: Mapping[str, Any], max_length: int | None = None
) -> dict[str, Any]:
    """Turn a question into a row to train on: prompt, first reference, end-of-turn token.

    Args:
        tokenizer: The model's.
        row: With `id`, `context`, `question`, `answers`.
        max_length: Most tokens in all. A longer row loses the end of its passage, never of its question or answer.

    Returns:
        `id`; `input_ids`; `labels`, -100 over the prompt; `truncated`, whether the passage was cut.

    Raises:
        DataError: Question and answer alone are longer than `max_length`.
    """
    answer = answer_tokens(tokenizer, row["answers"][0])
    room = None if max_length is None else max_length - len(answer)
    try:
        prompt, truncated = prompt_tokens(tokenizer, row["context"], row["question"], room)
    except DataError as error:
        raise DataError(f"row {row['id']!r}: {error}") from None
    return {
        "id": row["id"],
        "input_ids": prompt + answer,
        "labels": [IGNORE_INDEX] * len(prompt) + answer,
        "truncated": truncated,
    }


def tokenize_questions(
    dataset: "Dataset",
    tokenizer: "PreTrainedTokenizerBase",
    max_length: int | None = None,
    *,
    num_proc: int | None = None,
) -> "Dataset":
    """Tokenize every row by `tokenize_example`; `sum(result["truncated"])` counts those whose passage was cut."""
    return dataset.map(
        partial(_tokenize, tokenizer=tokenizer, max_length=max_length),
        remove_columns=[name for name in dataset.column_names if name != "id"],
        num_proc=num_proc,
        desc="Tokenizing questions",
    )


def _tokenize(row: Mapping[str, Any], tokenizer: "PreTrainedTokenizerBase", max_length: int | None) -> dict[str, Any]:
    return tokenize_example(tokenizer, row, max_length)


def _render(tokenizer: "PreTrainedTokenizerBase", user: str) -> str:
    import jinja2

    messages = [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": user}]
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except jinja2.TemplateError:  # how templates such as Gemma's say that they know no system role
        text = ""
    if INSTRUCTION in text:
        return text
    messages = [{"role": "user", "content": f"{INSTRUCTION}\n\n{user}"}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def _encode_prompt(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    # A template writes the beginning-of-sequence token itself; asking the tokenizer for it too would double it.
    tokens = list(tokenizer(text, add_special_tokens=not tokenizer.chat_template)["input_ids"])
    if not tokenizer.chat_template and tokens and tokens[-1] == tokenizer.eos_token_id:
        tokens.pop()
    return tokens


def _read(source: str, split: str) -> list[dict[str, Any]]:
    path = DEMO_FILE if source == DEMO else Path(source).expanduser()
    looks_local = path.suffix in (".json", ".jsonl", ".gz") or source.startswith(("/", ".", "~"))
    if source != DEMO and not path.exists() and not looks_local:
        return list(_numbered(source, _hub_rows(source, split)))
    if split not in SPLITS:
        raise ValueError(f"split of a local source must be one of {', '.join(SPLITS)}, got {split!r}")
    raw = list(_file_rows(path))
    if source == DEMO and split != "all":
        raw = [item for item in raw if item[1]["split"] == split]
    rows = list(_numbered(str(source), raw))
    if source == DEMO or split == "all":
        return rows
    titles = {row["title"] for row in rows}
    unit = "title" if "" not in titles and len(titles) >= ENOUGH_TITLES else "context"
    return [row for row in rows if _held_out(row[unit]) == (split == "validation")]


def _held_out(text: str) -> bool:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % HELD_OUT == 0


def _numbered(source: str, items: Iterable[tuple[str, Any]]) -> Iterator[dict[str, Any]]:
    for number, (place, raw) in enumerate(items, start=1):
        try:
            yield _row(raw, f"{Path(source).name.split('.')[0]}-{number}")
        except _Malformed as error:
            where = f" ({place})" if place else ""
            raise DataError(f"{source}: row {number}{where} is malformed: {error}") from None


def _row(raw: Any, default_id: str) -> dict[str, Any]:
    """Check one row and bring it into the one form that everything here reads."""
    if not isinstance(raw, Mapping):
        raise _Malformed(f"an object with question, context and answers is needed, not {type(raw).__name__}")
    row: dict[str, Any] = {}
    for name in ("context", "question"):
        if name not in raw:
            raise _Malformed(f"it has no {name!r}")
        if not isinstance(raw[name], str) or not raw[name].strip():
            raise _Malformed(f"{name!r} must be a text that is not empty")
        row[name] = raw[name]
    if "answers" not in raw:
        raise _Malformed("it has no 'answers'")
    answers = raw["answers"]
    if isinstance(answers, Mapping):
        answers = answers.get("text")
    if not isinstance(answers, list):
        raise _Malformed("'answers' must be a list of texts, or {'text': [...]}")
    texts = [answer.get("text") if isinstance(answer, Mapping) else answer for answer in answers]
    if not texts:
        raise _Malformed("'answers' is empty: each question needs one at least")
    row["answers"] = [text.strip() for text in texts if isinstance(text, str) and text.strip()]
    if len(row["answers"]) < len(texts):
        raise _Malformed("'answers' holds something that is no text or is empty")
    row_id = raw.get("id")
    if row_id is None:
        row_id = default_id
    if isinstance(row_id, bool) or not isinstance(row_id, str | int) or row_id == "":
        raise _Malformed("'id' must be a text or an integer")
    row["id"] = str(row_id)
    title = raw.get("title")
    row["title"] = title if isinstance(title, str) else ""
    return row


def _file_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Give (place in the file, row) for each row of a SQuAD JSON or JSONL file."""
    text = _file_text(path)
    whole: Any = None
    try:
        whole = json.loads(text)
    except json.JSONDecodeError as error:
        # "Extra data" is what a second line of JSONL looks like; in a .json anything else is a broken file.
        if ".json" in path.suffixes and error.msg != "Extra data":
            raise DataError(f"{path}: line {error.lineno} is not JSON: {error.msg}") from None
    if isinstance(whole, Mapping) and "data" in whole:
        yield from _squad_rows(path, whole["data"])
    elif isinstance(whole, list):
        yield from (("", row) for row in whole)
    else:
        for line, part in enumerate(text.split("\n"), start=1):
            if part.strip():
                try:
                    row = json.loads(part)
                except json.JSONDecodeError as error:
                    raise DataError(f"{path}: line {line} is not JSON: {error.msg}") from None
                yield f"line {line}", row


def _file_text(path: Path) -> str:
    if path.is_dir():
        raise DataError(f"{path} is a folder: give a SQuAD JSON or JSONL file")
    try:
        content = path.read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
        return content.decode("utf-8-sig")
    except FileNotFoundError:
        raise DataError(f"no file {str(path)!r}: give --dataset an existing file or a Hub id, or use --demo") from None
    except UnicodeDecodeError:
        raise DataError(f"{path} is not UTF-8 text: give a SQuAD JSON or JSONL file, plain or .gz") from None
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise DataError(f"{path} is a damaged .gz file: fetch it again") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None


def _squad_rows(path: Path, articles: Any) -> Iterator[tuple[str, Any]]:
    for article_number, article in enumerate(_list(path, articles, "'data'"), start=1):
        place = f"article {article_number}"
        for paragraph_number, paragraph in enumerate(_list(path, article, place, "paragraphs"), start=1):
            inner = f"{place}, paragraph {paragraph_number}"
            for question in _list(path, paragraph, inner, "qas"):
                if isinstance(question, Mapping):
                    shared = {
                        name: part[name] for part, name in ((article, "title"), (paragraph, "context")) if name in part
                    }
                    question = {**shared, **question}
                yield inner, question


def _list(path: Path, holder: Any, place: str, name: str | None = None) -> list[Any]:
    value = holder.get(name) if name and isinstance(holder, Mapping) else holder
    if not isinstance(value, list):
        what = f"has no list {name!r}" if name else "must be a list of articles"
        raise DataError(f"{path}: {place} {what}: SQuAD's layout is data > paragraphs > context and qas")
    return value


def _hub_rows(source: str, split: str) -> Iterator[tuple[str, Any]]:
    from datasets import load_dataset

    from bft_hf.recipes.models import cache_only_when_unreachable, hub_reachable

    try:
        with cache_only_when_unreachable():
            dataset = load_dataset(source, split=split)
    except Exception as error:  # the Hub's clients share no base class for what can go wrong
        remedy = "use --demo, or give --dataset a local SQuAD JSON or JSONL file"
        if not hub_reachable():
            raise DataError(f"cannot reach the Hub, and its cache here has no data set {source!r}: {remedy}") from error
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise DataError(f"cannot load {source!r} (split {split!r}) from the Hub: {lines[0]}: {remedy}") from error
    for row in dataset:
        yield "", row


def _check_ids(source: str, rows: list[dict[str, Any]]) -> None:
    seen: dict[str, int] = {}
    for number, row in enumerate(rows, start=1):
        first = seen.setdefault(row["id"], number)
        if first != number:
            raise DataError(f"{source}: rows {first} and {number} have the same id {row['id']!r}: ids must be unique")


def _dataset(rows: list[dict[str, Any]]) -> "Dataset":
    from datasets import Dataset, Features, Sequence, Value

    texts = ("id", "title", "context", "question")
    features = Features({**{name: Value("string") for name in texts}, "answers": Sequence(Value("string"))})
    return Dataset.from_dict({name: [row[name] for row in rows] for name in features}, features=features)
