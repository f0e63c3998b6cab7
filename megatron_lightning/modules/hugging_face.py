"""A Hugging Face folder as an ordinary LightningModule: any causal language model, untouched."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_lightning.bridge.auto import AutoBridge
from megatron_lightning.bridge.give_back import save_model
from megatron_lightning.bridge.kept import read_kept, write_kept
from megatron_lightning.errors import CheckpointError, ConfigError
from megatron_lightning.layers.loss import CrossEntropy
from megatron_lightning.modules.language_model import LanguageModule


class HuggingFaceModule(LanguageModule):
    """A causal language model of ``transformers``, trained from a folder or a Hub id with AdamW.

    Trained parameters have the Trainer's precision: fp32 for ``32-true``, ``16-mixed`` and
    ``bf16-mixed``, bf16 with fp32 main params for ``bf16-true``.

    Args:
        path: A folder, a Hub id such as ``meta-llama/Llama-3.2-1B``, or a checkpoint of such a
            module.
        revision: Branch, tag or commit of the Hub id; leave it out for main.
        trust_remote_code: Whether code in the folder may run.
        attn_implementation: Attention of ``transformers``, such as "sdpa" or "eager"; leave it out
            for the model's default.
        learning_rate: Peak learning rate.
        options: Further options of :class:`LanguageModule`: optimizer, learning rate schedule,
            adapters.

    Raises:
        ConfigError: If the schedule contradicts itself.
    """

    def __init__(
        self,
        path: str,
        *,
        revision: str | None = None,
        trust_remote_code: bool = False,
        attn_implementation: str | None = None,
        learning_rate: float = 1e-5,
        **options: Any,
    ) -> None:
        super().__init__(learning_rate=learning_rate, **options)
        source: dict[str, Any] = {
            "path": path,
            "revision": revision,
            "trust_remote_code": trust_remote_code,
            "attn_implementation": attn_implementation,
        }
        self.save_hyperparameters({**source, **self._settings})
        self._source = source
        self.loss = CrossEntropy()
        self.model: Any = None
        self.loads_from: str | None = None
        """Checkpoint that the run will load; ``MegatronStrategy`` sets it before the run begins."""

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the module with a checkpoint's weights; a checkpoint that keeps the folder needs
        none. For arguments see ``LightningModule.load_from_checkpoint``.
        """
        is_path = isinstance(checkpoint_path, (str, PathLike))
        if is_path and "path" not in kwargs and read_kept(checkpoint_path) is not None:
            kwargs["path"] = str(checkpoint_path)
        return super().load_from_checkpoint(checkpoint_path, *args, **kwargs)

    def prepare_data(self) -> None:
        """Download the folder, once a node; a run that loads a checkpoint needs none."""
        if not self._checkpoint:
            AutoBridge.prepare(self._source["path"], revision=self._source["revision"])

    def configure_model(self) -> None:
        """Make the model; under ``MegatronStrategy`` each rank reads the part that it owns.

        A run under ``MegatronStrategy`` that loads a checkpoint takes configuration and tokenizer
        from there, and reads no folder.
        """
        if self.model is None:
            bridge = self._bridge()
            self.model = self._adapt(bridge.to_model())
            self.model.train()  # transformers returns models in eval mode, without dropout
            self.model.config.use_cache = False  # training reads no cache

    def _bridge(self) -> AutoBridge:
        options = {key: self._source[key] for key in ("trust_remote_code", "attn_implementation")}
        if self._checkpoint:
            # Lightning loads the weights next; with strict=False some may stay as they are.
            reads = not self.strict_loading
            return AutoBridge.from_checkpoint(self._checkpoint, reads=reads, **options)
        return AutoBridge.from_hf_pretrained(**self._source)

    @property
    def _checkpoint(self) -> str | None:
        """Checkpoint that this run loads and that keeps the folder; None: there is none."""
        path = self.loads_from
        try:
            return path if path is not None and read_kept(path) is not None else None
        except CheckpointError:  # copies on local disks; of what is damaged, loading tells more
            return None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the folder but weights, so that export and resume need no folder."""
        write_kept(self, checkpoint)

    def save_hf_pretrained(
        self, path: str, *, dtype: torch.dtype | None = None, overwrite: bool = False
    ) -> None:
        """Write the model as a Hugging Face folder; under ``MegatronStrategy`` on every rank.

        Args:
            path: The folder.
            dtype: Dtype of the weights; None: that of the folder that the model came from.
            overwrite: Replace an existing target.

        Raises:
            CheckpointError: If the target exists.
        """
        strategy: Any = None if self._trainer is None else self._trainer.strategy
        if hasattr(strategy, "save_hf_pretrained") and strategy.run is not None:
            strategy.save_hf_pretrained(path, self.model, dtype=dtype, overwrite=overwrite)
        else:
            save_model(self.model, Path(path), dtype=dtype, overwrite=overwrite)

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
    ) -> Tensor:
        """Return the model's logits [b, s, v], or with labels the tokens' losses [b, s].

        Raises:
            ConfigError: If a batch has ``document_ids``.
        """
        if document_ids is not None:
            raise ConfigError(
                "the batch has document_ids, and models of transformers would let the documents of "
                "a row see each other. Leave document_ids out of the data (reset_attention_mask of "
                "PretrainDataModule), or train a GPTLightningModule."
            )
        if self.model is None:
            self.configure_model()
        inputs = {} if position_ids is None else {"position_ids": position_ids}
        logits: Tensor = self.model(input_ids=tokens, **inputs).logits
        return logits if labels is None else self.loss(logits, labels)
