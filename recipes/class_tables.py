"""What a report says of classes of labels, such as corrupted and clean ones."""

from collections.abc import Sequence
from dataclasses import dataclass

from .comparison import Condition, condition_order, describe
from .grid import ARM, SEED, Value
from .records import Record

COUNT = "labels"  # how many a class has: shown in the table alone
RATIO = "corrupted / clean"


@dataclass(frozen=True)
class RunClasses:
    """One run's results.json under "token_classes".

    Attributes:
        arm: The run's.
        condition: Label by every other axis that the run has one label of: its questions may be divided by others.
        seed: The run's.
        numbers: By class a number by name.
    """

    arm: str
    condition: Condition
    seed: Value
    numbers: dict[str, dict[str, float]]

    def of(self, name: str) -> dict[str, float]:
        """A number by class, and of what is positive in both classes also the ratio."""
        found = {kind: values[name] for kind, values in self.numbers.items() if name in values}
        corrupted, clean = (found.get(kind, 0.0) for kind in RATIO.split(" / "))
        return found | ({RATIO: corrupted / clean} if corrupted > 0 and clean > 0 else {})


class Classes:
    """The classes of all runs of a report.

    Args:
        records: The runs, whole or divided.
        arms: In the order in which they are shown.
    """

    def __init__(self, records: Sequence[Record], arms: Sequence[str]) -> None:
        parts: dict[str, list[Record]] = {}
        for record in records:
            parts.setdefault(record.name, []).append(record)
        self.runs = [run for same in parts.values() if (run := _classes(same)).numbers]
        self.conditions = sorted({run.condition for run in self.runs}, key=condition_order)
        self.arms = [arm for arm in arms if any(run.arm == arm for run in self.runs)]
        self.names = list(dict.fromkeys(n for run in self.runs for values in run.numbers.values() for n in values))
        self.drawn = [name for name in self.names if name != COUNT]

    def columns(self, name: str) -> list[str]:
        """The classes that have a number, and the ratio last."""
        found = dict.fromkeys(column for run in self.runs for column in run.of(name))
        return sorted(found, key=lambda column: column == RATIO)

    def values(self, name: str, arm: str, condition: Condition, column: str) -> list[float]:
        """A number, one a run."""
        runs = [run.of(name) for run in self.runs if (run.arm, run.condition) == (arm, condition)]
        return [values[column] for values in runs if column in values]

    def table(self, name: str) -> list[list[str]]:
        """A number by condition, arm and class: its mean over runs, the lowest and the highest; the head first."""
        columns = self.columns(name)
        lines = [["condition", "arm", *columns]]
        for condition in self.conditions:
            for arm in self.arms:
                cells = [_spread(self.values(name, arm, condition, column)) for column in columns]
                lines += [[describe(condition), arm, *cells]] if any(cells) else []
        return lines

    def rows(self, axes: Sequence[str]) -> list[list[str]]:
        """Every number of every run, unrounded, for a CSV; the head first."""
        lines = [[*axes, ARM, SEED, "class", "name", "value"]]
        for run in self.runs:
            place = [*(str(dict(run.condition).get(axis, "")) for axis in axes), run.arm, str(run.seed)]
            for kind, values in run.numbers.items():
                lines += [[*place, kind, name, f"{value:.6g}"] for name, value in values.items()]
        return lines


def _classes(parts: Sequence[Record]) -> RunClasses:
    """Of the records of one run."""
    first = parts[0]
    own = {axis: label for axis, label in first.axes.items() if all(part.axes.get(axis) == label for part in parts)}
    numbers = {
        kind: {name: float(value) for name, value in values.items() if _is_number(value)}
        for kind, values in (first.results.get("token_classes") or {}).items()
    }
    condition = tuple((axis, label) for axis, label in own.items() if axis not in (ARM, SEED))
    return RunClasses(str(own.get(ARM, "all")), condition, first.seed, numbers)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _spread(values: Sequence[float]) -> str:
    if not values:
        return ""
    mean, low, high = (f"{value:#.4g}" for value in (sum(values) / len(values), min(values), max(values)))
    return f"{mean} ({low} to {high})" if len(values) > 1 else mean
