"""Full ranking: where each user's held-out item stands among all items of the catalogue, the seen ones removed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ..tracing import record
from .batches import ranking_inputs, uses_time
from .data import Split
from .metrics import (
    QUARTILE_NAMES,
    coverage,
    frequency_quartiles,
    history_names,
    history_strata,
    rank_of_targets,
    summarize,
    summarize_strata,
)

Scorer = Callable[[np.ndarray], Float[Tensor, "user item"]]
"""Scores of all items, column i for the item with id i + 1, for users given as positions in `Split.users`."""

COVERAGE_AT = 10
TIES_SEED = 0
"""Of the random numbers that break ties, one a user, the same in every evaluation."""


@dataclass(frozen=True)
class Ranking:
    """The outcome of one evaluation, a row a user, in the order of `Split.users`.

    Attributes:
        split: What was evaluated on.
        part: "validation" or "test".
        ranks: Rank of the held-out item from 1, ties broken at random by a fixed seed, shape (users,).
        recommended: The ids of the first items, shape (users, 10), or None if they were not asked for.
        precision: The filter's final precision of the state that was ranked from, mean over channels, shape (users,); None
            without a filter, or if it was not asked for.
    """

    split: Split
    part: str
    ranks: np.ndarray
    recommended: np.ndarray | None = None
    precision: np.ndarray | None = None

    @property
    def history_lengths(self) -> np.ndarray:
        """How many items each user had before the held-out one."""
        start, end = self.split.inputs(self.part)
        return end - start

    @property
    def quartiles(self) -> np.ndarray:
        """Stratum of each user's held-out item by its frequency in training, 0 (rare) to 3."""
        return frequency_quartiles(self.split.item_frequency[1:])[self.split.targets(self.part) - 1]

    def summary(self) -> dict[str, float]:
        """The metrics over all users; with "coverage@10" where the recommended items are known."""
        values = summarize(self.ranks)
        if self.recommended is not None:
            values[f"coverage@{COVERAGE_AT}"] = coverage(self.recommended, self.split.data.num_items)
        return values

    def strata(self) -> dict[str, Any]:
        """The metrics by quartile of the item's training frequency and by length of the history."""
        names = history_names()
        return {
            "item_frequency": summarize_strata(self.ranks, self.quartiles, QUARTILE_NAMES),
            "history_length": summarize_strata(self.ranks, history_strata(self.history_lengths), names),
        }


def rank_users(
    split: Split,
    part: str,
    scorer: Scorer,
    *,
    batch_size: int = 256,
    recommend: bool = False,
    order: np.ndarray | None = None,
) -> Ranking:
    """Rank the held-out item of every user among all items.

    Args:
        split: Leave-one-out.
        part: "validation" or "test".
        scorer: Gives the scores.
        batch_size: Users scored at once; scores take 4 bytes a user and item.
        recommend: Whether to keep the first ten items, for coverage.
        order: Positions of the users to rank and the order to do so in; by default all, short histories first. Ranks of the
            others stay NaN.
    """
    targets = split.targets(part)
    full_start, end = split.inputs(part)
    if order is None:
        order = np.argsort(end - full_start, kind="stable")
    ranks = np.full(len(targets), np.nan)
    luck = np.random.default_rng(TIES_SEED).random(len(targets), dtype=np.float32)
    recommended = np.zeros((len(targets), COVERAGE_AT), dtype=np.int64) if recommend else None
    for begin in range(0, len(order), batch_size):
        users = order[begin : begin + batch_size]
        scores = scorer(users)
        rows = np.repeat(np.arange(len(users)), (end - full_start)[users])
        seen = np.concatenate([split.data.items[full_start[u] : end[u]] for u in users]) - 1
        device = scores.device
        ranks[users] = (
            rank_of_targets(
                scores,
                torch.from_numpy(targets[users] - 1).to(device),
                (torch.from_numpy(rows).to(device), torch.from_numpy(seen).to(device)),
                torch.from_numpy(luck[users]).to(device),
            )
            .cpu()
            .numpy()
        )
        if recommended is not None:
            count = min(COVERAGE_AT, scores.shape[1])
            best, columns = scores.topk(count)
            # Who has had all but a few items is recommended no more than these.
            recommended[users, :count] = torch.where(best > -torch.inf, columns + 1, 0).cpu().numpy()
    return Ranking(split, part, ranks, recommended)


def model_scorer(model: Any, split: Split, part: str, precision: np.ndarray | None = None) -> Scorer:
    """Scores by a recommender, which is left in evaluation mode.

    Args:
        model: Plain, or patched.
        split: Leave-one-out.
        part: "validation" or "test".
        precision: Is filled with the final precision of each user's last state; for a patched model only.
    """
    model.eval()
    device = next(model.parameters()).device
    start, end = split.inputs(part, model.config.max_position_embeddings)
    data = split.data

    @torch.no_grad()
    def score(users: np.ndarray) -> Tensor:
        spans = [slice(start[u], end[u]) for u in users]
        times = None
        if uses_time(model):
            assert data.timestamps is not None
            times = [data.timestamps[span] for span in spans]
        inputs, last = ranking_inputs(model, [data.items[span] for span in spans], times)
        at = (torch.arange(len(users), device=device), last.to(device))
        with nullcontext() if precision is None else record(model) as trace:
            hidden = model(**{name: value.to(device) for name, value in inputs.items()}).last_hidden_state
        if precision is not None and trace is not None:
            precision[users] = trace.final_precision[at].double().reshape(len(users), -1).mean(1).cpu().numpy()
        return item_scores(model, hidden[at])

    return score


def item_scores(model: Any, states: Float[Tensor, "user channel"]) -> Float[Tensor, "user item"]:
    """Scores of the items alone, column i for the item with id i + 1."""
    items = slice(1, model.config.num_items + 1)
    bias = model.item_bias()
    return torch.nn.functional.linear(
        states.float(), model.item_embeddings()[items].float(), None if bias is None else bias[items].float()
    )
