"""What is not exact: estimates from matrix-vector products, each with its standard error."""

from curvoscope.estimate.hutchinson import Estimate, frobenius_norm, trace

__all__ = ["Estimate", "frobenius_norm", "trace"]
