"""Why a number on the benchmark page is bold: one sentence for each kind of row. The page prints those it needs."""

import re

_PRODUCTS = ("Products: Hugging Face's GPT-2", "Products: GPT-2 of torch's own layers")
_REASONS: tuple[tuple[str, str, str], ...] = (  # title of the section, pattern of the row, sentence
    (
        "Closed forms",
        "nine dense blocks",
        "Dense blocks: with so few tokens the time is that of the products over the tokens and of the copies to both "
        "sides of the diagonal, which a memory write does not have.",
    ),
    (
        "Closed forms",
        "behind rotary positions",
        "Keys behind rotary positions: the exact norm takes 2 L³ d_k multiplications per head, 32 products only L².",
    ),
    (
        "Approximations against the curvature",
        "approximations of",
        "Audit: every approximation is multiplied with the samples of every block once more; the sweep alone "
        "multiplies them once.",
    ),
    (
        "Solving",
        r"curvlinops' CG",
        "First layer: every product passes through all layers in both packages, so the kept graph is the whole gain.",
    ),
    (
        "Solving",
        "preconditioner|products of .* solves",
        "Preconditioners: at these dampings the eigenvalues of the blocks are already within a factor that plain CG "
        "handles; an approximation that is wrong in some directions spreads them and adds products.",
    ),
    (
        "Solving",
        "residual of KFAC",
        "KFAC inverse: it needs no product with the matrix; our solve to the same residual takes the loss, the graph "
        "and a few products.",
    ),
    (
        "Several vectors",
        "",
        "Larger sizes: arithmetic dominates the calls that the vectors share, and with the graph kept all of a product "
        "depends on the vector, so eight vectors take eight times the arithmetic.",
    ),
    *(
        (
            title,
            r"\| curvlinops \| .*\*\*",
            "Memory of the Gauss-Newton product: ours keeps the graph between products, curvlinops recomputes it in "
            "every product and takes twice the time.",
        )
        for title in _PRODUCTS
    ),
    *(
        (
            title,
            r"\| ours \|",
            "Products of our own: the gradient is fused (attention, layer norm, cross-entropy), while the second "
            "derivative takes these steps one by one.",
        )
        for title in _PRODUCTS
    ),
    (
        "Several ranks",
        "16 rows",
        "FSDP2 with 16 rows: the ranks move as many parameters as they compute with, and two processes on two cores "
        "have no idle core to move them.",
    ),
    (
        "The monitor, the explorer, the figures",
        "the explorer",
        "Explorer: browser and server share two cores; in the slowest moves the eigenvalues of 768 rows compete with "
        "the drawing of seven figures.",
    ),
)


def reason(title: str, row: str) -> str | None:
    """The sentence for a row of a section; None if there is none."""
    return next((why for name, pattern, why in _REASONS if name == title and re.search(pattern, row)), None)
