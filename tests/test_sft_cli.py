"""The command bft-sft from its flags to the files it leaves, and every way in which it refuses."""

import ast
import dataclasses
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

import bft_hf
from bft_hf.recipes import arguments, sft
from bft_hf.recipes.arguments import CONFIGS, DEMO_METHODS, METHODS, first_look
from bft_hf.recipes.filter_flags import filter_config
from bft_hf.recipes.sft import main

QUICK = ["--max_steps", "2", "--eval_examples", "3", "--max_new_tokens", "4", "--per_device_train_batch_size", "4"]
LORA = ["--use_peft", "--lora_r", "4"]


@pytest.fixture(scope="module")
def tiny(stories260k: Path, tmp_path_factory: pytest.TempPathFactory, tiny_llama: Any) -> str:
    """The folder of a random Llama with the tokenizer of stories260K."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_llama(vocab_size=512, num_hidden_layers=2, max_position_embeddings=512).save_pretrained(folder)
    AutoTokenizer.from_pretrained(stories260k).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A JSONL file of 60 questions, each with a passage of its own."""
    path = tmp_path_factory.mktemp("data") / "questions.jsonl"
    colours = ("red", "green", "blue as ice")
    rows = [
        {"id": i, "context": f"Box {i} is {colours[i % 3]}.", "question": f"Box {i}?", "answers": [colours[i % 3]]}
        for i in range(60)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def run(tiny: str, questions: str, tmp_path: Path) -> Callable[..., Path]:
    def command(*flags: str, name: str = "out") -> Path:
        out = tmp_path / name
        argv = ["--model_name_or_path", tiny, "--dataset", questions, "--output_dir", str(out), *QUICK, *flags]
        assert main(argv) == 0
        return out

    return command


def load_as_the_card_says(folder: Path) -> Any:
    """Run the Python in a model card and give back its `model`."""
    code = re.search(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    assert code is not None
    namespace: dict[str, Any] = {}
    exec(compile(ast.parse(code[1]), "README.md", "exec"), namespace)
    assert "tokenizer" in namespace
    return namespace["model"].eval()


@pytest.mark.parametrize("flags", [[], LORA], ids=["full", "lora"])
@pytest.mark.parametrize("method", ["sft", "bft", "bft+gce"])
def test_a_run_leaves_results_model_and_card(
    method: str, flags: list[str], run: Any, tiny: str, questions: str
) -> None:
    out = run("--method", method, "--noise", "0.5", "--seed", "7", *flags)
    results = json.loads((out / "results.json").read_text())
    assert results["method"] == method and results["seed"] == 7 and results["model"] == tiny
    assert results["noise"]["rate"] == 0.5
    assert 0 < results["noise"]["corrupted_labels"] < results["noise"]["eligible_labels"]
    assert set(results["before"]) == set(results["after"]) == {"exact_match", "f1", "answer_nll", "n", "n_generated"}
    assert results["before"]["answer_nll"] != results["after"]["answer_nll"] and results["after"]["n"] == 3
    assert results["training"]["steps"] == 2
    assert {"training", "evaluation_before", "evaluation_after", "total"} <= set(results["seconds"])
    assert {"torch", "transformers", "trl", "bft-hf"} <= set(results["versions"])
    assert shlex.split(results["command"])[:3] == ["bft-sft", "--model_name_or_path", tiny]
    assert len((out / "predictions.jsonl").read_text().splitlines()) == 3
    card = (out / "README.md").read_text()
    assert card.startswith("---\n") and "noise 0.5" in card and questions in card
    assert ("patched first" in card) == (METHODS[method].patched and bool(flags))

    model = load_as_the_card_says(out)
    assert bft_hf.is_patched(model) == METHODS[method].patched
    if METHODS[method].patched:
        counts, before, after = (results[key] for key in ("parameters", "layers_before", "layers_after"))
        assert counts["bft"] == 2 and 0 < counts["bft_share"] < 1e-3
        assert [layer["layer"] for layer in after["layers"]] == [0, 1]
        assert before["layers"][0]["process_noise"] == pytest.approx(100.0) != after["layers"][0]["process_noise"]
        assert all(0 < layer["gain"] < 1 for layer in after["layers"])
        # What was trained is what is loaded.
        values = {name: p.exp().item() for name, p in bft_hf.bft_parameters(model).items()}
        process_noise = [value for name, value in values.items() if "process_noise" in name]
        assert process_noise == [pytest.approx(after["layers"][0]["process_noise"])]
        assert results["bft_config"] == bft_hf.get_config(model).to_dict()
    else:
        assert results["bft_config"] is None and "layers_after" not in results and results["parameters"]["bft"] == 0


def test_arms_of_the_demo_differ_in_the_method_alone(
    tiny: str, questions: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from bft_hf.recipes.trainer import BFTSFTTrainer

    seen: dict[str, list[Any]] = {}
    original = BFTSFTTrainer.training_step

    def spy(self: Any, model: Any, inputs: Any, *rest: Any) -> Any:
        name = Path(self.args.output_dir).name
        weights = {key: p.detach().clone() for key, p in model.named_parameters() if ".bft." not in key}
        batch = (inputs["input_ids"].clone(), inputs["labels"].clone(), weights)
        seen.setdefault(name, []).append(batch)
        return original(self, model, inputs, *rest)

    monkeypatch.setattr(BFTSFTTrainer, "training_step", spy)
    argv = ["--demo", "--model_name_or_path", tiny, "--dataset", questions, "--output_dir", str(tmp_path / "d"), *QUICK]
    assert main([*argv, "--train_examples", "30"]) == 0
    assert list(seen) == list(DEMO_METHODS) and {len(batches) for batches in seen.values()} == {2}
    for plain, *others in zip(*seen.values(), strict=True):
        for other in others:
            assert torch.equal(plain[0], other[0]) and torch.equal(plain[1], other[1])
        assert (plain[1] != -100).any()
    start, patched_start = seen["sft"][0][2], seen["bft"][0][2]
    assert start.keys() == patched_start.keys() and any("lora_A" in name for name in start)
    assert all(torch.equal(value, patched_start[name]) for name, value in start.items())
    after, patched_after = seen["sft"][1][2], seen["bft"][1][2]
    assert any(not torch.equal(value, patched_after[name]) for name, value in after.items())

    arms = json.loads((tmp_path / "d" / "results.json").read_text())["arms"]
    assert arms["sft"]["noise"] == arms["bft"]["noise"] and arms["sft"]["noise"]["rate"] == 0.3
    assert arms["sft"]["training"]["learning_rate"] == arms["bft"]["training"]["learning_rate"]
    assert arms["bft"]["parameters"]["trainable"] - arms["sft"]["parameters"]["trainable"] == 2
    both = arms["bft+forward_correction"]
    assert both["bft_config"] == arms["bft"]["bft_config"] is not None and arms["sft"]["bft_config"] is None
    assert both["method_settings"] == {"token_loss": "forward_correction", "noise_floor": 1e-5}
    assert [name for name, arm in arms.items() if "before" in arm] == ["sft"]
    last = capsys.readouterr().out.rstrip().splitlines()[-1]
    assert last.startswith("One seed and 3 questions are an example")


@pytest.mark.parametrize("count", [0, 2])
def test_answers_to_a_few_questions_and_no_evaluation_before(count: int, run: Any) -> None:
    whole = run("--method", "bft", name="whole")
    out = run("--method", "bft", "--eval_f1_examples", str(count), "--eval_before", "false")
    results, expected = (json.loads((folder / "results.json").read_text()) for folder in (out, whole))
    assert "before" not in results and "evaluation_before" not in results["seconds"]
    assert results["after"]["answer_nll"] == expected["after"]["answer_nll"]
    assert results["after"]["n"] == 3 and results["after"]["n_generated"] == count
    assert results["layers_before"] == expected["layers_before"]
    rows, whole_rows = (
        [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]
        for folder in (out, whole)
    )
    assert rows[:count] == whole_rows[:count]
    assert [row["prediction"] is None for row in rows] == [place >= count for place in range(3)]
    if count == 0:
        assert results["after"]["f1"] is None and "none answered" in (out / "README.md").read_text()
    else:
        assert results["after"]["f1"] == sum(row["f1"] for row in rows[:count]) / count
        assert "greedy answers to 2 of them" in (out / "README.md").read_text()


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What every training step is given."""
    from bft_hf.recipes.trainer import BFTSFTTrainer

    seen: list[dict[str, Any]] = []
    original = BFTSFTTrainer.training_step

    def spy(self: Any, model: Any, inputs: Any, *rest: Any) -> Any:
        seen.append({key: value.clone() for key, value in inputs.items() if isinstance(value, torch.Tensor)})
        return original(self, model, inputs, *rest)

    monkeypatch.setattr(BFTSFTTrainer, "training_step", spy)
    return seen


def test_trained_with_one_number_of_distractors_and_tested_with_several(
    run: Any, tiny: str, batches: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("bft_hf.noise.bm25.default_cache", lambda: tmp_path / "bm25")
    flags = ["--distractors", "1", "--distractor_source", "random,bm25", "--gold_position", "last", "--noise", "1"]
    flags += [
        "--eval_distractors",
        "0,2",
        "--reliability",
        "retriever",
        "--noise_kind",
        "answer_swap",
        "--method",
        "bft",
    ]
    out = run(*flags, "--eval_strategy", "steps", "--eval_steps", "2", "--record_uncertainty")
    results = json.loads((out / "results.json").read_text())
    assert results["after"] == results["after_by_distractors"]["0"] != results["after_by_distractors"]["2"]
    assert list(results["before_by_distractors"]) == ["0", "2"]
    context = results["context"]
    assert (context["gold_position"], context["reliability"], context["gold_probability"]) == ("last", "retriever", 1.0)
    assert context["train"]["added"] == context["train"]["rows"] == results["data"]["train_examples"]
    assert [part["distractors"] for part in context["evaluation"]] == [0, 2]
    assert results["noise"]["corrupted_rows"] == context["train"]["rows"]
    rows = [json.loads(line) for line in (out / "predictions.jsonl").read_text().splitlines()]
    assert [row["distractors"] for row in rows] == [row["distractors_given"] for row in rows] == [0] * 3 + [2] * 3
    assert len({row["id"] for row in rows}) == 3 and all(row["log_probability"] < 0 for row in rows)
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    for batch in batches:
        for ids, labels, trust in zip(batch["input_ids"], batch["labels"], batch["token_reliability"], strict=True):
            passages = re.findall(r"Passage: Box (\d+)", tokenizer.decode(ids[labels == -100]))
            question = re.search(r"Question: Box (\d+)", tokenizer.decode(ids[labels == -100]))
            assert question is not None and len(passages) == 2 and passages[1] == question[1] != passages[0]
            assert (trust[labels != -100] == 1).all() and trust.min() >= 0.05
    assert any(batch["token_reliability"].min() < 1 for batch in batches)


def test_passages_are_rated_by_the_model_before_it_is_patched(
    run: Any, questions: str, batches: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--method", "bft", "--distractors", "1", "--distractor_source", "random", "--reliability", "likelihood"]
    out = run(*flags)
    results = json.loads((out / "results.json").read_text())
    assert results["context"]["reliability"] == "likelihood"
    trust = torch.cat([batch["token_reliability"].flatten() for batch in batches])
    assert trust.min() < 1 and trust.min() >= 0.2 and trust.max() == 1
    again = ["--model_name_or_path", str(out), "--dataset", questions, "--output_dir", str(out.parent / "again")]
    assert main([*again, *QUICK, *flags]) == 2
    assert "is patched already" in capsys.readouterr().err and not (out.parent / "again").exists()


def test_raft_trains_with_distractors_and_loses_some_gold_passages(
    run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    out = run(
        "--method", "raft", "--distractor_source", "random", "--eval_distractors", "0", "--reliability", "retriever"
    )
    context = json.loads((out / "results.json").read_text())["context"]
    assert context["train"]["distractors"] == 4 and context["gold_probability"] == 0.8
    assert 0 < context["train"]["without_gold"] < context["train"]["rows"] / 2
    assert context["reliability"] is None and "without_gold" not in context["evaluation"][0]
    said = capsys.readouterr().out
    assert "raft is a plain model and ignores --reliability" in said and "candidates held an answer" in said


def test_retrieved_lists_and_a_column_of_reliability(
    run: Any, tmp_path: Path, batches: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "nq.jsonl"
    texts = [f"Town {n} has a {thing}." for n, thing in enumerate(("church", "bridge", "wall") * 5)]
    rows = [
        {
            "question": f"What has town {n}?",
            "answers": [texts[n].split()[-1][:-1]],
            "ctxs": [{"title": "", "text": text, "isgold": place == n > 0} for place, text in enumerate(texts)],
            "reliability": 0.5,
        }
        for n in range(15)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--dataset", str(file), "--eval_dataset", str(file), "--distractor_source", "ctxs", "--distractors", "2"]
    out = run("--method", "bft", *flags, "--reliability", "column")
    results = json.loads((out / "results.json").read_text())
    assert results["data"]["train_without_gold"] == results["data"]["eval_without_gold"] == 1
    assert results["data"]["train_examples"] == 14 and results["context"]["train"]["added"] == 28
    assert "1 questions of --dataset have no gold passage and are left out" in capsys.readouterr().out
    assert all(set(batch["token_reliability"].unique().tolist()) == {0.5, 1.0} for batch in batches)


@pytest.mark.parametrize("value", ["4", "[0, 4, 4]", "0,4"])
def test_numbers_of_distractors_in_yaml_are_a_number_or_a_list(value: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"eval_distractors: {value}\n")
    look = first_look(["--config", str(file)])
    assert (
        look.arguments.eval_distractors == arguments.parse(look)[0].eval_distractors == ("4" if value == "4" else "0,4")
    )


def test_seed_covers_noise_sample_and_order(run: Any) -> None:
    def losses(name: str, *flags: str) -> Any:
        out = run(
            "--noise", "0.5", "--method", "sft", "--logging_steps", "1", "--train_examples", "20", *flags, name=name
        )
        results = json.loads((out / "results.json").read_text())
        return results["training"]["losses"], results["after"]["answer_nll"]

    assert losses("a", "--seed", "1") == losses("b", "--seed", "1") != losses("c", "--seed", "2")


def commands_of(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip().startswith("bft-sft --")]


@pytest.mark.parametrize("line", commands_of(sft.__doc__ or ""))
def test_commands_of_the_docstring_run(line: str, run: Any) -> None:
    out = run(*shlex.split(line)[1:-2] if "--dataset" in line else shlex.split(line)[1:])
    results = json.loads((out / "results.json").read_text())
    assert results["method"] == ("sft" if "--method sft" in line else "bft")
    assert results["adapter"] == ("--use_peft" in line) and results["noise"]["rate"] == 0.3


def test_docstring_has_two_commands() -> None:
    assert len(commands_of(sft.__doc__ or "")) == 2


@pytest.mark.parametrize("config", sorted(file.name for file in CONFIGS.glob("*.yaml") if file.name[:4] != "rec_"))
def test_every_shipped_config_runs(config: str, run: Any) -> None:
    out = run("--config", config, "--train_examples", "8", "--gradient_accumulation_steps", "1")
    written = json.loads((out / "results.json").read_text())
    assert written["adapter"] == (config != "squad_tinyllama.yaml") and written["training"]["steps"] == 2


def test_all_questions_whatever_a_config_says(run: Any, questions: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("train_examples: 8\neval_examples: 3\n")
    counts = []
    for more in ([], ["--train_examples", "0", "--eval_examples", "0"]):
        out = run("--config", str(file), "--method", "sft", "--eval_dataset", questions, *more, "--overwrite")
        data = json.loads((out / "results.json").read_text())["data"]
        counts.append((data["train_examples"], data["eval_examples"]))
    assert counts == [(8, 3), (60, 60)]


def test_command_line_wins_over_config(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("noise: 0.2\nmethod: sft\nlearning_rate: 1e-3\ntrain_examples: 5\n")
    look = first_look([f"--config={file}", "--noise", "0.4"])
    own, training, _ = arguments.parse(look)
    assert (own.noise, own.method, own.train_examples, training.learning_rate) == (0.4, "sft", 5, 1e-3)
    assert look.arguments == own


def test_bft_start_is_chosen_by_flags_or_file(tmp_path: Path) -> None:
    file = tmp_path / "bft.json"
    file.write_text(bft_hf.BFTConfig(initial_process_noise=5.0, kriging=False).to_json_string())

    def chosen(*flags: str) -> bft_hf.BFTConfig:
        return filter_config(first_look(flags).arguments, default=bft_hf.BFTConfig())

    config = chosen("--bft_config", str(file), "--initial_precision", "0.1")
    assert config == bft_hf.BFTConfig(initial_process_noise=5.0, kriging=False, initial_precision_value=0.1)
    assert chosen("--process_noise", "7").initial_process_noise == 7.0
    assert chosen() == bft_hf.BFTConfig()
    # Fields win over the file, Q and tau over the fields; a list's commas part no fields.
    words = ["--bft_overrides", "gain=false, kriging=true,layers=[0, 1],initial_process_noise=3"]
    config = chosen("--bft_config", str(file), *words)
    assert config == bft_hf.BFTConfig(initial_process_noise=3.0, gain=False, layers=(0, 1))
    assert chosen(*words, "--process_noise", "7") == dataclasses.replace(config, initial_process_noise=7.0)


def test_resume_goes_on_and_the_wrong_kind_is_refused(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    out = run("--method", "bft", *LORA)
    run("--method", "bft", *LORA, "--max_steps", "4", "--resume_from_checkpoint", "true")
    assert json.loads((out / "results.json").read_text())["training"]["steps"] == 4
    checkpoint = str(out / "checkpoint-2")
    capsys.readouterr()
    argv = ["--model_name_or_path", "smollm2-135m", "--method", "sft", "--output_dir", str(out / "new")]
    assert main([*argv, *LORA, "--dataset", "demo", "--resume_from_checkpoint", checkpoint]) == 2
    assert "is of a patched model: use --method bft" in capsys.readouterr().err
    assert not (out / "new").exists()


def test_overwrite_replaces_a_run_and_nothing_else(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    out = run("--method", "sft")
    (out / "notes.txt").write_text("mine")
    assert (out / "checkpoint-2").is_dir()
    run("--method", "sft", "--overwrite", "--save_strategy", "no")
    assert (out / "notes.txt").read_text() == "mine" and not (out / "checkpoint-2").exists()


MALFORMED = '{"id": 1, "context": "a", "question": "b", "answers": ["c"]}\n{"id": 2, "context": "a", "question": "b"}\n'

REFUSED = {
    "noise above 1": (["--noise", "1.3"], "--noise must be a number in [0, 1], got 1.3"),
    "noise nan": (["--noise", "nan"], "--noise must be a number in [0, 1], got nan"),
    "noise no number": (["--noise", "much"], "invalid float value: 'much'"),
    "answers below 0": (["--eval_f1_examples", "-1"], "--eval_f1_examples must be 0 (none) or a positive integer"),
    "distractors": (["--distractors", "-1"], "--distractors must be 0 or a positive integer, got -1"),
    "evaluation's distractors": (["--eval_distractors", "0,x"], "--eval_distractors must be counts such as 4 or 0,4"),
    "source": (
        ["--distractor_source", "web"],
        "--distractor_source web: choose from bm25, random, ctxs, or give a file",
    ),
    "two corpora": (["--distractor_source", "bm25,malformed.jsonl"], "one corpus for BM25, not two"),
    "no lists": (["--distractors", "1", "--distractor_source", "ctxs"], "have no 'ctxs': use bm25, random or a file"),
    "no corpus": (["--distractors", "1", "--distractor_source", "list.yaml"], "--distractor_source: list.yaml: line 1"),
    "gold position": (["--gold_position", "end"], "unknown --gold_position 'end': choose from first, middle, last"),
    "reliability": (
        ["--reliability", "high"],
        "unknown --reliability 'high': choose from column, retriever, likelihood",
    ),
    "no reliability": (["--reliability", "column"], "has no column 'reliability'"),
    "packed reliability": (
        ["--reliability", "retriever", "--packing"],
        "--reliability: TRL's packing and padding_free",
    ),
    "raft without": (["--method", "raft", "--distractors", "0"], "--distractors 0 leaves this --method nothing"),
    "method": (["--method", "dpo"], "unknown --method 'dpo': choose from bft, sft"),
    "noise kind": (["--noise_kind", "typo"], "unknown --noise_kind 'typo': choose from uniform"),
    "flag": (["--nosie", "0.3"], "unknown flag --nosie, did you mean --noise?"),
    "TRL's value": (["--save_strategy", "never"], "never"),
    "no file": (["--dataset", "no/such/file.jsonl"], "--dataset no/such/file.jsonl: no such file"),
    "no evaluation file": (["--eval_dataset", "none.json.gz"], "--eval_dataset none.json.gz: no such file"),
    "malformed row": (["--dataset", "malformed.jsonl"], "row 2 (line 2) is malformed: it has no 'answers'"),
    "a negative number": (["--train_examples", "-2"], "--train_examples must be 0 (all) or a positive integer, got -2"),
    "too few": (["--train_examples", "1000"], "1000 were asked for"),
    "no folder": (["--model_name_or_path", "./nothing"], "--model_name_or_path ./nothing: no such folder"),
    "no model in folder": (["--model_name_or_path", "empty"], "the folder 'empty' holds no config.json"),
    "no Hub": (["--model_name_or_path", "someone/something"], "--demo"),
    "no Hub for data": (["--dataset", "someone/something"], "--demo"),
    "no Hub to push to": (["--push_to_hub"], "--push_to_hub: the Hub cannot be reached"),
    "YAML": (["--config", "broken.yaml"], "--config broken.yaml, line 2: not readable as YAML"),
    "YAML list": (["--config", "list.yaml"], "expected lines of `flag: value`, found list"),
    "YAML flag": (["--config", "flag.yaml"], "unknown flag 'nosie', did you mean --noise?"),
    "YAML value": (["--config", "value.yaml"], "noise: 'much' is not what --noise takes"),
    "no YAML": (["--config", "none.yaml"], "--config none.yaml: no such file"),
    "BFT JSON": (["--bft_config", "value.yaml"], "has to be a JSON object"),
    "BFT field": (["--bft_config", "field.json"], "unknown BFTConfig field 'gian'"),
    "BFT fields": (["--bft_overrides", "gain"], "--bft_overrides: 'gain' is no name=value"),
    "no BFT field": (["--bft_overrides", "grain=false"], "--bft_overrides: BFTConfig has no field 'grain'"),
    "BFT value": (["--bft_overrides", "gain=maybe"], "the filter's settings: BFTConfig.gain is 'maybe'"),
    "BFT layer": (["--bft_config", "layer.json"], "this model has layers 0 to 1"),
    "full folder": (
        ["--output_dir", "full"],
        "--output_dir full exists and is not empty: give another one, --overwrite",
    ),
    "full folder, not resumed": (
        ["--output_dir", "full", "--resume_from_checkpoint", "false"],
        "exists and is not empty",
    ),
    "push": (["--push_to_hub", "maybe"], "argument --push_to_hub: expected true or false, got maybe"),
    "seed": (["--seed", "-1"], "argument --seed: expected a whole number from 0 to 4294967295, got -1"),
    "batch": (
        ["--per_device_train_batch_size", "0"],
        "--per_device_train_batch_size must be a positive integer, got 0",
    ),
    "evaluation's batch": (["--per_device_eval_batch_size", "0"], "--per_device_eval_batch_size must be a positive"),
    "accumulation": (
        ["--gradient_accumulation_steps", "0"],
        "--gradient_accumulation_steps must be a positive integer",
    ),
    "learning rate": (["--learning_rate", "-1"], "--learning_rate must be 0 or more, got -1.0"),
    "reporter": (["--report_to", "wandb"], "requires wandb to be installed"),
    "long answers": (
        ["--eval_before", "false", "--max_new_tokens", "500", "--max_length", "510"],
        "evaluation: row '",
    ),
    "no checkpoint": (["--resume_from_checkpoint", "true"], "has no checkpoint-* folder"),
    "checkpoint": (["--resume_from_checkpoint", "none"], "--resume_from_checkpoint none: no checkpoint there"),
}


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with one of each broken thing."""
    files = {
        "malformed.jsonl": MALFORMED,
        "broken.yaml": "noise: 0.3\nmethod: sft: bft\n",
        "list.yaml": "- noise\n",
        "flag.yaml": "nosie: 0.3\n",
        "value.yaml": "noise: much\n",
        "field.json": '{"gian": true}',
        "layer.json": bft_hf.BFTConfig.unit(layers=(7,)).to_json_string(),
        "full/notes.txt": "mine",
        "empty/notes.txt": "no config.json",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_one_line_and_status_2(
    case: str, broken: Path, tiny: str, questions: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags, expected = REFUSED[case]
    before = sorted(broken.rglob("*"))
    argv = ["--model_name_or_path", tiny, "--dataset", questions, "--output_dir", "new/out", *QUICK, *flags]
    assert main(argv) == 2
    lines = [line for line in re.split(r"[\r\n]+", capsys.readouterr().err) if line.strip()]
    assert [line for line in lines if "it/s]" not in line and "examples/s]" not in line] == lines[-1:]
    assert lines[-1].startswith("bft-sft: ") and expected in lines[-1]
    assert sorted(broken.rglob("*")) == before


def test_missing_packages_are_named(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "trl", None)
    assert main(["--help-all"]) == main(["--demo", "--output_dir", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.count("pip install 'bft-hf[sft]'") == 2
    assert not (tmp_path / "out").exists()


def test_a_refusal_takes_no_other_run_along(tmp_path: Path, questions: str, tiny: str) -> None:
    argv = ["--model_name_or_path", tiny, "--dataset", questions, "--train_examples", "1000"]
    assert main([*argv, "--output_dir", str(tmp_path / "runs" / "one")]) == 2
    assert not (tmp_path / "runs").exists()
    (tmp_path / "runs" / "two").mkdir(parents=True)
    assert main([*argv, "--output_dir", str(tmp_path / "runs" / "one")]) == 2
    assert [folder.name for folder in (tmp_path / "runs").iterdir()] == ["two"]


def test_offline_without_demo_names_both_ways_out() -> None:
    """In a process of its own: the exit status, no traceback, nothing else on stderr, and soon."""
    environment = {key: value for key, value in os.environ.items() if key not in ("HF_HUB_OFFLINE", "HF_ENDPOINT")}
    # A port nobody listens on, for machines that do reach the Hub.
    environment |= {"HF_ENDPOINT": "http://127.0.0.1:9", "no_proxy": "127.0.0.1"}
    code = "import sys; from bft_hf.recipes.sft import main; sys.exit(main(['--noise', '0.3']))"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1 and "Traceback" not in done.stderr
    assert "--demo" in done.stderr and "--model_name_or_path" in done.stderr


def test_help_imports_nothing_heavy() -> None:
    # What the package itself imports is not this command's to save; on top of it, --help costs next to nothing.
    code = (
        "import sys, time, bft_hf\n"
        "start = time.process_time()\n"
        "from bft_hf.recipes.sft import main\n"
        "status = main(['--help'])\n"
        "sys.exit(status or time.process_time() - start > 0.5 or 'trl' in sys.modules or 'datasets' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and "--noise" in done.stdout and "--lr_scheduler_type" not in done.stdout


def test_help_all_lists_trl(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help-all"]) == 0
    text = capsys.readouterr().out
    assert all(flag in text for flag in ("--noise", "--lr_scheduler_type", "--lora_r", "--max_length"))


def test_every_method_is_reachable_by_flag_and_in_help(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--help"])
    text = capsys.readouterr().out
    for name in METHODS:
        assert name in text and first_look(["--method", name]).arguments.method == name


@pytest.mark.slow
def test_demo_on_smollm2(smollm2: Any, tmp_path: Path) -> None:
    """A few steps of the real thing, weights, corpus and all."""
    out = tmp_path / "demo"
    flags = ["--max_steps", "2", "--train_examples", "8", "--eval_examples", "4", "--per_device_train_batch_size", "2"]
    assert main(["--demo", "--output_dir", str(out), *flags]) == 0
    arms = json.loads((out / "results.json").read_text())["arms"]
    assert arms["bft"]["parameters"]["bft"] == 30 and arms["bft"]["parameters"]["bft_share"] < 1e-3
    assert len(arms["bft"]["layers_after"]["layers"]) == 30
    assert [name for name, arm in arms.items() if "before" in arm] == ["sft"]
    assert all(arm["after"]["answer_nll"] < arms["sft"]["before"]["answer_nll"] for arm in arms.values())
    assert arms["sft"]["before"]["f1"] < 0.5
    shutil.rmtree(out)
