"""Every script of examples/ runs, on a tiny model and on data given by its flags, and does what its first line says."""

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import make_tiny_llama
from test_questions import byte_tokenizer

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
if not EXAMPLES.is_dir():
    pytest.skip("no examples/ beside tests/, as in the sdist", allow_module_level=True)

Run = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a script in a folder of its own, on a random Llama if it takes a model, and return what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("bft_hf.noise.bm25.default_cache", lambda: tmp_path / "bm25")

    def run(name: str, *flags: str) -> str:
        script = EXAMPLES / f"{name}.py"
        if "--model" in script.read_text(encoding="utf-8"):
            tokenizer = byte_tokenizer()
            make_tiny_llama(
                vocab_size=len(tokenizer), num_hidden_layers=2, max_position_embeddings=2048
            ).save_pretrained("tiny")
            tokenizer.save_pretrained("tiny")
            flags = ("--model", "tiny", *flags)
        monkeypatch.setattr(sys, "argv", [str(script), *flags])
        runpy.run_path(str(script), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_there_is_a_test_for_each() -> None:
    tested = set(re.findall(r'\brun\("(\w+)"', Path(__file__).read_text(encoding="utf-8")))
    assert {script.stem for script in EXAMPLES.glob("*.py")} == tested
    for script in EXAMPLES.glob("*.py"):
        assert len(script.read_text(encoding="utf-8").splitlines()) <= 45, f"{script.name} is no short script any more"


def test_audit_ranks_rows_and_names_what_the_model_expected(run: Run) -> None:
    printed = run("audit")
    ranks = re.search(r"at the ranks \[(.*)\] of 24", printed)
    assert ranks and len(set(ranks[1].split(", "))) == 4 and Path("audit/audit.html").is_file()
    assert "the likeliest other is" in printed


def test_lora_comes_back_as_it_was(run: Run) -> None:
    printed = run("lora", "--steps", "2")
    wrong, labels = map(int, re.search(r"(\d+) of (\d+) labels are wrong", printed).groups())
    assert 0.2 < wrong / labels < 0.4
    assert float(printed.split("largest difference:")[1]) < 1e-4


def test_look_inside_prints_a_line_a_token_of_a_file(run: Run) -> None:
    Path("text.txt").write_text("Two seas.")
    lines = run("look_inside", "--data", "text.txt").splitlines()
    assert len(lines) == 1 + 1 + len("Two seas.")  # the heading and <s>
    assert "0.500 ( 0)" in lines[1]  # the first token sees itself alone: K = 1/(1 + 1)


def test_recommend_takes_a_file_and_a_history(run: Run) -> None:
    lines = [f"u{user} {' '.join(f'i{(user + step) % 17}' for step in range(8))}" for user in range(60)]
    Path("mine.txt").write_text("\n".join(lines) + "\n")
    answers = [
        line for line in run("recommend", "--data", "mine.txt", "--history", "i1", "i2").splitlines() if "±" in line
    ]
    assert len(answers) == 3 and all(re.match(r"i\d+: \d+%", answer) for answer in answers)


def test_reliability_acts_and_the_patch_alone_does_not(run: Run) -> None:
    printed = run("reliability", "--questions", "3")
    likelihood = dict(
        re.findall(
            r"^(plain|patched, nothing told|retriever's scores|the model's opinion|an oracle's) +answer NLL ([\d.]+)",
            printed,
            re.M,
        )
    )
    assert len(likelihood) == 5
    assert likelihood["plain"] == likelihood["patched, nothing told"]
    assert likelihood["plain"] != likelihood["an oracle's"] and likelihood["plain"] != likelihood["retriever's scores"]
