"""Metrics against torchmetrics and by hand, full ranking against a plain loop, and the figures of rankings that learn nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torchmetrics.retrieval import RetrievalHitRate, RetrievalMRR, RetrievalNormalizedDCG

from bft_hf.rec.baselines import BASELINES
from bft_hf.rec.data import Interactions, Split, leave_one_out
from bft_hf.rec.evaluation import rank_users
from bft_hf.rec.metrics import (
    coverage,
    frequency_quartiles,
    gains,
    history_names,
    history_strata,
    hits,
    rank_of_targets,
    summarize,
)
from bft_hf.rec.reading import read_interactions


def random_split(users: int = 40, items: int = 30, seed: int = 0) -> Split:
    rng = np.random.default_rng(seed)
    # No item twice in a history, as in the public data sets.
    histories = [rng.permutation(items)[: rng.integers(3, 12)] + 1 for _ in range(users)]
    return leave_one_out(
        Interactions(
            tuple(map(str, range(users))),
            tuple(map(str, range(items))),
            np.concatenate(histories),
            np.concatenate([[0], np.cumsum([len(history) for history in histories])]),
            None,
            "random",
        )
    )


def scorer_of(scores: Tensor) -> Callable[[np.ndarray], Tensor]:
    return lambda users: scores[torch.from_numpy(users)].clone()


@pytest.mark.parametrize("k", [5, 10, 20])
def test_metrics_are_torchmetrics(k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    scores = torch.rand(60, 50, generator=generator)
    targets = torch.randint(50, (60,), generator=generator)
    ranks = rank_of_targets(scores.clone(), targets).numpy()
    summary = summarize(ranks)
    indexes = torch.arange(60)[:, None].expand_as(scores).flatten()
    relevant = torch.nn.functional.one_hot(targets, 50).bool().flatten()
    expected = {
        f"hr@{k}": RetrievalHitRate(top_k=k),
        f"ndcg@{k}": RetrievalNormalizedDCG(top_k=k),
        "mrr": RetrievalMRR(),
    }
    for name, metric in expected.items():
        value = float(metric(scores.flatten(), relevant, indexes=indexes))
        assert summary[name] == pytest.approx(value, abs=1e-6) and 0 < value < 1
    assert summary["n"] == 60


def test_ranks_by_hand() -> None:
    scores = torch.tensor([[0.1, 0.9, 0.5, 0.7], [0.4, 0.3, 0.2, 0.1], [0.0, 0.0, 0.0, 0.0]])
    targets = torch.tensor([2, 3, 0])
    assert rank_of_targets(scores.clone(), targets).tolist() == [3, 4, 3]
    seen = torch.tensor([0, 1, 1, 1]), torch.tensor([1, 0, 3, 3])
    # The target of the second user was seen before, and is ranked all the same.
    assert rank_of_targets(scores.clone(), targets, seen).tolist() == [2, 3, 3]
    luck = torch.rand(4000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tied = rank_of_targets(torch.zeros(4000, 4), torch.zeros(4000, dtype=torch.long), None, luck)
    assert torch.bincount(tied, minlength=5)[1:].div(4000).tolist() == pytest.approx([0.25] * 4, abs=0.02)
    assert rank_of_targets(torch.zeros(1, 4), torch.zeros(1, dtype=torch.long), None, torch.ones(1)).tolist() == [4]
    scores[1, 2] = torch.nan
    with pytest.raises(ValueError, match="lower the learning rate"):
        rank_of_targets(scores, targets)
    ranks = np.array([1, 3, 10, 11, 12])
    assert hits(ranks, 10).tolist() == [1, 1, 1, 0, 0]
    assert gains(ranks, 10) == pytest.approx([1, 0.5, 1 / np.log2(11), 0, 0])
    assert np.isnan(summarize(np.array([]))["hr@5"])


def test_strata_hold_equal_shares_of_items_with_ties_together() -> None:
    frequency = np.array([0, 1, 1, 1, 2, 3, 4, 50])
    assert frequency_quartiles(frequency).tolist() == [0, 0, 0, 0, 2, 2, 3, 3]
    assert np.bincount(frequency_quartiles(np.arange(400))).tolist() == [100] * 4
    assert history_names() == ["1-5", "6-10", "11-20", "21-50", "51-"]
    assert history_strata(np.array([1, 5, 6, 50, 51, 900])).tolist() == [0, 0, 1, 3, 4, 4]
    assert coverage(np.array([[1, 2], [2, 0]]), 8) == 0.25


@pytest.mark.parametrize("part", ["validation", "test"])
def test_full_ranking_is_a_plain_loop(part: str) -> None:
    split = random_split()
    scores = torch.rand(len(split.users), split.data.num_items, generator=torch.Generator().manual_seed(1))
    ranking = rank_users(split, part, scorer_of(scores), batch_size=7, recommend=True)
    held_out = -1 if part == "test" else -2
    for row, user in enumerate(split.users):
        history = split.data.history(user).tolist()
        target, seen = history[held_out], history[:held_out]
        left = [item for item in range(1, split.data.num_items + 1) if item not in seen]
        best = sorted(left, key=lambda item: -float(scores[row, item - 1]))
        assert ranking.ranks[row] == best.index(target) + 1
        assert ranking.recommended is not None and ranking.recommended[row].tolist() == best[:10]
        assert ranking.history_lengths[row] == len(seen)
    strata = ranking.strata()
    for kind in ("item_frequency", "history_length"):
        counts = [row["n"] for row in strata[kind].values()]
        assert sum(counts) == len(split.users) and len(counts) > 1
        mean = sum(row["n"] * row["mrr"] for row in strata[kind].values()) / len(split.users)
        assert mean == pytest.approx(ranking.summary()["mrr"])
    assert set(ranking.summary()) == {*summarize(ranking.ranks), "coverage@10"}


def test_nothing_seen_is_recommended_where_little_is_unseen() -> None:
    """One item is left of twelve: there is no second to recommend, and coverage counts none."""
    names = tuple(map(str, range(1, 13)))
    split = leave_one_out(
        Interactions(("a", "b"), names, np.tile(np.arange(1, 13), 2), np.array([0, 12, 24]), None, "")
    )
    recommended = rank_users(split, "test", scorer_of(torch.rand(2, 12)), recommend=True).recommended
    assert recommended is not None and recommended.tolist() == [[12] + [0] * 9] * 2


def test_users_may_be_shared_between_processes() -> None:
    split = random_split()
    scores = torch.rand(len(split.users), split.data.num_items)
    whole = rank_users(split, "test", scorer_of(scores)).ranks
    parts = [rank_users(split, "test", scorer_of(scores), order=np.arange(40)[i::3]).ranks for i in range(3)]
    assert (np.nansum(parts, axis=0) == whole).all() and (np.isfinite(parts).sum(axis=0) == 1).all()


def test_popularity_counts_the_training_parts_alone() -> None:
    split = random_split()
    scores = BASELINES["popularity"](split, "test")(np.array([0, 1]))
    counts = np.zeros(split.data.num_items)
    for user in range(split.data.num_users):
        counts[split.data.history(user)[:-2] - 1] += 1
    assert (scores.numpy() == counts).all() and scores.shape == (2, 30)


def test_transitions_count_pairs_within_the_training_parts_and_fall_back_on_popularity() -> None:
    histories = [[1, 2, 3, 1, 2], [1, 2, 4, 1, 3], [1, 4, 2, 3, 1], [4, 3]]  # the last one too short to hold out
    split = leave_one_out(
        Interactions(
            tuple("abcd"), tuple("1234"), np.concatenate(histories), np.array([0, 5, 10, 15, 17]), None, "by hand"
        )
    )
    # After 1: 2 twice, 4 once; after 2: 3 and 4 once; after 4: 2 and 3 once; after 3 nothing. 1, 2 and 4 stand there thrice, 3 twice.
    expected = {1: [0.75, 2.75, 0.5, 1.75], 3: [0.75, 0.75, 0.5, 0.75]}
    for part, last in {"test": [1, 1, 3], "validation": [3, 4, 2]}.items():
        scores = BASELINES["transitions"](split, part)(np.array([2, 0])).tolist()
        wanted = {**expected, 2: [0.75, 0.75, 1.5, 1.75], 4: [0.75, 1.75, 1.5, 0.75]}
        assert scores == [wanted[last[2]], wanted[last[0]]]


# HR@10 and NDCG@10 on the test, computed by other code from the same files: popularity elsewhere, transitions with a sparse matrix
# of scipy. docs/recommendation.md says how the latter differ from what others give.
KNOWN = {
    ("popularity", "beauty.txt.gz"): (0.0115, 0.0055),
    ("popularity", "sports.txt.gz"): (0.0091, 0.0052),
    ("popularity", "instruments.json.gz"): (0.0507, 0.0330),
    ("transitions", "beauty.txt.gz"): (0.0667, 0.0439),
    ("transitions", "sports.txt.gz"): (0.0369, 0.0234),
    ("transitions", "instruments.json.gz"): (0.0815, 0.0637),
}


@pytest.mark.slow
@pytest.mark.parametrize(("baseline", "name"), KNOWN)
def test_baselines_on_public_data_are_what_others_computed(baseline: str, name: str, shared_data: Path) -> None:
    """Pins the split, the removal of seen items, the ranking and both metrics at once. Ties are many, and broken at random."""
    split = leave_one_out(read_interactions(shared_data / "rec" / name))
    summary: dict[str, Any] = rank_users(split, "test", BASELINES[baseline](split, "test")).summary()
    assert (summary["hr@10"], summary["ndcg@10"]) == pytest.approx(KNOWN[baseline, name], abs=2e-4)


def test_the_rarest_quartile_of_sports_has_the_users_the_paper_s_gain_is_about(shared_data: Path) -> None:
    split = leave_one_out(read_interactions(shared_data / "rec" / "sports.txt.gz"))
    quartiles = frequency_quartiles(split.item_frequency[1:])[split.targets("test") - 1]
    assert (quartiles == 0).sum() == 7926
