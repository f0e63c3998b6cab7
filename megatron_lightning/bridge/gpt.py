"""A :class:`GPTModel` with the weights of a Hugging Face folder, and back."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from megatron_lightning.bridge.family_rules.family import (
    WORDS,
    Family,
    by_full_name,
    check_copies,
    copies,
    drop_missing_heads,
    parameters,
    source_names,
    to_config,
)
from megatron_lightning.bridge.family_rules.settings import differing, flat
from megatron_lightning.bridge.folders.folder import FolderTensors
from megatron_lightning.bridge.hf_models.meta_models import is_deferred
from megatron_lightning.bridge.hf_models.transformers_model import defer_values
from megatron_lightning.bridge.tensors.inverse import Piece, inverse
from megatron_lightning.bridge.tensors.lazy import Lazy
from megatron_lightning.checkpoint.reading.source import CheckpointSource
from megatron_lightning.config import TransformerConfig
from megatron_lightning.config.class_paths import config_of_checkpoint
from megatron_lightning.errors import ConfigError
from megatron_lightning.models.router_loss import coefficient_of
from megatron_lightning.models.transformer import GPTModel
from megatron_lightning.parallel.shards.materialize import leave_empty, materialize
from megatron_lightning.parallel.shards.spec import Box


class GPTFolder:
    """A Hugging Face folder as a :class:`GPTModel`.

    Args:
        family: Rules for the folder.
        folder: The folder.
        theirs: Configuration of ``transformers``.
        model_class: Class of ``transformers``, with patterns of ignored tensors.
    """

    def __init__(
        self, family: type[Family], folder: FolderTensors, theirs: Any, model_class: Any
    ) -> None:
        self.family = family
        self.folder = folder
        self.theirs = theirs
        prefix = family.prefix or getattr(model_class, "base_model_prefix", "")
        self._named = by_full_name(folder.tensors, f"{prefix}." if prefix else "")
        self._ignored = tuple(
            getattr(model_class, "_keys_to_ignore_on_load_unexpected", None) or ()
        )

    @cached_property
    def config(self) -> TransformerConfig:
        """Our configuration, with the folder's layers of multi-token prediction.

        Raises:
            ConfigError: Naming the keys with values unknown to :class:`GPTModel`.
        """
        config = to_config(self.family, self.theirs, self.folder.path)
        coefficient = coefficient_of(self.theirs)
        if config.moe is not None and coefficient:
            # Theirs is one product for all layers, top_k if experts are balanced. Ours is a sum
            # over the layers, 1 each.
            coefficient *= config.moe.router_topk / config.num_expert_layers
            config = replace(config, moe=replace(config.moe, aux_loss_coeff=coefficient))
        return drop_missing_heads(self.family, config, self._named)

    def check(self, config: TransformerConfig) -> TransformerConfig:
        """Return a user's configuration after checking that the folder's model is meant.

        Layers of multi-token prediction may be left out. The longest sequence may differ unless
        positions are learned.

        Raises:
            ConfigError: Naming the different fields.
        """
        our_config = self.config
        if not config.num_predicting_layers:
            our_config = replace(our_config, mtp_num_layers=config.mtp_num_layers)
        if config.position_embedding_type != "learned_absolute":
            our_config = replace(our_config, max_sequence_length=config.max_sequence_length)
        ours, theirs = flat(config), flat(our_config)
        differences = [
            f"{n}={ours.get(n)!r} (there {theirs.get(n)!r})" for n in differing(ours, theirs)
        ]
        if differences:
            raise ConfigError(
                f"config describes another model than {self.folder.path}: "
                f"{', '.join(differences)}. Leave config out to take the folder's, or set these "
                "fields to its values."
            )
        return config

    def tensors(self, config: TransformerConfig) -> dict[str, Lazy]:
        """Return the parameters and saved buffers of a model, made of the folder's tensors.

        Raises:
            CheckpointError: Naming missing, misshapen or unexpected tensors.
        """
        path, ignored = self.folder.path, self._ignored
        if config.num_predicting_layers < self.config.num_predicting_layers:
            folder_names = source_names(self.family, self.config, self._named)
            ignored = (*ignored, *(f"^{re.escape(name)}$" for name in folder_names))
        return parameters(self.family, config, self._named, path=path, ignored=ignored)

    def check_copies(self, config: TransformerConfig) -> None:
        """Compare the first and last rows of repeated tensors with the parameter.

        Raises:
            CheckpointError: If the rows differ.
        """
        check_copies(self.family, config, self._named, self.folder.path)

    def names_of_copies(self, config: TransformerConfig) -> list[str]:
        """Return the names of tensors repeating a parameter."""
        short = dict(zip(self._named, self.folder.tensors, strict=True))
        return [short[name] for name in copies(self.family, config, self._named)]

    def pieces(
        self, config: TransformerConfig, tensors: Mapping[str, Lazy]
    ) -> dict[str, list[Piece]]:
        """Return the parts of a model in each tensor of the folder.

        Args:
            config: The model.
            tensors: See :meth:`tensors`.

        Raises:
            CheckpointError: If an element of a tensor is in no parameter, or in several.
        """
        short = dict(zip(self._named, self.folder.tensors, strict=True))
        repeated = copies(self.family, config, self._named)
        folder_names = source_names(self.family, self.config, self._named)
        left_out = set(folder_names) - set(source_names(self.family, config, self._named))
        patterns = [f"^{re.escape(short[name])}$" for name in (*repeated, *left_out)]
        pieces = inverse(self.folder, tensors, [*patterns, *self._ignored])
        for name, ours in repeated.items():
            box = Box.full(tensors[ours].shape)
            pieces[short[name]] = [Piece(box, ours, box, tuple(range(len(box.shape))))]
        return pieces


def gpt_config(
    source: CheckpointSource, kept: Mapping[str, Any] | None = None
) -> TransformerConfig | None:
    """Return the configuration of the :class:`GPTModel` in a checkpoint. None: there is no such
    model.

    Args:
        source: The checkpoint.
        kept: The checkpoint's entry of the model's folder. None: there is no entry.
    """
    if kept is not None:
        config = kept.get("gpt", {}).get("config")
    else:
        config = source.state().get("hyper_parameters", {}).get("config")
        if not any(name.endswith(f".{WORDS}") for name in source.tensors()):
            return None
    return config_of_checkpoint(config) if isinstance(config, Mapping) else None


def build_gpt_model(
    config: TransformerConfig, tensors: Mapping[str, Lazy], *, reads: bool = True
) -> GPTModel:
    """Return a model with the values of lazy tensors, in torch's default dtype and on torch's
    default device.

    In ``configure_model`` under ``MegatronStrategy`` the model is on ``meta``. When the model is
    sharded, each rank reads the boxes of its own shards.

    Args:
        config: The model.
        tensors: Name in the model -> lazy tensor.
        reads: Whether values are read at all. False if a checkpoint brings all values.
    """
    device = torch.empty(0).device
    with torch.device("meta"):
        model = GPTModel(config)
    if is_deferred() or device.type == "meta":
        tied = {name: tensors[owner] for name, owner in _tied_names(model).items()}
        defer_values(model, {**tensors, **tied} if reads else {})
        return model
    # Parameters get memory without initial values, which the folder's values would overwrite.
    leave_empty(model)
    materialize(model, device)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if reads and name in tensors:
                tensors[name].fill(Box.full(tensor.shape), tensor)
    return model


def tied_names_of(config: TransformerConfig) -> dict[str, str]:
    """Return further name -> name of the tied parameters of a :class:`GPTModel`."""
    with torch.device("meta"):
        model = GPTModel(config)
    return _tied_names(model)


def _tied_names(model: nn.Module) -> dict[str, str]:
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    everything = model.named_parameters(remove_duplicate=False)
    return {n: first[id(p)] for n, p in everything if first[id(p)] != n}
