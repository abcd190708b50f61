"""What `mkdocs build` does beyond its plugins: README.md as the first page, links out of docs/, and a site that fetches nothing."""

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

REPOSITORY = Path(__file__).resolve().parents[1]
CODE_OR_LINK = re.compile(
    r"^(?P<fence>`{3,}).*?^(?P=fence)|(?P<tick>`+)[^`].*?(?P=tick)|(?<!!)\[(?P<text>[^\]]+)\]\((?P<target>[^)\s]+)\)",
    re.M | re.S,
)
FETCHED = re.compile(
    r"""<(?:script|img|iframe|source|link(?![^>]*rel="?canonical))[^>]*?\s(?:src|href)=["']?((?:https?:)?//[^"'\s>]+)"""
)
IMPORTED = re.compile(r"""(?:url\(|@import)\s*["']?((?:https?:)?//[^"')\s]+)""")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Put README.md in the place of index.md, and make plain text of links to files that are no pages of the site."""
    source = Path(page.file.abs_src_path)
    if page.file.src_uri == "index.md":
        source = REPOSITORY / "README.md"
        markdown = source.read_text(encoding="utf-8").replace("](docs/", "](").replace('src="docs/', 'src="')
    docs = REPOSITORY / "docs"

    def plain(link: re.Match[str]) -> str:
        text, target = link["text"], (link["target"] or "").partition("#")[0]
        if not target or "://" in target:
            return link[0]
        folder = docs if source.parent == REPOSITORY else source.parent
        file = (folder / target).resolve()
        if not file.exists() and not (source.parent / target).exists():
            raise PluginError(f"{source} links to {target}, which is not there")
        return link[0] if file.is_file() and file.is_relative_to(docs) else text

    return CODE_OR_LINK.sub(plain, markdown)


def on_post_build(config: Any, **_: Any) -> None:
    """Refuse a site that would fetch a script, a style, a font or a picture from elsewhere."""
    for kind, pattern in (("html", FETCHED), ("css", IMPORTED)):
        for file in Path(config.site_dir).rglob(f"*.{kind}"):
            if found := pattern.search(file.read_text(encoding="utf-8")):
                raise PluginError(f"{file} fetches {found[1]}: the site has to work without the network")
