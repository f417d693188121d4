"""Influence scores of bergson's EKFAC for the addition network of `benchmarks.influence`.

bergson reads causal language models, tokenizers and data sets of Hugging Face from folders, so the network is wrapped
as one and all three are written to disk. It is no package of the benchmark environment: `pip install --no-deps --target
FOLDER bergson==2.5.1 simple-parsing docstring-parser torchopt optree graphviz natsort petname ml-dtypes`, and FOLDER on
PYTHONPATH.
"""

import contextlib
import io
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def bergson_scores(network: Any, train: Any, test: Any, words: int, damping: float) -> Tensor | None:
    """Scores (test, train) of bergson's EKFAC of all linear layers, in float64; None if it is not installed.

    Args:
        network: has `embedded`, from embeddings (N, L, d) to logits, and the parameters `tokens` and `places`.
        train: inputs (N, L) and targets.
        test: those of the measured rows.
        words: of the vocabulary.
        damping: added to the eigenvalues of the mean over rows of the curvature of a row's summed loss.
    """
    try:
        from bergson.config.config import (
            DataConfig,
            DistributedConfig,
            HessianConfig,
            HessianPipelineConfig,
            IndexConfig,
            InversionConfig,
            PreprocessConfig,
            QuerySetConfig,
            ScoreConfig,
        )
        from bergson.data import load_scores
        from bergson.hessians.pipeline import hessian_pipeline
    except ImportError:
        return None
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        model, run = f"{folder}/model", f"{folder}/run"
        _write_model(network, words, model)
        for name, (inputs, targets) in {"train": train, "test": test}.items():
            _write_rows(inputs, targets, f"{folder}/{name}")
        index = IndexConfig(
            run_path=run,
            model=model,
            precision="fp64",
            include_bias=True,
            data=DataConfig(dataset=f"{folder}/train"),
            distributed=DistributedConfig(nproc_per_node=1),
        )
        Path(run).mkdir()
        hessian_pipeline(
            index,
            HessianConfig("kfac", ev_correction=True, hessian_dtype="fp64"),
            ScoreConfig(),
            PreprocessConfig(),
            HessianPipelineConfig(
                query=QuerySetConfig(dataset=f"{folder}/test"),
                inversion_cfg=InversionConfig("absolute_damped_inverse", damping),
            ),
        )
        found = load_scores(Path(run) / "scores")
        return torch.from_numpy(np.asarray(found[:], dtype=np.float64)).T / len(train[0])


def _write_rows(inputs: Tensor, targets: Tensor, folder: str) -> None:
    """Tokens with one more at the end, as the labels of a causal model belong to the token before."""
    from datasets import Dataset

    ignored = torch.full_like(targets[:, :1], -100)
    tokens = torch.cat([inputs, torch.zeros_like(inputs[:, :1])], 1)
    labels = torch.cat([ignored, targets], 1)
    Dataset.from_dict({"input_ids": tokens.tolist(), "labels": labels.tolist()}).save_to_disk(folder)


def _write_model(network: Any, words: int, folder: str) -> None:
    """The network as a causal language model, and a tokenizer that nothing reads."""
    from tokenizers import Tokenizer, models
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        PretrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerFast,
    )
    from transformers.modeling_outputs import CausalLMOutput

    make = type(network)

    class AdderConfig(PretrainedConfig):
        model_type = "curvoscope_adder"

    class AdderModel(PreTrainedModel):  # type: ignore[misc,unused-ignore]
        config_class = AdderConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.network = make()
            self.embedding = nn.Embedding(words, self.network.tokens.shape[1])
            self.post_init()

        def get_input_embeddings(self) -> nn.Module:
            return self.embedding

        def _init_weights(self, module: nn.Module) -> None:
            """All weights are read."""

        def forward(self, input_ids: Tensor, **_: Any) -> CausalLMOutput:
            places = torch.cat([self.network.places, torch.zeros_like(self.network.places[:1])])
            return CausalLMOutput(logits=self.network.embedded(self.embedding(input_ids) + places))

    AutoConfig.register(AdderConfig.model_type, AdderConfig, exist_ok=True)
    AutoModelForCausalLM.register(AdderConfig, AdderModel, exist_ok=True)
    model = AdderModel(AdderConfig()).double()
    model.network.load_state_dict(network.state_dict())
    model.embedding.weight.data.copy_(network.tokens.data)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({str(i): i for i in range(words)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=2048).save_pretrained(folder)
