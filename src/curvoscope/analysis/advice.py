"""Recommendations for training, each backed by a measured number and the threshold that it crossed.

Nothing is recommended without a measurement: what was not measured is missing from `Findings`, and from the advice.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from curvoscope import checks
from curvoscope.analysis.measurements import Extremes, Measurement
from curvoscope.analysis.spectra import Distances
from curvoscope.analysis.taylor import Taylor
from curvoscope.errors import RangeError, ShapeError

EDGE = 2.0
"""η λ_max above which gradient descent diverges on the quadratic model."""
APART = 10.0
"""Blocks whose largest eigenvalues differ by more than this factor want learning rates of their own."""
ALIKE = 0.2
"""Blocks whose spectra are within this Jensen-Shannon distance may share one adaptive learning rate."""
SCALE = 3.0
"""Inputs of a layer with a root mean square above this, or below its inverse, are not normalised."""
SPIKE = 10.0
"""A gradient this many times the median one is a spike."""
_LEAST_STEPS = 20  # of a series, below which its median says nothing


@dataclass(frozen=True)
class Findings:
    """Measurements of a model and its training, for `advice`; every field is optional.

    Args:
        rows: norms, traces and largest eigenvalues of the blocks.
        extremes: the largest and the smallest eigenvalue of the whole Hessian.
        distances: distances between the spectra of the blocks.
        taylor: the second-order prediction along the gradient, from `taylor`.
        sharpness: λ_max by training step.
        gradient_norms: |g| at training steps.
        input_scales: the root mean square of the inputs of layers, by name, from `input_scales`.
        learning_rate: the learning rate in use.
        momentum: the momentum of SGD, 0 without.

    Example:
        >>> import curvoscope as cv
        >>> findings = cv.analysis.Findings(sharpness={0: 30.0, 100: 15.0}, learning_rate=0.1)
        >>> [one.subject for one in cv.analysis.advice(findings)]
        ['warm-up']
    """

    rows: Sequence[Measurement] = ()
    extremes: Extremes | None = None
    distances: Distances | None = None
    taylor: Taylor | None = None
    sharpness: Mapping[int, float] = field(default_factory=dict)
    gradient_norms: Sequence[float] = ()
    input_scales: Mapping[str, float] = field(default_factory=dict)
    learning_rate: float | None = None
    momentum: float = 0.0

    def __post_init__(self) -> None:
        checks.positive(learning_rate=self.learning_rate)
        if not 0 <= self.momentum < 1:
            raise RangeError("momentum", f"got {self.momentum}, expected 0 to below 1")
        if self.taylor is not None and self.taylor.direction.name != "gradient":
            raise ShapeError("taylor", f"is along {self.taylor.direction.name!r}, expected the gradient")


@dataclass(frozen=True)
class Advice:
    """One recommendation with the measured number and the threshold behind it.

    Args:
        subject: what it is about: "clipping", "warm-up", ...
        recommendation: what to do, as a sentence.
        quantity: what was measured.
        value: the measured value of that quantity.
        threshold: the value above (or below) which the advice is given.
        settings: numbers to set, by block if they differ.
        blocks: the blocks that the advice is about.

    Example:
        >>> import curvoscope as cv
        >>> print(cv.analysis.Advice("clipping", "Clip the gradient", "largest over median gradient norm", 12.0, 10.0))
        Clip the gradient (largest over median gradient norm: 12, threshold 10)
    """

    subject: str
    recommendation: str
    quantity: str
    value: float
    threshold: float
    settings: Mapping[str, float] = field(default_factory=dict)
    blocks: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.recommendation} ({self.quantity}: {self.value:.3g}, threshold {self.threshold:.3g})"


def advice(findings: Findings | None) -> list[Advice]:
    """All recommendations that the findings support.

    Args:
        findings: what was measured; None if nothing was.

    Returns:
        The recommendations, an empty list if nothing was measured or no threshold was crossed.

    Example:
        >>> import curvoscope as cv
        >>> for one in cv.analysis.advice(cv.analysis.Findings(input_scales={"h.0.mlp": 20.0})):
        ...     print(one.subject, one.value, one.threshold, one.blocks)
        normalisation 20.0 3.0 ('h.0.mlp',)
    """
    if findings is None:
        return []
    rules = (_cap, _warm_up, _block_rates, _normalisation, _clipping, _sharing)
    return [found for rule in rules for found in rule(findings)]


def _critical(findings: Findings, sharpness: float) -> float:
    """The largest stable learning rate of gradient descent with momentum β: 2(1 + β)/λ_max."""
    return EDGE * (1 + findings.momentum) / sharpness


def _cap(findings: Findings) -> Iterator[Advice]:
    """Cap the learning rate: only for plain gradient descent and SGD with momentum, whose steps are -η g."""
    if findings.extremes is None or findings.extremes.largest.value <= 0:
        return
    top = findings.extremes.largest.value
    cap = _critical(findings, top)
    rate = findings.learning_rate
    formula = "2/λ max" if not findings.momentum else f"2(1 + {findings.momentum:g})/λ max"
    text = f"Keep the learning rate of SGD below {formula} = {cap:.3g}: above it the quadratic model diverges"
    limit = EDGE * (1 + findings.momentum)
    if rate is None:
        quantity, value = "learning rate × λ max at a learning rate of 1", top
    else:
        text = f"{text}; it is {rate:.3g}, {'too large' if rate > cap else 'below the cap'}"
        quantity, value = "learning rate × λ max", rate * top
    yield Advice("learning-rate cap", text, quantity, value, limit, {"learning rate": cap})


def _warm_up(findings: Findings) -> Iterator[Advice]:
    """Warm up if the learning rate is above the edge at the first (or only) measurement of λ_max."""
    rate = findings.learning_rate
    series = sorted(findings.sharpness.items())
    if not series and findings.extremes is not None:
        series = [(0, findings.extremes.largest.value)]
    if rate is None or not series or series[0][1] <= 0:
        return
    limit = EDGE * (1 + findings.momentum)
    step, first = series[0]
    if rate * first <= limit:
        return
    start = _critical(findings, first)
    below = next((at for at, value in series if rate * value <= limit), None)
    until = (
        f"over {below - step} steps, when λ max has fallen below the edge"
        if below is not None
        else "only as λ max falls: it was not seen below the edge"
    )
    yield Advice(
        "warm-up",
        f"Warm up: start at a learning rate of at most {start:.3g} and rise to {rate:.3g} {until}",
        f"learning rate × λ max at step {step}" if findings.sharpness else "learning rate × λ max",
        rate * first,
        limit,
        {"learning rate": start} | ({} if below is None else {"steps": float(below - step)}),
    )


def _block_rates(findings: Findings) -> Iterator[Advice]:
    """Learning rates per block, inversely proportional to their largest eigenvalues."""
    tops = {
        row.block: row.largest_eigenvalue.value
        for row in findings.rows
        if row.part == "total" and row.largest_eigenvalue.value > 0
    }
    if len(tops) < 2:
        return
    high, low = max(tops, key=tops.__getitem__), min(tops, key=tops.__getitem__)
    ratio = tops[high] / tops[low]
    if ratio <= APART:
        return
    yield Advice(
        "per-block learning rates",
        f"Give each block its own learning rate, inversely proportional to its curvature: {low} can take "
        f"{ratio:,.0f} times the rate of {high}",
        "largest over smallest λ max of the blocks",
        ratio,
        APART,
        {name: tops[high] / top for name, top in tops.items()},
        tuple(tops),
    )


def _normalisation(findings: Findings) -> Iterator[Advice]:
    """Missing normalisation: layers whose inputs are far from unit scale; the blocks grow with powers of that scale."""
    for name, scale in findings.input_scales.items():
        if scale > SCALE or scale < 1 / SCALE:
            threshold = SCALE if scale > SCALE else 1 / SCALE
            yield Advice(
                "normalisation",
                f"Normalise the input of {name}: the curvature of a layer grows with powers of its input's scale",
                f"root mean square of the input of {name}",
                scale,
                threshold,
                blocks=(name,),
            )


def _clipping(findings: Findings) -> Iterator[Advice]:
    """Clip gradients that spike, or steps that leave the region in which the quadratic prediction holds."""
    norms = [norm for norm in findings.gradient_norms if norm > 0]
    if len(norms) >= _LEAST_STEPS:
        median = statistics.median(norms)
        spike = max(norms) / median
        if spike > SPIKE:
            yield Advice(
                "clipping",
                f"Clip the gradient's norm at about {SPIKE * median:.3g}: it spikes to {spike:,.0f} times its median",
                "largest over median gradient norm",
                spike,
                SPIKE,
                {"gradient norm": SPIKE * median},
            )
    known = findings.taylor
    if known is None or known.radius is None or known.reaches_further or findings.learning_rate is None:
        return
    step = findings.learning_rate * known.direction.length
    if step > known.radius:
        norm = known.radius / findings.learning_rate
        yield Advice(
            "clipping",
            f"Clip the gradient's norm at {norm:.3g}: a step of SGD is longer than the radius in which the "
            f"second-order prediction holds to {known.tolerance:.0%}",
            "length of a step",
            step,
            known.radius,
            {"gradient norm": norm},
        )


def _sharing(findings: Findings) -> Iterator[Advice]:
    """Blocks that can share one adaptive learning rate: groups whose spectra are all within `ALIKE` of each other.

    The distances do not see eigenvalues below their threshold: the advice says down to which size the spectra agree.
    """
    known = findings.distances
    if known is None:
        return
    groups: list[list[int]] = []
    for i in range(len(known.names)):
        home = next((group for group in groups if all(float(known.values[i, j]) <= ALIKE for j in group)), None)
        if home is None:
            groups.append([i])
        else:
            home.append(i)
    for group in groups:
        if len(group) < 2:
            continue
        names = tuple(known.names[i] for i in group)
        widest = max(float(known.values[i, j]) for i in group for j in group)
        resolved = max(float(known.threshold[i, j]) for i in group for j in group)
        yield Advice(
            "shared adaptive learning rate",
            f"{', '.join(names)} can share one adaptive learning rate: "
            f"their spectra are alike above |λ| = {resolved:.1e}",
            "largest Jensen-Shannon distance within the group",
            widest,
            ALIKE,
            blocks=names,
        )
