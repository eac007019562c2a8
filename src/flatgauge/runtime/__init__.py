"""The process: leaving the model as found, memory and threads, groups of processes."""
