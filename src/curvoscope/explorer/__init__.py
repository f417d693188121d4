"""The interactive page: the Hessian of a small layer, updated as its sizes and scales change."""
