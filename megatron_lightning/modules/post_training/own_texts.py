"""Rows with answers that a model in training samples itself, in the place of the data's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any, cast

import lightning.pytorch as pl
import torch
from torch import Tensor

from megatron_lightning.config.value_checks import check_counts
from megatron_lightning.data.rollouts.generation import Generation, Rollout
from megatron_lightning.data.rollouts.seeds import seed_of
from megatron_lightning.errors import ConfigError
from megatron_lightning.inference.engine.own_generate import OwnGenerate
from megatron_lightning.inference.engine.uncached_loop import Sampling
from megatron_lightning.modules.data_modules.run_data_module import RunDataModule
from megatron_lightning.modules.model_facts import ModelFacts
from megatron_lightning.modules.post_training.trained_generation import most_positions
from megatron_lightning.parallel.grid.context import ParallelContext
from megatron_lightning.pipeline.batch.sequence_split import IGNORED_LABEL

Batch = dict[str, Tensor]
_PAD_TO = 64


@dataclass(frozen=True, kw_only=True)
class OwnTexts:
    """Samples answers to the prompts of a share of the steps.

    Args:
        share: Share of the optimizer steps, from 0 to 1.
        temperature: Divisor of the logits in sampling.
        max_completion_length: Most tokens of an answer.
        end_ids: Ids of tokens that end a text. None: those of the model's folder, or of the data's
            tokenizer.
        seed: Seed of the choice of steps, and of the answers.

    Raises:
        ConfigError: If a value cannot work.
    """

    share: float
    temperature: float = 1.0
    max_completion_length: int = 512
    end_ids: Sequence[int] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_counts(self, "max_completion_length")
        if not 0.0 <= self.share <= 1.0:
            raise ConfigError(f"on_policy is {self.share}; set it to a share of the steps, 0 to 1.")

    def is_step(self, step: int) -> bool:
        """Return whether the rows of an optimizer step are sampled."""
        draws = torch.Generator().manual_seed(seed_of(self.seed, "step", step))
        return bool(torch.rand((), generator=draws) < self.share)

    def check(self, strategy: Any, batch: Batch) -> None:
        """Check that answers to the prompts of a batch can be sampled, also in later steps.

        Raises:
            ConfigError: If rows are packed, the strategy has no engine, or the student is a part of
                a pipeline.
        """
        context = getattr(strategy, "context", None)
        if not isinstance(context, ParallelContext):
            raise ConfigError(
                f"on_policy is {self.share}, and a {type(strategy).__name__} has no engine "
                "to sample answers with. Set strategy to a MegatronStrategy."
            )
        if context.pp.size > 1:
            raise ConfigError(
                f"on_policy is {self.share}, and pipeline_model_parallel_size={context.pp.size} "
                "partitions student and teacher as one model, which samples no answers. Set "
                "pipeline_model_parallel_size to 1, or on_policy to 0."
            )
        if "document_ids" in batch:
            raise ConfigError(
                f"on_policy is {self.share}, and the rows are packed, so that an answer would be "
                "sampled behind other documents. Set packing of the data to none."
            )

    def rows(self, trainer: pl.Trainer, model: Any, batch: Batch, number: int) -> Batch:
        """Return the rows of a batch with sampled answers. A collective of a replica.

        Args:
            trainer: The fit.
            model: The model, or this rank's part.
            batch: ``tokens`` and ``labels`` [b, s], shifted. The last trained answer of a row is
                replaced. Rows without a label stay without one.
            number: Of the batch in the fit.
        """
        dp = cast(Any, trainer.strategy).context.dp
        longest = most_positions(model)
        prompts = [prompt_of(*row) for row in zip(batch["tokens"], batch["labels"], strict=True)]
        places = [n for n, prompt in enumerate(prompts) if 0 < len(prompt) <= longest]
        # Rows are dealt out to the replicas in turn, so that a row's seed is that of one process.
        size, first = dp.size, number * dp.size * len(prompts) + dp.rank
        samplings = [
            Sampling(
                max_new_tokens=min(self.max_completion_length, longest + 1 - len(prompts[place])),
                temperature=self.temperature,
                seed=seed_of(self.seed, "row", first + place * size),
            )
            for place in places
        ]
        engine = sampling_engine(trainer.strategy, model, self._ends(trainer))
        texts = engine.continue_each([prompts[place] for place in places], samplings)
        answers: dict[int, list[int]] = {
            place: text.sampled_tokens for place, text in zip(places, texts, strict=True)
        }
        texts_of = [(prompt or [0], answers.get(n, [])) for n, prompt in enumerate(prompts)]
        return padded_rows(trainer, texts_of, longest, batch["tokens"].device)

    def _ends(self, trainer: pl.Trainer) -> Sequence[int]:
        if self.end_ids is not None:
            return self.end_ids
        ends = ModelFacts.of_module(trainer.lightning_module).generation_ends()
        tokenizer = getattr(getattr(trainer, "datamodule", None), "tokenizer", None)
        return ends or (() if tokenizer is None else (tokenizer.end,))


def sampling_engine(strategy: Any, model: Any, stops: Sequence[int]) -> Any:
    """Return the engine of a model in training.

    Args:
        strategy: Of the fit.
        model: The model, or this rank's part.
        stops: Ids of tokens that end a text.

    Raises:
        ConfigError: If replicas with other texts would wait for each other in a forward.
    """
    engine = strategy.engine(model=model, stops=stops)
    replicas = engine.context.dp.size
    if replicas > 1 and isinstance(engine, OwnGenerate) and engine.steps_together:
        raise ConfigError(
            f"answers are sampled on {replicas} replicas by the generate of a "
            f"{type(model).__name__}, whose forward all of them run together (fsdp, or experts "
            "over data ranks), and their texts have different lengths. Set data_parallel to "
            "zero1 and expert_model_parallel_size to 1, or train a GPTLightningModule."
        )
    return engine


def padded_rows(
    trainer: pl.Trainer,
    texts: Sequence[tuple[Sequence[int], Sequence[int]]],
    longest: int,
    device: torch.device,
) -> Batch:
    """Return ``tokens``, ``labels`` (shifted) and ``padding`` [b, s] of prompts with answers.

    Args:
        trainer: The fit, whose layout divides rows.
        texts: Ids of prompts and answers. Answers end at ``longest``.
        longest: Most positions of a row.
        device: Of the result.
    """
    data = getattr(trainer, "datamodule", None)
    divisor = data._row_divisor() if isinstance(data, RunDataModule) else 1
    rows = Generation(
        [_row(prompt, answer[: longest + 1 - len(prompt)]) for prompt, answer in texts]
    )
    batch = rows.batch(
        range(len(texts)), padding=0, multiple=lcm(_PAD_TO, divisor), longest=longest
    )
    return {name: batch[name].to(device) for name in ("tokens", "labels", "padding")}


def prompt_of(tokens: Tensor, labels: Tensor) -> list[int]:
    """Return the ids of a row before its last answer. Empty: the row has none."""
    trained = labels != IGNORED_LABEL
    begins = trained.clone()
    begins[1:] &= ~trained[:-1]
    places = begins.nonzero()
    end = int(places[-1]) + 1 if len(places) else 0
    prompt: list[int] = tokens[:end].tolist()
    return prompt


def _row(prompt: Sequence[int], answer: Sequence[int]) -> Rollout:
    unknown = [None] * len(answer)
    return Rollout(
        group=0,
        prompt_ids=prompt,
        ids=answer,
        mask=[1] * len(answer),
        logprobs=unknown,
        steps=unknown,
        rewards={},
    )
