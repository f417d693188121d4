"""Why a number on the benchmark page is bold: one sentence for each kind of row. The page prints those it needs."""

import re

_REASONS: tuple[tuple[str, str, str], ...] = (  # pattern of the section's title, pattern of the row, sentence
    (
        "Closed forms",
        "nine dense blocks",
        "Dense blocks: with so few tokens, the products over the tokens and the copies to both sides of the diagonal "
        "take most of the time; a plain memory write has neither.",
    ),
    (
        "Closed forms",
        "behind rotary positions",
        "Keys behind rotary positions: the exact norm takes 2 L³ d_k multiplications per head, 32 products only L².",
    ),
    (
        "Closed forms|Without AVX-512",
        "six exact norms",
        "Exact norms: with Gaussian inputs Hutchinson's estimate reaches 1 % after about a hundred products, while "
        "exact norms take as long as with any other inputs.",
    ),
    (
        "Long sequences",
        "",
        "Attention in linear memory: the scores are recomputed instead of stored, which saves time only if the matrix "
        "of scores is large.",
    ),
    (
        "The whole model at once",
        "SmolLM2",
        "Trained weights: a few directions dominate a block, so its norm needs 208 samples instead of 64.",
    ),
    (
        "Approximations against the curvature",
        "approximations of",
        "Audit with few tokens: one product of a sample with a matrix as wide as the output of `mlp.up` takes longer "
        "than the sample's backward pass through the layer.",
    ),
    (
        "Solving",
        "curvlinops' CG",
        "First layer: every product passes through all layers in both packages, so the kept graph is the whole gain.",
    ),
    (
        "Solving",
        "KFAC inverse of one random gradient",
        "Our KFAC inverse: `cv.hessian` first runs the loss twice, to count its terms and to check that it is "
        "deterministic; without these runs ours takes at most 1.11 times as long.",
    ),
    (
        "Solving",
        "preconditioner|products of .* solves",
        "Preconditioners: KFAC alone leaves a residual of 0.39 or more on these blocks, and CG with so inaccurate an "
        "approximation often takes more products than without it.",
    ),
    (
        "Solving",
        "residual of KFAC",
        "KFAC inverse: it needs no product with the matrix; our solve to the same residual needs the loss, the graph "
        "and a few products.",
    ),
    (
        "The overhead of estimates",
        "",
        "Estimates: drawing the probes and multiplying them with the results takes time in proportion to the number "
        "of parameters.",
    ),
    (
        "Several vectors",
        "",
        "Larger sizes: arithmetic outweighs the overhead of calls, which the vectors share; once the graph is kept, "
        "all arithmetic of a product depends on the vector.",
    ),
    (
        "Products",
        r"\| (curvlinops|hessian-eigenthings|PyHessian) \|.*\*\*\d\.\d+\*\* \|",
        "Memory: our products keep the graph; curvlinops rebuilds it in every product, which takes time.",
    ),
    (
        "Products",
        r"\| ours \|",
        "Products above the aim: operations on single entries in norms, activations and attention, which torch fuses "
        "in the gradient but not in its derivative; most are too short for two threads (*Where the time of a product "
        "goes*).",
    ),
    (
        "Estimates",
        "PyHessian",
        "PyHessian: both times include the set-up; ours also runs the model to count the terms of the loss and to look "
        "for operations with wrong second derivatives, and checks in every product that the weights are unchanged.",
    ),
    (
        "Several ranks",
        "data-parallel",
        "Two ranks: the processes share the memory bandwidth; the second number compares with independent processes, "
        "which share it too.",
    ),
    (
        "Several ranks",
        "16 rows",
        "FSDP2 with 16 rows: the ranks move as many parameters as they compute with.",
    ),
    (
        "The monitor, the explorer, the figures",
        "the explorer",
        "Explorer: browser and server share the cores, and the eigenvalues of 768 rows and the drawing of seven "
        "figures take most of a move.",
    ),
)


def reason(title: str, row: str) -> str | None:
    """The sentence for a row of a section; None if there is none."""
    return next((why for name, pattern, why in _REASONS if re.match(name, title) and re.search(pattern, row)), None)
