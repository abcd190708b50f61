"""Corrupted against clean labels after training: every number against a direct computation, and the flag of bft-sft."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import lora_config
from datasets import Dataset
from peft import get_peft_model
from transformers import AutoTokenizer

import bft_hf
from bft_hf.noise.labels import corrupt_labels
from bft_hf.recipes.losses import label_losses
from bft_hf.recipes.sft import main
from bft_hf.recipes.token_classes import choose_rows, summary, token_classes
from bft_hf.recipes.trainer import BFTSFTConfig

END = 2
FORMULAS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sft": lambda p: -p.log(),
    "gce": lambda p: (1 - p**0.7) / 0.7,
}


def make_rows(count: int = 6, rate: float = 0.5) -> tuple[Dataset, Dataset]:
    """Rows of 7 to 9 tokens, the last four trained, before and after corruption."""
    generator = torch.Generator().manual_seed(3)
    rows = []
    for i in range(count):
        ids = [*torch.randint(3, 128, (6 + i % 3,), generator=generator).tolist(), END]
        rows.append({"id": str(i), "input_ids": ids, "labels": [-100] * (len(ids) - 4) + ids[-4:]})
    clean = Dataset.from_list(rows)
    return clean, corrupt_labels(clean, rate, seed=1, vocab_size=128, eos_token_ids=[END])


def loss_of(method: str) -> Any:
    return label_losses(BFTSFTConfig("unused", use_cpu=True, token_loss=None if method == "sft" else method))


def make_model(tiny_llama: Any, kind: str) -> Any:
    model = tiny_llama()
    if kind != "plain":
        bft_hf.patch(model, bft_hf.BFTConfig(initial_process_noise=2.0))
    return get_peft_model(model, lora_config()) if kind == "lora" else model


@pytest.mark.parametrize("method", FORMULAS)
@pytest.mark.parametrize("kind", ["plain", "patched", "lora"])
def test_numbers_are_those_of_each_label_by_itself(kind: str, method: str, tiny_llama: Any) -> None:
    model = make_model(tiny_llama, kind)
    clean, noisy = make_rows()
    rows = choose_rows(clean, noisy, 5, {END}, seed=0)
    assert len(rows) == 5
    found = token_classes(model, rows, loss_of(method), batch_size=2, progress=False)

    trained = [p for name, p in model.named_parameters() if p.requires_grad and ".bft." not in name]
    assert kind == "plain" or any(p.requires_grad for name, p in model.named_parameters() if ".bft." in name)
    numbers: dict[str, dict[str, list[Any]]] = {"clean": {}, "corrupted": {}}
    sums: dict[str, Any] = {"clean": 0.0, "corrupted": 0.0}
    for row in rows:
        true = clean[int(row["id"])]["labels"]
        for place in range(len(true) - 4, len(true) - 1):  # the end of the answer is in neither class
            name = "corrupted" if row["labels"][place] != true[place] else "clean"
            model.zero_grad()
            with bft_hf.record(model) if kind != "plain" else torch.enable_grad() as trace:
                p = model(torch.tensor([row["input_ids"]])).logits[0, place - 1].softmax(-1)[row["labels"][place]]
            FORMULAS[method](p).backward()
            gradient = torch.cat([q.grad.flatten() for q in trained])
            sums[name] = sums[name] + gradient
            values = {"nll": -p.log().item(), "probability": p.item(), "gradient": gradient.norm().item()}
            if kind != "plain":
                values["gain"] = torch.stack([k[0, place - 1] for k in trace.gain]).mean().item()
                values["precision"] = trace.final_precision[0, place - 1].item()
            for key, value in values.items():
                numbers[name].setdefault(key, []).append(value)
    model.zero_grad()
    assert {name: found[name]["labels"] for name in numbers} == {k: len(v["nll"]) for k, v in numbers.items()}
    cosine = torch.nn.functional.cosine_similarity(sums["clean"], sums["corrupted"], 0).item()
    assert found["corrupted"].pop("cosine_with_clean") == pytest.approx(cosine, abs=1e-4) and abs(cosine) > 1e-3
    for name, columns in numbers.items():
        expected = {key: sum(values) / len(values) for key, values in columns.items()}
        assert {key: found[name][key] for key in expected} == pytest.approx(expected, rel=1e-4)
        assert found[name].keys() == {"labels", *expected}


def test_the_model_is_left_as_it_was(tiny_llama: Any) -> None:
    model = make_model(tiny_llama, "lora").train()
    before = {name: (p.detach().clone(), p.requires_grad) for name, p in model.named_parameters()}
    clean, noisy = make_rows(2)
    first, second = (
        token_classes(model, choose_rows(clean, noisy, 2, {END}, 0), loss_of("sft"), progress=False) for _ in range(2)
    )
    assert first == second and model.training
    for name, p in model.named_parameters():
        assert p.grad is None and p.requires_grad == before[name][1] and torch.equal(p, before[name][0])


def test_under_autocast_every_weight_has_its_gradient(tiny_llama: Any) -> None:
    """A weight that autocast keeps from a pass without gradients would have none, and nobody would hear of it."""
    model = make_model(tiny_llama, "lora")
    clean, noisy = make_rows()
    rows = choose_rows(clean, noisy, 6, {END}, 0)
    exact = token_classes(model, rows, loss_of("sft"), progress=False)
    with torch.autocast("cpu", torch.bfloat16):
        rough = token_classes(model, rows, loss_of("sft"), progress=False)
    for name, numbers in exact.items():
        assert rough[name] == pytest.approx(numbers, rel=0.05, abs=0.05) and rough[name] != numbers


def test_gce_holds_back_on_corrupted_labels(tiny_llama: Any) -> None:
    """Of one model that knows the true labels, by the gradients that either loss asks of it."""
    model = tiny_llama().train()
    clean, noisy = make_rows(4)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(30):
        for row in clean:
            model(torch.tensor([row["input_ids"]]), labels=torch.tensor([row["labels"]])).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    rows = choose_rows(clean, noisy, 4, {END}, 0)
    sft, gce = (token_classes(model, rows, loss_of(method), progress=False) for method in FORMULAS)
    assert sft["clean"]["probability"] > 0.5 > 0.1 > sft["corrupted"]["probability"]
    ratios = [found["corrupted"]["gradient"] / found["clean"]["gradient"] for found in (sft, gce)]
    assert ratios[1] < ratios[0] / 10 and ratios[0] > 2
    assert sft["corrupted"]["nll"] == gce["corrupted"]["nll"]


def test_no_weight_to_look_at_is_refused(tiny_llama: Any) -> None:
    model = make_model(tiny_llama, "patched")
    for name, p in model.named_parameters():
        p.requires_grad_(".bft." in name)
    clean, noisy = make_rows(1)
    with pytest.raises(ValueError, match="no weight is trained but tau and Q"):
        token_classes(model, choose_rows(clean, noisy, 1, {END}, 0), loss_of("sft"), progress=False)


@pytest.fixture(scope="module")
def flags(stories260k: Path, tmp_path_factory: pytest.TempPathFactory, tiny_llama: Any) -> list[str]:
    """bft-sft on a random model and a file of questions, for two steps."""
    folder = tmp_path_factory.mktemp("run")
    tiny_llama(vocab_size=512, num_hidden_layers=2, max_position_embeddings=512).save_pretrained(folder / "tiny")
    AutoTokenizer.from_pretrained(stories260k).save_pretrained(folder / "tiny")
    rows = [
        {"id": i, "context": f"Box {i} is red.", "question": f"Box {i}?", "answers": ["red as fire"]} for i in range(30)
    ]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--model_name_or_path", str(folder / "tiny"), "--dataset", str(folder / "questions.jsonl")]
    words += ["--eval_examples", "2", "--max_new_tokens", "2", "--eval_before", "false"]
    return [*words, "--per_device_train_batch_size", "4"]


def run(flags: list[str], out: Path, *more: str) -> dict[str, Any]:
    assert main([*flags, "--output_dir", str(out), *more]) == 0
    results: dict[str, Any] = json.loads((out / "results.json").read_text())
    return results


def test_a_run_writes_them_and_is_otherwise_the_same(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["--method", "bft+gce", "--noise", "0.5", "--max_steps", "2"]
    without = run(flags, tmp_path / "without", *common)
    capsys.readouterr()
    first = run(flags, tmp_path / "out", *common, "--token_classes", "8")
    assert "bft+gce: a corrupted label's gradient is " in capsys.readouterr().out
    classes = first.pop("token_classes")
    assert "token_classes" not in without and first["after"] == without["after"]
    assert first["seconds"]["token_classes"] > 0
    assert set(classes["clean"]) == {"labels", "nll", "probability", "gain", "precision", "gradient"}
    assert set(classes["corrupted"]) == {*classes["clean"], "cosine_with_clean"}
    # 8 rows of one answer: "red as fire" without the token that ends it.
    per_row = first["noise"]["eligible_labels"] / first["data"]["train_examples"]
    assert classes["clean"]["labels"] + classes["corrupted"]["labels"] == 8 * per_row

    resume = ["--resume_from_checkpoint", "true", "--max_steps", "4"]
    resumed = run(flags, tmp_path / "out", *common, "--token_classes", "8", *resume)["token_classes"]
    whole = run(flags, tmp_path / "whole", *common, "--token_classes", "8", "--max_steps", "4")["token_classes"]
    assert resumed["corrupted"]["labels"] == whole["corrupted"]["labels"] == classes["corrupted"]["labels"]
    assert resumed["clean"]["nll"] != classes["clean"]["nll"]  # of the model after four steps, not two


def test_without_noise_there_is_no_corrupted_class(flags: list[str], tmp_path: Path) -> None:
    more = ["--method", "sft", "--max_steps", "1", "--token_classes", "100"]
    classes = run(flags, tmp_path / "out", *more)["token_classes"]
    assert set(classes) == {"clean"} and summary(classes) is None
    assert set(classes["clean"]) == {"labels", "nll", "probability", "gradient"}


@pytest.mark.parametrize(
    ("more", "expected"),
    [(["--token_classes", "-1"], "--token_classes must be a number of rows, or 0 for none, got -1")],
)
def test_bad_input_is_one_line(
    more: list[str], expected: str, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*flags, "--output_dir", str(tmp_path / "out"), *more]) == 2
    assert expected in capsys.readouterr().err and not (tmp_path / "out").exists()
