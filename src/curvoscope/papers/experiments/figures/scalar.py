"""The scalar model of the slides: bulk and outliers as the norms of w_Q and w_K grow, their product held."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.func import grad, jacfwd

from curvoscope.exact import ScalarAttention
from curvoscope.papers.experiments.figure import (
    Configuration,
    MeasuredValue,
    Point,
    Row,
    Verdict,
    curve_values,
    named_values,
)
from curvoscope.papers.experiments.figures.catalogue import declared
from curvoscope.papers.experiments.growth import log_grid
from curvoscope.papers.experiments.panels import Guide, Panel
from curvoscope.papers.experiments.summaries import claim, curve, power, select

_POINTS = [{"norm": norm} for norm in log_grid(0.0, 3.0, 16)]
_LARGE = 30.0


class ScalarConfiguration(Configuration):
    """`tokens` numbers x and targets y from N(0, 1), weights of width k with <w_Q, w_K> = √k s."""

    tokens: int = 12
    k: int = 16
    s: float = 0.5

    def model(self, seed: int, norm: float) -> tuple[ScalarAttention, Tensor, Tensor]:
        """|w_Q|² = |w_K|² = √k s + norm²: a shared direction holds the product, two others carry the norm."""
        generator = torch.Generator().manual_seed(seed)
        x, y = torch.randn(2, self.tokens, generator=generator, dtype=torch.float64)
        axes = torch.linalg.qr(torch.randn(self.k, 3, generator=generator, dtype=torch.float64)).Q
        shared = (self.k**0.5 * self.s) ** 0.5 * axes[:, 0]
        return ScalarAttention(shared + norm * axes[:, 1], shared + norm * axes[:, 2], 1.0), x, y


def measure(configuration: ScalarConfiguration, point: Point, seed: int, draw: int) -> list[MeasuredValue]:
    """Bulk, outliers, and the largest error of the closed form against eigenvalues of the Hessian by autodiff."""
    model, x, y = configuration.model(seed, float(point["norm"]))
    spectrum = model.spectrum(x, y)
    numerical = torch.linalg.eigvalsh(_by_autodiff(model, x, y))
    error = float((spectrum.eigenvalues - numerical).abs().max() / numerical.abs().max())
    return [
        *named_values({"eigenvalue": spectrum.bulk}, "bulk"),
        *curve_values("eigenvalue", spectrum.outliers, part="outlier"),
        *named_values({"largest_outlier": float(spectrum.outliers.abs().max())}, "outlier"),
        *named_values({"relative_error": error}),
    ]


def _by_autodiff(model: ScalarAttention, x: Tensor, y: Tensor) -> Tensor:
    """The Hessian over (w_Q, w_K, w_V), written out anew."""
    k = len(model.w_Q)

    def loss(weights: Tensor) -> Tensor:
        w_Q, w_K, w_V = weights[:k], weights[k : 2 * k], weights[-1]
        A = (x[:, None] * x[None, :] * (w_Q @ w_K) / k**0.5).softmax(-1)
        return (w_V * (A @ x) - y).square().mean()

    weights = torch.cat([model.w_Q, model.w_K, model.w_V.reshape(1)])
    hessian: Tensor = jacfwd(grad(loss))(weights)
    return hessian


def _verdicts(rows: Sequence[Row]) -> list[Verdict]:
    errors = select(rows, quantity="relative_error")
    worst = max(row.found.value for row in errors)
    bulk = select(rows, part="bulk")
    large = [row for row in select(rows, quantity="largest_outlier") if float(row.point["norm"]) >= _LARGE]
    return [
        claim(errors, "the closed form gives all eigenvalues: largest relative error", worst, worst < 1e-10, 0.0),
        power(bulk, "norm", "the bulk does not depend on the norms of w_Q and w_K at a fixed product", 0.0, 1e-6),
        power(large, "norm", f"the largest outlier grows as their square (norm ≥ {_LARGE:g})", 2.0),
    ]


def _panels(rows: Sequence[Row]) -> list[Panel]:
    bulk = curve(select(rows, part="bulk"), "norm", "bulk (d_k - 1 pairs)", 0)
    outlier = curve(select(rows, quantity="largest_outlier"), "norm", "largest outlier", 1)
    y = [outlier.y[-1] * (x / outlier.x[-1]) ** 2 for x in outlier.x]
    error = curve(select(rows, quantity="relative_error"), "norm", "", 6)
    label = "norm outside the product"
    return [
        Panel("eigenvalues", label, "|eigenvalue|", series=[bulk, outlier], guides=[Guide("norm²", outlier.x, y)]),
        Panel("closed form against autodiff", label, "largest relative error", series=[error]),
    ]


FIGURE = declared("scalar", ScalarConfiguration(), _POINTS, measure, _verdicts, _panels)
