"""Whether saved adapters fit a base model: shapes, layers without tensors, and tied weights.

A parameter may have two names: most small models share the weight of embedding and output layer.
``peft`` trains a copy for each name that is listed, and leaves the other names to the base.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import nn

from megatron_lightning.errors import CheckpointError
from megatron_lightning.models.transformer import GPTModel
from megatron_lightning.parallel.shards.ties import shared_names
from megatron_lightning.parallel.shards.transposed import is_transposed
from megatron_lightning.peft.matching import is_linear, output_layers
from megatron_lightning.peft.methods.method import largest_of
from megatron_lightning.peft.saved import SavedAdapters, SavedPart, hf_paths, to_gpt

_LISTED = 6
Shapes = tuple[int, ...]


def ties_of(model: nn.Module) -> dict[str, str]:
    """Return further name -> first name of the parameters with several names."""
    return {name: owner for owner, *names in shared_names(model) for name in names}


def fitted(theirs: SavedAdapters, model: nn.Module, source: str) -> SavedAdapters:
    """Return adapters with the names of a full model that they fit. Nothing is changed yet.

    Args:
        theirs: The adapters.
        model: The model on any device, with or without adapters.
        source: The adapters' folder or checkpoint, for messages.

    Raises:
        CheckpointError: If the model has no parameter of a name, or one of another shape, or the
            folder lacks tensors that its configuration describes.
    """
    is_renamed = isinstance(model, GPTModel) and not theirs.is_gpt
    own = to_gpt(theirs, model) if is_renamed else theirs  # type: ignore[arg-type]
    shapes = _shapes(model)
    wanted = {n: tuple(tensor.shape) for n, tensor in own.saved.items()}
    wanted |= {
        weight.name: weight.shape(shapes.get(weight.name)) for weight in _weights(own, model)
    }
    name = type(model).__name__
    unknown = [n for n in wanted if n not in shapes]
    if unknown:
        raise CheckpointError(
            f"the adapters change {unknown[0]}, and {name} has no such weight. "
            "Name their own base: --base FOLDER."
        )
    _check_complete(theirs, model, source)
    others = [
        f"{n} is {list(shape)} in the adapters and {list(shapes[n])} in the base"
        for n, shape in wanted.items()
        if shape != shapes[n]
    ]
    if others:
        raise CheckpointError(
            f"{source} belongs to a {name} of another size: {_listed(others, '; ')}. If a "
            "vocabulary or a head grew before the training, let it grow in the base first "
            "(resize_token_embeddings or num_labels of transformers, then save_pretrained), and "
            "name that folder as the base."
        )
    return own.fitted(largest_in(own, model))


def check_trainable(own: SavedAdapters, model: nn.Module, source: str) -> None:
    """Check that adapters can be attached to a model, which keeps its tied weights. Equal copies
    are one.

    Args:
        own: The adapters, with the model's names.
        model: The full model.
        source: The adapters' folder or checkpoint, for messages.

    Raises:
        CheckpointError: If the adapters have several values for a tied weight, or belong to an
            output layer.
    """
    check_tied(own, model, source)
    layers = dict(model.named_modules())
    outputs = output_layers(model)
    heads = [path for path in own.layers if path in layers and id(layers[path]) in outputs]
    if heads:
        raise CheckpointError(
            f"{source} has adapters of {heads[0]}, an output layer, which are not attached here, "
            "since losses are computed without the logits. Merge them into their base: "
            "megatron-lightning adapters merge."
        )


def check_tied(own: SavedAdapters, model: nn.Module, source: str) -> None:
    """Check that adapters have one value for a weight with several names.

    Raises:
        CheckpointError: If not.
    """
    for name, owner in differing_copies(own, model).items():
        raise CheckpointError(
            f"{source} has other values for {name} than for {owner}, which are one weight in "
            f"{type(model).__name__} (tie_word_embeddings). Either load the base with a weight for "
            "each, by config_overrides={tie_word_embeddings: false} of HuggingFaceModule, or write "
            "a model with a weight for each: megatron-lightning adapters merge."
        )


def differing_copies(own: SavedAdapters, model: nn.Module) -> dict[str, str]:
    """Return further name -> first name of the model's tied weights that adapters tear apart: with
    different values under the names, or with values under some of the names alone.
    """
    changed = {weight.name for weight in _weights(own, model)}
    copies = {}
    for owner, *names in shared_names(model):
        group = [owner, *names]
        values = [own.saved.get(name) for name in group]
        if not changed & set(group):
            if all(value is None for value in values):
                continue
            first = values[0]
            if first is not None and all(v is not None and torch.equal(first, v) for v in values):
                continue
        copies.update(dict.fromkeys(names, owner))
    return copies


class _Weight(NamedTuple):
    """A weight that adapters change."""

    name: str
    parts: Mapping[str, SavedPart]
    transposed: bool
    """Whether the weight is [in, out]."""

    def matrices(self, given: Shapes | None) -> list[tuple[int, int]]:
        """Return the shapes [out, in] of the adapted matrices. The columns are the model's where
        adapters fit any number.
        """
        own_columns = 0 if given is None else given[0 if self.transposed else -1]
        shapes = (part.kind.shape(part.tensors) for part in self.parts.values())
        return [(rows, own_columns if columns is None else columns) for rows, columns in shapes]

    def shape(self, given: Shapes | None) -> Shapes:
        """Return the shape of the weight that adapters add up to."""
        matrices = self.matrices(given)
        matrix = (sum(rows for rows, _ in matrices), matrices[0][1])
        matrix = matrix[::-1] if self.transposed else matrix
        num_experts = next(iter(self.parts.values())).num_experts
        return (num_experts, *matrix) if num_experts else matrix


def _weights(own: SavedAdapters, model: nn.Module) -> Iterator[_Weight]:
    """Yield the weights that adapters change."""
    modules = dict(model.named_modules())
    for path, parts in own.layers.items():
        layer = modules.get(path)  # None: stacked experts of transformers are a parameter
        name = path if layer is None else f"{path}.weight"
        yield _Weight(name, parts, layer is not None and is_transposed(layer))


def _shapes(model: nn.Module) -> dict[str, Shapes]:
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters(remove_duplicate=False)}
    return shapes | {n: tuple(b.shape) for n, b in model.named_buffers()}


def largest_in(own: SavedAdapters, model: nn.Module) -> tuple[int, int]:
    """Return the most rows and the most columns of the matrices that adapters change."""
    shapes = _shapes(model)
    return largest_of(
        matrix for weight in _weights(own, model) for matrix in weight.matrices(shapes[weight.name])
    )


def _check_complete(theirs: SavedAdapters, model: nn.Module, source: str) -> None:
    """Check that the layers meant by a folder's configuration have tensors."""
    targets = theirs.described
    if targets is None:
        return
    if isinstance(model, GPTModel):
        paths, stacks = list(hf_paths(model)), []
    else:
        paths = [path for path, layer in model.named_modules() if _takes_adapters(layer)]
        stacks = [path for path, _ in model.named_parameters() if targets.mean_parameter(path)]
    missing = [path for path in paths if targets.mean(path)] + stacks
    missing = [path for path in missing if path not in theirs.layers]
    if missing:
        raise CheckpointError(
            f"{source}: its configuration means {len(missing)} layers of {type(model).__name__} "
            f"without tensors ({_listed(missing, ', ')}), so a part of what was trained is "
            "missing. Restore the folder. If the layers were not trained, leave them out of "
            "target_modules in adapter_config.json."
        )


def _takes_adapters(layer: nn.Module) -> bool:
    return is_linear(layer) or isinstance(layer, nn.Embedding)


def _listed(texts: list[str], separator: str) -> str:
    rest = f"{separator}…" if len(texts) > _LISTED else ""
    return separator.join(texts[:_LISTED]) + rest
