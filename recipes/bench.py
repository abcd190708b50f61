"""`bft-bench`: a grid of runs, each a process, and the report on what they found.

The runs of a grid as shell commands, those that are finished left out:

    bft-bench squad_noise.yaml --stage 1 --list
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from .arguments import UsageError, one_line
from .grid import read_grid, to_argv


class _OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (bft-bench --help lists the flags)")


def parser() -> argparse.ArgumentParser:
    """The flags of `bft-bench GRID`."""
    result = _OneLineParser(prog="bft-bench", allow_abbrev=False)
    result.add_argument("grid", help="A YAML file, of yours or of the package.")
    result.add_argument("--root", help="Folder of the runs' folders. Default outputs/<grid>.")
    result.add_argument("--set", action="append", default=[], metavar="FLAG=VALUE", help="Change a base flag.")
    result.add_argument("--stage", action="append", help="Only this stage's runs; may be given several times.")
    result.add_argument("--only", action="append", default=[], metavar="PATTERN", help="Only runs whose name fits.")
    result.add_argument("--list", action="store_true", help="Print the runs as commands.")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and give its exit status."""
    try:
        options = parser().parse_args(argv)
        grid = read_grid(options.grid, options.set)
        root = Path(options.root or Path("outputs", grid.name))
        for run in grid.runs(options.stage, options.only):
            if not (root / run.name / "results.json").exists():
                print(shlex.join([grid.command, *to_argv(run.flags), "--output_dir", str(root / run.name)]))
    except UsageError as error:
        print(f"bft-bench: {one_line(error)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
