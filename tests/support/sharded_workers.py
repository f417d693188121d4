"""What each of several processes does in the tests of sharded models."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from autodiff_cases import GPT, MLP, points, tokens
from curvoscope.curvature import CrossEntropy, MeanSquaredError, blocks_of, hessian
from curvoscope.distributed import sharded_operators
from curvoscope.distributed.mesh import Mesh
from curvoscope.estimate.products import Probes, Products
from distributed_workers import ROWS, OnceTanh, Trap, batches, caught, shares, told


class Encoder(nn.Module):
    """Torch's own encoder layer: Q, K and V in one parameter, and a projection that its parent reads."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.ModuleList(
            [nn.TransformerEncoderLayer(4, 2, 6, 0.0, batch_first=True, dtype=torch.float64) for _ in range(2)]
        )
        self.scale = nn.Parameter(torch.tensor(1.3, dtype=torch.float64))
        self.register_buffer("shift", torch.full((2,), 0.25, dtype=torch.float64))

    def forward(self, x):
        x = torch.cat([x, x[:, :1]], 1)[:, None] + torch.arange(3, dtype=x.dtype)[:, None] / 3
        for layer in self.layers:
            x = layer(x)
        return self.scale * x.mean(1)[:, :2] + self.shift


def sharded(model, ranks, layers=(), root=True):
    """The model with its parameters spread over all ranks, each of the layers on its own."""
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh) if root else model


def held(model, blocks):
    """Which entries of a whole vector this rank has, from what torch says of its parameters alone."""
    found = {}
    for name, p in model.named_parameters():
        rank, size = dist.get_rank(), dist.get_world_size()
        found[name] = torch.zeros(p.shape, dtype=torch.bool)
        if not p.ndim:
            found[name][...] = rank == 0
            continue
        rows = found[name].chunk(size)
        if rank < len(rows):
            rows[rank][:] = True
        if isinstance(p, DTensor):
            assert p.to_local().numel() == int(found[name].sum())
    return blocks.gather(found)


def sharded_answers(rank, cuts, kind, hvp):
    """Products and estimates of one sharded model; whether it trains afterwards as it did before."""
    ranks, rows = len(cuts), shares(cuts)[rank]
    if kind == "encoder":
        model, loss, data = Encoder().eval(), MeanSquaredError(), batches(points(ROWS), rows, 3)
        sharded(model, ranks, model.layers, root=False)
    else:
        model, loss, data = GPT(), CrossEntropy(), batches(tokens(ROWS), rows)
        sharded(model, ranks, model.h if kind == "layers" else ())
    blocks = blocks_of(model)
    before = _trained(model, kind)
    H = hessian(model, loss, data, hvp=hvp)
    found = {"products": {}, "length": H.total.spaces[1].length, "error": H.difference_error}
    v = ramp(H.shape[0])
    found["mine"] = mine = held(model, blocks).nonzero().flatten()
    for part in ("total", "outer", "functional"):
        found["products"][part] = getattr(H, part) @ v[mine]
    found["loss"] = torch.tensor([H.loss, H.terms])
    found["estimates"] = estimates(H) if hvp == "autodiff" and kind == "layers" else {}
    after = _trained(model, kind)
    found["undisturbed"] = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return found


def _trained(model, kind):
    """This rank's part of the gradients of some loss, by the hooks of fully_shard."""
    x, _ = points(2) if kind == "encoder" else tokens(2)
    model(x).square().mean().backward()
    found = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
    model.zero_grad()
    return found


def ramp(size):
    return torch.linspace(-1, 1, size, dtype=torch.float64).cos()


def estimates(H):
    small, pair = H["h.0.attn.K"], H["h.0.attn.Q", "h.0.mlp.up"]
    both = H.outer + H.functional * 2.0
    return {
        "xtrace": _numbers(H.total.trace(matvecs=16)),
        "norm": _numbers(H.outer.frobenius_norm(matvecs=4)),
        "largest": [number for e in H.total.eigenvalues(k=2, matvecs=10) for number in _numbers(e)],
        "smallest": _numbers(H.total.eigenvalues(k=1, which="SA", matvecs=8)[0]),
        "density": H.total.density(matvecs=12, steps=6, seed=3).nodes.flatten().tolist(),
        "exact": _numbers(small.trace()),
        "all eigenvalues": small.density(matvecs=16).nodes.flatten().tolist(),
        "pair": _numbers(pair.frobenius_norm(matvecs=4)),
        "singular": _numbers(pair.spectral_norm(matvecs=4)),
        "multiple": _numbers((pair * 2.0).spectral_norm(matvecs=4)),
        "both parts": _numbers(H.stacked("h.0.mlp.up", ["h.0.attn.Q", "h.0.mlp.up"]).frobenius_norm(matvecs=4)),
        "sum": _numbers(both.trace(matvecs=4)),
        "selected": _numbers(H.total.select(["h.0.attn.V", "h.0.norm1"]).trace(matvecs=4)),
    }


def _numbers(estimate):
    return [estimate.value, estimate.stderr]


def sharded_mistakes(rank):
    """Each on rank 1, one after the other: the group must survive them all."""
    model, data = sharded(MLP(), 2), points(ROWS)
    mine = batches(data, shares((4, 3))[rank])
    build = lambda **options: hessian(  # noqa: E731
        **{"model": model, "loss_fn": MeanSquaredError(), "batches": mine} | options
    )
    found = {"fine": caught(build), "world": caught(lambda: build(process_group="world"))}
    found["blocks"] = caught(lambda: build(blocks=blocks_of(model).select("up.*" if rank else "*")))
    nan = [(x * float("nan"), y) for x, y in mine]
    found["nan"] = caught(lambda: build(batches=nan if rank else mine))
    found["form"] = caught(lambda: build(batches=[1, 2] if rank else mine))
    found["empty"] = caught(lambda: build(batches=[]))
    found["exact"] = caught(lambda: build(method="exact"))
    H = build()
    v = torch.ones(H.total.spaces[1].length, dtype=torch.float64)
    for name in ("dense", "diagonal", "eigenvalues", "to_scipy"):
        found[name] = caught(getattr(H.total, name))
    found["length"] = caught(lambda: H @ (v[1:] if rank else v))
    found["vector"] = caught(lambda: H @ (v * float("nan") if rank else v))
    found["calls"] = caught(lambda: (H.outer if rank else H.total) @ v)
    found["curvatures"] = caught(lambda: list(H.layer_curvatures()))
    found["after"] = caught(lambda: H @ v)
    once = sharded(MLP(OnceTanh), 2)
    found["once"] = caught(lambda: build(model=once) @ v)
    found["difference"] = caught(lambda: build(model=once, hvp="difference") @ v)
    chosen = build(model=once, hvp="auto"), build(hvp="auto")
    found["auto"] = None if [H.method_of("up.weight") for H in chosen] == ["difference", "autodiff"] else "wrong"
    return found


def traps(rank):
    """The model fails on rank 1 in the middle of a pass, at each kind of place; the group must survive all of it."""
    model = trapped(2)
    mine = batches(points(ROWS), shares((4, 3))[rank])
    found = {}
    for hvp in ("autodiff", "difference"):
        H = hessian(model, MeanSquaredError(), mine, hvp=hvp, memory_limit=1)
        v = torch.ones(H.total.spaces[1].length, dtype=torch.float64)
        before = H @ v
        for how in ("forward", "backward"):
            model[2].act.set = how if rank else None
            found[f"{hvp} {how}"] = caught(lambda H=H, v=v: H @ v, ValueError)
        model[2].act.set = None
        found[f"{hvp} after"] = torch.equal(H @ v, before)
    model[2].act.set = "forward" if rank else None
    found["at once"] = caught(lambda: hessian(model, MeanSquaredError(), mine), ValueError)
    model[2].act.set = None
    kept = hessian(model, MeanSquaredError(), mine)  # graphs are kept; one that has to be made fails
    model[2].act.set = "backward" if rank else None
    found["kept"] = caught(lambda: kept.outer @ v, ValueError)
    model[2].act.set = None
    found["kept after"] = caught(lambda: kept.outer @ v) or bool(torch.allclose(kept @ v, before, rtol=1e-8))
    return found


def trapped(ranks):
    """Three layers, each sharded on its own, the last of them with a trap in its middle."""
    model = nn.Sequential(MLP(), nn.Linear(2, 3, dtype=torch.float64), MLP(Trap))
    return sharded(model, ranks, model)


def sharded_vanishing(rank, how):
    """Rank 1 is gone in the middle of a pass; what the others are told."""
    model = trapped(dist.get_world_size())
    H = hessian(model, MeanSquaredError(), [points()], memory_limit=1)
    model[2].act.set = how if rank == 1 else None
    return told(H)


def random_numbers(rank, size):
    """The probes of a space whose even and odd entries lie on two ranks."""
    sharded_operators._CHUNK = 64
    space = sharded_operators.Spread(size, torch.arange(rank, size, 2), Mesh(dist.group.WORLD))
    return probes_of(space)


def probes_of(space):
    """Signs, normal numbers, and one column of them."""
    probes = Probes(Products(_In(space), "probes"), 5)
    return probes.signs(3), probes.normal(3), probes.normal(1)


class _In:
    """An operator in a space, as far as probes know it."""

    dtype, device = torch.float64, torch.device("cpu")

    def __init__(self, space):
        self.shape, self.spaces = (space.size, space.size), (space, space)

    def __matmul__(self, other):
        return other
