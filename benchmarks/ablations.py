"""Which settings of the filter help a small Llama trained from scratch, one setting at a time.

A Llama of 0.9 million parameters learns to continue the passages of SQuAD's training articles, a share of its labels replaced
by wrong tokens, and is scored on the clean passages of articles it has not seen (nats a token). Every variant gets the
same seeds: the same first weights, batches and noise. From a clone with the tests' data beside it:

    python benchmarks/ablations.py --output docs/results/ablations

Finished runs (one JSON each) are not run again; `--table` prints the differences to the plain model that are there.
"""

import argparse
import gzip
import hashlib
import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import bft_hf
from bft_hf import BFTConfig

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
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


def passages(tokenizer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """All training passages as one row of tokens, and those of one article in ten, kept for scoring."""
    cache = Path(__file__).resolve().parents[1] / "build" / "ablations.pt"
    if cache.exists():
        return torch.load(cache)
    articles = json.loads(gzip.decompress((DATA / "squad" / "train-v1.1.json.gz").read_bytes()))["data"]
    sides: tuple[list[int], list[int]] = ([], [])
    for article in articles:
        held_out = hashlib.blake2b(article["title"].encode(), digest_size=8).digest()[0] < 26
        for paragraph in article["paragraphs"]:
            sides[held_out].extend([1, *tokenizer(paragraph["context"], add_special_tokens=False)["input_ids"]])
    cache.parent.mkdir(exist_ok=True)
    result = torch.tensor(sides[0], dtype=torch.int16), torch.tensor(sides[1], dtype=torch.int16)
    torch.save(result, cache)
    return result


def run(variant: str, noise: float, seed: int) -> dict[str, Any]:
    """Train and score one model."""
    tokenizer = AutoTokenizer.from_pretrained(DATA / "stories260K")
    train, held_out = passages(tokenizer)
    torch.manual_seed(seed)
    vocabulary = len(tokenizer)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=WIDTH,
            intermediate_size=WIDTH * 8 // 3,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
        )
    )
    settings = dict(VARIANTS[variant])
    rate, bft_rate = settings.pop("learning_rate", LEARNING_RATE), settings.pop("bft_learning_rate", 2e-2)
    patched, output_scale = settings.pop("patched", True), settings.pop("output_scale", 1.0)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(output_scale)
    if patched:
        bft_hf.patch(model, BFTConfig.unit(**settings))
    groups = bft_hf.param_groups(model, rate, bft_learning_rate=bft_rate, weight_decay=0.1)
    optimizer = torch.optim.AdamW(groups, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 30, 0.5 + 0.5 * math.cos(math.pi * step / STEPS))
    )
    draws = torch.Generator().manual_seed(seed)
    losses = []
    start = time.perf_counter()
    for _ in range(STEPS):
        places = torch.randint(0, len(train) - CONTEXT - 1, (BATCH,), generator=draws)
        rows = torch.stack([train[place : place + CONTEXT + 1] for place in places.tolist()]).long()
        labels = rows[:, 1:].clone()
        wrong = torch.rand(labels.shape, generator=draws) < noise
        labels[wrong] = torch.randint(3, vocabulary, (int(wrong.sum()),), generator=draws)
        loss = cross_entropy(model(rows[:, :-1]).logits.flatten(0, 1), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
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
        "filter": {
            name: [round(parameter.mean().item(), 4), round(parameter.std(correction=0).item(), 4)]
            for name, parameter in bft_hf.bft_parameters(model).items()
        },
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
    args.output.mkdir(parents=True, exist_ok=True)
    for seed in args.seeds:
        for noise in args.noise:
            for variant in args.variants:
                path = args.output / f"{variant.replace(' ', '_').replace(',', '')}_noise={noise:g}_seed={seed}.json"
                if path.exists():
                    continue
                result = run(variant, noise, seed)
                path.with_suffix(".tmp").write_text(json.dumps(result) + "\n")
                path.with_suffix(".tmp").rename(path)
                print(f"{path.stem}: {result['held_out_nll']:.4f} in {result['seconds']} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
