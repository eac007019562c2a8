"""Examples in texts are run where the files that they write are in nobody's way."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _examples_write_elsewhere(request: pytest.FixtureRequest) -> None:
    if isinstance(request.node, pytest.DoctestItem):
        request.getfixturevalue("monkeypatch").chdir(request.getfixturevalue("tmp_path"))
