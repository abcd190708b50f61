"""What a run of `bft-rec` says about its data and its rankings: in results.json, user by user, and on the terminal."""

import csv
import gzip
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .rec_arguments import RecArguments

if TYPE_CHECKING:
    from bft_hf.rec.data import Split
    from bft_hf.rec.evaluation import Ranking

PROTOCOL = (
    "leave-one-out; the held-out item ranked among all items of the catalogue, the others of the user's history removed; ties "
    "broken at random by a fixed seed"
)


def data_summary(split: "Split", arguments: RecArguments) -> dict[str, Any]:
    """What results.json says about the data."""
    data = split.data
    return {
        "file": arguments.data,
        "users": data.num_users,
        "items": data.num_items,
        "actions": len(data.items),
        "order": data.order,
        "k_core": arguments.k_core,
        "evaluated_users": len(split.users),
        "test_items_never_trained_on": split.untrained_targets,
        "users_with_test_and_validation_at_one_time": data.tied_targets(),
    }


def describe(split: "Split", arguments: RecArguments) -> str:
    """A line about the data for the terminal."""
    data = split.data
    return (
        f"{arguments.data}: {data.num_users:,} users, {data.num_items:,} items, {len(data.items):,} actions; order "
        f"{data.order}; {len(split.users):,} users evaluated"
    )


def outcome(rankings: Sequence["Ranking"]) -> dict[str, Any]:
    """The metrics of each part, and those of the last by stratum; "per_user" names it, as write_per_user is given it."""
    last = rankings[-1]
    return {ranking.part: ranking.summary() for ranking in rankings} | {"per_user": last.part, "strata": last.strata()}


def write_per_user(path: Path, ranking: "Ranking") -> None:
    """A row a user: the held-out item, its rank, its frequency in training and quartile of it; a filter's precision."""
    split, quartiles, lengths = ranking.split, ranking.quartiles, ranking.history_lengths
    targets = split.targets(ranking.part)
    # No time in the header: two runs alike leave files alike.
    with (
        open(path, "wb") as raw,
        gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as packed,
        io.TextIOWrapper(packed, encoding="utf-8", newline="") as text,
    ):
        writer = csv.writer(text, lineterminator="\n")
        names = ["user", "item", "rank", "frequency", "item_quartile", "history_length"]
        writer.writerow(names if ranking.precision is None else [*names, "precision"])
        for row, user in enumerate(split.users.tolist()):
            item = int(targets[row])
            values = [
                split.data.user_names[user],
                split.data.item_names[item - 1],
                int(ranking.ranks[row]),
                split.item_frequency[item],
                f"Q{quartiles[row]}",
                lengths[row],
            ]
            writer.writerow(values if ranking.precision is None else [*values, f"{ranking.precision[row]:.6g}"])


def report(results: dict[str, Any], folder: Path, say: Any) -> None:
    """The outcome on the terminal."""
    say(f"{'':20}{'users':>8}{'HR@5':>8}{'HR@10':>8}{'HR@20':>8}{'NDCG@5':>8}{'NDCG@10':>9}{'NDCG@20':>9}{'MRR':>8}")
    part = results["per_user"]
    rows = {name: results[name] for name in dict.fromkeys(["validation", part])}
    rows |= {f"{part} items {name}": row for name, row in results["strata"]["item_frequency"].items()}
    rows |= {f"history {name}": row for name, row in results["strata"]["history_length"].items()}
    for name, row in rows.items():
        hr = "".join(f"{row[f'hr@{k}']:8.4f}" for k in (5, 10, 20))
        ndcg = "".join(f"{row[f'ndcg@{k}']:{8 if k == 5 else 9}.4f}" for k in (5, 10, 20))
        say(f"{name:20}{row['n']:8,}{hr}{ndcg}{row['mrr']:8.4f}")
    if "epoch" in results["seconds"]:
        say(f"Best epoch {results['best_epoch']}; {results['seconds']['epoch']:.1f} s an epoch of training")
    say(f"Written to {folder}")
