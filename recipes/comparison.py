"""Runs laid out by arm, condition and seed: means, paired differences and changes, each with its interval."""

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .command import UsageError
from .grid import ARM, SEED, Value
from .intervals import Interval, hierarchical_bootstrap, holm
from .records import Record

Condition = tuple[tuple[str, Value], ...]
ENOUGH_SEEDS = 5  # fewer are no claim
_LOWER_IS_BETTER = re.compile(r"(^|[_@])(nll|loss|perplexity|rank|error)($|[_@])")


@dataclass(frozen=True)
class Estimate:
    """A number with its interval, and what it is of.

    Attributes:
        arm: Of this arm.
        condition: Label by every other axis.
        seeds: That it is over.
        interval: None where there was nothing to pair.
        note: Why there was nothing, or what limits it.
        p_holm: Corrected p of a comparison; None for what is none.
    """

    arm: str
    condition: Condition
    seeds: tuple[Value, ...]
    interval: Interval | None
    note: str = ""
    p_holm: float | None = None


def lower_is_better(metric: str) -> bool:
    """Whether less of a metric is better, by its name."""
    return _LOWER_IS_BETTER.search(metric) is not None


def describe(condition: Condition) -> str:
    """`noise=0.3, k=4`, or "all runs" of a grid without another axis."""
    return ", ".join(f"{axis}={label}" for axis, label in condition) or "all runs"


class Comparison:
    """The runs of a report, checked to be comparable.

    Args:
        records: One a run.
        arms: Only these, in this order; () for all, the baseline first.
        baseline: The arm that the others are compared with; None for no comparison.

    Raises:
        UsageError: An arm that no run has, two runs in one place, or axes that not all runs have.
    """

    def __init__(self, records: Sequence[Record], arms: Sequence[str] = (), baseline: str | None = None) -> None:
        present = sorted({_arm(record) for record in records})
        for name in [*arms, *([baseline] if baseline else [])]:
            if name not in present:
                raise UsageError(f"no run has the arm {name!r} (there is {', '.join(present)})")
        self.arms = list(arms) or sorted(present, key=lambda arm: (arm != baseline, arm))
        if baseline and baseline not in self.arms:
            self.arms = [baseline, *self.arms]
        self.baseline = baseline
        self.records = [record for record in records if _arm(record) in self.arms]
        self.axes = [axis for axis in self.records[0].axes if axis not in (ARM, SEED)]
        self.cells: dict[tuple[str, Condition], dict[Value, Record]] = {}
        for record in self.records:
            if {*record.axes} - {ARM, SEED} != {*self.axes}:
                raise UsageError(
                    f"{record.name} has other axes than {self.records[0].name}: report them apart, or the same axes for both"
                )
            place = self.cells.setdefault((_arm(record), self._condition(record)), {})
            if record.seed in place:
                raise UsageError(f"{record.name} and {place[record.seed].name} are of one arm, seed and condition")
            place[record.seed] = record
        self.conditions: list[Condition] = sorted({condition for _, condition in self.cells}, key=condition_order)
        self.seeds: list[Value] = sorted({record.seed for record in self.records}, key=_label_order)

    def _condition(self, record: Record) -> Condition:
        return tuple((axis, record.axes[axis]) for axis in self.axes)

    def metrics(self) -> list[str]:
        """The numbers that the questions of every run have."""
        return [name for name in self.records[0].numbers if all(name in record.numbers for record in self.records)]

    def reported(self) -> list[str]:
        """Those of `metrics` whose mean the runs' own results report, or else all."""
        summaries = [value for value in self.records[0].results.values() if isinstance(value, dict)]
        found = [metric for metric in self.metrics() if any(metric in summary for summary in summaries)]
        return found or self.metrics()

    def missing(self) -> list[str]:
        """Combinations of arm, condition and seed among those seen that no run is of."""
        return [
            f"{arm} {describe(condition)} {SEED}={seed}"
            for condition, arm, seed in itertools.product(self.conditions, self.arms, self.seeds)
            if seed not in self.cells.get((arm, condition), {})
        ]

    def ids(self, metric: str, condition: Condition) -> list[str]:
        """The questions of a condition, which all of its runs were measured on.

        Raises:
            UsageError: They were not, or a number is not finite.
        """
        first: tuple[Record, set[str]] | None = None
        for (_, place), cell in self.cells.items():
            for record in cell.values() if place == condition else ():
                if not all(value is None or math.isfinite(value) for value in record.numbers[metric]):
                    raise UsageError(
                        f"{record.name}: {metric} is not finite for some questions, as where training diverged: leave this run "
                        "out, or choose another --metric"
                    )
                ids = {i for i, value in zip(record.ids, record.numbers[metric], strict=True) if value is not None}
                if first is None:
                    first = record, ids
                elif ids != first[1]:
                    raise UsageError(
                        f"{record.name} and {first[0].name} have {metric} of different questions ({len(ids ^ first[1])} are in one "
                        "only): paired differences need the same, so evaluate both alike or report them apart"
                    )
        return sorted(first[1]) if first else []

    def values(self, metric: str, arm: str, condition: Condition, seeds: Sequence[Value], ids: Sequence[str]) -> Any:
        """(seed, question), in this order of both."""
        import numpy as np

        rows = []
        for seed in seeds:
            record = self.cells[arm, condition][seed]
            by_id = dict(zip(record.ids, record.numbers[metric], strict=True))
            rows.append([by_id[i] for i in ids])
        return np.array(rows, dtype=float)

    def shared_seeds(self, *places: tuple[str, Condition]) -> tuple[Value, ...]:
        """Seeds that every place has a run of."""
        return tuple(seed for seed in self.seeds if all(seed in self.cells.get(place, {}) for place in places))

    def means(self, metric: str) -> list[Estimate]:
        """Every arm's mean in every condition."""
        found = []
        for condition, arm in itertools.product(self.conditions, self.arms):
            ids, seeds = self.ids(metric, condition), self.shared_seeds((arm, condition))
            if not seeds or not ids:
                found.append(Estimate(arm, condition, seeds, None, "no run"))
                continue
            interval = hierarchical_bootstrap(self.values(metric, arm, condition, seeds, ids))
            found.append(Estimate(arm, condition, seeds, interval, _limits(seeds)))
        return found

    def differences(self, metric: str) -> list[Estimate]:
        """Each arm less the baseline, seed by seed and question by question."""
        found = []
        for condition, arm in itertools.product(self.conditions, self._rivals()):
            baseline = (self.baseline or "", condition)
            ids, seeds = self.ids(metric, condition), self.shared_seeds((arm, condition), baseline)
            if not seeds or not ids:
                found.append(Estimate(arm, condition, seeds, None, "no seed in common"))
                continue
            pair = [self.values(metric, name, condition, seeds, ids) for name in (arm, baseline[0])]
            found.append(Estimate(arm, condition, seeds, hierarchical_bootstrap(pair[0] - pair[1]), _limits(seeds)))
        return _corrected(found)

    def changes(self, metric: str, axis: str, *, against: bool, every: bool = False) -> list[Estimate]:
        """What happens to a metric from the lowest label of an axis to the highest, on the same seeds and questions.

        Args:
            metric: Whose.
            axis: With numbers for labels.
            against: Each arm's change less the baseline's, in place of the change.
            every: To every other label, not the highest alone; which one, the condition says.
        """
        low, *higher = sorted(self._labels(axis), key=_label_order)
        found = []
        others = sorted({tuple(p for p in c if p[0] != axis) for c in self.conditions}, key=condition_order)
        places = itertools.product(others, higher if every else higher[-1:], self._rivals() if against else self.arms)
        for rest, high, arm in places:
            ends = [next((c for c in self.conditions if {*c} == {*rest, (axis, end)}), None) for end in (low, high)]
            if ends[0] is None or ends[1] is None:
                continue
            place = ends[1] if every else rest
            arms = [arm, self.baseline or ""] if against else [arm]
            seeds = self.shared_seeds(*itertools.product(arms, (ends[0], ends[1])))
            ids = self.ids(metric, ends[0])
            if ids != self.ids(metric, ends[1]):
                found.append(Estimate(arm, place, seeds, None, "other questions at the other end"))
            elif not seeds or not ids:
                found.append(Estimate(arm, place, seeds, None, "no seed in common"))
            else:
                change = [
                    self.values(metric, name, ends[1], seeds, ids) - self.values(metric, name, ends[0], seeds, ids)
                    for name in arms
                ]
                table = change[0] - change[1] if against else change[0]
                found.append(Estimate(arm, place, seeds, hierarchical_bootstrap(table), _limits(seeds)))
        return _corrected(found) if against else found

    def numeric_axes(self) -> list[str]:
        """Axes with two numbers or more, over which things change."""
        return [
            axis for axis in self.axes if len(numbers := self._labels(axis)) > 1 and not any(map(_is_text, numbers))
        ]

    def ends(self, axis: str) -> tuple[Value, Value]:
        """Lowest and highest label of an axis."""
        labels = sorted(self._labels(axis), key=_label_order)
        return labels[0], labels[-1]

    def _labels(self, axis: str) -> set[Value]:
        return {label for condition in self.conditions for name, label in condition if name == axis}

    def _rivals(self) -> list[str]:
        return [arm for arm in self.arms if arm != self.baseline]


def _arm(record: Record) -> str:
    return str(record.axes.get(ARM, "all"))


def _is_text(label: Value) -> bool:
    return isinstance(label, str)


def condition_order(condition: Condition) -> list[Any]:
    """What conditions are sorted by: numbers before texts, axis by axis."""
    return [_label_order(label) for _, label in condition]


def _label_order(label: Value) -> tuple[bool, float, str]:
    if not isinstance(label, str):
        return (False, float(label), "")
    number = re.match(r"\d+", label)  # "6-10" before "11-20", and both before "all"
    return (True, float(number[0]) if number else math.inf, label)


def _limits(seeds: Sequence[Value]) -> str:
    if len(seeds) == 1:
        return "one seed: the interval leaves out how much another would differ"
    return ""


def _corrected(estimates: Sequence[Estimate]) -> list[Estimate]:
    """Holm's correction over all comparisons of the table."""
    known = [estimate for estimate in estimates if estimate.interval is not None]
    adjusted = iter(holm([estimate.interval.p for estimate in known if estimate.interval]))
    return [
        Estimate(e.arm, e.condition, e.seeds, e.interval, e.note, next(adjusted) if e.interval else None)
        for e in estimates
    ]
