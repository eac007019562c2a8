"""The command line: arguments in, a public function called, its result printed."""

from flatgauge.cli import catalogue, certify, demo, landscape, measure
from flatgauge.cli.application import app, main

__all__ = ["app", "catalogue", "certify", "demo", "landscape", "main", "measure"]
