"""Steps of KTO: rows of single answers, and the divergence over mismatched rows of the whole step.

A mismatched row is a prompt with the answer of the row before it, by the rows' numbers in the data,
over all replicas. The first row gets the answer of the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.dropout import evaluated
from megatron_lightning.layers.losses.unpaired_loss import UnpairedLoss
from megatron_lightning.models.teacher_student import ReferencePair
from megatron_lightning.models.token_outputs import losses_and_router_loss
from megatron_lightning.modules.post_training.own_texts import padded_rows, prompt_of
from megatron_lightning.modules.post_training.reference import ReferencedModule
from megatron_lightning.modules.post_training.trained_generation import most_positions
from megatron_lightning.parallel.collectives import (
    all_reduce,
    copy_to_axis,
    reduce_from_axis,
)
from megatron_lightning.parallel.grid.context import ParallelContext
from megatron_lightning.pipeline.batch.sequence_split import IGNORED_LABEL

Batch = dict[str, Tensor]
_KEPT = ("tokens", "labels", "padding", "desirable", "row")


def unpaired_rows(batch: Batch) -> Batch:
    """Return a batch of single answers. Pairs are answers of both kinds.

    Raises:
        ConfigError: If the batch has neither.
    """
    if "chosen" in batch:
        rows = {
            "tokens": torch.cat([batch["chosen"], batch["rejected"]]),
            "labels": torch.cat([batch["chosen_labels"], batch["rejected_labels"]]),
        }
        if "chosen_padding" in batch:
            rows["padding"] = torch.cat([batch["chosen_padding"], batch["rejected_padding"]])
        count = len(batch["chosen"])
        rows["desirable"] = torch.arange(2 * count, device=rows["tokens"].device) < count
        if "pair" in batch:
            rows["row"] = torch.cat([2 * batch["pair"], 2 * batch["pair"] + 1])
        return rows
    if "desirable" not in batch:
        raise ConfigError(
            f"the batch has no desirable [b], but {', '.join(batch)}. The loss kto trains single "
            "answers: set UnpairedDataModule as the data, or PreferenceDataModule, whose pairs are "
            "answers of both kinds."
        )
    return {name: batch[name] for name in _KEPT if name in batch}


def mismatched_rows(
    trainer: Any, context: ParallelContext | None, model: Any, rows: Batch
) -> Batch:
    """Return the prompts of ``rows`` with answers of other rows of the step. A collective of the
    replicas.

    Raises:
        ConfigError: If the step has fewer than two rows, or runs batch after batch.
    """
    if trainer.accumulate_grad_batches > 1:
        raise ConfigError(
            "the loss kto has a mean over all rows of the step, and accumulate_grad_batches="
            f"{trainer.accumulate_grad_batches} runs them one batch after another. Set "
            "accumulate_grad_batches to 1 and the batch size higher; micro_batch_size bounds the "
            "memory."
        )
    texts = [_parts_of(*row) for row in zip(rows["tokens"], rows["labels"], strict=True)]
    rank = 0 if context is None else context.dp.rank
    numbers = rows["row"].tolist() if "row" in rows else [(n, rank) for n in range(len(texts))]
    own = [(number, answer) for number, (_, answer) in zip(numbers, texts, strict=True)]
    everywhere = [own] if context is None else context.dp.all_gather_object(own)
    ordered = sorted((one for part in everywhere for one in part), key=lambda one: one[0])
    if len(ordered) < 2:
        raise ConfigError(
            "the step has one row, and the loss kto compares with answers of other rows. Set the "
            "batch size to 2 or more."
        )
    before = {number: ordered[place - 1][1] for place, (number, _) in enumerate(ordered)}
    mismatched = [
        (prompt, before[number]) for number, (prompt, _) in zip(numbers, texts, strict=True)
    ]
    return padded_rows(trainer, mismatched, most_positions(model), rows["tokens"].device)


def _parts_of(tokens: Tensor, labels: Tensor) -> tuple[Sequence[int], Sequence[int]]:
    """Return the ids of a row's last answer, and those before it."""
    prompt = prompt_of(tokens, labels)
    answer = labels[max(len(prompt) - 1, 0) :]
    return prompt or [int(tokens[0])], answer[answer != IGNORED_LABEL].tolist()


def mean_divergence(differences: Tensor, context: ParallelContext | None) -> Tensor:
    """Return the mean [] over the rows of all replicas, 0 at least. A collective."""
    total = torch.stack([differences.sum(), differences.new_tensor(len(differences))])
    total = total if context is None else all_reduce(total, context.dp)
    return (total[0] / total[1]).clamp(min=0.0)


class UnpairedModule(ReferencedModule):
    """Steps of a module whose loss is of single answers. Without ``has_explicit_steps`` its steps
    are those of the base class.
    """

    has_explicit_steps = False
    """Whether steps get full batches and run the pipeline themselves."""
    _rewards: list[Tensor]  # sums and numbers [2, 2] of the step's micro-batches, by kind

    def num_items(self, batch: Batch) -> Tensor:
        """Return the number of answers."""
        num_rows = len(batch["tokens"]) if "tokens" in batch else 2 * len(batch["chosen"])
        return torch.tensor(num_rows, device=next(iter(batch.values())).device)

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        """Return the mean loss and its weight: of a micro-batch, or of all answers of a batch."""
        step = super().training_step
        if not self.has_explicit_steps:
            return step(batch, batch_idx)
        rows = unpaired_rows(batch)
        policy = self.model.trained if isinstance(self.model, ReferencePair) else self.model
        mismatched = mismatched_rows(self.trainer, self.context, policy, rows)
        now, before = self._evaluated_scores(mismatched)
        if self.uses_adapters:
            before = self._reference_scores(mismatched)
            rows["reference"] = self._reference_scores(rows)
        divergence = mean_divergence(now - before, self.context)
        self.log("kl", divergence)
        rows["divergence"] = divergence.expand(len(rows["tokens"]))
        self._rewards = [rows["divergence"].new_zeros(2, 2)]
        result = self._run(lambda part: step(part, batch_idx), rows)
        self._log_rewards()
        return result

    def _log_rewards(self) -> None:
        """Log the mean reward of each kind of answer, over all rows of the step. A collective."""
        totals = torch.stack(self._rewards).sum(0)
        if self.context is not None:  # the last stage of every replica has them
            totals = all_reduce(all_reduce(totals, self.context.pp), self.context.dp)
        for name, (total, count) in zip(("desirable", "undesirable"), totals, strict=True):
            if count > 0:
                self.log(f"rewards_{name}", total / count)

    def validation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Log ``val_loss``, the mean over all pairs.

        Raises:
            ConfigError: For a loss of single answers.
        """
        if self.has_explicit_steps:
            raise ConfigError(
                "the loss kto compares with other rows of a step, and a validation has none. Leave "
                "the validation data out."
            )
        return super().validation_step(batch, batch_idx)

    def _run(self, function: Callable[[Batch], Any], rows: Batch) -> Any:
        """Run a function on every micro-batch of rows, through the pipeline if there is one."""
        run: Any = getattr(self.trainer.strategy, "run_pipeline", None)
        return function(rows) if run is None else run(function, rows)

    def _reference_scores(self, rows: Batch) -> Tensor:
        """Return the log-probabilities of answers [b] with the adapters of the reference."""
        with self.as_reference():
            return self._evaluated_scores(rows)[0]

    def _evaluated_scores(self, rows: Batch) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities of answers [b] under the model and under a second one,
        without gradients. Without a second model both are the model's.
        """

        def scores(part: Batch) -> dict[str, Tensor]:
            before, now, _ = self._single_scores(part)
            return {"now": now, "before": now if before is None else before}

        with torch.no_grad(), evaluated(self.model):
            found = self._run(scores, rows)
        return found["now"], found["before"]

    def _single_scores(self, rows: Batch) -> tuple[Tensor | None, Tensor, Tensor | None]:
        """Return the log-probabilities of answers [b] under a second model and under the trained
        one, and the balancing loss of an untouched model that has one.
        """
        inputs = {name: rows[name] for name in ("padding",) if name in rows}
        labels = rows["labels"]
        if isinstance(self.model, ReferencePair):
            before, losses = self.model(rows["tokens"], labels, **inputs)
            return self._row_sums(before, labels)[0], self._row_sums(losses, labels)[0], None
        losses, balancing = losses_and_router_loss(self.model, rows["tokens"], labels, **inputs)
        return None, self._row_sums(losses, labels)[0], balancing

    def _row_sums(self, losses: Tensor, labels: Tensor) -> Tensor:
        """Return log-probabilities and numbers of tokens of answers [2, b]."""
        is_counted = labels != IGNORED_LABEL
        sums = torch.stack([-(losses * is_counted).sum(-1), is_counted.sum(-1).to(losses.dtype)])
        context = self.context
        if context is not None and context.cp.size > 1:
            # Ranks share sequences. Every rank computes the same loss, and gradients are means.
            sums = copy_to_axis(reduce_from_axis(sums, context.cp), context.cp)
        return sums

    def _unpaired_loss(self, rows: Batch, loss: UnpairedLoss) -> tuple[Tensor, Tensor]:
        """Return the mean loss of single answers, and their number."""
        reference, policy, balancing = self._single_scores(rows)
        difference = policy - (rows["reference"] if reference is None else reference)
        desirable = rows["desirable"]
        mean = loss(difference, desirable, rows["divergence"]).mean()
        chosen = torch.stack([desirable, ~desirable]).to(difference.dtype)
        rewards = loss.beta * difference.detach() * chosen
        self._rewards.append(torch.stack([rewards.sum(1), chosen.sum(1)], 1))
        return mean if balancing is None else mean + balancing, self.num_items(rows)
