"""Captions and alternative texts of a run's figures, by the names of their files."""

CAPTIONS = {
    "norms": (
        "Frobenius norm of every block, outer part, functional part and their sum, with 95 % intervals.",
        "Dot plot of the norms on one logarithmic axis, one panel per layer; all numbers are in the table of blocks.",
    ),
    "heat_map": (
        "Frobenius norms of the blocks as a heat map: outer part, functional part and their sum on one scale.",
        "Heat map with one panel per part; all numbers are in the tables of blocks.",
    ),
    "pairs": (
        "Frobenius norms of all pairs of blocks as a heat map: outer part, functional part and their sum on one scale.",
        "Heat map of the pairs of blocks, one panel per part; all numbers are in the tables of blocks and of "
        "off-diagonal blocks.",
    ),
    "sweep_pairs": (
        "Frobenius norms of the Gauss-Newton part for all pairs of blocks; grey: within two standard errors of zero.",
        "Heat map of the pairs of blocks; the diagonal is in the table of blocks, all numbers are in table.json.",
    ),
    "sweep_depth": (
        "Frobenius norm and effective rank of the Gauss-Newton part through the layers, with 95 % intervals.",
        "Two logarithmic panels over the layers, one line per role; all numbers are in the table of blocks.",
    ),
    "sweep_heads": (
        "Frobenius norm of the Gauss-Newton part of every head, one row per layer.",
        "Heat maps, one panel per role; all numbers are in the table of heads.",
    ),
    "audit_errors": (
        "Error of each approximation at its best scale against the floats that it stores, one panel per kind of block: "
        "medians over the layers, with bars from the smallest to the largest.",
        "Scatter plots with a logarithmic horizontal axis; all numbers are in the table of approximations.",
    ),
    "audit_depth": (
        "Error at the best scale through the layers, one panel per approximation, with standard errors.",
        "Lines over the layers, one per role; all numbers are in the table of approximations.",
    ),
    "densities": (
        "Spectral densities of the blocks: share of eigenvalues per decade, negative ones left, with 95 % bands.",
        "Curves of the densities in small panels, one row per layer; their ends are in the table of blocks.",
    ),
    "distances": (
        "Jensen-Shannon distances between the spectra of all pairs of blocks.",
        "Heat map of the distances from 0 to 1; all numbers are in the table of distances.",
    ),
    "hessian": (
        "The Hessian entry by entry, log10 of the magnitude, with the borders of the blocks; exact zeros are grey.",
        "Picture of the matrix; the norm and the median entry of each block are in the tables of blocks.",
    ),
    "histograms": (
        "Histograms of the entries of the query block and of the value block, by part.",
        "Histograms of log10 |entry|, one panel per block; the medians are in a table of this report.",
    ),
    "heads": (
        "Entropy and moments of the attention rows, per head, with 95 % intervals over the sequences.",
        "Dot plots, one panel per quantity and one colour per layer; all numbers are in the table of heads.",
    ),
    "depth": (
        "Curvature through depth, from the input to the output, with 95 % intervals.",
        "Four logarithmic panels over the layers; all numbers are in the table of layers.",
    ),
    "interactions": (
        "Interactions ½ d·H d' of all pairs of blocks that change: red raises the loss, blue lowers it.",
        "Heat map of the pairs of blocks; all numbers are in the table of interactions.",
    ),
    "prediction": (
        "Predicted against measured change of the loss, each block changed alone, with 95 % intervals of their "
        "difference over sequences.",
        "Scatter with the diagonal; all numbers are in the table of blocks.",
    ),
    "ranking": (
        "What each block contributes to the change of the loss: first order, and second order in its two parts.",
        "Bars, the largest contributions first; all numbers are in the table of blocks.",
    ),
    "watch": (
        "Loss, sharpness with the edge 2/lr, shares of the curvature and attention rows during training.",
        "Four panels against the step; all numbers are in the table of measurements.",
    ),
    "trace": (
        "Trace and smallest eigenvalue of the Hessian during training, with 95 % intervals.",
        "Two panels against the step; all numbers are in the table of measurements.",
    ),
    "updates": (
        "The optimizer's own steps: change of the loss on the probe, measured and to second order, curvature along the "
        "step with λ max and the edge, and the contribution of each block to it.",
        "Two panels against the step and a heat map of the blocks; the last step is in the table of the step by block.",
    ),
    "blocks": (
        "Frobenius norms of the parts of each diagonal block during training.",
        "Heat maps of the outer and of the functional part, one row per block, one column per measurement; the last "
        "measurement is in the table of blocks.",
    ),
}
