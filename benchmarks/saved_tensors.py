"""What a training step keeps for its backward pass, plain and patched: the list of docs/performance.md.

    python benchmarks/saved_tensors.py                      # SmolLM2-135M's layer
    python benchmarks/saved_tensors.py --model tinyllama

Numbers are elements a token and layer, from models of one and two layers on short rows; every tensor counts once, under the
line of code that saved it first. Under activation checkpointing, what lives after the forward pass is counted instead.
"""

from __future__ import annotations

import argparse
import gc
import traceback
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from workloads import MODELS, add_model_arguments, build

TOKENS = 256


def main() -> None:
    """Print the list and both totals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    arguments = parser.parse_args()
    MODELS[arguments.model]["vocab_size"] = 512  # the head is no part of the list
    lists, totals = [], []
    for patched in (False, True):
        one, two = (saved(layers_of(arguments, layers, patched), TOKENS) for layers in (1, 2))
        lists.append({where: two[where] - one[where] for where in two if two[where] > one[where]})
        plain, checkpointed = (
            [kept(layers_of(arguments, layers, patched), TOKENS, checkpointing) for layers in (1, 2)]
            for checkpointing in (False, True)
        )
        totals.append((plain[1] - plain[0], checkpointed[1] - checkpointed[0]))
    print("| saved by | plain | patched |\n| --- | ---: | ---: |")
    for where in dict.fromkeys([*lists[1], *lists[0]]):
        print(f"| {where} | {lists[0].get(where, 0):.4g} | {lists[1].get(where, 0):.4g} |")
    print(f"| all saved tensors | {sum(lists[0].values()):.6g} | {sum(lists[1].values()):.6g} |")
    for name, at in (("alive after the forward pass", 0), ("the same under checkpointing", 1)):
        print(f"| {name} | {totals[0][at]:.6g} | {totals[1][at]:.6g} |")


def layers_of(arguments: argparse.Namespace, layers: int, patched: bool) -> Any:
    """A model in training mode with so many layers."""
    return build(argparse.Namespace(**(vars(arguments) | {"layers": layers})), "train", patched)


def saved(model: Any, tokens: int) -> Counter[str]:
    """Elements a token that autograd is given to keep, parameters left out, by the code that gives them."""
    known = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    found: Counter[str] = Counter()
    keep: list[Tensor] = []  # while it lives, no other tensor comes to stand at its address

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            known.add(storage.data_ptr())
            keep.append(tensor)
            found[_where()] += storage.nbytes() / tensor.element_size() / tokens
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        _loss(model, tokens)
    return found


def kept(model: Any, tokens: int, checkpointing: bool = False) -> float:
    """Elements a token that a forward pass leaves alive for the backward pass, however they are held."""
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    with _Storages() as storages:
        loss = _loss(model, tokens)
    gc.collect()
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    alive = {
        storage.data_ptr(): storage.nbytes() for reference in storages.seen if (storage := reference()) is not None
    }
    del loss
    return sum(size for address, size in alive.items() if address not in parameters) / 4 / tokens


class _Storages(TorchDispatchMode):
    """Sees every storage that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[weakref.ref] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                self.seen.append(weakref.ref(tensor.untyped_storage()))
        return result


def _loss(model: Any, tokens: int) -> Tensor:
    ids = torch.randint(3, 60, (1, tokens), generator=torch.Generator().manual_seed(0))
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def _where() -> str:
    """The innermost line of ours or of the model's that is running."""
    frames = traceback.extract_stack()
    for frame in reversed(frames):
        path = Path(frame.filename)
        if "bft_hf" in path.parts or path.name.startswith("modeling_") or path.name == "sdpa_attention.py":
            line = (frame.line or "").split("  #")[0].replace("|", "\\|")
            return f"`{path.name}`: `{line}`"
    return "elsewhere"


if __name__ == "__main__":
    main()
