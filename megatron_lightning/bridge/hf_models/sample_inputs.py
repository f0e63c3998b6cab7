"""Inputs for a call of any model of ``transformers``, and the tensor compared of the outputs."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

_ROWS, _LENGTH, _SAMPLES = 2, 16, 4000


def sample_inputs(config: Any, model: Any) -> dict[str, Tensor]:
    """Return random inputs: tokens, and pictures or sounds for models that take no tokens alone.

    Args:
        config: The model's configuration.
        model: The model.
    """
    generator = torch.Generator().manual_seed(0)
    inputs: dict[str, Tensor] = {}
    main = getattr(model, "main_input_name", "input_ids")
    # Two towers, such as of CLIP, are called with both of their inputs.
    has_towers = main == "input_ids" and hasattr(config, "projection_dim")
    if main == "pixel_values" or (has_towers and _names(model, "pixel_values")):
        channels, (height, width) = _size(config, "num_channels", 3), _image_size(config)
        pictures = torch.randn(_ROWS, channels, height, width, generator=generator)
        inputs["pixel_values"] = pictures
    elif main == "input_features":
        frames = 2 * _size(config, "max_source_positions", _SAMPLES)
        bins = _size(config, "num_mel_bins", 80)
        inputs[main] = torch.randn(_ROWS, bins, frames, generator=generator)
    elif main == "input_values":
        inputs[main] = torch.randn(_ROWS, _SAMPLES, generator=generator)
    tokens = torch.randint(0, _vocabulary(config, model), (_ROWS, _LENGTH), generator=generator)
    if main == "input_ids":
        inputs[main] = tokens
    if getattr(config, "is_encoder_decoder", False) and _names(model, "decoder_input_ids"):
        inputs["decoder_input_ids"] = tokens
    return inputs


def first_output(outputs: Any) -> Tensor:
    """Return the logits of a model's outputs, or else the first tensor of floating values."""
    logits = getattr(outputs, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    values = outputs.to_tuple() if hasattr(outputs, "to_tuple") else outputs
    return next(x for x in tree_leaves(values) if isinstance(x, Tensor) and x.is_floating_point())


def _names(model: Any, name: str) -> bool:
    return name in signature(model.forward).parameters


def _vocabulary(config: Any, model: Any) -> int:
    try:
        return int(model.get_input_embeddings().weight.shape[0])
    except (AttributeError, NotImplementedError):  # none, or several
        return int(getattr(config.get_text_config(), "vocab_size", 0) or 1)


def _size(config: Any, name: str, default: int) -> int:
    vision = getattr(config, "vision_config", None)
    return int(getattr(config, name, None) or getattr(vision, name, None) or default)


def _image_size(config: Any) -> tuple[int, int]:
    vision = getattr(config, "vision_config", None)
    size = getattr(config, "image_size", None) or getattr(vision, "image_size", None) or 224
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return int(height), int(width)
