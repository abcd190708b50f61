"""Turns the junit XML of a test run into docs/compatibility.md: what works, what refuses, what was not tested, by test name.

    python -m pytest --junit-xml=build/tests.xml
    python tests/compatibility.py build/tests.xml > docs/compatibility.md

Several files may be given, such as those of the oldest and the newest versions; each gets a column. A test that is about a
refusal says so in its name (refuse, raise, complain, reject, error).
"""

from __future__ import annotations

import argparse
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

REFUSAL = re.compile(r"refus|raise|complain|reject|_error|denie|never_passes|cannot|fails?_")
AREAS = {
    "Generation and caches": ("generation", "decoding", "reliability", "smollm2"),
    "Attention backends and packing": ("backends", "packing", "compile"),
    "Training": ("training", "checkpointing", "sft", "sft_cli", "callbacks"),
    "Several processes": ("distributed",),
    "PEFT": ("peft", "adapters", "adapter_folders"),
    "Saving, loading and the Hub": ("hub", "hub_server", "cards", "old_checkpoints", "offload"),
    "Other engines": ("other_engines",),
    "Patching": ("patching", "tracing", "weights", "precision_dtypes"),
}


@dataclass
class Test:
    """One test function, its parametrisations together.

    Attributes:
        name: without "test_".
        outcomes: by run, how many cases passed, failed or were skipped.
        reasons: why cases were skipped.
    """

    name: str
    outcomes: dict[str, dict[str, int]] = field(default_factory=dict)
    reasons: set[str] = field(default_factory=set)

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
            function = case.get("name", "").partition("[")[0]
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
    return modules


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


def report(files: Mapping[str, Path]) -> str:
    """The page."""
    modules, runs = read(files), list(files)
    everything = [test for tests in modules.values() for test in tests.values()]
    lines = [
        "# What works with what",
        "",
        "Written by `tests/compatibility.py` from a run of the tests: edit those, not this page. A row is a test. *works* and "
        "*refuses* passed, a refusal being an error that says what to do instead; *untested* was skipped, for the reason given.",
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
            lines += ["", f"## {area}", "", *table(rows, runs)]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the page; the exit status is 1 when a test in it failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="[NAME=]FILE", help="junit XML, with a heading for its column")
    files = {}
    for given in parser.parse_args(argv).files:
        name, separator, path = given.rpartition("=")
        files[name if separator else Path(path).stem] = Path(path)
    text = report(files)
    sys.stdout.write(text)
    return int("FAILS" in text)


if __name__ == "__main__":
    sys.exit(main())
