"""A real browser for tests of pages, where there is one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)

#: Every module of such tests has this mark.
needs_browser = pytest.mark.skipif(BROWSER is None, reason="there is no chromium on the path")

FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--enable-unsafe-swiftshader"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--no-first-run",
]


def until(page, expression):
    """Wait for something to be true; playwright's own way needs what the page forbids."""
    for _ in range(200):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"never true: {expression}")


class Loaded:
    """A page in a browser, and everything it complained about or asked for."""

    def __init__(self, browser, path, **options):
        self.page = browser.new_page(**options)
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.errors.append("dialog"), dialog.dismiss()))
        self.page.on("requestfailed", lambda request: self.errors.append(request.url))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("html[data-ready]")
        until(self.page, "[...document.querySelectorAll('.plot')].every(plot => plot._fullLayout)")

    def _said(self, message):
        if message.type == "error":
            self.errors.append(message.text)


@contextmanager
def browsing() -> Iterator[Any]:
    """A browser, closed at the end."""
    with playwright.sync_playwright() as run:
        found = run.chromium.launch(executable_path=BROWSER, args=FLAGS)
        yield found
        found.close()


def luminance(page):
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    red, green, blue = (int(part) for part in colour[4:-1].split(","))
    return (0.2126 * red + 0.7152 * green + 0.0722 * blue) / 255


def column(page, table, index):
    return page.evaluate(
        """([table, index]) => [...document.querySelector(table).tBodies[0].rows].map(
             row => row.cells[index].dataset.value ?? row.cells[index].textContent.trim())""",
        [table, index],
    )
