"""Turns the junit XML of test runs into docs/compatibility.md: what works, what refuses, what was not tested, by test name.

    make compatibility

runs the tests on both ends of the supported versions and writes the page; CI compares the page with its own runs by

    python tests/compatibility.py --check newest=build/junit/newest.xml oldest=build/junit/oldest.xml

Each file gets a column. A test that is about a refusal says so in its name (refused, complains, is named, error).
"""

from __future__ import annotations

import argparse
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = REPOSITORY / "docs" / "compatibility.md"
CONSTRAINTS = {"newest": "constraints.txt", "oldest": "constraints-oldest.txt"}
REFUSAL = re.compile(
    r"^(?!the_server_).*((?<!not_)refuse|refusal_of|complain|_error$|_cannot_|_fail_as_|is_named$|never_silently)"
)
ROW = re.compile(r"^\| .* \| `(test_\w+\.py::test_\w+)` \|$")
AREAS = {
    "Generation and caches": ("generation", "decoding", "reliability"),
    "Attention backends, packing and compiling": ("backends", "packing", "compile"),
    "Training": ("training", "resuming", "checkpointing", "sft", "sft_cli", "trainer", "callbacks"),
    "Several processes": ("distributed",),
    "PEFT": ("peft", "adapters", "adapter_folders", "guards"),
    "Saving, loading and the Hub": ("hub", "hub_server", "cards", "old_checkpoints", "offload"),
    "Other engines": ("other_engines",),
    "Model families": ("families", "devices"),
    "Patching": ("patching", "calibration", "tracing", "weights", "precision_dtypes"),
}


@dataclass
class Test:
    """One test function, its parametrisations together.

    Attributes:
        name: without "test_".
        outcomes: by run, how many cases passed, failed or were skipped.
        reasons: why cases were skipped.
        cases: by run, the outcome of every case by its parameters' id.
    """

    name: str
    outcomes: dict[str, dict[str, int]] = field(default_factory=dict)
    reasons: set[str] = field(default_factory=set)
    cases: dict[str, dict[str, str]] = field(default_factory=dict)

    def verdict(self, run: str) -> str:
        """works, refuses, FAILS or untested."""
        counts = self.outcomes.get(run, {})
        if counts.get("failed"):
            return f"FAILS ({counts['failed']} of {sum(counts.values())})"
        if not counts.get("passed"):
            return "untested"
        return "refuses" if REFUSAL.search(self.name) else "works"


def read(files: Mapping[str, Path]) -> dict[str, dict[str, Test]]:
    """Tests by module and function, from junit XML files by the name of their run."""
    modules: dict[str, dict[str, Test]] = {}
    for run, path in files.items():
        for case in ElementTree.parse(path).iter("testcase"):
            match = re.search(r"(?:^|\.)test_(\w+)", case.get("classname", ""))
            function, _, parameters = case.get("name", "").removesuffix("]").partition("[")
            if match is None or not function.startswith("test_"):
                continue
            name = function.removeprefix("test_")
            test = modules.setdefault(match[1], {}).setdefault(name, Test(name))
            counts = test.outcomes.setdefault(run, {})
            outcome = "passed"
            if case.find("failure") is not None or case.find("error") is not None:
                outcome = "failed"
            elif (skipped := case.find("skipped")) is not None:
                outcome = "skipped"
                test.reasons.add(skipped.get("message", "").partition("\n")[0].removeprefix("Skipped: "))
            counts[outcome] = counts.get(outcome, 0) + 1
            test.cases.setdefault(run, {})[parameters] = outcome
    return modules


def matrix(tests: Mapping[str, Test], runs: Sequence[str]) -> list[str]:
    """Tests by model family: works where every case of the family that ran passed in every run, else the runs in which they did.

    The families are what tests with one parameter have in common: every line of the matrix is run for all of them.
    """
    ids = [
        {one for run in runs for one in test.cases.get(run, {}) if one and "-" not in one} for test in tests.values()
    ]
    families = sorted(max(ids, key=len, default=set()))
    rows = []
    for test in tests.values():
        cells = []
        ran = {part for run in runs for one in test.cases.get(run, {}) for part in one.split("-")}
        every = ran.issuperset(families)
        for family in families:
            found = {
                run: [outcome for one, outcome in test.cases.get(run, {}).items() if family in one.split("-")]
                for run in runs
            }
            passed = [run for run in runs if set(found[run]) - {"skipped"} == {"passed"}]
            cells.append("works" if passed == list(runs) else ", ".join(passed) or "no")
        if every:
            rows.append(f"| {test.name.replace('_', ' ')} | {' | '.join(cells)} |")
    if not rows:
        return []
    return [f"| | {' | '.join(families)} |", f"|---|{'---|' * len(families)}", *rows]


def table(tests: Iterable[tuple[str, Test]], runs: Sequence[str]) -> list[str]:
    """Rows of Markdown: what, the verdict of every run, where the test stands."""
    lines = [f"| what | {' | '.join(runs)} | test |", f"|---|{'---|' * len(runs)}---|"]
    for module, test in tests:
        verdicts = [test.verdict(run) for run in runs]
        what = test.name.replace("_", " ")
        if "untested" in verdicts and test.reasons:
            what += f" ({'; '.join(sorted(reason.replace('|', '/') for reason in test.reasons))})"
        lines.append(f"| {what} | {' | '.join(verdicts)} | `test_{module}.py::test_{test.name}` |")
    return lines


def versions(run: str) -> str:
    """What a run had installed, by its constraints file; empty for a run of another name."""
    if run not in CONSTRAINTS:
        return ""
    lines = (REPOSITORY / CONSTRAINTS[run]).read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    shown = ("torch", "transformers", "trl", "peft", "accelerate", "datasets")
    return f"*{run}*: {', '.join(f'{name} {pins[name]}' for name in shown)}."


def report(files: Mapping[str, Path]) -> str:
    """The page."""
    modules, runs = read(files), list(files)
    listed = [name for names in AREAS.values() for name in names]
    everything = [test for name in listed for test in modules.get(name, {}).values()]
    lines = [
        "# What works with what",
        "",
        "Written by `make compatibility` from runs of the tests: edit those, not this page. A row is a test. *works* and *refuses* "
        "passed, a refusal being an error that says what to do instead; *untested* was skipped, for the reason given.",
        "",
        *(line for run in runs if (line := versions(run))),
        "",
        f"| | {' | '.join(runs)} |",
        f"|---|{'---|' * len(runs)}",
    ]
    for kind in ("works", "refuses", "untested", "FAILS"):
        counts = [sum(test.verdict(run).startswith(kind) for test in everything) for run in runs]
        if kind != "FAILS" or any(counts):
            lines.append(f"| {kind} | {' | '.join(map(str, counts))} |")
    for area, names in AREAS.items():
        rows = [(name, test) for name in names for test in modules.get(name, {}).values()]
        if rows:
            lines += ["", f"## {area}", ""]
            if grid := matrix(modules.get("families", {}), runs) if "families" in names else []:
                lines += [*grid, ""]
            lines += table(rows, runs)
    return "\n".join(lines) + "\n"


def verdicts(page: str) -> dict[str, list[str]]:
    """The verdicts of a page's rows by test: works, refuses, untested or FAILS, one for each run."""
    rows = (line for line in page.splitlines() if ROW.match(line))
    return {ROW.match(line)[1]: [cell.split()[0] for cell in line.split(" | ")[1:-1]] for line in rows}  # type: ignore[index]


def differences(page: str, fresh: str) -> tuple[list[str], list[str]]:
    """What a page says otherwise than a fresh one.

    Returns:
        Tests with another verdict or a failure, and tests that only one of the pages has.
    """
    ours, theirs = verdicts(page), verdicts(fresh)
    other = [
        f"{test}: {', '.join(theirs[test])} (the page: {', '.join(ours.get(test, ['nothing']))})"
        for test in theirs
        if "FAILS" in theirs[test] or (test in ours and ours[test] != theirs[test])
    ]
    return other, sorted(ours.keys() ^ theirs.keys())


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page, or with --check compare it; the exit status is 1 when a test failed or a verdict differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="NAME=FILE", help="junit XML, with a heading for its column")
    parser.add_argument("--check", action="store_true", help="compare with docs/compatibility.md, and write nothing")
    arguments = parser.parse_args(argv)
    files = {name: Path(path) for name, _, path in (given.rpartition("=") for given in arguments.files)}
    fresh = report(files)
    if not arguments.check:
        PAGE.write_text(fresh, encoding="utf-8")
        print(f"Written to {PAGE}")
        return int("FAILS" in fresh)
    if not PAGE.is_file():
        print("docs/compatibility.md is not written yet: make compatibility")
        return int("FAILS" in fresh)
    page = PAGE.read_text(encoding="utf-8")
    other, unmatched = differences(page, fresh)
    for line in other:
        print(line)
    if unmatched:
        print(
            f"{len(unmatched)} tests are new or gone since the page was written: make compatibility",
            *unmatched,
            sep="\n  ",
        )
    print("docs/compatibility.md", "differs: make compatibility" if other else "says what these runs say")
    return int(bool(other))


if __name__ == "__main__":
    sys.exit(main())
