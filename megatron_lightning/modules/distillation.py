"""Training of a model by the predictions of another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, get_args

import torch
from torch import Tensor, nn

from megatron_lightning.errors import ConfigError, DataError
from megatron_lightning.models.plans.hf_documents import separating_positions
from megatron_lightning.models.teacher_student import DistillationPair, DivergenceKind
from megatron_lightning.models.transformer import GPTModel
from megatron_lightning.modules.language_model import LanguageModule, token_weights
from megatron_lightning.modules.objective import ObjectiveModule, Template, template_of
from megatron_lightning.modules.post_training.own_texts import OwnTexts
from megatron_lightning.pipeline.batch.sequence_split import IGNORED_LABEL
from megatron_lightning.precision.served.qat import described

Batch = dict[str, Tensor]


class DistillationModule(ObjectiveModule):
    """A language model trained by the predictions of a frozen teacher, on batches of
    :class:`FinetuneDataModule` or :class:`PretrainDataModule`.

    The loss is the mean over the counted tokens, as in :class:`LanguageModule`, of

        (1 - label_weight) * divergence + label_weight * cross entropy

    For the divergences see ``layers.divergence``. The teacher may have another size and family. The
    tokenizers must be equal. Logits stay split over tensor-parallel ranks.

    Args:
        model: A :class:`HuggingFaceModule` or a :class:`GPTLightningModule`: the student, adapters,
            optimizer and schedule.
        teacher: The module of the teacher.
        kind: ``forward``: the student covers all that the teacher predicts. ``reverse``: the
            student stays where the teacher predicts something. ``top_k``: forward, from the
            teacher's k largest logits. ``jsd``: the generalized Jensen-Shannon divergence, which
            has no factor of the temperature.
        temperature: Divisor of the logits.
        k: Number of the teacher's largest logits, for top_k. Only these cross pipeline stages.
        label_weight: Weight of the cross entropy with the labels.
        beta: Weight of the teacher for jsd: 0 is KL(teacher, student), 1 is KL(student, teacher).
            Default: 0.5.
        on_policy: Share of the optimizer steps whose last answers the student samples itself, to
            the prompts of the data.
        max_completion_length: Most tokens of such an answer.
        sampling_temperature: Divisor of the logits in sampling.
        end_ids: Ids of tokens that end an answer. Default: those of the model's folder.
        seed: Seed of the choice of steps, and of the answers.

    Raises:
        ConfigError: If values contradict each other.
    """

    sequence_dims: ClassVar[Mapping[str, int]] = LanguageModule.sequence_dims
    shares_vocabulary: ClassVar[bool] = False

    def __init__(
        self,
        model: Template,
        teacher: Template,
        *,
        kind: DivergenceKind = "forward",
        temperature: float = 1.0,
        k: int = 64,
        label_weight: float = 0.0,
        beta: float | None = None,
        on_policy: float = 0.0,
        max_completion_length: int = 512,
        sampling_temperature: float = 1.0,
        end_ids: list[int] | None = None,
        seed: int = 0,
    ) -> None:
        if kind not in get_args(DivergenceKind):
            raise ConfigError(
                f"kind is {kind!r}; must be one of {', '.join(get_args(DivergenceKind))}."
            )
        if temperature <= 0.0:
            raise ConfigError(f"temperature is {temperature}; must be positive.")
        if not 0.0 <= label_weight < 1.0:
            raise ConfigError(
                f"label_weight is {label_weight}; set it to 0 or more, and below 1. At 1 there is "
                "nothing of the teacher in the loss."
            )
        if beta is not None and (kind != "jsd" or not 0.0 <= beta <= 1.0):
            raise ConfigError(
                f"beta is {beta} and kind is {kind}; set beta from 0 to 1, with the kind jsd, or "
                "leave it out."
            )
        teacher = template_of(teacher, "teacher")
        if teacher.qat is not None:
            raise ConfigError(
                f"the teacher has {described(teacher.qat)}, and its predictions are worth most "
                "without rounding: the student learns to come close with rounded weights. Set qat "
                "of the student alone."
            )
        super().__init__(model, teacher)
        self.own_texts = OwnTexts(
            share=on_policy,
            temperature=sampling_temperature,
            max_completion_length=max_completion_length,
            end_ids=end_ids,
            seed=seed,
        )
        """Sampling of the student's answers."""
        self.has_explicit_steps = on_policy > 0
        """Whether steps get full batches and run the pipeline themselves."""
        self._sampled: tuple[Batch, Batch] | None = None  # a batch, and its rows
        self.beta = 0.5 if beta is None else beta
        self.kind: DivergenceKind = kind
        self.temperature = temperature
        self.k = k
        self.label_weight = label_weight
        self.save_settings(
            teacher=self.entry_of(teacher),
            kind=kind,
            temperature=temperature,
            k=k,
            label_weight=label_weight,
            beta=beta,
            on_policy=on_policy,
            max_completion_length=max_completion_length,
            sampling_temperature=sampling_temperature,
            end_ids=end_ids,
            seed=seed,
        )

    def joined(self, models: Any) -> nn.Module:
        """Return teacher and student in one module."""
        student, teacher = models
        return DistillationPair(
            teacher,
            student,
            kind=self.kind,
            temperature=self.temperature,
            k=self.k,
            beta=self.beta,
        )

    def prepare_data(self) -> None:
        """Download the folders, and compare their tokenizers, once a node.

        Raises:
            ConfigError: If a token has another id in the teacher.
        """
        super().prepare_data()
        self.check_tokenizers()

    def check_tokenizers(self) -> None:
        """Check that both folders have tokenizers with the same ids. Models without a folder or a
        tokenizer are not compared.

        Raises:
            ConfigError: If a token has another id in the teacher.
        """
        tokenizers = []
        for template in self.templates():
            if template.model_folder is None:
                return
            try:
                tokenizers.append(template.model_folder.tokenizer())
            except DataError:  # a folder without a tokenizer
                return
        student, teacher = (one.vocabulary for one in tokenizers)
        differing = {
            token
            for token in student.keys() | teacher.keys()
            if student.get(token) != teacher.get(token)
        }
        if differing:
            token = min(differing, key=lambda one: (student.get(one, 1 << 60), one))
            raise ConfigError(
                f"{len(differing)} tokens have another id in the teacher, such as {token!r}: "
                f"{student.get(token, 'none')} in the student, {teacher.get(token, 'none')} in the "
                "teacher. Predictions of two models are compared by ids: use a teacher with the "
                "same tokenizer."
            )

    def num_items(self, batch: Batch) -> Tensor:
        """Return the sum of the tokens' weights, of sampled rows in the place of a batch."""
        if self._sampled is not None and batch is self._sampled[0]:
            batch = self._sampled[1]
        return super().num_items(batch)

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        """Return the mean loss and the sum of the tokens' weights: of a micro-batch, or with
        ``on_policy`` of a batch.
        """
        if not self.has_explicit_steps:
            return super().training_step(batch, batch_idx)
        rows, trainer = batch, self.trainer
        self.own_texts.check(trainer.strategy, batch)
        if self.own_texts.is_step(trainer.global_step):
            number = trainer.fit_loop.total_batch_idx
            rows = self.own_texts.rows(trainer, self.model.trained, batch, number)
            self._sampled = batch, rows
            is_trained = rows["labels"] != IGNORED_LABEL
            self.log("completion_length", is_trained.sum(1).float().mean(), sync_dist=True)
        step = super().training_step
        run = getattr(trainer.strategy, "run_pipeline", None)
        return (
            step(rows, batch_idx) if run is None else run(lambda part: step(part, batch_idx), rows)
        )

    def _loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the weighted mean of the tokens' losses, and the sum of the weights."""
        weights = token_weights(batch)
        labels = batch["labels"].masked_fill(weights == 0, -100) if self.label_weight else None
        divergences, losses = self.model(batch["tokens"], labels, **self._inputs(batch))
        num_items = self.num_items(batch)
        total = torch.where(num_items > 0, num_items, 1)
        loss = (divergences * weights).sum() / total
        if losses is not None:
            label_loss = (losses * weights).sum() / total
            loss = (1 - self.label_weight) * loss + self.label_weight * label_loss
        return loss, num_items

    def _inputs(self, batch: Batch) -> dict[str, Tensor]:
        """Return further inputs of both models."""
        inputs: dict[str, Tensor] = {
            key: batch[key] for key in ("position_ids", "document_ids", "padding") if key in batch
        }
        models = (self.model.frozen, self.model.trained)
        if "document_ids" not in inputs or all(isinstance(one, GPTModel) for one in models):
            return inputs
        context = self.context
        if "position_ids" not in inputs and context is not None and context.cp.size > 1:
            raise ConfigError(
                "the batch has document_ids and no position_ids, and a rank that has a part of a "
                "sequence does not see where its documents begin. Add position_ids that start "
                "again with every document, as FinetuneDataModule does."
            )
        for model in models:
            if not isinstance(model, GPTModel):
                inputs["position_ids"] = separating_positions(
                    model, inputs["document_ids"], inputs.get("position_ids")
                )
        return inputs

    def predict_step(self, batch: Batch, batch_idx: int) -> Any:
        """Refuse a prediction.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            "DistillationModule compares two models, and predicts nothing itself. Export the "
            "student (`megatron-lightning convert export`), and predict by its own module."
        )
