"""What the Hessian says about a network."""

from curvoscope.analysis.advice import Advice, Findings, advice
from curvoscope.analysis.audit import audit
from curvoscope.analysis.audit_samples import SampledAudit
from curvoscope.analysis.audit_table import AuditRow, AuditTable
from curvoscope.analysis.block_diagonal import block_diagonal_error
from curvoscope.analysis.convergence import Convergence, ConvergenceCurve, convergence
from curvoscope.analysis.damping import Damping, damping
from curvoscope.analysis.data_sufficiency import DataSufficiency, data_sufficiency
from curvoscope.analysis.heterogeneity import (
    PARTS,
    BlockRow,
    Part,
    block_rows,
    block_table,
    headline,
    verdict,
)
from curvoscope.analysis.influence import Influence, influence
from curvoscope.analysis.landscape import Slice, landscape
from curvoscope.analysis.laplace import Laplace, laplace
from curvoscope.analysis.plateau import GradientPlateau, gradient_plateau
from curvoscope.analysis.power_law import PowerLaw, Prediction, power_law
from curvoscope.analysis.propagation import AttentionSummary, LayerCurvature, Propagation, propagation
from curvoscope.analysis.scales import input_scales
from curvoscope.analysis.scaling import CurvatureSummary, Scaling, required_data, scaling, summary
from curvoscope.analysis.taylor import Divergence, Taylor, divergence, taylor

__all__ = [
    "PARTS",
    "Advice",
    "AttentionSummary",
    "AuditRow",
    "AuditTable",
    "BlockRow",
    "Convergence",
    "ConvergenceCurve",
    "CurvatureSummary",
    "Damping",
    "DataSufficiency",
    "Divergence",
    "Findings",
    "GradientPlateau",
    "Influence",
    "Laplace",
    "LayerCurvature",
    "Part",
    "PowerLaw",
    "Prediction",
    "Propagation",
    "SampledAudit",
    "Scaling",
    "Slice",
    "Taylor",
    "advice",
    "audit",
    "block_diagonal_error",
    "block_rows",
    "block_table",
    "convergence",
    "damping",
    "data_sufficiency",
    "divergence",
    "gradient_plateau",
    "headline",
    "influence",
    "input_scales",
    "landscape",
    "laplace",
    "power_law",
    "propagation",
    "required_data",
    "scaling",
    "summary",
    "taylor",
    "verdict",
]
