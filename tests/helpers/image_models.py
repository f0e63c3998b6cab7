"""Models with a vision tower before the layers, tiny and random, and batches for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tests.helpers.hf_models import BATCH, STEPS, VOCABULARY, Untouched

IMAGE_TOKEN, TEXT, SIZE, PATCH, MERGED = 66, 6, 8, 4, 4
_TEXT: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
}
_MROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
_TOKENS = {
    "image_token_id": IMAGE_TOKEN,
    "video_token_id": 65,
    "vision_start_token_id": 64,
    "vision_end_token_id": 63,
}


def _llava(*, frozen: bool = False) -> nn.Module:
    vision = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        image_size=SIZE, patch_size=PATCH, projection_dim=16,
    )  # fmt: skip
    model = transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(
            vision_config=vision,
            text_config=transformers.LlamaConfig(**_TEXT, head_dim=8, pad_token_id=0),
            image_token_index=IMAGE_TOKEN,
            vision_feature_layer=-1,
            image_seq_length=MERGED,
        )
    )
    model.model.vision_tower.requires_grad_(not frozen)
    return model


def _llava_next() -> nn.Module:
    """Return a model that merges an image as a whole, and in parts with an end of each line."""
    vision = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        image_size=SIZE, patch_size=PATCH, projection_dim=16,
    )  # fmt: skip
    return transformers.LlavaNextForConditionalGeneration(
        transformers.LlavaNextConfig(
            vision_config=vision,
            text_config=transformers.LlamaConfig(**_TEXT, head_dim=8, pad_token_id=0),
            image_token_index=IMAGE_TOKEN,
            vision_feature_layer=-1,
            image_grid_pinpoints=[[SIZE, SIZE]],
        )
    )


def _qwen() -> nn.Module:
    vision = {
        "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2,
        "out_hidden_size": 32, "patch_size": PATCH, "spatial_merge_size": 2,
        "temporal_patch_size": 2, "window_size": 16, "fullatt_block_indexes": [1],
    }  # fmt: skip
    text = {**_TEXT, "rope_parameters": _MROPE, "bos_token_id": 1, "eos_token_id": 2}
    return transformers.Qwen2_5_VLForConditionalGeneration(
        transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **_TOKENS)
    )


def _deepstack() -> nn.Module:
    """Return a model whose layers 0 and 1 read features of the tower beside its output."""
    vision = {
        "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2,
        "out_hidden_size": 32, "patch_size": PATCH, "spatial_merge_size": 2,
        "temporal_patch_size": 2, "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 1],
    }  # fmt: skip
    rope = {**_MROPE, "mrope_interleaved": True}
    text = {**_TEXT, "rope_parameters": rope, "head_dim": 8, "bos_token_id": 1, "eos_token_id": 2}
    return transformers.Qwen3VLForConditionalGeneration(
        transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **_TOKENS)
    )


_SIGLIP = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2,
    "image_size": SIZE, "patch_size": PATCH, "vision_use_head": False,
}  # fmt: skip
_TWO_KINDS = ["sliding_attention", "full_attention"] * 2


def _cohere2() -> nn.Module:
    """Return a model that merges before its first layer, with windows."""
    config = transformers.Cohere2VisionConfig(
        vision_config=transformers.SiglipVisionConfig(**_SIGLIP),
        text_config=transformers.Cohere2Config(**_TEXT, head_dim=8, sliding_window=8),
        image_token_id=IMAGE_TOKEN,
        downsample_factor=1,
        alignment_intermediate_size=32,
    )
    return transformers.Cohere2VisionForConditionalGeneration(config)


def _gemma3() -> nn.Module:
    """Return a model in which the tokens of an image see one another."""
    text = {**_TEXT, "head_dim": 8, "sliding_window": 8, "layer_types": _TWO_KINDS}
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config=_SIGLIP,
        mm_tokens_per_image=MERGED,
        image_token_index=IMAGE_TOKEN,
        boi_token_index=64,
        eoi_token_index=63,
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def _granite4() -> nn.Module:
    """Return a model that adds features of its tower between layers."""
    config = transformers.Granite4VisionConfig(
        vision_config=transformers.SiglipVisionConfig(**_SIGLIP),
        text_config={**_TEXT, "model_type": "granite4_vision_text"},
        qformer_config={
            "model_type": "blip_2_qformer", "hidden_size": 64, "intermediate_size": 24,
            "num_hidden_layers": 1, "cross_attention_frequency": 1, "use_qformer_text_input": False,
            "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
        },
        image_token_index=IMAGE_TOKEN,
        deepstack_layer_map=[[-2, 0], [-1, 2]],
        spatial_target_layers=[1, 3],
        downsample_rate="1/2",
        image_grid_pinpoints=[[SIZE, SIZE]],
        projector_dropout=0.0,
        vision_feature_select_strategy="full",
    )  # fmt: skip
    config.qformer_config.num_attention_heads = 2
    return transformers.Granite4VisionForConditionalGeneration(config)


def _qwen3_5() -> nn.Module:
    """Return a model with linear attention, and three positions for each token of an image."""
    vision = {
        "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2,
        "out_hidden_size": 32, "patch_size": PATCH, "spatial_merge_size": 2,
        "temporal_patch_size": 2, "num_position_embeddings": 16,
    }  # fmt: skip
    delta = {"linear_num_value_heads": 4, "linear_num_key_heads": 2}
    dims = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "head_dim": 8}
    rope = {**_MROPE, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5}
    kinds = ["linear_attention", "full_attention"] * 2
    text = {**_TEXT, **delta, **dims, "layer_types": kinds, "rope_parameters": rope}
    return transformers.Qwen3_5ForConditionalGeneration(
        transformers.Qwen3_5Config(text_config=text, vision_config=vision, **_TOKENS)
    )


class Reader(nn.Module):
    """A tower, whose every layer of text reads the features: cross attention, by its mean."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.cross = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, hidden: Tensor, features: Tensor) -> Tensor:
            return hidden + (self.linear(hidden) + self.cross(features)[:, None]).tanh()

    class Tower(nn.Module):
        """Counts its images."""

        def __init__(self) -> None:
            super().__init__()
            self.conv, self.scale = nn.Conv2d(3, 16, PATCH, PATCH), nn.Linear(16, 16)
            self.register_buffer("num_images", torch.zeros((), dtype=torch.long))

        def forward(self, images: Tensor) -> Tensor:
            self.num_images += images.shape[0]
            return self.scale(self.conv(images).tanh().mean((2, 3)))

    def __init__(self) -> None:
        super().__init__()
        self.tower = Reader.Tower()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.layers = nn.ModuleList(Reader.Layer() for _ in range(4))
        self.head = nn.Linear(16, VOCABULARY)

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, pixel_values: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        hidden = self.embed(input_ids)
        features = hidden.new_zeros(hidden.shape[0], 16)
        if pixel_values is not None:
            features = self.tower(pixel_values)
        for layer in self.layers:
            hidden = layer(hidden, features)
        logits = self.head(hidden)
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return logits, loss


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llava": _llava,
    "llava-frozen": lambda: _llava(frozen=True),
    "llava-next": _llava_next,
    "qwen2.5-vl": _qwen,
    "qwen3-vl": _deepstack,
    "reader": Reader,
    "cohere2": _cohere2,
    "gemma3": _gemma3,
    "granite4": _granite4,
    "qwen3.5": _qwen3_5,
}
TOWERS = {
    "llava": "model.vision_tower",
    "llava-frozen": "model.vision_tower",
    "llava-next": "model.vision_tower",
    "qwen2.5-vl": "model.visual",
    "qwen3-vl": "model.visual",
    "reader": "tower",
}
FLAT = ("qwen2.5-vl", "qwen3-vl", "qwen3.5")
"""Models that take an image as rows of patches."""


class _Samples(Dataset[dict[str, Tensor]]):
    def __init__(self, name: str, *, images: bool) -> None:
        draw, count = torch.Generator().manual_seed(2), STEPS * BATCH
        tokens = torch.randint(3, 60, (count, MERGED + TEXT), generator=draw)
        labels = tokens.clone()
        self.data = {"input_ids": tokens, "labels": labels}
        if not images:
            return
        if name == "reader":
            self.data["pixel_values"] = torch.randn(count, 3, SIZE, SIZE, generator=draw)
            return
        num_tokens = 1 if name in FLAT else MERGED
        tokens[:, 1 : 1 + num_tokens] = IMAGE_TOKEN
        labels[:, 1 : 1 + num_tokens] = -100
        if name in FLAT:
            self.data["pixel_values"] = torch.randn(count, 4, 3 * 2 * PATCH**2, generator=draw)
            self.data["image_grid_thw"] = torch.tensor([1, 2, 2]).expand(count, 3)
            self.data["mm_token_type_ids"] = (tokens == IMAGE_TOKEN).long()
        else:
            self.data["pixel_values"] = torch.randn(count, 3, SIZE, SIZE, generator=draw)

    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: values[index] for name, values in self.data.items()}


def loader(name: str, batch_size: int = BATCH, *, images: bool = True) -> DataLoader[Any]:
    """Return the batches of a model. Every sample has an image of 8 x 8, or none has."""
    return DataLoader(_Samples(name, images=images), batch_size)


class Calls:
    """A forward hook that counts on its rank. Numbers on a module would travel between stages."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, *_: Any) -> None:
        self.count += 1


class ImageModel(Untouched):
    """One model, called as its documentation says."""

    counts_calls: ClassVar[bool] = True
    """Whether a hook counts the calls of the tower. Ranks that share rows refuse hooks."""

    def build(self) -> None:
        torch.manual_seed(0)
        self.model = MODELS[self.name]()
        noise = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=noise))
        self.calls = Calls()
        if self.counts_calls:
            self.model.get_submodule(TOWERS[self.name]).register_forward_hook(self.calls)
        if self.name == "reader":
            self.example_input_array = {"input_ids": torch.zeros(2, 4, dtype=torch.long)}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        batch = dict(batch)
        if self.name in FLAT and "pixel_values" in batch:
            batch["pixel_values"] = batch["pixel_values"].flatten(0, 1)
        output = self.model(**batch)
        loss: Tensor = output[1] if isinstance(output, tuple) else output.loss
        return loss
