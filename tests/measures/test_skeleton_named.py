"""Values of basis paths depend on the skeleton: whatever shows one names it."""

from __future__ import annotations

import pytest
from cases import build
from pages import Page

import flatgauge as fg
from flatgauge.measures import catalogue, registry
from flatgauge.report.page import write_page

PATHS = [item.name for item in registry if "skeleton" in item.options]


@pytest.fixture(scope="module")
def reports():
    wanted = {
        skeleton: {
            name: {"skeleton": skeleton} for name in ("psi_expected_sharpness", "basis_path_ratio")
        }
        for skeleton in ("strongest", "diagonal")
    }
    surface = build("mlp").surface()
    return {kind: fg.measure(surface, measures=measures) for kind, measures in wanted.items()}


def test_every_measure_of_basis_paths_declares_its_default():
    assert len(PATHS) == 5
    rows = catalogue().set_index("name")
    for name in PATHS:
        assert rows.options[name].startswith("skeleton='strongest'")
        assert "strongest skeleton by default" in registry[name].definition
        assert "whose skeleton is the diagonal one" in registry[name].paper


@pytest.mark.parametrize("skeleton", ["strongest", "diagonal"])
def test_a_report_names_it(reports, skeleton):
    report = reports[skeleton]
    text = str(report)
    for name, estimate in report.items():
        assert estimate.options["skeleton"] == skeleton
        assert any(
            line.startswith(name) and f"skeleton={skeleton}" in line for line in text.splitlines()
        )


def test_a_comparison_names_it(reports):
    text = str(fg.Comparison({"one": reports["diagonal"], "other": reports["diagonal"]}))
    assert "basis_path_ratio (skeleton=diagonal)" in text


def test_a_page_names_it_wherever_the_measure_stands(reports, tmp_path):
    single = {"one": reports["diagonal"], "other": reports["diagonal"]}
    page = Page(write_page(tmp_path / "page.html", single))
    linked = [a for tag, a, _ in page.elements if tag == "a" and a.get("class") == "quiet"]
    texts = [text for tag, _, parts in page.elements for text in parts if tag == "span"]
    named = [text for text in texts if "diagonal skeleton" in text or "skeleton=diagonal" in text]
    assert len(named) >= len(linked) >= 4


def test_a_study_page_names_it(tmp_path):
    import pandas as pd

    from flatgauge.report.pool_page import PoolPage, write_page

    frame = pd.DataFrame({"psi_trace": [1.0, 2.0, 3.0], "gap": [0.1, 0.2, 0.3]}, index=list("abc"))
    page = PoolPage(
        title="paths",
        question="?",
        frame=frame,
        correlations=pd.DataFrame({"pearson": [1.0]}, index=["psi_trace"]),
        target="gap",
        measures=["psi_trace"],
        skeletons={"psi_trace": "diagonal"},
    )
    path = write_page(tmp_path / "study.html", page)
    assert "diagonal skeleton" in path.read_text()
