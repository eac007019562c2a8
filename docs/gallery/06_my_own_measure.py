"""My own measure
==============

A measure is a function of a surface that says what it is. Declared, it is measured, certified,
compared and listed like those that are built in.
"""

# %%
# An idea: how much does the loss rise when one parameter tensor is stretched or shrunk by ten
# percent? The first sentence of the docstring is the definition; ``invariant_to`` is a claim, and
# will be tested.
import torch
from torch import nn

import flatgauge as fg
from flatgauge.measures import measure


@measure(
    symbol="S₁₀",
    paper="this page",
    geometry="one scale per layer",
    functional="expectation",
    invariant_to={"layerwise", "nodewise", "rows", "permutation"},
    cost="two forward passes per tensor",
)
def stretch(surface, *, percent=10.0):
    """Mean rise of the loss when a parameter tensor is stretched or shrunk by some percent."""
    point, here = surface.point, surface.value()
    layers = {}
    for name, part in surface.split(point).items():
        others = {key: torch.zeros_like(value) for key, value in surface.split(point).items()}
        step = surface.flatten({**others, name: percent / 100 * part})
        layers[name] = (surface.value(point + step) + surface.value(point - step)) / 2 - here
    value = sum(layers.values()) / len(layers)
    return fg.Estimate(value, exact=True, layers=layers, options={"percent": percent})


# %%
# It is measured beside all others.
torch.manual_seed(0)
images, labels = fg.load_dataset("digits", limit=300)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for _ in range(80):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
surface = fg.LossSurface(model, "cross_entropy", (images, labels), dtype=torch.float64)
report = fg.measure(surface, measures=["stretch", "rho_sum"])
print(report)
print({name: round(value, 6) for name, value in report["stretch"].layers.items()})

# %%
# Is the claim true? Stretching a tensor is the same step however its units are scaled, so it
# should be.
certificate = fg.certify(surface, measures=["stretch"], trials=2)
print(certificate)
assert certificate.passed


# %%
# And a claim that is wrong: the squared norm of all weights, said to be invariant to scales of
# layers.
@measure(
    symbol="‖θ‖²",
    paper="this page",
    geometry="weights",
    functional="norm",
    invariant_to={"layerwise"},
    cost="nothing",
)
def squared_norm(surface):
    """Squared length of all weights."""
    return fg.Estimate(float(surface.point.square().sum()), exact=True)


refuted = fg.certify(surface, measures=["squared_norm"], trials=1)
for row in refuted.failures:
    print(f"{row.measure} under {row.group}: {row.verdict}, {row.before:.4g} -> {row.after:.4g}")
assert not refuted.passed

# %%
# To put it into flatgauge itself: its file in ``src/flatgauge/measures/``, one import, its test.
# ``CONTRIBUTING.md`` has the three steps; pages, command line and the contract's tests follow from
# them.
