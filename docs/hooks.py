"""What the site needs beside the pages of docs/: pages that stand elsewhere in the repository."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]

#: Pages outside of docs/, by their path in the repository, and where the site has them.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "docker/README.md": "images.md",
    "examples/README.md": "examples.md",
    "tests/README.md": "tests.md",
    "e2e/model/README.md": "small-model.md",
}
ORIGINS = {site: repository for repository, site in PAGES.items()}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")
_TITLE = re.compile(r"^# (.+)$", re.MULTILINE)
_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):<code>~?([\w.]+)</code>")


def read(path: str) -> str:
    """Return the text of a page by its path in the repository, "" if there is none."""
    page = ROOT / path
    return page.read_text(encoding="utf-8") if page.exists() else ""


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that stand outside of docs/."""
    for repository, site in PAGES.items():
        files.append(File.generated(config, site, content=read(repository)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links within the repository into links within the site, or into the file's path."""
    here = page.file.src_uri
    folder = posixpath.dirname(ORIGINS.get(here, f"docs/{here}"))

    def link(found: re.Match[str]) -> str:
        mark, text, target, anchor = found.groups()
        path = posixpath.normpath(posixpath.join(folder, target))
        site = PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
        if site is None and (ROOT / path).exists():
            return text if f"`{path}`" == text else f"{text} (`{path}`)"
        if re.fullmatch(r"[\w./-]+\.md", text) and (title := _TITLE.search(read(path))):
            text = title[1]
        site = posixpath.relpath(site or path, posixpath.dirname(here) or ".")
        return f"{mark}[{text}]({site}{anchor or ''})"

    return _LINK.sub(link, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Show Sphinx roles in docstrings as code, by the last part of the name."""
    return _ROLE.sub(lambda found: f"<code>{found[1].rpartition('.')[2]}</code>", html)
