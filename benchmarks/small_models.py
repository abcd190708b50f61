"""Small Llamas trained from scratch on SQuAD's training articles, and their runs as one JSON each: what some benchmarks share."""

import gzip
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import bft_hf

REPOSITORY = Path(__file__).resolve().parents[1]
DATA = REPOSITORY.parent / "shared" / "data"
HEADS = 4
WARM_UP = 30


def load_tokenizer() -> Any:
    """The tokenizer of 512 tokens that all of them read with."""
    return AutoTokenizer.from_pretrained(DATA / "stories260K")


def articles() -> Iterator[tuple[bool, list[str]]]:
    """Whether an article is kept for scoring, one in ten by its title's hash, and its passages."""
    for article in json.loads(gzip.decompress((DATA / "squad" / "train-v1.1.json.gz").read_bytes()))["data"]:
        held_out = hashlib.blake2b(article["title"].encode(), digest_size=8).digest()[0] < 26
        yield held_out, [paragraph["context"] for paragraph in article["paragraphs"]]


def make_model(vocabulary: int, width: int, layers: int, context: int) -> LlamaForCausalLM:
    """A Llama with the first weights of torch's seed."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=width * 8 // 3,
            num_hidden_layers=layers,
            num_attention_heads=HEADS,
            max_position_embeddings=context,
            tie_word_embeddings=True,
        )
    )


def train(
    model: Any, batches: Iterable[tuple[Tensor, Tensor]], steps: int, learning_rate: float, **groups: float
) -> list[float]:
    """Train by AdamW over a short warm-up and half a cosine.

    Args:
        model: Plain or patched.
        batches: Tokens and the label that follows each, both (row, token); read no further than needed.
        steps: How many of them.
        learning_rate: The peak.
        **groups: Of `bft_hf.param_groups`.

    Returns:
        The loss of each batch, in nats a token.
    """
    parameters = bft_hf.param_groups(model, learning_rate, weight_decay=0.1, **groups)
    optimizer = torch.optim.AdamW(parameters, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARM_UP, 0.5 + 0.5 * math.cos(math.pi * step / steps))
    )
    losses = []
    for _, (tokens, labels) in zip(range(steps), batches, strict=False):
        loss = cross_entropy(model(tokens, use_cache=False).logits.flatten(0, 1), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def filter_state(model: Any) -> dict[str, list[float]]:
    """Mean and standard deviation of each of the filter's parameters."""
    return {
        name: [round(parameter.mean().item(), 4), round(parameter.std(correction=0).item(), 4)]
        for name, parameter in bft_hf.bft_parameters(model).items()
    }


def run_missing(folder: Path, runs: Iterable[tuple[str, Callable[[], dict[str, Any]]]]) -> None:
    """Do the runs whose JSON is not there yet.

    Args:
        folder: Made if need be.
        runs: What a run is called, blanks and commas allowed, and what does it; the result has `held_out_nll`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, run in runs:
        path = folder / f"{name.replace(' ', '_').replace(',', '')}.json"
        if path.exists():
            continue
        start = time.perf_counter()
        result = run()
        # Whole or not at all: what is there is not run again.
        path.with_suffix(".tmp").write_text(json.dumps(result) + "\n")
        path.with_suffix(".tmp").rename(path)
        print(f"{path.stem}: {result['held_out_nll']:.4f} in {time.perf_counter() - start:.0f} s", flush=True)
