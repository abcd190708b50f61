"""What the Python of docs/noise.md prints; that every block of it runs is tests/test_docs.py's to see."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[1] / "docs" / "noise.md"
if not PAGE.is_file():
    pytest.skip("no docs/ beside tests/, as in the sdist", allow_module_level=True)
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
PRINTED = {"corrupt_labels": r"[1-9] of 10 rows have another row's answer", "add_distractors": r"'added': 6\b"}


@pytest.mark.parametrize("function", PRINTED)
def test_blocks_print_what_they_promise(
    function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bft_hf.noise.bm25.default_cache", lambda: tmp_path / "bm25")
    blocks = [block for block in BLOCKS if f"{function}(" in block]
    assert len(blocks) == 1
    exec(compile(blocks[0], PAGE.name, "exec"), {})
    assert re.search(PRINTED[function], capsys.readouterr().out)
