"""The exact sweep: diagonal blocks of the Hessian from one pass over the data."""
