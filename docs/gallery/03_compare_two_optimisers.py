"""Compare two optimisers
======================

Do SGD and Adam end in minima of different flatness? Train both to the same loss, several times, and
compare what no rescaling can move.
"""

# %%
# Stop by loss, not by epochs: at different losses, curvature differs for that reason alone.
import matplotlib.pyplot as plt
import torch
from torch import nn

import flatgauge as fg

images, labels = fg.load_dataset("digits", limit=800)
SEEDS = 3


def train(optimizer, seed, goal=0.05, **settings):
    torch.manual_seed(seed)
    model = nn.Sequential(
        *(nn.Flatten(), nn.Linear(64, 32), nn.ReLU()),
        *(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10)),
    )
    steps = optimizer(model.parameters(), **settings)
    for _ in range(400):
        for part in torch.randperm(len(images)).split(32):
            steps.zero_grad()
            nn.functional.cross_entropy(model(images[part]), labels[part]).backward()
            steps.step()
        with torch.no_grad():
            if nn.functional.cross_entropy(model(images), labels) < goal:
                return model
    raise RuntimeError(f"{optimizer.__name__} did not reach a loss of {goal}")


surfaces = {}
for seed in range(SEEDS):
    for name, optimizer, rate in (("SGD", torch.optim.SGD, 0.1), ("Adam", torch.optim.Adam, 0.003)):
        model = train(optimizer, seed, lr=rate)
        surfaces[f"{name} {seed}"] = fg.LossSurface(model, "cross_entropy", (images, labels))

# %%
# ``fg.compare`` measures all of them. Models whose errors do not tell them apart share a rank.
names = ["hessian_trace", "rho_sum", "normalized_sharpness", "adaptive_trace"]
comparison = fg.compare(surfaces, measures=names)
print(comparison)

# %%
# The verdict counts only measures that no rescaling can move; the Hessian's trace has no vote.
print(comparison.verdict)
print("claims of the trace:", comparison.invariant_to("hessian_trace"))
assert "hessian_trace" not in comparison.agreement().ranks

# %%
# Three seeds each. Do the two clouds lie apart, or is it the seed that decides?
figure, axes = plt.subplots(1, len(names), figsize=(10, 2.8), layout="constrained")
for ax, name in zip(axes, names, strict=True):
    for place, optimizer in enumerate(("SGD", "Adam")):
        values = [comparison[f"{optimizer} {seed}"][name].value for seed in range(SEEDS)]
        ax.plot([place] * SEEDS, values, "o", ms=7, alpha=0.8)
    ax.set_xticks([0, 1], ["SGD", "Adam"])
    ax.set_xlim(-0.5, 1.5)
    ax.set_title(name, fontsize=9)
