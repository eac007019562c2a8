"""The documentation builds without a warning, asks the network for nothing, and lacks no page."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser

import pytest

import flatgauge as fg
from flatgauge.measures import registry

pytest.importorskip("sphinx_gallery", reason="Sphinx is not installed (extra `docs`)")

pytestmark = pytest.mark.slow

#: What a browser loads by itself.
LOADING = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}


class Loading(HTMLParser):
    """Everything that a page loads."""

    def __init__(self):
        super().__init__()
        self.addresses = []

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        if tag in LOADING and found.get("rel") != "canonical":
            self.addresses.append(found.get(LOADING[tag]) or "")


@pytest.fixture(scope="module")
def site(request, tmp_path_factory):
    """The site as `make docs` builds it: strictly, with every script of the gallery run."""
    folder = tmp_path_factory.mktemp("site")
    ignored = shutil.ignore_patterns("measures", "reference", "examples", "__pycache__")
    shutil.copytree(request.config.rootpath / "docs", folder / "docs", ignore=ignored)
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "docs", "site"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "site"


def test_nothing_is_loaded_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 80
    for page in pages:
        loading = Loading()
        loading.feed(page.read_text())
        foreign = [address for address in loading.addresses if "//" in address]
        assert not foreign, (page, foreign)
    for style in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import )[\"']?https?:", style.read_text()), style


def test_every_measure_and_every_public_name_has_its_page(site):
    for item in registry:
        text = (site / f"measures/{item.name}.html").read_text()
        assert "<math " in text, item.name
        assert "Bear in mind" in text, item.name
    for name in fg.__all__:
        assert (site / f"reference/{name}.html").exists(), name


def test_formulas_are_rendered_on_every_page(site):
    for page in site.rglob("*.html"):
        text = re.sub(r"<(pre|code|script)\b.*?</\1>", "", page.read_text(), flags=re.DOTALL)
        assert "$$" not in text, page
        assert not re.search(r"\\(frac|theta|operatorname|sum|sigma)\b", text), page


def test_every_script_of_the_gallery_is_shown_with_its_output(site, request):
    scripts = sorted((request.config.rootpath / "docs/gallery").glob("*.py"))
    assert len(scripts) >= 6
    pictures = 0
    for script in scripts:
        text = (site / f"examples/{script.stem}.html").read_text()
        assert "sphx-glr-script-out" in text, script
        pictures += text.count("<img")
    assert pictures >= 5


def test_search_works_from_a_file(site):
    browsing = pytest.importorskip("browsing")
    if browsing.BROWSER is None:
        pytest.skip("there is no chromium on the path")
    with browsing.browsing() as browser:
        page = browser.new_page()
        asked, errors = [], []
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto((site / "search.html").as_uri() + "?q=normalized_sharpness")
        page.wait_for_selector("#search-results li a")
        found = page.eval_on_selector_all("#search-results li a", "all => all.map(a => a.href)")
        assert any("measures/normalized_sharpness.html" in address for address in found)
        assert not errors
        assert all(address.startswith(("file:", "data:")) for address in asked)
