"""Watch flatness while training
=============================

``fg.Monitor`` measures every so many steps, on a fixed set of samples, within a share of the
training time. The training does not notice: it ends in the same weights, bit for bit.
"""

# %%
# A training run like any other, with two lines more.
import matplotlib.pyplot as plt
import torch
from torch import nn

import flatgauge as fg

images, labels = fg.load_dataset("digits")
held_out = fg.load_dataset("digits", split="test")


def train(watch):
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Flatten(), nn.Linear(64, 32), nn.ReLU()),
        *(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10)),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    monitor = watch(model)
    for _ in range(12):
        for part in torch.randperm(len(images)).split(64):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[part]), labels[part])
            loss.backward()
            optimizer.step()
            if monitor:
                monitor.step(loss)
    return model, monitor


# %%
# ``share=0.1`` (the default) would let measuring add a tenth to the time of training; this training
# takes a second, so here every measurement is taken. ``log=`` takes a tracker, or any function.
names = ["hessian_trace", "rho_sum", "normalized_sharpness"]
watched, monitor = train(
    lambda model: fg.Monitor(model, "cross_entropy", held_out, measures=names, every=23, share=None)
)
print(monitor.history.to_frame()[["loss", *names]].round(3).to_string())

# %%
# The course of all of them.
_, ax = plt.subplots(figsize=(6.4, 3.4), layout="constrained")
_ = monitor.history.plot(ax=ax)

# %%
# Per layer: which one becomes sharp first?
print(monitor.history.layers("rho_sum").round(3).to_string())

# %%
# And without the monitor? The same weights, to the last bit.
alone, _ = train(lambda model: None)
same = all(torch.equal(a, b) for a, b in zip(watched.parameters(), alone.parameters(), strict=True))
print("the same weights as without the monitor:", same)
assert same
