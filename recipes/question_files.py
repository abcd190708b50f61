"""Question-answering rows as they stand in files and on the Hub, checked and brought into one form."""

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bft_hf.noise.passages import Passage, as_passage, gold_place

if TYPE_CHECKING:
    from datasets import Dataset

DEMO = "demo"
DEMO_FILE = Path(__file__).parent / "data" / "demo.jsonl.gz"
SPLITS = ("train", "validation", "all")
HELD_OUT = 10  # one article in so many of a single file is its validation split
ENOUGH_TITLES = 50  # fewer articles than this could leave a split without any


class DataError(ValueError):
    """The data cannot be used; the message is one line and names the remedy."""


class _Malformed(Exception):
    """What is wrong with a row, before its place is known."""


@dataclass(frozen=True)
class Questions:
    """The rows of one split of a source.

    Attributes:
        source: Where they come from.
        split: Which.
        rows: `id`, `title`, `context`, `question`, `answers`, and where the source has them `ctxs` and `reliability`.
        without_gold: How many more there are whose retrieved passages hold no gold one.
    """

    source: str
    split: str
    rows: list[dict[str, Any]]
    without_gold: int = 0

    def sample(self, limit: int | None = None, max_context_chars: int | None = None, seed: int = 0) -> "Dataset":
        """Draw rows; see `load_questions`.

        Raises:
            DataError: There are no rows, or fewer than `limit`.
            ValueError: `limit` or `max_context_chars` under 1.
        """
        check_counts(limit, max_context_chars)
        rows, total = self.rows, len(self.rows)
        if not total:
            missing = f" ({self.without_gold} have no gold passage)" if self.without_gold else ""
            raise DataError(f"{self.source}: no questions in its {self.split} split{missing}")
        if max_context_chars is not None:
            rows = [row for row in rows if len(row["context"]) <= max_context_chars]
        if len(rows) < (limit or 1):
            which = f" have a passage of at most {max_context_chars} characters" if max_context_chars else " are there"
            raise DataError(
                f"{self.source}: {len(rows)} of {total} questions of its {self.split} split{which}, {limit or 1} were "
                "asked for: ask for fewer examples or allow longer passages"
            )
        if limit is not None:
            import numpy as np

            rows = [rows[place] for place in np.random.default_rng(seed).permutation(len(rows))[:limit]]
        return _dataset(rows)


def check_counts(limit: int | None, max_context_chars: int | None) -> None:
    """Raise a ValueError for a count under 1."""
    for name, value in (("limit", limit), ("max_context_chars", max_context_chars)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


def read_questions(source: str, *, split: str) -> Questions:
    """Read all rows of a split; see `load_questions` for what a source may be.

    Raises:
        DataError: A file that is missing or unreadable, a malformed row (named by its number), a repeated id, or a Hub that
            cannot be reached.
        ValueError: An unknown `split` of a local source.
    """
    rows = _read(source, split)
    _check_ids(source, rows)
    with_gold = [row for row in rows if row["context"]]
    return Questions(source, split, with_gold, len(rows) - len(with_gold))


def read_passages(path: str) -> list[Passage]:
    """Read a corpus: the passages of a file of questions, or JSONL with `text` and optionally `title`, plain or .gz.

    Raises:
        DataError: The file is missing, unreadable, or holds something else.
    """
    passages = []
    for number, (place, raw) in enumerate(_file_rows(Path(path).expanduser()), start=1):
        try:
            if isinstance(raw, Mapping) and "context" in raw:
                passages.append(Passage(_text(raw, "context"), _title(raw)))
            elif isinstance(raw, Mapping) and "ctxs" in raw:
                passages += [as_passage(ctx) for ctx in raw["ctxs"]]
            else:
                passages.append(as_passage(raw))
        except (_Malformed, ValueError, TypeError) as error:
            where = f" ({place})" if place else ""
            raise DataError(f"{path}: row {number}{where} is no passage: {error}") from None
    if not passages:
        raise DataError(f"{path}: no passages in it")
    return passages


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
    """Check one row and bring it into the one form that everything here reads; its context is "" without gold passage."""
    if not isinstance(raw, Mapping):
        raise _Malformed(f"an object with question, context and answers is needed, not {type(raw).__name__}")
    row: dict[str, Any] = {}
    listed = "ctxs" in raw and raw["ctxs"] is not None
    if not listed or raw.get("context") is not None:
        row["context"] = _text(raw, "context")
    row["question"] = _text(raw, "question")
    row["answers"] = _answers(raw)
    row_id = raw.get("id")
    if row_id is None:
        row_id = default_id
    if isinstance(row_id, bool) or not isinstance(row_id, str | int) or row_id == "":
        raise _Malformed("'id' must be a text or an integer")
    row["id"] = str(row_id)
    row["title"] = _title(raw)
    reliability = _reliability(raw)
    if listed:
        row |= _retrieved(raw["ctxs"], row, reliability)
    elif reliability is not None:
        row["reliability"] = reliability
    return row


def _text(raw: Mapping[str, Any], name: str) -> str:
    if name not in raw:
        raise _Malformed(f"it has no {name!r}")
    if not isinstance(raw[name], str) or not raw[name].strip():
        raise _Malformed(f"{name!r} must be a text that is not empty")
    return raw[name]


def _title(raw: Mapping[str, Any]) -> str:
    title = raw.get("title")
    return title if isinstance(title, str) else ""


def _answers(raw: Mapping[str, Any]) -> list[str]:
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
    kept = [text.strip() for text in texts if isinstance(text, str) and text.strip()]
    if len(kept) < len(texts):
        raise _Malformed("'answers' holds something that is no text or is empty")
    return kept


def _reliability(raw: Mapping[str, Any]) -> list[float] | None:
    value = raw.get("reliability")
    if value is None:
        return None
    values = value if isinstance(value, list) else [value]
    numbers = all(isinstance(number, int | float) and not isinstance(number, bool) for number in values)
    if not values or not numbers or not all(0 <= number <= 1 for number in values):
        raise _Malformed("'reliability' must be a number in [0, 1], or a list of them")
    return [float(number) for number in values]


def _retrieved(ctxs: Any, row: Mapping[str, Any], reliability: list[float] | None) -> dict[str, Any]:
    """The columns that a list of retrieved passages gives: `ctxs`, and what its gold passage has to say."""
    if not isinstance(ctxs, list) or not all(isinstance(ctx, Mapping) for ctx in ctxs):
        raise _Malformed("'ctxs' must be a list of objects with a 'text'")
    try:
        passages = [as_passage(ctx) for ctx in ctxs]
        gold = gold_place(ctxs, row["answers"])
    except ValueError as error:
        raise _Malformed(f"'ctxs': {error}") from None
    # One number is each passage's, as many as there are passages are theirs in order, and others the gold one's tokens'.
    shared: list[float | None] = [*reliability] if reliability else [None]
    by_passage = shared * len(ctxs) if len(shared) == 1 else shared if len(shared) == len(ctxs) else None
    columns: dict[str, Any] = {"ctxs": []}
    for place, (ctx, passage) in enumerate(zip(ctxs, passages, strict=True)):
        given = by_passage[place] if by_passage else None
        columns["ctxs"].append(
            {
                "title": passage.article,
                "text": ctx["text"],
                "isgold": place == gold,
                "score": passage.score,
                "rank": ctx.get("rank") if isinstance(ctx.get("rank"), int) else None,
                "reliability": given if ctx.get("reliability") is None else passage.reliability,
            }
        )
    own = None if gold is None else columns["ctxs"][gold]["reliability"]
    if "context" not in row:
        columns["context"] = "" if gold is None else passages[gold].text
    if gold is not None:
        columns["title"] = row["title"] or passages[gold].article
    if reliability is not None and (by_passage is None or own is None):
        columns["reliability"] = reliability
    elif own is not None:
        columns["reliability"] = [own]
    return columns


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

    columns: dict[str, Any] = {name: Value("string") for name in ("id", "title", "context", "question")}
    columns["answers"] = Sequence(Value("string"))
    if any("ctxs" in row for row in rows):
        ctx = {"title": "string", "text": "string", "isgold": "bool", "score": "float64", "rank": "int64"}
        columns["ctxs"] = [{**{name: Value(kind) for name, kind in ctx.items()}, "reliability": Value("float64")}]
    if any("reliability" in row for row in rows):
        columns["reliability"] = Sequence(Value("float64"))
    features = Features(columns)
    empty: dict[str, Any] = {"ctxs": []}
    return Dataset.from_dict(
        {name: [row.get(name, empty.get(name)) for row in rows] for name in features}, features=features
    )
