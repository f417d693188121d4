"""The results of the sources, transcribed literally and compared with automatic differentiation.

The sources are the paper (Ormaniec, Dangel, Singh, ICLR 2025), the slides on it, the block paper (arXiv
2510.16927) on whole Transformer blocks, and the article on them. Kronecker and commutation matrices stand
here as they are printed, with the corrected form beside the printed one where they differ. The code is slow on
purpose, shares nothing with the rest of the package, and is what the rest is compared with.
"""

from curvoscope.papers.theorems.registry import Result
from curvoscope.papers.theorems.verify import verify

__all__ = ["Result", "verify"]
