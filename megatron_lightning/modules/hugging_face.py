"""A Hugging Face folder as an ordinary LightningModule: any causal language model, untouched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor

from megatron_lightning.bridge.folders.folder_record import read_kept
from megatron_lightning.data.images.image_positions import POSITION_ROWS
from megatron_lightning.data.images.row_entries import IMAGES, batch_entries
from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.losses.loss import CrossEntropy
from megatron_lightning.models.awaited_losses import awaited_losses
from megatron_lightning.models.plans.hf_documents import check_position_rows, separating_positions
from megatron_lightning.models.plans.hf_towers import adapted_towers, mark_towers
from megatron_lightning.models.router_loss import (
    LOGITS,
    coefficient_of,
    router_loss,
)
from megatron_lightning.modules.causality import check_causal, check_decoder
from megatron_lightning.modules.folder_module import FolderModule
from megatron_lightning.modules.language_model import Batch
from megatron_lightning.modules.pretrain_data import PretrainDataModule


class HuggingFaceModule(FolderModule):
    """A causal language model of ``transformers``, trained from a folder or a Hub id with AdamW.

    Trained parameters have the Trainer's precision: fp32 for ``32-true``, ``16-mixed`` and
    ``bf16-mixed``, bf16 with fp32 main params for ``bf16-true``.

    Args:
        path: A folder, a Hub id such as ``meta-llama/Llama-3.2-1B``, or a checkpoint of such a
            module.
        revision: Branch, tag or commit of the Hub id. Default: main.
        trust_remote_code: Whether code in the folder may run.
        attn_implementation: Attention of ``transformers``, such as "sdpa" or "eager". Default: the
            model's default.
        config_overrides: Entries of the folder's configuration with other values, kept in
            checkpoints and exported folders. With ``tie_word_embeddings: false`` a tied output
            layer becomes a weight of its own. ``output_router_logits: true`` adds the model's
            balancing loss to the training loss, and stays out of exported folders.
        learning_rate: Peak learning rate.
        fused_loss: Compute losses in chunks of tokens, so that the logits of all tokens never exist
            at once. False: compute logits first.
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
        config_overrides: dict[str, Any] | None = None,
        learning_rate: float = 1e-5,
        fused_loss: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(learning_rate=learning_rate, **options)
        source: dict[str, Any] = {
            "path": path,
            "revision": revision,
            "trust_remote_code": trust_remote_code,
            "attn_implementation": attn_implementation,
            "config_overrides": config_overrides,
        }
        self.save_hyperparameters({**source, "fused_loss": fused_loss, **self._settings})
        overrides = dict(config_overrides or {})
        # A setting of the training alone: folders that are written do not return routers' logits.
        self._router_logits: bool | None = overrides.pop(LOGITS, None)
        source["config_overrides"] = overrides or None
        self.fused_loss = fused_loss
        self._source = source
        self.loss = CrossEntropy()
        self.model: Any = None
        self._tower_note: str | None = None

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the module with a checkpoint's weights. A checkpoint with the
        folder's record needs no folder. For arguments see ``LightningModule.load_from_checkpoint``.
        """
        is_path = isinstance(checkpoint_path, (str, PathLike))
        if is_path and "path" not in kwargs and read_kept(checkpoint_path) is not None:
            kwargs["path"] = str(checkpoint_path)
        return super().load_from_checkpoint(checkpoint_path, *args, **kwargs)

    def configure_model(self) -> None:
        """Make the model. Under ``MegatronStrategy`` each rank reads only local shards.

        A run under ``MegatronStrategy`` from a checkpoint takes configuration and tokenizer from
        the checkpoint, and reads no folder.
        """
        if self.model is None:
            self.model = self._adapt(self._bridge().to_model())
            check_decoder(self.model)
            data = None if self._trainer is None else getattr(self._trainer, "datamodule", None)
            if getattr(data, "images", None) is not None:
                mark_towers(self.model)
            self._tower_note = None if self.peft is None else adapted_towers(self.model)
            if self._router_logits is not None:
                self.model.config.get_text_config().output_router_logits = self._router_logits
                self.model.config.output_router_logits = self._router_logits
            self.model.train()  # transformers returns models in eval mode, without dropout
            for config in (self.model.config, self.model.config.get_text_config()):
                config.use_cache = False  # training reads no cache

    def setup(self, stage: str) -> None:
        """Check that positions of the data separate the documents of a row.

        Raises:
            ConfigError: If positions continue over the end of a document.
        """
        data = getattr(self.trainer, "datamodule", None)
        config = data.config if isinstance(data, PretrainDataModule) else None
        if config is not None and config.reset_attention_mask and not config.reset_position_ids:
            raise ConfigError(
                "reset_attention_mask of PretrainDataModule is set and reset_position_ids is not, "
                "and models of transformers part the documents of a row by positions that start "
                "again. Set reset_position_ids, too, or train a GPTLightningModule."
            )

    def on_fit_start(self) -> None:
        """Print the trained parameters, and the adapted layers of towers."""
        super().on_fit_start()
        if self._tower_note is not None:
            rank_zero_info(self._tower_note)

    def on_train_start(self) -> None:
        """Check that no logit depends on later tokens."""
        check_causal(self)

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        *,
        images: Sequence[Mapping[str, Tensor]] = (),
        position_rows: Tensor | None = None,
    ) -> Tensor:
        """Return the model's logits [b, s, v], or with labels the tokens' losses [b, s].

        Args:
            tokens: Ids [b, s].
            labels: The next ids [b, s].
            position_ids: Positions [b, s].
            document_ids: Number of each token's document in its row [b, s].
            images: Entries of images for the model, for each row.
            position_rows: Flat positions, and those of time, height and width [b, 4, s], of packed
                rows with images.

        Raises:
            ConfigError: If a batch has ``document_ids``, and documents in a row would see each
                other.
        """
        inputs = {"position_ids": position_ids, "document_ids": document_ids}
        return self._call(tokens, labels, images, **inputs, position_rows=position_rows)[1]

    def _inputs(self, batch: Batch) -> dict[str, Any]:
        """Return the optional inputs of ``forward`` in a batch."""
        images = {name: batch[name] for name in (IMAGES, POSITION_ROWS) if name in batch}
        return {**super()._inputs(batch), **images}

    def _token_losses(self, batch: Batch, labels: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the losses of the tokens [b, s], and the balancing loss of a model that has
        one.
        """
        if not (self.training and self.model is not None and coefficient_of(self.model.config)):
            return super()._token_losses(batch, labels)
        tokens = batch["tokens"]
        output, losses = self._call(tokens, labels, **self._inputs(batch))
        loss = router_loss(self.model, output, tokens, batch.get("padding"))
        if loss is not None and self._trainer is not None:
            self.log("aux_loss", loss.detach(), sync_dist=True)
        return losses, loss

    def _positions(
        self,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        position_rows: Tensor | None = None,
    ) -> Tensor | None:
        """Return the positions for the model. None: the model counts itself."""
        if document_ids is None:
            return position_ids
        mesh = self.device_mesh
        num_sharing = mesh is not None and "cp" in (mesh.mesh_dim_names or ()) and mesh["cp"].size()
        if position_ids is None and num_sharing and num_sharing > 1:
            raise ConfigError(
                "the batch has document_ids and no position_ids, and a rank that has a part of "
                "a sequence does not see where its documents begin. Add position_ids that "
                "start again with every document, as FinetuneDataModule does."
            )
        return separating_positions(self.model, document_ids, position_ids, position_rows)

    def _call(
        self,
        tokens: Tensor,
        labels: Tensor | None,
        images: Sequence[Mapping[str, Tensor]] = (),
        **given: Tensor | None,
    ) -> tuple[Any, Tensor]:
        """Return the model's output, and logits or losses as :meth:`forward`."""
        if self.model is None:
            self.configure_model()
        inputs = batch_entries(images)
        if inputs and given.get("document_ids") is not None:
            check_position_rows(self.model.config, given.get(POSITION_ROWS))
        if (positions := self._positions(**given)) is not None:
            inputs["position_ids"] = positions
        if labels is None or not self.fused_loss:
            output = self.model(input_ids=tokens, **inputs)
            logits: Tensor = output.logits
            return output, logits if labels is None else self.loss(logits, labels)
        # The output layer waits for the labels, and computes losses in chunks instead of logits.
        with awaited_losses(self.model, labels, self.loss) as losses:
            output = self.model(input_ids=tokens, **inputs)
            return output, losses.of(output.logits)
