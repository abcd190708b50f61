"""Batch inference: tokens per second of generate(), patched against plain, alternating.

    python benchmarks/generation.py                                   # SmolLM2-135M, batch 1, 8, 32, dynamic cache
    python benchmarks/generation.py --cache static --compile          # static cache, the decoding step compiled

Greedy, every row to its last token; prompts are random and of one length. The first call of each arm, which compiles, is not
counted. Medians of `--repeats` pairs; the ratio is of times, so above 1 the patch costs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from workloads import add_model_arguments, build


def main() -> None:
    """Print a table, and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens to generate")
    parser.add_argument("--cache", choices=["dynamic", "static"], default="dynamic")
    parser.add_argument("--compile", action="store_true", help="torch.compile the decoding step")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path, help="JSON file")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    warnings.filterwarnings("ignore", category=FutureWarning)
    rows = [measure(arguments, batch) for batch in arguments.batch]
    print("| batch | plain tokens/s | patched tokens/s | time ratio | quartiles |\n| ---: | ---: | ---: | ---: | --- |")
    for row in rows:
        low, high = row["quartiles"]
        print(
            f"| {row['batch']} | {row['plain']:.1f} | {row['patched']:.1f} | {row['ratio']:.3f} | {low:.3f} to {high:.3f} |"
        )
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        facts = {name: value for name, value in vars(arguments).items() if name != "output"}
        arguments.output.write_text(json.dumps({"rows": rows, "arguments": facts}, indent=1) + "\n")


def measure(arguments: argparse.Namespace, batch: int) -> dict[str, Any]:
    """Tokens per second of both arms."""
    models = [build(arguments, "decode", patched) for patched in (False, True)]
    ids = torch.randint(3, models[0].config.vocab_size, (batch, arguments.prompt), device=arguments.device)
    options: dict[str, Any] = {"max_new_tokens": arguments.new, "min_new_tokens": arguments.new, "do_sample": False}
    options |= {"eos_token_id": None, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    options |= {"cache_implementation": arguments.cache if arguments.cache == "static" else None}
    if arguments.compile:
        for model in models:
            model.forward = torch.compile(model.forward, mode="default", dynamic=False)
    times: list[list[float]] = [[], []]
    for repeat in range(-1, arguments.repeats):
        for arm in (0, 1) if repeat % 2 else (1, 0):
            start = time.perf_counter()
            models[arm].generate(ids, **options)
            if arguments.device.startswith("cuda"):
                torch.cuda.synchronize()
            if repeat >= 0:
                times[arm].append(time.perf_counter() - start)
    ratios = [patched / plain for plain, patched in zip(*times, strict=True)]
    quartiles = statistics.quantiles(ratios, n=4)
    plain, patched = (batch * arguments.new / statistics.median(arm) for arm in times)
    return {
        "batch": batch,
        "plain": plain,
        "patched": patched,
        "ratio": statistics.median(ratios),
        "quartiles": [quartiles[0], quartiles[2]],
    }


if __name__ == "__main__":
    main()
