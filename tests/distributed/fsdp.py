"""Trains tiny patched models, whole or sharded by FSDP2 over processes on CPUs, and writes down how it went."""

import sys
from pathlib import Path
from typing import Any

import torch
from conftest import make_tiny_llama
from torch import distributed
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import bft_hf
from bft_hf import BFTConfig
from distributed import leave

IDS = torch.randint(3, 128, (4, 11), generator=torch.Generator().manual_seed(31))
STEPS = 3

JOBS: dict[str, tuple[BFTConfig, dict[str, Any]]] = {
    "default": (BFTConfig.unit(), {}),
    "channel, MLP": (BFTConfig.unit(granularity="channel", initial_precision="mlp"), {}),
    "Jacobian differentiated": (BFTConfig.unit(differentiate_jacobian=True), {}),
    "absolute units, table": (BFTConfig.unit(observation_units="absolute", initial_precision="table"), {}),
    "checkpointing": (BFTConfig.unit(), {"use_reentrant": False}),
    "modules within the layer": (BFTConfig.unit(observation_units="absolute"), {"inner": ("self_attn", "mlp")}),
}


def make(name: str, seed: int = 0) -> Any:
    """The job's model, with the filter's parameters off their start values."""
    config, options = JOBS[name]
    model = bft_hf.patch(make_tiny_llama(seed), config).train()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in bft_hf.bft_parameters(model).values():
            parameter += 0.5 * torch.randn(parameter.shape, generator=generator)
    if "use_reentrant" in options:
        model.gradient_checkpointing_enable({"use_reentrant": options["use_reentrant"]})
    return model


def shard(model: Any, name: str) -> Any:
    """FSDP2 on every decoder layer, found by the name of its class, and on the rest."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    layers = [module for module in model.modules() if "LlamaDecoderLayer" in {c.__name__ for c in type(module).__mro__}]
    for layer in layers:
        for inner in JOBS[name][1].get("inner", ()):
            fully_shard(layer.get_submodule(inner), mesh=mesh)
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A sharded tensor gathered; any other as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(name: str, sharded: bool) -> dict[str, Any]:
    """A few steps of AdamW with clipped gradients.

    Returns:
        The losses, gradients of the first step by name, norms before clipping, state dict at the end, and each parameter's
        local size.
    """
    model = make(name)
    ids = IDS
    if sharded:
        shard(model, name)
        ids = IDS.chunk(distributed.get_world_size())[distributed.get_rank()]
    optimizer = torch.optim.AdamW(bft_hf.param_groups(model, 1e-2, 5e-2))
    result: dict[str, Any] = {"losses": [], "norms": [], "sizes": {}}
    for step in range(STEPS):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        loss = loss.detach().clone()
        if sharded:
            distributed.all_reduce(loss)
            loss /= distributed.get_world_size()
        if step == 0:
            result["gradients"] = {key: whole(value.grad).clone() for key, value in model.named_parameters()}
        result["losses"].append(loss.item())
        result["norms"].append(whole(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)).item())
        optimizer.step()
        optimizer.zero_grad()
    for key, parameter in model.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        result["sizes"][key] = local.numel(), parameter.numel()
    if sharded:
        result["state"] = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        other = shard(make(name, seed=1), name)
        state = {key: value.clone() for key, value in result["state"].items()}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(other, state, options=options)
        with torch.no_grad():
            result["logits"] = model.eval()(input_ids=IDS).logits
            result["loaded logits"] = other.eval()(input_ids=IDS).logits
    else:
        result["state"] = model.state_dict()
    return result


def main(folder: Path) -> None:
    """Run every job as one of the processes; rank 0 saves the results, or the error a job ended with."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    results: dict[str, Any] = {}
    for name in JOBS:
        try:
            results[name] = train(name, sharded=True)
        except RuntimeError as error:  # on every rank alike
            results[name] = {"error": str(error)}
    if distributed.get_rank() == 0:
        torch.save(results, folder / "results.pt")
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
