"""A zoo of tiny models: transformers' classes of every kind and plain torch modules, each with a batch and its loss.

`cases()` are the names that this version of transformers has, `build(name)` makes one: the model, its loss (None: the
model's own for its labels) and one batch of two rows, as `cv.hessian` takes them. Models are in float64 and in
evaluation mode, and their weights are random from a fixed seed. `save(name, folder)` saves one in float32. Nothing is
downloaded.

Transformers' models compute softmaxes, norms and losses in float32 whatever the type of their weights is. Those of the
zoo do not: while they run, float32 means float64, so that differences of their gradients are good to ten digits.
"""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

ROWS, LENGTH, WORDS, CLASSES, WIDTH = 2, 5, 13, 3, 8

# Sizes by the names that most configurations have, with the two others in use
_SIZES = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12}
_WORDS = {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_TEXT = _WORDS | {"max_position_embeddings": 16}
_DECODER = _SIZES | _TEXT | {"num_key_value_heads": 1, "head_dim": 4}
_ENCODER = _SIZES | _TEXT | {"embedding_size": WIDTH}
_GPT = _TEXT | {"n_embd": WIDTH, "n_layer": 2, "n_head": 2, "n_positions": 16, "n_inner": 12, "n_ctx": 16}
_BART = _TEXT | {
    **{"d_model": WIDTH, "decoder_start_token_id": 1, "forced_eos_token_id": None, "is_encoder_decoder": True},
    **{f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in (("layers", 1), ("attention_heads", 2))},
    **{f"{side}_ffn_dim": 12 for side in ("encoder", "decoder")},
}
_T5 = _TEXT | {
    **{"d_model": WIDTH, "d_kv": 4, "d_ff": 12, "num_heads": 2, "num_layers": 1, "num_decoder_layers": 1},
    **{"decoder_start_token_id": 0, "relative_attention_num_buckets": 4, "relative_attention_max_distance": 8},
}
_IMAGE = _SIZES | {"image_size": 8, "patch_size": 4, "num_channels": 3, "num_labels": CLASSES}
_SWIN = {
    "image_size": 8,
    "patch_size": 2,
    "embed_dim": WIDTH,
    "depths": [1, 1],
    "num_heads": [2, 2],
    "window_size": 2,
} | {"num_labels": CLASSES}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 6, "output_router_logits": False}
_LATENT = {  # DeepSeek's attention and experts
    **{"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    **{"q_lora_rank": 6, "kv_lora_rank": 6, "qk_rope_head_dim": 2, "qk_nope_head_dim": 4, "v_head_dim": 4},
    **{"num_key_value_heads": 2, "head_dim": 2},
}
_WAVES = _SIZES | {
    **{"vocab_size": WORDS, "num_labels": CLASSES, "conv_dim": [WIDTH, WIDTH], "conv_kernel": [4, 2]},
    **{"conv_stride": [3, 2], "num_conv_pos_embeddings": 3, "num_conv_pos_embedding_groups": 1},
    **{
        "feat_extract_norm": "layer",
        "classifier_proj_size": 6,
        "num_feat_extract_layers": 2,
        "apply_spec_augment": False,
    },
    **{"do_stable_layer_norm": False, "pad_token_id": 0, "ctc_loss_reduction": "mean"},
}


@dataclass(frozen=True)
class Entry:
    """A class of transformers: its configuration, with parts that are configurations themselves, and its batch.

    `parts`: option -> (class of the configuration, options).
    """

    config: str
    options: Mapping[str, Any]
    batch: str
    parts: Mapping[str, tuple[str, Mapping[str, Any]]] = field(default_factory=dict)


_CLIP_PARTS = {
    "text_config": ("CLIPTextConfig", _SIZES | _TEXT | {"projection_dim": 6}),
    "vision_config": ("CLIPVisionConfig", _IMAGE | {"projection_dim": 6}),
}
_SIGLIP_PARTS = {
    "text_config": ("SiglipTextConfig", _SIZES | _TEXT | {"projection_size": WIDTH}),
    "vision_config": ("SiglipVisionConfig", _IMAGE),
}

ENTRIES: dict[str, Entry] = {
    # ---- decoders
    "GPT2LMHeadModel": Entry("GPT2Config", _GPT, "next token"),
    "OpenAIGPTLMHeadModel": Entry("OpenAIGPTConfig", _GPT, "next token"),
    "GPTBigCodeForCausalLM": Entry("GPTBigCodeConfig", _GPT, "next token"),
    "GPTJForCausalLM": Entry("GPTJConfig", _GPT | {"rotary_dim": 2}, "next token"),
    "CodeGenForCausalLM": Entry("CodeGenConfig", _GPT | {"rotary_dim": 2, "n_head": 4, "n_embd": 16}, "next token"),
    "GPTNeoForCausalLM": Entry(
        "GPTNeoConfig",
        _DECODER | {"num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]], "window_size": 3},
        "next token",
    ),
    "GPTNeoXForCausalLM": Entry("GPTNeoXConfig", _DECODER | {"rotary_pct": 0.5}, "next token"),
    "BloomForCausalLM": Entry("BloomConfig", _DECODER | {"n_layer": 2, "n_head": 2}, "next token"),
    "FalconForCausalLM": Entry("FalconConfig", _SIZES | _TEXT | {"ffn_hidden_size": 12}, "next token"),
    "MptForCausalLM": Entry("MptConfig", _TEXT | {"d_model": WIDTH, "n_heads": 2, "n_layers": 2}, "next token"),
    "CTRLLMHeadModel": Entry("CTRLConfig", _GPT | {"dff": 12}, "next token"),
    "OPTForCausalLM": Entry("OPTConfig", _DECODER | {"ffn_dim": 12, "word_embed_proj_dim": WIDTH}, "next token"),
    "BioGptForCausalLM": Entry("BioGptConfig", _DECODER, "next token"),
    "PhiForCausalLM": Entry("PhiConfig", _DECODER, "next token"),
    "Phi3ForCausalLM": Entry("Phi3Config", _DECODER, "next token"),
    "PersimmonForCausalLM": Entry("PersimmonConfig", _DECODER, "next token"),
    "LlamaForCausalLM": Entry("LlamaConfig", _DECODER, "next token"),
    "MistralForCausalLM": Entry("MistralConfig", _DECODER | {"sliding_window": 3}, "next token"),
    "Qwen2ForCausalLM": Entry("Qwen2Config", _DECODER, "next token"),
    "Qwen3ForCausalLM": Entry("Qwen3Config", _DECODER, "next token"),
    "GemmaForCausalLM": Entry("GemmaConfig", _DECODER, "next token"),
    "Gemma2ForCausalLM": Entry("Gemma2Config", _DECODER | {"query_pre_attn_scalar": 4}, "next token"),
    "Gemma3ForCausalLM": Entry("Gemma3TextConfig", _DECODER | {"query_pre_attn_scalar": 4}, "next token"),
    "OlmoForCausalLM": Entry("OlmoConfig", _DECODER, "next token"),
    "Olmo2ForCausalLM": Entry("Olmo2Config", _DECODER, "next token"),
    "Olmo3ForCausalLM": Entry("Olmo3Config", _DECODER | {"sliding_window": 3}, "next token"),
    "Exaone4ForCausalLM": Entry("Exaone4Config", _DECODER | {"sliding_window": 3}, "next token"),
    "GlmForCausalLM": Entry("GlmConfig", _DECODER, "next token"),
    "Glm4ForCausalLM": Entry("Glm4Config", _DECODER, "next token"),
    "GraniteForCausalLM": Entry("GraniteConfig", _DECODER, "next token"),
    "CohereForCausalLM": Entry("CohereConfig", _DECODER, "next token"),
    "Cohere2ForCausalLM": Entry("Cohere2Config", _DECODER | {"sliding_window": 3}, "next token"),
    "NemotronForCausalLM": Entry("NemotronConfig", _DECODER, "next token"),
    "StableLmForCausalLM": Entry("StableLmConfig", _DECODER | {"partial_rotary_factor": 0.5}, "next token"),
    "Starcoder2ForCausalLM": Entry("Starcoder2Config", _DECODER, "next token"),
    "HeliumForCausalLM": Entry("HeliumConfig", _DECODER, "next token"),
    "SmolLM3ForCausalLM": Entry("SmolLM3Config", _DECODER, "next token"),
    "DiffLlamaForCausalLM": Entry("DiffLlamaConfig", _DECODER | {"num_key_value_heads": 2}, "next token"),
    "ModernBertDecoderForCausalLM": Entry("ModernBertDecoderConfig", _DECODER, "next token"),
    # ---- mixtures of experts
    "MixtralForCausalLM": Entry("MixtralConfig", _DECODER | _EXPERTS | {"num_local_experts": 3}, "next token"),
    "Qwen2MoeForCausalLM": Entry(
        "Qwen2MoeConfig", _DECODER | _EXPERTS | {"num_experts": 3, "shared_expert_intermediate_size": 6}, "next token"
    ),
    "Qwen3MoeForCausalLM": Entry("Qwen3MoeConfig", _DECODER | _EXPERTS | {"num_experts": 3}, "next token"),
    "OlmoeForCausalLM": Entry("OlmoeConfig", _DECODER | _EXPERTS | {"num_experts": 3}, "next token"),
    "GptOssForCausalLM": Entry(
        "GptOssConfig", _DECODER | _EXPERTS | {"num_local_experts": 3, "sliding_window": 3}, "next token"
    ),
    "DeepseekV2ForCausalLM": Entry("DeepseekV2Config", _DECODER | _EXPERTS | _LATENT, "next token"),
    "DeepseekV3ForCausalLM": Entry("DeepseekV3Config", _DECODER | _EXPERTS | _LATENT, "next token"),
    "JambaForCausalLM": Entry(
        "JambaConfig",
        _DECODER
        | _EXPERTS
        | {"num_experts": 3, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2}
        | {
            "expert_layer_offset": 1,
            "mamba_d_state": 3,
            "mamba_d_conv": 2,
            "mamba_dt_rank": 2,
            "use_mamba_kernels": False,
        },
        "next token",
    ),
    # ---- state spaces and recurrences
    "MambaForCausalLM": Entry("MambaConfig", _SIZES | _TEXT | {"state_size": 3, "time_step_rank": 2}, "next token"),
    "Mamba2ForCausalLM": Entry(
        "Mamba2Config",
        _SIZES | _TEXT | {"state_size": 3, "num_heads": 4, "head_dim": 4, "n_groups": 1, "chunk_size": 4},
        "next token",
    ),
    "FalconMambaForCausalLM": Entry(
        "FalconMambaConfig", _SIZES | _TEXT | {"state_size": 3, "time_step_rank": 2}, "next token"
    ),
    "RwkvForCausalLM": Entry(
        "RwkvConfig", _SIZES | _TEXT | {"attention_hidden_size": WIDTH, "use_cache": False}, "next token"
    ),
    "RecurrentGemmaForCausalLM": Entry(
        "RecurrentGemmaConfig",
        _DECODER | {"lru_width": WIDTH, "attention_window_size": 3, "num_hidden_layers": 3},
        "next token",
    ),
    # ---- encoders
    "BertForMaskedLM": Entry("BertConfig", _ENCODER, "hidden tokens"),
    "BertModel": Entry("BertConfig", _ENCODER, "states"),
    "BertForSequenceClassification": Entry("BertConfig", _ENCODER | {"num_labels": CLASSES}, "class of a text"),
    "BertForQuestionAnswering": Entry("BertConfig", _ENCODER, "answer in a text"),
    "RobertaForMaskedLM": Entry("RobertaConfig", _ENCODER, "hidden tokens"),
    "RobertaForTokenClassification": Entry("RobertaConfig", _ENCODER | {"num_labels": CLASSES}, "class of a token"),
    "XLMRobertaForMaskedLM": Entry("XLMRobertaConfig", _ENCODER, "hidden tokens"),
    "CamembertForMaskedLM": Entry("CamembertConfig", _ENCODER, "hidden tokens"),
    "DistilBertForMaskedLM": Entry(
        "DistilBertConfig", _TEXT | {"dim": WIDTH, "hidden_dim": 12, "n_layers": 2, "n_heads": 2}, "hidden tokens"
    ),
    "DistilBertForSequenceClassification": Entry(
        "DistilBertConfig",
        _TEXT | {"dim": WIDTH, "hidden_dim": 12, "n_layers": 2, "n_heads": 2, "num_labels": CLASSES},
        "class of a text",
    ),
    "AlbertForMaskedLM": Entry("AlbertConfig", _ENCODER | {"embedding_size": 4}, "hidden tokens"),
    "ElectraForMaskedLM": Entry("ElectraConfig", _ENCODER, "hidden tokens"),
    "MPNetForMaskedLM": Entry("MPNetConfig", _ENCODER, "hidden tokens"),
    "ModernBertForMaskedLM": Entry("ModernBertConfig", _ENCODER | {"local_attention": 4}, "hidden tokens"),
    "DebertaForMaskedLM": Entry(
        "DebertaConfig", _ENCODER | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}, "hidden tokens"
    ),
    "DebertaV2ForMaskedLM": Entry(
        "DebertaV2Config", _ENCODER | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}, "hidden tokens"
    ),
    "EsmForMaskedLM": Entry(
        "EsmConfig", _ENCODER | {"position_embedding_type": "rotary", "mask_token_id": 3}, "hidden tokens"
    ),
    "MegatronBertForMaskedLM": Entry("MegatronBertConfig", _ENCODER, "hidden tokens"),
    "RemBertForMaskedLM": Entry(
        "RemBertConfig", _ENCODER | {"input_embedding_size": 4, "output_embedding_size": 6}, "hidden tokens"
    ),
    "RoFormerForMaskedLM": Entry("RoFormerConfig", _ENCODER, "hidden tokens"),
    "ConvBertForMaskedLM": Entry(
        "ConvBertConfig", _ENCODER | {"head_ratio": 1, "conv_kernel_size": 3}, "hidden tokens"
    ),
    "SqueezeBertForMaskedLM": Entry(
        "SqueezeBertConfig",
        _ENCODER | {f"{name}_groups": 2 for name in ("q", "k", "v", "post_attention", "intermediate", "output")},
        "hidden tokens",
    ),
    "FNetForMaskedLM": Entry("FNetConfig", _ENCODER, "hidden tokens"),
    "XLMWithLMHeadModel": Entry("XLMConfig", _TEXT | {"emb_dim": WIDTH, "n_layers": 2, "n_heads": 2}, "hidden tokens"),
    "XLNetLMHeadModel": Entry(
        "XLNetConfig", _WORDS | {"d_model": WIDTH, "n_layer": 2, "n_head": 2, "d_inner": 12}, "hidden tokens"
    ),
    # ---- encoder-decoders
    "BartForConditionalGeneration": Entry("BartConfig", _BART, "target text"),
    "MBartForConditionalGeneration": Entry("MBartConfig", _BART, "target text"),
    "PegasusForConditionalGeneration": Entry("PegasusConfig", _BART, "target text"),
    "MarianMTModel": Entry("MarianConfig", _BART | {"decoder_vocab_size": WORDS}, "target text"),
    "BlenderbotForConditionalGeneration": Entry("BlenderbotConfig", _BART, "target text"),
    "M2M100ForConditionalGeneration": Entry("M2M100Config", _BART, "target text"),
    "PLBartForConditionalGeneration": Entry("PLBartConfig", _BART, "target text"),
    "LEDForConditionalGeneration": Entry(
        "LEDConfig",
        _BART | {"attention_window": 4, "max_encoder_position_embeddings": 16, "max_decoder_position_embeddings": 16},
        "target text",
    ),
    "T5ForConditionalGeneration": Entry("T5Config", _T5, "target text"),
    "MT5ForConditionalGeneration": Entry("MT5Config", _T5 | {"feed_forward_proj": "gated-gelu"}, "target text"),
    "UMT5ForConditionalGeneration": Entry("UMT5Config", _T5, "target text"),
    "SwitchTransformersForConditionalGeneration": Entry(
        "SwitchTransformersConfig",
        _T5
        | {"num_experts": 2, "expert_capacity": 16, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
        | {"router_jitter_noise": 0.0, "num_layers": 2, "num_decoder_layers": 2},
        "target text",
    ),
    "WhisperForConditionalGeneration": Entry(
        "WhisperConfig",
        _BART
        | {"num_mel_bins": 4, "max_source_positions": 5, "max_target_positions": 16, "suppress_tokens": None}
        | {"begin_suppress_tokens": None},
        "target text of features",
    ),
    "Speech2TextForConditionalGeneration": Entry(
        "Speech2TextConfig",
        _BART
        | {"input_feat_per_channel": 4, "conv_channels": 6, "num_conv_layers": 1, "conv_kernel_sizes": [3]}
        | {"max_source_positions": 16, "max_target_positions": 16},
        "target text of frames",
    ),
    # ---- images
    "ViTForImageClassification": Entry("ViTConfig", _IMAGE, "class of an image"),
    "DeiTForImageClassification": Entry("DeiTConfig", _IMAGE, "class of an image"),
    "BeitForImageClassification": Entry("BeitConfig", _IMAGE, "class of an image"),
    "Dinov2ForImageClassification": Entry("Dinov2Config", _IMAGE | {"mlp_ratio": 2}, "class of an image"),
    "ViTMSNForImageClassification": Entry("ViTMSNConfig", _IMAGE, "class of an image"),
    "SwinForImageClassification": Entry("SwinConfig", _SWIN, "class of an image"),
    "Swinv2ForImageClassification": Entry("Swinv2Config", _SWIN, "class of an image"),
    "ConvNextForImageClassification": Entry(
        "ConvNextConfig",
        _IMAGE | {"hidden_sizes": [4, 8], "depths": [1, 1], "num_stages": 2, "patch_size": 2},
        "class of an image",
    ),
    "ResNetForImageClassification": Entry(
        "ResNetConfig",
        {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 1], "layer_type": "basic", "num_labels": CLASSES},
        "class of an image",
    ),
    "SegformerForImageClassification": Entry(
        "SegformerConfig",
        {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [4, 8], "patch_sizes": [3, 3]}
        | {"strides": [2, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "num_labels": CLASSES},
        "class of an image",
    ),
    "PoolFormerForImageClassification": Entry(
        "PoolFormerConfig",
        {"hidden_sizes": [4, 8], "depths": [1, 1], "patch_sizes": [3, 3], "strides": [2, 2], "padding": [1, 1]}
        | {"num_encoder_blocks": 2, "num_labels": CLASSES},
        "class of an image",
    ),
    "CLIPForImageClassification": Entry("CLIPConfig", {"num_labels": CLASSES}, "class of an image", _CLIP_PARTS),
    "SiglipForImageClassification": Entry("SiglipConfig", {"num_labels": CLASSES}, "class of an image", _SIGLIP_PARTS),
    # ---- sound
    "Wav2Vec2ForSequenceClassification": Entry("Wav2Vec2Config", _WAVES, "class of a sound"),
    "Wav2Vec2ForCTC": Entry("Wav2Vec2Config", _WAVES, "transcript of a sound"),
    "HubertForSequenceClassification": Entry("HubertConfig", _WAVES, "class of a sound"),
    "WavLMForSequenceClassification": Entry(
        "WavLMConfig", _WAVES | {"num_buckets": 8, "max_bucket_distance": 8}, "class of a sound"
    ),
    "ASTForAudioClassification": Entry(
        "ASTConfig",
        _SIZES
        | {
            "patch_size": 4,
            "frequency_stride": 4,
            "time_stride": 4,
            "max_length": 8,
            "num_mel_bins": 8,
            "num_labels": CLASSES,
        },
        "class of a spectrogram",
    ),
    "WhisperForAudioClassification": Entry(
        "WhisperConfig",
        _BART | {"num_mel_bins": 4, "max_source_positions": 5, "num_labels": CLASSES, "classifier_proj_size": 6},
        "class of features",
    ),
    # ---- several kinds of input
    "CLIPModel": Entry("CLIPConfig", {"projection_dim": 6}, "pairs", _CLIP_PARTS),
    "SiglipModel": Entry("SiglipConfig", {}, "pairs", _SIGLIP_PARTS),
    "BlipForConditionalGeneration": Entry(
        "BlipConfig",
        {"projection_dim": 6},
        "text of an image",
        {
            "text_config": ("BlipTextConfig", _SIZES | _TEXT | {"encoder_hidden_size": WIDTH}),
            "vision_config": ("BlipVisionConfig", _IMAGE),
        },
    ),
    "LlavaForConditionalGeneration": Entry(
        "LlavaConfig",
        {"image_token_index": 12, "image_seq_length": 4, "vision_feature_layer": -1},
        "text around an image",
        {"text_config": ("LlamaConfig", _DECODER), "vision_config": ("CLIPVisionConfig", _IMAGE)},
    ),
    "ViltForQuestionAnswering": Entry(
        "ViltConfig", _ENCODER | _IMAGE | {"modality_type_vocab_size": 2}, "answer about an image"
    ),
}


# ---- batches


class _Draw:
    """Random inputs, the same for all models of a kind."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(5)

    def tokens(self, *shape: int, least: int = 3, most: int = WORDS - 1) -> Tensor:
        """Words, none of them padding or an end."""
        return torch.randint(least, most, shape, generator=self._generator)

    def numbers(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, dtype=torch.float64)

    def classes(self, *shape: int) -> Tensor:
        return torch.randint(0, CLASSES, shape, generator=self._generator)


def batch(kind: str) -> dict[str, Tensor]:
    draw = _Draw()
    words, image = draw.tokens(ROWS, LENGTH), draw.numbers(ROWS, 3, 8, 8)
    around = torch.cat([words[:, :2], torch.full((ROWS, 4), 12), words[:, 2:]], 1)
    answers = torch.nn.functional.one_hot(draw.classes(ROWS), CLASSES).double()
    kinds: dict[str, dict[str, Tensor]] = {
        "next token": {"input_ids": words, "labels": words},
        "hidden tokens": {"input_ids": words, "labels": draw.tokens(ROWS, LENGTH)},
        "class of a text": {"input_ids": words, "labels": draw.classes(ROWS)},
        "class of a token": {"input_ids": words, "labels": draw.classes(ROWS, LENGTH)},
        "target text": {"input_ids": words, "labels": draw.tokens(ROWS, 4)},
        "target text of features": {"input_features": draw.numbers(ROWS, 4, 10), "labels": draw.tokens(ROWS, 4)},
        "target text of frames": {"input_features": draw.numbers(ROWS, 10, 4), "labels": draw.tokens(ROWS, 4)},
        "class of an image": {"pixel_values": image, "labels": draw.classes(ROWS)},
        "class of a sound": {"input_values": draw.numbers(ROWS, 60), "labels": draw.classes(ROWS)},
        "transcript of a sound": {"input_values": draw.numbers(ROWS, 60), "labels": draw.tokens(ROWS, 2)},
        "class of a spectrogram": {"input_values": draw.numbers(ROWS, 8, 8), "labels": draw.classes(ROWS)},
        "class of features": {"input_features": draw.numbers(ROWS, 4, 10), "labels": draw.classes(ROWS)},
        "text of an image": {"input_ids": words, "pixel_values": image, "labels": words},
        "text around an image": {"input_ids": around, "pixel_values": image, "labels": around},
        "answer about an image": {"input_ids": words, "pixel_values": image, "labels": answers},
        "pairs": {"input_ids": words, "pixel_values": image},
        "states": {"input_ids": words},
        "answer in a text": {"input_ids": words},
    }
    return kinds[kind]


def _matching(outputs: Any, targets: Tensor) -> Tensor:
    """CLIP's loss: which text belongs to which image."""
    scores: Tensor = outputs.logits_per_image
    both = (nn.functional.cross_entropy(one, targets) for one in (scores, scores.T))
    return sum(both, torch.zeros((), dtype=scores.dtype)) / 2


def _towards(outputs: Any, targets: Tensor) -> Tensor:
    """The mean square of the last states against targets."""
    return (outputs.last_hidden_state - targets).square().mean()


def _span(outputs: Any, targets: Tensor) -> Tensor:
    """The cross-entropy of the first and of the last token of an answer."""
    both = zip((outputs.start_logits, outputs.end_logits), targets.unbind(1), strict=True)
    losses = [nn.functional.cross_entropy(logits, target) for logits, target in both]
    return (losses[0] + losses[1]) / 2


Loss = Callable[[Any, Any], Tensor]
_LOSSES: dict[str, tuple[Loss, Callable[[], Tensor]]] = {  # of models without labels, and the targets
    "pairs": (_matching, lambda: torch.arange(ROWS)),
    "states": (_towards, lambda: _Draw().numbers(ROWS, LENGTH, WIDTH)),
    "answer in a text": (_span, lambda: torch.tensor([[1, 3], [0, 2]])),
}


NO_LOSS = {"Wav2Vec2ForCTC", "ViltForQuestionAnswering"}  # whose own loss is none that the package knows


# ---- models


class _Float64(TorchFunctionMode):
    """Inside, float32 means float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def widened(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        func = Tensor.double if func is Tensor.float else func
        return func(*map(widened, args), **{key: widened(value) for key, value in (kwargs or {}).items()})


def _enter(module: nn.Module, inputs: Any) -> None:
    _Float64().__enter__()


def _leave(module: nn.Module, inputs: Any, outputs: Any) -> None:
    _Float64().__exit__(None, None, None)


def _settled(model: nn.Module, name: str) -> nn.Module:
    """The model in float64 and evaluation mode, its weights away from zeros, ones and symmetries."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    model = model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:  # fixed positions stay: they are not even saved
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def _widened(model: nn.Module) -> nn.Module:
    """The model, with float64 for float32 while it runs."""
    model.register_forward_pre_hook(_enter)
    model.register_forward_hook(_leave, always_call=True)
    return model


def hugging_face(name: str, **changes: Any) -> Any:
    """The model of an entry in float64, with changes to its configuration; inside it may still compute in float32. Its
    experts are computed one by one, since torch's grouped products have no float64."""
    import transformers

    entry = ENTRIES[name]
    parts = {key: getattr(transformers, kind)(**options) for key, (kind, options) in entry.parts.items()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = getattr(transformers, entry.config)(**{**entry.options, **changes}, **parts)
        model = getattr(transformers, name)(config)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return _settled(model, name)


def save(name: str, folder: Path, **changes: Any) -> Any:
    """The model of an entry in float32, saved as a folder."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model = hugging_face(name, **changes).float()
    model.save_pretrained(folder)
    return model


class _Decoder(nn.Module):
    """nn.TransformerDecoder on a fixed memory."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(WIDTH, 2, 12, 0.0, activation="gelu", batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, 2)
        self.memory = nn.Parameter(torch.zeros(ROWS, 3, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.decoder(x, self.memory)
        return found


class _Attention(nn.Module):
    """nn.MultiheadAttention alone."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.attention(x, x, x)[0]
        return found


class _Recurrent(nn.Module):
    """An LSTM and a linear readout."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, 6, num_layers=2, batch_first=True)
        self.readout = nn.Linear(6, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.readout(self.lstm(x)[0])
        return found


class _LowRank(nn.Module):
    """A linear layer with a correction of low rank, as LoRA has it."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(WIDTH, WIDTH)
        self.lora_A, self.lora_B = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.base_layer(x) + self.lora_B(self.lora_A(x))
        return found


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 12, 0.0, activation="gelu", batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 2, nn.LayerNorm(WIDTH), enable_nested_tensor=False)


def _convolutional() -> nn.Module:
    first, second = nn.Conv2d(3, 4, 3, stride=2), nn.Conv2d(4, 6, 2)
    return nn.Sequential(first, nn.BatchNorm2d(4), nn.Tanh(), second, nn.GELU(), nn.Flatten(), nn.Linear(24, CLASSES))


_STREAM, _PICTURES = (ROWS, LENGTH, WIDTH), (ROWS, 3, 8, 8)
PLAIN: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {  # how to make it, and the shape of its input
    "nn.TransformerEncoder": (_encoder, _STREAM),
    "nn.TransformerDecoder": (_Decoder, _STREAM),
    "nn.MultiheadAttention": (_Attention, _STREAM),
    "nn.LSTM": (_Recurrent, _STREAM),
    "low rank": (lambda: nn.Sequential(_LowRank(), nn.Tanh(), _LowRank()), _STREAM),
    "convolutions": (_convolutional, _PICTURES),
}


def plain(name: str) -> tuple[nn.Module, Loss | None, list[Any]]:
    """A model of torch's own modules, with the mean square, or cross-entropy for pictures."""
    make, shape = PLAIN[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = _settled(make(), name)
    draw = _Draw()
    inputs = draw.numbers(*shape)
    if shape == _PICTURES:
        return model, nn.functional.cross_entropy, [(inputs, draw.classes(ROWS))]
    return model, nn.functional.mse_loss, [(inputs, draw.numbers(*_STREAM))]


def cases() -> list[str]:
    """Names of the models that can be built here."""
    try:
        import transformers
    except ImportError:
        return list(PLAIN)
    known = set(transformers.__all__)  # to ask for an attribute would load its module, and 100 of them take seconds
    return [*PLAIN, *(name for name in ENTRIES if name in known)]


def build(name: str, **changes: Any) -> tuple[nn.Module, Loss | None, list[Any]]:
    """The model, with changes to its configuration, its loss and its batches; no loss where the model has its own for
    the labels in the batch."""
    if name in PLAIN:
        return plain(name)
    kind = ENTRIES[name].batch
    if kind in _LOSSES:
        loss, targets = _LOSSES[kind]
        return _widened(hugging_face(name, **changes)), loss, [(batch(kind), targets())]
    return _widened(hugging_face(name, **changes)), None, [batch(kind)]
