"""Distractor passages: never an answer, never the gold one, and fixed by seed and row id alone."""

import gzip
import json
import pickle
import warnings
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset, concatenate_datasets
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bft_hf.noise import bm25
from bft_hf.noise.bm25 import BM25Index
from bft_hf.noise.distractors import (
    DISTRACTOR_SOURCES,
    GOLD_POSITIONS,
    add_distractors,
    as_corpus,
    distractor_report,
    passages_of,
)
from bft_hf.noise.passages import as_passage, gold_place, holds_answer
from bft_hf.recipes.evaluation import normalize_answer

COLOURS = ["red", "green", "blue", "white", "black", "pink"]
WORDS = ["the", "An", "sea", "Sea,", "1914", "1914–18", "U.S.", "US", "don't", "—", "Zürich", "zurich", "_", "x-ray"]
texts = st.lists(st.sampled_from(WORDS), min_size=1, max_size=5).map(" ".join)


def make_rows(count: int = 24) -> Dataset:
    """Boxes of six colours: of the others' passages five sixths do not hold a row's answer."""
    rows = [
        {
            "id": f"row-{n}",
            "title": f"Article {n // 2}",
            "context": f"Box number {n} in the hall is {COLOURS[n % 6]}.",
            "question": f"What colour is box number {n} in the hall?",
            "answers": [COLOURS[n % 6], "colourless"],
        }
        for n in range(count)
    ]
    return Dataset.from_list(rows)


def with_ctxs(rows: Dataset) -> Dataset:
    contexts = rows["context"]

    def listed(row: dict, number: int) -> dict:
        listed = [*contexts[:24], contexts[number]] if number >= 24 else contexts[:24]
        ctxs = [
            {"title": "", "text": text, "isgold": text == contexts[number], "rank": rank}
            for rank, text in enumerate(listed)
        ]
        return {"ctxs": ctxs[::-1]}

    return rows.map(listed, with_indices=True)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture(params=DISTRACTOR_SOURCES)
def options(request: pytest.FixtureRequest, cache: Path) -> dict:
    return {"seed": 3, "source": request.param, "cache_dir": cache, "progress": False}


def texts_of(row: dict) -> list[str]:
    return [passage["text"] for passage in row["passages"]]


def others(row: dict) -> list[str]:
    return [passage["text"] for passage in row["passages"] if not passage["gold"]]


def by_id(dataset) -> dict[str, list[str]]:
    return {row["id"]: texts_of(row) for row in dataset}


# What a row gets


@pytest.mark.parametrize("k", [0, 1, 4])
def test_k_passages_without_the_answer_beside_the_gold_one(options, k):
    rows = with_ctxs(make_rows())
    added = add_distractors(rows, k, **options)
    for row in added:
        assert len(set(texts_of(row))) == k + 1
        assert [passage["text"] for passage in row["passages"] if passage["gold"]] == [row["context"]]
        assert not any(answer in text for text in others(row) for answer in row["answers"])
    assert added.remove_columns(["passages", "refused_answer", "refused_gold"])[:] == rows[:]
    report = distractor_report(added, k)
    assert report["added"] == k * len(rows) and report["short_rows"] == report["without_gold"] == 0
    assert (report["refused_answer"] > 0) == (k > 0)


def test_refusals_are_counted_and_sources_run_dry(cache):
    row = {"id": 1, "title": "", "context": "The sea is blue.", "question": "What is the sea?", "answers": ["blue"]}
    corpus = ["The sea is blue.", "the SEA is blue, they say", "A blue sea.", "A sea of trees.", "The sea, a poem."]
    added = add_distractors(Dataset.from_list([row]), 4, seed=0, corpus=corpus, cache_dir=cache, progress=False)
    assert set(others(added[0])) == {"A sea of trees.", "The sea, a poem."}
    assert (added[0]["refused_gold"], added[0]["refused_answer"]) == (2, 1)
    assert distractor_report(added, 4)["short_rows"] == 1
    filled = add_distractors(
        Dataset.from_list([row]),
        4,
        seed=0,
        source=["bm25", "random"],
        corpus=[*corpus, "Bread.", "Milk."],
        cache_dir=cache,
    )
    assert set(others(filled[0])) == {"A sea of trees.", "The sea, a poem.", "Bread.", "Milk."}
    assert others(filled[0])[:2] == others(added[0])  # the first source's come first


def test_bm25_takes_what_shares_most_with_the_question_and_no_passage_of_the_same_article(cache):
    rows = make_rows(4)
    corpus = [
        {"title": "Article 0", "text": "What colour is box number 0 in the hall? Nobody knows."},
        {"title": "Article 9", "text": "A box, number 0, in a hall: its colour."},
        {"title": "Article 9", "text": "A box in a hall."},
        {"title": "Article 9", "text": "Bread and milk."},
    ]
    added = add_distractors(rows, 3, seed=0, corpus=corpus, cache_dir=cache, progress=False)
    assert others(added[0]) == [f"Article 9\n{corpus[place]['text']}" for place in (1, 2)]
    scores = [passage["score"] for passage in added[0]["passages"] if not passage["gold"]]
    assert scores[0] > scores[1] > 0
    assert others(added[2])[0].startswith("Article 0\n")


def test_retrieved_lists_keep_their_rank_and_scores():
    ctxs = [
        {"title": "A", "text": "one", "hasanswer": False, "score": 3.5, "rank": 2, "reliability": 0.25},
        {"title": "", "text": "two", "hasanswer": False, "score": 9, "rank": 0, "reliability": None},
        {"title": "B", "text": "the answer", "hasanswer": True, "score": 7.0, "rank": 1, "reliability": 0.5},
    ]
    rows = Dataset.from_list([{"id": 1, "question": "?", "answers": ["answer"], "ctxs": ctxs}])
    (row,) = add_distractors(rows, 2, seed=0, source="ctxs", gold_position="first")
    assert row["passages"] == [
        {"text": "B\nthe answer", "gold": True, "score": 7.0, "reliability": [0.5]},
        {"text": "two", "gold": False, "score": 9.0, "reliability": [1.0]},
        {"text": "A\none", "gold": False, "score": 3.5, "reliability": [0.25]},
    ]


@pytest.mark.parametrize("position", GOLD_POSITIONS)
def test_the_gold_passage_stands_where_it_should(options, position):
    added = add_distractors(with_ctxs(make_rows(60)), 2, **options, gold_position=position)
    places = [[passage["gold"] for passage in row["passages"]].index(True) for row in added]
    if position == "random":
        counts = np.bincount(places, minlength=3)
        assert counts.min() > 8  # 20 expected of each, standard deviation 3.7
    else:
        assert set(places) == {{"first": 0, "middle": 1, "last": 2}[position]}
    other = add_distractors(with_ctxs(make_rows(60)), 2, **options, gold_position="last")
    assert [others(row) for row in added] == [others(row) for row in other]


def test_the_gold_passage_is_there_with_the_given_probability(options):
    rows = with_ctxs(make_rows(200))
    few, many, always = (add_distractors(rows, 1, **options, gold_probability=p) for p in (0.5, 0.8, 1.0))
    kept = [np.array([any(p["gold"] for p in row["passages"]) for row in added]) for added in (few, many, always)]
    for share, probability in zip(kept, (0.5, 0.8, 1.0), strict=True):
        assert abs(share.mean() - probability) <= 4 * (probability * (1 - probability) / 200) ** 0.5
    assert (kept[0] <= kept[1]).all()
    assert [others(row) for row in few] == [others(row) for row in always]
    assert distractor_report(few, 1)["without_gold"] == (~kept[0]).sum()


# What decides


def test_only_seed_and_row_id_decide(options):
    rows = with_ctxs(make_rows())
    corpus = list(passages_of(rows))
    expected = by_id(add_distractors(rows, 3, **options))
    assert by_id(add_distractors(rows, 3, **options, num_proc=2)) == expected
    assert by_id(add_distractors(rows.shuffle(seed=1), 3, **options)) == expected
    shards = [add_distractors(rows.shard(3, place), 3, **options, corpus=corpus[::-1]) for place in range(3)]
    assert by_id(concatenate_datasets(shards)) == expected
    streamed = add_distractors(rows.to_iterable_dataset(num_shards=4), 3, **options)
    assert by_id(streamed) == by_id(streamed) == expected
    assert by_id(add_distractors(rows, 3, **{**options, "seed": 4})) != expected


def test_fewer_distractors_are_the_first_of_more(options):
    rows = with_ctxs(make_rows())
    for few, many in zip(add_distractors(rows, 2, **options), add_distractors(rows, 4, **options), strict=True):
        assert others(few) == others(many)[:2]
        assert len(others(many)) == 4


def test_random_distractors_are_not_the_same_for_all():
    rows = add_distractors(make_rows(), 1, seed=0, source="random")
    assert len({others(row)[0] for row in rows}) > 8


# Answers


@given(answer=texts, passage=texts)
@example(answer="the —!", passage="— .")
@settings(max_examples=300)
def test_whatever_squads_normalisation_finds_is_found(answer, passage):
    words = normalize_answer(answer)
    if words and f" {words} " in f" {normalize_answer(passage)} ":
        assert holds_answer(passage, [answer])
    assert holds_answer(f"x {answer} y", ["nothing", answer])


@pytest.mark.parametrize(
    ("passage", "answer", "held"),
    [
        ("The war of 1914–18.", "1914", True),
        ("the US Navy", "U.S. Navy", True),
        ("in Zurich", "Zürich", True),
        ("The Rhine's banks", "the Rhine", True),
        ("another theme", "The", True),
        ("an odd theme", "odd them", False),
        ("seaside", "sea", False),
        ("!", "?", False),
    ],
)
def test_answers_are_looked_for_by_words(passage, answer, held):
    assert holds_answer(passage, [answer]) == held


def test_gold_is_the_marked_passage_or_the_first_with_an_answer():
    plain = [{"text": "no"}, {"text": "the sea"}, {"text": "sea"}]
    assert gold_place(plain, ["sea"]) == 1 and gold_place(plain, ["land"]) is None and gold_place([], ["sea"]) is None
    assert gold_place([{**plain[0], "has_answer": False}, {**plain[2], "has_answer": True}], ["x"]) == 1
    assert gold_place([{**ctx, "isgold": False, "hasanswer": True} for ctx in plain], ["sea"]) is None
    assert gold_place([{**plain[1], "isgold": False}, {**plain[0], "isgold": True}], ["sea"]) == 1


def test_natural_questions(shared_data, cache):
    for name, k in (("train_bm25", 4), ("eval_dense_top5", 4)):
        with gzip.open(shared_data / "nq" / f"{name}.jsonl.gz", "rt") as file:
            raw = [json.loads(line) for line, _ in zip(file, range(60), strict=False)]
        rows = [{"id": n, **{key: row[key] for key in ("question", "answers", "ctxs")}} for n, row in enumerate(raw)]
        rows = [row for row in rows if gold_place(row["ctxs"], row["answers"]) is not None]
        assert 40 < len(rows) <= 60
        for row in rows:
            row["ctxs"] = [
                {key: ctx.get(key) for key in ("title", "text", "isgold", "rank", "score")} for ctx in row["ctxs"]
            ]
        added = add_distractors(Dataset.from_list(rows), k, seed=0, source="ctxs")
        report = distractor_report(added, k)
        # A dense retriever's best passages often hold the answer, so that few of the five are distractors.
        assert (report["short_rows"] > 0) == (name == "eval_dense_top5")
        filled = add_distractors(
            Dataset.from_list(rows), k, seed=0, source=["ctxs", "bm25"], cache_dir=cache, progress=False
        )
        assert distractor_report(filled, k)["short_rows"] == 0
        for before, after in zip(added, filled, strict=True):
            assert others(after)[: len(others(before))] == others(before)
            texts = " | ".join(map(normalize_answer, others(after)))
            assert not any(f" {normalize_answer(answer)} " in texts for answer in after["answers"])


# The index


def test_an_index_is_built_once_and_read_afterwards(cache, monkeypatch):
    built = []
    monkeypatch.setattr(
        BM25Index, "_build", lambda self, folder, build=BM25Index._build: built.append(1) or build(self, folder)
    )
    passages = ["a red box", "a green box", "a green hall"]
    first = BM25Index(passages, cache_dir=cache, progress=False)
    expected = first.scores("green hall")
    assert expected.argmax() == 2 and expected[0] == 0 and expected.shape == (3,)
    again = BM25Index(passages, cache_dir=cache, progress=False)
    assert np.array_equal(again.scores("green hall"), expected) and len(built) == 1
    assert np.array_equal(pickle.loads(pickle.dumps(first)).scores("green hall"), expected) and len(built) == 1
    BM25Index(passages[::-1], cache_dir=cache, progress=False).load()
    monkeypatch.setitem(bm25.SETTINGS, "k1", 1.2)
    assert not np.array_equal(BM25Index(passages, cache_dir=cache, progress=False).scores("green hall"), expected)
    assert len(built) == 3 and len(list(cache.iterdir())) == 3


def test_a_damaged_index_is_built_anew(cache):
    passages = ["a red box", "a green box"]
    index = BM25Index(passages, cache_dir=cache, progress=False)
    expected = index.scores("green")
    for file in index.folder.iterdir():
        file.write_bytes(b"damaged")
    assert np.array_equal(BM25Index(passages, cache_dir=cache, progress=False).scores("green"), expected)
    assert all(file.read_bytes() != b"damaged" for file in index.folder.iterdir())


def test_an_index_that_cannot_be_kept_still_serves(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="not kept for the next run"):
        scores = BM25Index(["a red box", "b"], cache_dir=tmp_path / "file" / "cache", progress=False).scores("red")
    assert scores[0] > 0


def test_questions_without_a_known_word_score_zero(cache):
    index = BM25Index(["a red box"], cache_dir=cache, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert index.scores("?").tolist() == index.scores("zebra").tolist() == index.scores("").tolist() == [0.0]


# Refusals


def test_wrong_arguments_name_the_remedy():
    rows = make_rows(2)
    for k in (-1, 1.5, True):
        with pytest.raises(ValueError, match="an integer from 0, got"):
            add_distractors(rows, k, seed=0)
    with pytest.raises(ValueError, match="unknown source of distractors 'web': choose from bm25, ctxs, random"):
        add_distractors(rows, 1, seed=0, source=["ctxs", "web"])
    with pytest.raises(ValueError, match="choose from first, middle, last, random"):
        add_distractors(rows, 1, seed=0, gold_position="end")
    with pytest.raises(ValueError, match=r"number in \[0, 1\], got 1.5"):
        add_distractors(rows, 1, seed=0, gold_probability=1.5)
    with pytest.raises(ValueError, match="no passage to choose distractors from"):
        add_distractors(rows, 1, seed=0, corpus=[])
    with pytest.raises(ValueError, match="no column 'question'"):
        add_distractors(rows.remove_columns("question"), 1, seed=0, source="random")
    with pytest.raises(ValueError, match="'row-0' has no gold passage"):
        add_distractors(rows.remove_columns("context"), 1, seed=0, source="ctxs")


@pytest.mark.parametrize(
    "raw", [{}, {"text": " "}, {"text": 3}, 3, {"text": "a", "score": "x"}, {"text": "a", "reliability": 2}]
)
def test_a_passage_that_is_none_is_refused(raw):
    with pytest.raises(ValueError, match="passage"):
        as_passage(raw)


def test_a_corpus_holds_each_text_once_in_an_order_of_its_own():
    passages = [{"title": "B", "text": "x"}, "z", "a", "z"]
    assert as_corpus(passages) == as_corpus(passages[::-1])
    assert [passage.text for passage in as_corpus(passages)] == ["B\nx", "a", "z"]
