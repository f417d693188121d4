"""What a model may return, and what a loss may read of it."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from autodiff_cases import MLP, points
from curvoscope.curvature import CrossEntropy, hessian
from curvoscope.errors import LossError
from curvoscope.losses.outputs import flatten, joined
from reference import normal, relative

Pair = namedtuple("Pair", "first second")


@dataclass
class Plain:
    logits: torch.Tensor
    hidden: torch.Tensor | None = None


@dataclass(frozen=True)
class Frozen:
    inner: Plain
    several: list = field(default_factory=list)


class Opaque:
    def __init__(self, hidden):
        self.hidden = hidden


class Returns(MLP):
    """An MLP that returns its output and its square in a container."""

    def __init__(self, wrap):
        super().__init__()
        self.wrap = wrap

    def forward(self, x):
        found = super().forward(x)
        return self.wrap(found, found.square())


def both(first, second, targets):
    return (first - targets).square().mean() + second.sin().mean()


READ = {
    "tuple": (lambda a, b: (a, b), lambda o, t: both(o[0], o[1], t)),
    "dict": (lambda a, b: {"a": a, "b": b}, lambda o, t: both(o["a"], o["b"], t)),
    "ordered dict": (lambda a, b: OrderedDict(a=a, b=b), lambda o, t: both(o["a"], o["b"], t)),
    "named tuple": (Pair, lambda o, t: both(o.first, o.second, t)),
    "dataclass": (Plain, lambda o, t: both(o.logits, o.hidden, t)),
    "nested dataclass": (lambda a, b: Frozen(Plain(a), [b]), lambda o, t: both(o.inner.logits, o.several[0], t)),
    "tuple with a dataclass": (lambda a, b: (a, Plain(b)), lambda o, t: both(o[0], o[1].logits, t)),
    "dataclass beside an opaque object": (
        lambda a, b: (Plain(a, b), Opaque(None)),
        lambda o, t: both(o[0].logits, o[0].hidden, t),
    ),
}


@pytest.mark.parametrize("micro_batch", [None, 2])
@pytest.mark.parametrize("kind", READ)
def test_containers(kind, micro_batch):
    wrap, loss = READ[kind]
    plain = hessian(MLP(), lambda o, t: both(o, o.square(), t), [points()])
    H = hessian(Returns(wrap), loss, [points()], micro_batch=micro_batch)
    v = normal(1)(H.shape[0])
    assert H.loss == pytest.approx(plain.loss, rel=1e-14)
    assert relative(H @ v, plain @ v) < 1e-13
    assert relative(H.outer @ v + H.functional @ v, plain @ v) < 1e-13


def test_a_loss_that_reads_inside_an_unknown_object_is_refused():
    """Its loss is right, its products were 100 % wrong."""
    model = Returns(lambda a, b: (a, Opaque(b)))
    H = hessian(model, lambda o, t: both(o[0], o[1].hidden, t), [points()])
    with pytest.raises(LossError, match=r"inside Opaque.*dataclasses"):
        H @ normal(1)(26)
    left_alone = hessian(model, lambda o, t: (o[0] - t).square().mean(), [points()])
    left_alone @ normal(1)(26)


def test_a_loss_that_reads_an_attribute_of_the_model_is_refused():
    class Stashes(MLP):
        def forward(self, x):
            found = super().forward(x)
            self.stashed = found.square().mean()
            return found

    model = Stashes()
    H = hessian(model, lambda o, t: (o - t).square().mean() + model.stashed, [points()])
    with pytest.raises(LossError, match="an attribute of the model"):
        H @ normal(1)(26)


def test_only_an_unknown_object():
    H = hessian(Returns(lambda a, b: Opaque(a)), lambda o, t: (o.hidden - t).square().mean(), [points()])
    with pytest.raises(LossError, match="inside Opaque"):
        H @ normal(1)(26)


def test_logits_of_a_dict_and_of_a_dataclass():
    targets = torch.tensor([0, 1, 1, 0])
    inputs = points()[0]
    v = normal(1)(26)
    expected = hessian(MLP(), nn.CrossEntropyLoss(), [(inputs, targets)]) @ v
    for wrap in (lambda a, b: {"logits": a, "hidden": b}, lambda a, b: Plain(a, b)):
        assert relative(hessian(Returns(wrap), CrossEntropy(), [(inputs, targets)]) @ v, expected) < 1e-13


def test_leaves_are_put_back_in_their_places():
    tree = {"a": [Plain(torch.zeros(1), None), 3], "b": Frozen(Plain(torch.ones(2)), [torch.ones(3), "text"])}
    leaves, rebuild = flatten(tree)
    other = rebuild([leaf + 1 if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves])
    assert float(other["a"][0].logits) == 1 and other["a"][1] == 3
    assert other["b"].several[0].tolist() == [2, 2, 2] and other["b"].several[1] == "text"
    assert float(tree["a"][0].logits) == 0  # the old tree is as it was
    assert joined([tree, tree])["b"].inner.logits.shape == (4,)
