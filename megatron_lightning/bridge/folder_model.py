"""A Hugging Face folder and the model in it: classes, lazy parameters, and recipes between both."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from typing_extensions import Self

from megatron_lightning.bridge.families import family_for, family_of
from megatron_lightning.bridge.family_rules.family import Family
from megatron_lightning.bridge.folders.configuration import (
    TIE,
    config_text,
    load_config,
    load_generation_config,
    with_overrides,
)
from megatron_lightning.bridge.folders.folder import FolderTensors, HuggingFaceFolder
from megatron_lightning.bridge.folders.folder_record import ChangedTable, KeptFolder, keep
from megatron_lightning.bridge.folders.quantized import DequantizedFolder, quantization_of
from megatron_lightning.bridge.gpt import GPTFolder
from megatron_lightning.bridge.hf_models.transformers_model import (
    UNCHANGED,
    Change,
    fits,
    lazy_model,
    lazy_parameters,
    set_copies,
    tied_parameters,
    ties_of_class,
)
from megatron_lightning.bridge.tensors.inverse import Piece, assembled, inverse, uses_of
from megatron_lightning.bridge.tensors.lazy import Fill, Lazy
from megatron_lightning.config import TransformerConfig
from megatron_lightning.config.class_paths import check_known, config_of_checkpoint
from megatron_lightning.errors import ConfigError
from megatron_lightning.file_names import CONFIG
from megatron_lightning.optional import HF_FOLDER, require


class Owner(NamedTuple):
    """A parameter that holds a matrix of a folder."""

    parameter: str
    row_divisor: int
    """Largest divisor of all places and sizes where rows lie. 0: there are no other rows."""


class Plan(NamedTuple):
    """Recipes between the tensors of a folder and the parameters of the folder's model."""

    folder: FolderTensors
    parameters: dict[str, Lazy]
    """Name in the model -> tensor made of the folder's."""
    pieces: dict[str, list[Piece]]
    """Name in the folder -> pieces of parameters. See :func:`pieces.inverse`."""

    @property
    def owners(self) -> dict[str, Owner]:
        """Name of a matrix in the folder -> the parameter that holds its rows."""
        owners = {}
        for name, pieces in self.pieces.items():
            if pieces and len(pieces[0].inside.shape) > 1:
                parameter = pieces[0].parameter
                places = [(x.inside.offset[-2], x.inside.shape[-2]) for x in pieces]
                is_alone = places == [(0, self.parameters[parameter].shape[-2])]
                divisor = 0 if is_alone else math.gcd(*(n for place in places for n in place))
                owners[name] = Owner(parameter, divisor)
        return owners

    def tensors(
        self, fills: Mapping[str, Fill], dtype: torch.dtype | None = None
    ) -> dict[str, Lazy]:
        """Return the folder's tensors with other values.

        Args:
            fills: Name in the model -> function that fills boxes of the parameter.
            dtype: Dtype of floating tensors. None: the folder's.
        """
        return assembled(self.folder, self.pieces, fills, dtype)


class FolderModel:
    """The model in a Hugging Face folder.

    Args:
        path: The folder.
        trust_remote_code: Whether code in the folder may run.
        attn_implementation: Attention of ``transformers``, such as "sdpa" or "eager". None: the
            model's default.
        family: Rules from the folder's model to ``GPTModel``: a name of
            :data:`~megatron_lightning.bridge.families.FAMILIES`, or the class path of a user's
            family. None: the family of the architecture.
        origin: The user's name of the folder, for checkpoints. None: the folder's path.
        revision: Branch, tag or commit of a Hub id.
        kept: The folder's record in a checkpoint, if ``path`` has no weights.
        change: How the model differs on purpose from the folder's.

    Raises:
        ConfigError: If the folder needs custom code and ``trust_remote_code`` is False.
    """

    def __init__(
        self,
        path: Path,
        *,
        trust_remote_code: bool = False,
        attn_implementation: str | None = None,
        family: str | None = None,
        origin: str | None = None,
        revision: str | None = None,
        kept: KeptFolder | None = None,
        change: Change = UNCHANGED,
    ) -> None:
        self.path = path
        """The folder."""
        self.config = load_config(path, trust_remote_code=trust_remote_code)
        """Configuration of ``transformers``."""
        self._quantization = quantization_of(path / CONFIG)
        if self._quantization is not None:  # the model's weights are dequantized
            del self.config.quantization_config
        if change.settings:
            self.config = with_overrides(self.config, dict(change.settings))
        self.trusts = trust_remote_code
        """Whether code in the folder may run."""
        self.origin = str(path) if origin is None else origin
        """The user's name of the folder."""
        self.revision = revision
        """Branch, tag or commit of a Hub id."""
        self._kept = kept
        self._change = change
        self._family = family
        if family is None and kept is not None and kept.gpt is not None:
            self._family = kept.gpt["family"]
            if isinstance(self._family, str) and "." in self._family:
                check_known(self._family, "the rules of its family")
        self._generation_config = load_generation_config(path)
        self._options: dict[str, Any] = {}
        if attn_implementation is not None:
            self._options["attn_implementation"] = attn_implementation

    @classmethod
    def from_kept(cls, kept: KeptFolder, **options: Any) -> Self:
        """Return the model of a folder without its weights.

        Args:
            kept: The folder's record in a checkpoint.
            options: See the class.

        Raises:
            ConfigError: See the class.
        """
        options_of_folder = {"origin": kept.origin, "revision": kept.revision, **options}
        with kept.files.unpacked() as folder:
            bridge = cls(folder, kept=kept, **options_of_folder)
            _ = bridge.model_class  # the class may need code in the unpacked folder, deleted here
        return bridge

    @cached_property
    def model_class(self) -> Any:
        """Class of the model: ``architectures`` of config.json, so that the model is complete.

        Raises:
            ConfigError: If ``transformers`` has no such class.
        """
        require("transformers", HF_FOLDER)
        import transformers

        names = list(getattr(self.config, "architectures", None) or ())
        if self._change.architecture is not None:
            names = [self._change.architecture]
        remote = getattr(self.config, "auto_map", {}) if self.trusts else {}
        if "AutoModelForCausalLM" in remote:
            require("transformers", HF_FOLDER)
            from transformers.dynamic_module_utils import get_class_from_dynamic_module

            return get_class_from_dynamic_module(remote["AutoModelForCausalLM"], str(self.path))
        model_class = next((getattr(transformers, name, None) for name in names), None)
        if model_class is None:
            raise ConfigError(
                f"{self.path / CONFIG} names the architectures {names}, and transformers "
                f"{transformers.__version__} has none of them. Install a version that has, or set "
                "trust_remote_code=True if the folder has code that you trust."
            )
        return model_class

    @cached_property
    def folder(self) -> FolderTensors:
        """The tensors of the folder, dequantized from 8 or 4 bits.

        Raises:
            CheckpointError: If the folder is damaged.
            ConfigError: For an unsupported quantization method.
        """
        if self._kept is not None:
            return self._kept
        # Code from the folder may save buffers of the same names.
        folder = HuggingFaceFolder(self.path, has_stale=self.trusts)
        settings = self._quantization
        return folder if settings is None else DequantizedFolder(folder, settings)

    @property
    def family(self) -> type[Family]:
        """Rules from the folder's model to :class:`GPTModel`.

        Raises:
            ConfigError: If there are none.
        """
        if self._family is not None:
            return family_of(self._family)
        return family_for(getattr(self.config, "architectures", None) or (), self.path)

    def gpt_folder(self) -> GPTFolder:
        """Return the folder as a :class:`GPTModel`: configuration, weights, and the way back.

        Raises:
            CheckpointError: If the folder is damaged.
            ConfigError: If there are no rules for the folder.
        """
        return GPTFolder(self.family, self.folder, self.config, self.model_class)

    def to_config(self) -> TransformerConfig:
        """Return the configuration of :class:`GPTModel` for the folder's model.

        Raises:
            ConfigError: Naming the folder's settings without a counterpart in :class:`GPTModel`.
        """
        return self.gpt_folder().config

    def gpt_parts(
        self, config: TransformerConfig | None = None
    ) -> tuple[TransformerConfig, dict[str, Lazy], KeptFolder]:
        """Return configuration and lazy tensors of the :class:`GPTModel`, and the folder's
        record for checkpoints of the model.

        Args:
            config: The model. None: :meth:`to_config`.

        Raises:
            CheckpointError: If the folder does not fit the model, or is damaged.
            ConfigError: If there are no rules for the folder, or ``config`` describes another
                model.
        """
        self._refuse_change()
        gpt = self.gpt_folder()
        config = gpt.config if config is None else gpt.check(config)
        tensors = gpt.tensors(config)
        if self._kept is None:
            gpt.check_copies(config)
        used_names = [*gpt.names_of_copies(config), *self._used(tensors)]
        record = keep(self.folder, used_names, self.origin, self.revision)
        return config, tensors, record.of_gpt(config.to_dict(), self._family)

    def _refuse_change(self) -> None:
        if self._change != UNCHANGED:
            raise ConfigError(
                f"a GPTModel is the folder's own model, and {self._change} was asked for. Leave it "
                'out, or take to_model("transformers").'
            )

    def plan(self, config: TransformerConfig | None = None) -> Plan:
        """Return how the folder's tensors are made of the model's parameters.

        Args:
            config: Configuration of a :class:`GPTModel`. None: the model of the checkpoint if the
                bridge came from a checkpoint, else the untouched model.

        Raises:
            CheckpointError: If the folder does not fit the model, or no way back is known.
            ConfigError: If ``config`` describes another model.
        """
        if config is None and self._kept is not None and self._kept.gpt is not None:
            config = config_of_checkpoint(self._kept.gpt["config"])
        if config is not None:
            gpt = self.gpt_folder()
            parameters = gpt.tensors(gpt.check(config))
            return Plan(self.folder, parameters, gpt.pieces(config, parameters))
        # In the folder's dtypes: a cast there and back would round.
        model = self.lazy_model(dtype="auto")
        if self._change != UNCHANGED:
            return type(self).from_kept(self.keep(model), trust_remote_code=self.trusts).plan()
        parameters = lazy_parameters(model)
        ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
        pieces = inverse(self.folder, parameters, ignored, tied_parameters(model))
        return Plan(self.folder, parameters, pieces)

    def lazy_model(self, dtype: torch.dtype | Literal["auto"]) -> nn.Module:
        """Return the model with lazy parameters, without reading values.

        Args:
            dtype: Dtype of the parameters. "auto": the folder's.

        Raises:
            CheckpointError: If the folder does not fit the model, or is damaged.
        """
        options = {**self._options, "dtype": dtype}
        change = self._change._replace(new_tensors=(*self._change.new_tensors, *self._copies))
        model = lazy_model(self.folder, self.model_class, self.config, change=change, **options)
        set_copies(model, self._copies)
        return model

    @cached_property
    def _copies(self) -> dict[str, str]:
        """Name -> name of the copied parameter, of weights that the folder's model ties and this
        model has apart.
        """
        if dict(self._change.settings).get(TIE) is not False:
            return {}
        tied = with_overrides(self.config, {TIE: True})
        return ties_of_class(self.model_class, tied)

    def untied(self) -> Self:
        """Return the model of the folder with a weight each for embedding and output layer.

        Raises:
            ConfigError: If the model computes in another way without tied weights.
        """
        if getattr(self.config, "is_encoder_decoder", False):
            raise ConfigError(
                f"{self.model_class.__name__} of {self.path} has an encoder and a decoder, and "
                "computes in another way when embedding and output layer are two weights. Train "
                "adapters without either of them."
            )
        return self._with_change(settings=(*self._change.settings, (TIE, False)))

    def _with_change(self, **fields: Any) -> Self:
        """Return the folder's model with other differences from the folder."""
        options = self._all_options | {"change": self._change._replace(**fields)}
        if self._kept is not None:
            return type(self).from_kept(self._kept, **options)
        return type(self)(self.path, **options)

    @property
    def grown(self) -> tuple[int, int] | None:
        """Rows of the embedding, and ids of the original folder's tokens, if the vocabulary has
        grown for new tokens.
        """
        return None if self._kept is None else self._kept.grown

    def of_record(self, record: KeptFolder) -> Self:
        """Return the model of a folder's record, with the options of this model."""
        return type(self).from_kept(record, **self._all_options)

    @property
    def _all_options(self) -> dict[str, Any]:
        return {
            "trust_remote_code": self.trusts,
            "family": self._family,
            "attn_implementation": self._options.get("attn_implementation"),
            "origin": self.origin,
            "revision": self.revision,
        }

    def keep(self, model: nn.Module) -> KeptFolder:
        """Return the folder's record for checkpoints of a lazy model."""
        used_names = self._used(lazy_parameters(model))
        changed = None if self._change == UNCHANGED else self._changed_table(model)
        names = self.folder.tensors
        tied = {
            copy: owner
            for copy, owner in tied_parameters(model).items()
            if copy in names and owner in names
        }
        return keep(self.folder, used_names, self.origin, self.revision, changed=changed, tied=tied)

    def _changed_table(self, model: nn.Module) -> ChangedTable:
        state = model.state_dict(keep_vars=True)
        added = {
            name: (tuple(value.shape), value.dtype)
            for name, value in state.items()
            if name not in self.folder.tensors
            and (
                name in self._copies
                or (not isinstance(value, Lazy) and fits(name, self._change.new_tensors))
            )
        }
        left_out = {n for n in self.folder.tensors if fits(n, self._change.left_out)}
        config = copy.deepcopy(self.config)
        config.architectures = [self.model_class.__name__]
        return ChangedTable(added, left_out, {CONFIG: config_text(config)})

    def _used(self, parameters: Mapping[str, Lazy]) -> list[str]:
        """Return the names of the folder's tensors used by parameters."""
        return [use.name for lazy in parameters.values() for use in uses_of(self.folder, lazy)]
