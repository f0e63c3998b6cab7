"""Tiny models with a vision tower of further families, and their processors, for measurements."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import transformers

Number = Callable[[str], int]
"""Added token -> id."""
_TEXT: dict[str, Any] = {
    "num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 352, "max_position_embeddings": 512, "head_dim": 8,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 4,
}  # fmt: skip
_VISION: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 16, "patch_size": 4,
}  # fmt: skip
_DEEP: dict[str, Any] = {
    "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32,
    "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
_ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
_MERGED = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
_FLEXIBLE = {**_MERGED, "size": {"shortest_edge": 256, "longest_edge": 32768}}
_SQUARE = {"size": {"height": 16, "width": 16}}
_CLIP = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
_TILES = {"image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]]}
_EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
_LLAVA = {"patch_size": 4, "num_additional_image_tokens": 1}
_QWEN = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
_GLM = ("<|begin_of_image|>", "<|image|>", "<|end_of_image|>", "<|video|>", "<|begin_of_video|>",
        "<|end_of_video|>")  # fmt: skip


@dataclass(frozen=True)
class ImageFamily:
    """A model, its processor, and the tokens of images."""

    processor: str
    """Class of the processor."""
    images: tuple[str, Mapping[str, Any]]
    """Class of the image processor less ``Pil``, and its arguments."""
    text: str
    """Text for an image in the chat template."""
    tokens: tuple[str, ...]
    """Added tokens."""
    config: Callable[[Number], Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the processor."""
    named: Mapping[str, str] = field(default_factory=dict)
    """Attributes of the tokenizer."""
    begin: str = ""
    """Text before conversations."""


def _text(kind: str, **options: Any) -> Any:
    return getattr(transformers, kind)(**{**_TEXT, **options})


def _qwen_ids(number: Number) -> dict[str, Any]:
    names = ("vision_start_token_id", "image_token_id", "vision_end_token_id", "video_token_id")
    return {name: number(token) for name, token in zip(names, _QWEN, strict=True)}


def _glm_ids(number: Number) -> dict[str, Any]:
    names = ("image_start_token_id", "image_token_id", "image_end_token_id", "video_token_id",
             "video_start_token_id", "video_end_token_id")  # fmt: skip
    return {name: number(token) for name, token in zip(names, _GLM, strict=True)}


def _qwen2_vl(number: Number) -> Any:
    vision = {"depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2}
    return transformers.Qwen2VLConfig(
        text_config={**_TEXT, "rope_parameters": _ROPE},
        vision_config={**_DEEP, **vision},
        **_qwen_ids(number),
    )


def _qwen3_vl(number: Number) -> Any:
    vision = {**_DEEP, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
    text = {**_TEXT, "rope_parameters": {**_ROPE, "mrope_interleaved": True}}
    return transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **_qwen_ids(number))


def _qwen3_vl_moe(number: Number) -> Any:
    vision = {**_DEEP, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
    text = {
        **_TEXT, **_EXPERTS, "num_experts": 4, "num_local_experts": 4,
        "rope_parameters": {**_ROPE, "mrope_interleaved": True},
    }  # fmt: skip
    return transformers.Qwen3VLMoeConfig(
        text_config=text, vision_config=vision, **_qwen_ids(number)
    )


def _glm4v(number: Number) -> Any:
    return transformers.Glm4vConfig(
        text_config={**_TEXT, "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5,
                                                  "mrope_section": [1, 1, 0]}},
        vision_config={**_DEEP, "image_size": 16},
        **_glm_ids(number),
    )  # fmt: skip


def _glm4v_moe(number: Number) -> Any:
    text = {
        **_TEXT, **_EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1,
        "topk_group": 1, "first_k_dense_replace": 1,
        "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]},
    }  # fmt: skip
    return transformers.Glm4vMoeConfig(
        text_config=text, vision_config={**_DEEP, "image_size": 16}, **_glm_ids(number)
    )


def _glm_ocr(number: Number) -> Any:
    return transformers.GlmOcrConfig(
        text_config={**_TEXT, "rope_parameters": _ROPE},
        vision_config={**_DEEP, "image_size": 16},
        **_glm_ids(number),
    )


def _clip() -> Any:
    return transformers.CLIPVisionConfig(**_VISION, projection_dim=16)


def _llava_next(number: Number) -> Any:
    return transformers.LlavaNextConfig(
        vision_config=_clip(), text_config=_text("LlamaConfig"), vision_feature_layer=-1,
        image_token_index=number("<image>"), **_TILES,
    )  # fmt: skip


def _vipllava(number: Number) -> Any:
    return transformers.VipLlavaConfig(
        vision_config=_clip(), text_config=_text("LlamaConfig"), vision_feature_layers=[-1, -2],
        image_token_index=number("<image>"), image_seq_length=16,
    )  # fmt: skip


def _llava_onevision(number: Number) -> Any:
    return transformers.LlavaOnevisionConfig(
        vision_config=transformers.SiglipVisionConfig(**_VISION, vision_use_head=False),
        text_config=_text("Qwen2Config"), image_token_index=number("<image>"),
        video_token_index=number("<video>"), **_TILES,
    )  # fmt: skip


def _internvl(number: Number) -> Any:
    vision = {**_VISION, "image_size": [16, 16], "patch_size": [4, 4]}
    return transformers.InternVLConfig(
        vision_config=vision, text_config=_text("Qwen2Config"),
        image_token_id=number("<IMG_CONTEXT>"), image_seq_length=4,
    )  # fmt: skip


def _mistral3(number: Number) -> Any:
    return transformers.Mistral3Config(
        vision_config=transformers.PixtralVisionConfig(**{**_VISION, "image_size": 64}, head_dim=8),
        text_config=_text("MistralConfig", sliding_window=None),
        image_token_index=number("[IMG]"), spatial_merge_size=2,
    )  # fmt: skip


def _pixtral_llava(number: Number) -> Any:
    return transformers.LlavaConfig(
        vision_config=transformers.PixtralVisionConfig(**{**_VISION, "image_size": 64}, head_dim=8),
        text_config=_text("MistralConfig", sliding_window=None), vision_feature_layer=-1,
        image_token_index=number("[IMG]"), vision_feature_select_strategy="full",
    )  # fmt: skip


def _paligemma(number: Number) -> Any:
    return transformers.PaliGemmaConfig(
        vision_config=transformers.SiglipVisionConfig(
            **_VISION, vision_use_head=False, projection_dim=32
        ),
        text_config=_text("GemmaConfig"), image_token_index=number("<image>"),
        projection_dim=32, hidden_size=32,
    )  # fmt: skip


def _mllama(number: Number) -> Any:
    vision = {
        "hidden_size": 16, "num_hidden_layers": 2, "num_global_layers": 1, "attention_heads": 2,
        "intermediate_size": 24, "vision_output_dim": 32, "image_size": 16, "patch_size": 4,
        "max_num_tiles": 4, "intermediate_layers_indices": [1],
    }  # fmt: skip
    text = {**_TEXT, "cross_attention_layers": [1], "pad_token_id": 0}
    return transformers.MllamaConfig(
        vision_config=vision, text_config=text, image_token_index=number("<|image|>")
    )


def _aya_vision(number: Number) -> Any:
    return transformers.AyaVisionConfig(
        vision_config=transformers.SiglipVisionConfig(**_VISION, vision_use_head=False),
        text_config=_text("Cohere2Config", sliding_window=64),
        image_token_index=number("<|IMG_PATCH|>"), downsample_factor=2,
    )  # fmt: skip


def _ovis2(number: Number) -> Any:
    return transformers.Ovis2Config(
        vision_config={**_VISION, "vocab_size": 24, "hidden_stride": 2,
                       "num_visual_indicator_tokens": 5},
        text_config=_text("Qwen2Config"), image_token_id=number("<IMG_ATOM>"),
        visual_indicator_token_ids=[number(token) for token in _OVIS[2:]],
        vocab_size=352, hidden_size=32,
    )  # fmt: skip


def _aria(number: Number) -> Any:
    return transformers.AriaConfig(
        vision_config={**_VISION, "image_size": 980, "patch_size": 196},
        text_config=_text("AriaTextConfig", moe_num_experts=4, moe_topk=2),
        projector_patch_to_query_dict={25: 4, 9: 4}, image_token_index=number("<image>"),
    )  # fmt: skip


def _deepseek_vl(number: Number) -> Any:
    return transformers.DeepseekVLConfig(
        vision_config=transformers.SiglipVisionConfig(**_VISION, vision_use_head=False),
        text_config=_text("LlamaConfig"), image_token_id=number("<image>"),
    )  # fmt: skip


def _smolvlm(number: Number) -> Any:
    return transformers.SmolVLMConfig(
        vision_config=dict(_VISION), text_config=_text("LlamaConfig"),
        image_token_id=number("<image>"), scale_factor=2,
    )  # fmt: skip


def _paddleocr(number: Number) -> Any:
    return transformers.PaddleOCRVLConfig(
        text_config={**_TEXT, "rope_parameters": _ROPE},
        vision_config={**_VISION, "spatial_merge_size": 2},
        image_token_id=number("<image>"), video_token_id=number("<video>"),
        vision_start_token_id=number("<start>"), vision_end_token_id=number("<end>"),
    )  # fmt: skip


_GRIDS = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
_AYA = ("<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "<|IMG_LINE_BREAK|>",
        "TILE", "TILE_GLOBAL")  # fmt: skip
_OVIS = ("<image>", "<IMG_ATOM>", "<img_start>", "<img_end>", "<img_grid>", "<img_col>",
         "<img_row>")  # fmt: skip
_IMG = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
_INTERN = {
    "start_image_token": "<img>", "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>", "video_token": "<video>",
}  # fmt: skip
_QWEN_TEXT = "".join(_QWEN[:3])
_QWEN_IMAGES = ("Qwen2VLImageProcessor", _FLEXIBLE)
_GLM_IMAGES = ("Glm4vImageProcessor", {**_MERGED, "size": _FLEXIBLE["size"]})
_GLM_TEXT = "".join(_GLM[:3])

FAMILIES: Mapping[str, ImageFamily] = {
    "qwen2_vl": ImageFamily("Qwen2VLProcessor", _QWEN_IMAGES, _QWEN_TEXT, _QWEN, _qwen2_vl),
    "qwen3_vl": ImageFamily("Qwen3VLProcessor", _QWEN_IMAGES, _QWEN_TEXT, _QWEN, _qwen3_vl),
    "qwen3_vl_moe": ImageFamily("Qwen3VLProcessor", _QWEN_IMAGES, _QWEN_TEXT, _QWEN, _qwen3_vl_moe),
    "glm4v": ImageFamily("Glm4vProcessor", _GLM_IMAGES, _GLM_TEXT, _GLM, _glm4v),
    "glm4v_moe": ImageFamily("Glm4vProcessor", _GLM_IMAGES, _GLM_TEXT, _GLM, _glm4v_moe),
    "glm_ocr": ImageFamily("Glm46VProcessor", _GLM_IMAGES, _GLM_TEXT, _GLM, _glm_ocr),
    "paddleocr_vl": ImageFamily(
        "PaddleOCRVLProcessor", ("PaddleOCRVLImageProcessor", {**_MERGED, "temporal_patch_size": 1,
                                                               "size": _FLEXIBLE["size"]}),
        "<start><image><end>", ("<image>", "<video>", "<start>", "<end>"), _paddleocr,
        named={"image_token": "<image>"},
    ),
    "llava_next": ImageFamily(
        "LlavaNextProcessor", ("LlavaNextImageProcessor", {**_CLIP, **_TILES}), "<image>",
        ("<image>",), _llava_next, {**_LLAVA, "vision_feature_select_strategy": "default"},
    ),
    "llava_onevision": ImageFamily(
        "LlavaOnevisionProcessor", ("LlavaOnevisionImageProcessor", {**_SQUARE, **_TILES}),
        "<image>", ("<image>", "<video>"), _llava_onevision,
        {"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
    ),
    "vipllava": ImageFamily(
        "LlavaProcessor", ("CLIPImageProcessor", _CLIP), "<image>", ("<image>",), _vipllava,
        {**_LLAVA, "vision_feature_select_strategy": "default"},
    ),
    "internvl": ImageFamily(
        "InternVLProcessor", ("GotOcr2ImageProcessor", _SQUARE), "<IMG_CONTEXT>",
        tuple(_INTERN.values()), _internvl, {"image_seq_length": 4}, _INTERN,
    ),
    "mistral3": ImageFamily(
        "PixtralProcessor", ("PixtralImageProcessor", {"size": {"longest_edge": 32},
                                                       "patch_size": {"height": 8, "width": 8}}),
        "[IMG]", _IMG, _mistral3, {"patch_size": 4, "spatial_merge_size": 2},
    ),
    "pixtral": ImageFamily(
        "PixtralProcessor", ("PixtralImageProcessor", {"size": {"longest_edge": 32},
                                                       "patch_size": {"height": 4, "width": 4}}),
        "[IMG]", _IMG, _pixtral_llava, {"patch_size": 4, "spatial_merge_size": 1},
    ),
    "paligemma": ImageFamily(
        "PaliGemmaProcessor", ("SiglipImageProcessor", {**_SQUARE, "image_seq_length": 16}),
        "<image>", ("<image>",), _paligemma, named={"image_token": "<image>"},
    ),
    "mllama": ImageFamily(
        "MllamaProcessor", ("MllamaImageProcessor", _SQUARE), "<|image|>",
        ("<|image|>", "<|python_tag|>"), _mllama, begin="<s>",
    ),
    "aya_vision": ImageFamily(
        "AyaVisionProcessor", ("GotOcr2ImageProcessor", _SQUARE), "<image>", _AYA, _aya_vision,
        {"patch_size": 4, "img_size": 16, "downsample_factor": 2},
    ),
    "ovis2": ImageFamily(
        "Ovis2Processor", ("Ovis2ImageProcessor", _SQUARE), "<image>", _OVIS, _ovis2,
        {"image_seq_length": 4},
    ),
    "aria": ImageFamily(
        "AriaProcessor", ("AriaImageProcessor", {"max_image_size": 490}), "<image>",
        ("<image>",), _aria, {"size_conversion": {490: 4, 980: 4}}, {"image_token": "<image>"},
    ),
    "deepseek_vl": ImageFamily(
        "DeepseekVLProcessor", ("DeepseekVLImageProcessor", _SQUARE), "<image>", ("<image>",),
        _deepseek_vl, {"num_image_tokens": 16}, {"image_token": "<image>"},
    ),
    "smolvlm": ImageFamily(
        "SmolVLMProcessor", ("SmolVLMImageProcessor", {"size": {"longest_edge": 32},
                                                       "max_image_size": {"longest_edge": 16}}),
        "<image>", ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>",
                    "<video>", *_GRIDS), _smolvlm, {"image_seq_len": 4},
    ),
}  # fmt: skip
