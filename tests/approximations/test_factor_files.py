"""Factors as kronfluence and bergson write them, by their documented layouts, audited like any other approximation."""

import copy

import pytest
import torch
from torch import nn

import curvoscope as cv
from curvoscope.approximations import read_factors
from curvoscope.errors import ModelError, ShapeError
from curvoscope.families.model_folders import CorruptFileError, NotAModelError
from reference import normal

save_file = pytest.importorskip("safetensors.torch").save_file
r = normal(5)
MODEL = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Tanh(), nn.Linear(4, 2, bias=False)).double()
X, LABELS = r(6, 3), torch.tensor([0, 1, 1, 0, 1, 0])
H = cv.hessian(MODEL, nn.CrossEntropyLoss(), [(X, LABELS)])
LAYERS = ("0", "2")


def factors():
    """Sums over tokens and per-row squares of every layer, from the gradients of the package: (inputs, outputs)."""
    sources = {name: cv.approximations.source_of(H, f"{name}.weight") for name in LAYERS}
    return {name: source.token_moments[:2] for name, source in sources.items()}


def eigenvectors(matrices):
    return {name: torch.linalg.eigh(matrix).eigenvectors.contiguous() for name, matrix in matrices.items()}


def corrected(inputs, outputs):
    """lambda (p, a): the squares of the gradients in the eigenbasis, summed over the rows."""
    found = {}
    for name in LAYERS:
        gradients = torch.cat(list(cv.approximations.source_of(H, f"{name}.weight").gradients()))  # (n, p, a)
        found[name] = (outputs[name].T @ gradients @ inputs[name]).square().sum(0)
    return found


def contents(names):
    """Covariances, twice too large, and eigenvectors of inputs and outputs, under four names; and the eigenvectors."""
    inputs, outputs = ({name: pair[side] for name, pair in factors().items()} for side in range(2))
    left, right = eigenvectors(inputs), eigenvectors(outputs)
    twice = [{name: 2.0 * matrix for name, matrix in one.items()} for one in (inputs, outputs)]
    return dict(zip(names, (*twice, left, right), strict=True)), left, right


def kronfluence(folder):
    covariances, left, right = contents(
        [f"{of}_{what}" for what in ("covariance", "eigenvectors") for of in ("activation", "gradient")]
    )
    tensors = {
        **covariances,
        "lambda_matrix": {name: 3.0 * values for name, values in corrected(left, right).items()},
        **{f"num_{name}_covariance_processed": counts(2) for name in ("activation", "gradient")},
        "num_lambda_processed": counts(3),
    }
    for name, content in tensors.items():
        save_file(content, folder / f"{name}.safetensors")


def counts(number):
    return {name: torch.tensor([number]) for name in LAYERS}


def bergson(folder):
    """In two shards, each with half of the rows."""
    covariances, left, right = contents(
        [f"{front}{of}_sharded" for front in ("", "eigen_") for of in ("activation", "gradient")]
    )
    stores = {
        **covariances,
        "eigenvalue_correction_sharded": {name: 2.0 * values for name, values in corrected(left, right).items()},
    }
    for name, content in stores.items():
        (folder / name).mkdir()
        for shard in range(2):
            rows = {key: tensor.tensor_split(2)[shard].contiguous() for key, tensor in content.items()}
            save_file(rows, folder / name / f"shard_{shard}.safetensors")
    torch.save(torch.tensor(2), folder / "total_processed.pt")


@pytest.mark.parametrize("write", [kronfluence, bergson])
@pytest.mark.parametrize("kind", ["kfac", "ekfac"])
def test_they_are_the_package_s_own(write, kind, tmp_path):
    write(tmp_path)
    found = read_factors(tmp_path, MODEL, kind=kind)
    assert list(found) == ["0.weight", "2.weight"]
    for name, operator in found.items():
        own = cv.approximations.approximation(H, kind, name).dense()
        scale = len(X) if kind == "kfac" else 1  # our KFAC divides by the tokens
        assert torch.allclose(operator.dense(), own * scale, atol=1e-12)
    rows = cv.analysis.audit(H, list(found), [found, kind])
    for read, own in zip(rows[::2], rows[1::2], strict=True):
        assert (read.approximation, own.approximation) == (kind, f"{kind} (2)")
        assert read.best_scale_error == pytest.approx(own.best_scale_error, abs=1e-9)


def test_factors_of_another_model(tmp_path):
    kronfluence(tmp_path)
    wider = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Tanh(), nn.Linear(4, 5, bias=False))
    with pytest.raises(ShapeError, match=r"layer '2' is 4 -> 5, but its factors are for 4 -> 2"):
        read_factors(tmp_path, wider)
    with pytest.raises(ModelError, match="no linear layer '2'"):
        read_factors(tmp_path, nn.Sequential(nn.Linear(3, 4, bias=False)))


def test_a_layer_by_its_whole_name_first(tmp_path):
    """Its name may lack its beginning, if one layer alone ends with it."""
    kronfluence(tmp_path)
    inside = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Tanh(), nn.Linear(4, 2, bias=False)).double()
    wrapped = nn.ModuleDict({"model": inside})
    assert list(read_factors(tmp_path, wrapped)) == ["model.0.weight", "model.2.weight"]
    both = nn.ModuleDict({"inner": inside, "0": nn.Linear(3, 4, bias=False), "2": nn.Linear(4, 2, bias=False)}).double()
    assert list(read_factors(tmp_path, both)) == ["0.weight", "2.weight"]
    twice = nn.ModuleDict({"one": inside, "two": nn.Sequential(*MODEL)})
    with pytest.raises(ModelError, match=r"layer '0', and the model has several: one\.0\.weight, two\.0\.weight"):
        read_factors(tmp_path, twice)


@pytest.mark.parametrize(
    ("write", "name", "content", "kind", "message"),
    [
        (kronfluence, "gradient_covariance", {"0": torch.eye(4)}, "kfac", "not all of its files have layer '2'"),
        (kronfluence, "num_lambda_processed", {"0": torch.ones(1)}, "ekfac", "not all of its files have layer '2'"),
        (
            kronfluence,
            "lambda_matrix",
            {"0": torch.ones(5, 3), "2": torch.ones(2, 4)},
            "ekfac",
            r"layer '0' has a factor of shape \(5, 3\), expected \(4, 3\)",
        ),
        (bergson, "activation_sharded/shard_1", None, "kfac", r"shape \(2, 3\), expected \(2, 2\); is a shard missing"),
        (bergson, "total_processed", None, "kfac", "there is no .*total_processed"),
        (bergson, "total_processed", b"cut", "kfac", "cannot read .*total_processed"),
    ],
)
def test_files_that_do_not_fit_each_other(write, name, content, kind, message, tmp_path):
    write(tmp_path)
    (path,) = tmp_path.glob(f"{name}.*")
    if content is None:
        path.unlink()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        save_file(content, path)
    with pytest.raises((CorruptFileError, NotAModelError), match=f"^folder: .*{message}"):
        read_factors(tmp_path, MODEL, kind=kind)


def test_folders_that_cannot_be_read(tmp_path):
    with pytest.raises(NotAModelError, match="no factors of kronfluence or bergson"):
        read_factors(tmp_path, MODEL)
    kronfluence(tmp_path)
    (tmp_path / "lambda_matrix.safetensors").unlink()
    with pytest.raises(NotAModelError, match="lambda_matrix"):
        read_factors(tmp_path, MODEL)
    (tmp_path / "activation_covariance.safetensors").write_bytes(b"cut")
    with pytest.raises(CorruptFileError, match="activation_covariance"):
        read_factors(tmp_path, MODEL, kind="kfac")


def test_samples_of_two_approximations_of_one_name(tmp_path):
    """Both are rows of their own: neither takes the place of the other."""
    kronfluence(tmp_path)
    sweep = cv.sweep(MODEL, nn.CrossEntropyLoss(), [(X, LABELS)], samples=64)
    scaled = {name: 2.0 * A for name, A in read_factors(tmp_path, MODEL, kind="kfac").items()}
    for operator in scaled.values():
        operator.name = "kfac"
    rows = cv.analysis.audit(sweep, ["0.weight"], ["kfac", scaled])
    (alone,) = cv.analysis.audit(sweep, ["0.weight"], ["kfac"])
    assert [row.approximation for row in rows] == ["kfac", "kfac (2)"]
    assert rows[0].error == alone.error and rows[1].error > 2 * rows[0].error


def test_the_files_of_kronfluence_itself(tmp_path):
    """The empirical Fisher of summed losses; factors written out with torch."""
    pytest.importorskip("kronfluence")
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import FactorArguments
    from kronfluence.task import Task

    class Summed(Task):
        def compute_train_loss(self, batch, model, sample=False):
            return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")

        def compute_measurement(self, batch, model):
            return self.compute_train_loss(batch, model)

    model, rows = copy.deepcopy(MODEL).float(), 40
    inputs, labels = r(rows, 3).float(), torch.arange(rows) % 2
    hidden = model[0](inputs)
    logits = model[2](hidden.tanh())
    loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
    deltas = torch.autograd.grad(loss, [hidden, logits])
    analyzer = Analyzer(
        "test", prepare_model(copy.deepcopy(model), Summed()), Summed(), cpu=True, output_dir=str(tmp_path)
    )
    arguments = FactorArguments(strategy="ekfac", use_empirical_fisher=True)
    data = torch.utils.data.TensorDataset(inputs, labels)
    analyzer.fit_all_factors("fit", data, per_device_batch_size=rows, factor_args=arguments)
    folder = tmp_path / "test" / "factors_fit"
    kfac, ekfac = (read_factors(folder, model, kind=kind) for kind in ("kfac", "ekfac"))
    for name, x, delta in zip(kfac, (inputs, hidden.tanh().detach()), deltas, strict=True):
        left, right = x.T @ x / rows, delta.T @ delta / rows
        product = torch.kron(right, left)
        assert torch.allclose(kfac[name].dense(), product, rtol=0, atol=1e-5 * float(product.norm()))
        basis = torch.kron(torch.linalg.eigh(right).eigenvectors, torch.linalg.eigh(left).eigenvectors)
        turned = torch.stack([torch.outer(d, v).flatten() for d, v in zip(delta, x, strict=True)]) @ basis
        corrected = basis * turned.square().mean(0) @ basis.T
        assert torch.allclose(ekfac[name].dense(), corrected, rtol=0, atol=1e-5 * float(corrected.norm()))


def test_a_bias_and_a_part_of_a_layer(tmp_path):
    model = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0).double()
    matrix = r(5, 5)
    save_file({"self_attn.out_proj": matrix @ matrix.T}, tmp_path / "activation_covariance.safetensors")
    save_file({"self_attn.out_proj": torch.eye(4).double()}, tmp_path / "gradient_covariance.safetensors")
    found = read_factors(tmp_path, model, kind="kfac")["h.0.attn.O"]
    assert torch.allclose(found.dense(), torch.kron((matrix @ matrix.T)[:4, :4], torch.eye(4).double()))
