"""What flatgauge costs beside other tools, in units of one gradient: `python -m benchmarks`."""
