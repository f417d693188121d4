"""Dependence on the weights and on the temperature: Sections 3.3 and 4.3, the weight table of the slides."""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from curvoscope.papers.theorems.calculus import RealMatrix, assemble
from curvoscope.papers.theorems.growth import DEGREES, Scales, norm, slope
from curvoscope.papers.theorems.registry import PAPER, SLIDES, Fails, relative_error
from curvoscope.papers.theorems.results.growth import SLOPE
from curvoscope.papers.theorems.results.instances import AttentionInstance, draw_layer, rectangular_layers


@PAPER.holds("Section 3.3, weights", "W_K → tW_K, W_Q → W_Q/t leaves A and F alone")
def gauge_degrees(seed: int) -> Iterator[float]:
    """The exponents of W_Q and W_K differ by what the text says, for both parts of every block."""
    t = 1.7
    for layer in rectangular_layers(seed):
        before, after = layer.reference, layer.scaled(Scales(Q=1 / t, K=t)).reference
        for blocks, moved, part in (
            (before.outer, after.outer, "outer"),
            (before.functional, after.functional, "functional"),
        ):
            for key, degrees in DEGREES.items():
                if key[0] == part:
                    pair = (key[1], key[2])
                    yield relative_error(moved[pair], t ** (degrees.K - degrees.Q) * blocks[pair])


@SLIDES.holds("Slides, weight table", "every exponent of W_Q, W_K and W_V, exact at fixed A and G")
def weight_degrees(seed: int) -> Iterator[float]:
    """Scale one weight at a time; s takes up what would move A, and its own exponent is known."""
    yield from (
        layer.degree_error(scales, part)
        for layer in rectangular_layers(seed)
        for scales in (Scales(Q=1.7), Scales(K=0.4), Scales(V=2.3))
        for part in ("outer", "functional", "logit")
    )


@PAPER.corrected("Section 4.3, temperature", "1/t² and 1/t are exact at fixed A (E8)", somewhere=True)
def temperature_at_fixed_attention(seed: int) -> Iterator[float]:
    """With W_Q → tW_Q, which keeps A, every block has the power of its explicit factors."""
    t = 1.5
    for layer in rectangular_layers(seed):
        warm = layer.scaled(Scales(Q=t))  # its s is s/t
        plain, scaled = layer.logit_reference, warm.logit_reference
        # The blocks of the T-outer part carry W_Q 0, 1 and 2 times besides the 1/t² of s².
        for pair, queries in ((("Q", "Q"), 0), (("Q", "K"), 1), (("K", "K"), 2)):
            yield relative_error(scaled.outer[pair], t ** (queries - 2) * plain.outer[pair])
        yield relative_error(scaled.functional["Q", "K"], plain.functional["Q", "K"] / t)
        outer, _ = _logit_parts(layer, 1.0)
        moved, _ = _logit_parts(layer, t)
        yield Fails(relative_error(moved, outer / t**2), "1/t² for the T-outer part at t = 1.5")


@PAPER.holds("Section 4.3, high temperature", "slopes −2 and −1 for t → ∞", tolerance=SLOPE)
def high_temperature(seed: int) -> Iterator[float]:
    """For t → ∞ the T-functional part dominates: A tends to a constant, the powers are slopes."""
    layer = draw_layer(seed, 5, 4, 3, 4)
    temperatures = (1e4, 2e4, 4e4)
    outer, functional = (
        slope(temperatures, [norm(_logit_parts(layer, t)[part]) for t in temperatures]) for part in (0, 1)
    )
    yield abs(outer + 2) / 2
    yield abs(functional + 1)


@PAPER.corrected(
    "Section 4.3, low temperature",
    "for t → 0 the ratio T-outer/T-functional grows like 1/t, while both parts vanish (E8)",
    tolerance=SLOPE,
)
def low_temperature(seed: int) -> Iterator[float]:
    """The softmax becomes one-hot: both parts go to zero exponentially, their ratio grows like 1/t."""
    # Two tokens, the first sees only itself: one row has a choice, and its gap sets the temperature. The second
    # probability goes from e⁻²⁰ to e⁻¹⁰, below which rounding would take over.
    mask = torch.tensor([[0.0, -math.inf], [0.0, 0.0]], dtype=torch.float64)
    layer = replace(draw_layer(seed, 2, 4, 3, 5), bias=mask)
    gap = float((layer.logits[1, 0] - layer.logits[1, 1]).abs())
    temperatures = (gap / 20, gap / 15, gap / 10)
    sizes = [[norm(part) for part in _logit_parts(layer, t)] for t in temperatures]
    ratio = slope(temperatures, [outer / functional for outer, functional in sizes])
    outer = slope(temperatures, [outer for outer, _ in sizes])
    yield abs(ratio + 1)
    yield Fails(abs(outer + 2) / 2, "1/t² for the T-outer part at small t")


def _logit_parts(layer: AttentionInstance, t: float) -> tuple[RealMatrix, RealMatrix]:
    """T-outer and T-functional part over [W_Q; W_K] at temperature t, the weights unchanged."""
    reference = replace(layer, s=layer.s / t).logit_reference
    return assemble(reference.outer, ("Q", "K")), assemble(reference.functional, ("Q", "K"))
