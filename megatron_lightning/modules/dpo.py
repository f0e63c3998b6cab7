"""Training by preferences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor

from megatron_lightning.config import TransformerConfig
from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.adapters.adapter_layers import (
    adapters_for_all_rows,
    adapters_for_second_half,
)
from megatron_lightning.layers.dropout import evaluated
from megatron_lightning.layers.losses.preference_loss import (
    AnswerScores,
    PreferenceLoss,
    PreferenceLossName,
)
from megatron_lightning.layers.losses.unpaired_loss import UnpairedLoss
from megatron_lightning.models.teacher_student import ReferencePair
from megatron_lightning.models.token_outputs import losses_and_router_loss, token_losses_of
from megatron_lightning.models.transformer import GPTModel
from megatron_lightning.modules.objective import Template, template_of
from megatron_lightning.modules.post_training.pairs import (
    log_rewards,
    num_pairs,
    padding_of,
    rows_of,
)
from megatron_lightning.modules.post_training.reference import (
    Reference,
    chosen_reference,
    default_reference,
)
from megatron_lightning.modules.post_training.unpaired import UnpairedModule
from megatron_lightning.modules.post_training.unpaired_data import UnpairedDataModule
from megatron_lightning.modules.preference_data import PreferenceDataModule
from megatron_lightning.precision.served.qat import qat_of

Batch = dict[str, Tensor]


class DPOModule(UnpairedModule):
    """A language model trained by preferences (https://arxiv.org/abs/2305.18290) on batches of
    :class:`PreferenceDataModule`. For the losses see ``layers.preference_loss``.

    The loss is the mean over the pairs of the global batch, for any split into micro-batches and
    ranks. ``predict`` computes the log-probabilities of all answers, and writes them to ``scores``
    of the data.

    Args:
        model: A :class:`HuggingFaceModule` or a :class:`GPTLightningModule`: the model, adapters,
            optimizer and schedule.
        reference: The model that the trained one is compared with. ``scores``: log-probabilities in
            the data, computed before by ``predict``. ``adapters``: the same model with the adapters
            that the training began with, or without adapters if these began at zero. ``base``: the
            same model without adapters. ``model``: a second, frozen model. Default: ``adapters`` if
            the model has adapters, otherwise ``scores``. The losses orpo and simpo have none.
        reference_model: The module of the second model. Default: as ``model``, before training.
        loss: ``sigmoid`` (DPO), ``ipo``, ``orpo``, ``simpo``, or ``kto``, for single answers of
            :class:`UnpairedDataModule`. Its mean over mismatched rows belongs to the whole step,
            which needs ``pipeline_options=PipelineOptions(explicit_steps=True)``.
        beta: Factor of the difference from the reference. For ipo the weight of the regularization,
            for orpo the weight of the odds ratio.
        gamma: Margin of simpo.
        label_smoothing: Probability of a swapped pair, for sigmoid.
        desirable_weight: Factor of desirable answers, for kto.
        undesirable_weight: Factor of the other answers, for kto.
        dropout: Whether the trained model has dropout. The reference never has.

    Raises:
        ConfigError: If values contradict each other.
    """

    sequence_dims: ClassVar[Mapping[str, int]] = {
        **PreferenceDataModule.sequence_dims,
        **UnpairedDataModule.sequence_dims,
    }

    def __init__(
        self,
        model: Template,
        *,
        reference: Reference | None = None,
        reference_model: Template | None = None,
        loss: PreferenceLossName | Literal["kto"] = "sigmoid",
        beta: float = 0.1,
        gamma: float = 0.5,
        label_smoothing: float = 0.0,
        desirable_weight: float = 1.0,
        undesirable_weight: float = 1.0,
        dropout: bool = False,
    ) -> None:
        function: PreferenceLoss | UnpairedLoss
        if loss == "kto":
            function = UnpairedLoss(
                beta=beta, desirable_weight=desirable_weight, undesirable_weight=undesirable_weight
            )
        else:
            function = PreferenceLoss(
                name=loss, beta=beta, gamma=gamma, label_smoothing=label_smoothing
            )
        template = template_of(model, "model")
        chosen = _reference(function, reference, template)
        super().__init__(template, chosen, reference_model, dropout=dropout)
        self.preference_loss = function
        self.has_explicit_steps = isinstance(function, UnpairedLoss)
        self._scored: dict[int, list[float]] = {}
        self.save_settings(
            reference=reference,
            reference_model=self.entry_of(self._second),
            loss=loss,
            beta=beta,
            gamma=gamma,
            label_smoothing=label_smoothing,
            desirable_weight=desirable_weight,
            undesirable_weight=undesirable_weight,
            dropout=dropout,
        )

    def configure_model(self) -> None:
        """Make the model, or both models.

        Raises:
            ConfigError: If the reference cannot be computed on this layout.
        """
        super().configure_model()
        config = getattr(self, "config", None)
        has_experts = isinstance(config, TransformerConfig) and config.moe is not None
        shares_rows = self.uses_adapters and not self.has_explicit_steps
        if not shares_rows or self.num_pipeline_ranks == 1:
            return
        reason = "experts would mix the rows" if has_experts else ""
        if qat_of(self):
            reason = "qat adds adapters to the weight, for all rows alike"
        if reason:
            raise ConfigError(
                f'the reference is "{self.reference}" on {self.num_pipeline_ranks} pipeline ranks, '
                f"where it is computed in other rows of the same call, and {reason}. Set reference "
                'to "model" or "scores", or pipeline_model_parallel_size to 1.'
            )

    # ------------------------------------------------------------------------------------ the steps

    def num_items(self, batch: Batch) -> Tensor:
        """Return the number of pairs, or of single answers."""
        if self.has_explicit_steps:
            return super().num_items(batch)
        return num_pairs(batch)

    def _inputs(self, batch: Batch) -> dict[str, Tensor]:
        """Return the padding [2 b, s] of the rows, if the data state it."""
        padding = padding_of(batch)
        return {} if padding is None else {"padding": padding}

    def _scores(self, batch: Batch) -> tuple[AnswerScores, Tensor | None, Tensor | None]:
        """Return the log-probabilities of the answers under the model, [b, 2] under the reference,
        and the balancing loss of an untouched model that has one.
        """
        tokens, labels = rows_of(batch, type(self).__name__)
        inputs = self._inputs(batch)
        reference: Tensor | None = None
        balancing: Tensor | None = None
        if self.reference == "model":
            before, losses = self.model(tokens, labels, **inputs)
            reference = self._answers(before, labels).log_probs
        elif self.uses_adapters and self.num_pipeline_ranks > 1:
            # A pipelined model is called once, so the reference is in the first half of the rows.
            batch_dim = 1 if isinstance(self.model, GPTModel) else 0
            with adapters_for_second_half(self.model, batch_dim):
                both_losses = token_losses_of(self.model, tokens.repeat(2, 1), labels.repeat(2, 1))
            before, losses = both_losses.chunk(2)
            reference = self._answers(before.detach(), labels).log_probs
        else:
            if self.uses_adapters:
                with torch.no_grad(), self.as_reference(), evaluated(self.model):
                    before = token_losses_of(self.model, tokens, labels, **inputs)
                reference = self._answers(before, labels).log_probs
            losses, balancing = losses_and_router_loss(self.model, tokens, labels, **inputs)
        if self.reference == "scores":
            reference = self._given(batch)
        return self._answers(losses, labels), reference, balancing

    def _given(self, batch: Batch) -> Tensor:
        if "scores" not in batch:
            raise ConfigError(
                'the reference is "scores", and the batch has none: of PreferenceDataModule set '
                "scores to a file written by `predict`; other data have an entry scores [b, 2], "
                "the log-probabilities of the chosen and the rejected answer."
            )
        return batch["scores"].float()

    def _answers(self, losses: Tensor, labels: Tensor) -> AnswerScores:
        """Return the log-probabilities of answers, from token losses [2 b, s]."""
        log_probs, num_tokens = self._row_sums(losses, labels).view(2, 2, -1).transpose(1, 2)
        return AnswerScores(log_probs, num_tokens.detach())

    def _loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the mean loss of the pairs, or of single answers, and their number."""
        if isinstance(self.preference_loss, UnpairedLoss):
            return self._unpaired_loss(batch, self.preference_loss)
        policy, reference, balancing = self._scores(batch)
        loss = self.preference_loss(policy, reference).mean()
        self._observe(policy, reference)
        if balancing is not None:
            loss = loss + balancing
            if self._trainer is not None:
                self.log("aux_loss", balancing.detach(), sync_dist=True)
        return loss, self.num_items(batch)

    def _observe(self, policy: AnswerScores, reference: Tensor | None) -> None:
        """Log the rewards of the answers."""
        if self._trainer is None:
            return
        rewards = policy.log_probs.detach()
        if reference is not None:
            rewards = rewards - reference
        elif not self.preference_loss.needs_reference:
            rewards = policy.means.detach()
        log_rewards(self, self.preference_loss.beta * rewards)

    # ------------------------------------------------------------------------------- the reference

    def keep_first(self) -> None:
        """Keep the first values of the adapters, also for layers that compute both halves."""
        is_new = self._first is None
        super().keep_first()
        if is_new and self._first is not None and self.num_pipeline_ranks > 1:
            self._first.set_first_values()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """See the base class. Runs of earlier versions kept no first values: "adapters" meant the
        model without them.
        """
        super().on_load_checkpoint(checkpoint)
        is_earlier = _saved_reference(checkpoint.get("hyper_parameters", {})) == "adapters"
        if self._loaded is None and is_earlier:
            self._loaded = {}

    def on_after_backward(self) -> None:
        """Compute all rows with adapters again, before callbacks write or score texts."""
        if self.uses_adapters:
            adapters_for_all_rows(self.model)

    def on_train_batch_end(self, *_: Any) -> None:
        """Compute all rows with adapters again, also after a batch without a backward."""
        self.on_after_backward()

    def predict_step(self, batch: Batch, batch_idx: int) -> Any:
        """Return the log-probabilities of the answers under the model: ``{"pair": [b], "scores":
        [b, 2]}``.
        """
        tokens, labels = rows_of(batch, type(self).__name__)
        if isinstance(self.model, ReferencePair):
            _, losses = self.model(tokens, labels, **self._inputs(batch))
        else:
            losses = token_losses_of(self.model, tokens, labels, **self._inputs(batch))
        scores = self._answers(losses, labels).log_probs
        return {"pair": batch["pair"], "scores": scores}

    def on_predict_start(self) -> None:
        """Forget the scores of an earlier prediction."""
        super().on_predict_start()
        self._scored = {}

    def on_predict_batch_end(self, outputs: Any, *_: Any, **__: Any) -> None:
        """Keep the scores of a batch."""
        if isinstance(outputs, Mapping):
            numbers, scores = outputs["pair"].tolist(), outputs["scores"].tolist()
            self._scored |= dict(zip(numbers, scores, strict=True))

    def on_predict_epoch_end(self) -> None:
        """Write the scores, if the data name a file."""
        data = getattr(self.trainer, "datamodule", None)
        if not isinstance(data, PreferenceDataModule) or data.scores is None:
            return
        found = [self._scored]
        if dist.is_initialized() and dist.get_world_size() > 1:
            found = [{}] * dist.get_world_size()
            dist.all_gather_object(found, self._scored)
        if self.trainer.is_global_zero:
            merged = {number: scores for part in found for number, scores in part.items()}
            rank_zero_info(f"scores of {len(merged)} pairs: {data.write_scores(merged)}")
        self.trainer.strategy.barrier("scores")


def _reference(
    loss: PreferenceLoss | UnpairedLoss, reference: Reference | None, template: Template
) -> Reference | None:
    """Return the reference of a loss."""
    if not loss.needs_reference:
        if reference is not None:
            raise ConfigError(
                f"reference is {reference!r}, and the loss {loss.name} has none. Leave it out, or "
                "set loss to sigmoid or ipo."
            )
        return None
    if isinstance(loss, UnpairedLoss):
        if reference == "scores":
            raise ConfigError(
                'reference is "scores", and the loss kto compares mismatched rows, too, which no '
                'file has scores of. Set reference to "model", or with adapters to "adapters".'
            )
        default = default_reference(template.peft, "model")
        return chosen_reference(reference, default, template.peft)
    # Scores made before training are always right.
    return chosen_reference(reference, default_reference(template.peft, "scores"), template.peft)


def _saved_reference(settings: Mapping[str, Any]) -> Reference | None:
    """Return the reference of the run with these hyper-parameters. None: the run had none, or
    trained by no preferences.
    """
    if "reference_model" not in settings or "loss" not in settings:  # only this class has both
        return None
    if settings["loss"] in ("orpo", "simpo"):
        return None
    saved: Reference | None = settings["reference"]
    return saved or default_reference(settings["model"]["init_args"].get("peft"), "scores")
