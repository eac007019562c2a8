"""`flatgauge demo`: the tool at work on data of its own."""

from __future__ import annotations

import typer

from flatgauge.cli.application import app
from flatgauge.cli.options import Debug, Seed, Threads, examples


@app.command(epilog=examples("flatgauge demo", "flatgauge demo --seed 1 --threads 2"))
def demo(threads: Threads = None, seed: Seed = 0, debug: Debug = False) -> None:
    """Train a small network on digits, measure it, rescale it, and measure again."""
    from flatgauge.command import set_threads
    from flatgauge.demo import run

    set_threads(threads or 1)  # For a network this small one thread is the fastest.
    run(typer.echo, seed=seed)
