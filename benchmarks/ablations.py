"""Which settings of the filter help a small Llama trained from scratch, one setting at a time.

A Llama of 0.9 million parameters learns to continue the passages of SQuAD's training articles, a share of its labels replaced
by wrong tokens, and is scored on the clean passages of articles it has not seen (nats a token). Every variant gets the
same seeds: the same first weights, batches and noise. From a clone with the tests' data beside it:

    python benchmarks/ablations.py --output docs/results/ablations

Finished runs (one JSON each) are not run again; `--table` prints the differences to the plain model that are there.
"""

import argparse
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from small_models import REPOSITORY, articles, filter_state, load_tokenizer, make_model, run_missing, train
from torch import Tensor
from torch.nn.functional import cross_entropy

import bft_hf
from bft_hf import BFTConfig

WIDTH, LAYERS, CONTEXT, BATCH, STEPS = 128, 4, 192, 12, 200
LEARNING_RATE = 2e-3

# BFTConfig's fields where the model is patched, and what else differs from the rest: `patched` False is the plain model,
# `output_scale` a factor on the first weights of every output projection (what a gain does that never moves).
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"patched": False},
    "plain, half W_O": {"patched": False, "output_scale": 0.5},
    "plain, lr 1e-3": {"patched": False, "learning_rate": 1e-3},
    "plain, lr 4e-3": {"patched": False, "learning_rate": 4e-3},
    "half W_O, lr 4e-3": {"patched": False, "output_scale": 0.5, "learning_rate": 4e-3},
    "unit, lr 1e-3": {"learning_rate": 1e-3},
    "unit, lr 4e-3": {"learning_rate": 4e-3},
    "Q 0.01": {"initial_process_noise": 0.01},
    "unit": {},
    "Q 100": {"initial_process_noise": 100.0, "initial_precision_value": 0.01},
    "Q 0.1": {"initial_process_noise": 0.1},
    "table": {"initial_precision": "table"},
    "mlp": {"initial_precision": "mlp"},
    "channel": {"granularity": "channel"},
    "absolute": {"observation_units": "absolute"},
    "neighbours": {"prior_scale": "neighbours"},
    "nu0 4": {"prior_degrees_of_freedom": 4.0},
    "exact": {"effective_sample_size": "exact"},
    "no kriging": {"kriging": False},
    "no gain": {"gain": False},
    "no propagation": {"propagate": False},
    "kriging alone": {"gain": False, "propagate": False, "initial_precision": "table"},
    "differentiate J": {"differentiate_jacobian": True},
    "separate keys": {"separate_key_precision": True},
    "separate keys, table": {"separate_key_precision": True, "initial_precision": "table"},
    "bft lr 2e-3": {"bft_learning_rate": 2e-3},
    "bft lr 1e-1": {"bft_learning_rate": 1e-1},
    "last two layers": {"layers": (2, 3)},
}


def passages(tokenizer: Any) -> tuple[Tensor, Tensor]:
    """All training passages as one row of tokens, and those of one article in ten, kept for scoring."""
    cache = REPOSITORY / "build" / "ablations.pt"
    if cache.exists():
        return torch.load(cache)
    sides: tuple[list[int], list[int]] = ([], [])
    for held_out, contexts in articles():
        for context in contexts:
            sides[held_out].extend([1, *tokenizer(context, add_special_tokens=False)["input_ids"]])
    cache.parent.mkdir(exist_ok=True)
    result = torch.tensor(sides[0], dtype=torch.int16), torch.tensor(sides[1], dtype=torch.int16)
    torch.save(result, cache)
    return result


def noisy_batches(tokens: Tensor, noise: float, vocabulary: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Stretches of the passages, a share of the labels replaced by any other token."""
    draws = torch.Generator().manual_seed(seed)
    while True:
        places = torch.randint(0, len(tokens) - CONTEXT - 1, (BATCH,), generator=draws)
        rows = torch.stack([tokens[place : place + CONTEXT + 1] for place in places.tolist()]).long()
        labels = rows[:, 1:].clone()
        wrong = torch.rand(labels.shape, generator=draws) < noise
        labels[wrong] = torch.randint(3, vocabulary, (int(wrong.sum()),), generator=draws)
        yield rows[:, :-1], labels


def run(variant: str, noise: float, seed: int) -> dict[str, Any]:
    """Train and score one model."""
    tokenizer = load_tokenizer()
    seen, held_out = passages(tokenizer)
    torch.manual_seed(seed)
    model = make_model(len(tokenizer), WIDTH, LAYERS, CONTEXT)
    settings = dict(VARIANTS[variant])
    rate, bft_rate = settings.pop("learning_rate", LEARNING_RATE), settings.pop("bft_learning_rate", 2e-2)
    patched, output_scale = settings.pop("patched", True), settings.pop("output_scale", 1.0)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(output_scale)
    if patched:
        bft_hf.patch(model, BFTConfig.unit(**settings))
    batches = noisy_batches(seen, noise, len(tokenizer), seed)
    start = time.perf_counter()
    losses = train(model, batches, STEPS, rate, bft_learning_rate=bft_rate)
    seconds = time.perf_counter() - start

    model.eval()
    rows = held_out[: 256 * (CONTEXT + 1)].view(256, CONTEXT + 1).long()
    scores = []
    with torch.inference_mode():
        for part in rows.split(32):
            scores += (
                cross_entropy(model(part[:, :-1]).logits.transpose(1, 2), part[:, 1:], reduction="none")
                .mean(1)
                .tolist()
            )
        gains = None
        if patched:
            with bft_hf.record(model) as trace:
                model(rows[:32, :-1])
            gains = [round(float(gain.mean()), 4) for gain in trace.gain]
    return {
        "variant": variant,
        "noise": noise,
        "seed": seed,
        "held_out_nll": statistics.fmean(scores),
        "by_row": [round(score, 5) for score in scores],
        "train_loss": statistics.fmean(losses[-20:]),
        "gain": gains,
        "filter": filter_state(model),
        "seconds": round(seconds, 1),
    }


def table(folder: Path) -> None:
    """Mean difference to the plain model of the same seed and noise, with a t interval over the seeds."""
    from scipy.stats import t

    found: dict[tuple[str, float], dict[int, float]] = {}
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text())
        found.setdefault((result["variant"], result["noise"]), {})[result["seed"]] = result["held_out_nll"]
    print("| noise | variant | seeds | held-out NLL | difference to plain | 95 % interval |")
    print("| ---: | --- | ---: | ---: | ---: | --- |")
    for (variant, noise), scores in sorted(
        found.items(), key=lambda item: (item[0][1], list(VARIANTS).index(item[0][0]))
    ):
        plain = found.get(("plain", noise), {})
        differences = [score - plain[seed] for seed, score in scores.items() if seed in plain]
        line = f"| {noise:g} | {variant} | {len(scores)} | {statistics.fmean(scores.values()):.4f} |"
        if variant == "plain" or len(differences) < 2:
            print(line, "| |")
            continue
        mean = statistics.fmean(differences)
        half = statistics.stdev(differences) / math.sqrt(len(differences)) * t.ppf(0.975, len(differences) - 1)
        print(line, f"{mean:+.4f} | [{mean - half:+.4f}, {mean + half:+.4f}] |")


def main() -> int:
    """Run what is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="NAME")
    parser.add_argument("--noise", nargs="+", type=float, default=[0.3])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    if args.table:
        table(args.output)
        return 0
    points = itertools.product(args.seeds, args.noise, args.variants)
    runs = ((f"{name}_noise={noise:g}_seed={seed}", partial(run, name, noise, seed)) for seed, noise, name in points)
    run_missing(args.output, runs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
