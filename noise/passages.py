"""Passages: what of them stands in a prompt, which one is gold, and whether one holds an answer."""

import re
import string
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_MARKS = re.compile(r"[^\w\s]|_")
_ASCII = str.maketrans("", "", string.punctuation)


class Passage(NamedTuple):
    """A passage of a corpus.

    Attributes:
        text: As it stands in a prompt.
        article: The title of what it is from; "" where unknown.
        score: Its retriever's, greater is better; None where unknown.
        reliability: In [0, 1].
    """

    text: str
    article: str = ""
    score: float | None = None
    reliability: float = 1.0


def as_passage(raw: str | Mapping[str, Any]) -> Passage:
    """A passage from a text, or from an entry of `ctxs` as DPR and FiD write them.

    Args:
        raw: A text, or a mapping with `text` and optionally `title`, `score` and `reliability`. A title stands on a line
            of its own above the text.

    Raises:
        ValueError: It is neither, or its text is empty, or its numbers are none.
    """
    if isinstance(raw, str):
        raw = {"text": raw}
    if not isinstance(raw, Mapping) or not isinstance(raw.get("text"), str) or not raw["text"].strip():
        raise ValueError("a passage must be a text, or an object whose 'text' is a text that is not empty")
    title = raw.get("title") or ""
    score, reliability = raw.get("score"), raw.get("reliability")
    try:
        score = None if score is None else float(score)
        reliability = 1.0 if reliability is None else float(reliability)
    except (TypeError, ValueError):
        raise ValueError("a passage's 'score' and 'reliability' must be numbers") from None
    if not 0.0 <= reliability <= 1.0:
        raise ValueError(f"a passage's 'reliability' must be in [0, 1], got {reliability}")
    return Passage(f"{title}\n{raw['text']}" if title else raw["text"], title, score, reliability)


def gold_place(ctxs: Sequence[Mapping[str, Any]], answers: Sequence[str]) -> int | None:
    """Find the gold passage among `ctxs`.

    The first one marked `isgold`, where any passage carries that mark. Lists of plain retrievers carry none: then it is
    the first that `has_answer` (DPR) or `hasanswer` says to hold an answer, and without those marks the first that does.

    Returns:
        Its place, or None where there is no gold passage.
    """
    for mark in ("isgold", "has_answer", "hasanswer"):
        if any(ctx.get(mark) is not None for ctx in ctxs):
            return next((place for place, ctx in enumerate(ctxs) if ctx.get(mark)), None)
    held = (place for place, ctx in enumerate(ctxs) if holds_answer(as_passage(ctx).text, answers))
    return next(held, None)


def holds_answer(text: str, answers: Iterable[str]) -> bool:
    """Whether any answer's words stand in a text one after another.

    Case, accents and punctuation do not count. Punctuation is tried both as nothing, without English articles, as SQuAD's
    scores have it ("U.S." is "US"), and as a blank ("1914" is in "1914-18"). An answer of nothing else ("The", "—") is
    looked for letter by letter.
    """
    joined, split = forms(text)
    for answer in answers:
        pair = forms(answer)
        if not pair[0].strip():
            needle = _squad(answer)
            if needle in _squad(text) if needle else answer.strip().casefold() in text.casefold():
                return True
        elif pair[0] in joined or pair[1] in split:
            return True
    return False


def _squad(text: str) -> str:
    """SQuAD's normalisation, which leaves punctuation that is not ASCII."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_ASCII)).split())


def same_passage(first: str, second: str) -> bool:
    """Whether one of two texts is part of the other, by their words."""
    one, other = forms(first)[1], forms(second)[1]
    return one in other or other in one


@lru_cache(maxsize=20_000)
def forms(text: str) -> tuple[str, str]:
    """A text's words between blanks: punctuation and articles left out, and punctuation as a blank."""
    letters = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c)).lower()
    joined, split = _ARTICLES.sub(" ", _MARKS.sub("", letters)), _MARKS.sub(" ", letters)
    return f" {' '.join(joined.split())} ", f" {' '.join(split.split())} "
