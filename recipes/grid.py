"""A grid of runs: arms, noise rates and seeds in YAML, and the command line of each."""

import difflib
import fnmatch
import itertools
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .command import UsageError, as_usage_error, read_yaml

GRIDS = Path(__file__).parent / "grids"
ARM = "arm"
SEED = "seed"
KEEP = ("all", "results")
# Where a run goes and how it starts: no two runs agree in these, and no result depends on them.
BOOKKEEPING = ("output_dir", "overwrite", "resume", "resume_from_checkpoint")
# What is looked at when training is over: no other result depends on it.
LOOKED_AT = ("token_classes",)
_KEYS = ("command", "launch", "env", "keep", "unchecked", "base", "axes", "exclude", "stages")
# A run's name is a folder's, and is read back where bft-bench left no record: a label holds neither _ nor =.
_LABEL = re.compile(r"[A-Za-z0-9.+-]+")

Value = str | int | float | bool
Flags = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One run of a grid.

    Attributes:
        name: Its folder's: the arm, then `axis=value` for every other axis, `bft_noise=0.3_seed=1`.
        axes: Label by axis, as the grid wrote them.
        flags: Value by flag, `output_dir` and the like left out.
    """

    name: str
    axes: dict[str, Value]
    flags: Flags


@dataclass(frozen=True)
class Grid:
    """A file of runs.

    Attributes:
        name: The file's, without `.yaml`.
        command: The recipe, `bft-sft`.
        launch: Words in front of it, such as those of `accelerate launch`; () for none.
        env: Environment variables of every run.
        keep: "all", or "results" to drop weights and checkpoints of a finished run.
        unchecked: Flags in which a finished run may differ from the grid.
        base: Flags of every run.
        axes: For every axis its labels, and each label's flags.
        exclude: Combinations that are left out, for each axis named the labels meant.
        stages: Labels by axis by stage.
    """

    name: str
    command: str
    launch: tuple[str, ...]
    env: dict[str, str]
    keep: str
    unchecked: tuple[str, ...]
    base: Flags
    axes: dict[str, dict[Value, Flags]]
    exclude: tuple[dict[str, list[Value]], ...] = ()
    stages: dict[str, dict[str, list[Value]]] = field(default_factory=dict)

    def runs(self, stages: Sequence[str] | None = None, only: Sequence[str] = ()) -> list[Run]:
        """The runs, in the order in which they are to be done.

        The axis named last varies slowest: with the seeds there, all arms meet on the first seed before the second begins,
        so that whatever the time allows is paired.

        Args:
            stages: Names of stages, done one after the other; None for every one of them, or all runs if the grid has none.
            only: Patterns as a shell has them; a run's name fits one of them. () for all.

        Raises:
            UsageError: A stage that the grid does not have, or no run left.
        """
        unknown = [stage for stage in stages or () if stage not in self.stages]
        if unknown:
            raise UsageError(f"{self.name}: no stage {unknown[0]!r} (it has {', '.join(self.stages) or 'none'})")
        chosen = [self.stages[stage] for stage in (stages or self.stages)] or [{}]
        found: dict[str, Run] = {}
        for stage in chosen:
            for labels in itertools.product(*(stage.get(axis, [*self.axes[axis]]) for axis in reversed(self.axes))):
                point = dict(zip(self.axes, reversed(labels), strict=True))
                if not any(all(point[axis] in values for axis, values in rule.items()) for rule in self.exclude):
                    run = self._run(point)
                    found.setdefault(run.name, run)
        runs = [run for run in found.values() if not only or any(fnmatch.fnmatchcase(run.name, p) for p in only)]
        if not runs:
            raise UsageError(f"{self.name}: no run is left" + (f" by --only {' '.join(only)}" if only else ""))
        return runs

    def _run(self, point: dict[str, Value]) -> Run:
        flags = dict(self.base)
        for axis, label in point.items():
            flags |= self.axes[axis][label]
        # Read back, what stands before the first _ and has no = is the arm.
        axes = sorted(point, key=lambda axis: (axis != ARM, ARM not in point and "_" in axis))
        parts = [_text(point[axis]) if axis == ARM else f"{axis}={_text(point[axis])}" for axis in axes]
        return Run("_".join(parts), point, {name: value for name, value in flags.items() if value is not None})


def read_grid(path: str, settings: Sequence[str] = ()) -> Grid:
    """Read a grid from the working folder, or else from the package's `recipes/grids`.

    Args:
        path: A YAML file.
        settings: `flag=value`, in place of or beside the base flags; the value is read as YAML.

    Raises:
        UsageError: No such file, or something in it that no grid has; one line that names it.
    """
    import yaml

    candidates = [Path(path).expanduser(), GRIDS / path, GRIDS / f"{path}.yaml"]
    found = next((candidate for candidate in candidates if candidate.is_file()), None)
    if found is None:
        raise UsageError(
            f"{path}: no such grid (the package has {', '.join(sorted(f.name for f in GRIDS.glob('*.yaml')))})"
        )
    try:
        raw = read_yaml(found.read_text(encoding="utf-8"))
        changes = {}
        for setting in settings:
            flag, equals, value = setting.partition("=")
            if not equals or not flag:
                raise UsageError(f"--set {setting}: expected flag=value")
            changes[flag.lstrip("-").replace("-", "_")] = read_yaml(value)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise UsageError(f"{path}{where}: not readable as YAML ({getattr(error, 'problem', error)})") from None
    return _grid(found.stem, path, _mapping(path, raw, "a grid"), changes)


def _grid(name: str, path: str, raw: dict[str, Any], changes: Flags) -> Grid:
    for key in raw:
        _known(path, "key", key, _KEYS)
    command = raw.get("command")
    if not isinstance(command, str) or not command.strip():
        raise UsageError(f"{path}: `command:` must name the recipe, such as bft-sft")
    keep = raw.get("keep", "all")
    if keep not in KEEP:
        raise UsageError(f"{path}: `keep:` must be {' or '.join(KEEP)}, got {keep!r}")
    axes = {str(axis): _axis(path, str(axis), value) for axis, value in _mapping(path, raw.get("axes"), "axes").items()}
    if not axes:
        raise UsageError(f"{path}: `axes:` has none")
    set_by = {flag: axis for axis, labels in axes.items() for flags in labels.values() for flag in flags}
    base = _flags(path, "base", raw.get("base") or {})
    for flag in changes:
        if flag in set_by:
            raise UsageError(f"--set {flag}: the axis {set_by[flag]} sets it; choose its runs with --only")
    for flag in {**base, **set_by, **changes}:
        if flag in BOOKKEEPING:
            raise UsageError(f"{path}: {flag} is for bft-bench to give: leave it out")
    return Grid(
        name=name,
        command=command.strip(),
        launch=_launch(path, str(raw.get("launch") or "")),
        env={str(key): str(value) for key, value in _mapping(path, raw.get("env") or {}, "env").items()},
        keep=keep,
        unchecked=tuple(_list(raw.get("unchecked") or [])),
        base={**base, **changes},
        axes=axes,
        exclude=tuple(_labels(path, "exclude", rule, axes) for rule in _list(raw.get("exclude") or [])),
        stages={
            str(stage): _labels(path, f"stages: {stage}", rule or {}, axes)
            for stage, rule in _mapping(path, raw.get("stages") or {}, "stages").items()
        },
    )


def _launch(path: str, launch: str) -> tuple[str, ...]:
    with as_usage_error(f"{path}: launch: ", ValueError):
        return tuple(shlex.split(launch))


def _axis(path: str, axis: str, value: Any) -> dict[Value, Flags]:
    """A list gives the flag of the axis' name its values; a mapping names combinations of flags."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", axis):
        raise UsageError(f"{path}: axes: {axis!r} must be lower-case letters, digits and _")
    if isinstance(value, Mapping):
        labels: dict[Value, Flags] = {
            label: _flags(path, f"axes: {axis}: {label}", flags or {}) for label, flags in value.items()
        }
    elif isinstance(value, list):
        labels = {label: {axis: label} for label in value if isinstance(label, str | int | float)}
        if len(labels) < len(value):
            raise UsageError(f"{path}: axes: {axis}: every value must be a text or a number, and stand there once")
    else:
        raise UsageError(f"{path}: axes: {axis} must be a list of values or a mapping of names to flags")
    if not labels:
        raise UsageError(f"{path}: axes: {axis} is empty")
    for label in labels:
        if not _LABEL.fullmatch(_text(label)):
            raise UsageError(
                f"{path}: axes: {axis}: {label!r} cannot be part of a run's name: use letters, digits, . + -"
            )
    return labels


def _labels(path: str, place: str, rule: Any, axes: Mapping[str, Mapping[Value, Flags]]) -> dict[str, list[Value]]:
    chosen = {}
    for axis, values in _mapping(path, rule, place).items():
        _known(f"{path}: {place}", "axis", axis, [*axes])
        chosen[axis] = _list(values)
        for value in chosen[axis]:
            if value not in axes[axis]:
                _known(f"{path}: {place}", axis, str(value), [str(label) for label in axes[axis]])
                raise UsageError(f"{path}: {place}: {axis} {value!r} is written otherwise under axes")
    return chosen


def _flags(path: str, place: str, value: Any) -> Flags:
    return {str(flag).replace("-", "_"): item for flag, item in _mapping(path, value, place).items()}


def _mapping(path: str, value: Any, what: str) -> dict[Any, Any]:
    if not isinstance(value, Mapping):
        raise UsageError(f"{path}: {what} must be lines of `name: value`, found {type(value).__name__}")
    return dict(value)


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _known(path: str, what: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        close = difflib.get_close_matches(str(name), known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there is {', '.join(known)}"
        raise UsageError(f"{path}: unknown {what} {name!r}, {hint}")


def _text(label: Value) -> str:
    """A label as it stands in a folder's name; 0 and 0.0 are the same rate."""
    return f"{label:g}" if isinstance(label, float) else str(label)


def parse_name(name: str) -> dict[str, Value]:
    """The labels in a run's name, numbers as numbers: "bft_noise=0.3_seed=1" is arm bft, noise .3, seed 1.

    Raises:
        UsageError: It is no run's name.
    """
    arm, _, rest = name.partition("_") if "=" not in name.partition("_")[0] else ("", "", name)
    pairs = re.findall(r"([a-z][a-z0-9_]*)=([A-Za-z0-9.+-]+)(?:_|$)", rest)
    whole = "_".join([*([arm] if arm else []), *(f"{axis}={label}" for axis, label in pairs)])
    if not name or whole != name or not _LABEL.fullmatch(arm or "none"):
        raise UsageError(f"{name!r} is no run's name: it should read like bft_noise=0.3_seed=1")
    labels: dict[str, Value] = {ARM: arm} if arm else {}
    return labels | {axis: _number(label) for axis, label in pairs}


def _number(text: str) -> Value:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def to_argv(flags: Mapping[str, Any]) -> list[str]:
    """Flags as words of a command line."""
    words: list[str] = []
    for flag, value in flags.items():
        words.append(f"--{flag}")
        words += _words(value)
    return words


def _words(value: Any) -> list[str]:
    if isinstance(value, bool):
        return [str(value).lower()]
    if isinstance(value, list | tuple):
        return [word for item in value for word in _words(item)]
    return [json.dumps(value) if isinstance(value, Mapping) else str(value)]


def flags_of(command: str) -> dict[str, list[str]]:
    """The flags of a recorded command line, each with its words; a flag that stands alone means true."""
    flags: dict[str, list[str]] = {}
    current: list[str] | None = None
    for word in shlex.split(command):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            current = flags[name.replace("-", "_")] = [value] if equals else []
        elif current is not None:
            current.append(word)
    return {name: words or ["true"] for name, words in flags.items()}


def differences(run: Run, command: str, unchecked: Sequence[str] = ()) -> list[str]:
    """What a recorded command says otherwise than the grid: one text a flag, [] when it is this run.

    Args:
        run: As the grid has it.
        command: As results.json has it.
        unchecked: Flags that may differ, beside those of `BOOKKEEPING` and `LOOKED_AT`.
    """
    asked, done = {name: _words(value) for name, value in run.flags.items()}, flags_of(command)
    found = []
    for name in dict.fromkeys([*asked, *done]):
        if name in (*BOOKKEEPING, *LOOKED_AT, *unchecked):
            continue
        if name not in done:
            found.append(f"{name} {' '.join(asked[name])} in the grid, not given in the run")
        elif name not in asked:
            found.append(f"{name} {' '.join(done[name])} in the run, not in the grid")
        elif not _same(asked[name], done[name]):
            found.append(f"{name} {' '.join(asked[name])} in the grid, {' '.join(done[name])} in the run")
    return found


def _same(first: Sequence[str], second: Sequence[str]) -> bool:
    return len(first) == len(second) and all(map(_same_word, first, second))


def _same_word(first: str, second: str) -> bool:
    if first == second or (first.lower() == second.lower() and first.lower() in ("true", "false")):
        return True
    try:
        return float(first) == float(second)
    except ValueError:
        return Path(first).exists() and Path(second).exists() and Path(first).samefile(second)
