"""Pre-training of encoders and encoder-decoders of ``transformers`` on masked samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lightning.bridge.auto import AutoBridge
from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.losses.loss import CrossEntropy
from megatron_lightning.modules.folder_module import FolderModule
from megatron_lightning.modules.masked_data import MaskedDataModule
from megatron_lightning.optional import require
from megatron_lightning.pipeline.batch.sequence_split import IGNORED_LABEL

Batch = dict[str, Tensor]


class MaskedLanguageModule(FolderModule):
    """A masked language model (BERT) or an encoder-decoder (T5) of ``transformers``, trained with
    AdamW on batches of :class:`MaskedDataModule`.

    The loss is the mean over the counted tokens of the whole optimizer step, whatever the layout.
    A model ``...ForPreTraining`` has the mean loss of the class beside it (were the segments
    swapped), over the samples of the step. The loss then needs the tokens of all data-parallel
    ranks: one number is reduced at the start of every step.

    Args:
        path: Folder or Hub id of the initial weights. Leave out with ``config``.
        config: Configuration of a new model: ``model_type``, ``architectures`` and sizes by the
            names of ``transformers``. Leave out with ``path``.
        architecture: Another class of ``transformers`` than the folder's, such as
            "BertForPreTraining".
        revision: Branch, tag or commit of the Hub id. Default: main.
        trust_remote_code: Whether code in the folder may run.
        attn_implementation: Attention of ``transformers``. Default: the model's default.
        calculate_per_token_loss: False: the mean of the micro-batches' means, as Megatron's BERT
            and T5 have it.
        learning_rate: Peak learning rate.
        options: Further options of :class:`LanguageModule`: optimizer, schedule, adapters.

    Raises:
        ConfigError: If not one of ``path`` and ``config`` is set, or options contradict each other.
    """

    sequence_dims: ClassVar[Mapping[str, int]] = dict.fromkeys(
        ("text", "types", "labels", "padding_mask", "loss_mask", "text_dec", "dec_mask"), 1
    )
    """Ranks that share sequences give an encoder its full rows (``text_enc``, ``enc_mask``)."""

    def __init__(
        self,
        path: str | None = None,
        *,
        config: dict[str, Any] | None = None,
        architecture: str | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        attn_implementation: str | None = None,
        calculate_per_token_loss: bool = True,
        learning_rate: float = 1e-4,
        **options: Any,
    ) -> None:
        super().__init__(learning_rate=learning_rate, **options)
        if (path is None) == (config is None):
            raise ConfigError(
                f"path is {path!r} and config is {config!r}. Set one of the two: a folder with "
                "weights, or the configuration of a new model."
            )
        source: dict[str, Any] = {
            "path": path,
            "revision": revision,
            "trust_remote_code": trust_remote_code,
            "attn_implementation": attn_implementation,
            "architecture": architecture,
        }
        settings = {"config": config, "calculate_per_token_loss": calculate_per_token_loss}
        self.save_hyperparameters({**source, **settings, **self._settings})
        self._source = None if path is None else source
        self._new_config = config
        self.calculate_per_token_loss = calculate_per_token_loss
        self.loss = CrossEntropy()
        self._tokens_per_sample: Tensor | None = None

    def configure_model(self) -> None:
        """Make the model. Under ``MegatronStrategy`` each rank reads only local shards of a
        folder.
        """
        if self.model is None:
            bridge = self._bridge() if self._new_config is None else self._new_bridge()
            self.model = self._adapt(bridge.to_model())
            self.model.train()  # transformers returns models in eval mode, without dropout
            self.model.config.use_cache = False  # training reads no cache

    def _new_bridge(self) -> AutoBridge:
        require("transformers", "a masked model")
        from transformers import AutoConfig

        options = dict(self._new_config or {})
        kind = options.pop("model_type", None)
        if kind is None or not options.get("architectures"):
            raise ConfigError(
                f"config has the keys {sorted(self._new_config or {})}: a new model needs "
                "model_type and architectures, such as bert and [BertForPreTraining]. Add them."
            )
        return AutoBridge.from_hf_config(AutoConfig.for_model(kind, **options))

    @property
    def has_class(self) -> bool:
        """Whether the model classifies pairs of segments."""
        return type(self.model).__name__.endswith("ForPreTraining")

    def on_fit_start(self) -> None:
        """Check that model and data belong together.

        Raises:
            ConfigError: If they do not.
        """
        super().on_fit_start()
        data, model = getattr(self.trainer, "datamodule", None), self.model
        if not isinstance(data, MaskedDataModule):
            return
        name, rows = type(model).__name__, int(model.config.vocab_size)
        if (data.kind == "t5") != bool(model.config.is_encoder_decoder):
            raise ConfigError(
                f'the data are of kind="{data.kind}", and the model is a {name}. Set kind to '
                f'"{"bert" if data.kind == "t5" else "t5"}", or use another model.'
            )
        if data.config.num_ids > rows:
            raise ConfigError(
                f"the data have {data.config.num_ids} ids, and the embedding of {name} has {rows} "
                "rows. Set vocab_size of the model to that of the tokenizer or above."
            )
        if self.has_class and not data.config.classification_head:
            raise ConfigError(
                f"{name} learns whether segments are swapped, and with classification_head=False "
                "none are. Set it to True, or architectures to a model ...ForMaskedLM."
            )

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Return the logits of tokens [b, s, v], and of the class of each sample [b, 2]. None: the
        model has no classes.
        """
        if self.model is None:
            self.configure_model()
        if "text_enc" in batch:
            # Padding of the decoder is behind all counted tokens, and attention is causal.
            out = self.model(
                input_ids=batch["text_enc"],
                attention_mask=batch["enc_mask"],
                decoder_input_ids=batch["text_dec"],
            )
            return out.logits, None
        inputs = {"input_ids": batch["text"], "attention_mask": batch["padding_mask"]}
        if getattr(self.model.config, "type_vocab_size", 0) > 1:
            inputs["token_type_ids"] = batch["types"]
        out = self.model(**inputs)
        if not self.has_class:
            return out.logits, None
        by_name = "sop_logits" if "sop_logits" in out else "seq_relationship_logits"
        return out.prediction_logits, out[by_name]

    # ------------------------------------------------------------------------------------ the loss

    def num_items(self, batch: Batch) -> Tensor:
        """Return the weight of a micro-batch: its counted tokens, or its samples if the loss has
        classes too or is a mean of means.
        """
        if self.has_class or not self.calculate_per_token_loss:
            return torch.tensor(len(batch["labels"]), device=batch["labels"].device)
        return batch["loss_mask"].sum()

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Count the tokens in the loss of all data-parallel ranks, if the loss has classes too."""
        super().on_train_batch_start(batch, batch_idx)
        self._tokens_per_sample = None
        if self.has_class and self.calculate_per_token_loss:
            counts = torch.stack([batch["loss_mask"].sum(), _size(batch)]).float()
            tokens, samples = self.trainer.strategy.reduce(counts, reduce_op="sum")
            self._tokens_per_sample = tokens / samples

    def _parts(self, batch: Batch) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return the sum of the tokens' losses, the sum of the classes' losses, and the number of
        tokens.
        """
        logits, classes = self(batch)
        is_counted = batch["loss_mask"].bool()
        losses = self.loss(logits, batch["labels"].masked_fill(~is_counted, IGNORED_LABEL))
        if "validation_set" in batch:
            self._log_sets(batch["validation_set"], losses * is_counted, is_counted)
        of_class = None
        if classes is not None:
            of_class = F.cross_entropy(classes.float(), batch["is_random"], reduction="sum")
        return losses.sum(), of_class, is_counted.sum()

    def _loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss of a micro-batch and its weight.

        With n tokens and b samples of a micro-batch, and N and B of the step, the mean over tokens
        is the mean, weighted by b, of (sum of losses / b) (B / N).
        """
        tokens, of_class, count = self._parts(batch)
        if of_class is None:
            return tokens / count.clamp_min(1), self.num_items(batch)
        samples = _size(batch)
        ratio = count / samples if self._tokens_per_sample is None else self._tokens_per_sample
        of_tokens = tokens / samples / torch.where(ratio > 0, ratio, 1)
        of_class = of_class / samples
        for name, value in (("lm_loss", of_tokens), ("class_loss", of_class)):
            self.log(name, value, sync_dist=True)
        return of_tokens + of_class, self.num_items(batch)

    def validation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Log ``val_loss``, and its parts ``val_lm_loss`` and ``val_class_loss`` if the model
        classifies: means over all tokens, and over all samples.
        """
        return self._evaluate(batch, "val_")

    def test_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Log ``test_loss``, as :meth:`validation_step`."""
        return self._evaluate(batch, "test_")

    def _evaluate(self, batch: Batch, prefix: str) -> Tensor:
        tokens, of_class, count = self._parts(batch)
        lm_loss = tokens / count.clamp_min(1)
        if of_class is None:
            weight = float(count)
            self.log(f"{prefix}loss", lm_loss, prog_bar=True, sync_dist=True, batch_size=weight)  # type: ignore[arg-type]
            return lm_loss
        class_loss = of_class / _size(batch)
        for name, value, weight in (
            ("lm_loss", lm_loss, float(count)),
            ("class_loss", class_loss, float(_size(batch))),
        ):
            self.log(f"{prefix}{name}", value, sync_dist=True, batch_size=weight)  # type: ignore[arg-type]
        return lm_loss + class_loss

    def on_validation_epoch_end(self) -> None:
        """Log the sum of the parts."""
        self._log_sum("val_")

    def on_test_epoch_end(self) -> None:
        """Log the sum of the parts."""
        self._log_sum("test_")

    def _log_sum(self, prefix: str) -> None:
        if self.has_class:
            metrics = self.trainer.callback_metrics
            total = metrics[f"{prefix}lm_loss"] + metrics[f"{prefix}class_loss"]
            self.log(f"{prefix}loss", total, prog_bar=True)

    def predict_step(self, batch: Batch, batch_idx: int) -> Any:
        """Return the most likely token at every position, [b, s]."""
        return self(batch)[0].argmax(dim=-1)


def _size(batch: Batch) -> Tensor:
    """Return the number of samples."""
    labels = batch["labels"]
    return torch.tensor(len(labels), device=labels.device)
