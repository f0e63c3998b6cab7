"""``megatron-lightning evaluate``: tasks of lm-evaluation-harness with a trained model."""

from __future__ import annotations

import sys
from typing import Any

from megatron_lightning.inference.commands.load import image_prompts_of
from megatron_lightning.inference.commands.model_options import ModelOptions
from megatron_lightning.inference.commands.text_codec import Codec
from megatron_lightning.inference.commands.text_job import ModelJob
from megatron_lightning.inference.engine.keys.prefix_cache import PrefixCounts
from megatron_lightning.inference.engine.own_generate import OwnGenerate
from megatron_lightning.inference.engine.request_batch import DraftCounts
from megatron_lightning.inference.engine.text_model import TextModel
from megatron_lightning.optional import require
from megatron_lightning.parallel.grid.context import ALONE, AxisGroup


def evaluate(  # noqa: PLR0917  # every argument is an option of the command line
    model: ModelOptions,
    tasks: list[str] | str,
    limit: float | None = None,
    num_fewshot: int | None = None,
    apply_chat_template: bool = False,
    include_path: str | None = None,
    output: str | None = None,
    confirm_run_unsafe_code: bool = False,
    data_parallel_size: int = 1,
    json: bool = False,
) -> str | None:
    """Evaluate a trained model on tasks of lm-evaluation-harness.

    Nothing is converted: the checkpoint may come from any layout. Tasks shipped with the harness
    read data sets of the Hugging Face hub. Tasks of your own may read local files, and need no
    network with HF_HUB_OFFLINE=1 and HF_DATASETS_OFFLINE=1.

    Args:
        model: The model, its tokenizer, layout and engine.
        tasks: Names of tasks and groups of tasks.
        limit: Documents of each task, or a fraction below 1. Default: all.
        num_fewshot: Examples before each document. Default: the task's own number.
        apply_chat_template: Send documents through the chat template.
        include_path: Folder with YAML files of tasks of your own.
        output: File for the results as JSON.
        confirm_run_unsafe_code: Let tasks run code written by the model.
        data_parallel_size: Number of replicas. The replicas share the documents.
        json: Print the harness's results as JSON in the place of its table.

    Returns:
        The harness's table, or its results. Nothing on ranks of torchrun other than the first.

    Raises:
        ConfigError: If the values cannot work together, or the harness is not installed.
        CheckpointError: If the checkpoint cannot be read.
        DataError: If the tokenizer cannot be read.
    """
    check_installed()
    job = ModelJob(model, num_replicas=data_parallel_size, runs_replicas=True)
    # Checked here, before processes start.
    job.check()
    settings = {
        "tasks": [tasks] if isinstance(tasks, str) else tasks,
        "limit": limit,
        "num_fewshot": num_fewshot,
        "apply_chat_template": apply_chat_template,
        "include_path": include_path,
        "confirm_run_unsafe_code": confirm_run_unsafe_code,
    }
    table: str | None = job.run(_evaluate, (model.checkpoint, settings, output, json))
    return table


def check_installed() -> None:
    """Check that the harness is installed.

    Raises:
        ConfigError: If the harness is not installed.
    """
    require("lm_eval", "evaluation by lm-evaluation-harness")


def sharing_of(engine: TextModel) -> AxisGroup:
    """Return the ranks with the same place in other replicas. Each rank computes a share of the
    texts.

    With a model's own ``generate`` all ranks compute all texts.
    """
    return ALONE if isinstance(engine, OwnGenerate) else engine.context.dp_cp


def drafts_of(engine: TextModel, replicas: AxisGroup) -> DraftCounts:
    """Return the drafts of all texts so far, of all replicas. A collective of the replicas."""
    drafts = DraftCounts()
    for rank_counts in replicas.all_gather_object(engine.draft_counts):
        drafts.add(rank_counts.proposed, rank_counts.accepted)
    return drafts


def prefixes_of(engine: TextModel, replicas: AxisGroup) -> PrefixCounts:
    """Return the tokens of all prompts so far, of all replicas. A collective of the replicas."""
    prefixes = PrefixCounts()
    for rank_counts in replicas.all_gather_object(engine.prefix_counts):
        prefixes.add(rank_counts.tokens, rank_counts.reused)
    return prefixes


def _evaluate(engine: TextModel, codec: Codec, arguments: Any) -> str:
    from megatron_lightning.inference.commands import harness

    checkpoint, settings, output, as_json = arguments
    replicas = sharing_of(engine)
    images = image_prompts_of(engine, checkpoint, codec)
    model = harness.HarnessModel(engine, codec, replicas, images)
    results = harness.evaluate_tasks(model, **settings)
    drafts, prefixes = drafts_of(engine, replicas), prefixes_of(engine, replicas)
    if engine.context.rank == 0:
        said = [str(drafts)] if drafts.proposed else []
        said += [str(prefixes)] if prefixes.reused else []
        print("\n".join(said), end="\n" if said else "", file=sys.stderr, flush=True)
    if output is not None and engine.context.rank == 0:
        harness.write_results(results, output)
    return harness.json_of(results) if as_json else harness.table_of(results)
