"""Trains tiny patched models under accelerate, alone or as one of several processes, and writes down how it went."""

import sys
from pathlib import Path
from typing import Any

import torch
from conftest import make_tiny_llama
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments

import bft_hf
from bft_hf import BFTConfig
from bft_hf.recipes.trainer import BFTSFTConfig, BFTSFTTrainer
from distributed import leave

ROWS = 4
STEPS = 3

JOBS: dict[str, tuple[BFTConfig, dict[str, Any]]] = {
    "default": (BFTConfig.unit(), {}),
    "no gain": (BFTConfig.unit(gain=False), {}),
    "no kriging": (BFTConfig.unit(kriging=False), {}),
    "key precision": (BFTConfig.unit(separate_key_precision=True), {}),
    "checkpointing": (
        BFTConfig.unit(),
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    ),
    "accumulation": (BFTConfig.unit(), {"gradient_accumulation_steps": 2}),
    "sft": (BFTConfig.unit(), {}),
}


def rows() -> Dataset:
    """Rows of twelve tokens, of which each trains a number of its own: a mean of the processes' means would be wrong."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 128, (6 * ROWS, 12), generator=generator).tolist()
    labels = [[-100] * (1 + i % 9) + row[1 + i % 9 :] for i, row in enumerate(ids)]
    return Dataset.from_list([{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)])


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of 128 words."""
    words = {f"w{i}": i for i in range(3, 128)} | {"<pad>": 0, "<s>": 1, "</s>": 2}
    backend = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", model_max_length=256
    )


def train(name: str, processes: int, folder: Path, unused: bool = False) -> dict[str, Any]:
    """Run one job; `processes` share the rows of a step between them.

    Returns:
        The losses by step, the parameters at the end, the start values of tau and Q, and how many processes there were.
    """
    config, options = JOBS[name]
    model = bft_hf.patch(make_tiny_llama(), config)
    if unused:
        model.model.layers[0].bft.spare = torch.nn.Parameter(torch.ones(1))
    start = {key: value.detach().clone() for key, value in bft_hf.bft_parameters(model).items()}
    arguments: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": ROWS // processes // options.get("gradient_accumulation_steps", 1),
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "ddp_find_unused_parameters": False,
        "dataloader_pin_memory": False,
        **options,
    }
    if name == "sft":
        trainer: Trainer = BFTSFTTrainer(
            model, BFTSFTConfig(**arguments), train_dataset=rows(), processing_class=tokenizer()
        )
    else:
        optimizer = torch.optim.AdamW(bft_hf.param_groups(model, 1e-3))
        trainer = Trainer(model, TrainingArguments(**arguments), train_dataset=rows(), optimizers=(optimizer, None))
    trainer.train()
    return {
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "norms": [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry],
        "parameters": {key: value.detach() for key, value in model.named_parameters()},
        "start": start,
        "processes": trainer.args.world_size,
    }


def main(folder: Path, *names: str) -> None:
    """Run jobs as one of two processes; rank 0 saves the results. Without names all, and one with an unused parameter."""
    torch.set_num_threads(1)
    results = {name: train(name, 2, folder) for name in names or JOBS}
    if not names:
        try:
            train("default", 2, folder, unused=True)
            results["unused"] = {"error": ""}
        except RuntimeError as error:
            results["unused"] = {"error": str(error)}
    if torch.distributed.get_rank() == 0:
        torch.save(results, folder / "results.pt")
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
