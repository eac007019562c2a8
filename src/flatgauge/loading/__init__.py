"""Data sets, checkpoints and the user's own code, by name or path."""
