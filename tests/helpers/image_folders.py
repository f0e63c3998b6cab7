"""Tiny random folders of models with a vision tower and a processor, and rows with images."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image

from tests.helpers import image_families as further
from tests.helpers.chats import make_tokenizer, write_rows
from tests.helpers.image_families import ImageFamily

_TEXT: dict[str, Any] = {
    "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 352, "max_position_embeddings": 512, "head_dim": 8,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 4,
}  # fmt: skip
_VISION = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 16, "patch_size": 4,
}  # fmt: skip
_MROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
_PARTS = (
    "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c.type == 'image' %}IMAGE{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}" + _PARTS + "<|im_end|>{% endgeneration %}{% else %}" + _PARTS
    + "<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)  # fmt: skip
"""Template with marked answers. ``IMAGE`` is the model's text for an image."""


def _tokenizer(image: str, *special: str, begin: str = "", **named: Any) -> Any:
    names = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", *special]
    return make_tokenizer(
        names,
        template=begin + MARKED.replace("IMAGE", image),
        vocab_size=340,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="<|im_end|>",
        **named,
    )


def _images(name: str, **options: Any) -> Any:
    """The image processor that works without torchvision."""
    return getattr(transformers, f"{name}Pil")(**options)


def _llava() -> tuple[Any, Any, Any, str]:
    tokens = _tokenizer("<image>", "<image>")
    images = _images(
        "CLIPImageProcessor",
        size={"shortest_edge": 16},
        crop_size={"height": 16, "width": 16},
    )
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**_VISION, projection_dim=16),
        text_config=transformers.LlamaConfig(**_TEXT),
        image_token_index=tokens.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
    )
    settings = {
        "patch_size": 4,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
    }
    return images, tokens, transformers.LlavaForConditionalGeneration(config), settings


def _qwen() -> tuple[Any, Any, Any, Any]:
    tokens = _tokenizer(
        "<|vision_start|><|image_pad|><|vision_end|>",
        "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>",
    )  # fmt: skip
    number = tokens.convert_tokens_to_ids
    images = _images(
        "Qwen2VLImageProcessor",
        patch_size=4,
        merge_size=2,
        temporal_patch_size=2,
        size={"shortest_edge": 256, "longest_edge": 32768},
    )
    vision = {
        "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2,
        "out_hidden_size": 32, "patch_size": 4, "spatial_merge_size": 2,
        "temporal_patch_size": 2, "window_size": 16, "fullatt_block_indexes": [1],
    }  # fmt: skip
    config = transformers.Qwen2_5_VLConfig(
        text_config={**_TEXT, "rope_parameters": _MROPE},
        vision_config=vision,
        image_token_id=number("<|image_pad|>"),
        video_token_id=number("<|video_pad|>"),
        vision_start_token_id=number("<|vision_start|>"),
        vision_end_token_id=number("<|vision_end|>"),
    )
    return images, tokens, transformers.Qwen2_5_VLForConditionalGeneration(config), {}


def _gemma() -> tuple[Any, Any, Any, Any]:
    names = ("<start_of_image>", "<end_of_image>", "<image_soft_token>")
    extra = dict(zip(("boi_token", "eoi_token", "image_token"), names, strict=True))
    tokens = _tokenizer("<start_of_image>", *names, extra_special_tokens=extra)
    number = tokens.convert_tokens_to_ids
    images = _images("Gemma3ImageProcessor", size={"height": 16, "width": 16})
    config = transformers.Gemma3Config(
        text_config={**_TEXT, "sliding_window": 64, "layer_types": ["full_attention"] * 2},
        vision_config=_VISION,
        mm_tokens_per_image=4,
        image_token_index=number("<image_soft_token>"),
        boi_token_index=number("<start_of_image>"),
        eoi_token_index=number("<end_of_image>"),
    )
    model = transformers.Gemma3ForConditionalGeneration(config)
    return images, tokens, model, {"image_seq_length": 4}


def _idefics() -> tuple[Any, Any, Any, Any]:
    rows = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
    marks = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
    tokens = _tokenizer("<image>", *marks, *rows)
    images = _images(
        "Idefics3ImageProcessor",
        size={"longest_edge": 32},
        max_image_size={"longest_edge": 16},
    )
    config = transformers.Idefics3Config(
        vision_config=dict(_VISION),
        text_config=transformers.LlamaConfig(**_TEXT),
        image_token_id=tokens.convert_tokens_to_ids("<image>"),
        scale_factor=2,
    )
    model = transformers.Idefics3ForConditionalGeneration(config)
    return images, tokens, model, {"image_seq_len": 4}


_MAKERS = {
    "llava": ("LlavaProcessor", _llava),
    "qwen2_5_vl": ("Qwen2_5_VLProcessor", _qwen),
    "gemma3": ("Gemma3Processor", _gemma),
    "idefics3": ("Idefics3Processor", _idefics),
}
USUAL = tuple(_MAKERS)
"""Families of the usual run."""
FAMILIES = (*_MAKERS, *further.FAMILIES)


def _further(family: ImageFamily) -> tuple[Any, Any, Any, Any]:
    name, options = family.images
    named = {"extra_special_tokens": dict(family.named)} if family.named else {}
    tokens = _tokenizer(family.text, *family.tokens, begin=family.begin, **named)
    config = family.config(tokens.convert_tokens_to_ids)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    return _images(name, **options), tokens, model, dict(family.settings)


def make_image_folder(family: str, parent: Path) -> Path:
    """Save a model with weights drawn wide, its tokenizer and its processor."""
    torch.manual_seed(0)
    if family in _MAKERS:
        processor, make = _MAKERS[family]
        images, tokens, model, settings = make()
    else:
        processor = further.FAMILIES[family].processor
        images, tokens, model, settings = _further(further.FAMILIES[family])
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=draw))
    folder = parent / family
    model.save_pretrained(folder)
    tokens.save_pretrained(folder)
    images.save_pretrained(folder)
    (folder / "processor_config.json").write_text(
        json.dumps({"processor_class": processor, **settings})
    )
    return folder


def draw_image(path: Path, height: int, width: int, seed: int = 0, mode: str = "RGB") -> str:
    """Write an image of noise. Return the name of the file."""
    values = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    Image.fromarray(values).convert(mode).save(path)
    return path.name


def part(path: str) -> dict[str, str]:
    return {"type": "image", "image": path}


def words(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def image_chats(folder: Path, count: int = 8) -> list[dict[str, Any]]:
    """Return conversations with none, one and two images of three sizes, whose files are made."""
    sizes = ((20, 36), (40, 24), (16, 16))
    files = [draw_image(folder / f"{n}.png", *size, n) for n, size in enumerate(sizes)]
    rows = []
    for index in range(count):
        first, second = files[index % 3], files[(index + 1) % 3]
        content: Sequence[Any] = (
            [part(first), words(f" what color {index}")],
            [words("look"), part(first), words(" and at"), part(second), words("?")],
            [words("why is the sky blue")],
        )[index % 3]
        answer = "a red one \u00fc " + "green " * (index % 4)
        messages = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
        if index % 2:
            messages += [
                {"role": "user", "content": "sure?"},
                {"role": "assistant", "content": "Yes \U0001f600"},
            ]
        rows.append({"messages": messages})
    return rows


def write_image_rows(folder: Path, count: int = 8) -> str:
    """Write conversations and their images. Return the path of the rows."""
    return write_rows(folder / "chats.jsonl", image_chats(folder, count))
