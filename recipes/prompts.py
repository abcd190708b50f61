"""The prompt of a question and its passages: its text, its tokens, and which token belongs to which passage."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .question_files import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

INSTRUCTION = "Answer the question with the shortest span of the passage that answers it, copied word for word."


@dataclass(frozen=True)
class Prompt:
    """A prompt that fits.

    Attributes:
        input_ids: Its tokens.
        question: As it was given.
        passages: As they stand in it, in order; None for one that was left out.
        cut: Whether any passage is shorter than it was given, or left out.
        gold_cut: Whether the gold one is.
    """

    input_ids: list[int]
    question: str
    passages: list[str | None]
    cut: bool
    gold_cut: bool

    @property
    def kept(self) -> list[str]:
        """The passages that stand in it."""
        return [text for text in self.passages if text is not None]


def format_prompt(tokenizer: "PreTrainedTokenizerBase", context: str | Sequence[str], question: str) -> str:
    """Write the prompt of a question, up to where the answer starts: the only place where it is written.

    With a chat template: the instruction as the system message (in front of the user's, for templates without a system
    role), the passages in order and the question as the user's, and the template's generation prompt. Without: the same
    texts in paragraphs. That form ends in a line break, so that an answer starts a line in both, and no tokenizer has a
    blank to merge into its first word. Several passages are written as one is, each in a paragraph of its own, so that a
    model trained with one sees the same form with more.
    """
    return _layout(tokenizer, [context] if isinstance(context, str) else context, question)[0]


def _layout(
    tokenizer: "PreTrainedTokenizerBase", passages: Sequence[str], question: str
) -> tuple[str, list[tuple[int, int]] | None]:
    """The prompt's text, and first and one after the last character of each passage; None where a template changes them."""
    user, spans = "", []
    for text in passages or [""]:
        user += "Passage: "
        spans.append((len(user), len(user) + len(text)))
        user += f"{text}\n\n"
    user += f"Question: {question}"
    text = _render(tokenizer, user) if tokenizer.chat_template else f"{INSTRUCTION}\n\n{user}\n\nAnswer:\n"
    start = text.find(user.rstrip())  # templates may strip what they are given
    return text, None if start < 0 else [(start + first, start + last) for first, last in spans[: len(passages)]]


def prompt_tokens(
    tokenizer: "PreTrainedTokenizerBase", context: str, question: str, max_tokens: int | None = None
) -> tuple[list[int], bool]:
    """Tokenize the prompt of one passage, cut to fit as `fit_prompt` does.

    Returns:
        The token ids, and whether the passage was cut.

    Raises:
        DataError: It does not fit without any passage either.
    """
    prompt = fit_prompt(tokenizer, [context], question, max_tokens, gold=0)
    return prompt.input_ids, prompt.cut


def fit_prompt(
    tokenizer: "PreTrainedTokenizerBase",
    passages: Sequence[str],
    question: str,
    max_tokens: int | None = None,
    gold: int | None = None,
) -> Prompt:
    """Tokenize a prompt, cutting words off the ends of passages, and never of the question, until it fits.

    The gold passage is spared: first all others are cut to the same number of words, as many as fit, and at 0 they are left
    out. Only what would not fit without any of them loses the end of the gold passage too.

    Args:
        tokenizer: The model's.
        passages: In order.
        question: Comes after them.
        max_tokens: Where to cut; None is nowhere.
        gold: The place of the gold passage; None where it is not among them.

    Raises:
        DataError: It does not fit without any passage either.
    """

    def attempt(texts: Sequence[str | None]) -> list[int]:
        return _encode(tokenizer, format_prompt(tokenizer, [text for text in texts if text is not None], question))

    def fits(texts: Sequence[str | None]) -> bool:
        return max_tokens is None or len(attempt(texts)) <= max_tokens

    def done(texts: Sequence[str | None]) -> Prompt:
        gold_cut = gold is not None and texts[gold] != passages[gold]
        return Prompt(attempt(texts), question, list(texts), list(texts) != list(passages), gold_cut)

    if fits(passages):
        return done(passages)
    words = [[0, *(word.end() for word in re.finditer(r"\S+", text))] for text in passages]

    def others_cut(count: int) -> list[str | None]:
        short = [text[: ends[min(count, len(ends) - 1)]] for text, ends in zip(passages, words, strict=True)]
        return [passages[place] if place == gold else text or None for place, text in enumerate(short)]

    others = [len(ends) for place, ends in enumerate(words) if place != gold]
    if others and fits(others_cut(0)):
        return done(others_cut(_most(max(others), lambda count: fits(others_cut(count)))))
    if gold is None or not fits(alone := _only(len(passages), gold, "")):
        tokens = len(attempt([None] * len(passages) if gold is None else alone))
        raise DataError(f"the question alone takes {tokens} tokens where {max_tokens} are left: raise max_length")
    ends = words[gold]
    count = _most(len(ends), lambda count: fits(_only(len(passages), gold, passages[gold][: ends[count]])))
    return done(_only(len(passages), gold, passages[gold][: ends[count]]))


def _only(count: int, place: int, text: str) -> list[str | None]:
    return [text if other == place else None for other in range(count)]


def _most(limit: int, fits: Callable[[int], bool]) -> int:
    """The greatest count below `limit` that fits, where 0 does."""
    low, high = 0, limit  # low fits, high is one that does not or is out of range
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def row_prompt(
    tokenizer: "PreTrainedTokenizerBase", row: Mapping[str, Any], max_tokens: int | None = None
) -> tuple[Prompt, list[list[float]]]:
    """The prompt of a row: of its `passages`, where `add_distractors` has put some, else of its `context`.

    Returns:
        The prompt, and the reliability of each passage as the row has it: one number, or one a token.

    Raises:
        DataError: The row, named by its id, does not fit.
    """
    passages = row.get("passages")
    if passages is None:
        passages = [{"text": row["context"], "gold": True, "reliability": row.get("reliability") or [1.0]}]
    gold = next((place for place, passage in enumerate(passages) if passage["gold"]), None)
    texts = [passage["text"] for passage in passages]
    try:
        prompt = fit_prompt(tokenizer, texts, row["question"], max_tokens, gold)
    except DataError as error:
        raise DataError(f"row {row['id']!r}: {error}") from None
    return prompt, [list(passage["reliability"]) for passage in passages]


def passage_spans(tokenizer: "PreTrainedTokenizerBase", prompt: Prompt) -> list[list[tuple[int, int, int]] | None]:
    """Find the tokens of each passage in a prompt.

    Returns:
        For each of `prompt.passages`, None where it was left out, else of each of its tokens the place in the prompt and the
        characters it covers, counted from the passage's start; a token that reaches over an end of the passage belongs to it.

    Raises:
        DataError: The tokenizer gives no offsets, or the chat template writes a passage otherwise than it was given.
    """
    if not tokenizer.is_fast:
        raise DataError(f"{type(tokenizer).__name__} gives no offsets of its tokens: use a fast tokenizer")
    text, spans = _layout(tokenizer, prompt.kept, prompt.question)
    if spans is None:
        raise DataError(
            "the chat template changes the passages, so that their tokens cannot be found: use another template"
        )
    offsets = _offsets(tokenizer, text, chat=bool(tokenizer.chat_template))[: len(prompt.input_ids)]
    found: list[list[tuple[int, int, int]] | None] = []
    left = iter(spans)
    for passage in prompt.passages:
        if passage is None:
            found.append(None)
            continue
        first, last = next(left)
        inside = [(place, *span) for place, span in enumerate(offsets) if span[0] < last and span[1] > first]
        found.append([(place, max(a, first) - first, min(b, last) - first) for place, a, b in inside])
    return found


def prompt_reliability(
    tokenizer: "PreTrainedTokenizerBase",
    prompt: Prompt,
    passages: Sequence[str],
    reliability: Sequence[Sequence[float]],
) -> list[float]:
    """Spread the passages' reliability over a prompt's tokens; everything else is 1.

    Args:
        tokenizer: The model's.
        prompt: Of these passages.
        passages: Their texts before they were cut.
        reliability: Of each passage one number, or one for each token of the passage by itself (the tokenizer's, without
            special tokens).

    Raises:
        DataError: Neither one number nor as many as the passage has tokens; or as `passage_spans`.
    """
    values = [1.0] * len(prompt.input_ids)
    for text, numbers, span in zip(passages, reliability, passage_spans(tokenizer, prompt), strict=True):
        if span is None:
            continue
        letters = list(numbers) * len(text) if len(numbers) == 1 else _by_letter(tokenizer, text, numbers)
        for place, _, last in span:
            # By its last letter: the first may be the blank before the word, which no token of the passage need cover.
            values[place] = letters[last - 1]
    return values


def _by_letter(tokenizer: "PreTrainedTokenizerBase", text: str, numbers: Sequence[float]) -> list[float]:
    offsets = _offsets(tokenizer, text, chat=True)
    if len(offsets) != len(numbers):
        raise DataError(
            f"'reliability' has {len(numbers)} numbers for a passage of {len(offsets)} tokens: give one number, or one a token"
        )
    letters = [1.0] * len(text)
    for (first, last), number in zip(offsets, numbers, strict=True):
        letters[first:last] = [number] * (last - first)
    return letters


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


def _encode(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    # A template writes the beginning-of-sequence token itself; asking the tokenizer for it too would double it.
    tokens = list(tokenizer(text, add_special_tokens=not tokenizer.chat_template)["input_ids"])
    if not tokenizer.chat_template and tokens and tokens[-1] == tokenizer.eos_token_id:
        tokens.pop()
    return tokens


def _offsets(tokenizer: "PreTrainedTokenizerBase", text: str, *, chat: bool) -> list[tuple[int, int]]:
    return tokenizer(text, add_special_tokens=not chat, return_offsets_mapping=True)["offset_mapping"]
