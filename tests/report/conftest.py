"""A headless Chromium, and pages in it that must not complain or load anything."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import model  # noqa: F401

Opened = Callable[..., Any]


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """The browser of the machine, driven by Playwright, which brings none of its own here."""
    driver = pytest.importorskip("playwright.sync_api", reason="needs playwright (extra dev)")
    found = [shutil.which(name) for name in ("chromium-headless-shell", "chromium")]
    program = next(filter(None, found), None)
    if program is None:
        pytest.skip("needs Chromium (Debian: apt-get install chromium-headless-shell)")
    with driver.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium: Any) -> Iterator[Opened]:
    """Open a file; at the end of the test, nothing was complained about and nothing was loaded."""
    contexts, complaints, requests = [], [], []

    def opened(file: Path, *, width: int = 1280, scheme: str = "light") -> Any:
        context = chromium.new_context(
            viewport={"width": width, "height": 800}, color_scheme=scheme
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(file.as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()
    assert complaints == []
    assert [url for url in requests if not url.startswith(("file:", "blob:", "data:"))] == []


def overflow(page: Any) -> int:
    """Pixels by which the page is wider than its window."""
    wider: int = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    return wider


def luminance(page: Any, name: str, selector: str = "body") -> float:
    """How light a colour of an element is, 0 to 1."""
    red, green, blue = page.evaluate(
        "([name, selector]) => { const c = document.createElement('canvas').getContext('2d');"
        "c.fillStyle = getComputedStyle(document.querySelector(selector))[name];"
        "c.fillRect(0, 0, 1, 1); return [...c.getImageData(0, 0, 1, 1).data].slice(0, 3); }",
        [name, selector],
    )
    return float(0.2126 * red + 0.7152 * green + 0.0722 * blue) / 255
