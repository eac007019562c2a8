"""Noise on features
=================

How does the loss respond when the input φ of a layer becomes φ + δAφ? That is the same as weights
W + δWA, so no sample has to be touched, and the layer's κ bounds it: at a minimum the loss changes
by at most ½ δ² ‖A‖² κ to second order, with κ = ‖W‖² λ_max of the layer's block of the Hessian
(Petzka et al. 2019, appendix D).
"""

# %%
# A network trained until its gradient is small.
import torch
from torch import nn

import flatgauge as fg

torch.manual_seed(0)
images, labels = fg.load_dataset("digits", limit=300)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for _ in range(300):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
surface = fg.LossSurface(model, "cross_entropy", (images, labels), dtype=torch.float64)
kappa = fg.measure(surface, measures=["kappa_max"])["kappa_max"].layers
print({name: round(value, 3) for name, value in kappa.items()})


# %%
# The last layer's input is turned by random rotations, whose norm ‖A‖ is one. What the gradient
# says is taken off: the point is not exactly a minimum.
def change(name, matrix, delta):
    """The change of the loss beyond first order when the layer's input φ becomes φ + δAφ."""
    point = surface.point
    parts = surface.split(point)
    step = {key: torch.zeros_like(value) for key, value in parts.items()}
    step[name] = delta * parts[name] @ matrix
    step = surface.flatten(step)
    return float(surface.value(point + step) - surface.value() - surface.gradient() @ step)


delta, name = 1e-3, "3.weight"
rotations = [torch.linalg.qr(torch.randn(16, 16).double()).Q for _ in range(20)]
changes = [change(name, matrix, delta) for matrix in rotations]
bound = delta**2 / 2 * kappa[name]
print(f"largest change {max(changes):.2e}, bound {bound:.2e}")
assert max(changes) <= bound
