"""What flatgauge costs beside its peers. Scripts that print and write, and assert nothing."""
