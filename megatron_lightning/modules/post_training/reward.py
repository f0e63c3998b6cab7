"""Reward models: scores of answers, trained on pairs."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from megatron_lightning.bridge.auto import AutoBridge
from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.dropout import set_dropout
from megatron_lightning.layers.losses.reward_loss import RewardLoss
from megatron_lightning.models.router_loss import coefficient_of
from megatron_lightning.modules.hugging_face import HuggingFaceModule
from megatron_lightning.modules.objective import ObjectiveModule, Template
from megatron_lightning.modules.post_training.pairs import (
    log_rewards,
    num_pairs,
    padding_of,
    rows_of,
)
from megatron_lightning.modules.preference_data import PreferenceDataModule
from megatron_lightning.optional import HF_FOLDER, require

Batch = dict[str, Tensor]
HEAD = "score"
"""Head of decoders of ``transformers`` that classify a row by its last token."""
_TASK = "ForSequenceClassification"
_OUTPUT_LAYERS = ("lm_head.*", "embed_out.*")


class RewardModule(ObjectiveModule):
    """A reward model trained on batches of :class:`PreferenceDataModule`: chosen answers score
    higher than rejected ones. For the loss see ``layers.losses.reward_loss``.

    The model is the folder's class for sequence classification of ``transformers`` with one label:
    the score of a row is that of its last token other than padding. A folder of a language model
    gets a new head; one of a reward model keeps its own.

    The loss is the mean over the pairs of the global batch, for any split into micro-batches and
    ranks. Rows with ``margin`` have this margin.

    Args:
        model: A :class:`HuggingFaceModule`: the folder, adapters, optimizer and schedule.
        center_rewards_coefficient: Weight of the squared sum of both scores, which keeps rewards
            around 0. Default: none.
        dropout: Whether the model has dropout.

    Raises:
        ConfigError: If the module is of another kind.
    """

    sequence_dims: ClassVar[Mapping[str, int]] = PreferenceDataModule.sequence_dims
    reads_margins: ClassVar[bool] = True
    """Whether data read the margins of rows."""

    def __init__(
        self,
        model: Template,
        *,
        center_rewards_coefficient: float | None = None,
        dropout: bool = False,
    ) -> None:
        super().__init__(model)
        if not isinstance(self.template, HuggingFaceModule):
            raise ConfigError(
                f"model is a {type(self.template).__name__}, and a reward model has a head of "
                "transformers. Set it to a HuggingFaceModule of the folder."
            )
        self.loss = RewardLoss(center_rewards_coefficient=center_rewards_coefficient)
        self.dropout = dropout
        self.save_settings(center_rewards_coefficient=center_rewards_coefficient, dropout=dropout)

    # ----------------------------------------------------------------------------------- the model

    def _built(self, template: Template) -> Any:
        """Return a copy of the template with the model and its head."""
        with_head = copy.copy(template)
        if not self._checkpoint:  # the folder in a checkpoint has the head
            with_head._source = self._source_with_head(template._source or {})
        built = super()._built(with_head)
        config = built.model.config
        if coefficient_of(config):
            raise ConfigError(
                "the model has output_router_logits=True, and a reward model has no balancing "
                "loss. Set config_overrides={output_router_logits: false}."
            )
        if not isinstance(getattr(built.model, HEAD, None), nn.Module) or config.num_labels != 1:
            raise ConfigError(
                f"{type(built.model).__name__} has {config.num_labels} labels and no head "
                f"{HEAD!r} that scores the last token by a number. Set the model to the folder of "
                "a decoder, or of its reward model; a checkpoint of a language model is exported "
                "first: megatron-lightning convert export."
            )
        return built

    def _source_with_head(self, source: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of the bridge of the folder's reward model.

        Raises:
            ConfigError: If ``transformers`` has none, or the folder's head has other labels.
        """
        bridge = AutoBridge.from_hf_pretrained(**source)
        config, overrides = bridge.config, dict(source.get("config_overrides") or {})
        if config.get_text_config().pad_token_id is None:
            overrides.setdefault("pad_token_id", self._padding())
        changes: dict[str, Any] = {}
        if not bridge.model_class.__name__.endswith(_TASK):
            overrides["num_labels"] = 1
            changes = {
                "architecture": _class_name(config),
                "new_tensors": (f"{HEAD}.*",),
                "left_out": _OUTPUT_LAYERS,
            }
        return {**source, "config_overrides": overrides, **changes}

    def _padding(self) -> int:
        """Return the id of padding of the data, for a folder that states none."""
        data = None if self._trainer is None else getattr(self._trainer, "datamodule", None)
        tokenizer = getattr(data, "tokenizer", None)
        if tokenizer is None and self.model_folder is not None:
            tokenizer = self.model_folder.tokenizer()
        return int(tokenizer.padding)  # type: ignore[union-attr]

    def joined(self, models: Sequence[nn.Module]) -> nn.Module:
        """Return the model, without dropout unless it is wanted."""
        [model] = models
        if not self.dropout:
            set_dropout(model, 0.0)
        return model

    def on_train_start(self) -> None:
        """Do nothing: no score is of a token that a later one predicts."""

    # ------------------------------------------------------------------------------------ the steps

    def forward(self, tokens: Tensor, padding: Tensor | None = None) -> Tensor:
        """Return the scores of rows [b], in fp32.

        Args:
            tokens: Ids [b, s].
            padding: True behind the end of a row [b, s]. None: tokens other than the model's id of
                padding count.
        """
        if self.model is None:
            self.configure_model()
        if padding is not None:
            padding_id = self.model.config.get_text_config().pad_token_id
            tokens = tokens.masked_fill(padding, padding_id)
        logits: Tensor = self.model(input_ids=tokens).logits  # [b, 1]
        return logits[:, 0].float()

    def num_items(self, batch: Batch) -> Tensor:
        """Return the number of pairs."""
        return num_pairs(batch)

    def _scores(self, batch: Batch) -> Tensor:
        """Return the scores of the answers [b, 2]."""
        tokens, _ = rows_of(batch, type(self).__name__)
        scores: Tensor = self(tokens, padding_of(batch))
        return scores.view(2, -1).T

    def _loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the mean loss of the pairs, and their number."""
        scores = self._scores(batch)
        if self._trainer is not None:
            log_rewards(self, scores.detach())
        return self.loss(scores, batch.get("margin")).mean(), self.num_items(batch)

    def predict_step(self, batch: Batch, batch_idx: int) -> Any:
        """Return the scores of the answers: ``{"pair": [b], "scores": [b, 2]}``."""
        return {"pair": batch["pair"], "scores": self._scores(batch)}


def _class_name(config: Any) -> str:
    """Return the name of a family's class for sequence classification."""
    require("transformers", HF_FOLDER)
    from transformers.models.auto import modeling_auto

    names = modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    name = names.get(config.model_type)
    if not isinstance(name, str):
        raise ConfigError(
            f"the folder's model_type is {config.model_type!r}, and transformers has no class "
            f"…{_TASK} of it. Set the model to a folder of another family."
        )
    return name
