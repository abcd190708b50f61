"""What the patch costs: patched against unpatched in one process, alternating, as ratios with their spread.

    python benchmarks/overhead.py --quick                          # two minutes, as CI runs it
    python benchmarks/overhead.py --output build/overhead          # SmolLM2-135M's shapes on a CPU
    python benchmarks/overhead.py --profile decode:1x512           # by operation: where the extra time goes
    python benchmarks/overhead.py --lengths prefill --output build/lengths     # the ratio over sequence length, drawn

Weights are random, shapes are the real models'. Each row: training step (forward, backward, AdamW; full or LoRA), prefill, or
one decoded token with a cache: medians of `--repeats` pairs and the quartiles of the pairs' ratios. On a machine that is
shared, `--clock cpu --threads 1` counts the time that the process had, not what it waited for. Peak memory is what the
allocator held at most in a step, weights and optimizer included: from torch's profiler on a CPU, where the number
repeats to the byte, and from the allocator itself on a GPU. `--memory prefill:1x8192` is that of a prefill.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from workloads import DECODED, add_model_arguments, facts_of, stepper

KINDS = ("train", "lora", "prefill", "decode")
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def main() -> None:
    """Measure, print a table and write it with the raw numbers."""
    arguments = parse()
    torch.manual_seed(0)
    warnings.filterwarnings("ignore", category=FutureWarning)  # how a cache is named differs between versions
    if arguments.profile:
        print(operations(arguments, *arguments.profile))
        return
    rows = [measure(arguments, kind, *shape) for kind in KINDS for shape in getattr(arguments, kind)]
    rows += [memory_row(arguments, *shape) for shape in arguments.memory]
    facts = facts_of(arguments)
    text = table(rows) + "\n" + "\n".join(f"- {name}: {value}" for name, value in facts.items()) + "\n"
    print(text)
    if arguments.output:
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / "overhead.md").write_text(text)
        (arguments.output / "overhead.json").write_text(json.dumps({"rows": rows, "facts": facts}, indent=1) + "\n")
        draw(rows, arguments.output / "ratio_by_length.svg")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    parser.add_argument("--train", type=_shape, nargs="*", default=[(2, 512), (1, 2048)], help="batch x tokens")
    parser.add_argument("--lora", type=_shape, nargs="*", default=[(2, 512)], help="LoRA on all projections")
    parser.add_argument("--prefill", type=_shape, nargs="*", default=[(2, 512), (1, 2048), (1, 8192)])
    parser.add_argument("--decode", type=_shape, nargs="*", default=[(1, 512), (8, 512)], help="batch x cached tokens")
    parser.add_argument(
        "--memory", type=_case, nargs="*", default=[("train", 2, 512)], help="of a step: 2x512, prefill:1x8192"
    )
    parser.add_argument(
        "--lengths",
        nargs="*",
        choices=KINDS,
        default=[],
        help="kinds to measure, alone, at 256 to 8192 tokens of one row",
    )
    parser.add_argument("--profile", type=_case, help="print where one case's extra time goes: train:2x512")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--quick", action="store_true", help="few layers and repeats: a smoke test with a table")
    parser.add_argument("--output", type=Path, help="folder for overhead.md, overhead.json and ratio_by_length.svg")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.layers, arguments.repeats = arguments.layers or 3, 3
        arguments.train, arguments.lora, arguments.prefill, arguments.decode = [(1, 256)], [], [(1, 512)], [(1, 256)]
        arguments.memory = []
    if arguments.lengths:
        arguments.train = arguments.lora = arguments.prefill = arguments.decode = arguments.memory = []
        for kind in arguments.lengths:
            setattr(arguments, kind, [(1, tokens) for tokens in (256, 512, 1024, 2048, 4096, 8192)])
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    return arguments


def _shape(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split("x")))


def _case(text: str) -> tuple[Any, ...]:
    kind, _, shape = text.rpartition(":")
    if kind and kind not in KINDS:
        raise argparse.ArgumentTypeError(f"{kind!r} is none of {', '.join(KINDS)}")
    return kind or "train", *_shape(shape)


def measure(arguments: argparse.Namespace, kind: str, batch: int, tokens: int) -> dict[str, Any]:
    """Time both arms, one after the other, again and again; which goes first changes, so that a drift cancels."""
    clock = CLOCKS[arguments.clock]
    steps = [stepper(arguments, kind, batch, tokens, patched) for patched in (False, True)]
    for step in steps * 2:
        step()
    times: list[list[float]] = [[], []]
    for repeat in range(arguments.repeats):
        for arm in (0, 1) if repeat % 2 else (1, 0):
            start = clock()
            steps[arm]()
            times[arm].append((clock() - start) / (DECODED if kind == "decode" else 1))
    ratios = sorted(patched / plain for plain, patched in zip(*times, strict=True))
    quartiles = statistics.quantiles(ratios, n=4)
    row = {
        "what": kind,
        "batch": batch,
        "tokens": tokens,
        "plain": statistics.median(times[0]),
        "patched": statistics.median(times[1]),
        "ratio": statistics.median(ratios),
        "quartiles": [quartiles[0], quartiles[2]],
        "seconds": {"plain": times[0], "patched": times[1]},
    }
    print(f"{kind} {batch}x{tokens}: {row['ratio']:.3f} ({quartiles[0]:.3f} to {quartiles[2]:.3f})", file=sys.stderr)
    return row


def memory_row(arguments: argparse.Namespace, kind: str, batch: int, tokens: int) -> dict[str, Any]:
    """Peak memory of a step in both arms; of the second step, when an optimizer has its state."""
    peaks = {}
    for arm in ("plain", "patched"):
        step = stepper(arguments, kind, batch, tokens, arm == "patched")
        if arguments.device.startswith("cuda"):
            step()
            torch.cuda.reset_peak_memory_stats()
            step()
            peaks[arm] = torch.cuda.max_memory_allocated()
        else:
            peaks[arm] = cpu_peak(step)
        del step
    print(f"memory {kind} {batch}x{tokens}: {peaks['patched'] / peaks['plain']:.3f}", file=sys.stderr)
    return {
        "what": f"peak memory, {kind}",
        "batch": batch,
        "tokens": tokens,
        **peaks,
        "ratio": peaks["patched"] / peaks["plain"],
    }


def cpu_peak(step: Callable[[], None]) -> int:
    """Most bytes that torch's CPU allocator held in two steps, beyond those held before the model's first step, in the second.

    Both steps are profiled: what the first one leaves behind (the optimizer's state) is held in the second.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
        step()
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.events()
    changes = [event.nbytes() for event in sorted(events, key=lambda e: e.start_ns()) if event.name() == "[memory]"]
    held = peak = 0
    for change in changes:
        held += change
        peak = max(peak, held)
    return peak


def operations(arguments: argparse.Namespace, kind: str, batch: int, tokens: int, count: int = 25) -> str:
    """Own time (median times calls) of every operation, both arms and their difference, the largest difference first."""
    own: list[dict[str, tuple[float, int]]] = []
    for patched in (False, True):
        step = stepper(arguments, kind, batch, tokens, patched)
        for _ in range(3):
            step()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            for _ in range(arguments.repeats):
                step()
        scale = arguments.repeats * (DECODED if kind == "decode" else 1)
        events: dict[str, list[float]] = {}
        for event in profiler.events() or []:
            events.setdefault(event.key, []).append(event.self_cpu_time_total)
        # The median, since on a busy machine whoever runs when the process has to wait would be charged for the wait.
        own.append(
            {key: (statistics.median(us) * len(us) / scale, round(len(us) / scale)) for key, us in events.items()}
        )
        del step
    plain, patched_ = own
    names = sorted({*plain, *patched_}, key=lambda name: plain.get(name, (0, 0))[0] - patched_.get(name, (0, 0))[0])
    lines = [
        "| operation | plain us | calls | patched us | calls | difference us |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name in names[:count]:
        (a, calls_a), (b, calls_b) = plain.get(name, (0.0, 0)), patched_.get(name, (0.0, 0))
        lines.append(f"| `{name}` | {a:.0f} | {calls_a} | {b:.0f} | {calls_b} | {b - a:+.0f} |")
    totals = [sum(value[0] for value in arm.values()) for arm in own]
    calls = [sum(value[1] for value in arm.values()) for arm in own]
    lines.append(
        f"| all | {totals[0]:.0f} | {calls[0]} | {totals[1]:.0f} | {calls[1]} | {totals[1] - totals[0]:+.0f} |"
    )
    return "\n".join(lines) + "\n"


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        "| what | batch x tokens | plain | patched | ratio | quartiles |",
        "| --- | --- | ---: | ---: | ---: | --- |",
    ]
    for row in rows:
        if row["what"].startswith("peak memory"):
            shown = [f"{row[arm] / 2**20:.0f} MiB" for arm in ("plain", "patched")]
        else:
            shown = [f"{row[arm] * 1e3:.1f} ms" for arm in ("plain", "patched")]
        spread = " to ".join(f"{value:.3f}" for value in row.get("quartiles", []))
        shape = f"{row['batch']} x {row['tokens']}"
        lines.append(f"| {row['what']} | {shape} | {shown[0]} | {shown[1]} | {row['ratio']:.3f} | {spread} |")
    return "\n".join(lines) + "\n"


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """The ratio over the length of one row, one line a kind that was measured at three lengths or more."""
    one_row = [row for row in rows if row["batch"] == 1]
    by_kind = {kind: sorted((row["tokens"], row) for row in one_row if row["what"] == kind) for kind in KINDS}
    by_kind = {kind: found for kind, found in by_kind.items() if len(found) > 2}
    if not by_kind:
        return
    from matplotlib.figure import Figure

    axes = Figure(figsize=(5, 3.2), layout="constrained").subplots()
    for kind, found in by_kind.items():
        tokens = [at for at, _ in found]
        axes.plot(tokens, [row["ratio"] for _, row in found], marker="o", label=kind)
        axes.fill_between(tokens, *zip(*(row["quartiles"] for _, row in found), strict=True), alpha=0.2)
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="tokens", ylabel="patched / plain")
    axes.legend()
    axes.figure.savefig(path)


if __name__ == "__main__":
    main()
