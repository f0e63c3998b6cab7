"""``AutoBridge``: a Hugging Face folder or Hub id, and the model in it."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from megatron_lightning._lazy import hint_of_other_library
from megatron_lightning.bridge.folder_model import FolderModel
from megatron_lightning.bridge.folders.export import write_folder
from megatron_lightning.bridge.folders.folder_record import KeptFolder, read_kept, remember
from megatron_lightning.bridge.folders.hub import local_folder
from megatron_lightning.bridge.folders.remembered_folders import remember_new
from megatron_lightning.bridge.gpt import build_gpt_model, gpt_config
from megatron_lightning.bridge.hf_models.from_config import new_folder
from megatron_lightning.bridge.hf_models.meta_models import is_deferred
from megatron_lightning.bridge.hf_models.transformers_model import (
    UNCHANGED,
    Change,
    defer_weights,
    fill_weights,
    lazy_parameters,
)
from megatron_lightning.bridge.low_bit.rounded_tensors import rounded_tensors
from megatron_lightning.bridge.megatron_checkpoints.torch_dist import is_megatron
from megatron_lightning.bridge.tensors.lazy import Lazy
from megatron_lightning.bridge.tensors.values import fills_of_checkpoint, fills_of_model, values_of
from megatron_lightning.checkpoint.format.storage import is_plain_file, is_remote
from megatron_lightning.checkpoint.reading.source import open_checkpoint
from megatron_lightning.checkpoint.writing.commit import is_committed
from megatron_lightning.config import TransformerConfig
from megatron_lightning.errors import CheckpointError, ConfigError, MissingCheckpointError
from megatron_lightning.file_names import CONFIG
from megatron_lightning.models.transformer import GPTModel
from megatron_lightning.optional import HF_FOLDER, require
from megatron_lightning.parallel.shards.spec import Box

ModelKind = Literal["transformers", "gpt"]


class AutoBridge(FolderModel):
    """The model in a Hugging Face folder, by the names of Megatron Bridge: models and modules made
    of the folder, and folders and checkpoints written of models. See :class:`FolderModel` for the
    arguments.
    """

    def __getattr__(self, name: str) -> Any:
        hint = hint_of_other_library(name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")

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
        config_overrides: Mapping[str, Any] | None = None,
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
            config_overrides: Entries of the configuration with other values, kept in checkpoints
                and exported folders. With ``tie_word_embeddings: false`` the output layer of a tied
                model begins as a copy of the embedding.

        Raises:
            MissingCheckpointError: If there is no such folder, and the Hub has no such id.
            ConfigError: See the class.
        """
        options: dict[str, Any] = {
            "trust_remote_code": trust_remote_code,
            "attn_implementation": attn_implementation,
            "family": family,
        }
        options["change"] = Change(
            architecture,
            tuple(new_tensors),
            tuple(left_out),
            tuple((config_overrides or {}).items()),
        )
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
        rounds: bool = False,
        **options: Any,
    ) -> AutoBridge:
        """Return the bridge of the folder in a checkpoint.

        Args:
            path: A checkpoint directory, plain file, or URL.
            model: Path of the model in the checkpoint's LightningModule. None: the first model from
                a folder.
            reads: Whether weights are the checkpoint's. False: there are no weights, and the caller
                loads the checkpoint into the new model.
            rounds: Whether weights that the training rounded (``qat``) have the rounded values.
                Adapters inside of the rounding are added.
            options: See the class.

        Raises:
            CheckpointError: If the checkpoint keeps no folder, or holds another model.
            ConfigError: See the class.
        """
        entry = read_kept(path, model)
        if entry is None:
            raise CheckpointError(
                f"{path} keeps no Hugging Face folder, since its model did not come from one. Name "
                "the folder: --like FOLDER."
            )
        source, place, record = entry
        if reads:
            # The checkpoint holds the folder's own model, without the caller's differences.
            own = cls.from_kept(record, **{**options, "change": UNCHANGED})
            plan = own.plan()
            if rounds:
                own_model = own.lazy_model(dtype="auto")
                tensors = rounded_tensors(source, str(path), place, plan, own_model)
            else:
                tensors = plan.tensors(fills_of_checkpoint(source, plan.parameters, place))
            record.read_from({name: tensors[name].fill for name in plan.pieces})
        return cls.from_kept(record, **{"origin": str(path), "revision": None, **options})

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

    def to_model(
        self,
        kind: ModelKind = "transformers",
        *,
        config: TransformerConfig | None = None,
        dtype: torch.dtype | None = None,
    ) -> nn.Module:
        """Return the model.

        In ``configure_model`` under ``MegatronStrategy`` the model is on ``meta``. When the model
        is sharded, each rank reads the boxes of its own shards from the folder. Outside of
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
        record = self.keep(model)
        new_names = [name for name, x in model.named_parameters() if not isinstance(x, Lazy)]
        # Three ways to the values: each rank reads its own shards later; boxes are read and
        # dequantized now; or transformers loads a plain folder itself.
        if is_deferred():
            defer_weights(model, reads=record is not self.folder or record.has_values)
        elif self._kept is not None or self._quantization is not None or self._copies:
            fill_weights(model)
        else:
            options = {**self._options, "dtype": dtype or torch.get_default_dtype()}
            model = self.model_class.from_pretrained(self.path, config=self.config, **options)
        if self._generation_config is not None:
            model.generation_config = self._generation_config
        remember(model, record)
        remember_new(model, new_names)
        return model

    def _new_model(self, kept: KeptFolder, dtype: torch.dtype | None) -> nn.Module:
        dtype_before = torch.get_default_dtype()
        torch.set_default_dtype(dtype or dtype_before)
        try:
            model: nn.Module = self.model_class(self.config)
        finally:
            torch.set_default_dtype(dtype_before)
        remember(model, kept)
        return model

    def _gpt_model(self, config: TransformerConfig | None, dtype: torch.dtype | None) -> nn.Module:
        config, tensors, record = self.gpt_parts(config)
        dtype_before = torch.get_default_dtype()
        torch.set_default_dtype(dtype or dtype_before)
        try:
            reads = self._kept is None or self._kept.has_values
            model = build_gpt_model(config, tensors, reads=reads)
        finally:
            torch.set_default_dtype(dtype_before)
        remember(model, record)
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
            init_from_hf=self.origin,
            revision=self.revision,
            family=self._family,
            trust_remote_code=self.trusts,
            **options,
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

    @property
    def is_plain_folder(self) -> bool:
        """Whether the weights come from a folder without quantized weights."""
        return self._kept is None and self._quantization is None

    def stock_model(self) -> Any:
        """Return the model as loaded by ``transformers`` alone, in the folder's dtype."""
        options = {**self._options, "dtype": "auto"}
        return self.model_class.from_pretrained(self.path, config=self.config, **options)

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
        require("transformers", HF_FOLDER)
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
        from megatron_lightning.bridge.import_folder import import_folder  # imports this file

        bridge = cls.from_hf_pretrained(path, **options)
        import_folder(bridge, Path(checkpoint), dtype=dtype, overwrite=overwrite)

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
            checkpoint: A checkpoint of the folder's model, of any layout, or a checkpoint of
                Megatron-LM or Megatron Bridge (``torch_dist``).
            path: The folder to write.
            dtype: Dtype of floating tensors. None: the folder's.
            overwrite: Replace an existing target.

        Raises:
            CheckpointError: If the checkpoint is not of the folder's model, or the target exists.
        """
        if is_megatron(checkpoint):
            from megatron_lightning.bridge.megatron_checkpoints.megatron import (
                MegatronBridge,  # imports this file
            )

            tensors = MegatronBridge(checkpoint, self.path).tensors(dtype)
            write_folder(Path(path), self.folder, tensors, overwrite=overwrite)
            return
        source = open_checkpoint(checkpoint)
        plan = self.plan(gpt_config(source))
        fills = fills_of_checkpoint(source, plan.parameters)
        write_folder(Path(path), plan.folder, plan.tensors(fills, dtype), overwrite=overwrite)


def _gpt_config(model: nn.Module) -> TransformerConfig | None:
    """Return the configuration of a :class:`GPTModel`. None: another model."""
    return model.config if isinstance(model, GPTModel) else None


def is_checkpoint(path: str | Path) -> bool:
    """Return whether a path is a checkpoint of ours, or a plain Lightning checkpoint."""
    if is_remote(path) or is_plain_file(path):
        return True
    return not (Path(path) / CONFIG).exists() and is_committed(path)
