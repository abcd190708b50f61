"""Resuming: training goes on bit for bit as if in one piece, and only with the patch that it began with."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_tiny_llama
from distributed.ddp import tokenizer
from peft import LoraConfig, get_peft_model
from test_training import QUIET, farthest, losses, make_trainer, rows, values
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
    set_seed,
)
from trl import SFTConfig, SFTTrainer

import bft_hf
from bft_hf import BFTConfig
from bft_hf.hub import check_resume
from bft_hf.recipes.trainer import BFTSFTConfig, BFTSFTTrainer


@pytest.mark.parametrize("reloaded", [False, True], ids=["built anew", "loaded from the checkpoint"])
def test_resumed_training_is_bit_equal_to_one_piece(reloaded: bool, tmp_path: Path) -> None:
    """unsloth #3108: training resumed from a checkpoint went elsewhere. With dropout, so the generators count too."""

    def finish(model: Any, resume: str | None) -> tuple[dict[str, Tensor], list[float]]:
        set_seed(0)
        trainer = make_trainer(
            model, tmp_path / "run", max_steps=6, save_strategy="steps", save_steps=3, lr_scheduler_type="cosine"
        )
        trainer.train(resume_from_checkpoint=resume)
        return values(model), losses(trainer)

    def fresh() -> Any:
        return bft_hf.patch(make_tiny_llama(attention_dropout=0.2), BFTConfig.unit())

    checkpoint = tmp_path / "run" / "checkpoint-3"
    whole, history = finish(fresh(), None)
    assert {"config.json", "model.safetensors", "optimizer.pt"} <= {path.name for path in checkpoint.iterdir()}
    model = AutoModelForCausalLM.from_pretrained(checkpoint) if reloaded else fresh()
    resumed, again = finish(model, str(checkpoint))
    assert again == history
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    halfway = values(AutoModelForCausalLM.from_pretrained(checkpoint))
    assert farthest(halfway, whole) > 1e-3
    assert min((halfway[n] - whole[n]).abs().max() for n in bft_hf.bft_parameters(model)) > 1e-4


def patched_checkpoint(folder: Path, **options: Any) -> str:
    trainer = make_trainer(
        bft_hf.patch(make_tiny_llama(), BFTConfig.unit()),
        folder,
        max_steps=2,
        save_strategy="steps",
        save_steps=2,
        **options,
    )
    trainer.train()
    return str(folder / "checkpoint-2")


KINDS = ("Trainer", "Seq2SeqTrainer", "SFTTrainer", "BFTSFTTrainer")
"""transformers' and TRL's own, which bft_hf guards from outside, and the recipe's."""


def of_kind(kind: str, model: Any, folder: Path, **options: Any) -> Trainer:
    arguments = {"output_dir": str(folder), **QUIET, "save_strategy": "steps", "save_steps": 2, **options}
    if kind == "Trainer":
        return Trainer(model, TrainingArguments(**arguments), train_dataset=rows())
    if kind == "Seq2SeqTrainer":
        return Seq2SeqTrainer(model, Seq2SeqTrainingArguments(**arguments), train_dataset=rows())
    classes = (SFTTrainer, SFTConfig) if kind == "SFTTrainer" else (BFTSFTTrainer, BFTSFTConfig)
    config = classes[1](**arguments, bf16=False, gradient_checkpointing=False)
    return classes[0](model, config, train_dataset=rows(), processing_class=tokenizer())


@pytest.mark.parametrize("save_only_model", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_resuming_a_patched_checkpoint_unpatched_is_refused(kind: str, save_only_model: bool, tmp_path: Path) -> None:
    """Our error, naming patch, before the optimizer's about groups; without an optimizer's state there is none at all."""
    patched_checkpoint(tmp_path, save_only_model=save_only_model)
    model = make_tiny_llama()
    start = values(model)
    trainer = of_kind(kind, model, tmp_path, max_steps=4)
    with pytest.raises(ValueError, match=r"bft_hf\.patch") as error:
        trainer.train(resume_from_checkpoint=True)
    assert "\n" not in str(error.value) and farthest(values(model), start) == 0


@pytest.mark.parametrize("save_only_model", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_resuming_a_plain_checkpoint_patched_is_refused(kind: str, save_only_model: bool, tmp_path: Path) -> None:
    of_kind(kind, make_tiny_llama(), tmp_path, max_steps=2, save_only_model=save_only_model).train()
    model = bft_hf.patch(make_tiny_llama(), BFTConfig.unit())
    start = values(model)
    trainer = of_kind(kind, model, tmp_path, max_steps=4)
    with pytest.raises(ValueError, match="is of a plain model") as error:
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert "\n" not in str(error.value) and farthest(values(model), start) == 0


def test_plain_training_resumes_as_ever(tmp_path: Path) -> None:
    of_kind("Trainer", make_tiny_llama(), tmp_path, max_steps=2).train()
    trainer = of_kind("Trainer", make_tiny_llama(), tmp_path, max_steps=4)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 4


def test_a_checkpoint_without_a_configuration_is_left_to_the_loader(tmp_path: Path) -> None:
    """FSDP's and DeepSpeed's sharded folders hold none: nothing can be said of them."""
    check_resume(tmp_path, None)
    check_resume(tmp_path, BFTConfig.unit())
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="is of a plain model"):
        check_resume(tmp_path, BFTConfig.unit())


def test_checkpoints_without_tau_and_q_of_their_own_resume_patched(tmp_path: Path) -> None:
    """A patch without parameters, and an adapter that leaves tau and Q frozen, are patched all the same."""
    config = BFTConfig.unit(gain=False, kriging=False)
    model = bft_hf.patch(make_tiny_llama(), config)
    assert not bft_hf.bft_parameters(model)
    model.save_pretrained(tmp_path / "whole")
    check_resume(tmp_path / "whole", config)
    with pytest.raises(ValueError, match=r"bft_hf\.patch"):
        check_resume(tmp_path / "whole", None)
    adapted = get_peft_model(bft_hf.patch(make_tiny_llama(), BFTConfig.unit()), LoraConfig(r=2, task_type="CAUSAL_LM"))
    adapted.save_pretrained(tmp_path / "adapter")
    check_resume(tmp_path / "adapter", BFTConfig.unit())


def test_checkpoint_folder_of_the_trainer_is_complete(tmp_path: Path) -> None:
    """transformers #46165: a model's own files were missing from checkpoints, though not from the final save."""
    checkpoint = Path(patched_checkpoint(tmp_path))
    written = json.loads((checkpoint / "config.json").read_text())
    assert written["bft_config"] == BFTConfig.unit().to_dict()
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert bft_hf.get_config(model) == BFTConfig.unit()
    assert len(bft_hf.bft_parameters(model)) == 3 and all(p.item() for p in bft_hf.bft_parameters(model).values())
