"""The results of the sources, transcribed literally and compared with automatic differentiation.

The sources are the paper (Ormaniec, Dangel, Singh, ICLR 2025) and the slides on it. Kronecker and commutation
matrices stand here as they are printed, with the corrected form beside the printed one where they differ. The code
is slow on purpose, shares nothing with the rest of the package, and is what the rest is compared with.
"""

from curvoscope.theorems.registry import Result
from curvoscope.theorems.verify import verify

__all__ = ["Result", "verify"]
