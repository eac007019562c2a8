"""Models and data whose memory is measured, each in a process of its own."""

from __future__ import annotations

import torch
from torch import nn
from zoo import DATA

import flatgauge as fg

MEASURES = [
    *("hessian_trace", "hessian_max_eigenvalue", "riemannian_max_eigenvalue", "kappa_sum"),
    *("rho_sum", "normalized_sharpness", "fisher_rao_norm"),
]


class Bottleneck(nn.Module):
    """Three convolutions beside a short cut."""

    def __init__(self, inner, width, stride):
        super().__init__()
        outer = 4 * width
        self.path = nn.Sequential(
            *(nn.Conv2d(inner, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, outer, 1, bias=False), nn.BatchNorm2d(outer)),
        )
        self.short = nn.Identity()
        if inner != outer:
            self.short = nn.Sequential(
                nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer)
            )

    def forward(self, x):
        return torch.relu(self.path(x) + self.short(x))


def resnet():
    """25.6 million parameters in the shape of a ResNet-50, on four small images of ten classes."""
    blocks, inner = [], 64
    for width, depth, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for number in range(depth):
            blocks.append(Bottleneck(inner, width, 1 if number else stride))
            inner = 4 * width
    model = nn.Sequential(
        *(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()),
        *(nn.MaxPool2d(3, 2, 1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        *(nn.Linear(inner, 1000), nn.ReLU(), nn.Linear(1000, 10)),
    )
    return model, "cross_entropy", (torch.randn(4, 3, 64, 64), torch.arange(4))


def cifar():
    """LeNet-5 on all 50,000 training images of CIFAR-10."""
    model = nn.Sequential(
        *(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84)),
        *(nn.ReLU(), nn.Linear(84, 10)),
    )
    return model, "cross_entropy", fg.load_dataset(f"cifar10:{DATA}")


def conv(samples=2000):
    """A small conv net on random images."""
    model = nn.Sequential(
        *(nn.Conv2d(1, 8, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 5)),
        *(nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(400, 10)),
    )
    return model, "cross_entropy", (torch.randn(samples, 1, 28, 28), torch.arange(samples) % 10)


def curved(width, depth=3):
    """A perceptron in whose weights the output is curved: all is estimated by products."""
    layers = [nn.Linear(64, width), nn.GELU()]
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.GELU()]
    model = nn.Sequential(*layers, nn.Linear(width, 10))
    return model, "cross_entropy", (torch.randn(4, 64), torch.arange(4))


CASES = {"resnet": resnet, "cifar": cifar, "conv": conv, "few": lambda: conv(8)}
CASES |= {"few curved": lambda: curved(8), "curved": lambda: curved(600)}
CASES |= {"curved, 89 million": lambda: curved(5450)}
