"""Prompts of several passages: what is cut to fit, which tokens are whose, and how reliable each is."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_questions import NO_SYSTEM_TEMPLATE, TEMPLATES, byte_tokenizer
from transformers import PreTrainedTokenizerFast

from bft_hf.recipes.models import SMOLLM2_CHAT_TEMPLATE
from bft_hf.recipes.prompts import fit_prompt, format_prompt, passage_spans, prompt_reliability, row_prompt
from bft_hf.recipes.questions import DataError, tokenize_example

PASSAGES = ["The sea is deep and blue.", "A river: the Rhine.", "Zürich lies at a lake — so they say."]
QUESTION = "Where does the Rhine end?"
BYTES = byte_tokenizer()


def make_row(**columns) -> dict:
    passages = [
        {"text": text, "gold": place == 1, "score": None, "reliability": [1.0]} for place, text in enumerate(PASSAGES)
    ]
    return {"id": "a", "question": QUESTION, "answers": ["Rhine"], "passages": passages, **columns}


@pytest.fixture(params=["bytes", "chat", "no system", "llama", "stories"])
def tokenizer(request, shared_data, stories260k) -> PreTrainedTokenizerFast:
    if request.param == "stories":
        return PreTrainedTokenizerFast.from_pretrained(stories260k)
    if request.param == "llama":
        file = str(shared_data / "tokenizer" / "llama2-tokenizer.json")
        return PreTrainedTokenizerFast(tokenizer_file=file, bos_token="<s>", eos_token="</s>")
    return byte_tokenizer(
        {"bytes": None, "chat": SMOLLM2_CHAT_TEMPLATE, "no system": NO_SYSTEM_TEMPLATE}[request.param]
    )


@pytest.mark.parametrize("template", TEMPLATES)
def test_several_passages_are_written_as_one_is(template):
    tokenizer = byte_tokenizer(template)
    one, all_three = format_prompt(tokenizer, PASSAGES[1], QUESTION), format_prompt(tokenizer, PASSAGES, QUESTION)
    paragraphs = "\n\n".join(f"Passage: {text}" for text in PASSAGES)
    assert one == format_prompt(tokenizer, [PASSAGES[1]], QUESTION)
    assert all_three == one.replace(f"Passage: {PASSAGES[1]}", paragraphs)


# Cutting


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    gold=st.integers(0, 3),
    room=st.integers(0, 320),
)
@settings(max_examples=60)
def test_distractors_give_way_and_the_question_never(lengths, gold, room):
    passages = [" ".join(f"{'abcd'[place]}{word}" for word in range(length)) for place, length in enumerate(lengths)]
    gold = gold if gold < len(passages) else None
    shortest = len(fit_prompt(BYTES, [] if gold is None else [""], QUESTION).input_ids)
    try:
        prompt = fit_prompt(BYTES, passages, QUESTION, room, gold)
    except DataError:
        assert room < shortest
        return
    assert len(prompt.input_ids) <= room and room >= shortest
    assert BYTES.decode(prompt.input_ids[1:]) == format_prompt(BYTES, prompt.kept, QUESTION)
    cut = [kept != text for kept, text in zip(prompt.passages, passages, strict=True)]
    assert prompt.cut == any(cut) and prompt.gold_cut == (gold is not None and cut[gold])
    for place, (kept, text) in enumerate(zip(prompt.passages, passages, strict=True)):
        assert kept is None or text.startswith(kept)
        # No word of a distractor stands where the gold passage had to give one, and all lose alike.
        assert kept is None or place == gold or not prompt.gold_cut
    words = [len((kept or "").split()) for place, kept in enumerate(prompt.passages) if place != gold]
    short = [
        count
        for count, length in zip(words, (n for p, n in enumerate(lengths) if p != gold), strict=True)
        if count < length
    ]
    assert len(set(short)) <= 1 and (not short or max(words) == short[0])
    if prompt.cut and not prompt.gold_cut and short:
        more = [
            " ".join(text.split()[: short[0] + 1]) if place != gold else text for place, text in enumerate(passages)
        ]
        assert len(fit_prompt(BYTES, more, QUESTION).input_ids) > room


def test_a_row_that_does_not_fit_is_named():
    with pytest.raises(DataError, match=r"row 'a': the question alone takes \d+ tokens where 9 are left"):
        row_prompt(BYTES, make_row(), 9)


def test_rows_with_one_passage_are_tokenized_as_without_the_column():
    row = {"id": "a", "context": PASSAGES[1], "question": QUESTION, "answers": ["Rhine"]}
    passages = [{"text": PASSAGES[1], "gold": True, "score": None, "reliability": [1.0]}]
    for length in (None, 170):
        plain, listed = (
            tokenize_example(BYTES, row, length),
            tokenize_example(BYTES, {**row, "passages": passages}, length),
        )
        assert listed == {**plain, "gold_truncated": length is not None}


# Spans


def test_spans_hold_their_passage_and_nothing_else(tokenizer):
    for room in (None, len(fit_prompt(tokenizer, PASSAGES, QUESTION).input_ids) - 9):
        prompt = fit_prompt(tokenizer, PASSAGES, QUESTION, room, gold=1)
        assert prompt.cut == (room is not None)
        spans = passage_spans(tokenizer, prompt)
        taken = [place for span in spans if span for place, _, _ in span]
        assert taken == sorted(set(taken))
        for text, span in zip(prompt.passages, spans, strict=True):
            if text is not None:
                places = [place for place, _, _ in span]
                assert places == list(range(places[0], places[-1] + 1))
                assert tokenizer.decode([prompt.input_ids[place] for place in places]).strip() == text
                assert span[0][1] == 0 and span[-1][2] == len(text)


def test_answer_span_and_passage_spans_come_with_the_row(tokenizer):
    example = tokenize_example(tokenizer, make_row(), spans=True)
    ids = example["input_ids"]
    first, last = example["answer_span"]
    # A byte tokenizer's tokens end where the answer does; a word tokenizer's may reach over.
    assert "Rhine" in tokenizer.decode(ids[first:last]) and last - first <= 6
    assert example["passage_gold"] == [False, True, False]
    assert example["passage_span"] == example["passage_spans"][1]
    assert example["passage_span"][0] <= first < last <= example["passage_span"][1]
    nowhere = tokenize_example(tokenizer, make_row(answers=["Danube"]), spans=True)
    assert nowhere["answer_span"] == [-1, -1] != nowhere["passage_span"]
    lost = make_row(passages=[passage for passage in make_row()["passages"] if not passage["gold"]])
    assert tokenize_example(tokenizer, lost, spans=True)["passage_span"] == [-1, -1]


# Reliability


def test_each_passage_has_its_reliability_and_the_rest_is_one(tokenizer):
    numbers = [[0.25], [0.5], [0.75]]
    prompt = fit_prompt(tokenizer, PASSAGES, QUESTION)
    values = prompt_reliability(tokenizer, prompt, PASSAGES, numbers)
    assert len(values) == len(prompt.input_ids)
    for text, (number,) in zip(PASSAGES, numbers, strict=True):
        tokens = [token for token, value in zip(prompt.input_ids, values, strict=True) if value == number]
        assert tokenizer.decode(tokens).strip() == text
    rest = tokenizer.decode([token for token, value in zip(prompt.input_ids, values, strict=True) if value == 1.0])
    assert "Passage:" in rest and QUESTION in rest and "Rhine." not in rest


def test_numbers_by_token_follow_their_tokens(tokenizer):
    alone = tokenizer(PASSAGES[2], add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    numbers = [round(1 / (place + 2), 4) for place in range(len(alone))]
    full = fit_prompt(tokenizer, PASSAGES, QUESTION)
    cut = fit_prompt(tokenizer, PASSAGES, QUESTION, len(full.input_ids) - 12, gold=1)
    assert cut.passages[2] is not None and cut.passages[2] != PASSAGES[2]
    for prompt in (full, cut):
        values = prompt_reliability(tokenizer, prompt, PASSAGES, [[1.0], [1.0], numbers])
        for place, _, last in passage_spans(tokenizer, prompt)[2]:
            holds = [n for (first, end), n in zip(alone, numbers, strict=True) if first < last <= end]
            assert values[place] in holds
        assert len({value for value in values if value < 1}) > 3


def test_training_rows_carry_a_number_a_token_and_answers_are_trusted():
    row = make_row()
    row["passages"][0]["reliability"] = [0.5]
    example = tokenize_example(BYTES, row, reliability=True)
    assert len(example["reliability"]) == len(example["input_ids"])
    assert example["reliability"].count(0.5) == len(PASSAGES[0].encode())
    assert example["reliability"][-6:] == [1.0] * 6
    context = {"id": "a", "context": PASSAGES[0], "question": QUESTION, "answers": ["sea"], "reliability": [0.5]}
    assert tokenize_example(BYTES, context, reliability=True)["reliability"].count(0.5) == len(PASSAGES[0].encode())


def test_what_does_not_fit_names_the_row_and_the_remedy():
    row = make_row()
    row["passages"][0]["reliability"] = [0.5, 0.5]
    with pytest.raises(
        DataError, match=r"row 'a': 'reliability' has 2 numbers for a passage of 25 tokens: give one number"
    ):
        tokenize_example(BYTES, row, reliability=True)
    shouting = byte_tokenizer("{% for message in messages %}{{ message['content'] | upper }}{% endfor %}")
    with pytest.raises(DataError, match="the chat template changes the passages"):
        passage_spans(shouting, fit_prompt(shouting, PASSAGES, QUESTION))


def test_a_slow_tokenizer_is_refused_only_where_offsets_are_needed(monkeypatch):
    prompt = fit_prompt(BYTES, PASSAGES, QUESTION)
    monkeypatch.setattr(type(BYTES), "is_fast", property(lambda self: False))
    assert tokenize_example(BYTES, make_row())["truncated"] is False
    with pytest.raises(DataError, match="use a fast tokenizer"):
        passage_spans(BYTES, prompt)
