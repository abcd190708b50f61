"""What a ranking is worth: HR, NDCG, MRR and coverage from the ranks of held-out items, over all users and by stratum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

CUTOFFS = (5, 10, 20)
QUARTILE_NAMES = ("Q0", "Q1", "Q2", "Q3")
"""Of items by their frequency in training, Q0 the rarest."""

HISTORY_LENGTHS = (5, 10, 20, 50)
"""Upper ends of the strata by history length, the last one open: up to 5, 6 to 10, 11 to 20, 21 to 50, more."""


def rank_of_targets(
    scores: Float[Tensor, "user item"],
    targets: Int[Tensor, " user"],
    seen: tuple[Int[Tensor, " pair"], Int[Tensor, " pair"]] | None = None,
    place_in_ties: Float[Tensor, " user"] | None = None,
) -> Int[Tensor, " user"]:
    """Rank of each user's held-out item among all that the user has not seen, from 1.

    Args:
        scores: Higher is better. Changed: what was seen becomes -inf.
        targets: Column of the held-out item, which is ranked even where it was seen (some things are bought twice).
        seen: Rows and columns of what is removed.
        place_in_ties: Where the held-out item stands among those with its very score, from 0, before all of them, to 1, behind
            them; by default in the middle. Random numbers break ties at random: a model that scores everything alike is
            then no better and no worse than chance.

    Raises:
        ValueError: a score is NaN, which would compare as behind everything.
    """
    of_target = scores.gather(1, targets[:, None])
    if seen is not None:
        scores[seen] = -torch.inf
        scores.scatter_(1, targets[:, None], of_target)
    if torch.isnan(scores.sum()) and torch.isnan(scores).any():
        raise ValueError("scores are NaN: the model has diverged, lower the learning rate")
    ahead = (scores > of_target).sum(dim=1)
    level = (scores == of_target).sum(dim=1)
    place = 0.5 if place_in_ties is None else place_in_ties
    return 1 + ahead + (place * level).long().clamp(max=level - 1)


def hits(ranks: np.ndarray, k: int) -> np.ndarray:
    """1 where the held-out item is among the first k, else 0: averaged, HR@k, which with one item to find is recall@k."""
    return (ranks <= k).astype(np.float64)


def gains(ranks: np.ndarray, k: int) -> np.ndarray:
    """1 / log2(1 + rank) among the first k, else 0: averaged, NDCG@k, whose ideal is 1 with one item to find."""
    return np.where(ranks <= k, 1 / np.log2(1 + ranks), 0.0)


def summarize(ranks: np.ndarray, cutoffs: Sequence[int] = CUTOFFS) -> dict[str, float]:
    """HR and NDCG at each cutoff, MRR (of the whole ranking, no cutoff) and the number of users.

    Args:
        ranks: One a user.
        cutoffs: The ks.

    Returns:
        "hr@5", ..., "ndcg@5", ..., "mrr", "n"; without users the means are NaN.
    """
    count = len(ranks)

    def mean(values: np.ndarray) -> float:
        return float(values.mean()) if count else float("nan")

    values = {f"hr@{k}": mean(hits(ranks, k)) for k in cutoffs}
    values |= {f"ndcg@{k}": mean(gains(ranks, k)) for k in cutoffs}
    return values | {"mrr": mean(1 / ranks), "n": count}


def coverage(recommended: Int[np.ndarray, "user place"], num_items: int) -> float:
    """Share of the catalogue that is recommended to anybody; an id of 0 is no recommendation."""
    return len(np.unique(recommended[recommended > 0])) / num_items


def frequency_quartiles(item_frequency: np.ndarray) -> np.ndarray:
    """Stratum of every item by how often it occurs in training: 0 for the rarest quarter of the items to 3.

    Quarters of the *items*, not of the users: most users' held-out item is a popular one, so the strata hold different numbers
    of users. Items that occur equally often stay together, so a border lies at the quartile itself, which belongs below.

    Args:
        item_frequency: Actions of the training part by item, padding left out, shape (num_items,).

    Returns:
        Shape (num_items,).
    """
    borders = np.quantile(item_frequency, [0.25, 0.5, 0.75])
    return np.searchsorted(borders, item_frequency, side="left")


def history_strata(lengths: np.ndarray, borders: Sequence[int] = HISTORY_LENGTHS) -> np.ndarray:
    """Stratum of every user by how many items the model is given, whatever it keeps of them."""
    return np.searchsorted(np.asarray(borders), lengths, side="left")


def history_names(borders: Sequence[int] = HISTORY_LENGTHS) -> list[str]:
    """Names of the strata by history length: "1-5", "6-10", ..., "51-"."""
    lows = [1, *(border + 1 for border in borders)]
    return [f"{low}-{high}" for low, high in zip(lows, [*borders, ""], strict=True)]


def summarize_strata(ranks: np.ndarray, strata: np.ndarray, names: Sequence[str]) -> dict[str, Mapping[str, float]]:
    """`summarize` of every stratum that has users.

    Args:
        ranks: One a user.
        strata: Position in `names` of every user's stratum.
        names: All strata.
    """
    return {name: summarize(ranks[strata == index]) for index, name in enumerate(names) if (strata == index).any()}
