"""What flatgauge costs beside its peers, in gradients: `flatgauge bench`. Nothing imports this."""
