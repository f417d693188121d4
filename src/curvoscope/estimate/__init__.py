"""What is not exact: estimates from matrix-vector products, each with its error."""

from curvoscope.estimate.diagonals import diagonal
from curvoscope.estimate.extremes import eigenvalues
from curvoscope.estimate.joint import JointEstimate, measure
from curvoscope.estimate.krylov import Eigenvalues, lanczos
from curvoscope.estimate.products import Matrix
from curvoscope.estimate.quadratic import frobenius_norm, squared_frobenius_norm, trace
from curvoscope.estimate.quadrature import density
from curvoscope.estimate.result import DiagonalEstimate, Estimate
from curvoscope.estimate.spectrum import Band, Density, LogSpectrum

__all__ = [
    "Band",
    "Density",
    "DiagonalEstimate",
    "Eigenvalues",
    "Estimate",
    "JointEstimate",
    "LogSpectrum",
    "Matrix",
    "density",
    "diagonal",
    "eigenvalues",
    "frobenius_norm",
    "lanczos",
    "measure",
    "squared_frobenius_norm",
    "trace",
]
