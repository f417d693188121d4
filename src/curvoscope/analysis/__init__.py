"""What the Hessian says about a network."""

from curvoscope.analysis import recipes
from curvoscope.analysis.advice import Advice, Findings, advice
from curvoscope.analysis.allocation import Allocation, Menu, allocate, menu
from curvoscope.analysis.audit import audit
from curvoscope.analysis.audit_samples import SampledAudit
from curvoscope.analysis.audit_table import AuditRow, AuditTable
from curvoscope.analysis.block_diagonal import block_diagonal_error
from curvoscope.analysis.convergence import Convergence, ConvergenceCurve, convergence
from curvoscope.analysis.damping import Damping, damping
from curvoscope.analysis.data_sufficiency import DataSufficiency, data_sufficiency
from curvoscope.analysis.heterogeneity import (
    BlockRow,
    block_rows,
    block_table,
    headline,
    verdict,
)
from curvoscope.analysis.influence import Influence, influence
from curvoscope.analysis.landscape import Slice, landscape
from curvoscope.analysis.laplace import Laplace, laplace
from curvoscope.analysis.ledger import Interactions, Ledger, LedgerRow, ScaledChange
from curvoscope.analysis.plateau import GradientPlateau, gradient_plateau
from curvoscope.analysis.power_law import PowerLaw, Prediction, power_law
from curvoscope.analysis.propagation import AttentionSummary, LayerCurvature, Propagation, propagation
from curvoscope.analysis.scales import input_scales
from curvoscope.analysis.scaling import CurvatureSummary, Scaling, required_data, scaling, summary
from curvoscope.analysis.scores import scores
from curvoscope.analysis.sensitivity import measured_change, sensitivity
from curvoscope.analysis.surgeon import Repair, gptq, round_and_repair, surgeon
from curvoscope.analysis.taylor import Divergence, Taylor, divergence, taylor
from curvoscope.operators.block_matrix import PARTS, Part

__all__ = [
    "PARTS",
    "Advice",
    "Allocation",
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
    "Interactions",
    "Laplace",
    "LayerCurvature",
    "Ledger",
    "LedgerRow",
    "Menu",
    "Part",
    "PowerLaw",
    "Prediction",
    "Propagation",
    "Repair",
    "SampledAudit",
    "ScaledChange",
    "Scaling",
    "Slice",
    "Taylor",
    "advice",
    "allocate",
    "audit",
    "block_diagonal_error",
    "block_rows",
    "block_table",
    "convergence",
    "damping",
    "data_sufficiency",
    "divergence",
    "gptq",
    "gradient_plateau",
    "headline",
    "influence",
    "input_scales",
    "landscape",
    "laplace",
    "measured_change",
    "menu",
    "power_law",
    "propagation",
    "recipes",
    "required_data",
    "round_and_repair",
    "scaling",
    "scores",
    "sensitivity",
    "summary",
    "surgeon",
    "taylor",
    "verdict",
]
