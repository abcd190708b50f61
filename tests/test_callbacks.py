"""BFTCallback: what it reports, to whom and when, and that training does not feel it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainerCallback, TrainingArguments

import bft_hf
from bft_hf import BFTConfig
from bft_hf.callbacks import BFTCallback, process_noise

IDS = torch.randint(3, 128, (8, 9), generator=torch.Generator().manual_seed(41))
QUANTITIES = {"gain", "precision", "effective_sample_size", "process_noise"}


def rows(padded: int = 0) -> list[dict[str, torch.Tensor]]:
    """Rows of nine tokens; the first `padded` of each are padding, without label."""
    mask = torch.ones(9, dtype=torch.long)
    mask[:padded] = 0
    return [{"input_ids": row, "attention_mask": mask, "labels": row.masked_fill(mask == 0, -100)} for row in IDS]


def make_trainer(model: Any, folder: Path, data: Any = None, callback: bool = True, **arguments: Any) -> Trainer:
    fields: dict[str, Any] = {
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 2,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    trainer = Trainer(
        model, TrainingArguments(str(folder), **(fields | arguments)), train_dataset=data or rows(), eval_dataset=rows()
    )
    if callback:
        trainer.add_callback(BFTCallback(trainer))
    return trainer


def reported(trainer: Trainer) -> list[dict[str, float]]:
    """The logs that hold our numbers."""
    return [log for log in trainer.state.log_history if any(key.startswith("bft/") for key in log)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        {"gradient_accumulation_steps": 2, "bf16": True},
    ],
    ids=["plain", "checkpointing", "reentrant", "accumulation and bf16"],
)
def test_training_is_bit_equal_with_and_without_it(
    options: dict[str, Any], tiny_llama: Callable[..., Any], tmp_path: Path
) -> None:
    states, randoms, losses = [], [], []
    for callback in (False, True):
        model = bft_hf.patch(tiny_llama(attention_dropout=0.1), BFTConfig.unit())
        trainer = make_trainer(model, tmp_path, callback=callback, logging_steps=1, seed=3, **options)
        trainer.train()
        states.append({name: p.detach().clone() for name, p in model.named_parameters()})
        randoms.append(torch.rand(3))
        losses.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
        assert len(reported(trainer)) == (4 if callback else 0)
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert torch.equal(*randoms) and losses[0] == losses[1]


def test_numbers_are_those_of_record_on_the_same_batch(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    model = bft_hf.patch(tiny_llama(), BFTConfig.unit(initial_process_noise=2.0))
    batch = {key: torch.stack([row[key] for row in rows(padded=4)[:2]]) for key in rows()[0]}
    with bft_hf.record(model) as trace:
        model.train()(**batch)
    trainer = make_trainer(model, tmp_path, rows(padded=4)[:2], max_steps=1, logging_steps=1, learning_rate=0.0)
    trainer.train()
    (log,) = reported(trainer)
    seen = batch["attention_mask"].bool()
    expected = {}
    for layer in range(3):
        expected[f"bft/gain/layer_{layer:02d}"] = trace.gain[layer][seen].mean()
        expected[f"bft/precision/layer_{layer:02d}"] = trace.precision[layer][seen].mean()
        sample_size = trace.effective_sample_size[layer].transpose(1, 2)[seen].mean()
        expected[f"bft/effective_sample_size/layer_{layer:02d}"] = sample_size
    assert {key for key in log if "process_noise" in key} == {f"bft/process_noise/layer_{i:02d}" for i in (0, 1)}
    assert log["bft/process_noise/layer_00"] == pytest.approx(2.0)
    assert {key: log[key] for key in expected} == pytest.approx({key: v.item() for key, v in expected.items()})
    everything = torch.stack([gain.mean() for gain in trace.gain])
    counted = torch.stack([expected[f"bft/gain/layer_{i:02d}"] for i in range(3)])
    assert (everything - counted).abs().max() > 1e-4  # padding would have shown


@pytest.mark.parametrize(
    "config", [BFTConfig.unit(granularity="channel"), BFTConfig.unit(layers=(1,)), BFTConfig.unit(propagate=False)]
)
def test_other_settings_have_the_layers_and_quantities_they_have(
    config: BFTConfig, tiny_llama: Callable[..., Any], tmp_path: Path
) -> None:
    trainer = make_trainer(bft_hf.patch(tiny_llama(), config), tmp_path)
    trainer.train()
    assert len(reported(trainer)) == 2
    layers = {int(key[-2:]) for key in reported(trainer)[0] if key.startswith("bft/gain/")}
    assert layers == set(config.layers or range(3))
    noisy = any("process_noise" in key for key in reported(trainer)[0])
    assert noisy == (
        config.granularity == "channel"
    )  # one layer alone has no Q, nor has a filter that does not predict


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"logging_steps": 2}, [2, 4]),
        ({"logging_steps": 3, "logging_first_step": True}, [1, 3]),
        ({"logging_steps": 0.5}, [2, 4]),
        ({"logging_strategy": "epoch", "max_steps": -1, "num_train_epochs": 2}, [4, 8]),
        ({"logging_strategy": "no"}, []),
        ({"eval_strategy": "steps", "eval_steps": 1, "logging_steps": 2}, [2, 4]),
    ],
    ids=["steps", "first step", "share", "epoch", "no", "evaluation between"],
)
def test_it_reports_at_the_trainers_logging_steps_only(
    options: dict[str, Any], steps: list[int], tiny_llama: Callable[..., Any], tmp_path: Path
) -> None:
    model = bft_hf.patch(tiny_llama(), BFTConfig.unit())
    hooks = len(model.model._forward_pre_hooks)
    seen: list[int] = []

    class CountTraces(TrainerCallback):
        def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
            raise AssertionError("no accumulation here")

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(len(model.model._bft_traces))

    trainer = make_trainer(model, tmp_path, **options)
    trainer.add_callback(CountTraces())
    trainer.train()
    logs = reported(trainer)
    assert [log["step"] for log in logs] == steps and all("loss" in log for log in logs)
    # What is not logged is not measured; by epoch any step may be the last.
    wanted = set(range(1, 9)) if options.get("logging_strategy") == "epoch" else set(steps)
    assert {step for step, traces in enumerate(seen, start=1) if traces} == wanted
    assert not model.model._bft_traces and len(model.model._forward_pre_hooks) == hooks


def test_accumulated_steps_are_averaged_over_all_their_tokens(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    """Batches of different widths, which record() alone would refuse."""
    data = [{key: value[5 * (i < 2) :] for key, value in row.items()} for i, row in enumerate(rows()[:4])]
    model = bft_hf.patch(tiny_llama(), BFTConfig.unit())
    gains = []
    for part in (data[:2], data[2:]):
        batch = {key: torch.stack([row[key] for row in part]) for key in part[0]}
        with torch.no_grad(), bft_hf.record(model) as trace:
            model(**batch)
        gains.append(trace.gain[1].flatten())

    class InOrder(Trainer):
        def _get_train_sampler(self, *args: Any) -> None:
            return None

    arguments = TrainingArguments(
        str(tmp_path),
        max_steps=1,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = InOrder(model, arguments, train_dataset=data)
    trainer.add_callback(BFTCallback(trainer))
    trainer.train()
    assert reported(trainer)[0]["bft/gain/layer_01"] == pytest.approx(torch.cat(gains).mean().item())


def test_tensorboard_receives_it(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    trainer = make_trainer(bft_hf.patch(tiny_llama(), BFTConfig.unit()), tmp_path, report_to="tensorboard")
    trainer.train()
    (file,) = tmp_path.rglob("events.out.tfevents.*")
    events = accumulator.EventAccumulator(str(file.parent)).Reload()
    tags = {tag for tag in events.Tags()["scalars"] if tag.startswith("train/bft/")}
    assert {tag.split("/")[2] for tag in tags} == QUANTITIES and len(tags) == 3 * 3 + 2
    scalars = events.Scalars("train/bft/gain/layer_02")
    assert [event.step for event in scalars] == [2, 4]
    logged = [log["bft/gain/layer_02"] for log in reported(trainer)]
    assert [event.value for event in scalars] == pytest.approx(logged)
    assert "train/loss" in events.Tags()["scalars"]


def test_trackio_receives_it(tiny_llama: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trackio = pytest.importorskip("trackio", reason="trackio is not installed: it brings a web server along")
    logged: list[dict[str, Any]] = []
    for name, replacement in {
        "init": lambda *args, **kwargs: None,
        "log": lambda values, **kwargs: logged.append(values),
        "finish": lambda *args, **kwargs: None,
    }.items():
        monkeypatch.setattr(trackio, name, replacement)
    make_trainer(bft_hf.patch(tiny_llama(), BFTConfig.unit()), tmp_path, report_to="trackio").train()
    ours = [values for values in logged if "train/bft/gain/layer_00" in values]
    assert len(ours) == 2 and {key.split("/")[2] for key in ours[0] if "/bft/" in key} == QUANTITIES


def test_any_integration_of_report_to_receives_it_and_the_progress_bar_does_not(
    tiny_llama: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from transformers.integrations import integration_utils

    received: list[tuple[int, dict[str, Any]]] = []

    class Reporter(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            received.append((state.global_step, dict(logs)))

    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "wandb", Reporter)
    make_trainer(bft_hf.patch(tiny_llama(), BFTConfig.unit()), tmp_path, report_to=["wandb"]).train()
    ours = [(step, logs) for step, logs in received if any(key.startswith("bft/") for key in logs)]
    assert [step for step, _ in ours] == [2, 4]
    assert all(isinstance(value, float) for _, logs in ours for value in logs.values())
    printed = capsys.readouterr().out
    assert "'loss'" in printed and "bft/" not in printed


def test_adapters_and_their_q_are_followed(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    lora = LoraConfig(r=2, target_modules="all-linear", modules_to_save=["bft"], task_type="CAUSAL_LM")
    model = get_peft_model(bft_hf.patch(tiny_llama(), BFTConfig.unit()), lora)
    trainer = make_trainer(model, tmp_path)
    trainer.train()
    last = reported(trainer)[-1]
    assert len(process_noise(model)) == 2
    assert {key: value for key, value in last.items() if "process_noise" in key} == pytest.approx(
        {f"bft/process_noise/layer_{layer:02d}": noise for layer, noise in process_noise(model).items()}
    )
    assert abs(last["bft/process_noise/layer_00"] - 1) > 1e-3


def test_a_plain_model_is_left_alone(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    trainer = make_trainer(tiny_llama(), tmp_path)
    trainer.train()
    assert not reported(trainer) and trainer.state.global_step == 4


def test_a_step_that_fails_leaves_the_next_training_clean(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    model = bft_hf.patch(tiny_llama(), BFTConfig.unit())
    hooks = len(model.model._forward_pre_hooks)
    trainer = make_trainer(model, tmp_path, logging_steps=1)
    handle = model.lm_head.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    handle.remove()
    trainer.train()
    assert len(reported(trainer)) == 4 and not model.model._bft_traces
    assert len(model.model._forward_pre_hooks) == hooks


def test_sft_trainer_reports_it(tiny_llama: Callable[..., Any], stories260k: Path, tmp_path: Path) -> None:
    """Its fused head calls the base model, not the top one, and packed rows have no mask."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    arguments = SFTConfig(
        str(tmp_path),
        max_steps=2,
        logging_steps=1,
        packing=True,
        max_length=16,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
    )
    trainer = SFTTrainer(
        bft_hf.patch(tiny_llama(vocab_size=512), BFTConfig.unit()),
        args=arguments,
        train_dataset=Dataset.from_list([{"input_ids": row.tolist()} for row in IDS]),
        processing_class=AutoTokenizer.from_pretrained(stories260k),
    )
    trainer.add_callback(BFTCallback(trainer))
    trainer.train()
    assert len(reported(trainer)) == 2
    assert all(0 < log["bft/gain/layer_01"] < 1 and "loss" in log for log in reported(trainer))
