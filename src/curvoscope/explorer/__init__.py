"""The interactive page: the Hessian of a small layer, at once, as its sizes and scales are moved."""
