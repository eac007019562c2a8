"""Run the command line as `python -m flatgauge`."""

from flatgauge.cli import main

main()
