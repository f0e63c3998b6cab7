"""Training of a policy: a language model, on texts that it has sampled itself.

A step gets the rows of an update and computes before its loss, by pipeline runs without gradients,
what belongs to the whole update: scores of the reference, and the entropy beyond which tokens are
trained. Losses are sums by one weight, tokens or rows, so that every split into micro-batches,
accumulated batches and ranks has the same gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import lcm
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from megatron_lightning.checkpoint.format.files import new_identifier
from megatron_lightning.data.flat_options import takes
from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.dropout import evaluated
from megatron_lightning.layers.losses.policy_loss import WHOLE_ROWS, RowParts
from megatron_lightning.layers.step_report import log_reports
from megatron_lightning.models.teacher_student import ReferencePair
from megatron_lightning.models.token_outputs import (
    entropies_of,
    losses_and_router_loss,
    set_temperature,
    token_losses_of,
)
from megatron_lightning.modules.objective import template_of
from megatron_lightning.modules.post_training.generators.policy_fit import PolicyFit
from megatron_lightning.modules.post_training.policy_inputs import (
    check_plain_loss,
    checked_rows,
    quantile,
    weighed_sum,
)
from megatron_lightning.modules.post_training.policy_options import PolicyOptions
from megatron_lightning.modules.post_training.reference import (
    ReferencedModule,
    chosen_reference,
    default_reference,
)
from megatron_lightning.modules.post_training.rollout_data import RolloutDataModule
from megatron_lightning.modules.post_training.sampling import RolloutSampler
from megatron_lightning.modules.post_training.shared_rows import ContextRows, gather_ragged
from megatron_lightning.modules.post_training.trained_generation import (
    ENTRY,
    TrainedGeneration,
    filled,
    most_positions,
)
from megatron_lightning.parallel.collectives import all_reduce
from megatron_lightning.pipeline.batch.sequence_split import IGNORED_LABEL

Batch = dict[str, Tensor]


class PolicyModule(ReferencedModule):
    """A language model trained by the advantages of its own texts (GRPO and its kin). For the
    losses see ``layers.losses.policy_loss``.

    Batches hold ``tokens`` and ``labels`` [b, s] (shifted already, -100 for what was not sampled:
    prompts, tools' answers, padding) and ``advantages`` [b]. They may hold ``padding`` [b, s],
    ``logprobs`` [b, s] of the sampler, ``old_logprobs`` [b, s] (default: those of the update
    itself), ``ref_logprobs`` [b, s] and ``truncated`` [b].

    Under MegatronStrategy the step needs
    ``pipeline_options=PipelineOptions(explicit_steps=True)``.

    The arguments are the fields of :class:`PolicyOptions`.

    Raises:
        ConfigError: If values contradict each other.
    """

    has_explicit_steps: ClassVar[bool] = True
    """Whether steps get full batches and run the pipeline themselves."""
    sequence_dims: ClassVar[Mapping[str, int]] = dict.fromkeys(
        (
            "tokens",
            "labels",
            "padding",
            "position_ids",
            "logprobs",
            "old_logprobs",
            "ref_logprobs",
            "trains",
        ),
        1,
    )

    @takes(PolicyOptions)
    def __init__(self, options: PolicyOptions) -> None:
        template = template_of(options.model, "model")
        reference = None
        if options.beta:
            default = default_reference(template.peft, "model")
            reference = chosen_reference(options.reference, default, template.peft)
        # By its name: Lightning looks for all arguments in frames of methods that call super().
        ReferencedModule.__init__(
            self, template, reference, options.reference_model, dropout=options.dropout
        )
        self.policy = options
        """The loss, and the options of its inputs."""
        self._rows: Batch = {}  # of the current step
        self._generation: TrainedGeneration | None = None
        self._sampler: RolloutSampler | None = None  # of the current fit
        self._resumed: Mapping[str, Any] = {}  # state of the generation in a checkpoint
        self._logged: set[str] = set()  # names of the values of this fit's generations
        self.save_settings(reference_model=self.entry_of(self._second), **options.plain())

    def joined(self, models: Any) -> nn.Module:
        """Return the trained model, with a frozen reference both in one module. Their losses have
        the temperature.

        Raises:
            ConfigError: If a loss is no log-probability.
        """
        for model in models:
            check_plain_loss(model)
            set_temperature(model, self.policy.temperature)
        return super().joined(models)

    # ------------------------------------------------------------------------------------ the steps

    def num_items(self, batch: Batch) -> Tensor:
        """Return the weight of rows: tokens, or rows."""
        rows = batch if "labels" in batch else self._rows
        return self.policy.weight(rows["labels"] != IGNORED_LABEL, self._parts)

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        """Return the mean loss of an update's rows and their weight."""
        self._rows = self._prepared(self._rows_of(batch))
        return self._run(self._policy_loss, self._rows)

    def validation_step(self, batch: Batch, batch_idx: int) -> Any:
        """Refuse a validation.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            "PolicyModule has no validation: the loss of a policy says nothing about rows of other "
            "weights. Leave the validation data out, and follow the reward in training."
        )

    def _run(self, function: Callable[[Batch], Any], rows: Batch) -> Any:
        """Run a function on every micro-batch of rows, through the pipeline if there is one."""
        strategy = None if self._trainer is None else self.trainer.strategy
        run: Callable[..., Any] | None = getattr(strategy, "run_pipeline", None)
        return function(rows) if run is None else run(function, rows)

    @property
    def _parts(self) -> RowParts:
        """Parts of rows on this rank."""
        context = self.context
        return WHOLE_ROWS if context is None or context.cp.size == 1 else ContextRows(context.cp)

    @property
    def _trained(self) -> Any:
        """The trained model."""
        return self.model.trained if isinstance(self.model, ReferencePair) else self.model

    def _rows_of(self, batch: Batch) -> Batch:
        """Return the rows of an update. Batches of :class:`RolloutDataModule` name their places."""
        if "places" not in batch:
            return batch
        numbers, places = batch["places"].t().tolist()
        number = self._data.number_of(numbers[0], self.current_epoch)
        if self._generation is None or self._generation.number != number:
            self._generation = self._begun(number)
        values = self._generation.statistics()
        # Lightning repeats the last value of a name that a step does not log. 0, as statistics have
        # for what no row has: EarlyStopping ends a fit by a value that is not finite.
        gone = dict.fromkeys(self._logged - values.keys(), 0.0)
        self._logged |= values.keys()
        for name, value in (gone | values).items():
            self.log(name, value, sync_dist=True, prog_bar=name == "reward")
        generation = self._generation
        numbers = generation.texts_of(places)
        count = len(numbers)
        if len(generation.rows.texts) > len(generation.rows.rows) and self.context is not None:
            largest = torch.tensor(count, device=self.device)
            count = int(all_reduce(largest, self.context.dp, "max"))
        return self._batch_of(generation, numbers, count)

    def _batch_of(self, generation: TrainedGeneration, numbers: Sequence[int], count: int) -> Batch:
        """Return texts as a batch of ``count`` rows."""
        data = self._data
        rows = generation.batch(
            numbers,
            step=self.trainer.global_step,
            multiple=lcm(data.options.pad_to, data.row_divisor),
            longest=most_positions(self._trained),
        )
        return {name: x.to(self.device) for name, x in filled(rows, count).items()}

    def _begun(self, number: int) -> TrainedGeneration:
        """Return a generation, with scores of its texts if several updates share it."""
        data, step = self._data, self.trainer.global_step
        is_resumed = self._resumed.get("number") == number
        sampler = None
        if data.samples:
            if data.run_folder is None:
                own = self._resumed.get("folder")
                data.run_folder = own or self._shared(data.new_folder)
            if not is_resumed:
                sampler = self._sampler_of_fit(data)
        if sampler is None:
            rows = data.generation(number)
        else:
            rows = sampler.sample(number)
            if self.trainer.is_global_zero:
                data.write(number, rows)
        generation = TrainedGeneration.begin(data, number, rows, self.policy, step)
        if sampler is not None:
            generation.sampling = sampler.statistics
        if is_resumed:
            generation.resume(self._resumed)
        else:
            generation.old_logprobs = self._old_scores(generation)
        self._resumed = {}
        return generation

    def _sampler_of_fit(self, data: RolloutDataModule) -> RolloutSampler:
        if self._sampler is None:
            model, run = self._trained, self._shared(new_identifier)
            fit = PolicyFit(
                trainer=self.trainer,
                data=data,
                policy=self.policy,
                model=model,
                longest=most_positions(model),
                run=run,
            )
            self._sampler = RolloutSampler(fit)
        return self._sampler

    def setup(self, stage: str) -> None:
        """Forget the rows of the fit before."""
        if stage == "fit":
            self._generation, self._resumed, self._logged = None, {}, set()
        super().setup(stage)

    def teardown(self, stage: str) -> None:
        """End the sampler, which belongs to a fit."""
        self.close_sampler()
        super().teardown(stage)

    def close_sampler(self, *, has_failed: bool = False) -> None:
        """End the sampler of a fit."""
        if self._sampler is not None:
            self._sampler.close(has_failed=has_failed)
        self._sampler = None

    def _shared(self, make: Callable[[], str]) -> str:
        """Return what ``make`` returns on the first rank, which alone calls it."""
        made, context = make() if self.trainer.is_global_zero else "", self.context
        if context is not None:  # not over the world, whose collectives in steps are refused
            for group in (context.dp, context.tp, context.cp, context.pp):
                made = group.broadcast_object(made)
        return made

    def _old_scores(self, generation: TrainedGeneration) -> list[Tensor] | None:
        """Return the log-probabilities of all rows, if several updates share the generation."""
        context, count = self.context, len(generation.rows.texts)
        num_replicas = self.trainer.world_size if context is None else context.dp.size
        rank = self.trainer.global_rank if context is None else context.dp.rank
        update = self._data.batch_size * num_replicas * self.trainer.accumulate_grad_batches
        if len(generation.rows.rows) * self.policy.num_iterations <= update:
            return None
        # Equally many on each replica.
        share = -(-count // num_replicas)
        own = self._scores_of(
            generation, [min(rank + n * num_replicas, count - 1) for n in range(share)]
        )
        everywhere = [own] if context is None else context.dp.all_gather_object(own)
        scores = {place: one for part in everywhere for place, one in part.items()}
        return [scores.get(place, torch.zeros(0)) for place in range(count)]

    def _scores_of(
        self, generation: TrainedGeneration, numbers: Sequence[int]
    ) -> dict[int, Tensor]:
        """Return the log-probabilities [length - 1] of texts by their numbers."""
        found = {}
        for start in range(0, len(numbers), self._data.batch_size):
            chosen = numbers[start : start + self._data.batch_size]
            batch = self._batch_of(generation, chosen, len(chosen))
            scores = self._values(batch)["logprobs"].cpu()
            for number, one in zip(chosen, scores, strict=True):
                found[number] = one[: len(generation.rows.texts[number]) - 1].clone()
        return found

    @property
    def _data(self) -> RolloutDataModule:
        data = getattr(self.trainer, "datamodule", None)
        if not isinstance(data, RolloutDataModule):
            raise ConfigError(
                "the batch names rows of RolloutDataModule, and the Trainer does not have it. Call "
                "trainer.fit(module, datamodule=...)."
            )
        return data

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the scores before the updates of the current generation, for a resume."""
        super().on_save_checkpoint(checkpoint)
        if self._generation is not None:
            folder = self._data.run_folder
            checkpoint[ENTRY] = {**self._generation.state(), "folder": folder}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the scores before the updates of the current generation."""
        super().on_load_checkpoint(checkpoint)
        self._resumed, self._generation = checkpoint.get(ENTRY, {}), None

    def _prepared(self, batch: Batch) -> Batch:
        """Return the rows of an update with all that its loss reads."""
        rows = checked_rows(batch, self.policy)
        if self.uses_adapters:
            with self.as_reference():
                rows["ref_logprobs"] = self._values(rows)["logprobs"]
        if self.policy.top_entropy_quantile < 1.0:
            rows["trains"] = self._of_high_entropy(rows)
        return rows

    def _of_high_entropy(self, rows: Batch) -> Tensor:
        """Return which tokens [b, s] have an entropy in the upper part of all replicas' tokens."""
        if self._trainer is not None and self.trainer.accumulate_grad_batches > 1:
            raise ConfigError(
                f"top_entropy_quantile is {self.policy.top_entropy_quantile}, a statistic of the "
                f"update, and accumulate_grad_batches={self.trainer.accumulate_grad_batches} runs "
                "its rows one batch after another. Set accumulate_grad_batches to 1 and the batch "
                "size higher; micro_batch_size bounds the memory."
            )
        entropies, mask = self._values(rows)["entropies"], rows["labels"] != IGNORED_LABEL
        group = None if self.context is None else self.context.dp
        everywhere = gather_ragged(entropies[mask], group)
        if not len(everywhere):
            return mask
        rank = 1.0 - self.policy.top_entropy_quantile
        return (entropies >= quantile(everywhere, rank)) & mask

    def _values(self, rows: Batch) -> dict[str, Tensor]:
        """Return log-probabilities and entropies [b, s] of rows, without gradients and dropout."""

        def values(part: Batch) -> dict[str, Tensor]:
            with entropies_of(self._trained) as entropies:
                losses = self._token_scores(part)[1]
            return {"logprobs": -losses, "entropies": entropies.of(part["labels"]).to(losses)}

        with torch.no_grad(), evaluated(self.model):
            found: dict[str, Tensor] = self._run(values, rows)
        return found

    def _token_scores(self, rows: Batch) -> tuple[Tensor | None, Tensor, Tensor | None]:
        """Return token losses [b, s] of the reference, if it is in the model, and of the policy,
        and the balancing loss of an untouched model that has one.
        """
        inputs = self._inputs(rows) | {n: rows[n] for n in ("padding",) if n in rows}
        if isinstance(self.model, ReferencePair):
            inputs.pop("position_ids", None)
            before, losses = self.model(rows["tokens"], rows["labels"], **inputs)
            return before, losses, None
        return None, *losses_and_router_loss(self.model, rows["tokens"], rows["labels"], **inputs)

    def _policy_loss(self, rows: Batch) -> dict[str, Tensor]:
        """Return the mean loss of a micro-batch and its weight."""
        with entropies_of(self._trained) as entropies:
            before, losses, balancing = self._token_scores(rows)
        scores = {name: x for name, x in rows.items() if name not in ("tokens", "labels")}
        scores["mask"] = rows["labels"] != IGNORED_LABEL
        if before is not None:
            scores["ref_logprobs"] = -before
        total, weight = self.policy(-losses, scores, self._parts)
        loss = total / torch.where(weight > 0, weight, 1.0)
        if self._trainer is not None:
            self._observe(-losses.detach(), entropies.of(rows["labels"]), scores)
            self.log("train_loss", loss.detach(), prog_bar=True, sync_dist=True)
            if balancing is not None:
                self.log("aux_loss", balancing.detach(), sync_dist=True)
            log_reports(self, loss)
        loss = loss if balancing is None else loss + balancing
        return {"loss": loss, "num_items": weight}

    @torch.no_grad()
    def _observe(self, logprobs: Tensor, entropies: Tensor, scores: Mapping[str, Tensor]) -> None:
        """Log means over the tokens, weighed as the loss weighs them."""
        policy, parts = self.policy, self._parts
        terms = policy.terms(logprobs, scores, parts)
        values = {"entropy": entropies}
        if policy.beta:
            values["kl"] = policy.divergence(terms, scores["ref_logprobs"])
        ratio, sign = terms.ratio.expand_as(logprobs), terms.advantages
        if policy.loss_type not in ("sapo", "vespo"):
            values["clip_high"] = (ratio > policy.largest_ratio) & (sign > 0)
        if policy.loss_type not in ("sapo", "vespo", "cispo"):
            values["clip_low"] = (ratio < 1 - policy.epsilon) & (sign < 0)
        if "logprobs" in scores:
            old = scores.get("old_logprobs", logprobs)
            difference = ((old - scores["logprobs"]) * terms.mask).nan_to_num(0.0).abs()
            values["sampler_difference"] = difference
            largest = difference.max() if difference.numel() else difference.sum()
            self.log("sampler_difference_max", largest, reduce_fx="max", sync_dist=True)
        weight = policy.weight(scores["mask"], parts)
        for name, value in values.items():
            mean = weighed_sum(policy, value, terms) / torch.where(weight > 0, weight, 1.0)
            self.log(name, mean, sync_dist=True)

    def predict_step(self, batch: Batch, batch_idx: int) -> Any:
        """Return the log-probabilities [b, s] of the labels."""
        return self._run(self._logprobs, batch)

    def _logprobs(self, rows: Batch) -> Tensor:
        if isinstance(self.model, ReferencePair):
            return -self._token_scores(rows)[1]
        return -token_losses_of(self.model, rows["tokens"], rows["labels"], **self._inputs(rows))
