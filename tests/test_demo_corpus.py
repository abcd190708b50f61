"""The demo's corpus: reproducible, extractive, and answerable by reading only."""

import gzip
import json
import re
import subprocess
import sys
from collections import Counter

import pytest

from bft_hf.recipes.demo_corpus import TOPICS, corpus, main, write
from bft_hf.recipes.questions import DEMO_FILE, load_questions


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    return list(corpus())


def test_the_shipped_file_is_what_the_generator_writes(rows):
    shipped = [json.loads(line) for line in gzip.decompress(DEMO_FILE.read_bytes()).decode().splitlines()]
    assert shipped == rows
    assert shipped != list(corpus(seed=1))


def test_two_runs_write_the_same_bytes_and_another_seed_other_ones(tmp_path):
    paths = [tmp_path / name for name in ("a.jsonl.gz", "b.jsonl.gz", "c.jsonl.gz")]
    write(paths[0])
    command = [sys.executable, "-m", "bft_hf.recipes.demo_corpus", "--output", str(paths[1])]
    subprocess.run(command, check=True, capture_output=True, env={"PYTHONHASHSEED": "5"})
    main(["--output", str(paths[2]), "--seed", "1"])
    first, second, third = (path.read_bytes() for path in paths)
    assert first == second
    assert first != third


def test_there_are_a_few_hundred_short_passages_with_several_questions_each(rows):
    questions = Counter(row["context"] for row in rows)
    assert 300 <= len(questions) <= 500
    assert set(questions.values()) == {2, 3}
    assert all(40 <= len(context.split()) <= 90 for context in questions)
    assert len({row["id"] for row in rows}) == len(rows)


def test_every_answer_stands_in_its_passage_and_not_in_its_question(rows):
    for row in rows:
        (answer,) = row["answers"]
        assert answer.lower() in row["context"].lower()
        assert answer in row["context"] or answer[0].islower()  # a name that opens its only sentence
        assert not re.search(rf"\b{re.escape(answer)}\b", row["question"])


def test_train_and_validation_share_neither_a_passage_nor_what_it_is_about(rows):
    train, validation = (load_questions("demo", split=split) for split in ("train", "validation"))
    assert not set(train["context"]) & set(validation["context"])
    assert len(train) + len(validation) == len(load_questions("demo", split="all")) == len(rows)
    for topic in TOPICS:
        names = [row[0] for row in topic.rows()]
        used = {
            split: {
                name
                for name in names
                if any(topic_split(row) == (topic.name, split) and told(row, name) for row in rows)
            }
            for split in ("train", "validation")
        }
        assert len(used["validation"]) >= 6
        assert not used["train"] & used["validation"]


def topic_split(row: dict) -> tuple[str, str]:
    return tuple(row["id"].split("-")[:2])


def told(row: dict, name: str) -> bool:
    return re.search(rf"\b{name}\b", row["context"], re.IGNORECASE) is not None


def test_no_question_can_be_answered_by_its_form_alone(rows):
    """Beside the right answer the passage holds another of the same column, and the wording gives no answer away."""
    columns = {}
    for topic in TOPICS:
        for place, values in enumerate(zip(*topic.rows(), strict=True)):
            columns.update({(topic.name, place, value): set(values) for value in values})
    for row in rows:
        topic, answer = row["id"].split("-")[0], row["answers"][0]
        candidates = [
            {other for other in values if other in row["context"]}
            for (name, _, value), values in columns.items()
            if (name, value) == (topic, answer)
        ]
        assert max(map(len, candidates)) >= 2, row
    assert max(Counter(row["answers"][0] for row in rows).values()) < len(rows) / 15


def test_tables_are_complete_and_name_each_thing_once():
    for topic in TOPICS:
        table = topic.rows()
        assert {len(row) for row in table} == {len(topic.attributes) + 1}
        assert len({row[0] for row in table}) == len(table) >= 20
        assert all(cell for row in table for cell in row)


def test_the_table_of_elements_agrees_with_the_periodic_systems_rule():
    """Its groups follow from the atomic numbers: a column's members differ by 2, 8, 18 or 32."""
    (table,) = (topic.rows() for topic in TOPICS if topic.name == "elements")
    noble = [2, 10, 18, 36, 54, 86, 118]
    for _, _, number, group in table:
        z = int(number)
        below = max((n for n in noble if n < z), default=0)
        above = min(n for n in noble if n >= z)
        step, length = z - below, above - below
        if step <= 2 and z != 2:
            expected = step
        elif z == 2:
            expected = 18
        else:
            expected = 18 - (above - z) if length >= 8 else step
        assert int(group) == expected, number
