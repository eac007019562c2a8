"""All commands, imported so that each enters itself in the application."""

from flatgauge.cli import (
    catalogue,
    certify,
    compare,
    demo,
    landscape,
    measure,
    pool,
    spectrum,
    study,
)
from flatgauge.cli.application import app, main

__all__ = [
    "app",
    "catalogue",
    "certify",
    "compare",
    "demo",
    "landscape",
    "main",
    "measure",
    "pool",
    "spectrum",
    "study",
]
