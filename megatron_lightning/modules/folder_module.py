"""A language model from a Hugging Face folder, to be written back as a folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from megatron_lightning.bridge.auto import AutoBridge
from megatron_lightning.bridge.export_model import save_model
from megatron_lightning.bridge.folders.configuration import check_overrides
from megatron_lightning.bridge.folders.folder_record import read_kept, recall
from megatron_lightning.bridge.folders.remembered_folders import write_kept
from megatron_lightning.bridge.hf_models.new_rows import fill_new_rows, rows_for, with_vocabulary
from megatron_lightning.checkpoint.reading.source import open_checkpoint
from megatron_lightning.errors import CheckpointError
from megatron_lightning.models.teacher_student import FrozenPair
from megatron_lightning.modules.frozen_parameters import summary_of
from megatron_lightning.modules.language_model import LanguageModule, ModuleT
from megatron_lightning.modules.model_facts import ModelFolder
from megatron_lightning.peft.methods.applied import APPLIED, applied_to
from megatron_lightning.peft.methods.method import AdapterMethod
from megatron_lightning.peft.methods.table import settings_of
from megatron_lightning.peft.record import is_partial, read_records
from megatron_lightning.peft.resume import imported_scales


class FolderModule(LanguageModule):
    """A :class:`LanguageModule` for models with or without a Hugging Face folder. Subclasses set
    ``_source`` and make the model.

    Args:
        options: Options of :class:`LanguageModule`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._source: dict[str, Any] | None = None
        """Options of :meth:`AutoBridge.from_hf_pretrained`. None: the model needs no folder."""
        self.model: Any = None
        self.given_mesh: Any = None
        """Device mesh of a module around this one. None: the module is the Trainer's."""
        self.new_tokens: Mapping[str, int] = {}
        """Text -> id of tokens that the data added to the model's, behind the ids of the model's
        own. The model is made with rows for them: the mean of the rows of its own tokens.
        ``FinetuneDataModule`` sets the tokens."""
        self.loads_from: str | None = None
        """Checkpoint to be loaded by the run. ``MegatronStrategy`` sets the path before the run
        begins."""

    def _adapt(self, model: ModuleT) -> ModuleT:
        """Attach the adapters, and fill the rows of new tokens."""
        imported = self._imported_adapters()
        if imported is not None:
            self._take_adapters(imported)
        model = super()._adapt(model)
        if imported is not None:
            applied = applied_to(model)[""]
            model.__dict__[APPLIED] = applied._replace(imported=True)
        if self.new_tokens and self._source is not None and not self._checkpoint:
            frozen_names = fill_new_rows(model, self.new_tokens)
            if frozen_names:
                rank_zero_warn(
                    f"new_tokens adds {len(self.new_tokens)} tokens, and {', '.join(frozen_names)} "
                    "is frozen: their rows stay as they are, without a meaning. Name the layer in "
                    "modules_to_save of LoRA."
                )
        return model

    def on_fit_start(self) -> None:
        """Print the number of trained parameters, if patterns freeze some."""
        text = summary_of(self._trained)
        if text is not None:
            rank_zero_info(text)

    def _imported_adapters(self) -> AdapterMethod | None:
        """Return the adapters with ranks and scales of the folder imported as the run's checkpoint.
        None: the checkpoint comes from no folder.
        """
        if self.peft is None or self.loads_from is None:
            return None
        try:
            records = read_records(open_checkpoint(self.loads_from).state())
        except CheckpointError:  # copies on local disks, or damage: loading tells more
            return None
        return imported_scales(self.peft, records)

    def _take_adapters(self, method: AdapterMethod) -> None:
        if method != self.peft:
            rank_zero_info(
                f"ranks and scales of adapters come from the imported folder: {method.described()}"
            )
        self.peft = method
        self._settings["peft"] = settings_of(method)
        if "peft" in self.hparams:
            self.hparams["peft"] = settings_of(method)

    def prepare_data(self) -> None:
        """Download the folder, once a node. A run from a checkpoint needs no folder."""
        if self._source is not None and not self._checkpoint:
            AutoBridge.prepare(self._source["path"], revision=self._source["revision"])

    def _bridge(self) -> AutoBridge:
        """Return the bridge of the folder, or of the checkpoint loaded by the run.

        Raises:
            ConfigError: If the checkpoint's model has other values of ``config_overrides``.
        """
        source = dict(self._source or {})
        if self._checkpoint:
            del source["path"], source["revision"]
            # Lightning loads the weights next. With strict=False a part may keep the folder's
            # values.
            reads = not self.strict_loading
            overrides = source.pop("config_overrides", None) or {}
            bridge = AutoBridge.from_checkpoint(self._checkpoint, reads=reads, **source)
            check_overrides(bridge.config, overrides, self._checkpoint)
            return bridge
        bridge = AutoBridge.from_hf_pretrained(**source)
        num_ids = max(self.new_tokens.values(), default=-1) + 1
        if num_ids > bridge.config.get_text_config().vocab_size:
            bridge = with_vocabulary(bridge, rows_for(num_ids), min(self.new_tokens.values()))
        return bridge

    @property
    def model_folder(self) -> ModelFolder | None:
        """Folder with the model's tokenizer and configuration. None: the model needs no folder."""
        if self._source is None:
            return None
        return ModelFolder(
            path=str(self._source["path"]),
            revision=self._source["revision"],
            trust_remote_code=bool(self._source.get("trust_remote_code")),
            checkpoint=lambda: self._checkpoint,
        )

    @property
    def _checkpoint(self) -> str | None:
        """Checkpoint loaded by this run, if the checkpoint keeps the folder. None: there
        is none.
        """
        path = self.loads_from
        try:
            entry = None if path is None else read_kept(path)
            # Adapters or trained weights alone are loaded into the weights of the folder.
            return path if entry is not None and not is_partial(entry[0]) else None
        except CheckpointError:  # copies on local disks, or damage: loading tells more
            return None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the folder without weights, so that export and resume need no folder."""
        super().on_save_checkpoint(checkpoint)
        write_kept(self, checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adopt the checkpoint's folder, if the model did not come from a folder."""
        super().on_load_checkpoint(checkpoint)
        recall(self, checkpoint)

    @property
    def _trained(self) -> Any:
        """The trained model, without a frozen model beside it."""
        return self.model.trained if isinstance(self.model, FrozenPair) else self.model

    def save_hf_pretrained(
        self, path: str, *, dtype: torch.dtype | None = None, overwrite: bool = False
    ) -> None:
        """Write the model as a Hugging Face folder. Under ``MegatronStrategy`` every rank calls
        this.

        Args:
            path: The folder.
            dtype: Dtype of the weights. None: the dtype of the model's original folder.
            overwrite: Replace an existing target.

        Raises:
            CheckpointError: If the target exists.
        """
        strategy: Any = None if self._trainer is None else self._trainer.strategy
        if hasattr(strategy, "save_hf_pretrained") and strategy.run is not None:
            strategy.save_hf_pretrained(path, self._trained, dtype=dtype, overwrite=overwrite)
        else:
            save_model(self._trained, Path(path), dtype=dtype, overwrite=overwrite)
