"""Examples in texts run where their files are in nobody's way; tests share exported graphs."""

from __future__ import annotations

from collections import deque

import pytest

from flatgauge.graph.export import ExportedGraphs

#: The last graphs that a process has exported.
GRAPHS: deque = deque(maxlen=64)

#: Pages whose examples train or certify much: of the second tier (`make test-all`).
LONG_PAGES = ("coming_from.md", "errata.md", "faq.md", "tour.md")
#: Of the small networks of `tests/cases.py` and those of other people in `tests/wild`, these are of
#: the first tier; tests of the others, which share their parts, are of the second.
FIRST = {"mlp", "conv and max-pool", "residual with batch-norm", "proportional branches", "gelu"}
FIRST |= {"attention", "resnet20_cifar10", "mobilenetv2_wd4", "gpt2", "vit"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put long pages and further networks into the second tier."""
    from cases import LAYER_CASES
    from wild import WILD

    second = {*LAYER_CASES, *WILD} - FIRST
    for item in items:
        values = item.callspec.params.values() if hasattr(item, "callspec") else ()
        if item.path.name in LONG_PAGES or second & {v for v in values if isinstance(v, str)}:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def _examples_write_elsewhere(request: pytest.FixtureRequest) -> None:
    if isinstance(request.node, pytest.DoctestItem):
        request.getfixturevalue("monkeypatch").chdir(request.getfixturevalue("tmp_path"))


@pytest.fixture(autouse=True)
def _exported_graphs_are_shared(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests build the same networks again and again; `fresh_exports` opts out."""
    if "fresh_exports" not in request.keywords:
        monkeypatch.setattr(ExportedGraphs, "__init__", _with_shared_graphs)


def _with_shared_graphs(graphs: ExportedGraphs) -> None:
    graphs._graphs = GRAPHS
