"""What a learned gate and the filter's gain do as the context grows, in small Llamas trained side by side from scratch.

A Llama of 0.23 million parameters learns to continue running text of SQuAD's training articles, behind one first token: plain,
with a sigmoid gate on its attention (one a head, or one a channel), as a filter, or both. Every arm gets the same seeds: the
same first weights and batches. On articles it has not seen are measured nats a token, the weight on the first token,
Kish's n, the gain and the gate, by context length. From a clone with the tests' data beside it:

    python benchmarks/sinks.py --output docs/results/sinks --threads 1

Finished runs (one JSON each) are not run again; `--table` prints what is there, `--figure FILE` draws it.
"""

import argparse
import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from small_models import REPOSITORY, articles, filter_state, load_tokenizer, make_model, run_missing, train
from torch import Tensor
from torch.nn.functional import cross_entropy

import bft_hf
from bft_hf import BFTConfig
from bft_hf.recipes.inspection.figures import draw_lengths
from bft_hf.recipes.inspection.gates import add_gates
from bft_hf.recipes.inspection.profile import by_length, correlation, per_doubling, profile, t_interval

WIDTH, LAYERS, CONTEXT, BATCH, STEPS = 64, 4, 512, 4, 400
LEARNING_RATE = 4e-3
LENGTHS = (32, 64, 128, 256, 512)
SCORED, PROFILED = 32, 16
FIRST_TOKEN = 1

# A form of gate, and BFTConfig's fields where the model is patched.
ARMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gate, head": {"gate": "head"},
    "gate, element": {"gate": "element"},
    "bft": {"filter": {}},
    "bft and gate, head": {"gate": "head", "filter": {}},
}


def texts(tokenizer: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The running text of every article as tokens: those to train on, and one in ten that is kept."""
    cache = REPOSITORY / "build" / "sinks.pt"
    if cache.exists():
        return torch.load(cache)
    sides: tuple[list[Tensor], list[Tensor]] = ([], [])
    for held_out, passages in articles():
        ids = tokenizer("\n".join(passages), add_special_tokens=False)["input_ids"]
        if len(ids) >= CONTEXT:
            sides[held_out].append(torch.tensor(ids, dtype=torch.int16))
    cache.parent.mkdir(exist_ok=True)
    torch.save(sides, cache)
    return sides


def draw(side: list[Tensor], count: int, generator: torch.Generator) -> Tensor:
    """So many stretches of text, each behind the first token, (row, CONTEXT + 1)."""
    weights = torch.tensor([float(len(ids)) for ids in side])
    rows = []
    for place in torch.multinomial(weights, count, replacement=True, generator=generator).tolist():
        start = int(torch.randint(0, len(side[place]) - CONTEXT + 1, (1,), generator=generator))
        rows.append(torch.cat([torch.tensor([FIRST_TOKEN]), side[place][start : start + CONTEXT].long()]))
    return torch.stack(rows)


def run(arm: str, seed: int) -> dict[str, Any]:
    """Train and measure one model."""
    tokenizer = load_tokenizer()
    seen, held_out = texts(tokenizer)
    torch.manual_seed(seed)
    model = make_model(len(tokenizer), WIDTH, LAYERS, CONTEXT)
    settings = ARMS[arm]
    if "gate" in settings:
        add_gates(model, settings["gate"])
    if "filter" in settings:
        bft_hf.patch(model, BFTConfig.unit(**settings["filter"]))
    draws = torch.Generator().manual_seed(seed)
    rows = (draw(seen, BATCH, draws) for _ in range(STEPS))
    start = time.process_time()
    losses = train(model, ((row[:, :-1], row[:, 1:]) for row in rows), STEPS, LEARNING_RATE)
    seconds = time.process_time() - start

    model.eval()
    kept = draw(held_out, SCORED, torch.Generator().manual_seed(0))
    scores = []
    with torch.inference_mode():
        for row in kept:
            scores.append(cross_entropy(model(row[None, :-1], use_cache=False).logits[0], row[1:]).item())
    found = profile(model, list(kept[:PROFILED, :-1]))
    return {
        "arm": arm,
        "seed": seed,
        "steps": STEPS,
        "held_out_nll": statistics.fmean(scores),
        "train_loss": statistics.fmean(losses[-20:]),
        "by_length": [
            {name: round(statistics.fmean(value), 6) if name != "length" else value for name, value in row.items()}
            for row in by_length(found, LENGTHS)
        ],
        "correlation": {
            name: round(statistics.fmean(correlation(found, name)), 4)
            for name in ("gain", "gate")
            if getattr(found, name) is not None
        },
        "filter": filter_state(model),
        "cpu_seconds": round(seconds, 1),
    }


def read(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The finished runs of a folder, by arm."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("*_seed=*.json")):
        result = json.loads(path.read_text())
        found.setdefault(result["arm"], []).append(result)
    return {arm: found[arm] for arm in ARMS if arm in found}


def across(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows by length, of each quantity a list of one number a seed."""
    return [
        {name: rows[0][name] if name == "length" else [row[name] for row in rows] for name in rows[0]}
        for rows in zip(*(run["by_length"] for run in runs), strict=True)
    ]


def table(folder: Path) -> None:
    """Means over seeds with 95 % t intervals: the quality, each quantity by length, and its growth with each doubling."""
    arms = read(folder)

    def cell(values: list[float], form: str) -> str:
        return "{} [{}, {}]".format(*(format(value, form) for value in t_interval(values)))

    print("| arm | seeds | held-out NLL | correlation of gain with log n | of gate with log n |")
    print("| --- | ---: | --- | --- | --- |")
    for arm, runs in arms.items():
        follows = [
            cell([run["correlation"][name] for run in runs], ".2f") if name in runs[0]["correlation"] else ""
            for name in ("gain", "gate")
        ]
        print(f"| {arm} | {len(runs)} | {cell([run['held_out_nll'] for run in runs], '.3f')} | {' | '.join(follows)} |")
    for name in ("gain", "gate", "sample_size", "first_token_mass", "sink_rate"):
        print(f"\n{name}\n\n| arm | {' | '.join(map(str, LENGTHS))} | per doubling |")
        print(f"| --- |{' ---: |' * len(LENGTHS)} --- |")
        for arm, runs in arms.items():
            rows = across(runs)
            if name in rows[0]:
                means = " | ".join(format(statistics.fmean(row[name]), ".3g") for row in rows)
                print(f"| {arm} | {means} | {cell(per_doubling(rows, name), '+.2g')} |")


def main() -> int:
    """Run what is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="NAME")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--threads", type=int, help="torch's threads")
    parser.add_argument("--table", action="store_true", help="print the finished runs, run nothing")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw the finished runs as SVG, run nothing")
    args = parser.parse_args()
    if args.table:
        table(args.output)
    if args.figure:
        arms = {arm: across(runs) for arm, runs in read(args.output).items()}
        args.figure.write_bytes(draw_lengths(arms, ("sample_size", "gain", "gate")))
    if args.table or args.figure:
        return 0
    if args.threads:
        torch.set_num_threads(args.threads)
    runs = ((f"{arm}_seed={seed}", partial(run, arm, seed)) for seed in args.seeds for arm in args.arms)
    run_missing(args.output, runs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
