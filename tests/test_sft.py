"""The trainer of bft-sft: which labels reach the loss, how tau and Q are trained, saved and resumed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors import safe_open
from transformers import AutoTokenizer

import bft_hf
from bft_hf.recipes import results as results_module
from bft_hf.recipes.arguments import first_look, parse
from bft_hf.recipes.results import count_parameters, layer_state, write_json
from bft_hf.recipes.sft import Arm, Data
from bft_hf.recipes.trainer import BFTSFTConfig, BFTSFTTrainer

LORA = ["--use_peft", "--lora_r", "4", "--lora_dropout", "0.0"]


@pytest.fixture(scope="module")
def tokenizer(stories260k: Path) -> Any:
    return AutoTokenizer.from_pretrained(stories260k)


@pytest.fixture(scope="module")
def questions() -> Dataset:
    rows = [
        {
            "id": str(i),
            "title": "",
            "context": f"Box {i} is red.",
            "question": f"Colour of box {i}?",
            "answers": ["red as fire"],
        }
        for i in range(12)
    ]
    return Dataset.from_list(rows)


@pytest.fixture
def make_arm(tmp_path: Path, questions: Dataset) -> Callable[..., Arm]:
    def make(method: str, *flags: str) -> Arm:
        argv = ["--method", method, "--output_dir", str(tmp_path / "out"), "--per_device_train_batch_size", "4"]
        look = first_look([*argv, "--model_name_or_path", "tiny", *flags])
        data = Data(questions, questions, {"train": "q", "train_on_hub": False, "train_examples": len(questions)})
        return Arm(method, look, *parse(look), data, "bft-sft")

    return make


def make_trainer(arm: Arm, model: Any, tokenizer: Any) -> BFTSFTTrainer:
    config = arm._patch(model)
    rows, noise = arm._tokenize(tokenizer)
    described = {"bft_config": config and config.to_dict(), "model": "tiny", "adapter": arm.model_config.use_peft}
    described |= {"data": arm.data.description, "noise": noise, "seed": 0, "command": "", "versions": {}}
    trainer = arm._trainer(model, tokenizer, rows, described)
    described["parameters"] = count_parameters(trainer.model)
    return trainer


def short_rows(count: int = 8) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(3, 500, (count, 10), generator=generator).tolist()
    return Dataset.from_list([{"input_ids": row, "labels": row} for row in rows])


@pytest.mark.parametrize("method", ["bft", "sft"])
def test_corrupted_labels_reach_the_loss_and_inputs_stay_clean(
    method: str, make_arm: Any, tiny_llama: Any, tokenizer: Any, questions: Dataset
) -> None:
    noisy = make_trainer(make_arm(method, "--noise", "1"), tiny_llama(vocab_size=512), tokenizer)
    clean = make_trainer(make_arm(method, "--noise", "0"), tiny_llama(vocab_size=512), tokenizer)
    batch, clean_batch = next(iter(noisy.get_train_dataloader())), next(iter(clean.get_train_dataloader()))

    assert set(batch) >= {"input_ids", "labels", "attention_mask"} and "corrupted" not in batch
    assert torch.equal(batch["input_ids"], clean_batch["input_ids"])
    trained = clean_batch["labels"] != -100
    assert torch.equal(clean_batch["labels"][trained], clean_batch["input_ids"][trained])
    assert torch.equal(batch["labels"] != -100, trained)
    ends = clean_batch["labels"] == tokenizer.eos_token_id
    assert ends.sum() == 4 and torch.equal(batch["labels"][ends], clean_batch["labels"][ends])
    assert (batch["labels"][trained & ~ends] != clean_batch["labels"][trained & ~ends]).all()

    # The loss itself, by the textbook formula on the plain forward's logits.
    model = noisy.model.eval()
    with torch.no_grad():
        loss = noisy.compute_loss(model, dict(batch))
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        expected = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:])
        on_clean = noisy.compute_loss(model, dict(clean_batch))
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    assert abs(loss - on_clean) > 1e-3


@pytest.mark.parametrize("loss_type", ["nll", "dft"])
@pytest.mark.parametrize("flags", [[], LORA], ids=["full", "lora"])
def test_loss_on_trained_positions_is_trls_loss(
    flags: list[str], loss_type: str, make_arm: Any, tiny_llama: Any, tokenizer: Any
) -> None:
    arm = make_arm("bft", "--noise", "0.5", "--loss_type", loss_type, *flags)
    trainer = make_trainer(arm, tiny_llama(vocab_size=512), tokenizer)
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.model.train()

    def step(compute: Callable[..., Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, list[float]]]:
        trainer.model.zero_grad()
        trainer._metrics["train"].clear()
        loss = compute(trainer.model, dict(batch), num_items_in_batch=torch.tensor(9))
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}
        return loss.detach(), gradients, dict(trainer._metrics["train"])

    ours = step(trainer.compute_loss)
    theirs = step(super(BFTSFTTrainer, trainer).compute_loss)
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-4, atol=1e-6)
    assert any("process_noise" in name for name in ours[1])
    for name in ("mean_token_accuracy", "entropy"):
        assert ours[2][name][0] == pytest.approx(theirs[2][name][0], rel=1e-5)


@pytest.mark.parametrize("flags", [[], LORA], ids=["full", "lora"])
def test_tau_and_q_have_a_group_of_their_own(flags: list[str], make_arm: Any, tiny_llama: Any, tokenizer: Any) -> None:
    flags = [
        *flags,
        "--weight_decay",
        "0.1",
        "--learning_rate",
        "1e-4",
        "--bft_learning_rate",
        "0.03",
        "--max_steps",
        "10",
    ]
    trainer = make_trainer(make_arm("bft", *flags), tiny_llama(vocab_size=512), tokenizer)
    trainer.create_optimizer_and_scheduler(10)
    groups = {group.get("name"): group for group in trainer.optimizer.param_groups}
    ours = bft_hf.bft_parameters(trainer.model)
    assert len(ours) == 3  # tau, and Q of all of three layers but the last
    assert {id(p) for p in groups["bft"]["params"]} == {id(p) for p in ours.values()}
    assert groups["bft"]["weight_decay"] == 0.0 and groups["bft"]["lr"] == 0.03
    held = [id(p) for group in trainer.optimizer.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in trainer.model.parameters() if p.requires_grad)
    assert any(group["weight_decay"] == 0.1 and group["params"] for group in trainer.optimizer.param_groups)
    for _ in range(5):
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
    assert groups["bft"]["lr"] == pytest.approx(0.015)


def test_plain_model_is_grouped_as_trl_does(make_arm: Any, tiny_llama: Any, tokenizer: Any) -> None:
    trainer = make_trainer(make_arm("sft"), tiny_llama(vocab_size=512), tokenizer)
    groups = trainer.create_optimizer().param_groups
    assert len(groups) == 2 and all("name" not in group for group in groups)


@pytest.mark.parametrize(
    ("rate", "low", "high"), [(2e-2, 0.5, 5.0), (None, 0.0, 0.05)], ids=["own rate", "weights' rate"]
)
def test_log_q_moves_in_a_hundred_steps(
    rate: float | None, low: float, high: float, tmp_path: Path, tiny_llama: Any, tokenizer: Any
) -> None:
    model = bft_hf.patch(tiny_llama(vocab_size=512), bft_hf.BFTConfig.unit())
    start = {name: p.detach().clone() for name, p in bft_hf.bft_parameters(model).items()}
    config = BFTSFTConfig(
        str(tmp_path),
        max_steps=100,
        per_device_train_batch_size=2,
        learning_rate=2e-5,
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = BFTSFTTrainer(
        model, config, train_dataset=short_rows(2), processing_class=tokenizer, bft_learning_rate=rate
    )
    trainer.train()
    moved = [
        (p - start[name]).abs().max().item()
        for name, p in bft_hf.bft_parameters(model).items()
        if "process_noise" in name
    ]
    assert low < max(moved) < high


@pytest.mark.parametrize("flags", [[], LORA], ids=["full", "lora"])
def test_resumed_training_ends_where_one_piece_ends(
    flags: list[str], make_arm: Any, tiny_llama: Any, tokenizer: Any, tmp_path: Path
) -> None:
    flags = [*flags, "--max_steps", "4", "--save_steps", "2", "--learning_rate", "1e-3", "--disable_tqdm", "true"]

    def finish(resume: str | None) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        trainer = make_trainer(make_arm("bft", *flags), tiny_llama(vocab_size=512), tokenizer)
        trainer.train(resume_from_checkpoint=resume)
        return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}

    whole = finish(None)
    resumed = finish(str(tmp_path / "out" / "checkpoint-2"))
    assert whole.keys() == resumed.keys()
    for name, value in whole.items():
        torch.testing.assert_close(resumed[name], value, rtol=0, atol=0, msg=name)
    assert any(abs(value.item()) > 0.03 for name, value in whole.items() if "process_noise" in name)


def test_adapter_file_holds_trained_tau_and_q(make_arm: Any, tiny_llama: Any, tokenizer: Any, tmp_path: Path) -> None:
    trainer = make_trainer(
        make_arm("bft", *LORA, "--max_steps", "2", "--save_strategy", "no"), tiny_llama(vocab_size=512), tokenizer
    )
    trainer.train()
    trainer.save_model(str(tmp_path / "adapter"))
    with safe_open(tmp_path / "adapter" / "adapter_model.safetensors", framework="pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys() if ".bft." in name}  # noqa: SIM118
    assert len(stored) == 3 and all(abs(value.item()) > 1e-3 for value in stored.values())


def test_card_names_the_hub_id_when_there_is_one(
    make_arm: Any, tiny_llama: Any, tokenizer: Any, tmp_path: Path
) -> None:
    trainer = make_trainer(make_arm("bft"), tiny_llama(vocab_size=512), tokenizer)
    trainer.create_model_card()
    card = tmp_path / "out" / "README.md"
    assert f"from_pretrained('{tmp_path / 'out'}')" in card.read_text() and "import bft_hf" in card.read_text()
    trainer.hub_model_id = "someone/squad-bft"
    trainer.create_model_card(model_name="ignored")
    assert "from_pretrained('someone/squad-bft')" in card.read_text()


def test_defaults_follow_the_device(tmp_path: Path) -> None:
    config = BFTSFTConfig(str(tmp_path), use_cpu=True)
    assert config.bf16 is False and config.gradient_checkpointing is False
    assert BFTSFTConfig(str(tmp_path), use_cpu=True, gradient_checkpointing=True).gradient_checkpointing is True
    assert BFTSFTConfig(str(tmp_path), use_cpu=True, bf16=True).bf16 is True


def test_layer_state_reads_tau_q_and_gain(tiny_llama: Any, tokenizer: Any, questions: Dataset) -> None:
    from bft_hf.recipes.questions import tokenize_questions

    config = bft_hf.BFTConfig.unit(initial_precision_value=2.0, initial_process_noise=3.0, layers=(1, 2))
    model = bft_hf.patch(tiny_llama(vocab_size=512), config)
    rows = list(tokenize_questions(questions, tokenizer).select(range(3)))
    state = layer_state(model, tokenizer, rows)
    assert state["initial_precision"] == pytest.approx(2.0)
    assert [layer["layer"] for layer in state["layers"]] == [1, 2]
    assert state["layers"][0]["process_noise"] == pytest.approx(3.0) and state["layers"][1]["process_noise"] is None
    assert all(0 < layer["gain"] < 1 for layer in state["layers"])
    # A pad counts for nothing: a row's own gains, weighted by its length, give the batch's.
    alone = [layer_state(model, tokenizer, [row]) for row in rows]
    lengths = torch.tensor([float(sum(label == -100 for label in row["labels"])) for row in rows])
    gains = torch.tensor([[layer["gain"] for layer in one["layers"]] for one in alone])
    expected = (gains * lengths[:, None]).sum(0) / lengths.sum()
    torch.testing.assert_close(torch.tensor([layer["gain"] for layer in state["layers"]]), expected, rtol=1e-4, atol=0)


def test_parameter_counts(tiny_llama: Any, make_arm: Any, tokenizer: Any) -> None:
    plain = count_parameters(tiny_llama(vocab_size=512))
    assert plain["bft"] == 0 and plain["total"] == plain["trainable"]
    patched = count_parameters(bft_hf.patch(tiny_llama(vocab_size=512), bft_hf.BFTConfig.unit()))
    assert patched["bft"] == 3 and patched["total"] == plain["total"] + 3
    adapted = count_parameters(make_trainer(make_arm("bft", *LORA), tiny_llama(vocab_size=512), tokenizer).model)
    assert adapted["bft"] == 3 and adapted["bft_share"] == patched["bft_share"]
    assert 3 < adapted["trainable"] < adapted["total"] - plain["total"] + 1


def test_results_file_is_whole_or_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "results.json"
    write_json(path, {"loss": float("nan"), "nested": [1.5, {"x": float("inf")}]})
    assert json.loads(path.read_text()) == {"loss": None, "nested": [1.5, {"x": None}]}

    def fail(*args: Any, **kwargs: Any) -> None:
        args[1].write("{")
        raise OSError("disk full")

    monkeypatch.setattr(results_module.json, "dump", fail)
    with pytest.raises(OSError, match="disk full"):
        write_json(path, {"loss": 1.0})
    monkeypatch.undo()
    assert json.loads(path.read_text())["loss"] is None
    assert [file.name for file in tmp_path.iterdir()] == ["results.json"]
