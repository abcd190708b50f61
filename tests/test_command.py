"""What the commands share: one line and an exit status for whatever goes wrong, and quiet libraries."""

import logging
import warnings

import pytest

from bft_hf.recipes.command import OneLineParser, UsageError, as_usage_error, console_script, run_command, without_flag


def raising(error: BaseException):
    def body() -> None:
        raise error

    return body


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (UsageError("--noise must be\na number"), 2, "bft-x: --noise must be a number"),
        (
            ImportError("No module named 'trl'"),
            2,
            "bft-x: packages are missing, pip install 'bft-hf[sft]' brings them: No module named 'trl'",
        ),
        (KeyboardInterrupt(), 130, "bft-x: stopped"),
    ],
    ids=["usage", "import", "interrupt"],
)
def test_what_goes_wrong_is_one_line_and_a_status(error, status, line, capsys):
    assert run_command("bft-x", raising(error), extra="sft", interrupted="stopped") == status
    assert capsys.readouterr().err == line + "\n"


def test_a_console_script_reads_its_words_and_gives_a_status(monkeypatch, capsys):
    @console_script("bft-x", extra="sft", interrupted="stopped")
    def main(argv: list[str]) -> int:
        """Do it."""
        if "--bad" in argv:
            raise UsageError("no --bad here")
        return len(argv)

    monkeypatch.setattr("sys.argv", ["bft-x", "one", "two"])
    assert main() == 2 and main(["a"]) == 1 and main([]) == 0 and capsys.readouterr().err == ""
    assert main(("--bad",)) == 2 and capsys.readouterr().err == "bft-x: no --bad here\n"
    assert (main.__doc__, main.__name__, main.__module__) == ("Do it.", "main", __name__)


def test_a_status_is_handed_on_and_bugs_are_not_hidden():
    assert run_command("bft-x", lambda: None, extra="sft") == 0
    assert run_command("bft-x", lambda: 1, extra="sft") == 1
    with pytest.raises(ZeroDivisionError):
        run_command("bft-x", lambda: 1 // 0, extra="sft")


def test_of_a_machines_processes_one_speaks(capsys, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert run_command("bft-x", raising(UsageError("wrong")), extra="sft") == 2
    assert capsys.readouterr().err == ""


def test_libraries_do_not_speak_to_who_types(capsys, caplog):
    logging.getLogger("bitsandbytes").setLevel(logging.NOTSET)  # as it is outside the tests

    def body() -> None:
        warnings.warn("deprecated", FutureWarning, stacklevel=1)
        logging.getLogger("bitsandbytes.backends").warning("a kernel is missing")

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert run_command("bft-x", body, extra="sft") == 0
    assert not seen and not caplog.records and capsys.readouterr().err == ""


def test_a_parsers_error_names_the_program_and_other_errors_get_a_prefix():
    with pytest.raises(UsageError, match=r"unrecognized arguments: --y \(bft-x --help lists the flags\)"):
        OneLineParser(prog="bft-x").parse_args(["--y"])
    with pytest.raises(UsageError, match="--file: KeyError: 'a'"), as_usage_error("--file: ", KeyError):
        raise KeyError("a")


def test_a_flag_goes_with_its_value():
    assert without_flag(["--a", "1", "--out", "x", "--b", "--out=y", "--outer"], "--out") == [
        "--a",
        "1",
        "--b",
        "--outer",
    ]
