"""Families: how a folder of ``transformers`` describes a :class:`GPTModel`.

A :class:`Family` has two tables. The settings map fields of ``TransformerConfig`` to keys of
config.json, both ways. The weights name the folder's tensors behind each parameter. Nothing in a
family speaks of ranks: a rank reads the boxes of local shards, since rows run on lazy tensors.

The key of a row of weights is a pattern of our names. ``*`` stands for a part of a name between
dots. The value of a row is the patterns of their names, with as many ``*``. A :mod:`move
<megatron_lightning.bridge.tensors.tensor_ops>` precedes the patterns unless the tensor is copied
unchanged.
``#`` stands for every expert. Layers of multi-token prediction count as layers behind the last
layer, with the rows of layers.

Nothing is left out in silence. A key of config.json without a row has to have the value implied by
the family. A tensor without a row has to be ignored by the class's declaration.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar

from torch import Tensor

from megatron_lightning.bridge.family_rules.settings import (
    Row,
    Settings,
    UnsupportedSettingError,
    Values,
    build_config,
    differing,
    flat,
)
from megatron_lightning.bridge.tensors.lazy import Lazy
from megatron_lightning.bridge.tensors.mismatches import describe_mismatches
from megatron_lightning.bridge.tensors.tensor_ops import Copied, Move
from megatron_lightning.config import TransformerConfig
from megatron_lightning.errors import CheckpointError, ConfigError
from megatron_lightning.models.blueprint import LAYER, PREDICTING, saved_tensors
from megatron_lightning.optional import HF_FOLDER, require
from megatron_lightning.parallel.shards.spec import Box, Shape

Sources = str | tuple[Move | str, ...]

_WITHOUT_EFFECT = frozenset(
    (
        "attention_dropout", "bos_token_id", "eos_token_id", "initializer_range",
        "output_router_logits", "pad_token_id", "pretraining_tp", "reorder_and_upcast_attn",
        "router_aux_loss_coef", "router_jitter_noise", "summary_activation",
        "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
        "use_cache",
    )
)  # fmt: skip
"""Keys of every model without an effect on parameters or logits."""
WORDS, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


class UnwritableError(ConfigError):
    """A family refuses a configuration, so that no list of missing fields is known."""


def table(*parts: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the rows of several tables as a single read-only table. Later rows win."""
    return MappingProxyType({key: row for part in parts for key, row in part.items()})


class Family:
    """A class of ``transformers`` models with an equivalent :class:`GPTModel`."""

    architecture: ClassVar[str]
    """Class in ``architectures`` of config.json."""
    settings: ClassVar[tuple[Row, ...]]
    """Rows of the configuration."""
    weights: ClassVar[Mapping[str, Sources]]
    """Rows of the weights."""
    prefix: ClassVar[str] = ""
    """Name of the bare model in folders. Empty: the name in the class."""
    copies: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Tensor of the folder repeating a parameter -> the parameter. ``*`` is a layer of multi-token
    prediction."""


# ----------------------------------------------------------------------------------- configuration


def to_config(family: type[Family], theirs: Any, path: object) -> TransformerConfig:
    """Return our configuration of a folder's model.

    Args:
        family: The model's family.
        theirs: Configuration of ``transformers``.
        path: The folder, for messages.

    Raises:
        ConfigError: Naming the keys with values unknown to :class:`GPTModel`.
    """
    settings, ours = Settings(theirs.to_dict()), Values()
    refused: list[str] = []
    if settings.get("quantization_config") is not None:
        refused.append("quantization_config")
    for row in family.settings:
        try:
            ours |= row.read(settings)
        except UnsupportedSettingError as error:
            refused.append(str(error))
    if not refused:
        config = build_config(ours)
        # A key that no row has read and that differs from its default would be lost in silence.
        refused = _unread(family, settings, config)
    if refused:
        raise ConfigError(
            f"{path}/config.json sets {', '.join(refused)}, which GPTModel has no field for "
            f"(family {family.__name__}). Train the untouched model: HuggingFaceModule, or "
            'to_model("transformers").'
        )
    return config


def _unread(family: type[Family], settings: Settings, config: TransformerConfig) -> list[str]:
    """Return the keys read by no row, with another value than implied by the family."""
    require("transformers", HF_FOLDER)
    from transformers import PretrainedConfig

    implied = to_theirs(family, config).to_dict()
    known_keys = settings.seen | _WITHOUT_EFFECT | set(PretrainedConfig().to_dict())
    keys = [key for key in implied if key not in known_keys]
    return [
        f"{key}={settings.get(key)!r}" for key in keys if settings.get(key, ...) != implied[key]
    ]


def to_theirs(family: type[Family], config: TransformerConfig) -> Any:
    """Return a family's configuration of ``transformers`` for our configuration."""
    require("transformers", HF_FOLDER)
    import transformers

    ours, keys = flat(config), Values()
    for row in family.settings:
        keys |= row.write(ours)
    return getattr(transformers, family.architecture).config_class(**keys)


def missing_fields(family: type[Family], config: TransformerConfig) -> list[str]:
    """Return the fields not reproduced by a family's tables. Empty: the tables describe
    the model.

    Raises:
        UnwritableError: If the family cannot write the configuration at all.
    """
    try:
        again = to_config(family, to_theirs(family, config), family.__name__)
    except Exception as error:  # from a class of transformers, or a row refusing the value
        text = (str(error) or type(error).__name__).splitlines()[0]
        raise UnwritableError(
            f"the family {family.__name__.lower()} does not describe the model: {text} Leave "
            "--family out to take the first that does."
        ) from error
    fields = differing(flat(config), flat(again))
    if not fields:
        try:
            list(_rows(family, config))
        except ConfigError as error:
            return [str(error)]
    return fields


# ----------------------------------------------------------------------------------------- weights


def parameters(
    family: type[Family],
    config: TransformerConfig,
    tensors: Mapping[str, Lazy],
    *,
    path: object,
    ignored: Sequence[str] = (),
) -> dict[str, Lazy]:
    """Return the parameters and saved buffers of a :class:`GPTModel`, made of a folder's tensors.

    Args:
        family: The folder's family.
        config: The model.
        tensors: Name in the folder, see :func:`by_full_name` -> tensor.
        path: The folder, for messages.
        ignored: Patterns of names ignored by declaration of the class of ``transformers``.

    Raises:
        CheckpointError: Naming missing tensors, misshapen tensors, and tensors without a row.
    """
    # Problems are collected, so that one message names them all.
    results, used_names = dict[str, Lazy](), set(copies(family, config, tensors))
    missing_names, misshapen = list[str](), list[str]()
    for name, shape, move, sources in _rows(family, config):
        names = [theirs for source in sources for theirs in source]
        absent = [theirs for theirs in names if theirs not in tensors]
        used_names.update(names)
        if absent:
            missing_names += absent
            continue
        try:
            tensor: Any = move.join(config, [tensors[theirs] for theirs in names])
        except (RuntimeError, IndexError, ValueError):  # shapes do not fit together
            tensor = None
        if tensor is None or tuple(tensor.shape) != shape:
            own_shapes = move.shapes(config, shape, len(sources))
            differing_names = [
                theirs
                for source, own_shape in zip(sources, own_shapes, strict=True)
                for theirs in source
                if tuple(tensors[theirs].shape) != own_shape
            ]
            misshapen += differing_names or names
            continue
        results[name] = tensor
    unused_names = [
        n for n in tensors if n not in used_names and not any(re.search(p, n) for p in ignored)
    ]
    problems = describe_mismatches(
        missing=sorted(missing_names), misshapen=sorted(misshapen), unexpected=sorted(unused_names)
    )
    if problems:
        raise CheckpointError(
            f"{path} does not fit GPTModel by the rules of {family.__name__}: "
            f"{problems}. Name the folder that the configuration is of, or restore it."
        )
    return results


def new_shapes(family: type[Family], config: TransformerConfig) -> dict[str, tuple[Shape, str]]:
    """Return name and shape of each tensor in a new folder, and our parameter behind the tensor.

    Raises:
        ConfigError: If a parameter has no row.
    """
    shapes_of_names = dict[str, tuple[Shape, str]]()
    shape_of = dict(saved_tensors(config))
    for name, shape, move, sources in _rows(family, config):
        shapes = move.shapes(config, shape, len(sources))
        for theirs, own_shape in zip(sources, shapes, strict=True):
            shapes_of_names.update(dict.fromkeys(theirs, (own_shape, name)))
    repeated = copies(family, config)
    shapes_of_names |= {theirs: (shape_of[ours], ours) for theirs, ours in repeated.items()}
    return shapes_of_names


def by_full_name(tensors: Mapping[str, Lazy], prefix: str) -> dict[str, Lazy]:
    """Return tensors by full names: add the prefix missing from a folder of the bare
    model (GPT-2).
    """
    if not prefix or any(name.startswith(prefix) for name in tensors):
        return dict(tensors)
    return {prefix + name: tensor for name, tensor in tensors.items()}


def _rows(
    family: type[Family], config: TransformerConfig
) -> Iterator[tuple[str, Shape, Move, list[list[str]]]]:
    """Yield name, shape, move and source tensors of every parameter: for each pattern of the row a
    single tensor, or a tensor for each expert.

    Raises:
        ConfigError: If a parameter has no row.
    """
    patterns = [(_pattern(key), sources) for key, sources in family.weights.items()]
    for name, shape in saved_tensors(config):
        layer = _as_layer(name, config)
        for pattern, sources in patterns:
            if match := pattern.fullmatch(layer):
                yield name, shape, *_bound(sources, match.groups(), config)
                break
        else:
            raise ConfigError(f"{family.__name__} has no row for {name}")


def _pattern(key: str) -> re.Pattern[str]:
    return re.compile(re.escape(key).replace(r"\*", "([^.]+)"))


def _as_layer(name: str, config: TransformerConfig) -> str:
    """Return the name of a tensor with layers of multi-token prediction behind the other layers."""
    if not name.startswith(PREDICTING):
        return name
    depth, _, path = name.removeprefix(PREDICTING).partition(".")
    index = config.num_layers + int(depth)
    if path.startswith("transformer_layer."):
        return f"{LAYER}{index}.{path.removeprefix('transformer_layer.')}"
    return f"{PREDICTING}{index}.{path}"


def _bound(
    sources: Sources, parts: Iterable[str], config: TransformerConfig
) -> tuple[Move, list[list[str]]]:
    """Return the move of a row, and the names matched by each pattern of the row."""
    entries = (sources,) if isinstance(sources, str) else sources
    move = next((entry for entry in entries if not isinstance(entry, str)), Copied())
    names = []
    for source in (entry for entry in entries if isinstance(entry, str)):
        remaining = iter(parts)
        name = re.sub(r"\*", lambda _, it=remaining: next(it), source)  # type: ignore[misc]
        experts = range(0 if config.moe is None else config.moe.num_experts)
        names.append([name.replace("#", str(e)) for e in experts] if "#" in name else [name])
    return move, names


# ------------------------------------------------------------------------------------------ copies


def copies(
    family: type[Family], config: TransformerConfig, names: Iterable[str] | None = None
) -> dict[str, str]:
    """Return the tensors of a folder repeating a parameter, and the parameter.

    Args:
        family: The folder's family.
        config: The model.
        names: Names in the folder. None: all names written by the family into a new folder.
    """
    first = config.num_layers
    layers = [str(first + depth) for depth in range(config.num_predicting_layers)]
    named_copies = {
        theirs.replace("*", layer): ours
        for theirs, ours in family.copies.items()
        for layer in layers
    }
    tied = config.share_embeddings_and_output_weights
    if tied and names is not None and isinstance(output := family.weights[OUTPUT], str):
        named_copies[output] = WORDS
    if tied:
        named_copies = {
            theirs: WORDS if ours == OUTPUT else ours for theirs, ours in named_copies.items()
        }
    return (
        named_copies
        if names is None
        else {name: named_copies[name] for name in names if name in named_copies}
    )


def source_names(
    family: type[Family], config: TransformerConfig, names: Iterable[str]
) -> list[str]:
    """Return the tensors of a folder used by a model's parameters, copies included."""
    rows = _rows(family, config)
    read = {name for _, _, _, sources in rows for source in sources for name in source}
    return [name for name in names if name in read | set(copies(family, config, names))]


def drop_missing_heads(
    family: type[Family], config: TransformerConfig, names: Iterable[str]
) -> TransformerConfig:
    """Return the configuration without layers of multi-token prediction if a folder lacks the
    layers. ``transformers`` keeps the key and drops the layers.
    """
    if not config.num_predicting_layers:
        return config
    heads = {
        name
        for ours, _, _, sources in _rows(family, config)
        for source in sources
        for name in source
        if ours.startswith(PREDICTING)
    }
    return config if heads & set(names) else replace(config, mtp_num_layers=None)


def check_copies(
    family: type[Family], config: TransformerConfig, tensors: Mapping[str, Lazy], path: object
) -> None:
    """Compare first and last rows of tensors declared equal.

    Raises:
        CheckpointError: If the rows differ.
    """
    source = {name: names[0][0] for name, _, _, names in _rows(family, config)}
    for theirs, ours in copies(family, config, tensors).items():
        first, second = tensors[theirs], tensors[source[ours]]
        if first.shape != second.shape or not all(
            _row(first, index).equal(_row(second, index)) for index in (0, first.shape[0] - 1)
        ):
            raise CheckpointError(
                f"{path}: {theirs} differs from {source[ours]}, and the configuration says that "
                "both are one parameter. Set tie_word_embeddings to false in config.json if the "
                "model was trained so, or restore the folder."
            )


def _row(tensor: Lazy, index: int) -> Tensor:
    return tensor.read(Box((index, 0), (1, tensor.shape[1])))
