"""`bft-bench`: a grid of runs, each a process, and the report on what they found.

The runs of a grid, those that are finished left out; killed ones go on where they were:

    bft-bench smoke.yaml --set model_name_or_path=../shared/data/stories260K --jobs 2

The same runs as shell commands, for a scheduler or a pair of hands:

    bft-bench smoke.yaml --set model_name_or_path=../shared/data/stories260K --list

Tables, figures and intervals from their folders, and the runs made small enough for a repository:

    bft-bench report outputs/smoke --baseline sft
    bft-bench pack outputs/smoke docs/results/smoke

A grid is a YAML file: `command:` a recipe, `base:` flags of every run, `axes:` lists and named sets of flags whose every
combination is a run, and optionally `exclude:`, `stages:`, `launch:`, `env:`, `keep:` and `unchecked:` (docs/bench.md).
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .command import OneLineParser, UsageError, console_script
from .grid import KEEP, Grid, Run, read_grid
from .runner import Runner, duration
from .runs import check_command, shell_line, state


def parser() -> argparse.ArgumentParser:
    """The flags of `bft-bench GRID`."""
    result = OneLineParser(
        prog="bft-bench",
        usage="bft-bench GRID [--FLAG VALUE ...]\n       bft-bench report ROOT... [--FLAG VALUE ...]\n"
        "       bft-bench pack ROOT FOLDER",
        allow_abbrev=False,
        description="Do the runs of a grid, each in a process of its own; finished ones are left alone, killed ones go on.",
        epilog="Exit status: 0, 1 if a run failed, 2 if the command cannot run as given, 130 if it was stopped. "
        "bft-bench report --help and bft-bench pack --help tell of the other two.",
    )
    result.add_argument("grid", metavar="GRID", help="A YAML file, yours or one of the package's.")
    result.add_argument("--root", metavar="FOLDER", help="Where every run has a folder. Default outputs/<grid>.")
    result.add_argument(
        "--set", action="append", default=[], metavar="FLAG=VALUE", help="Change a base flag; may be given repeatedly."
    )
    result.add_argument("--stage", action="append", metavar="NAME", help="Only this stage of the grid; repeatable.")
    result.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="PATTERN",
        help="Only runs of such a name, as 'bft_*'; repeatable.",
    )
    result.add_argument(
        "--list", action="store_true", help="Print what is to be done as shell commands, and do nothing."
    )
    result.add_argument(
        "--jobs", type=_positive, metavar="N", help="Runs at once. Default 1, or one for each of --gpus."
    )
    result.add_argument(
        "--threads",
        type=_positive,
        metavar="N",
        help="Threads of each run. Default: OMP_NUM_THREADS, or the cores divided by --jobs.",
    )
    result.add_argument("--gpus", metavar="0,1,...", help="CUDA devices, one for each run at once.")
    result.add_argument(
        "--changed",
        choices=("refuse", "rerun", "keep"),
        default="refuse",
        help="What to do with finished runs whose flags are not the grid's any more. Default refuse.",
    )
    result.add_argument("--skip-failed", action="store_true", help="Do not try failed runs again.")
    result.add_argument(
        "--keep", choices=KEEP, help="Of finished runs: all, or only results, log and questions. Default: the grid's."
    )
    return result


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text}")
    return int(text)


@console_script("bft-bench", extra="bench", interrupted="interrupted; the same command goes on from here")
def main(argv: list[str]) -> int:
    """Run the command on these words, the program's name left out."""
    if argv[:1] == ["report"]:
        from .report import main as report

        return report(argv[1:])
    if argv[:1] == ["pack"]:
        from .records import main as pack

        return pack(argv[1:])
    return _bench(parser().parse_args(argv))


def _bench(options: argparse.Namespace) -> int:
    grid = read_grid(options.grid, options.set)
    root = Path(options.root or Path("outputs", grid.name)).expanduser()
    if root.exists() and not root.is_dir():
        raise UsageError(f"--root {root} is a file: give a folder")
    runs = grid.runs(options.stage, options.only)
    _refuse_changed(grid, runs, root, options.changed)
    if options.list:
        _list(grid, runs, root, options)
        return 0
    check_command(grid)
    gpus = [gpu.strip() for gpu in options.gpus.split(",")] if options.gpus else []
    jobs = options.jobs or len(gpus) or 1
    if gpus and jobs > len(gpus):
        raise UsageError(f"--jobs {jobs} needs as many --gpus, got {options.gpus}")
    import filelock  # noqa: F401 - missing, it should be missed before the first run
    import psutil  # noqa: F401

    with _progress(len(runs)) as (say, watch):
        runner = Runner(
            grid,
            runs,
            root,
            jobs=jobs,
            threads=options.threads,
            gpus=gpus,
            changed=options.changed,
            skip_failed=options.skip_failed,
            keep=options.keep or grid.keep,
            say=say,
            watch=watch,
        )
        done = len(runner.outcome)
        say(f"{grid.name}: {len(runs)} runs in {root}, {done} of them done, {jobs} at once")
        outcome = runner.run()
    counts = {kind: sum(value == kind for value in outcome.values()) for kind in ("finished", "failed", "elsewhere")}
    print(", ".join(f"{count} {kind}" for kind, count in counts.items() if count), flush=True)
    failed = [name for name, value in outcome.items() if value == "failed"]
    if failed:
        print(f"bft-bench: failed: {', '.join(failed)} (log.txt and bench.json in its folder say why)", file=sys.stderr)
    return 1 if failed else 0


def _refuse_changed(grid: Grid, runs: Sequence[Run], root: Path, policy: str) -> None:
    """Speak up when finished runs are not what the grid asks for any more.

    Raises:
        UsageError: There are such and `policy` is "refuse".
    """
    changed = [(run, seen) for run in runs if (seen := state(root / run.name, run, grid)).status == "changed"]
    if not changed:
        return
    run, seen = changed[0]
    others = f", and {len(changed) - 1} more" if len(changed) > 1 else ""
    what = f"{run.name} was done with other flags ({'; '.join(seen.changes)}){others}"
    if policy == "refuse":
        raise UsageError(f"{what}: --changed rerun does them again, --changed keep takes them as they are")
    print(f"bft-bench: {what}: {'to be done again' if policy == 'rerun' else 'kept'}", file=sys.stderr)


def _list(grid: Grid, runs: Sequence[Run], root: Path, options: argparse.Namespace) -> None:
    for run in runs:
        seen = state(root / run.name, run, grid)
        done = seen.status == "finished" or (seen.status == "changed" and options.changed == "keep")
        if not done and not (seen.status == "failed" and options.skip_failed):
            print(shell_line(grid, run, root / run.name, seen))


@contextmanager
def _progress(total: int) -> Iterator[tuple[Any, Any]]:
    """Give what prints a line, and what draws the bar on a terminal: the runs' share, and what is running."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = Console(soft_wrap=True)
    bar = Progress(
        BarColumn(20), MofNCompleteColumn(), TextColumn("{task.description}"), console=console, transient=True
    )
    task = bar.add_task("", total=total)

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False)

    def watch(runner: Runner) -> None:
        left = runner.remaining()
        names = ", ".join(job.run.name for job in runner.running)
        about = f"about {duration(left)} left, " if left is not None else ""
        bar.update(task, completed=len(runner.outcome), description=f"{about}{names}")

    if not console.is_terminal:
        yield say, lambda runner: None
        return
    with bar:
        yield say, watch


if __name__ == "__main__":
    sys.exit(main())
