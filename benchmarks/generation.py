"""Batch inference: tokens per second of generate(), patched against plain, alternating.

    python benchmarks/generation.py                                   # SmolLM2-135M, batch 1, 8, 32, dynamic cache
    python benchmarks/generation.py --cache static --compile          # static cache, the decoding step compiled

Greedy, every row to its last token; prompts are random and of one length. Medians of `--repeats` pairs; ratios are of times, so
above 1 the patch costs. "a step" is the time between two tokens of a row, without the prompt's. The step is compiled as
generate() does it by itself on accelerators, and in one graph or not at all; what the first call of each arm takes beyond the
later ones is shown as the time to compile, and a graph that is made after it ends the run with an error.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from workloads import add_model_arguments, build, facts_of

ARMS = ("plain", "patched")


def main() -> None:
    """Print a table, and write it as JSON."""
    arguments = parse()
    warnings.filterwarnings("ignore", category=FutureWarning)
    rows = [measure(arguments, batch) for batch in arguments.batch]
    text = table(rows, arguments.compile)
    facts = facts_of(arguments) | {name: getattr(arguments, name) for name in ("prompt", "new", "cache", "compile")}
    print(text + "\n" + "\n".join(f"- {name}: {value}" for name, value in facts.items()))
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps({"rows": rows, "facts": facts}, indent=1) + "\n")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens to generate")
    parser.add_argument("--cache", choices=["dynamic", "static"], default="dynamic")
    parser.add_argument("--compile", action="store_true", help="torch.compile the decoding step (static cache)")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path, help="JSON file")
    arguments = parser.parse_args()
    if arguments.compile and arguments.cache == "dynamic":
        parser.error("generate() compiles no dynamic cache: --compile wants --cache static")
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    return arguments


class Clock:
    """A stopping criterion that stops nothing and notes when each token came."""

    def __init__(self, device: str) -> None:
        self.ticks: list[float] = []
        self._wait = torch.cuda.synchronize if device.startswith("cuda") else lambda: None

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.tick()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def tick(self) -> None:
        """Note the time, once the device has done its work."""
        self._wait()
        self.ticks.append(time.perf_counter())


def measure(arguments: argparse.Namespace, batch: int) -> dict[str, Any]:
    """Seconds of a call and of a step, for both arms."""
    torch.compiler.reset()
    models = [build(arguments, "decode", arm == "patched") for arm in ARMS]
    ids = torch.randint(3, models[0].config.vocab_size, (batch, arguments.prompt), device=arguments.device)
    calls: list[list[float]] = [[], []]
    steps: list[list[float]] = [[], []]
    compiled = {}
    first = []
    for arm, name in enumerate(ARMS):
        counters.clear()
        first.append(generate(arguments, models[arm], ids)[0])
        graphs = counters["stats"]["unique_graphs"]
        assert bool(graphs) == arguments.compile, f"{name}: {graphs} graphs"
        compiled[name] = {"graphs": graphs, "graph breaks": sum(counters["graph_break"].values())}
    counters.clear()
    for repeat in range(-1, arguments.repeats):
        for arm in (0, 1) if repeat % 2 else (1, 0):
            call, step = generate(arguments, models[arm], ids)
            if repeat >= 0:
                calls[arm].append(call)
                steps[arm].append(step)
    assert not counters["stats"]["unique_graphs"], "compiled again after the first call"
    for arm, name in enumerate(ARMS):
        compiled[name]["seconds"] = first[arm] - statistics.median(calls[arm])
    row: dict[str, Any] = {"batch": batch, "compiled": compiled if arguments.compile else None}
    for what, times in (("call", calls), ("step", steps)):
        ratios = [patched / plain for plain, patched in zip(*times, strict=True)]
        quartiles = statistics.quantiles(ratios, n=4)
        row[what] = {
            **{name: statistics.median(arm) for name, arm in zip(ARMS, times, strict=True)},
            "ratio": statistics.median(ratios),
            "quartiles": [quartiles[0], quartiles[2]],
            "seconds": dict(zip(ARMS, times, strict=True)),
        }
    row["tokens per second"] = {name: batch * arguments.new / row["call"][name] for name in ARMS}
    return row


def generate(arguments: argparse.Namespace, model: Any, ids: Tensor) -> tuple[float, float]:
    """Seconds of one call, and between two of its tokens."""
    from transformers import CompileConfig, StoppingCriteriaList

    options: dict[str, Any] = {"max_new_tokens": arguments.new, "min_new_tokens": arguments.new, "do_sample": False}
    options |= {"eos_token_id": None, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    if arguments.cache == "static":
        options |= {"cache_implementation": "static", "disable_compile": not arguments.compile}
    if arguments.compile:
        options["compile_config"] = CompileConfig(mode="default", fullgraph=True)
        options["compile_config"]._compile_all_devices = True  # on a CPU, generate() compiles only if told so
    clock = Clock(arguments.device)
    clock.tick()
    model.generate(ids, stopping_criteria=StoppingCriteriaList([clock]), **options)
    ticks = clock.ticks
    return ticks[-1] - ticks[0], statistics.median(after - at for at, after in itertools.pairwise(ticks[1:]))


def table(rows: list[dict[str, Any]], compiled: bool) -> str:
    """The rows as Markdown."""
    heads = [
        "batch",
        "plain tokens/s",
        "patched tokens/s",
        "ratio of times",
        "plain ms a step",
        "patched ms a step",
        "ratio",
    ]
    heads += ["graphs, s to compile"] if compiled else []
    lines = ["| " + " | ".join(heads) + " |", "| ---: | ---: | ---: | --- | ---: | ---: | --- |" + " --- |" * compiled]
    for row in rows:
        call, step, speed = row["call"], row["step"], row["tokens per second"]
        ratios = ["{:.3f} ({:.3f} to {:.3f})".format(times["ratio"], *times["quartiles"]) for times in (call, step)]
        cells = [row["batch"], *(f"{speed[name]:.1f}" for name in ARMS), ratios[0]]
        cells += [*(f"{step[name] * 1e3:.1f}" for name in ARMS), ratios[1]]
        if compiled:
            made = row["compiled"]
            cells.append("; ".join(f"{name} {made[name]['graphs']}, {made[name]['seconds']:.0f} s" for name in ARMS))
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
