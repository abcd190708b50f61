"""docs/figures.py draws its figures from a pass of a model, here a tiny one, and the pages show the ones it draws."""

import re
import runpy
import sys
from pathlib import Path

import pytest
from conftest import make_tiny_llama
from test_questions import byte_tokenizer

DOCS = Path(__file__).resolve().parents[1] / "docs"
if not DOCS.is_dir():
    pytest.skip("no docs/ beside tests/", allow_module_level=True)


def test_figures_are_drawn_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, model = byte_tokenizer(), tmp_path / "tiny"
    shape = {"num_hidden_layers": 10, "hidden_size": 16, "intermediate_size": 16, "max_position_embeddings": 1024}
    make_tiny_llama(vocab_size=len(tokenizer), **shape).save_pretrained(model)
    tokenizer.save_pretrained(model)
    monkeypatch.setattr(sys, "argv", ["figures.py", "--model", str(model), "--output", str(tmp_path / "images")])
    with pytest.raises(SystemExit, match="^0$"):
        runpy.run_path(str(DOCS / "figures.py"), run_name="__main__")
    drawn = {file.name for file in (tmp_path / "images").iterdir()}
    assert all("<svg" in (tmp_path / "images" / name).read_text() for name in drawn)
    pages = [page.read_text(encoding="utf-8") for page in [DOCS.parent / "README.md", *DOCS.rglob("*.md")]]
    shown = {name for page in pages for name in re.findall(r"images/([\w-]+\.\w+)", page)}
    assert drawn <= shown
    assert shown <= {file.name for file in (DOCS / "images").iterdir()}
