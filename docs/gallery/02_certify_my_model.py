"""Certify my model
================

Which numbers can I trust for *this* network? Find out how it can be rewritten without changing its
function, rewrite it, and measure again.
"""

# %%
# A network with what real ones have: convolutions, batch-norm, a residual connection.
import matplotlib.pyplot as plt
import torch
from torch import nn

import flatgauge as fg


class Residual(nn.Module):
    """A small residual network for images of 8 by 8 pixels."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.conv1 = nn.Conv2d(6, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 6, 3, padding=1)
        self.head = nn.Linear(6, 10)

    def forward(self, x):
        x = self.norm(self.stem(x)).relu()
        x = x + self.conv2(self.conv1(x).relu())
        return self.head(x.relu().mean((2, 3)))


torch.manual_seed(0)
images, labels = fg.load_dataset("digits", limit=500)
model = Residual()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for _ in range(15):
    for part in torch.randperm(len(images)).split(50):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[part]), labels[part]).backward()
        optimizer.step()
model.eval()

# %%
# How can it be rewritten? Channels that the residual connection adds share one scale, so the stem's
# six channels have one scale each *before* the batch-norm and share those of the stream *after* it.
gauge = fg.find_gauge(model, images[:2])
print(gauge.describe())

# %%
# Move along this freedom by powers of two between 1/64 and 64: other weights, the same bits.
move = gauge.sample(generator=torch.Generator().manual_seed(0), log2_range=6)
twin = gauge.rescale(model, move)
with torch.no_grad():
    print("largest change of any output:", (model(images) - twin(images)).abs().max().item())

# %%
# Measure both.
names = ["hessian_trace", "kappa_trace_sum", "adaptive_trace", "rho_sum", "normalized_sharpness"]
data = images[:200], labels[:200]
before, after = (
    fg.measure(fg.LossSurface(net, "cross_entropy", data), measures=names) for net in (model, twin)
)
for name in names:
    one, two = before[name].value, after[name].value
    print(f"{name:22}{one:12.5g}{two:14.5g}   {'not one bit' if one == two else 'moved'}")
assert [before[n].value == after[n].value for n in names] == [False, False, True, True, True]

# %%
# One move is an anecdote. ``fg.certify`` draws moves from every group that the model has: layers,
# units, the order of channels, scale and shift of the outputs; and holds every measure to what it
# claims.
certificate = fg.certify(fg.LossSurface(model, "cross_entropy", data), measures=names, trials=1)
print(certificate)
assert certificate.passed

# %%
# How far each measure was pushed when single units were rescaled.
rows = certificate.to_frame().query("group == 'nodewise'").set_index("measure")["change"]
figure, ax = plt.subplots(figsize=(7, 2.6), layout="constrained")
colours = ["#1d5a9c" if change == 0 else "#c0392b" for change in rows]
ax.barh(rows.index[::-1], (1 + rows)[::-1], color=colours[::-1])
ax.set_xscale("log")
_ = ax.set_xlabel("times as large after rescaling")
