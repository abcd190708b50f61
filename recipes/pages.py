"""Pages in one HTML file that need no network: a template, its script, and the head they share."""

import base64
import hashlib
from html import escape
from pathlib import Path
from string import Template

TEMPLATES = Path(__file__).parent / "templates"


def fill(name: str, title: str, **values: str) -> str:
    """Make a page of `templates/NAME.html` and `templates/NAME.js`.

    The page's own policy lets no script run but that one.

    Args:
        name: Of both files.
        title: Plain text.
        **values: HTML for each of the template's other names, what comes from data escaped.
    """
    head, body, script = (_read(file) for file in ("head.html", f"{name}.html", f"{name}.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return Template(head + body).substitute(
        values, title=escape(title), script=script, script_hash=f"'sha256-{digest}'"
    )


def _read(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")
