"""The demonstration: one network written in two ways, measured in both."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatgauge.certifying import certify
from flatgauge.datasets import load_dataset
from flatgauge.measuring import measure
from flatgauge.report import Certificate, Report
from flatgauge.report.table import aligned, header
from flatgauge.surface import LossSurface
from flatgauge.symmetry import find_gauge

#: Every hidden unit gets one of these factors in turn; powers of two lose no bit.
FACTORS = (1.0, 256.0, 0.25, 16.0)

#: Samples on which the measures are certified: invariance does not depend on how many.
CERTIFIED = 300


def run(say: Callable[[str], None], *, seed: int = 0) -> tuple[Report, Report, Certificate]:
    """Train, measure, rescale, measure again, say what moved, and certify it.

    Args:
        say: Called with every piece of text.
        seed: Of the training and the measures.

    Returns:
        The reports before and after rescaling, and the certificate.
    """
    images, labels = load_dataset("digits")
    test_images, test_labels = load_dataset("digits", split="test")
    say(f"Training a network 64-32-32-10 on {len(images)} images of digits ...")
    model = train(images, labels, seed=seed)
    accuracy = (model(test_images).argmax(1) == test_labels).float().mean().item()
    gauge = find_gauge(model, images[:2])
    factors = [FACTORS[k % len(FACTORS)] for k in range(gauge.dim)]
    twin = gauge.rescale(model, gauge.move(factors))
    change = (model(test_images) - twin(test_images)).abs().max().item()
    say(f"test accuracy {accuracy:.1%}\n")

    before = measure(LossSurface(model, "cross_entropy", (images, labels)), seed=seed)
    say(header(before.facts))
    say(
        f"\nThere are infinitely many ways to write this network: {gauge.describe()}\n\n"
        "Now the same network, written differently: what enters each hidden unit times one of\n"
        f"{', '.join(f'{factor:g}' for factor in FACTORS)}, what leaves it divided by it.\n"
        f"Largest change of any output on the test set: {change:g}\n"
    )
    after = measure(LossSurface(twin, "cross_entropy", (images, labels)), seed=seed)
    say("\n".join(aligned(_side_by_side(before, after))))
    say(
        "\nThe function is the same to the last bit; the classical measures of its flatness are "
        "not:\nthey depend on how the network is written. κ and the per-tensor Riemannian "
        "measures divide\nout one factor per layer, which is not enough here; ρ, normalized "
        "sharpness, the per-weight\nmeasures and those of path space divide out one factor per "
        "unit, and have not moved by one\nbit. No single move proves that, so:\n"
    )
    small = images[:CERTIFIED], labels[:CERTIFIED]
    certificate = certify(LossSurface(model, "cross_entropy", small), seed=seed)
    say(repr(certificate))
    return before, after, certificate


def train(images: Tensor, labels: Tensor, *, seed: int) -> nn.Sequential:
    """A small ReLU network, trained until its loss is small.

    Args:
        images: Of shape (N, 1, 8, 8).
        labels: Of shape (N,).
        seed: Of the initial weights.

    Returns:
        The network.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Flatten(),
            nn.Linear(64, 32),
            nn.ReLU(),
            nn.Linear(32, 32),
            nn.ReLU(),
            nn.Linear(32, 10),
        )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(600):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return model


def _side_by_side(before: Report, after: Report) -> list[tuple[str, ...]]:
    """A table of both reports and how far each measure moved."""
    rows: list[tuple[str, ...]] = [("measure", "as trained", "rescaled", "ratio")]
    for name, estimate in before.items():
        ratio = after[name].value / estimate.value
        rows.append((name, str(estimate), str(after[name]), f"{ratio:.3g}"))
    return rows
