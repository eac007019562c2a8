"""An example of a package that brings a measure and an op rule to flatgauge."""
