"""docs/reports.md names tests that exist, and every public report that a test cites."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
PAGE = TESTS.parent / "docs" / "reports.md"
if not PAGE.is_file():
    pytest.skip("no docs/ beside tests/, as in the sdist", allow_module_level=True)
ROWS = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| [")]
REPORT = r"(\w[\w-]*) (?:PR )?#(\d+)"


def functions(file: str) -> set[str]:
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", ROWS, ids=[re.search(r"\[(.*?)\]", row)[1] for row in ROWS])
def test_every_report_names_tests_that_exist_and_says_how_they_fare(row: str) -> None:
    _, reports, wrong, here, tests, _ = row.split("|")
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", tests)
    assert named and wrong.strip() and re.match(r" (passes|mended: )", here)
    for file, function in named:
        assert function in functions(file), f"{file} has no {function}"
    for (name, number), address in zip(
        re.findall(REPORT, reports), re.findall(r"\((https://github\.com/\S+)\)", reports), strict=True
    ):
        assert address.endswith(f"/{number}") and name.lower().partition("-")[0] in address.lower()


def test_every_report_is_listed_once() -> None:
    counts = Counter(report for row in ROWS for report in re.findall(r"\[" + REPORT + r"\]", row))
    assert set(counts.values()) == {1} and len(counts) == 33


def test_reports_that_tests_cite_are_listed() -> None:
    listed = set(re.findall(r"\[" + REPORT + r"\]", "\n".join(ROWS)))
    projects = {name for name, _ in listed}
    for path in TESTS.glob("test_*.py"):
        text = path.read_text(encoding="utf-8")
        # "Liger #242, #315 and PR #834" cites three.
        for project, numbers in re.findall(r"\b([\w-]+) ((?:(?:, | and )?(?:PR )?#\d+)+)", text):
            if project in projects:
                for number in re.findall(r"#(\d+)", numbers):
                    assert (project, number) in listed, f"{path.name} cites {project} #{number}"
