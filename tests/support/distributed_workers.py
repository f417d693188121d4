"""What each of several processes does in the tests of distributed Hessians; their answers come back in files."""

import functools
import os
import signal
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import curvoscope as cv
from autodiff_cases import GPT, MLP, Routed, points, routed_batches, tokens
from curvoscope.blocks import Blocks
from curvoscope.curvature import CrossEntropy, MeanSquaredError, RankError, blocks_of, hessian
from curvoscope.distributed import rank_sum
from curvoscope.errors import CurvoscopeError
from matrices import within
from preloaded import preloaded

ROWS = 7  # of the data of all ranks; row 5 has no target that counts


HANGS = 400  # seconds after which no machine is just slow
LONG = 1000.0  # the timeout of a group whose answers come without it


def launch(task, ranks, folder, *arguments):
    """The answers of `ranks` processes that run task(rank, *arguments) in one gloo group; None for one that died."""
    context = preloaded()
    processes = [
        context.Process(target=_run, args=(task, rank, ranks, folder, arguments), daemon=True) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    end = time.monotonic() + HANGS
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
        if process.is_alive():
            process.kill()
            raise AssertionError("a process hangs")
    files = [folder / f"{rank}.pt" for rank in range(ranks)]
    return [torch.load(file, weights_only=False) if file.exists() else None for file in files]


@functools.cache
def launched(task, ranks, *arguments):
    """As `launch`, once for all tests that read the answers, in whatever order they come."""
    with tempfile.TemporaryDirectory(prefix="curvoscope-") as folder:
        return launch(task, ranks, Path(folder), *arguments)


def _run(task, rank, ranks, folder, arguments):
    torch.set_num_threads(1)
    where = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=ranks, timeout=timedelta(seconds=LONG))
    torch.save(task(rank, *arguments), folder / f"{rank}.pt")


def shares(cuts):
    """The rows of each rank: `cuts` says how many."""
    return torch.arange(ROWS).split(list(cuts))


def batches(data, rows, size=2):
    """Batches of `size` of the rows, the last one smaller."""
    return [(data[0][some], data[1][some]) for some in rows.split(size)] if len(rows) else []


def answers(rank, cuts):
    """All that can be asked of the Hessian of a small GPT, and of a network with the mean squared error."""
    H = hessian(GPT(), CrossEntropy(), batches(tokens(ROWS), shares(cuts)[rank]), process_group="world")
    group = dist.group.WORLD
    other = hessian(
        MLP(), MeanSquaredError(), batches(points(ROWS), shares(cuts)[rank], 3), split="layer", process_group=group
    )
    return summary(H) | {
        "layer": other.outer["up.weight"].dense(),
        "own loss": own_loss(cuts, rank),
        "plain function": plain_function(cuts, rank),
    }


def summary(H):
    block = H["h.0.attn.Q"]
    return {
        "total": H.dense(),
        "outer": H.outer.dense(),
        "functional": H.functional.dense(),
        "pair": H["h.0.attn.Q", "h.0.mlp.up"].dense(),
        "loss": torch.tensor(H.loss),
        "terms": torch.tensor(H.terms),
        "trace": torch.tensor([H.total.trace(matvecs=20).value, H.outer.trace(matvecs=20).stderr]),
        "norm": torch.tensor(float(H.total.frobenius_norm(matvecs=20))),
        "diagonal": block.diagonal(matvecs=10).value,
        "spectral norm": torch.tensor(float(H.total.spectral_norm())),
        "eigenvalues": H.total.eigenvalues(k=3).value.float(),
        "density": H.total.density(matvecs=60, seed=3).nodes,
    }


def swept(rank, cuts):
    """Gram matrices of a sweep of a small GPT, tied and untied, in chunks of 8 samples."""
    return swept_by(batches(tokens(ROWS), shares(cuts)[rank]), "world")


def swept_by(found, group=None):
    sweep = cv.sweep(GPT(), CrossEntropy(), found, samples=8, seed=3, process_group=group)
    return dict(sweep.chunks[0]) | {"loss": torch.tensor(sweep.loss)}


ROUTES = [((0, 1), (0,)), ((1, 0), (1,)), ((0, 1, 2), (0, 0)), ((2,), (0,))]


def swept_routes(rank, cut):
    """As `swept`, of a model whose batches use different layers and heads; rank 0 has those before `cut`."""
    return swept_by_routes(slice(0, cut) if rank == 0 else slice(cut, None), "world")


def swept_by_routes(some, group=None, model=Routed):
    torch.manual_seed(1)
    found = routed_batches(ROUTES)[some]
    sweep = cv.sweep(model().double(), nn.CrossEntropyLoss(), found, samples=16, seed=3, process_group=group)
    return dict(sweep.chunks[0]) | {"loss": torch.tensor(sweep.loss)}


class Tires(Routed):
    """A model that fails in its fourth forward pass, as one does that runs out of memory."""

    passes = 0

    def forward(self, *arguments):
        self.passes += 1
        if self.passes == 4:
            raise ValueError("tired")
        return super().forward(*arguments)


def swept_until_tired(rank):
    """What a sweep raises on each rank if a layer fails on one of them."""
    try:
        swept_by_routes(slice(2 * rank, 2 * rank + 2), "world", Routed if rank == 0 else Tires)
    except (RankError, ValueError) as error:
        return type(error).__name__, str(error)


class Labelled(nn.Module):
    """A model that computes its own loss from labels."""

    def __init__(self):
        super().__init__()
        self.gpt = GPT()

    def forward(self, tokens, labels=None):
        logits = self.gpt(tokens)
        loss = None if labels is None else functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return SimpleNamespace(logits=logits, loss=loss)


def own_loss(cuts, rank, group="world"):
    found = [{"tokens": x, "labels": y} for x, y in batches(tokens(ROWS), shares(cuts)[rank])]
    H = hessian(Labelled(), None, found, process_group=group)
    return torch.tensor([H.loss, H.terms])


def plain_cross_entropy(outputs, targets):
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def plain_function(cuts, rank, group="world"):
    """A function whose terms are found on the data of all ranks, with a penalty."""
    loss = cv.losses.Regularised(plain_cross_entropy, lambda parameters: parameters["wpe.weight"].pow(4).sum())
    H = hessian(GPT(), loss, batches(tokens(ROWS), shares(cuts)[rank]), process_group=group)
    return torch.cat([torch.tensor([H.loss, H.terms]), H @ torch.ones(H.shape[0], dtype=torch.float64)])


class Once(torch.autograd.Function):
    """tanh, without a second derivative."""

    @staticmethod
    def forward(ctx, x):
        y = x.tanh()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, direction):
        (y,) = ctx.saved_tensors
        return direction * (1 - y.square())


class OnceTanh(nn.Module):
    def forward(self, x):
        return Once.apply(x)


class Trap(nn.Module):
    """tanh, that does something else once it is set: "forward" and "backward" raise there, "dies" and "killed" end the
    process."""

    def __init__(self):
        super().__init__()
        self.set = None

    def forward(self, x):
        if self.set == "forward":
            raise ValueError("no tanh here")
        if self.set == "dies":
            os._exit(1)
        if self.set == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        y = x.tanh()
        if self.set == "backward" and y.requires_grad:
            y.register_hook(_no_gradient)
        return y


def _no_gradient(gradient):
    raise ValueError("no gradient here")


def failures(rank):
    """Each mistake on rank 1, one after the other: the group must survive them all."""
    model, data = MLP(), points(ROWS)
    mine = batches(data, shares((4, 3))[rank])
    build = lambda **options: hessian(  # noqa: E731
        **{"model": model, "loss_fn": MeanSquaredError(), "batches": mine, "process_group": "world"} | options
    )
    found = {"fine": caught(build)}

    shaken = MLP()
    with torch.no_grad():
        shaken.down.weight[0, 0] += 1e-12 * rank
    found["parameters"] = caught(lambda: build(model=shaken))
    found["blocks"] = caught(lambda: build(blocks=blocks_of(model).select("up.*" if rank else "*")))
    found["order"] = caught(lambda: build(blocks=Blocks([*blocks_of(model).values()][:: -1 if rank else 1])))
    found["split"] = caught(lambda: build(split="layer" if rank else "model"))
    found["loss"] = caught(lambda: build(loss_fn=CrossEntropy() if rank else MeanSquaredError()))
    found["form"] = caught(lambda: build(batches=[1, 2] if rank else mine))
    nan = [(x * float("nan"), y) for x, y in mine]
    found["nan"] = caught(lambda: build(batches=nan if rank else mine))
    found["empty"] = caught(lambda: build(batches=[]))
    found["exact"] = caught(lambda: build(method="exact"))

    H = build(memory_limit=1)  # no graphs are kept: each product reads the batches
    v = torch.randn(H.shape[0], dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    found["vectors"] = caught(lambda: H @ v)
    found["calls"] = caught(lambda: (H.outer if rank else H.total).trace(matvecs=4))
    found["widths"] = caught(lambda: H.total @ torch.ones(H.shape[0], 1 + rank, dtype=torch.float64))
    found["curvatures"] = caught(lambda: list(H.layer_curvatures()))
    before = H @ torch.ones_like(v)
    inputs = mine[0][0].clone()
    if rank:
        mine[0][0].add_(1)
    found["changed"] = caught(lambda: H @ torch.ones_like(v))
    mine[0][0].copy_(inputs)
    found["after"] = float((H @ torch.ones_like(v) - before).abs().max() / before.abs().max())

    trapped = MLP(Trap)
    H = build(model=trapped, memory_limit=1)
    for how in ("forward", "backward"):
        trapped.act.set = how if rank else None
        found[how] = caught(lambda: H @ torch.ones_like(v), ValueError)
    trapped.act.set = "forward" if rank else None
    found["forward at once"] = caught(lambda: build(model=trapped), ValueError)
    trapped.act.set = None
    found["untrapped"] = caught(lambda: H @ torch.ones_like(v))

    small = dist.new_group([0])
    found["member"] = caught(lambda: build(process_group=small))
    return found


def vanishing(rank, how, timeout):
    """Rank 1 builds the Hessian and then is gone, or does nothing until the others know."""
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()  # the processes may start further apart than the timeout
    group = dist.new_group(timeout=timedelta(seconds=timeout))
    H = hessian(MLP(), MeanSquaredError(), [points()], process_group=group)
    if rank == 1:
        if how == "dies":
            os._exit(1)
        store.wait(["told 0", "told 2"], timedelta(seconds=HANGS))
        return None
    message = told(H)
    store.set(f"told {rank}", "")
    return message


def told(H):
    """What is said by a question that fails because a rank is gone; None if it does not fail."""
    try:
        H.total.trace(matvecs=4)
    except RankError as error:
        return str(error)
    return None


def differences(rank, cuts):
    """A product by central differences, and its error as estimated."""
    H = hessian(
        GPT(), CrossEntropy(), batches(tokens(ROWS), shares(cuts)[rank]), hvp="difference", process_group="world"
    )
    return H @ torch.linspace(-1, 1, H.shape[0], dtype=torch.float64), torch.tensor(H.difference_error)


def closed(rank, cuts):
    """Blocks in closed form, each rank having tokens of its own; the norm by both of its routes."""
    model = GPT()
    mine = batches(tokens(ROWS), shares(cuts)[rank])
    H = hessian(model, CrossEntropy(), mine, closed_blocks(model), "exact", process_group="world")
    found = closed_summary(H)
    rank_sum._FEW = 0  # as if there were too many entries
    found |= {f"gathered {name}": torch.tensor(H[name].frobenius_norm(), dtype=torch.float64) for name in H.names}
    query = H["h.0.attn.Q"]
    estimate = within(4000, query.frobenius_norm)  # the exact one needs 7 KiB
    found["estimate"] = torch.tensor([estimate.value, estimate.stderr], dtype=torch.float64)
    entries = query.shape[0] * query.shape[1] * 8  # room for a rank without tokens, not for the others
    return found | {"refused": caught(lambda: within(3 * entries, query.dense))}


def closed_summary(H):
    found = {"pair": H["h.0.attn.Q", "h.0.attn.K"].dense(), "transposed": H["h.0.attn.K", "h.0.attn.Q"].dense()}
    for part in ("total", "outer", "functional"):
        for name in H.names:
            block = getattr(H, part)[name]
            ramp = torch.linspace(-1, 1, block.shape[1], dtype=torch.float64)
            found |= {
                f"{part} {name} dense": block.dense(),
                f"{part} {name} trace": torch.tensor(block.trace(), dtype=torch.float64),
                f"{part} {name} diagonal": block.diagonal(),
                f"{part} {name} norm": torch.tensor(block.frobenius_norm(), dtype=torch.float64),
                f"{part} {name} largest": block.eigenvalues(k=2),
                f"{part} {name} product": block @ ramp,
            }
    return found


def closed_blocks(model):
    return blocks_of(model).select("*.attn.[QKV]", "*.mlp.up")


def caught(call, others=()):
    try:
        call()
    except CurvoscopeError as error:
        return type(error).__name__, error.argument, str(error)
    except others as error:
        return type(error).__name__, None, str(error)
    return None
