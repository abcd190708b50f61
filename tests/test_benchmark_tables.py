"""Benchmarks that write tables of docs/: on tiny data, against numbers that are known."""

import gzip
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from conftest import REPOSITORY, make_tiny_llama
from datasets import Dataset
from scipy import stats
from transformers import AutoTokenizer

import bft_hf
from bft_hf.recipes.sft import main as sft_main

FOLDER = REPOSITORY / "benchmarks"
if not FOLDER.is_dir():
    pytest.skip("no benchmarks/ beside tests/, as in the sdist", allow_module_level=True)


def load(name: str) -> ModuleType:
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(FOLDER))


def run(module: ModuleType, monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr("sys.argv", [module.__name__, *words])
    assert module.main() == 0


def lines(text: str) -> list[list[str]]:
    """The cells of a Markdown table."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]


def test_mechanism_prints_and_draws_means_over_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "rec-toys-sasrec"
    folder.mkdir()
    for seed in (1, 2, 3):
        quartiles = {f"Q{q}": -q * seed / 10 for q in range(4)}
        found = {"log_initial_precision": quartiles, "gain": {q: [0.5, 0.9 + x / 100] for q, x in quartiles.items()}}
        packed = {"results": {"filter": found}}
        (folder / f"bft_seed={seed}.json.gz").write_bytes(gzip.compress(json.dumps(packed).encode()))
    plain = json.dumps({"results": {"filter": None}})
    (folder / "plain_seed=1.json.gz").write_bytes(gzip.compress(plain.encode()))
    figure = tmp_path / "figure.svg"
    module = load("mechanism")
    run(module, monkeypatch, str(folder), "--output", str(figure))
    table = {tuple(cells[:2]): cells[2:] for cells in lines(capsys.readouterr().out)}
    # Seeds differ by .1 times the quartile: Student's t of two degrees of freedom, 4.303, over the root of 3.
    width = [f"{4.3027 * q / 10 / 3**0.5:.3f}" for q in range(4)]
    expected = ["0.000 ± 0.000", *(f"-{q * 0.2:.3f} ± {width[q]}" for q in (1, 2, 3)), "+0.600 [-0.145, +1.345]"]
    assert table["toys-sasrec", "log tau"] == expected
    assert table["toys-sasrec", "gain, layer 0"] == ["0.500 ± 0.000"] * 4 + ["+0.000 [+0.000, +0.000]"]
    assert table["toys-sasrec", "gain, layer 1"][0] == "0.900 ± 0.000" and len(table) == 5
    first = figure.read_bytes()
    run(module, monkeypatch, str(folder), "--output", str(figure))
    assert b"<svg" in first and first == figure.read_bytes()
    file = folder / "bft_seed=3.json.gz"
    file.write_bytes(gzip.compress(gzip.decompress(file.read_bytes()).replace(b"0.5,", b"0.6,")))
    run(module, monkeypatch, str(folder), "--output", str(figure))
    assert first != figure.read_bytes()


def prompts() -> Dataset:
    """Four rows of five passages, the gold one in a place of its own."""
    rows = [
        {
            "id": f"row {i}",
            "passages": [{"text": f"{i}, {place}", "gold": place == i, "reliability": [1.0]} for place in range(5)],
        }
        for i in range(4)
    ]
    return Dataset.from_list(rows)


def test_shuffled_reliability_stays_within_its_prompt() -> None:
    module = load("reliability")
    rows = prompts().map(
        lambda row, number: {
            "passages": [
                {**passage, "reliability": [number + place / 10]} for place, passage in enumerate(row["passages"])
            ]
        },
        with_indices=True,
    )
    shuffled = rows.map(module.shuffle)
    moved = []
    for before, after in zip(rows, shuffled, strict=True):
        kept, given = ([[p[name] for p in row["passages"]] for name in ("text", "gold")] for row in (before, after))
        assert kept == given
        old, new = ([p["reliability"][0] for p in row["passages"]] for row in (before, after))
        assert sorted(old) == sorted(new)
        moved.append(old != new)
    assert sum(moved) >= 3 and len({tuple(p["reliability"][0] % 1 for p in r["passages"]) for r in shuffled}) > 1
    # By the row's id: neither the order nor the number of rows matters.
    assert rows.select([2]).map(module.shuffle)[0] == shuffled[2]


def test_an_oracle_trusts_the_gold_passage_and_its_shuffle_any_one() -> None:
    module = load("reliability")
    oracle, shuffled = (module.told(prompts(), what, prompts) for what in ("oracle 0.2", "shuffled oracle 0.2"))
    for row in oracle:
        assert [p["reliability"] for p in row["passages"]] == [[1.0] if p["gold"] else [0.2] for p in row["passages"]]
    places = [[p["reliability"][0] for p in row["passages"]].index(1.0) for row in shuffled]
    assert all(sorted(p["reliability"][0] for p in row["passages"]) == [0.2] * 4 + [1.0] for row in shuffled)
    assert places != [0, 1, 2, 3]
    assert module.told(prompts(), "none", prompts)[0] == prompts()[0]
    rated = prompts().map(module.rate, fn_kwargs={"others": 0.2})
    assert module.told(prompts(), "likelihood", lambda: rated)[0] == rated[0] != prompts()[0]
    alone = module.told(prompts(), module.PRUNED, lambda: rated)
    assert [[p["gold"] for p in row["passages"]] for row in alone] == [[True]] * len(alone)


def test_reliability_measures_each_cell_once_and_its_files_make_the_table(
    stories260k: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = load("reliability")
    rows = [
        {
            "question": f"who was girl {i}",
            "answers": [name],
            "ctxs": [
                {"title": "", "text": f"Girl {i} was {other}.", "isgold": other == name, "score": 3.0 + i}
                for other in ("Lily", "Lucy", "Sue")
            ],
        }
        for i, name in enumerate(("Lily", "Lucy", "Sue"))
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = module.load_model_and_tokenizer
    monkeypatch.setattr(module, "DATA", tmp_path)
    monkeypatch.setattr(module, "load_model_and_tokenizer", lambda name: own(str(stories260k)))
    out = tmp_path / "out"
    words = ["--output", str(out), "--data", "rows.jsonl", "--questions", "3", "--distractors", "0", "2"]
    words += ["--starts", "identity", "--reliability", "none", "oracle 0.2", "shuffled oracle 0.2"]
    run(module, monkeypatch, *words)
    table = capsys.readouterr().out
    cells = {path.stem: json.loads(path.read_text()) for path in out.glob("*.json")}
    assert sorted(cells) == [
        "k=0_identity_none", "k=0_plain_none", "k=2_identity_none", "k=2_identity_oracle-0.2",
        "k=2_identity_shuffled-oracle-0.2", "k=2_plain_none",
    ]  # fmt: skip
    by_place = {tuple(row[:3]): row[3:] for row in lines(table)[2:]}
    assert len(by_place) == 6
    scores = {name: cell["per_question"]["answer_nll"] for name, cell in cells.items()}
    oracle, shuffled, none = (scores[f"k=2_identity_{n}"] for n in ("oracle-0.2", "shuffled-oracle-0.2", "none"))
    row = by_place["2", "identity", "oracle 0.2"]
    assert row[0] == f"{sum(oracle) / 3:.3f}" and max(abs(a - b) for a, b in zip(oracle, none, strict=True)) > 1e-3
    for cell, other in zip(row[2:], (none, shuffled), strict=True):
        assert cell.split(" ")[0] == f"{sum(oracle) / 3 - sum(other) / 3:+.3f}"
    # In "identity" nothing but reliability acts, up to bfloat16.
    assert scores["k=2_identity_none"] == pytest.approx(scores["k=2_plain_none"], abs=0.1)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(module, "evaluate_answers", fail)
    for more in ([], ["--table"]):
        run(module, monkeypatch, *words, *more)
        assert capsys.readouterr().out == table

    seen = tmp_path / "seen"
    seen.mkdir()
    first = cells["k=2_plain_none"]["per_question"]["id"][:1]
    (seen / "k=2_plain_none.json").write_text(json.dumps({"per_question": {"id": first}}))
    run(module, monkeypatch, *words, "--table", "--without", str(seen))
    row = {tuple(row[:3]): row[3:] for row in lines(capsys.readouterr().out)[2:]}["2", "identity", "oracle 0.2"]
    assert row[0] == f"{sum(oracle[1:]) / 2:.3f}" and row[2].startswith(
        f"{sum(oracle[1:]) / 2 - sum(none[1:]) / 2:+.3f}"
    )


def test_small_models_learn_and_finished_runs_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = load("small_models")
    tokens = torch.arange(24).view(2, 12) % 7
    drawn: list[int] = []

    def batches() -> Any:
        while True:
            drawn.append(1)
            yield tokens[:, :-1], tokens[:, 1:]

    def train() -> dict[str, Any]:
        torch.manual_seed(0)
        model = bft_hf.patch(module.make_model(8, 16, 2, 16))
        before = [p.item() for p in bft_hf.bft_parameters(model).values()]
        losses = module.train(model, batches(), 80, 1e-2, bft_learning_rate=5e-2)
        assert losses[0] > 1.5 > 0.5 > losses[-1]
        moved = [abs(p.item() - old) for p, old in zip(bft_hf.bft_parameters(model).values(), before, strict=True)]
        assert min(moved) > 0.05
        assert [round(p.item(), 4) for p in bft_hf.bft_parameters(model).values()] == [
            mean for mean, _ in module.filter_state(model).values()
        ]
        return {"held_out_nll": losses[-1]}

    for _ in range(2):
        module.run_missing(tmp_path / "out", [("bft, small_seed=1", train)])
    assert len(drawn) == 80  # no batch more than steps, and the second time none
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["bft_small_seed=1.json"]
    assert capsys.readouterr().out.count("bft_small_seed=1: 0.") == 1


def test_a_second_look_at_the_same_questions_finds_what_the_run_found(
    tiny_llama: Callable[..., Any], stories260k: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_llama(vocab_size=512).save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(stories260k).save_pretrained(tmp_path / "model")
    rows = [{"id": i, "context": f"Box {i} is red.", "question": f"Box {i}?", "answers": ["red"]} for i in range(12)]
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_folder = tmp_path / "runs" / "sft_noise=0.3_seed=1"
    flags = f"--method sft --noise 0.3 --max_steps 2 --learning_rate 1e-2 --max_new_tokens 2 --eval_examples 8 --output_dir {run_folder}"
    flags += f" --model_name_or_path {tmp_path / 'model'} --dataset {questions} --eval_dataset {questions} --bf16 true"
    assert sft_main([*flags.split(), "--use_cpu", "--save_strategy", "no", "--report_to", "none"]) == 0
    module, look = load("second_look"), tmp_path / "look"
    words = [
        str(tmp_path / "runs"),
        "--dataset",
        str(questions),
        "--questions",
        "8",
        "--f1_questions",
        "3",
        "--output",
        str(look),
    ]
    run(module, monkeypatch, *words, "--only", "bft_*")
    assert not look.exists()
    run(module, monkeypatch, *words, "--only", "bft_*", "--only", "sft_noise=0.3_*")
    before, after = (json.loads((path / "results.json").read_text()) for path in (run_folder, look / run_folder.name))
    assert after["after"]["answer_nll"] == pytest.approx(before["after"]["answer_nll"], rel=2e-2)
    assert (before["after"]["n_generated"], after["after"]["n_generated"]) == (8, 3)
    assert after["after"]["n"] == 8 and after["training"] == before["training"]
    ids = [json.loads(line)["id"] for line in (look / run_folder.name / "predictions.jsonl").read_text().splitlines()]
    assert len(set(ids)) == 8


def test_starts_keep_every_question_and_print_intervals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = load("starts")
    easy = np.random.default_rng(0).normal(4, 1, 40)

    class Bench:
        """A patch adds .2 to every question, give or take, and a calibration takes half of it back."""

        def __init__(self, questions: int, rows: int) -> None:
            self.model, self.ids = make_tiny_llama(), [f"question {i}" for i in range(40)]

        def answer_nll(self) -> list[float]:
            config = bft_hf.get_config(self.model)
            added = np.random.default_rng(1).normal(0.2, 0.1, 40) * (1 if config and config.gain_scale is None else 0.5)
            return list(easy + (0 if config is None else added))

        def batches(self, answers_alone: bool) -> list[dict[str, torch.Tensor]]:
            return [{"input_ids": torch.arange(3, 30)[None]}]

    monkeypatch.setattr(module, "Bench", Bench)
    monkeypatch.setattr(module, "STARTS", {"Q 1 (unit)": {}})
    run(module, monkeypatch, "--output", str(tmp_path / "starts.json"))
    table = {tuple(cells[:2]): cells[2:] for cells in lines(capsys.readouterr().out)}
    assert table["plain", ""][1] == "+0.000 [+0.000, +0.000]"
    found = json.loads((tmp_path / "starts.json").read_text())
    assert found["ids"][39] == "question 39" and [start["calibrated"] for start in found["starts"]] == [
        "", "", "all tokens", "answers",
    ]  # fmt: skip
    plain, unit, calibrated, _ = found["starts"]
    difference = np.subtract(unit["per_question"], plain["per_question"])
    interval = stats.t.interval(0.95, 39, difference.mean(), stats.sem(difference))
    assert unit["difference"] == pytest.approx(difference.mean()) and len(difference) == 40
    assert unit["interval"] == pytest.approx(interval, abs=0.1 * (interval[1] - interval[0]))
    assert table["Q 1 (unit)", ""][1] == "{:+.3f} [{:+.3f}, {:+.3f}]".format(unit["difference"], *unit["interval"])
    assert calibrated["difference"] == pytest.approx(difference.mean() / 2) and calibrated["gain_scale"]
