"""A landscape in path space
=========================

The picture of a loss around a minimum depends on how the network is written, unless its axes are
values of *basis paths*, which no rescaling changes.
"""

# %%
# One network, and the same network in disguise.
import matplotlib.pyplot as plt
import torch
from torch import nn

import flatgauge as fg

torch.manual_seed(0)
images, labels = fg.load_dataset("digits", limit=300)
model = nn.Sequential(
    *(nn.Flatten(), nn.Linear(64, 16), nn.ReLU()),
    *(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 10)),
)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for _ in range(120):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
gauge = fg.find_gauge(model, images[:2])
twin = gauge.rescale(model, gauge.sample(generator=torch.Generator().manual_seed(0), log2_range=3))
both = {
    "as trained": fg.LossSurface(model, "cross_entropy", (images, labels)),
    "rescaled": fg.LossSurface(twin, "cross_entropy", (images, labels)),
}

# %%
# Along a random direction among the *weights*: a valley, and a ravine. They are one function.
weights = fg.landscape(both, space="weights", dims=1, points=41)
_, ax = plt.subplots(figsize=(5.2, 3.4), layout="constrained")
weights.plot(ax, log=True)
print(
    "largest difference:", float(abs(weights["as trained"].loss - weights["rescaled"].loss).max())
)

# %%
# The paths that say everything about it: m - H values.
paths = fg.basis_paths(model, images[:2])
print(paths.describe())

# %%
# Along a random direction among the values of these *paths* the two are the same curve, bit for
# bit.
curves = fg.landscape(both, space="basis_paths", dims=1, points=41)
print("largest difference:", float(abs(curves["as trained"].loss - curves["rescaled"].loss).max()))
assert (curves["as trained"].loss == curves["rescaled"].loss).all()

# %%
# As a plane. Points behind a pole, where a unit's path value passes zero, would be hatched.
plane = fg.landscape(both["as trained"], space="basis_paths", dims=2, points=21)
_, ax = plt.subplots(figsize=(4.5, 3.5), layout="constrained")
plane.plot(ax, kind="contour")
print(plane.caption)
