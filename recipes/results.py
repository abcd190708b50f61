"""What a run leaves behind: results.json, a table on the terminal and the text of the model card."""

import json
import os
import platform
import re
import tempfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS_FORMAT = 1
LIBRARIES = (
    "bft-hf",
    "torch",
    "transformers",
    "trl",
    "peft",
    "accelerate",
    "datasets",
    "tokenizers",
    "huggingface_hub",
)


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write JSON so that a reader sees the old file or the whole new one, never a part.

    Args:
        path: Its folder exists.
        values: Plain JSON values; a float that is not finite is written as null.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(_finite(values), file, indent=2, allow_nan=False)
            file.write("\n")
        # mkstemp gives 0600; a result should be as readable as any other file of its folder.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value


def library_versions() -> dict[str, str]:
    """Version by name of what a result depends on, Python and the platform included."""
    versions = {"python": platform.python_version(), "platform": platform.platform()}
    for name in LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def count_parameters(model: Any) -> dict[str, float]:
    """Sizes of a model, tied weights once and the copies that PEFT keeps of an original not at all.

    Returns:
        "total", "trainable", "bft" (tau and Q), and "bft_share" of the base model's own, adapters left out.
    """
    total = trainable = bft = base = 0
    for name, parameter in model.named_parameters():
        if ".original_module." in name:
            continue
        total += parameter.numel()
        trainable += parameter.numel() if parameter.requires_grad else 0
        if _is_bft(name):
            bft += parameter.numel()
        elif "lora_" not in name:
            base += parameter.numel()
    return {"total": total, "trainable": trainable, "bft": bft, "bft_share": bft / max(1, base)}


def _is_bft(name: str) -> bool:
    return re.search(r"\.bft\.(modules_to_save\.[^.]+\.)?[^.]+$", name) is not None


def layer_state(model: Any, tokenizer: Any, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """tau, Q and the mean gain of a patched model on a fixed batch of prompts.

    Args:
        model: Patched; it is run once, without gradients.
        tokenizer: Pads the prompts on the left.
        rows: Tokenized questions (`input_ids`, `labels`); their prompt is the part whose labels are -100.

    Returns:
        "initial_precision", tau's mean over the prompts' tokens, and "layers": "layer", "process_noise" (None in a layer
        without) and "gain", the mean over the same tokens.
    """
    import torch

    import bft_hf

    prompts = [
        {"input_ids": [token for token, label in zip(row["input_ids"], row["labels"], strict=True) if label == -100]}
        for row in rows
    ]
    side = tokenizer.padding_side
    tokenizer.padding_side = "left"
    try:
        batch = tokenizer.pad(prompts, return_tensors="pt").to(model.device)
    finally:
        tokenizer.padding_side = side
    mode = model.training
    model.eval()
    with torch.no_grad(), bft_hf.record(model) as trace:
        model(**batch)
    model.train(mode)
    seen = batch["attention_mask"].bool()
    noise = {}
    for name, parameter in bft_hf.bft_parameters(model).items():
        if (layer := re.search(r"\.(\d+)\.bft\.(?:.*\.)?log_process_noise$", name)) is not None:
            noise[int(layer[1])] = parameter.detach().double().exp().mean().item()
    return {
        "initial_precision": trace.precision[0][seen].mean().item(),
        "layers": [
            {"layer": index, "process_noise": noise.get(index), "gain": gain[seen].mean().item()}
            for index, gain in zip(trace.layers, trace.gain, strict=True)
        ],
    }


def print_table(rows: Sequence[Mapping[str, Any]], title: str) -> None:
    """The runs as a table on stdout.

    Args:
        rows: "name", "metrics" (`Evaluation.summary`), and where they apply "trained_on", "seconds", "parameters".
        title: Above the table.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table()
    table.add_column("model")
    for heading in ("EM", "F1", "answer NLL", "training", "new parameters"):
        table.add_column(heading, justify="right")
    for row in rows:
        metrics, parameters = row["metrics"], row.get("parameters")
        table.add_row(
            row["name"],
            *("" if metrics[key] is None else f"{metrics[key]:.3f}" for key in ("exact_match", "f1", "answer_nll")),
            f"{row['seconds']:.0f} s" if row.get("seconds") is not None else "",
            f"{parameters['bft']:,} ({parameters['bft_share']:.5%})" if parameters and parameters["bft"] else "",
        )
    # A title of the table's own would be wrapped to the table's width.
    print(f"\n{title}")
    Console().print(table)


def layer_lines(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """What training did to tau, Q and the gains, in two or three lines."""
    lines = [f"tau {before['initial_precision']:.3g} -> {after['initial_precision']:.3g}"]
    for key, symbol in (("process_noise", "Q"), ("gain", "mean gain")):
        spans = []
        for state in (before, after):
            values = [layer[key] for layer in state["layers"] if layer[key] is not None]
            spans.append(f"{min(values):.3g} .. {max(values):.3g}" if values else "none")
        lines.append(f"{symbol} over the layers {spans[0]} -> {spans[1]}")
    return lines


def load_snippet(results: Mapping[str, Any], folder: str) -> str:
    """Python that loads a saved result, as its card shows it.

    Args:
        results: What results.json holds.
        folder: Where the model is: a path or a Hub id.
    """
    patched, base = results["bft_config"] is not None, results["model"]
    bundled = not ("/" in base or os.path.exists(base))
    lines = ["import bft_hf"] if patched else []
    if not results["adapter"]:
        lines += ["from transformers import AutoModelForCausalLM, AutoTokenizer", ""]
        lines += [f"model = AutoModelForCausalLM.from_pretrained({folder!r})"]
    else:
        lines += ["from peft import PeftModel", "from transformers import AutoModelForCausalLM, AutoTokenizer"]
        lines += ["from bft_hf.recipes.models import load_model_and_tokenizer"] if bundled else []
        lines += [""]
        if bundled:
            lines += [f"model, _ = load_model_and_tokenizer({base!r})"]
        else:
            lines += [f"model = AutoModelForCausalLM.from_pretrained({base!r})"]
        if patched:
            lines += [f"config = bft_hf.BFTConfig.from_dict({results['bft_config']!r})"]
            lines += ["model = bft_hf.patch(model, config)  # first: the adapter holds tau and Q"]
        lines += [f"model = PeftModel.from_pretrained(model, {folder!r})"]
    return "\n".join([*lines, f"tokenizer = AutoTokenizer.from_pretrained({folder!r})"])


def card_text(results: Mapping[str, Any], folder: str) -> str:
    """The model card of a run, front matter included.

    Args:
        results: What results.json holds; "after" may be missing, in a checkpoint's card.
        folder: Where the model is: a path or a Hub id.
    """
    from bft_hf import BFTConfig
    from bft_hf.cards import model_card

    data, counts, after = results["data"], results["parameters"], results.get("after")
    config = BFTConfig.from_dict(results["bft_config"]) if results["bft_config"] else None
    names = {"exact_match": "exact match", "f1": "F1", "answer_nll": "answer NLL"}
    training = (
        f"- {data['train_examples']} questions of `{data['train']}`, by `bft-sft`\n"
        f"- Seed {results['seed']}; {counts['trainable']:,} trained parameters"
        + (f", {counts['bft']:,} of them tau and Q ({counts['bft_share']:.5%} of the model)" if config else "")
        + f"\n- Command: `{results['command']}`"
    )
    sections = {}
    if after:
        sections["Reading the numbers"] = _reading(after, results.get("before"), names)
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items() if name != "platform")
    sections["Made with"] = f"{versions}."
    card = model_card(
        config,
        folder,
        base_model=results["model"],
        adapter=results["adapter"],
        datasets=[data["train"]] if data["train_on_hub"] else [],
        training=training,
        noise=results["noise"],
        evaluation={name: after[key] for key, name in names.items() if after[key] is not None} if after else None,
        evaluated_on=data.get("evaluation"),
        tags=["trl", "sft"],
        loading=load_snippet(results, folder),
        sections=sections,
    )
    return str(card)


def _reading(after: Mapping[str, Any], before: Mapping[str, Any] | None, names: Mapping[str, str]) -> str:
    count, answered = after["n"], after.get("n_generated", after["n"])
    text = f"{count:.0f} questions, " + {count: "greedy answers", 0: "none answered"}.get(
        answered, f"greedy answers to {answered:.0f} of them"
    )
    if before:
        known = (f"{name} {before[key]:.3f}" for key, name in names.items() if before[key] is not None)
        text += f"; before training {', '.join(known)}"
    return f"{text}. One seed: a difference between two such runs is no ranking."
