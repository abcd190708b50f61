"""The models and steps that the benchmarks time: real shapes, random weights (the arithmetic does not know)."""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import time
from collections.abc import Callable
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

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

DECODED = 8
"""Tokens that one decoding step decodes, each alone, before the cache is cropped again."""


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that say what to build and where."""
    parser.add_argument("--model", choices=MODELS, default="smollm2")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--vocabulary", type=int, help="a smaller vocabulary: the head in proportion to fewer layers")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--attention", default="sdpa", help="attention function, as transformers names it")
    parser.add_argument("--liger", action="store_true", help="with Liger's kernels in both arms (needs liger-kernel)")
    parser.add_argument(
        "--config", type=json.loads, default={}, help='BFTConfig fields as JSON: {"granularity": "channel"}'
    )
    parser.add_argument("--threads", type=int, help="torch's threads")


def build(arguments: argparse.Namespace, kind: str, patched: bool) -> Any:
    """A model with random weights, ready for a kind of step."""
    from transformers import LlamaConfig, LlamaForCausalLM

    if arguments.liger:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    fewer = {"num_hidden_layers": arguments.layers, "vocab_size": arguments.vocabulary}
    fields = MODELS[arguments.model] | {name: value for name, value in fewer.items() if value}
    config = LlamaConfig(**fields, attn_implementation=arguments.attention)
    with torch.device(arguments.device):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).to(getattr(torch, arguments.dtype))
    if patched:
        bft_hf.patch(model, BFTConfig(**arguments.config))
    if kind == "lora":
        from peft import LoraConfig, get_peft_model

        ours = ["bft"] if patched else None
        model = get_peft_model(model, LoraConfig(r=16, target_modules=PROJECTIONS, modules_to_save=ours))
    return model.train(kind in ("train", "lora"))


def stepper(arguments: argparse.Namespace, kind: str, batch: int, tokens: int, patched: bool) -> Callable[[], None]:
    """A function that does one step of a kind, and waits for it.

    "train": forward, backward, AdamW. "lora": the same with LoRA on all projections. "prefill": a prompt, logits of its last
    token. "decode": `DECODED` single tokens behind a cache of `tokens`.
    """
    model = build(arguments, kind, patched)
    ids = torch.randint(3, model.config.vocab_size, (batch, tokens), device=arguments.device)
    wait = torch.cuda.synchronize if arguments.device.startswith("cuda") else lambda: None
    if kind in ("train", "lora"):
        fused = arguments.device.startswith("cuda")
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5, fused=fused)

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
            for _ in range(DECODED):
                model(ids[:, -1:], past_key_values=cache)
            cache.crop(-DECODED)
            wait()

    return step


def facts_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """New parameters, the time to patch, and where this was measured."""
    model = build(arguments, "prefill", False)
    total = sum(parameter.numel() for parameter in model.parameters())
    start = time.perf_counter()
    bft_hf.patch(model, BFTConfig(**arguments.config))
    seconds = time.perf_counter() - start
    new = sum(parameter.numel() for parameter in bft_hf.bft_parameters(model).values())
    import transformers

    machine = torch.cuda.get_device_name() if arguments.device.startswith("cuda") else platform.machine()
    kernels = ", Liger" if arguments.liger else ""
    return {
        "model": f"{arguments.model}, {model.config.num_hidden_layers} layers, {arguments.dtype}, {arguments.attention}{kernels}",
        "settings": copy.deepcopy(arguments.config) or "default",
        "new parameters": f"{new} of {total} ({new / total:.2e})",
        "time to patch": f"{seconds * 1e3:.0f} ms",
        "machine": f"{machine}, {torch.get_num_threads()} threads of {os.cpu_count()}, load {os.getloadavg()[0]:.1f}",
        "time": f"{getattr(arguments, 'clock', 'wall')} clock, median of {arguments.repeats} pairs",
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
    }
