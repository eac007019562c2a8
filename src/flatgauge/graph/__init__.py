"""The exported model: ops, layers, and the degree of the output in each parameter."""
