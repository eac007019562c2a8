"""First measurement
=================

A network, a loss and data make a *surface*; everything is measured on a surface.
"""

# %%
# First a network to measure: two hidden layers, trained on images of digits for a second.
import matplotlib.pyplot as plt
import torch
from torch import nn

import flatgauge as fg

torch.manual_seed(0)
images, labels = fg.load_dataset("digits")
model = nn.Sequential(
    nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10)
)
optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
for _ in range(20):
    for part in torch.randperm(len(images)).split(64):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[part]), labels[part]).backward()
        optimizer.step()

# %%
# Three lines. Without ``measures=`` everything that applies is measured.
surface = fg.LossSurface(model, "cross_entropy", (images, labels))
report = fg.measure(
    surface, measures=["hessian_trace", "rho_sum", "normalized_sharpness", "hessian_max_eigenvalue"]
)
print(report)

# %%
# Every number says how it was made. ``exact`` ones are exact to rounding, for *these* data;
# ``data_stderr`` says how much other samples of the same kind would change them. ``computed`` and
# ``estimated`` ones carry their own error.
rho = report["rho_sum"]
print(f"ρ_Σ = {rho.value:.3f}, on other data ± {rho.data_stderr:.3f}")
top = report["hessian_max_eigenvalue"]
print(f"λ_max = {top.value:.3f} ± {top.bound:.3f}; {top.matvecs} products")

# %%
# Per layer, and per unit: where is the network sharp?
for name, value in rho.layers.items():
    print(f"{name}  {value:8.4f}   sharpest unit: {int(rho.units[name].argmax())}")
_, ax = plt.subplots(figsize=(6.4, 2.6), layout="constrained")
report.plot(ax, measure="rho_sum")

# %%
# The report is a table, JSON, or a page that opens in any browser.
report.to_json("report.json")
report.to_html("report.html")
print(report.to_frame()[["value", "data_stderr", "exact"]])
assert fg.Report.from_json("report.json")["rho_sum"].value == rho.value
