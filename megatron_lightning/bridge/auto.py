"""``AutoBridge``: a Hugging Face folder or Hub id, and the model in it."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from megatron_lightning.bridge.configuration import (
    CONFIG,
    config_text,
    load_config,
    load_generation_config,
)
from megatron_lightning.bridge.export import write_folder
from megatron_lightning.bridge.families import family_for, family_of
from megatron_lightning.bridge.folder import FolderTensors, HuggingFaceFolder
from megatron_lightning.bridge.from_config import new_folder
from megatron_lightning.bridge.gpt import GPTFolder, build_gpt_model, gpt_config
from megatron_lightning.bridge.hub import local_folder
from megatron_lightning.bridge.kept import (
    ChangedTable,
    KeptFolder,
    keep,
    read_kept,
    remember,
)
from megatron_lightning.bridge.lazy import Fill, Lazy
from megatron_lightning.bridge.pieces import Piece, assembled, inverse, uses_of
from megatron_lightning.bridge.quantized import DequantizedFolder, quantization_of
from megatron_lightning.bridge.rules import Family
from megatron_lightning.bridge.untouched import (
    UNCHANGED,
    Change,
    defer_weights,
    fill_weights,
    fits,
    is_deferred,
    lazy_model,
    lazy_parameters,
    tied_parameters,
)
from megatron_lightning.bridge.values import fills_of_checkpoint, fills_of_model, values_of
from megatron_lightning.checkpoint.commit import is_committed
from megatron_lightning.checkpoint.format.storage import is_plain_file, is_remote
from megatron_lightning.checkpoint.source import open_checkpoint
from megatron_lightning.config import TransformerConfig
from megatron_lightning.errors import CheckpointError, ConfigError, MissingCheckpointError
from megatron_lightning.models.transformer import GPTModel
from megatron_lightning.parallel.spec import Box

ModelKind = Literal["transformers", "gpt"]


class Plan(NamedTuple):
    """Recipes between the tensors of a folder and the parameters of the folder's model."""

    folder: FolderTensors
    parameters: dict[str, Lazy]
    """Name in the model -> tensor made of the folder's."""
    pieces: dict[str, list[Piece]]
    """Name in the folder -> pieces of parameters. See :func:`pieces.inverse`."""

    def tensors(
        self, fills: Mapping[str, Fill], dtype: torch.dtype | None = None
    ) -> dict[str, Lazy]:
        """Return the folder's tensors with other values.

        Args:
            fills: Name in the model -> function that fills boxes of the parameter.
            dtype: Dtype of floating tensors. None: the folder's.
        """
        return assembled(self.folder, self.pieces, fills, dtype)


class AutoBridge:
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
        self._trusts = trust_remote_code
        self.origin = str(path) if origin is None else origin
        """The user's name of the folder."""
        self.revision = revision
        """Branch, tag or commit of a Hub id."""
        self._kept = kept
        self._change = change
        self._family = family
        if family is None and kept is not None and kept.gpt is not None:
            self._family = kept.gpt["family"]
        self._generation_config = load_generation_config(path)
        self._options: dict[str, Any] = {}
        if attn_implementation is not None:
            self._options["attn_implementation"] = attn_implementation

    @classmethod
    def from_hf_pretrained(
        cls,
        path: str | Path,
        *,
        revision: str | None = None,
        trust_remote_code: bool = False,
        attn_implementation: str | None = None,
        family: str | None = None,
        architecture: str | None = None,
        new_tensors: Sequence[str] = (),
        left_out: Sequence[str] = (),
    ) -> AutoBridge:
        """Return the bridge of a folder, of a Hub id, or of a checkpoint of a folder's model.

        Args:
            path: A folder, or a Hub id such as ``meta-llama/Llama-3.2-1B``. A cached Hub id is read
                from the local cache. Or a checkpoint of a model from a folder: configuration and
                tokenizer are the folder's, and weights the checkpoint's.
            revision: Branch, tag or commit of the Hub id. None: main.
            trust_remote_code: Whether code in the folder may run.
            attn_implementation: See the class.
            family: See the class.
            architecture: Another class of ``transformers`` than the folder's, such as
                "LlamaForSequenceClassification".
            new_tensors: Patterns of parameters missing from the folder, such as "score.weight". New
                parameters get the initial values of ``transformers``, equal on all ranks.
            left_out: Patterns of tensors missing from the model, such as "lm_head.weight".

        Raises:
            MissingCheckpointError: If there is no such folder, and the Hub has no such id.
            ConfigError: See the class.
        """
        options: dict[str, Any] = {
            "trust_remote_code": trust_remote_code,
            "attn_implementation": attn_implementation,
            "family": family,
        }
        options["change"] = Change(architecture, tuple(new_tensors), tuple(left_out))
        if is_checkpoint(path):
            return cls.from_checkpoint(path, **options)
        folder = local_folder(path, revision=revision)
        return cls(folder, origin=str(path), revision=revision, **options)

    @classmethod
    def from_checkpoint(
        cls,
        path: str | os.PathLike[str],
        *,
        model: str | None = None,
        reads: bool = True,
        **options: Any,
    ) -> AutoBridge:
        """Return the bridge of the folder in a checkpoint.

        Args:
            path: A checkpoint directory, plain file, or URL.
            model: Path of the model in the checkpoint's LightningModule. None: the first model from
                a folder.
            reads: Whether weights are the checkpoint's. False: there are no weights, and the caller
                loads the checkpoint into the new model.
            options: See the class.

        Raises:
            CheckpointError: If the checkpoint keeps no folder, or holds another model.
            ConfigError: See the class.
        """
        found = read_kept(path, model)
        if found is None:
            raise CheckpointError(
                f"{path} keeps no Hugging Face folder, since its model did not come from one. Name "
                "the folder: --like FOLDER."
            )
        source, place, kept = found
        if reads:
            # The checkpoint holds the folder's own model, without the caller's differences.
            plan = cls.from_kept(kept, **{**options, "change": UNCHANGED}).plan()
            made = plan.tensors(fills_of_checkpoint(source, plan.parameters, place))
            kept.read_from({name: made[name].fill for name in plan.pieces})
        return cls.from_kept(kept, **{"origin": str(path), "revision": None, **options})

    @classmethod
    def from_kept(cls, kept: KeptFolder, **options: Any) -> AutoBridge:
        """Return the bridge of a folder without its weights.

        Args:
            kept: The folder's record in a checkpoint.
            options: See the class.

        Raises:
            ConfigError: See the class.
        """
        named = {"origin": kept.origin, "revision": kept.revision, **options}
        with kept.files.unpacked() as folder:
            bridge = cls(folder, kept=kept, **named)
            _ = bridge.model_class  # the class may need code in the unpacked folder, deleted here
        return bridge

    @classmethod
    def from_hf_config(cls, config: Any, *, max_shard_size: str = "5GB") -> AutoBridge:
        """Return the bridge of a new model without a folder, with initial weights.

        A folder written of the model gets file names and a model card from ``huggingface_hub``, and
        a ``config.json`` readable for ``transformers`` 4 as well.

        Args:
            config: Configuration of ``transformers``. ``architectures`` names the class. Without
                ``architectures`` the class is the family's causal language model.
            max_shard_size: Largest file of weights in the folder.

        Raises:
            ConfigError: If ``transformers`` has no causal language model for the configuration.
        """
        return cls.from_kept(new_folder(config, max_shard_size))

    @staticmethod
    def prepare(path: str | Path, *, revision: str | None = None) -> None:
        """Download a missing Hub id into the cache, for ``prepare_data`` hooks.

        Raises:
            MissingCheckpointError: If there is no such folder, and the Hub has no such id.
        """
        if not is_checkpoint(path):
            local_folder(path, revision=revision)

    @classmethod
    def can_handle(cls, path: str | Path, *, revision: str | None = None) -> bool:
        """Return whether ``transformers`` knows the model, without a download of weights."""
        try:
            folder = local_folder(path, revision=revision, weights=False)
            return cls(folder).model_class is not None
        except (ConfigError, MissingCheckpointError):
            return False

    @cached_property
    def model_class(self) -> Any:
        """Class of the model: ``architectures`` of config.json, so that the model is complete.

        Raises:
            ConfigError: If ``transformers`` has no such class.
        """
        import transformers

        names = list(getattr(self.config, "architectures", None) or ())
        if self._change.architecture is not None:
            names = [self._change.architecture]
        remote = getattr(self.config, "auto_map", {}) if self._trusts else {}
        if "AutoModelForCausalLM" in remote:
            from transformers.dynamic_module_utils import get_class_from_dynamic_module

            return get_class_from_dynamic_module(remote["AutoModelForCausalLM"], str(self.path))
        found = next((getattr(transformers, name, None) for name in names), None)
        if found is None:
            raise ConfigError(
                f"{self.path / 'config.json'} names the architectures {names}, and transformers "
                f"{transformers.__version__} has none of them. Install a version that has, or set "
                "trust_remote_code=True if the folder has code that you trust."
            )
        return found

    @cached_property
    def folder(self) -> FolderTensors:
        """The tensors of the folder, dequantized from 8 or 4 bits.

        Raises:
            CheckpointError: If the folder is damaged.
            ConfigError: For an unsupported quantization method.
        """
        if self._kept is not None:
            return self._kept
        folder = HuggingFaceFolder(self.path)
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

    def to_model(
        self,
        kind: ModelKind = "transformers",
        *,
        config: TransformerConfig | None = None,
        dtype: torch.dtype | None = None,
    ) -> nn.Module:
        """Return the model.

        In ``configure_model`` under ``MegatronStrategy`` the model is on ``meta``. When the model
        is divided, each rank reads the boxes of its own shards from the folder. Outside of
        ``configure_model`` the model has all weights. Checkpoints of the model keep the folder's
        table of tensors and the folder's other files.

        Args:
            kind: "transformers": the untouched model. Outside of ``configure_model`` this is the
                model of ``from_pretrained``. "gpt": :class:`GPTModel`, for families with rules.
            config: Configuration of :class:`GPTModel` with options of training, such as dropout.
                None: :meth:`to_config`.
            dtype: Dtype of the parameters. None: torch's default dtype. Lightning sets the default
                dtype to the Trainer's precision in ``configure_model``: bf16 for ``bf16-true``,
                fp32 for ``32-true`` and ``bf16-mixed``.

        Raises:
            CheckpointError: If the folder does not fit the model, or is damaged.
            ConfigError: If ``kind`` is unknown, there are no rules for the folder, or ``config``
                describes another model.
        """
        if kind == "gpt":
            return self._gpt_model(config, dtype)
        if kind != "transformers" or config is not None:
            raise ConfigError(
                f"to_model({kind!r}, config={config!r}): the untouched model has the folder's "
                'configuration. Set kind to "gpt" for a GPTModel, or to "transformers" and leave '
                "config out."
            )
        if self._kept is not None and self._kept.is_new:
            return self._new_model(self._kept, dtype)
        model = self.lazy_model(dtype=dtype or torch.get_default_dtype())
        kept = self.keep(model)
        if is_deferred():
            defer_weights(model, reads=kept is not self.folder or kept.has_values)
        elif self._kept is not None or self._quantization is not None:
            fill_weights(model)
        else:
            options = {**self._options, "dtype": dtype or torch.get_default_dtype()}
            model = self.model_class.from_pretrained(self.path, config=self.config, **options)
        if self._generation_config is not None:
            model.generation_config = self._generation_config
        remember(model, kept)
        return model

    def _new_model(self, kept: KeptFolder, dtype: torch.dtype | None) -> nn.Module:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype or before)
        try:
            model: nn.Module = self.model_class(self.config)
        finally:
            torch.set_default_dtype(before)
        remember(model, kept)
        return model

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
        used = [*gpt.names_of_copies(config), *self._used(tensors)]
        kept = keep(self.folder, used, self.origin, self.revision)
        return config, tensors, kept.of_gpt(config.to_dict(), self._family)

    def _refuse_change(self) -> None:
        if self._change != UNCHANGED:
            raise ConfigError(
                f"a GPTModel is the folder's own model, and {self._change} was asked for. Leave it "
                'out, or take to_model("transformers").'
            )

    def _gpt_model(self, config: TransformerConfig | None, dtype: torch.dtype | None) -> nn.Module:
        config, tensors, kept = self.gpt_parts(config)
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype or before)
        try:
            reads = self._kept is None or self._kept.has_values
            model = build_gpt_model(config, tensors, reads=reads)
        finally:
            torch.set_default_dtype(before)
        remember(model, kept)
        return model

    def to_module(self, **options: Any) -> Any:
        """Return a ``GPTLightningModule`` initialized from the folder.

        Args:
            options: Options of the module: learning rate, schedule, ``config``.

        Raises:
            ConfigError: If the model differs on purpose from the folder's, or there is no folder.
        """
        self._refuse_change()
        if not self.origin:
            raise ConfigError(
                "to_module() starts from a folder's weights, and a configuration has none. Make "
                "the module by GPTLightningModule(bridge.to_config())."
            )
        # Modules are above the bridge.
        modules = import_module("megatron_lightning.modules")
        return modules.GPTLightningModule(
            init_from_hf=self.origin, revision=self.revision, family=self._family, **options
        )

    def export_hf_weights(
        self, model: nn.Module, *, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and values of the folder's tensors, made of a full model's parameters, tensor
        by tensor. ``strategy.export_hf_weights()`` does so from ranks with parts of the model.

        Args:
            model: The model, on one device.
            dtype: Dtype of floating tensors. None: the folder's.

        Raises:
            ConfigError: If this rank holds a part of the model.
        """
        plan = self.plan(_gpt_config(model))
        return values_of(plan.tensors(fills_of_model(model, plan.parameters), dtype))

    def save_hf_pretrained(
        self,
        model: nn.Module,
        path: str | Path,
        *,
        dtype: torch.dtype | None = None,
        overwrite: bool = False,
    ) -> None:
        """Write a full model as a folder, with files, names, dtypes, configuration and tokenizer of
        this bridge's folder. ``strategy.save_hf_pretrained(path)`` does so from ranks with parts of
        the model.

        Args:
            model: The model, on one device.
            path: The folder.
            dtype: Dtype of floating tensors. None: the folder's.
            overwrite: Replace an existing target.

        Raises:
            CheckpointError: If the target exists.
            ConfigError: If this rank holds a part of the model.
        """
        plan = self.plan(_gpt_config(model))
        tensors = plan.tensors(fills_of_model(model, plan.parameters), dtype)
        write_folder(Path(path), plan.folder, tensors, overwrite=overwrite)

    def reference_model(self) -> nn.Module:
        """Return the model as loaded by ``transformers`` alone, for comparisons.

        Raises:
            ConfigError: If ``transformers`` cannot dequantize the folder here.
        """
        if self._kept is not None or self._quantization is None:
            return self.to_model(dtype=torch.float32)
        config = copy.deepcopy(self.config)
        config.quantization_config = {**self._quantization, "dequantize": True}
        try:
            model: nn.Module = self.model_class.from_pretrained(
                self.path, config=config, dtype=torch.float32, **self._options
            )
        except (ImportError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"transformers cannot dequantize {self.path} ({str(error).splitlines()[0]}), so "
                "there are no logits to compare with. Install what it asks for."
            ) from error
        return model

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
            config = TransformerConfig(**self._kept.gpt["config"])
        if config is not None:
            gpt = self.gpt_folder()
            parameters = gpt.tensors(gpt.check(config))
            return Plan(self.folder, parameters, gpt.pieces(config, parameters))
        # In the folder's dtypes: a cast there and back would round.
        model = self.lazy_model(dtype="auto")
        if self._change != UNCHANGED:
            return AutoBridge.from_kept(self.keep(model), trust_remote_code=self._trusts).plan()
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
        return lazy_model(
            self.folder, self.model_class, self.config, change=self._change, **options
        )

    def keep(self, model: nn.Module) -> KeptFolder:
        """Return the folder's record for checkpoints of a lazy model."""
        used = self._used(lazy_parameters(model))
        changed = None if self._change == UNCHANGED else self._changed_table(model)
        names = self.folder.tensors
        tied = {
            copy: owner
            for copy, owner in tied_parameters(model).items()
            if copy in names and owner in names
        }
        return keep(self.folder, used, self.origin, self.revision, changed=changed, tied=tied)

    def _changed_table(self, model: nn.Module) -> ChangedTable:
        state = model.state_dict(keep_vars=True)
        added = {
            name: (tuple(value.shape), value.dtype)
            for name, value in state.items()
            if not isinstance(value, Lazy) and fits(name, self._change.new_tensors)
        }
        left_out = {n for n in self.folder.tensors if fits(n, self._change.left_out)}
        config = copy.deepcopy(self.config)
        config.architectures = [self.model_class.__name__]
        return ChangedTable(added, left_out, {CONFIG: config_text(config)})

    def load_hf_weights(self, model: nn.Module) -> None:
        """Read the folder's weights into a full model, such as a trained model.

        Args:
            model: A model of the folder's class, or a :class:`GPTModel`, on one device.

        Raises:
            CheckpointError: If the folder does not fit the model, or is damaged.
            ConfigError: If this rank holds a part of the model.
        """
        config = _gpt_config(model)
        if config is None:
            lazies = lazy_parameters(self.lazy_model(dtype="auto"))
        else:
            gpt = self.gpt_folder()
            lazies = gpt.tensors(gpt.check(config))
        fills_of_model(model, lazies)
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        for name, lazy in lazies.items():
            lazy.fill(Box.full(lazy.shape), tensors[name].detach())

    @staticmethod
    def list_supported_models() -> list[str]:
        """Return the causal language model classes of the installed ``transformers``.

        Every class named by ``config.json`` can be trained. :class:`HuggingFaceModule` can train
        the classes listed here.
        """
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        return sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()))

    @classmethod
    def import_ckpt(
        cls,
        path: str | Path,
        checkpoint: str | Path,
        *,
        dtype: torch.dtype | None = None,
        overwrite: bool = False,
        **options: Any,
    ) -> None:
        """Write a folder's model as a checkpoint. ``megatron-lightning convert import`` calls this.

        Args:
            path: A folder or a Hub id.
            checkpoint: The checkpoint directory.
            dtype: Dtype of floating parameters. None: the folder's.
            overwrite: Replace an existing target.
            options: See :meth:`from_hf_pretrained`.

        Raises:
            CheckpointError: If the target exists, or the folder is damaged.
        """
        tools = import_module("megatron_lightning.bridge.import_folder")  # imports this file
        bridge = cls.from_hf_pretrained(path, **options)
        tools.import_folder(bridge, Path(checkpoint), dtype=dtype, overwrite=overwrite)

    def export_ckpt(
        self,
        checkpoint: str | Path,
        path: str | Path,
        *,
        dtype: torch.dtype | None = None,
        overwrite: bool = False,
    ) -> None:
        """Write a checkpoint as a folder like this bridge's. ``megatron-lightning convert export``
        does the same.

        Args:
            checkpoint: A checkpoint of the folder's model, of any layout.
            path: The folder to write.
            dtype: Dtype of floating tensors. None: the folder's.
            overwrite: Replace an existing target.

        Raises:
            CheckpointError: If the checkpoint is not of the folder's model, or the target exists.
        """
        source = open_checkpoint(checkpoint)
        plan = self.plan(gpt_config(source))
        fills = fills_of_checkpoint(source, plan.parameters)
        write_folder(Path(path), plan.folder, plan.tensors(fills, dtype), overwrite=overwrite)

    def _used(self, parameters: Mapping[str, Lazy]) -> list[str]:
        """Return the names of the folder's tensors used by parameters."""
        return [use.name for lazy in parameters.values() for use in uses_of(self.folder, lazy)]


def _gpt_config(model: nn.Module) -> TransformerConfig | None:
    """Return the configuration of a :class:`GPTModel`. None: another model."""
    return model.config if isinstance(model, GPTModel) else None


def is_checkpoint(path: str | Path) -> bool:
    """Return whether a path is a checkpoint of ours, or a plain Lightning checkpoint."""
    if is_remote(path) or is_plain_file(path):
        return True
    return not (Path(path) / "config.json").exists() and is_committed(path)
