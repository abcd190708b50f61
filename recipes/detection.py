"""How well a score finds what is wrong: AUROC and average precision, with bootstrap intervals over rows and runs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

RESAMPLES = 1000
LEVEL = 0.95
_AT_ONCE = 10_000_000  # weights held at a time, 80 MB

Metric = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def auroc(scores: np.ndarray, wrong: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The probability that something wrong scores higher than something right, a tie counted half.

    Args:
        scores: (item,), higher is more suspicious.
        wrong: (item,) bool.
        weights: (resample, item), how often each item counts.

    Returns:
        (resample,), NaN where nothing is wrong or nothing is right.
    """
    found, false = _counts(scores, wrong, weights)
    with np.errstate(invalid="ignore", divide="ignore"):
        area = (
            np.diff(false, prepend=0.0) * (found + np.concatenate([np.zeros_like(found[:, :1]), found[:, :-1]], 1))
        ).sum(1)
        return area / 2 / (found[:, -1] * false[:, -1])


def average_precision(scores: np.ndarray, wrong: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The mean over what is wrong of the share that is wrong among all that scores as high or higher.

    Args and result as those of `auroc`; a score without information gives the share of what is wrong.
    """
    found, false = _counts(scores, wrong, weights)
    with np.errstate(invalid="ignore", divide="ignore"):
        precision = np.where(found > 0, found / (found + false), 0.0)
        return (np.diff(found, prepend=0.0) * precision).sum(1) / found[:, -1]


def _counts(scores: np.ndarray, wrong: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Weight of what is wrong, and of what is right, down to each distinct score, (resample, distinct score)."""
    order = np.argsort(-scores, kind="stable")
    ends = np.append(np.flatnonzero(np.diff(scores[order])), len(order) - 1)
    sorted_weights, mark = weights[:, order], wrong[order]
    found = np.cumsum(sorted_weights * mark, 1)[:, ends]
    false = np.cumsum(sorted_weights * ~mark, 1)[:, ends]
    return found.astype(np.float64), false.astype(np.float64)


@dataclass(frozen=True)
class Run:
    """Items of one run with the scores that rank them.

    Attributes:
        scores: (item,) by name, higher is more suspicious.
        wrong: (item,) bool, what there is to find.
        groups: (item,), what is resampled together: the id of the row or question that an item is of.
    """

    scores: Mapping[str, np.ndarray]
    wrong: np.ndarray
    groups: np.ndarray


@dataclass(frozen=True)
class Estimate:
    """A mean over runs with the ends of its 95 % interval."""

    value: float
    low: float
    high: float

    def as_list(self) -> list[float]:
        """Value, low, high."""
        return [self.value, self.low, self.high]


@dataclass
class Comparison:
    """What `compare` found: for each score and metric the estimate, and its difference from the baseline's."""

    values: dict[str, dict[str, Estimate]] = field(default_factory=dict)
    differences: dict[str, dict[str, Estimate]] = field(default_factory=dict)


METRICS: dict[str, Metric] = {"auroc": auroc, "average_precision": average_precision}


def compare(
    runs: Sequence[Run],
    *,
    baseline: str | None = "loss",
    metrics: Mapping[str, Metric] = METRICS,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Comparison:
    """Compare scores by what they find, paired: all of them on the same resamples.

    The bootstrap is hierarchical: runs are drawn with replacement, and groups, those that runs share together for all of
    them. With one run, the interval is of its groups alone and says nothing about another seed.

    Args:
        runs: With the same scores each.
        baseline: The score that the others are compared with, or None.
        metrics: By name.
        resamples: How many.
        seed: Of the draws.

    Raises:
        ValueError: No run, runs with different scores, or one in which nothing is wrong, or everything.
    """
    if not runs or any(set(run.scores) != set(runs[0].scores) for run in runs):
        raise ValueError("runs that are compared need the same scores, and there must be one at least")
    for run in runs:
        if run.wrong.all() or not run.wrong.any():
            raise ValueError(
                f"{int(run.wrong.sum())} of {len(run.wrong)} items are wrong: some must be, and some must not"
            )
    generator = np.random.default_rng(seed)
    points: dict[tuple[str, str], list[float]] = {}
    drawn: dict[tuple[str, str], list[np.ndarray]] = {}
    keys = [(name, metric) for name in runs[0].scores for metric in metrics]
    parts: list[dict[tuple[str, str], list[np.ndarray]]] = [{key: [] for key in keys} for _ in runs]
    for weights in _resampled([run.groups for run in runs], resamples, generator):
        for run, part, own in zip(runs, parts, weights, strict=True):
            for name, metric in keys:
                part[name, metric].append(metrics[metric](run.scores[name], run.wrong, own))
    for run, part in zip(runs, parts, strict=True):
        whole = np.ones((1, len(run.wrong)))
        for name, metric in keys:
            points.setdefault((name, metric), []).append(float(metrics[metric](run.scores[name], run.wrong, whole)[0]))
            drawn.setdefault((name, metric), []).append(np.concatenate(part[name, metric]))
    which = generator.integers(len(runs), size=(resamples, len(runs)))
    means = {key: np.stack(values)[which, np.arange(resamples)[:, None]].mean(1) for key, values in drawn.items()}
    result = Comparison()
    for (name, metric), values in points.items():
        result.values.setdefault(name, {})[metric] = _estimate(float(np.mean(values)), means[name, metric])
        if baseline is not None and name != baseline:
            base = (baseline, metric)
            result.differences.setdefault(name, {})[metric] = _estimate(
                float(np.mean(values) - np.mean(points[base])), means[name, metric] - means[base]
            )
    return result


def _resampled(
    groups: Sequence[np.ndarray], resamples: int, generator: np.random.Generator
) -> Iterator[list[np.ndarray]]:
    """How often each item of each run counts when groups are drawn with replacement, some resamples at a time.

    Args:
        groups: (item,) of each run; a group that several runs have is drawn for all of them together.
        resamples: How many in all.
        generator: Draws them.

    Yields:
        For each run, (resample, item).
    """
    _, members = np.unique(np.concatenate(groups), return_inverse=True)
    count = int(members.max()) + 1
    ends = np.cumsum([len(own) for own in groups])
    own = [members[end - len(group) : end] for group, end in zip(groups, ends, strict=True)]
    step = max(1, _AT_ONCE // len(members))
    for start in range(0, resamples, step):
        weights = generator.multinomial(count, np.full(count, 1 / count), size=min(step, resamples - start))
        yield [weights[:, member] for member in own]


def _estimate(value: float, drawn: np.ndarray) -> Estimate:
    low, high = np.nanquantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(float(value), float(low), float(high))
