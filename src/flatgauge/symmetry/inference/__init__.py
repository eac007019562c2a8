"""Scale inference: which rescalings leave the function of a graph unchanged."""
