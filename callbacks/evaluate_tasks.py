"""Tasks of lm-evaluation-harness during a fit."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from megatron_lightning.callbacks.text_callback import TextCallback
from megatron_lightning.data.text.tokenizers import TokenizerType
from megatron_lightning.errors import ConfigError
from megatron_lightning.inference.commands.evaluate import check_installed, drafts_of, sharing_of
from megatron_lightning.inference.engine.engine_options import EngineOptions
from megatron_lightning.inference.engine.own_generate import OwnGenerate
from megatron_lightning.inference.live.live_codec import find_image_prompts


class EvaluateTasks(TextCallback):
    """Evaluate the model on tasks of lm-evaluation-harness at each validation, or every so many
    optimizer steps, with the current weights and on every layout.

    Values are logged as ``task/metric``, so that ``ModelCheckpoint(monitor="hellaswag/acc")`` and
    early stopping see the values. A table is printed. An evaluation leaves the training unchanged.
    With ``EngineOptions(draft_tokens=…)`` the accepted share of drafts is ``draft_acceptance``.

    Args:
        tasks: Names of tasks and groups of tasks.
        every_n_steps: Optimizer steps from one evaluation to the next. None: at each validation.
        limit: Documents of each task, or below 1 the share of documents. None: all.
        num_fewshot: Examples before each document. None: as set by the task.
        apply_chat_template: Whether documents go through the chat template.
        include_path: Folder with YAML files of tasks of your own.
        confirm_run_unsafe_code: Whether tasks may run code written by the model.
        tokenizer_model: The tokenizer. None: the tokenizer saved with the model, or the data
            module's.
        tokenizer_type: sentencepiece, huggingface, json, bytes, null or class_path.
        prefix: Before the names of values.
        options: Sizes of the engine. None: the defaults.

    Raises:
        ConfigError: If a value cannot work, or the harness is not installed.
    """

    def __init__(  # noqa: PLR0917  # every one is a line of a YAML file
        self,
        tasks: list[str],
        every_n_steps: int | None = None,
        limit: float | None = None,
        num_fewshot: int | None = None,
        apply_chat_template: bool = False,
        include_path: str | None = None,
        confirm_run_unsafe_code: bool = False,
        tokenizer_model: str | None = None,
        tokenizer_type: TokenizerType = "sentencepiece",
        prefix: str = "",
        options: EngineOptions | None = None,
    ) -> None:
        if isinstance(tasks, str) or not tasks:
            raise ConfigError(
                f"tasks is {tasks!r}; EvaluateTasks takes a list of names. Set it to one, such as "
                "['hellaswag']."
            )
        super().__init__(every_n_steps, tokenizer_model, tokenizer_type, options)
        check_installed()
        self._settings: dict[str, Any] = {
            "tasks": list(tasks),
            "limit": limit,
            "num_fewshot": num_fewshot,
            "apply_chat_template": apply_chat_template,
            "include_path": include_path,
            "confirm_run_unsafe_code": confirm_run_unsafe_code,
        }
        self._prefix = prefix
        self.values: list[tuple[int, dict[str, float]]] = []
        """Optimizer step, and the values, of each evaluation of this fit."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Begin anew."""
        super().setup(trainer, pl_module, stage)
        self.values = []

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Evaluate, unless every so many steps."""
        self._compute_at_validation(trainer, pl_module)

    def _compute(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        from megatron_lightning.inference.commands import harness

        codec, engine = self._codec_and_engine(trainer, module)
        replicas = sharing_of(engine)
        images = find_image_prompts(module, codec) if isinstance(engine, OwnGenerate) else None
        model = harness.HarnessModel(engine, codec, replicas, images)
        results = harness.evaluate_tasks(model, **self._settings)
        values = {f"{self._prefix}{k}": v for k, v in harness.values_of(results).items()}
        drafts = drafts_of(engine, replicas)
        if drafts.proposed:
            values[f"{self._prefix}draft_acceptance"] = drafts.acceptance
        self.values.append((trainer.global_step, values))
        module.log_dict(values)
        if trainer.is_global_zero:
            print(harness.table_of(results), flush=True)
