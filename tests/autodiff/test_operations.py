"""Every operation on the list has a right second derivative, by `gradgradcheck`."""

import pytest
import torch
from torch.autograd import gradgradcheck
from torch.nn import functional as f
from torch.nn.attention import SDPBackend, sdpa_kernel

from curvoscope.autodiff.graph import CHECKED, operations, unchecked
from reference import normal


def positive(x):
    return x.square() + 0.5


INDEX = torch.tensor([[0, 2], [1, 1]])
ROWS = torch.tensor([1, 0, 1])
CLASSES = torch.tensor([0, 2, 1])
MASK = torch.tensor([[True, False, True], [False, True, True], [True, True, False]])


def written_into(x, y):
    """In place, into a part of a tensor."""
    found = 2 * x
    found[1:] = y[1:]
    return found**3


def embedded(x, y):
    return f.embedding(INDEX, x) @ y


# name of the case -> function, shapes of its inputs
CASES = {
    "add": (lambda x, y: (x + y) * (2 + x) * (x.add(y, alpha=0.5)), [(3, 2), (3, 2)]),
    "add a scalar": (lambda x: (x + 1.5).square(), [(3, 2)]),
    "addmm": (lambda x, y, z: torch.addmm(x, y, z).square(), [(3, 2), (3, 4), (4, 2)]),
    "addmv": (lambda x, y, z: torch.addmv(x, y, z).square(), [(3,), (3, 4), (4,)]),
    "alias": (lambda x: torch.ops.aten.alias(x) ** 3, [(3, 2)]),
    "amax": (lambda x: x.amax(1) ** 3, [(3, 4)]),
    "baddbmm": (lambda x, y, z: torch.baddbmm(x, y, z).square(), [(2, 3, 2), (2, 3, 4), (2, 4, 2)]),
    "bmm": (lambda x, y: torch.bmm(x, y).square(), [(2, 3, 4), (2, 4, 2)]),
    "binary cross-entropy": (
        lambda x: f.binary_cross_entropy_with_logits(x, torch.full((3, 2), 0.3).double()),
        [(3, 2)],
    ),
    "binary cross-entropy, weighted": (
        lambda x: f.binary_cross_entropy_with_logits(
            x, torch.full((3, 2), 0.3).double(), pos_weight=torch.tensor([0.5, 2.0]).double()
        ),
        [(3, 2)],
    ),
    "cat": (lambda x, y: torch.cat([x, y], 1) ** 3, [(3, 2), (3, 1)]),
    "clamp": (lambda x: x.clamp(-0.4, 0.6) ** 3 + x.clamp_min(0.1) ** 3 + x.clamp_max(0.2) ** 3, [(3, 4)]),
    "clone": (lambda x: x.clone() ** 3, [(3, 2)]),
    "contiguous": (lambda x: x.T.contiguous() ** 3, [(3, 2)]),
    "convolution": (lambda x, w, b: f.conv2d(x, w, b).square(), [(2, 2, 4, 4), (3, 2, 2, 2), (3,)]),
    "convolution, one axis": (lambda x, w, b: f.conv1d(x, w, b, groups=2).square(), [(2, 2, 5), (2, 1, 2), (2,)]),
    "cos": (lambda x: x.cos() * x.sin(), [(3, 2)]),
    "cross-entropy": (lambda x: f.cross_entropy(x, CLASSES), [(3, 4)]),
    "cross-entropy, smoothing": (lambda x: f.cross_entropy(x, CLASSES, label_smoothing=0.1), [(3, 4)]),
    "cross-entropy of maps": (lambda x: f.cross_entropy(x, torch.zeros(2, 3, 2).long()), [(2, 4, 3, 2)]),
    "cumsum": (lambda x: x.cumsum(1) ** 3, [(3, 4)]),
    "diagonal": (lambda x: torch.diag_embed(x.diagonal()) ** 3, [(3, 3)]),
    "divide": (lambda x, y: x / positive(y) + 1 / positive(x), [(3, 2), (3, 2)]),
    "dot": (lambda x, y: x.dot(y) ** 2, [(4,), (4,)]),
    "embedding": (embedded, [(3, 4), (4, 2)]),
    "erf": (lambda x: x.erf(), [(3, 2)]),
    "exp": (lambda x: x.exp() + x.expm1(), [(3, 2)]),
    "expand": (lambda x: x.expand(3, 2) ** 3, [(1, 2)]),
    "flip": (lambda x: x.flip(0) * x**2, [(3, 2)]),
    "gather": (lambda x: x.gather(1, INDEX) ** 3, [(2, 3)]),
    "gelu": (lambda x: f.gelu(x) + f.gelu(x, approximate="tanh"), [(3, 2)]),
    "glu": (lambda x: f.glu(x) ** 2, [(3, 4)]),
    "group norm": (lambda x, w, b: f.group_norm(x, 2, w, b).square(), [(2, 4, 3), (4,), (4,)]),
    "huber": (lambda x: f.huber_loss(x, torch.zeros(3, 2).double(), delta=0.5), [(3, 2)]),
    "index": (lambda x: x[ROWS, :2] ** 3, [(3, 4)]),
    "index_add": (lambda x, y: x.index_add(0, ROWS, y) ** 3, [(3, 2), (3, 2)]),
    "index_copy": (lambda x, y: x.index_copy(0, torch.tensor([2, 0]), y) ** 3, [(3, 2), (2, 2)]),
    "index_put": (lambda x, y: x.index_put((torch.tensor([2, 0]),), y) ** 3, [(3, 2), (2, 2)]),
    "index_select": (lambda x: x.index_select(0, ROWS) ** 3, [(3, 2)]),
    "in place": (written_into, [(3, 2), (3, 2)]),
    "kl_div": (lambda x: f.kl_div(x.log_softmax(-1), torch.full((3, 4), 0.25).double(), reduction="sum"), [(3, 4)]),
    "layer norm": (lambda x, w, b: f.layer_norm(x, (4,), w, b) ** 2, [(3, 4), (4,), (4,)]),
    "leaky relu": (lambda x: f.leaky_relu(x) ** 2, [(3, 2)]),
    "linear": (lambda x, w, b: f.linear(x, w, b) ** 2, [(2, 3, 4), (5, 4), (5,)]),
    "log": (lambda x: positive(x).log() + positive(x).log1p(), [(3, 2)]),
    "log-sum-exp": (lambda x: x.logsumexp(1), [(3, 4)]),
    "log-sigmoid": (lambda x: f.logsigmoid(x), [(3, 2)]),
    "log-softmax": (lambda x: x.log_softmax(1), [(3, 4)]),
    "masked_fill": (lambda x: x.masked_fill(MASK, 0.3) ** 3, [(3, 3)]),
    "matrix-vector": (lambda x, y: (x @ y) ** 2, [(3, 4), (4,)]),
    "maximum": (lambda x, y: torch.maximum(x, y) ** 3 + torch.minimum(x, y) ** 2, [(3, 2), (3, 2)]),
    "max along an axis": (lambda x: x.max(1).values ** 3 + x.min(1).values ** 2, [(3, 4)]),
    "max of all": (lambda x: x.max() ** 3, [(3, 4)]),
    "mean": (lambda x: x.mean() ** 2 + x.mean(1) ** 3, [(3, 4)]),
    "mse": (lambda x: f.mse_loss(x, torch.zeros(3, 2).double()), [(3, 2)]),
    "multiply": (lambda x, y: x * y * 1.5, [(3, 2), (3, 2)]),
    "negate": (lambda x: -(x**3), [(3, 2)]),
    "new view": (lambda x: x.view(2, 3) ** 3, [(3, 2)]),
    "norm": (lambda x: x.norm() + x.norm(dim=1).sum() + torch.linalg.vector_norm(x, dim=1).sum(), [(3, 4)]),
    "pad": (lambda x: f.pad(x, (1, 0)) ** 3, [(3, 2)]),
    "permute": (lambda x: x.permute(2, 0, 1) ** 3, [(3, 2, 2)]),
    "pooling": (lambda x: f.avg_pool2d(x, 2) ** 3 + f.adaptive_avg_pool2d(x, 2) ** 3, [(1, 2, 4, 4)]),
    "pooling by the largest": (lambda x: f.max_pool2d(x, 2) ** 3, [(1, 2, 4, 4)]),
    "power": (lambda x: positive(x) ** 1.7 + x**3, [(3, 2)]),
    "power of tensors": (lambda x, y: positive(x) ** y, [(3, 2), (3, 2)]),
    "power of a number": (lambda x: 2.0**x, [(3, 2)]),
    "product": (lambda x: x.prod(1), [(3, 4)]),
    "reciprocal": (lambda x: positive(x).reciprocal(), [(3, 2)]),
    "relu": (lambda x: f.relu(x) ** 2 + f.relu6(x) ** 2, [(3, 2)]),
    "repeat": (lambda x: x.repeat(2, 1) ** 3 + x.repeat_interleave(2, 0) ** 2, [(3, 2)]),
    "reshape": (lambda x: x.T.reshape(-1) ** 3, [(3, 2)]),
    "roll": (lambda x: x.roll(1, 0) * x**2, [(3, 2)]),
    "rsqrt": (lambda x: positive(x).rsqrt() + positive(x).sqrt(), [(3, 2)]),
    "scatter": (lambda x, y: x.scatter(1, INDEX[:, :1], y) ** 3, [(2, 3), (2, 1)]),
    "scatter_add": (lambda x, y: x.scatter_add(1, INDEX, y) ** 3, [(2, 3), (2, 2)]),
    "select": (lambda x: x[1] ** 3 + x[0, 1] ** 2, [(3, 2)]),
    "sigmoid": (lambda x: x.sigmoid(), [(3, 2)]),
    "silu": (lambda x: f.silu(x) + f.mish(x) + f.elu(x) + f.softplus(x), [(3, 2)]),
    "slice": (lambda x: x[:, 1:3] ** 3, [(3, 4)]),
    "smooth L1": (lambda x: f.smooth_l1_loss(x, torch.zeros(3, 2).double()), [(3, 2)]),
    "softmax": (lambda x: x.softmax(1), [(3, 4)]),
    "softmax, safe": (lambda x: torch.ops.aten._safe_softmax(x, 1), [(3, 4)]),
    "split": (lambda x: torch.cat([part**3 for part in (*x.split(2, 1), *x.split([1, 3], 1))], 1), [(3, 4)]),
    "squeeze": (lambda x: x.squeeze(1).unsqueeze(0).squeeze() ** 3, [(3, 1, 2)]),
    "stack": (lambda x, y: torch.stack([x, y], 1) ** 3, [(3, 2), (3, 2)]),
    "standard deviation": (lambda x: x.std(1) + x.var(1), [(3, 4)]),
    "strided": (lambda x: torch.as_strided(x, (2, 2), (2, 1)) ** 3, [(3, 2)]),
    "subtract": (lambda x, y: (x - y) ** 3 + (1 - x) ** 2, [(3, 2), (3, 2)]),
    "sum": (lambda x: x.sum() ** 2 + x.sum(1) ** 3, [(3, 4)]),
    "tanh": (lambda x: x.tanh(), [(3, 2)]),
    "to another precision": (lambda x: x.to(torch.complex128).real ** 3, [(3, 2)]),
    "topk": (lambda x: x.topk(2, 1).values ** 3 + x.sort(1).values[:, :2] ** 2, [(3, 4)]),
    "transpose": (lambda x: x.transpose(0, 1) ** 3 + x.t() ** 2, [(3, 2)]),
    "triangle": (lambda x: x.tril() ** 3 + x.triu(1) ** 2, [(3, 3)]),
    "unbind": (lambda x: torch.stack([part**3 for part in x.unbind(0)]), [(3, 2)]),
    "unflatten": (lambda x: x.unflatten(0, (3, 2)).flatten() ** 3, [(6,)]),
    "unfold": (lambda x: x.unfold(1, 2, 1) ** 3, [(3, 4)]),
    "where": (lambda x, y: torch.where(MASK, x, y) ** 3, [(3, 3), (3, 3)]),
    "attention": (
        lambda q, k, v: f.scaled_dot_product_attention(q, k, v, is_causal=True),
        [(1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4)],
    ),
    "attention, grouped": (
        lambda q, k, v: f.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        [(1, 4, 3, 2), (1, 2, 3, 2), (1, 2, 3, 2)],
    ),
}


def built(name):
    function, shapes = CASES[name]
    draw = normal(len(name))
    return function, tuple(draw(*shape).requires_grad_() for shape in shapes)


def operations_of(function, inputs):
    with sdpa_kernel(SDPBackend.MATH):
        return operations([function(*inputs).grad_fn])


@pytest.mark.parametrize("name", CASES)
def test_second_derivative(name):
    function, inputs = built(name)
    with sdpa_kernel(SDPBackend.MATH):
        assert gradgradcheck(function, inputs)
    assert not unchecked(operations_of(function, inputs))


def test_every_operation_on_the_list_is_in_a_case():
    found = {operation.name for name in CASES for operation in operations_of(*built(name))}
    assert found == CHECKED


def test_operations_are_told_apart_by_the_inputs_that_have_derivatives():
    x, w = normal(0)(3), normal(1)(3)
    one, both = (operations_of(torch.mul, (x.requires_grad_(), w.requires_grad_(flag))) for flag in (False, True))
    assert {operation for operation in one if operation.name == "MulBackward0"} == {("MulBackward0", (True, False))}
    assert {operation for operation in both if operation.name == "MulBackward0"} == {("MulBackward0", (True, True))}


def test_functions_in_python_are_known_by_their_module():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, g):
            return 2 * g

    (found,) = unchecked(operations_of(Twice.apply, (normal(0)(3).requires_grad_(),)))
    assert found.name.endswith("test_operations.test_functions_in_python_are_known_by_their_module.<locals>.Twice")
