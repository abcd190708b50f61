"""The folder of one run: whether it is finished, of this grid, failed or to be taken up again, and how it is started."""

import json
import os
import re
import shlex
import shutil
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from .command import UsageError
from .grid import Grid, Run, differences, to_argv
from .results import write_json

RESULTS = "results.json"
QUESTIONS = "predictions.jsonl"
RANKS = "per_user.csv.gz"
LOG = "log.txt"
EPOCH = "training.pt"  # of bft-rec, which keeps the last epoch and no more
RECORD = "bench.json"
LOCK = "bench.lock"
KEPT = (RESULTS, QUESTIONS, RANKS, LOG, RECORD, LOCK)
RECORD_FORMAT = 1
LAST_LINES = 8

Status = Literal["finished", "changed", "failed", "open"]


@dataclass(frozen=True)
class State:
    """What a run's folder says.

    Attributes:
        status: "finished"; "changed", finished with other flags than the grid's; "failed", as bft-bench recorded; "open",
            not begun or killed.
        changes: What differs, of a changed run.
        record: What bft-bench wrote down of it, {} for a run it has not seen.
        seconds: How long the finished run took, where it says so.
    """

    status: Status
    changes: tuple[str, ...]
    record: dict[str, Any]
    seconds: float | None

    @property
    def attempts(self) -> int:
        """How often bft-bench has started it."""
        return int(self.record.get("attempts", 0))


def state(folder: Path, run: Run, grid: Grid) -> State:
    """Look into a run's folder, which need not exist.

    Raises:
        UsageError: A results.json that cannot be read, or does not say which command made it.
    """
    record = read_record(folder)
    try:
        results = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
        command, seconds = results["command"], (results.get("seconds") or {}).get("total")
    except FileNotFoundError:
        return State("failed" if record.get("status") == "failed" else "open", (), record, None)
    except (ValueError, KeyError, TypeError, AttributeError, OSError):
        raise UsageError(f"{folder / RESULTS} is no result of a run: remove it to have the run done again") from None
    changes = tuple(differences(run, command, grid.unchecked))
    # What is left of an attempt that failed is the result of the one before it.
    failed = bool(changes) and record.get("status") == "failed"
    status: Status = "failed" if failed else "changed" if changes else "finished"
    return State(status, changes, record, record.get("seconds") or seconds)


def read_record(folder: Path) -> dict[str, Any]:
    """What bft-bench wrote down of a run; {} where there is nothing or it cannot be read."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Write it down, at once and whole."""
    write_json(folder / RECORD, {"format": RECORD_FORMAT, **record})


def last_checkpoint(folder: Path) -> Path | None:
    """The last checkpoint that was written to its end; a run killed while it saved has a later one that was not.

    The trainer's state is the last file of a checkpoint.
    """
    found = []
    for path in folder.glob("checkpoint-*/trainer_state.json"):
        step = re.fullmatch(r"checkpoint-(\d+)", path.parent.name)
        try:
            json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if step:
            found.append((int(step[1]), path.parent))
    return max(found)[1] if found else None


def last_lines(log: Path) -> list[str]:
    """The end of a log; of a progress bar, which overwrites itself, its last state."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, os.path.getsize(log) - 20_000))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    lines = [line.split("\r")[-1].rstrip() or line.rstrip().split("\r")[-1] for line in text.split("\n")]
    return [line[:300] for line in lines if line.strip()][-LAST_LINES:]


def resumption(folder: Path, seen: State) -> list[str]:
    """The flag by which a recipe goes on with what a killed run left; [] to begin afresh.

    Other flags ask for another run. And where going on has failed, what there was to go on from may be why.
    """
    if seen.status == "changed" or (seen.status == "failed" and seen.record.get("resumed")):
        return []
    if (folder / EPOCH).is_file():
        return ["--resume", "true"]
    checkpoint = last_checkpoint(folder)
    return ["--resume_from_checkpoint", str(checkpoint)] if checkpoint else []


def command(grid: Grid, run: Run, folder: Path, resumption: list[str]) -> list[str]:
    """The command line that does a run.

    Args:
        grid: Names the recipe and what launches it.
        run: Of the grid.
        folder: The run's.
        resumption: From the function of that name.
    """
    used = folder.is_dir() and any(folder.iterdir())
    start = resumption or (["--overwrite", "true"] if used else [])
    return [*launcher(grid), *to_argv(run.flags), "--output_dir", str(folder), *start]


def launcher(grid: Grid) -> list[str]:
    """What stands in front of the flags.

    `accelerate launch` and its like take a script or a module and no console script, so of a command that Python installed
    they are given the module.
    """
    if not grid.launch:
        return shlex.split(grid.command)
    scripts = metadata.entry_points(group="console_scripts", name=grid.command)
    module = next(iter(scripts)).module if scripts else None
    return [*grid.launch, "-m", module] if module else [*grid.launch, *shlex.split(grid.command)]


def search_path() -> str:
    """PATH with this Python's folder in front: a recipe of the same environment is found though that is not activated."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def check_command(grid: Grid) -> None:
    """Refuse a command that is not installed.

    Raises:
        UsageError: It is neither beside this Python nor on PATH.
    """
    program = launcher(grid)[0]
    if shutil.which(program, path=search_path()) is None:
        raise UsageError(
            f"{grid.name}: no command {program!r} beside this Python or on PATH: install it or mend `command:`"
        )


def shell_line(grid: Grid, run: Run, folder: Path, seen: State) -> str:
    """The command as a shell takes it."""
    words = command(grid, run, folder, resumption(folder, seen))
    return shlex.join(["env", *(f"{key}={value}" for key, value in grid.env.items()), *words] if grid.env else words)


def outlives(folder: Path, record: Mapping[str, Any], now: float, lease: float) -> str | None:
    """Whether a process goes on with a run though the bft-bench that started it is gone, and which.

    Args:
        folder: The run's.
        record: Its record, of an attempt that was not ended.
        now: The time by the clock of the folder's file system.
        lease: Seconds without a word in the log after which a process on another machine counts as gone.
    """
    import psutil

    if record.get("status") != "running":
        return None
    if record.get("host") == socket.gethostname():
        try:
            process = psutil.Process(record["pid"])
            same = abs(process.create_time() - record["pid_created"]) < 2 and process.status() != psutil.STATUS_ZOMBIE
        except (psutil.Error, KeyError, TypeError, ValueError):
            return None
        return f"process {record['pid']}" if same else None
    try:
        silent = now - os.path.getmtime(folder / LOG)
    except OSError:
        return None
    return f"process {record.get('pid')} on {record.get('host')}" if silent < lease else None


def drop_big_files(folder: Path) -> None:
    """Remove what a finished run left, weights and checkpoints, but for results, questions, log and record."""
    for path in folder.iterdir():
        if path.name in KEPT:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
