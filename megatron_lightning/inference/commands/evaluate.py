"""``megatron-lightning evaluate``: tasks of lm-evaluation-harness with a trained model."""

from __future__ import annotations

import sys
from typing import Any

from megatron_lightning.data.text.tokenizers import TokenizerType
from megatron_lightning.inference.commands.load import Dtype
from megatron_lightning.inference.commands.text_codec import Codec
from megatron_lightning.inference.commands.text_job import ModelJob
from megatron_lightning.inference.engine.own_generate import OwnGenerate
from megatron_lightning.inference.engine.request_batch import DraftCounts
from megatron_lightning.inference.engine.text_model import TextModel
from megatron_lightning.optional import require
from megatron_lightning.parallel.grid.context import ALONE, AxisGroup


def evaluate(  # noqa: PLR0917  # every argument is an option of the command line
    checkpoint: str,
    tasks: list[str] | str,
    limit: float | None = None,
    num_fewshot: int | None = None,
    apply_chat_template: bool = False,
    include_path: str | None = None,
    output: str | None = None,
    confirm_run_unsafe_code: bool = False,
    tokenizer_model: str | None = None,
    tokenizer_type: TokenizerType = "sentencepiece",
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int = 1,
    data_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    expert_tensor_parallel_size: int | None = None,
    pipeline_schedule: str | list[str] = "auto",
    device: str = "auto",
    dtype: Dtype = "float32",
    max_tokens: int = 512,
    max_requests: int = 64,
    cache_gib: float = 1.0,
    adapters: str | None = None,
    draft_tokens: int = 0,
) -> str | None:
    """Evaluate a trained model on tasks of lm-evaluation-harness.

    Nothing is converted: the checkpoint may come from any layout. Tasks shipped with the harness
    read data sets of the Hugging Face hub. Tasks of your own may read local files, and need no
    network with HF_HUB_OFFLINE=1 and HF_DATASETS_OFFLINE=1.

    Args:
        checkpoint: Checkpoint directory, plain Lightning .ckpt file, Hugging Face folder, or Hub
            id.
        tasks: Names of tasks and groups of tasks.
        limit: Documents of each task, or a fraction below 1. Default: all.
        num_fewshot: Examples before each document. Default: the task's own number.
        apply_chat_template: Send documents through the chat template.
        include_path: Folder with YAML files of tasks of your own.
        output: File for the results as JSON.
        confirm_run_unsafe_code: Let tasks run code written by the model.
        tokenizer_model: The tokenizer of the training data. Default: the tokenizer saved with the
            model.
        tokenizer_type: sentencepiece, huggingface, json, bytes, null or class_path.
        tensor_model_parallel_size: Ranks to split each layer's matrices over.
        pipeline_model_parallel_size: Ranks to split the layers over, as stages.
        virtual_pipeline_model_parallel_size: Stages on each pipeline rank.
        data_parallel_size: Number of replicas. The replicas share the documents.
        expert_model_parallel_size: Ranks to divide the experts over. Experts use the tensor
            parallel ranks: set expert_tensor_parallel_size to 1, or reduce
            expert_tensor_parallel_size by the same factor.
        expert_tensor_parallel_size: Ranks to split each expert's matrices over. Default: the tensor
            parallel size.
        pipeline_schedule: Schedule as in training. Determines the stages of each rank.
        device: cpu, cuda, or auto (cuda if available).
        dtype: Dtype of the weights: float32, bfloat16 or float16.
        max_tokens: Tokens of a step over all texts. Longer prompts are computed in chunks.
        max_requests: Texts computed at the same time. Further texts wait.
        cache_gib: GiB for keys and values on each rank, at most.
        adapters: Folder of peft, or checkpoint, with adapters for the model.
        draft_tokens: Tokens drafted for each text in a step, by as many layers of multi-token
            prediction, and verified by the model. The texts are the same. 0: no drafts.

    Returns:
        The harness's table. Nothing on ranks of torchrun other than the first.

    Raises:
        ConfigError: If the values cannot work together, or the harness is not installed.
        CheckpointError: If the checkpoint cannot be read.
        DataError: If the tokenizer cannot be read.
    """
    check_installed()
    job = ModelJob(
        checkpoint=checkpoint,
        adapters=adapters,
        tokenizer_model=tokenizer_model,
        tokenizer_type=tokenizer_type,
        tensor_model_parallel_size=tensor_model_parallel_size,
        pipeline_model_parallel_size=pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=virtual_pipeline_model_parallel_size,
        expert_model_parallel_size=expert_model_parallel_size,
        expert_tensor_parallel_size=expert_tensor_parallel_size,
        pipeline_schedule=pipeline_schedule,
        device=device,
        dtype=dtype,
        max_tokens=max_tokens,
        max_requests=max_requests,
        cache_gib=cache_gib,
        draft_tokens=draft_tokens,
        num_replicas=data_parallel_size,
        runs_replicas=True,
    )
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
    table: str | None = job.run(_evaluate, (settings, output))
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


def _evaluate(engine: TextModel, codec: Codec, arguments: Any) -> str:
    from megatron_lightning.inference.commands import harness

    settings, output = arguments
    replicas = sharing_of(engine)
    model = harness.HarnessModel(engine, codec, replicas)
    results = harness.evaluate_tasks(model, **settings)
    drafts = drafts_of(engine, replicas)
    if drafts.proposed and engine.context.rank == 0:
        print(drafts, file=sys.stderr, flush=True)
    if output is not None and engine.context.rank == 0:
        harness.write_results(results, output)
    return harness.table_of(results)
