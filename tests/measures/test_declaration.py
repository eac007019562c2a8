"""Declaring a measure is all there is to do: it is listed, measured, certified and explained."""

from __future__ import annotations

import importlib.util
import inspect

import pytest
import torch
from cases import build

import flatgauge as fg
from flatgauge.cli.session import read_measures
from flatgauge.measures import catalogue, registry
from flatgauge.measures.registry import sweep_blocks
from flatgauge.report.catalogue import explain, markdown_page

#: A measure of swept blocks as its file would be.
SOURCE = r'''
from flatgauge.curvature.blocks import Blocks
from flatgauge.estimators.estimate import Estimate
from flatgauge.measures.declaration import declare
from flatgauge.measures.registry import Family, Needs

FAMILY = Family(
    paper="this test",
    reference="[petzka2019reparameterization]",
    geometry="one scale per layer",
    functional="trace of a block",
    invariant_to=frozenset({"layerwise", "permutation", "output_shift"}),
    cost="one sweep",
    requires=Needs(frozenset({"trace"}), estimates=True),
    docs="""
    Definition:
        .. math:: \\<join>_l c \\, \\|W_l\\|^2 \\operatorname{tr} H_{ll}
    Args:
        factor: The c of the definition.
    Example:
        >>> from flatgauge.surface.examples import linear_regression
        >>> <name>(linear_regression(2.0), factor=0.5).value
        36.0
    """,
)


def scaled_trace(blocks: Blocks, *, join: str, factor: float = 1.0) -> Estimate:
    values = {
        name: block.layer_value("trace", factor * block.squared_norm)
        for name, block in blocks.layers.items()
    }
    return blocks.aggregate(values, join, options={"factor": factor})


mine = declare(
    scaled_trace, FAMILY, name="mine", symbol="m", summary="A measure of my own.", join="sum"
)
'''


@pytest.fixture
def mine(tmp_path):
    """The function, declared by importing its file, and forgotten afterwards."""
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("mine", path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        yield module.mine
    finally:
        registry._measures.pop("mine", None)


def test_one_declaration_is_all_there_is_to_adding_a_measure(mine):
    surface = build("mlp").surface()
    assert "mine" in set(catalogue()["name"])
    assert "| `mine` | m | A measure of my own. |" in markdown_page()
    assert "factor=1.0" in explain("mine")
    assert read_measures(["mine:factor=2.0"]) == {"mine": {"factor": 2.0}}
    report = fg.measure(surface, measures=["mine", "kappa_trace_sum", "balanced:mine"])
    assert report["mine"].value == report["kappa_trace_sum"].value
    assert mine(surface, factor=2.0).value == 2 * report["mine"].value
    assert fg.certify(surface, measures=["mine"], trials=1).passed
    with pytest.raises(ValueError, match="`mine` needs a number as `factor`, but got 'x'"):
        fg.measure(surface, measures={"mine": {"factor": "x"}})
    with pytest.raises(TypeError, match="`mine`: got an unexpected keyword argument 'fact'"):
        mine(surface, fact=2.0)


def test_the_docstring_is_assembled_from_the_declaration(mine):
    names = ["surface", "factor", "layers", "all_columns", "probes", "generator"]
    assert list(inspect.signature(mine).parameters) == names
    text = inspect.getdoc(mine)
    assert text.startswith("A measure of my own.\n\nDefinition:\n    .. math:: \\sum_l c")
    assert "layerwise, permutation, output_shift." in text
    for name in names:
        assert f"\n    {name}: " in text
    assert ">>> mine(linear_regression(2.0), factor=0.5).value" in text


def test_blocks_that_were_swept_give_the_same_to_the_bit():
    shared, alone = build("gelu").surface(), build("gelu").surface()
    assert registry["rho_sum"].needs().parts == {"outgoing"}
    assert registry["rho_sum"].needs({"side": "incoming"}).parts == {"incoming"}
    for name in ("rho_sum", "rho_max", "kappa_trace_sum", "relative_flatness"):
        item = registry[name]
        blocks = sweep_blocks(shared, item.needs(), generator=seeded())
        found, expected = item.from_blocks(blocks), item.function(alone, generator=seeded())
        assert (found.value, found.stderr) == (expected.value, expected.stderr)
        assert found.layers == expected.layers
        layer = next(iter(found.layers))
        one = item.from_blocks(blocks, layers=layer, generator=None)
        assert one.layers == {layer: found.layers[layer]}
        assert one.options["layers"] == layer


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)
