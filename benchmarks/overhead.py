"""What the patch costs: patched against unpatched in one process, alternating, as ratios with their spread.

    python benchmarks/overhead.py --quick                          # two minutes, as CI runs it
    python benchmarks/overhead.py --output build/overhead          # SmolLM2-135M's shapes on a CPU
    python benchmarks/overhead.py --device cuda --dtype bfloat16 --model tinyllama --output build/overhead-cuda

Weights are random (the arithmetic does not know), shapes are the real models'. Each row: training step (forward, backward,
AdamW), prefill, or one decoded token with a cache; medians of `--repeats` pairs and the quartiles of the pairs' ratios. Peak
memory is that of a process of its own for each arm: the resident set on a CPU, torch's allocator on a GPU.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import bft_hf
from bft_hf import BFTConfig

MODELS: dict[str, dict[str, Any]] = {
    "smollm2": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
    },
    "tinyllama": {
        "vocab_size": 32000,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "max_position_embeddings": 8192,
    },
}


def main() -> None:
    """Measure, print a table and write it with the raw numbers."""
    arguments = parse()
    torch.manual_seed(0)
    if arguments.memory_of:
        print(json.dumps(peak_memory(arguments)))
        return
    rows = [measure(arguments, kind, batch, tokens) for kind, batch, tokens in cases(arguments)]
    rows += [memory_row(arguments, batch, tokens) for batch, tokens in arguments.memory]
    facts = facts_of(arguments)
    text = table(rows) + "\n" + "\n".join(f"- {name}: {value}" for name, value in facts.items()) + "\n"
    print(text)
    if arguments.output:
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / "overhead.md").write_text(text)
        (arguments.output / "overhead.json").write_text(json.dumps({"rows": rows, "facts": facts}, indent=1) + "\n")


def parse() -> argparse.Namespace:
    """The command line."""
    shape = lambda text: tuple(map(int, text.split("x")))  # noqa: E731
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="smollm2")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--attention", default="sdpa")
    parser.add_argument(
        "--config", type=json.loads, default={}, help='BFTConfig fields as JSON: {"granularity": "channel"}'
    )
    parser.add_argument("--train", type=shape, nargs="*", default=[(2, 512), (1, 2048)], help="batch x tokens")
    parser.add_argument(
        "--lora", type=shape, nargs="*", default=[(2, 512)], help="the same with LoRA on all projections"
    )
    parser.add_argument("--prefill", type=shape, nargs="*", default=[(2, 512), (1, 2048), (1, 8192)])
    parser.add_argument(
        "--decode", type=shape, nargs="*", default=[(1, 512), (8, 512)], help="batch x tokens in the cache"
    )
    parser.add_argument("--memory", type=shape, nargs="*", default=[(2, 512)])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="few layers and repeats: a smoke test with a table")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--memory-of", choices=["plain", "patched"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.layers, arguments.repeats = arguments.layers or 3, 3
        arguments.train, arguments.lora, arguments.prefill, arguments.decode = [(1, 256)], [], [(1, 512)], [(1, 256)]
        arguments.memory = []
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    return arguments


def cases(arguments: argparse.Namespace) -> list[tuple[str, int, int]]:
    """Everything to time, as (kind, batch, tokens)."""
    kinds = ("train", "lora", "prefill", "decode")
    return [(kind, *shape) for kind in kinds for shape in getattr(arguments, kind)]


def build(arguments: argparse.Namespace, kind: str, patched: bool) -> Any:
    """A model with random weights, ready for a kind of step."""
    from transformers import LlamaConfig, LlamaForCausalLM

    fields = MODELS[arguments.model] | ({"num_hidden_layers": arguments.layers} if arguments.layers else {})
    config = LlamaConfig(**fields, attn_implementation=arguments.attention)
    with torch.device(arguments.device):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).to(getattr(torch, arguments.dtype))
    if patched:
        bft_hf.patch(model, BFTConfig(**arguments.config))
    if kind == "lora":
        from peft import LoraConfig, get_peft_model

        projections = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        ours = ["bft"] if patched else None
        model = get_peft_model(model, LoraConfig(r=16, target_modules=projections, modules_to_save=ours))
    return model.train(kind in ("train", "lora"))


def stepper(arguments: argparse.Namespace, kind: str, batch: int, tokens: int, patched: bool) -> Callable[[], None]:
    """A function that does one step of a kind, and waits for it."""
    model = build(arguments, kind, patched)
    ids = torch.randint(3, model.config.vocab_size, (batch, tokens), device=arguments.device)
    wait = torch.cuda.synchronize if arguments.device.startswith("cuda") else lambda: None
    if kind in ("train", "lora"):
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)

        def step() -> None:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            wait()

    elif kind == "prefill":

        @torch.no_grad()
        def step() -> None:
            model(ids, use_cache=False, logits_to_keep=1)
            wait()

    else:
        from transformers import DynamicCache

        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(ids, past_key_values=cache, logits_to_keep=1)

        @torch.no_grad()
        def step() -> None:
            for _ in range(8):
                model(ids[:, -1:], past_key_values=cache)
            cache.crop(-8)
            wait()

    return step


def measure(arguments: argparse.Namespace, kind: str, batch: int, tokens: int) -> dict[str, Any]:
    """Time both arms, one after the other, again and again."""
    steps = [stepper(arguments, kind, batch, tokens, patched) for patched in (False, True)]
    for step in steps * 2:
        step()
    times: list[list[float]] = [[], []]
    for _ in range(arguments.repeats):
        for step, seconds in zip(steps, times, strict=True):
            start = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
    ratios = sorted(patched / plain for plain, patched in zip(*times, strict=True))
    quartiles = statistics.quantiles(ratios, n=4)
    scale = 8 if kind == "decode" else 1
    row = {
        "what": kind,
        "batch": batch,
        "tokens": tokens,
        "plain": statistics.median(times[0]) / scale,
        "patched": statistics.median(times[1]) / scale,
        "ratio": statistics.median(ratios),
        "quartiles": [quartiles[0], quartiles[2]],
        "repeats": arguments.repeats,
    }
    print(f"{kind} {batch}x{tokens}: {row['ratio']:.3f} ({quartiles[0]:.3f} to {quartiles[2]:.3f})", file=sys.stderr)
    return row


def peak_memory(arguments: argparse.Namespace) -> int:
    """Peak bytes of this process over three training steps."""
    ((batch, tokens),) = arguments.memory
    step = stepper(arguments, "train", batch, tokens, arguments.memory_of == "patched")
    for _ in range(3):
        step()
    if arguments.device.startswith("cuda"):
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def memory_row(arguments: argparse.Namespace, batch: int, tokens: int) -> dict[str, Any]:
    """Peak memory of a training step, each arm in a process of its own."""
    command = [sys.executable, __file__, "--model", arguments.model, "--device", arguments.device]
    command += [
        "--dtype",
        arguments.dtype,
        "--attention",
        arguments.attention,
        "--config",
        json.dumps(arguments.config),
    ]
    command += ["--memory", f"{batch}x{tokens}"] + (["--layers", str(arguments.layers)] if arguments.layers else [])
    peaks = {}
    for arm in ("plain", "patched"):
        output = subprocess.run([*command, "--memory-of", arm], capture_output=True, text=True, check=True).stdout
        peaks[arm] = json.loads(output.splitlines()[-1])
    return {
        "what": "peak memory",
        "batch": batch,
        "tokens": tokens,
        **peaks,
        "ratio": peaks["patched"] / peaks["plain"],
    }


def facts_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """New parameters, the time to patch, and where this was measured."""
    model = build(arguments, "prefill", False)
    total = sum(parameter.numel() for parameter in model.parameters())
    start = time.perf_counter()
    bft_hf.patch(model, BFTConfig(**arguments.config))
    seconds = time.perf_counter() - start
    new = sum(parameter.numel() for parameter in bft_hf.bft_parameters(model).values())
    import transformers

    return {
        "model": f"{arguments.model}, {model.config.num_hidden_layers} layers, {arguments.dtype}, {arguments.attention}",
        "settings": copy.deepcopy(arguments.config) or "default",
        "new parameters": f"{new} of {total} ({new / total:.2e})",
        "time to patch": f"{seconds * 1e3:.0f} ms",
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, {arguments.device}",
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        "| what | batch x tokens | plain | patched | ratio | quartiles |",
        "| --- | --- | ---: | ---: | ---: | --- |",
    ]
    for row in rows:
        if row["what"] == "peak memory":
            shown = [f"{row[arm] / 2**20:.0f} MiB" for arm in ("plain", "patched")]
        else:
            shown = [f"{row[arm] * 1e3:.1f} ms" for arm in ("plain", "patched")]
        spread = " to ".join(f"{value:.3f}" for value in row.get("quartiles", []))
        shape = f"{row['batch']} x {row['tokens']}"
        lines.append(f"| {row['what']} | {shape} | {shown[0]} | {shown[1]} | {row['ratio']:.3f} | {spread} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
