"""Sizes of a model with a tower of images: of its text as a :class:`GPTModel`, and of the tower.

The model is built on ``meta``. No family has code here: the text is that family of
:class:`GPTModel` whose weights have the same names and shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron_lightning.bridge.families import FAMILIES
from megatron_lightning.bridge.family_rules.family import new_shapes, to_config
from megatron_lightning.bridge.folders.hub import local_folder
from megatron_lightning.bridge.hf_models.transformers_model import quiet
from megatron_lightning.config import TransformerConfig
from megatron_lightning.errors import ConfigError
from megatron_lightning.models.plans.hf_towers import towers_of
from megatron_lightning.optional import HF_FOLDER, require
from megatron_lightning.parallel.shards.patterns import compile_pattern
from megatron_lightning.planning.ledger.tower_memory import TowerLinear, TowerSizes

_POSITIONS = ("rope_parameters", "rope_scaling", "rope_theta")
"""Settings of text models without an effect on sizes."""
_IDENTITY = ("model_type", "architectures", "transformers_version", "dtype")
_KINDS = ("AutoModelForImageTextToText", "AutoModelForCausalLM")


def image_model(
    path: str, *, freeze: Sequence[str] = (), train_only: Sequence[str] = (), **options: Any
) -> tuple[TransformerConfig, TowerSizes] | None:  # fmt: skip
    """Return the sizes of a folder's model with a tower of images. None: the model reads text
    alone.

    Args:
        path: Folder or Hub id.
        freeze: Patterns of frozen parameters.
        train_only: Patterns of trained parameters.
        options: ``revision`` and ``trust_remote_code``.

    Raises:
        ConfigError: If no family of :class:`GPTModel` has the weights of the text model.
    """
    folder = local_folder(path, revision=options.get("revision"), weights=False)
    model = _on_meta(folder, _KINDS[:1], trusts=options.get("trust_remote_code", False))
    if model is None or not towers_of(model):
        return None
    return _text_config(model, folder), _tower(model, freeze, train_only)


def trained_model(
    folder: Path, *, trusts: bool
) -> tuple[TransformerConfig, TowerSizes | None] | None:
    """Return the sizes of the model of a folder, perhaps without weights: of its text, and of a
    tower of images. None: no family of :class:`GPTModel` has the weights of the text model.
    """
    model = _on_meta(folder, _KINDS, trusts=trusts)
    try:
        config = None if model is None else _text_config(model, folder)
    except ConfigError:
        return None
    if config is None:
        return None
    return config, _tower(model, (), ()) if towers_of(model) else None


def _on_meta(folder: Path, kinds: Sequence[str], *, trusts: bool) -> Any:
    """Return a folder's model of one of some kinds, without values. None: it has another kind."""
    require("transformers", HF_FOLDER)
    import transformers
    from transformers import AutoConfig

    try:
        theirs = AutoConfig.from_pretrained(folder, trust_remote_code=trusts)
    except (OSError, ValueError):  # a checkpoint, or no folder of transformers
        return None
    for name in kinds:
        kind: Any = getattr(transformers, name)
        if type(theirs) in kind._model_mapping:
            with torch.device("meta"):
                return kind.from_config(theirs)
    return None


def _text_config(model: Any, folder: Path) -> TransformerConfig:
    """Return the configuration of the :class:`GPTModel` with the sizes of the text model."""
    transformers = require("transformers", HF_FOLDER)

    prefix, text = _text_model(model)
    shapes = {f"model.{name}": tuple(p.shape) for name, p in text.named_parameters()}
    settings = model.config.get_text_config().to_dict()
    head, words = model.get_output_embeddings(), model.get_input_embeddings()
    settings["tie_word_embeddings"] = head is None or head.weight is words.weight
    kinds: list[tuple[Any, Any]] = [
        (getattr(transformers, family.architecture).config_class, family)
        for family in FAMILIES.values()
    ]
    name = settings["model_type"]
    kinds.sort(key=lambda pair: -SequenceMatcher(None, pair[0].model_type, name).ratio())
    for kind, family in kinds:
        try:
            with quiet():
                known = set(kind().to_dict()) - {*_POSITIONS, *_IDENTITY}
                plain = kind(**{name: one for name, one in settings.items() if name in known})
            config = to_config(family, plain, folder)
            expected = new_shapes(family, config)
        except Exception:  # of a class or a row that refuses another family's settings
            continue
        if shapes == {n: shape for n, (shape, _) in expected.items() if n.startswith("model.")}:
            return config
    raise ConfigError(
        f"the text model {prefix} of {type(model).__name__} ({type(text).__name__}) has the "
        "weights of no family of GPTModel, whose formulas a plan of a model with images uses. Plan "
        "a module of your own with example_input_array instead."
    )


def _text_model(model: Any) -> tuple[str, nn.Module]:
    """Return path and module of the text model without its head."""
    kind = type(model.config.get_text_config())
    return next(
        (path, module)
        for path, module in model.named_modules()
        if path and type(getattr(module, "config", None)) is kind
    )


def _tower(model: Any, freeze: Sequence[str], train_only: Sequence[str]) -> TowerSizes:
    """Return the sizes of everything that is no text model."""
    _, text = _text_model(model)
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    of_text = {id(p) for part in (text, *ends) if part is not None for p in part.parameters()}
    own = {n: p.numel() for n, p in model.named_parameters() if id(p) not in of_text}
    patterns = [compile_pattern(pattern) for pattern in freeze or train_only]
    trained = {
        name: size
        for name, size in own.items()
        if any(p.fullmatch(path) for p in patterns for path in _paths(name)) == bool(train_only)
    }
    linears = tuple(
        TowerLinear(
            path,
            one.in_features,
            one.out_features,
            _is_in_block(model, path),
            is_trained=f"{path}.weight" in trained,
        )
        for path, one in model.named_modules()
        if isinstance(one, nn.Linear) and f"{path}.weight" in own
    )
    return TowerSizes(
        parameters=sum(own.values()),
        trained=sum(trained.values()),
        linears=linears,
        patches_per_token=_patches_per_token(model, linears),
        num_blocks=_num_blocks(model, linears),
        width=_width(linears),
        tile_patches=_tile_patches(model),
    )


def _paths(name: str) -> list[str]:
    """Return the names of a parameter and of the modules around it."""
    segments = name.split(".")
    paths = [".".join(segments[:length]) for length in range(1, len(segments) + 1)]
    return [*paths, *(f"model.{path}" for path in paths)]


def _is_in_block(model: nn.Module, path: str) -> bool:
    """Return whether a module is in one of several blocks of a tower."""
    segments = path.split(".")
    around = (model.get_submodule(".".join(segments[:end])) for end in range(1, len(segments)))
    return any(isinstance(one, nn.ModuleList) and len(one) > 1 for one in around)


def _patches_per_token(model: Any, linears: Sequence[TowerLinear]) -> float:
    """Return the patches behind a token: merged or pooled ones by the configuration, others by how
    much wider the projector's first rows are than the tower's.
    """
    vision: Any = getattr(model.config, "vision_config", None)
    if merged := getattr(vision, "spatial_merge_size", None):
        return float(merged**2)
    if pooled := getattr(model.config, "mm_tokens_per_image", None):
        return float((vision.image_size // vision.patch_size) ** 2 / pooled)
    width = _width(linears)
    first = next((one.features_in for one in linears if not one.is_in_block), width)
    return float(first // width if width and first % width == 0 else 1)


def _width(linears: Sequence[TowerLinear]) -> int:
    """Return the features of a patch between blocks."""
    return next((one.features_in for one in linears if one.is_in_block), 0)


def _num_blocks(model: nn.Module, linears: Sequence[TowerLinear]) -> int:
    """Return the number of blocks of a tower."""
    path = next((one.path for one in linears if one.is_in_block), "")
    segments = path.split(".")
    around = (model.get_submodule(".".join(segments[:end])) for end in range(1, len(segments)))
    return next((len(one) for one in around if isinstance(one, nn.ModuleList)), 0)


def _tile_patches(model: Any) -> int | None:
    """Return the patches of a picture of fixed size. None: the size is the image's."""
    vision: Any = getattr(model.config, "vision_config", None)
    sizes = (getattr(vision, name, None) for name in ("image_size", "patch_size"))
    whole, patch = (one[0] if isinstance(one, list | tuple) else one for one in sizes)
    is_free = getattr(vision, "spatial_merge_size", None) is not None
    return None if is_free or not whole or not patch else (whole // patch) ** 2
