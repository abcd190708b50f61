"""The page of what works with what: read from junit XML, compared with a fresh run."""

from pathlib import Path

import compatibility
import pytest

CASE = '<testcase classname="tests.test_{module}" name="{name}">{inside}</testcase>'


def junit(folder: Path, **cases: str) -> Path:
    """A run of tests of hub by name and what junit writes inside."""
    written = [CASE.format(module="hub", name=name, inside=inside) for name, inside in cases.items()]
    written.append(CASE.format(module="filter", name="test_elsewhere", inside="<failure/>"))  # in no area of the page
    path = folder / f"{len(list(folder.iterdir()))}.xml"
    path.write_text(f"<testsuites><testsuite>{''.join(written)}</testsuite></testsuites>")
    return path


@pytest.fixture
def page(tmp_path: Path) -> str:
    skipped = '<skipped message="Skipped: no such package | here"/>'
    newest = junit(
        tmp_path, **{"test_saves[a]": "", "test_saves[b]": skipped, "test_a_lie_is_refused": "", "test_x": skipped}
    )
    oldest = junit(tmp_path, **{"test_saves[a]": "<failure/>", "test_saves[b]": "", "test_a_lie_is_refused": skipped})
    return compatibility.report({"newest": newest, "oldest": oldest})


def test_rows_say_what_each_run_gave(page: str) -> None:
    assert "| saves | works | FAILS (1 of 2) | `test_hub.py::test_saves` |" in page
    assert "| x (no such package / here) | untested | untested | `test_hub.py::test_x` |" in page
    assert "| works | 1 | 0 |" in page and "| refuses | 1 | 0 |" in page and "| FAILS | 0 | 1 |" in page
    assert "elsewhere" not in page and "*oldest*: torch" in page
    assert compatibility.verdicts(page) == {
        "test_hub.py::test_saves": ["works", "FAILS"],
        "test_hub.py::test_a_lie_is_refused": ["refuses", "untested"],
        "test_hub.py::test_x": ["untested", "untested"],
    }


def test_a_verdict_that_changed_or_failed_is_a_difference_and_a_new_test_is_told(page: str) -> None:
    good = page.replace("FAILS (1 of 2)", "works")
    assert compatibility.differences(good, good) == ([], [])
    assert compatibility.differences(page, page)[0] == [
        "test_hub.py::test_saves: works, FAILS (the page: works, FAILS)"
    ]
    changed = good.replace("| works | works |", "| works | untested |")
    assert compatibility.differences(good, changed)[0] == [
        "test_hub.py::test_saves: works, untested (the page: works, works)"
    ]
    fewer = "\n".join(line for line in good.splitlines() if "::test_x`" not in line)
    assert compatibility.differences(fewer, good) == ([], ["test_hub.py::test_x"])


def test_check_exits_by_the_verdicts_and_writes_nothing(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compatibility, "PAGE", tmp_path / "page.md")
    run = f"newest={junit(tmp_path, test_saves='')}"
    assert compatibility.main([run]) == 0 and (tmp_path / "page.md").exists()
    assert compatibility.main(["--check", run]) == 0
    (tmp_path / "page.md").write_text((tmp_path / "page.md").read_text().replace("| works | `", "| untested | `"))
    written = (tmp_path / "page.md").read_text()
    assert compatibility.main(["--check", run]) == 1 and "make compatibility" in capsys.readouterr().out
    assert (tmp_path / "page.md").read_text() == written


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("unknown_backend_is_refused", "refuses"),
        ("on_a_plain_base_it_complains", "refuses"),
        ("zero_layers_are_an_error", "refuses"),
        ("evaluation_under_no_grad_is_not_refused", "works"),
        ("rejected_drafts_leave_no_trace", "works"),
        ("a_step_that_fails_leaves_the_next_training_clean", "works"),
        ("the_server_refuses_what_the_hub_refuses", "works"),
    ],
)
def test_names_tell_a_refusal(name: str, verdict: str) -> None:
    assert compatibility.Test(name, {"run": {"passed": 1}}).verdict("run") == verdict


def test_families_stand_beside_each_other(tmp_path: Path) -> None:
    """A row for every test that is run for all families; two parameters' ids are told apart."""
    cases = {f"test_saves[{family}]": "" for family in ("llama", "gemma", "phi3")}
    cases |= {f"test_agrees[{family}-sdpa]": "" for family in ("llama", "phi3")}
    cases |= {f"test_agrees[{family}-eager]": "" for family in ("llama", "gemma", "phi3")}
    cases |= {"test_agrees[gemma-sdpa]": "<skipped message='none'/>", "test_alone[llama]": "", "test_alone[phi3]": ""}
    tests = [compatibility.read({"newest": junit(tmp_path, **cases)})["hub"]]
    cases["test_saves[gemma]"] = "<failure/>"
    tests.append(compatibility.read({"newest": junit(tmp_path, **cases)})["hub"])
    good, bad = (compatibility.matrix(one, ["newest"]) for one in tests)
    assert good[0] == "| | gemma | llama | phi3 |"
    assert good[2:] == ["| saves | works | works | works |", "| agrees | works | works | works |"]
    assert bad[2:] == ["| saves | no | works | works |", "| agrees | works | works | works |"]
