"""Model, loss and data as one function: value, gradient and Hessian-vector products."""
