"""The guided tour: the paper's findings in six steps. A step sets a state and describes it in two sentences."""

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
        "The loss Hessian of one attention layer has blocks for the query, key and value weights, and these blocks "
        "look different. The value block has a clean Kronecker pattern; every block of the query or key weights is "
        "dense, because the softmax lies between these weights and the output.",
        "hessian",
        State(),
    ),
    Step(
        "Two parts, one of them indefinite",
        "The outer part is the Gauss-Newton matrix and has no negative eigenvalue; the functional part contains the "
        "residual and has both signs, but it is exactly zero on the value block. Move the residual to 0 and the whole "
        "functional part vanishes.",
        "functional",
        State(loss="ce"),
    ),
    Step(
        "The scale of the data affects queries far more than values",
        "If the attention is spread out, the outer query block grows as σ⁶ and the value block only as σ²: at this "
        "small σ they are more than three orders of magnitude apart. Near σ = 1 they meet; beyond it the softmax "
        "saturates, and the curves leave the lines of the theory.",
        "growth",
        State(sigma=0.1),
    ),
    Step(
        "It is the softmax",
        "With linear attention the outer query and value blocks both grow as σ⁶, and all functional diagonal blocks "
        "are exactly zero. The softmax, not attention as such, makes a Transformer's Hessian so uneven.",
        "growth",
        State(sigma=0.1, attention="linear"),
    ),
    Step(
        "Layer norm tames the growth",
        "A norm before the layer removes the scale of the input, so the curves become flat and the blocks keep "
        "their ratio. Move σ from 0.1 to 10: the pictures hardly change.",
        "growth",
        State(sigma=0.1, norm="pre"),
    ),
    Step(
        "An attention sink empties the query and key blocks",
        "A bias towards the first token makes the rows of the attention nearly one-hot: their variance vanishes, and "
        "with it the blocks of queries and keys, but not the value block. In the scalar model the bulk shrinks and "
        "the largest outlier grows with the sink.",
        "scalar",
        State(sigma=0.3, sink=8.0),
    ),
)
