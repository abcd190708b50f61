"""Write the table of docs/families.md from the rows of bft_hf/architectures.py: `python tests/families_page.py`."""

from pathlib import Path

from bft_hf import architectures

PAGE = Path(__file__).resolve().parents[1] / "docs" / "families.md"
START, END = "<!-- families -->\n", "<!-- end of families -->"


def table() -> str:
    """The families and how each is read, in Markdown."""
    rows = [
        row for name, row in architectures.ARCHITECTURES.items() if not (row.built_in or architectures.registered(name))
    ]
    lines = ["| family | `model_type` | how it is read |", "| --- | --- | --- |"]
    lines += [
        f"| {row.decoder_layer.removesuffix('DecoderLayer')} | `{row.model_type}` | {row.reading} |" for row in rows
    ]
    return "\n" + "\n".join(lines) + "\n\n"


def parts() -> tuple[str, str, str]:
    """The page before, within and after the table."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    within, _, after = rest.partition(END)
    return before, within, after


if __name__ == "__main__":
    before, _, after = parts()
    PAGE.write_text(before + START + table() + END + after, encoding="utf-8")
