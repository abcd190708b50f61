"""What a trained filter does with rare and with popular items: its tau, gain and process noise by quartile of frequency."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch

from ..patching import bft_parameters
from ..tracing import record
from .batches import ranking_inputs, uses_time
from .data import Split
from .metrics import QUARTILE_NAMES, frequency_quartiles


@torch.no_grad()
def filter_by_frequency(model: Any, split: Split, users: int = 2048, batch_size: int = 256) -> dict[str, Any]:
    """Means over the items of test histories, by quartile of the items' frequency in training.

    Args:
        model: A patched recommender; it is left in evaluation mode.
        split: The histories.
        users: How many of them, spread evenly over all; fewer where there are fewer.
        batch_size: Histories run at once.

    Returns:
        "positions": how many items each quartile's means are over. "log_initial_precision": log tau by quartile. "gain": K by
        quartile, a list by layer. "updated_precision": lam' alike. "process_noise": Q, a list by patched layer, without those
        that have none.
    """
    model.eval()
    device = next(model.parameters()).device
    start, end = split.inputs("test")
    chosen = np.unique(np.linspace(0, len(start) - 1, min(users, len(start))).astype(int))
    quartile = torch.from_numpy(np.concatenate([[-1], frequency_quartiles(split.item_frequency[1:])])).to(device)
    sums: dict[str, list[torch.Tensor]] = {}
    counts = torch.zeros(len(QUARTILE_NAMES), dtype=torch.float64)
    for begin in range(0, len(chosen), batch_size):
        spans = [slice(start[u], end[u]) for u in chosen[begin : begin + batch_size]]
        times = split.data.timestamps
        inputs, _ = ranking_inputs(
            model,
            [split.data.items[span] for span in spans],
            [times[span] for span in spans] if uses_time(model) and times is not None else None,
        )
        inputs = {name: value.to(device) for name, value in inputs.items()}
        with record(model) as trace:
            model(**inputs)
        ids = inputs["input_ids"]
        known = (ids > 0) & (ids <= model.config.num_items)  # neither padding nor a mask
        strata = torch.nn.functional.one_hot(quartile[ids[known]], len(QUARTILE_NAMES)).double().cpu()
        counts += strata.sum(0)
        values = {
            "log_initial_precision": [trace.precision[0].log()],
            "gain": trace.gain,
            "updated_precision": trace.updated_precision,
        }
        for name, layers in values.items():
            means = [value[known].double().reshape(len(strata), -1).mean(1).cpu() @ strata for value in layers]
            sums[name] = [a + b for a, b in zip(sums.get(name, [torch.zeros(())] * len(means)), means, strict=True)]

    def by_quartile(name: str) -> dict[str, list[float]]:
        means = [(total / counts.clamp_min(1)).tolist() for total in sums[name]]
        return {
            label: [layer[index] for layer in means]
            for index, label in enumerate(QUARTILE_NAMES)
            if counts[index]  # a catalogue of one frequency has a single quartile
        }

    noise = {
        int(found[1]): parameter.double().exp().mean().item()
        for name, parameter in bft_parameters(model).items()
        if (found := re.search(r"layers\.(\d+)\.bft\.log_process_noise$", name)) is not None
    }
    return {
        "positions": {name: int(count) for name, count in zip(QUARTILE_NAMES, counts.tolist(), strict=True) if count},
        "log_initial_precision": {name: value[0] for name, value in by_quartile("log_initial_precision").items()},
        "gain": by_quartile("gain"),
        "updated_precision": by_quartile("updated_precision"),
        "process_noise": [noise[layer] for layer in sorted(noise)],
    }
