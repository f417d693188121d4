"""The guided tour: the paper's story in six steps. A step sets a state and says in two sentences what to see."""

from dataclasses import dataclass

from curvoscope.explorer.state import State


@dataclass(frozen=True)
class Step:
    """A station: its title, its text, the figure to look at and the state that it sets."""

    title: str
    text: str
    figure: str
    state: State


STEPS = (
    Step(
        "The Hessian has blocks",
        "The loss Hessian of one attention layer falls into blocks for the query, key and value weights, and they do "
        "not look alike. The value block is a clean Kronecker pattern; every block that touches queries or keys is "
        "dense, because the softmax stands between these weights and the output.",
        "hessian",
        State(),
    ),
    Step(
        "Two parts, one of them indefinite",
        "The outer part is the Gauss-Newton matrix and has no negative eigenvalue; the functional part carries the "
        "residual and has both signs, but it is exactly zero on the value block. Move the residual to 0 and the whole "
        "functional part vanishes.",
        "functional",
        State(loss="ce"),
    ),
    Step(
        "Queries feel the scale of the data far more than values",
        "While the attention is spread out, the outer query block grows as σ⁶ and the value block only as σ²: at this "
        "small σ they are more than three orders of magnitude apart. Near σ = 1 they meet, and from there on, where "
        "the softmax saturates, the curves leave the lines of the theory.",
        "growth",
        State(sigma=0.1),
    ),
    Step(
        "It is the softmax",
        "With linear attention the outer query and value blocks grow alike, as σ⁶, and all functional diagonal blocks "
        "are exactly zero. What makes a Transformer's Hessian so uneven is the softmax, not attention as such.",
        "growth",
        State(sigma=0.1, attention="linear"),
    ),
    Step(
        "Layer norm tames the growth",
        "A norm before the layer takes the scale out of the input, so that the curves become flat and the blocks keep "
        "their ratio. Move σ from 0.1 to 10: the pictures hardly change.",
        "growth",
        State(sigma=0.1, norm="pre"),
    ),
    Step(
        "An attention sink empties the query and key blocks",
        "A bias towards the first token makes the rows of the attention nearly one-hot: their variance vanishes, and "
        "with it the blocks of queries and keys, while the value block stays. In the scalar model the bulk shrinks and "
        "the largest outlier grows with the sink.",
        "scalar",
        State(sigma=0.3, sink=8.0),
    ),
)
