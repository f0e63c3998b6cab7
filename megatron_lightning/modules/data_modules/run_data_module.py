"""Base of the LightningDataModules: tells plain data of the Trainer and of its module."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn

from megatron_lightning.data.run_data import RunData
from megatron_lightning.modules.model_facts import ModelFacts

_QUANTIZED = 32
"""Tokens of a rank that recipes with scaled blocks multiply at once."""


class RunDataModule(RunData, pl.LightningDataModule):
    """Face of :class:`RunData` for Lightning. A subclass has this class first among its bases, and
    the class of its data behind.
    """

    _module: pl.LightningModule | None = None

    def use_model(self, model: pl.LightningModule | None) -> None:
        """Read missing settings, such as tokenizer or vocabulary, from a module's model."""
        self._module = model

    def _run_module(self) -> pl.LightningModule | None:
        """Return the module set by :meth:`use_model`, or else the Trainer's."""
        if self._module is None and self.trainer is not None:
            return self.trainer.lightning_module
        return self._module

    @property
    def _has_model(self) -> bool:
        return self._module is not None

    def _model(self) -> ModelFacts:
        return ModelFacts.of_module(self._run_module())

    def _stage(self) -> str:
        stage = None if self.trainer is None else self.trainer.state.fn
        return "fit" if stage is None else TrainerFn(stage).value

    def _consumed_samples(self) -> int | None:
        return getattr(self._strategy(), "consumed_samples", None)

    def _num_replicas(self) -> int:
        shares = getattr(self._strategy(), "distributed_sampler_kwargs", None) or {}
        return int(shares.get("num_replicas", 1))

    def _num_accumulated(self) -> int:
        return 1 if self.trainer is None else self.trainer.accumulate_grad_batches

    def _row_divisor(self) -> int:
        layout = getattr(self._strategy(), "layout", None)
        # Context parallelism divides rows into two chunks a rank, tensor parallelism each chunk.
        divisor = 1 if layout is None else 2 * layout.cp * layout.tp
        is_quantized = hasattr(getattr(self.trainer, "precision_plugin", None), "recipe")
        return divisor * _QUANTIZED if is_quantized else divisor

    def _is_compiled(self) -> bool:
        options = getattr(self._strategy(), "options", None)
        return getattr(options, "compile", None) is not None

    def _strategy(self) -> Any:
        return None if self.trainer is None else self.trainer.strategy

    def _warn(self, text: str) -> None:
        rank_zero_warn(text)
