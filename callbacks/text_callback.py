"""Common part of callbacks for text and scores: when to compute, the tokenizer and the engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import lightning.pytorch as pl

from megatron_lightning.data.text.tokenizers import TokenizerType
from megatron_lightning.errors import ConfigError
from megatron_lightning.inference.commands.text_codec import Codec
from megatron_lightning.inference.engine.engine_options import EngineOptions
from megatron_lightning.inference.engine.own_generate import OwnGenerate
from megatron_lightning.inference.engine.text_engine import Engine
from megatron_lightning.inference.live.live_codec import find_codec
from megatron_lightning.inference.live.live_engine import find_text_model
from megatron_lightning.models.transformer import GPTModel
from megatron_lightning.strategies.megatron import MegatronStrategy


class TextCallback(pl.Callback, ABC):
    """Compute texts or scores at each validation, or every so many optimizer steps.

    Args:
        every_n_steps: Optimizer steps from one computation to the next. None: at each validation.
        tokenizer_model: The tokenizer. None: the tokenizer saved with the model, or the data
            module's.
        tokenizer_type: sentencepiece, huggingface, json, bytes, null or class_path.
        options: Sizes of the engine. None: the defaults.

    Raises:
        ConfigError: If ``every_n_steps`` is below 1.
    """

    def __init__(
        self,
        every_n_steps: int | None,
        tokenizer_model: str | None,
        tokenizer_type: TokenizerType,
        options: EngineOptions | None,
    ) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise ConfigError(f"every_n_steps is {every_n_steps}. Set it to 1 or more.")
        self._every_n_steps = every_n_steps
        self._tokenizer = tokenizer_model, tokenizer_type
        self._options = options
        self._codec: Codec | None = None
        self._last_step = -1

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Forget the tokenizer and the last step of an earlier run."""
        self._codec = None
        self._last_step = -1

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any, **__: Any
    ) -> None:
        """Compute every so many optimizer steps."""
        step = trainer.global_step
        if self._every_n_steps is None or step % self._every_n_steps or step == self._last_step:
            return
        self._last_step = step
        if step:
            self._compute(trainer, pl_module)

    def _compute_at_validation(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Compute, unless every so many steps."""
        if self._every_n_steps is None and not trainer.sanity_checking:
            self._compute(trainer, module)

    @abstractmethod
    def _compute(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Compute and log the texts or scores of the current weights."""

    def _codec_and_engine(
        self, trainer: pl.Trainer, module: pl.LightningModule
    ) -> tuple[Codec, Engine | OwnGenerate]:
        """Return the tokenizer's codec, loaded once a run, and an engine for the current weights.

        Raises:
            ConfigError: If no tokenizer is found, or the model cannot write text on this layout.
        """
        if self._codec is None:
            data = getattr(trainer, "datamodule", None)
            self._codec = find_codec(module, data, *self._tokenizer)
        return self._codec, _text_engine(trainer, module, self._codec, self._options)


def _text_engine(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    codec: Codec,
    options: EngineOptions | None,
) -> Engine | OwnGenerate:
    """Return an engine for the model of a running Trainer, under any strategy.

    Raises:
        ConfigError: If no model can write text on this layout.
    """
    if isinstance(trainer.strategy, MegatronStrategy):
        return trainer.strategy.engine(options, stops=codec.stops, decode=codec.decode)
    model = find_text_model(module)
    if not isinstance(model, GPTModel):
        raise ConfigError(
            f"{type(model).__name__} writes text under MegatronStrategy only. Set "
            "strategy=MegatronStrategy() (on one device, too)."
        )
    return Engine.of(
        model,
        options=options,
        stops=codec.stops,
        decode=codec.decode,
        keeps_cache=False,
        forward_context=trainer.precision_plugin.val_step_context,
    )
