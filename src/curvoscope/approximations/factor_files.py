"""Kronecker factors that other tools have written: kronfluence and bergson.

Both write, for each `nn.Linear` by the name of its module, the covariance of its inputs (a, a) and of the gradients at
its output (p, p), their eigenvectors and the corrected eigenvalues (p, a), as safetensors:

    kronfluence     activation_covariance.safetensors, ..., lambda_matrix.safetensors, and num_*_processed.safetensors
    bergson         activation_sharded/shard_0.safetensors, ..., rows in as many shards as ranks; total_processed.pt
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from curvoscope import checks
from curvoscope.approximations.base import Approximation
from curvoscope.approximations.eigenbasis import EigenbasisForm
from curvoscope.approximations.product import KroneckerProduct
from curvoscope.blocks import STORED, TRANSPOSED, Block, Blocks
from curvoscope.errors import MissingPackageError, ModelError, ShapeError
from curvoscope.families.block_maps import blocks_of
from curvoscope.families.model_folders import CorruptFileError, NotAModelError

Tensors = Mapping[str, Tensor]


def read_factors(
    folder: Path | str, model: nn.Module, blocks: Blocks | None = None, kind: str = "ekfac"
) -> dict[str, Approximation]:
    """The approximations in a folder of kronfluence or bergson, by block, for `cv.analysis.audit`.

    Their scale is that of the tool's loss, a sum where ours is a mean: compare `best_scale_error` and `cosine`.

    Args:
        folder: where the tool has written its factors.
        model: whose linear layers they are of.
        blocks: of the model; None: `cv.blocks_of(model)`. A block may be a part of a layer's outputs for "kfac".
        kind: "ekfac", the corrected eigenvalues in the eigenbasis of the covariances, or "kfac", the covariances.

    Returns:
        An approximation for each block whose weight the folder has.

    Example:
        >>> import torch, curvoscope as cv
        >>> from safetensors.torch import save_file
        >>> model, X = torch.nn.Sequential(torch.nn.Linear(3, 2, bias=False)).double(), torch.randn(4, 3).double()
        >>> factors = {"activation_covariance": X.T @ X, "gradient_covariance": 4 * torch.eye(2).double()}
        >>> for name, tensor in factors.items():
        ...     save_file({"0": tensor.contiguous()}, f"{name}.safetensors")
        ...     save_file({"0": torch.tensor([4])}, f"num_{name}_processed.safetensors")
        >>> found = cv.approximations.read_factors(".", model, kind="kfac")
        >>> H = cv.hessian(model, torch.nn.MSELoss(), [(X, X[:, :2])])
        >>> row = cv.analysis.audit(H, ["0.weight"], [found])[0]
        >>> row.approximation, row.best_scale_error < 1e-12
        ('kfac', True)
    """
    checks.choice("kind", kind, ("ekfac", "kfac"))
    read = _reader(Path(folder))
    known = blocks_of(model) if blocks is None else blocks
    weights = {name: parameter for name, parameter in model.named_parameters() if parameter.ndim == 2}
    found: dict[str, Approximation] = {}
    for module, layer in (_corrected if kind == "ekfac" else _covariances)(read).items():
        parameter = _parameter(module, weights, folder)
        layer.check(module, weights[parameter])
        for name, block in known.items():
            if len(block.pieces) == 1 and block.pieces[0].parameter == parameter:
                found[name] = layer.of_block(block, weights[parameter].dtype)
    return found


def _parameter(module: str, weights: Collection[str], folder: Path | str) -> str:
    """The weight of a layer, whose name may lack its beginning, as if the tool was given a part of the model."""
    whole = f"{module}.weight"
    found = [whole] if whole in weights else [name for name in weights if name.endswith(f".{whole}")]
    if len(found) == 1:
        return found[0]
    why = f"has several: {', '.join(found)}; give the part of the model that the tool was given"
    raise ModelError(
        "model",
        f"has no linear layer {module!r}, but {folder} has factors for it; are they from another model?"
        if not found
        else f"{folder} has factors for a layer {module!r}, and the model {why}",
    )


@dataclass(frozen=True)
class _FactorLayer:
    """Factors of one layer: of the inputs (a, a), of the outputs (p, p), and eigenvalues (p, a) in their basis."""

    inputs: Tensor
    outputs: Tensor
    values: Tensor | None = None

    def check(self, module: str, weight: Tensor) -> None:
        """Raise unless the factors are of this weight (p, a)."""
        p, a = weight.shape
        sizes = len(self.outputs), len(self.inputs)
        for matrix, expected in ((self.outputs, sizes[:1] * 2), (self.inputs, sizes[1:] * 2), (self.values, sizes)):
            if matrix is not None and tuple(matrix.shape) != expected:
                raise CorruptFileError(
                    "folder",
                    f"layer {module!r} has a factor of shape {tuple(matrix.shape)}, expected {expected}; is a shard "
                    "missing?",
                )
        if sizes[0] != p or sizes[1] not in (a, a + 1):
            raise ShapeError(
                "model",
                f"layer {module!r} is {a} -> {p}, but its factors are for {sizes[1]} -> {sizes[0]}; are they from "
                "another model?",
            )
        if sizes[1] == a + 1 and self.values is not None:
            raise ModelError("kind", f"the eigenvalues of {module!r} include a bias; read the folder with kind='kfac'")

    def of_block(self, block: Block, dtype: torch.dtype) -> Approximation:
        """The approximation in the layout of the block: (a, p), or (p, a) as it is stored."""
        piece = block.pieces[0]
        if piece.layout not in (STORED, TRANSPOSED):
            raise ModelError("blocks", f"{block.name!r} is not stored as a matrix")
        outputs, inputs = piece.index
        left, right = self.inputs.to(dtype), self.outputs.to(dtype)
        flipped = piece.layout == STORED
        if self.values is not None:
            if (len(right), len(left)) != (outputs.stop - outputs.start, inputs.stop - inputs.start):
                raise ModelError("blocks", f"{block.name!r} is a part of a layer; read the folder with kind='kfac'")
            values = self.values.to(dtype)
            floats = left.numel() + right.numel() + values.numel()
            if flipped:
                return EigenbasisForm("ekfac", right, left, values, floats)
            return EigenbasisForm("ekfac", left, right, values.mT, floats)
        left, right = _symmetric(left[inputs, inputs]), _symmetric(right[outputs, outputs])
        return KroneckerProduct("kfac", *((right, left) if flipped else (left, right)))


Reader = Callable[..., Tensors]


def _covariances(read: Reader) -> dict[str, _FactorLayer]:
    inputs, outputs = read("activation_covariance", "activation"), read("gradient_covariance", "gradient")
    return {name: _FactorLayer(inputs[name], _of(outputs, name)) for name in inputs}


def _corrected(read: Reader) -> dict[str, _FactorLayer]:
    inputs, outputs = (
        read("activation_eigenvectors", "eigen_activation"),
        read("gradient_eigenvectors", "eigen_gradient"),
    )
    values = read("lambda_matrix", "eigenvalue_correction")
    return {name: _FactorLayer(_of(inputs, name), _of(outputs, name), values[name]) for name in values}


def _of(tensors: Tensors, module: str) -> Tensor:
    """That of one layer, which another file of the folder has."""
    if module not in tensors:
        raise CorruptFileError("folder", f"not all of its files have layer {module!r}; was the fit interrupted?")
    return tensors[module]


def _symmetric(matrix: Tensor) -> Tensor:
    return (matrix + matrix.mT) / 2


def _reader(folder: Path) -> Reader:
    """Reads a quantity of all layers by its name in kronfluence and in bergson, divided by what it is a sum over."""

    def kronfluence(name: str, _: str) -> Tensors:
        found, counts = _load(folder / f"{name}.safetensors"), Path()
        for count in (f"num_{name}_processed", f"num_{name.split('_')[0]}_processed", "num_covariance_processed"):
            if (folder / f"{count}.safetensors").is_file():
                counts = folder / f"{count}.safetensors"
                break
        if "eigenvectors" in name or counts == Path():
            return found
        numbers = _load(counts)
        return {module: tensor / _of(numbers, module).item() for module, tensor in found.items()}

    def bergson(_: str, name: str) -> Tensors:
        shards = sorted((folder / f"{name}_sharded").glob("shard_*.safetensors"), key=_number)
        if not shards:
            raise NotAModelError("folder", f"{folder / f'{name}_sharded'} has no shards; was the fit interrupted?")
        read = [_load(shard) for shard in shards]
        joined = {module: torch.cat([part[module] for part in read]) for module in read[0]}
        if name.startswith("eigen_"):
            return joined
        total = _total(folder / "total_processed.pt")
        return {module: tensor / total for module, tensor in joined.items()}

    if (folder / "activation_sharded").is_dir() or (folder / "eigen_activation_sharded").is_dir():
        return bergson
    if any(folder.glob("activation_*.safetensors")):
        return kronfluence
    raise NotAModelError("folder", f"{folder} has no factors of kronfluence or bergson; expected activation_*")


def _total(path: Path) -> float:
    try:
        return float(torch.load(path, weights_only=True))
    except FileNotFoundError as error:
        raise NotAModelError("folder", f"there is no {path}; was the fit interrupted?") from error
    except Exception as error:  # torch raises errors of several kinds for a file that is not whole
        raise CorruptFileError("folder", f"cannot read {path}: {str(error).partition('.')[0]}") from error


def _number(shard: Path) -> int:
    return int(shard.stem.rpartition("_")[2])


def _load(path: Path) -> dict[str, Tensor]:
    try:
        from safetensors.torch import load_file
    except ImportError as error:
        raise MissingPackageError(
            "folder", 'to read factors install safetensors: pip install "curvoscope[hf]"'
        ) from error
    try:
        return dict(load_file(path))
    except FileNotFoundError as error:
        raise NotAModelError("folder", f"there is no {path}; has the tool fitted these factors?") from error
    except Exception as error:  # safetensors raises errors of its own for a file that is not whole
        raise CorruptFileError("folder", f"cannot read {path}: {error}") from error
