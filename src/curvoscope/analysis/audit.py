"""`audit`: how far approximations of a Hessian block are from the block itself.

With H the block and A the approximation, |H - A|² = |H|² - 2 <H, A> + |A|² in the Frobenius norm. From all gradients
gamma of a small model every term is exact: <H, A> = sum gamma^T A gamma. From samples, A is made of one half of them
and compared with the other half, so that the mean of gamma^T A gamma there is an unbiased estimate of <H, A>.
"""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from curvoscope import checks
from curvoscope.analysis.audit_exact import DenseTruth, FactoredTruth
from curvoscope.analysis.audit_samples import SampledAudit
from curvoscope.analysis.audit_table import AuditRow, AuditTable, Standin, repeats_the_weight, standins
from curvoscope.approximations import GradientSource, joined, source_of
from curvoscope.approximations.source import CurvatureSource
from curvoscope.errors import CurvoscopeError, DtypeError, EmptyError, RangeError
from curvoscope.operators import BlockHessian
from curvoscope.operators.base import LinearOperator
from curvoscope.operators.block_matrix import PARTS, BlockMatrix
from curvoscope.sweep import Sweep

DEFAULT = (
    *("diagonal", "input", "kfac", "tkfac", "ekfac", "shampoo", "shampoo:1/4", "kl_shampoo", "kronecker:1"),
    *("kfac/heads", "kronecker:1/heads", "neurons", "heads"),
)
_DENSE = 2048  # entries of a weight up to which its block is formed

Wanted = Sequence[str | Sequence[str]]


def audit(
    H: CurvatureSource | Sweep,
    blocks: Wanted | None = None,
    approximations: Sequence[Standin] | None = None,
    part: str = "outer",
    damping: float | None = None,
) -> AuditTable:
    """Measure approximations of blocks against the blocks themselves.

    From a Hessian every number is exact, and needs one backward pass for each direction of the loss Hessian: for small
    models. From a sweep, an approximation is computed from one half of the samples and compared on the other half; its
    error includes the sampling error and has an error bar. Approximations that keep entries of H (diagonal, neurons,
    heads, layers) are measured as if computed from H itself. To audit a large model without keeping samples, give
    `cv.sweep` a `SampledAudit`.

    Args:
        H: a Hessian, or a sweep that keeps its samples: small ones, and those of the blocks in its `keep=`.
        blocks: names or shell patterns; several names in a tuple are audited as one weight. None: the weights of all
            linear layers.
        approximations: names such as "kfac", "kronecker:4", "shampoo:1/4", "kfac/heads"; operators, which must not come
            from the same samples; or dictionaries of operators by block, as `cv.approximations.read_factors` returns.
            The second of one name is called "kfac (2)". None: a default list, as far as it applies to each block.
        part: of the Hessian to compare with: "outer", "functional" or "total". Approximations given by name are always
            computed from the outer part, as their definitions say; pass those of the total as operators, such as
            `cv.approximations.diagonal(H.total, name)`.
        damping: of the steps, which a sweep does not have; None: a tenth of the mean eigenvalue of the outer part.

    Returns:
        One row per block and approximation.

    Example:
        >>> import torch, curvoscope as cv
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).double()
        >>> X, labels = torch.randn(8, 3).double(), torch.tensor([0, 1] * 4)
        >>> H = cv.hessian(model, torch.nn.CrossEntropyLoss(), [(X, labels)])
        >>> rows = cv.analysis.audit(H, ["0.weight"], ["diagonal", "kfac", "ekfac"])
        >>> [row.approximation for row in rows], rows[1].floats, rows[1].error.exact
        (['diagonal', 'kfac', 'ekfac'], 25, True)
        >>> rows[2].error < rows[1].error < rows[0].error
        True
    """
    checks.choice("part", part, PARTS)
    damping = None if damping is None else checks.damping(damping)
    for argument, given in (("blocks", blocks), ("approximations", approximations)):
        if isinstance(given, str):
            raise DtypeError(argument, f"got the text {given!r}, expected a list; give [{given!r}]")
        if given is not None and not len(given):
            raise EmptyError(argument, "is empty; give some, or omit it")
    strict = blocks is not None and approximations is not None
    wanted = DEFAULT if approximations is None else approximations
    if isinstance(H, Sweep):
        if part != "outer":
            raise RangeError("part", f"got {part!r}, but a sweep has only the outer part; pass a cv.hessian")
        if damping is not None:
            raise RangeError("damping", f"got {damping}, but sampled audits do not measure damped steps; omit it")
        return _of_sweep(H, blocks, wanted, strict)
    rows: list[AuditRow] = []
    for key in _chosen(_names(H), blocks):
        source = _source(H, key, blocks is None)
        if source is None:
            continue
        truth = _truth(H, source, key, part, damping)
        if truth.norm == 0:
            if strict:
                raise RangeError("blocks", f"{source.name!r} is zero, so relative errors are not defined; omit it")
            continue
        for name, make in standins(source.name, wanted):
            if approximations is None and repeats_the_weight(name, source):
                continue
            try:
                found = make(source)
            except CurvoscopeError as error:
                if strict or error.argument not in ("block", "approximation"):
                    raise
                continue
            rows.append(truth.row(source.name, name, found))
    if not rows:
        hint = "; name blocks that are not the weights of linear layers" if blocks is None else ""
        raise EmptyError("blocks", f"all are zero, or none of the approximations applies to them{hint}")
    return AuditTable(rows)


def _of_sweep(sweep: Sweep, blocks: Wanted | None, wanted: Sequence[Standin], strict: bool) -> AuditTable:
    held = list(dict.fromkeys(name for chunk in sweep.kept for name in chunk))
    if not held:
        raise EmptyError(
            "sweep", "keeps no samples; name blocks in cv.sweep(..., keep=[...]), or give it a SampledAudit"
        )
    found = SampledAudit(wanted, strict=strict)
    for key in _chosen(held, blocks):
        for number, chunk in enumerate(sweep.kept):
            sources = [source for name in key if (source := _kept(chunk, name)) is not None]
            if len(sources) == len(key) and (blocks is not None or sources[0].parts[0].inputs is not None):
                found(number, sources[0] if len(sources) == 1 else joined(sources))
    return found.table()


def _kept(chunk: Mapping[str, GradientSource], name: str) -> GradientSource | None:
    """The samples of a block or of one of its heads, if they are kept."""
    whole, _, number = name.rpartition(".")
    if name not in chunk and whole in chunk:
        return chunk[whole].head(int(number))
    return chunk.get(name)


def _names(H: CurvatureSource) -> list[str]:
    if isinstance(H, BlockHessian | BlockMatrix):
        return H.names
    if isinstance(H, GradientSource):
        return [H.name]
    if isinstance(H, LinearOperator):
        return ["H"]
    raise DtypeError("H", f"got {type(H).__name__}, expected a Hessian, a sweep or an operator")


def _chosen(names: Sequence[str], wanted: Wanted | None) -> list[tuple[str, ...]]:
    """The blocks to audit, each as the names of its weights."""
    if wanted is None:
        return [(name,) for name in names]
    found: dict[tuple[str, ...], None] = {}
    for entry in wanted:
        if isinstance(entry, str):
            some: list[tuple[str, ...]] = [(name,) for name in names if name == entry or fnmatchcase(name, entry)]
            missing = [] if some or _is_head(entry, names) else [entry]
            some = some or [(entry,)]
        elif isinstance(entry, Iterable):
            some, missing = [tuple(entry)], [name for name in entry if name not in names]
            checks.different_blocks("blocks", some[0], {})
        else:
            raise DtypeError("blocks", f"has an entry {entry!r}, expected a name or a tuple of names")
        for name in missing:
            checks.block_named("blocks", name, names)
        found |= dict.fromkeys(some)
    return list(found)


def _is_head(name: str, names: Sequence[str]) -> bool:
    whole, _, number = name.rpartition(".")
    return whole in names and number.isdecimal()


def _source(H: CurvatureSource, key: tuple[str, ...], linear_only: bool) -> GradientSource | None:
    """The gradients of a weight or of several; None for one that is not a linear layer's, if such are left out."""
    if linear_only and isinstance(H, BlockHessian) and 1 in H.shapes[key[0]]:
        return None
    sources = [source_of(H, name) for name in key]
    if linear_only and all(part.inputs is None for part in sources[0].parts) and isinstance(H, BlockHessian):
        return None
    return sources[0] if len(sources) == 1 else joined(sources)


def _truth(
    H: CurvatureSource, source: GradientSource, key: tuple[str, ...], part: str, damping: float | None
) -> DenseTruth | FactoredTruth:
    size = source.shape[0] * source.shape[1]
    if part == "outer":
        return DenseTruth(source.dense(), source, damping) if size <= _DENSE else FactoredTruth(source, damping)
    if not isinstance(H, BlockHessian) or len(key) > 1:
        raise RangeError("part", f"got {part!r}, which only single blocks of a Hessian have")
    checks.fits(2 * size**2 * 8, None, f"the block {key[0]!r}", "audit its outer part")
    return DenseTruth(getattr(H, part)[key[0]].dense(), source, damping)
