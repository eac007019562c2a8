"""What is shown of other tools runs where they are installed, and gives our numbers."""

from __future__ import annotations

import doctest
import re
import warnings

import pytest
import torch

#: What a block is titled, and what is imported for it.
PEERS = {"PyHessian": "pyhessian", "curvlinops": "curvlinops"}

_PAIR = re.compile(
    r'^```python title="(?P<peer>\w+)"\n(?P<theirs>.*?)^```\n\n```python\n(?P<ours>.*?)^```',
    re.MULTILINE | re.DOTALL,
)


def run(examples: str, space: dict[str, object]) -> None:
    for example in doctest.DocTestParser().get_examples(examples):
        exec(example.source, space)


@pytest.fixture(scope="module")
def page(request):
    return (request.config.rootpath / "docs/coming_from.md").read_text()


@pytest.fixture(scope="module")
def space(page):
    found: dict[str, object] = {}
    run(page.split("## From PyHessian")[0], found)
    return found


@pytest.mark.parametrize("peer", PEERS)
def test_both_sides_of_a_pair_give_one_number(page, space, peer):
    pytest.importorskip(PEERS[peer])
    pairs = [pair for pair in _PAIR.finditer(page) if pair["peer"] == peer]
    assert len(pairs) >= 2
    for pair in pairs:
        with warnings.catch_warnings(), torch.random.fork_rng():
            warnings.simplefilter("ignore")  # Theirs: of deprecated calls, of graphs they keep.
            exec(pair["theirs"], space)
        run(pair["ours"], space)
        theirs, ours = (torch.as_tensor(space[side]) for side in ("theirs", "ours"))
        assert bool(((theirs - ours).abs() <= space["error"]).all()), pair["theirs"]
        space["model"].zero_grad(set_to_none=True)  # PyHessian leaves gradients behind.


def test_every_block_of_another_tool_stands_in_a_pair(page):
    titled = re.findall(r'^```python title="(\w+)"', page, re.MULTILINE)
    assert titled == [pair["peer"] for pair in _PAIR.finditer(page)]
    assert set(titled) == set(PEERS)
