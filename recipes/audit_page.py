"""The page of an audit: its most suspicious rows in one HTML file that needs no network."""

from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING, Any

from .pages import fill

if TYPE_CHECKING:
    import pandas

LEVELS = (
    (0.01, "s4"),
    (0.05, "s3"),
    (0.1, "s2"),
    (0.25, "s1"),
)  # share of the tokens that are as suspicious, and its shade
VISIBLE = str.maketrans({"\n": "\u21b5", "\r": "\u21b5", "\t": "\u21e5"})
# Heading, column of the table of rows, whether it is a number; a column that the table lacks is left out.
COLUMNS = (
    ("Rank", "rank", True),
    ("Suspicion", "suspicion", True),
    ("Trained tokens", "trained", False),
    ("Question", "question", False),
    ("Mean loss", "mean_loss", True),
    ("Precision", "precision", True),
    ("Gain", "gain", True),
    ("Corrupted", "corrupted_tokens", True),
    ("Id", "id", False),
)


def page(rows: "pandas.DataFrame", tokens: "pandas.DataFrame", result: Mapping[str, Any]) -> str:
    """Write the page.

    Every text of the data is escaped.

    Args:
        rows: The rows to show, from `audit_tables.rank_rows`.
        tokens: Those of all rows, from `audit_tables.Scorer`, with `suspicion` and `rank`.
        result: What audit.json holds.
    """
    columns = [column for column in COLUMNS if column[1] in rows]
    shown = dict(list(tokens[tokens["row"].isin(rows["row"])].groupby("row", sort=False)))
    return fill(
        "audit",
        f"Audit of {result['dataset']}",
        introduction=_introduction(result),
        caption=f"The {len(rows)} most suspicious of {result['rows']} rows. A heading sorts, and sorts the other way when pressed again.",
        headings="".join(_heading(*column) for column in columns),
        rows="\n".join(_row(row, shown[row["row"]], columns, len(tokens)) for row in rows.to_dict("records")),
    )


def _introduction(result: Mapping[str, Any]) -> str:
    sentences = [
        f"{result['rows']} rows, {result['tokens']} trained tokens, ranked by <b>{escape(result['score'])}</b>, a row by the "
        f"{escape(result['row_score'])} of its tokens, as the model <b>{escape(result['model'])}</b> sees them.",
        "A high rank says that the model finds a label unlikely: it may be wrong, or right and rare. Look before you delete.",
    ]
    if noise := result.get("noise"):
        sentences.append(
            f"A check: {noise['corrupted_tokens']} of {noise['eligible_tokens']} labels were corrupted on purpose "
            f"({escape(noise['kind'])}, rate {noise['rate']:g})."
        )
    return "\n".join(f"<p>{sentence}</p>" for sentence in sentences) + (
        f'\n<p class="quiet"><code>{escape(result["command"])}</code></p>'
    )


def _heading(name: str, column: str, numeric: bool) -> str:
    order = ' aria-sort="ascending"' if column == "rank" else ""
    return (
        f'<th scope="col" data-numeric="{str(numeric).lower()}"{order}{_class(numeric)}>'
        f'<button type="button">{name}</button></th>'
    )


def _class(numeric: bool) -> str:
    return ' class="number"' if numeric else ""


def _row(row: Mapping[str, Any], tokens: "pandas.DataFrame", columns: list[Any], total: int) -> str:
    cells = []
    for name, column, numeric in columns:
        value = row[column]
        text = (f"{value:.3f}" if isinstance(value, float) else str(value)) if numeric else escape(value)
        if column == "trained":
            text = _tokens(row, tokens.to_dict("records"), total)
        cells.append(f'<td data-name="{name}" data-value="{escape(str(value))}"{_class(numeric)}>{text}</td>')
    return f"<tr>{''.join(cells)}</tr>"


def _tokens(row: Mapping[str, Any], tokens: list[Any], total: int) -> str:
    """The trained tokens shaded, and what else there is to say about them and their row, unfolded on demand."""
    spans, lines = [], []
    for token in tokens:
        text = escape(token["token"].translate(VISIBLE))
        spans.append(f'<span class="{shade(token["rank"], total)}">{text}</span>')
        extra = ""
        if "corrupted" in token:
            extra = f'<td class="tokens">{escape(token["true_token"].translate(VISIBLE)) if token["corrupted"] else ""}</td>'
        lines.append(
            f'<tr><td class="tokens">{text}</td><td class="number">{token["rank"]}</td><td class="number">{token["loss"]:.2f}</td>'
            f'<td class="tokens">{escape(token["rival"].translate(VISIBLE))}</td>'
            f'<td class="number">{token["rival_probability"]:.2f}</td>{extra}</tr>'
        )
    headings = ["token", "rank", "loss", "instead", "probability", *(["true"] if "corrupted" in tokens[0] else [])]
    head = "".join(f'<th scope="col">{heading}</th>' for heading in headings)
    return (
        f'<div class="tokens">{"".join(spans)}</div><details><summary>Tokens and passage</summary>'
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
        f"<p>Reference: {escape(row['answer'])}</p><p>{escape(row['context'])}</p></details>"
    )


def shade(rank: int, total: int) -> str:
    """The class of a token by its place among all: "s4" for the most suspicious 1 %, down to "" for most."""
    return next((name for share, name in LEVELS if rank <= max(1, share * total)), "")
