"""What the figures of a run show, for those who see them and for those who do not; by the names of their files."""

CAPTIONS = {
    "norms": (
        "Frobenius norm of every block, outer part, functional part and their sum, with 95 % intervals.",
        "Dot plot of the norms on one logarithmic axis, a panel a layer; all numbers are in the table of blocks.",
    ),
    "heat_map": (
        "Frobenius norms of the blocks as a heat map: outer part, functional part and their sum on one scale.",
        "Heat map with a panel for each part; all numbers are in the tables of blocks.",
    ),
    "pairs": (
        "Frobenius norms of all pairs of blocks as a heat map: outer part, functional part and their sum on one scale.",
        "Heat map of the pairs of blocks, a panel for each part; all numbers are in the tables of blocks and of "
        "off-diagonal blocks.",
    ),
    "densities": (
        "Spectral densities of the blocks: share of eigenvalues a decade, negative ones on the left, with 95 % bands.",
        "Curves of the densities in small panels, a row a layer; their ends are in the table of blocks.",
    ),
    "distances": (
        "Jensen-Shannon distances between the spectra of all pairs of blocks.",
        "Heat map of the distances from 0 to 1; all numbers are in the table of distances.",
    ),
    "hessian": (
        "The Hessian entry by entry, log10 of the size, with the borders of the blocks; exact zeros are grey.",
        "Picture of the matrix; the norm and the median entry of each block are in the tables of blocks.",
    ),
    "histograms": (
        "Histograms of the entries of the query block and of the value block, by part.",
        "Histograms of log10 of the size of the entries, a panel a block; the medians are in a table of this report.",
    ),
    "heads": (
        "Entropy and moments of the rows of attention, head by head, with 95 % intervals over the sequences.",
        "Dot plots, a panel a quantity and a colour a layer; all numbers are in the table of heads.",
    ),
    "depth": (
        "Curvature through depth, from the input to the output, with 95 % intervals.",
        "Four logarithmic panels over the layers; all numbers are in the table of layers.",
    ),
    "watch": (
        "Loss, sharpness beside the edge 2/lr, shares of the curvature and rows of attention while training.",
        "Four panels against the step; all numbers are in the table of measurements.",
    ),
    "trace": (
        "Trace and smallest eigenvalue of the Hessian while training, with 95 % intervals.",
        "Two panels against the step; all numbers are in the table of measurements.",
    ),
    "blocks": (
        "Frobenius norms of the parts of each diagonal block while training.",
        "Heat maps of the outer and of the functional part, a line a block, a column a measurement; the last "
        "measurement is in the table of blocks.",
    ),
}
