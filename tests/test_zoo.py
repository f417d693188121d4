"""The whole zoo: no block has a wrong name, and products with the Hessian are differences of the gradient."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
import torch

import curvoscope as cv
import zoo
from curvoscope.autodiff import engine
from curvoscope.blocks import layer_and_role
from curvoscope.curvature import CrossEntropy, trainable
from gradient_differences import differences, own_loss
from reference import relative

QUICK = {
    *zoo.PLAIN,
    *("GPT2LMHeadModel", "LlamaForCausalLM", "Olmo2ForCausalLM", "Gemma2ForCausalLM", "GPTNeoXForCausalLM"),
    *(
        "MixtralForCausalLM",
        "MambaForCausalLM",
        "BertForMaskedLM",
        "XLMWithLMHeadModel",
        "BartForConditionalGeneration",
    ),
    *("SwinForImageClassification", "SiglipForImageClassification", "Wav2Vec2ForSequenceClassification", "CLIPModel"),
}

# ---- names
# Where each role is, by raw name; a role that a model does not have is left out. A role of a bias or of the bias of a
# norm follows from that of the weight.


@dataclass(frozen=True)
class Named:
    """The paths of the stacks of layers by the front of their names, of the parts of a layer, and of what is around."""

    stacks: Mapping[str, str]
    layer: Mapping[str, str]
    around: Mapping[str, str] = field(default_factory=dict)


def projections(path):
    return {f"attn.{role}": f"{path}.{role.lower()}_proj" for role in "QKVO"}


def gated():
    return {f"mlp.{role}": f"mlp.{role}_proj" for role in ("gate", "up", "down")}


PROJECTED = {"norm1": "input_layernorm", **projections("self_attn"), **gated()}
TO_TOKENS = {"embed": "model.embed_tokens", "final_norm": "model.norm", "unembed": "lm_head"}
LAYERS = {"": "model.layers"}
LLAMA = Named(LAYERS, PROJECTED | {"norm2": "post_attention_layernorm"}, TO_TOKENS)
GEMMA2 = Named(
    LAYERS,
    PROJECTED
    | {"norm1_post": "post_attention_layernorm", "norm2": "pre_feedforward_layernorm"}
    | {"norm2_post": "post_feedforward_layernorm"},
    TO_TOKENS,
)
OLMO2 = Named(
    LAYERS,
    projections("self_attn")
    | gated()
    | {"norm1_post": "post_attention_layernorm", "norm2_post": "post_feedforward_layernorm"},
    TO_TOKENS,
)
GLM4 = Named(
    LAYERS,
    PROJECTED
    | {
        "norm1_post": "post_self_attn_layernorm",
        "norm2": "post_attention_layernorm",
        "norm2_post": "post_mlp_layernorm",
    },
    TO_TOKENS,
)
GPT2 = Named(
    {"": "transformer.h"},
    {"norm1": "ln_1", "attn.QKV": "attn.c_attn", "attn.O": "attn.c_proj", "norm2": "ln_2"}
    | {"mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"},
    {"embed": "transformer.wte", "positions": "transformer.wpe", "final_norm": "transformer.ln_f"},
)


def bert(name, path="encoder.layer", stacks=None, head="cls.predictions"):
    below = f"{name}." if name else ""
    attention = {f"attn.{role[0].upper()}": f"attention.self.{role}" for role in ("query", "key", "value")}
    return Named(
        stacks or {"": f"{below}{path}"},
        attention
        | {"attn.O": "attention.output.dense", "norm1": "attention.output.LayerNorm", "norm2": "output.LayerNorm"}
        | {"mlp.up": "intermediate.dense", "mlp.down": "output.dense"},
        {"embed": f"{below}embeddings.word_embeddings", "positions": f"{below}embeddings.position_embeddings"}
        | {"embed_norm": f"{below}embeddings.LayerNorm", "unembed": f"{head}.decoder"}
        | {"b_unembed": f"{head} {head}.decoder"},
    )


def vit(name, path="layers", stacks=None):
    layer = {"norm1": "layernorm_before", "norm2": "layernorm_after", "mlp.up": "mlp.fc1", "mlp.down": "mlp.fc2"}
    around = {"positions": f"{name}.embeddings.position_embeddings", "final_norm": f"{name}.layernorm"}
    return Named(stacks or {"": f"{name}.{path}"}, layer | projections("attention"), around)


def old_vit(name):
    layer = {"norm1": "layernorm_before", "norm2": "layernorm_after"}
    layer |= {f"attn.{role[0].upper()}": f"attention.attention.{role}" for role in ("query", "key", "value")}
    layer |= {"attn.O": "attention.output.dense", "mlp.up": "intermediate.dense", "mlp.down": "output.dense"}
    around = {"positions": f"{name}.embeddings.position_embeddings", "final_norm": f"{name}.layernorm"}
    return Named({"": f"{name}.encoder.layer"}, layer, around)


def stages(path):
    return {f"{path}.{i}.": f"{path}.{i}.blocks" for i in range(2)}


FUSED = {"attn.QKV": "in_proj", "attn.O": "out_proj"}
INSIDE = {role: f"self_attn.{path}" for role, path in FUSED.items()}
LIKE_LLAMA = (
    "Llama Mistral Qwen2 Qwen3 Gemma Olmo Glm Granite Cohere Cohere2 Nemotron StableLm Starcoder2 Helium SmolLM3"
)
LIKE_LLAMA += " DiffLlama Mixtral Qwen2Moe Qwen3Moe Olmoe GptOss Jamba"
NAMES = {
    "nn.TransformerEncoder": Named(
        {"": "layers"},
        {"norm1": "norm1", "norm2": "norm2", "mlp.up": "linear1", "mlp.down": "linear2"} | INSIDE,
        {"final_norm": "norm"},
    ),
    "nn.TransformerDecoder": Named(
        {f"decoder.layers.{name}.": f"decoder.layers {name}" for name in ("self_attn", "multihead_attn")}, FUSED
    ),
    "nn.MultiheadAttention": Named({"": "attention !"}, FUSED),
    "GPT2LMHeadModel": GPT2,
    "OpenAIGPTLMHeadModel": GPT2,
    **{f"{name}ForCausalLM": LLAMA for name in LIKE_LLAMA.split()},
    **{f"{name}ForCausalLM": GEMMA2 for name in ("Gemma2", "Gemma3")},
    **{f"{name}ForCausalLM": OLMO2 for name in ("Olmo2", "Olmo3", "Exaone4")},
    "Glm4ForCausalLM": GLM4,
    "BertForMaskedLM": bert("bert"),
    "BertModel": bert(""),
    "BertForSequenceClassification": bert("bert"),
    "BertForQuestionAnswering": bert("bert"),
    **{f"{name}ForMaskedLM": bert("roberta") for name in ("Roberta", "XLMRoberta", "Camembert")},
    "RobertaForTokenClassification": bert("roberta"),
    "ElectraForMaskedLM": bert("electra"),
    "EsmForMaskedLM": bert("esm"),
    "MegatronBertForMaskedLM": bert("bert"),
    "RemBertForMaskedLM": bert("rembert"),
    "RoFormerForMaskedLM": bert("roformer"),
    "Swinv2ForImageClassification": bert("swinv2", stacks=stages("swinv2.encoder.layers")),
    "BlipForConditionalGeneration": bert("text_decoder.bert", head="text_decoder.cls.predictions"),
    "ViTForImageClassification": vit("vit"),
    "DeiTForImageClassification": vit("deit"),
    "BeitForImageClassification": vit("beit"),
    "Dinov2ForImageClassification": vit("dinov2", "encoder.layer"),
    "ViTMSNForImageClassification": vit("vit"),
    "ASTForAudioClassification": vit("audio_spectrogram_transformer"),
    "SwinForImageClassification": vit("swin", stacks=stages("swin.encoder.layers")),
    "SegformerForImageClassification": vit("segformer", stacks=stages("segformer.stages")),
    "ViltForQuestionAnswering": old_vit("vilt"),
    "LlavaForConditionalGeneration": Named(
        {"": "model.language_model.layers"},
        LLAMA.layer,
        {"embed": "model.language_model.embed_tokens", "final_norm": "model.language_model.norm", "unembed": "lm_head"},
    ),
}


def expected_names(model, named):
    """Raw parameter, and which third of it, by block and in the order of its rows."""
    parameters = dict(model.named_parameters())
    found = {}

    def add(name, path, role):
        stem, dot, leaf = name.rpartition(".")
        weight = next((end for end in (path, f"{path}.weight", f"{path}_weight") if end in parameters), None)
        bias = next((end for end in (f"{path}.bias", f"{path}_bias") if end in parameters), None)
        if "norm" in role:
            rows = [(one, None) for one in (weight, bias) if one is not None]
            found.update({name: rows} if rows else {})
        elif leaf == "QKV":
            found.update({f"{stem}.{part}": [(weight, i)] for i, part in enumerate("QKV") if weight})
            found.update({f"{stem}.b_{part}": [(bias, i)] for i, part in enumerate("QKV") if bias})
        else:
            found.update({name: [(weight, None)]} if weight else {})
            found.update({f"{stem}{dot}b_{leaf}": [(bias, None)]} if bias else {})

    for front, where in named.stacks.items():
        path, _, below = where.partition(" ")
        for number in range(3):
            layer = path if below == "!" else f"{path}.{number}.{below}".rstrip(".")
            query = next(named.layer[role] for role in ("attn.Q", "attn.QKV") if role in named.layer)
            if not any(name.startswith(f"{layer}.{query}") for name in parameters) or (below == "!" and number):
                continue
            for role, inside in named.layer.items():
                add(f"{front}h.{number}.{role}", f"{layer}.{inside}", role)
    for role, path in named.around.items():
        if role == "b_unembed":
            bias = next((f"{one}.bias" for one in path.split() if f"{one}.bias" in parameters), None)
            found.update({role: [(bias, None)]} if bias else {})
        else:
            add(role, path, role)
    return found


def cases(test):
    return pytest.mark.parametrize(
        "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in zoo.cases()]
    )(test)


def third(piece, parameter):
    """Which third of a parameter a piece is; None for all of it."""
    return None if piece.size == parameter.numel() else max(part.start for part in piece.index) // zoo.WIDTH


@cases
def test_no_name_is_wrong(name):
    """Every block of a known family has the name that it should have, and no parameter of another family has one.
    Recurrent layers have tests of their own."""
    model, _, _ = zoo.build(name)
    blocks, parameters = cv.blocks_of(model), dict(model.named_parameters())
    assert blocks.covers(model)
    recurrent = {label.partition(".mixer.")[0] for label in blocks if ".mixer." in label}
    if recurrent and name not in NAMES:
        return
    found = {}
    for label, block in blocks.items():
        if (layer_and_role(label) or ("", ""))[0] in recurrent:
            continue
        if label in parameters:
            assert [piece.parameter for piece in block.pieces] == [label]
            continue
        found[label] = [(piece.parameter, third(piece, parameters[piece.parameter])) for piece in block.pieces]
    adapters = {f"{i}.base_layer.weight.{part}": [(f"{i}.lora_{part}.weight", None)] for i in (0, 2) for part in "AB"}
    others = adapters if name == "low rank" else {}
    assert found == (expected_names(model, NAMES[name]) if name in NAMES else others)


# ---- products


@cases
def test_products_are_differences_of_the_gradient(name):
    model, loss_fn, batches = zoo.build(name)
    if name in zoo.NO_LOSS:
        with pytest.raises(cv.CurvoscopeError, match=r"loss_fn: is None.*give loss_fn\(outputs, labels\)"):
            cv.hessian(model, loss_fn, batches)
        return
    blocks = trainable(model, cv.blocks_of(model))
    total = sum(blocks.sizes.values())
    vectors = torch.randn(2, total, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    vectors /= vectors.norm(dim=1, keepdim=True)
    H = cv.hessian(model, loss_fn, batches)
    assert abs(H.loss - float(own_loss(model, loss_fn, batches[0]).detach())) < 1e-9
    assert relative((H.total @ vectors.T).T, differences(model, loss_fn, batches[0], blocks, vectors)) < 1e-8


@cases
def test_the_test_of_first_products_does_not_cry_wolf(name, monkeypatch):
    """Though no operation is taken as checked."""
    if name in zoo.NO_LOSS:
        return
    monkeypatch.setattr(engine, "unchecked", frozenset)
    model, loss_fn, batches = zoo.build(name)
    H = cv.hessian(model, loss_fn, batches)
    H @ torch.ones(H.shape[0], dtype=torch.float64)


# ---- experts in groups

EXPERTS = ["Mixtral", "Qwen2Moe", "Qwen3Moe", "Olmoe", "GptOss", "DeepseekV2", "DeepseekV3", "Jamba"]
FEW = [name if name == "Mixtral" else pytest.param(name, marks=pytest.mark.slow) for name in EXPERTS]


def experts(name):
    """With widths of which torch's grouped products are capable: multiples of 16 bytes."""
    wide = {"moe_intermediate_size": 8}
    wide |= {"shared_expert_intermediate_size": 8} if name == "Qwen2Moe" else {}
    return zoo.hugging_face(f"{name}ForCausalLM", **wide), [zoo.batch("next token")]


@pytest.mark.parametrize("name", FEW)
def test_experts_in_groups_take_several_vectors(name):
    """Float32 and groups, as transformers has it unless asked, against float64 and expert by expert."""
    model, batches = experts(name)
    H = cv.hessian(model, CrossEntropy(shift=True), batches)
    vectors = torch.randn(H.total.shape[1], 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    expected = {part: getattr(H, part) @ vectors for part in ("total", "outer", "functional")}
    model.set_experts_implementation("grouped_mm")
    H = cv.hessian(model.float(), CrossEntropy(shift=True), batches)
    for part, product in expected.items():
        assert relative((getattr(H, part) @ vectors.float()).double(), product) < 1e-4


def test_experts_in_groups_have_no_float64_and_the_error_names_the_cure():
    model, batches = experts("Mixtral")
    model.set_experts_implementation("grouped_mm")
    with pytest.raises(cv.CurvoscopeError, match=r'set_experts_implementation\("eager"\)'):
        cv.hessian(model, CrossEntropy(shift=True), batches)
