"""``megatron-lightning evaluate``: tasks of lm-evaluation-harness with a trained model."""

from __future__ import annotations

from typing import Any

from megatron_lightning.data.tokenizers import TokenizerType
from megatron_lightning.errors import ConfigError
from megatron_lightning.inference.job import ModelJob
from megatron_lightning.inference.load import Dtype, TextModel
from megatron_lightning.inference.options import EngineOptions
from megatron_lightning.inference.own_generate import OwnGenerate
from megatron_lightning.inference.text import Codec
from megatron_lightning.parallel.context import ALONE, AxisGroup
from megatron_lightning.parallel.layout import ParallelLayout


def evaluate(  # noqa: PLR0917  # every one is an option of the command line
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
) -> str | None:
    """Evaluate a trained model on tasks of lm-evaluation-harness.

    Nothing is converted: the checkpoint may come from any layout. Tasks that ship with the harness
    read data sets of the Hugging Face hub; tasks of your own may read local files, and need no
    network with HF_HUB_OFFLINE=1 and HF_DATASETS_OFFLINE=1.

    Args:
        checkpoint: Checkpoint directory, plain Lightning .ckpt file, Hugging Face folder, or Hub
            id.
        tasks: Names of tasks and groups of tasks.
        limit: Documents of each task, or below 1 their share; leave it out for all.
        num_fewshot: Examples before each document; leave it out for the task's own number.
        apply_chat_template: Send documents through the chat template.
        include_path: Folder with YAML files of tasks of your own.
        output: File for the results as JSON.
        confirm_run_unsafe_code: Let tasks run code that the model has written.
        tokenizer_model: The tokenizer that made the training data; leave it out for the one that
            came with the model.
        tokenizer_type: sentencepiece or huggingface.
        tensor_model_parallel_size: Ranks over which each layer's matrices are split.
        pipeline_model_parallel_size: Ranks over which the layers are split into stages.
        virtual_pipeline_model_parallel_size: Stages on each of those ranks.
        data_parallel_size: Replicas, which share the documents.
        expert_model_parallel_size: Ranks over which experts are divided. They are the tensor
            parallel ones: set expert_tensor_parallel_size to 1, or as many times less.
        expert_tensor_parallel_size: Ranks over which each expert's matrices are split; leave it out
            for the same as tensor.
        pipeline_schedule: As for training; determines the stages of each rank.
        device: cpu, cuda, or auto: cuda where there is one.
        dtype: Dtype of the weights: float32, bfloat16 or float16.
        max_tokens: Tokens of one step over all texts; longer prompts are computed in chunks.
        max_requests: Texts that are computed at once; others wait.
        cache_gib: GiB for keys and values on each rank, at most.

    Returns:
        The harness's table; on ranks other than the first of torchrun, nothing.

    Raises:
        ConfigError: If the values cannot work together, or the harness is not installed.
        CheckpointError: If the checkpoint cannot be read.
        DataError: If the tokenizer cannot be read.
    """
    check_installed()
    job = ModelJob(
        checkpoint=checkpoint,
        layout=ParallelLayout(
            tensor_model_parallel_size=tensor_model_parallel_size,
            pipeline_model_parallel_size=pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=virtual_pipeline_model_parallel_size,
            expert_model_parallel_size=expert_model_parallel_size,
            expert_tensor_parallel_size=expert_tensor_parallel_size,
            sequence_parallel=False,
        ),
        pipeline_schedule=pipeline_schedule,
        tokenizer_model=tokenizer_model,
        tokenizer_type=tokenizer_type,
        device=device,
        dtype=dtype,
        options=EngineOptions(
            max_tokens=max_tokens,
            max_requests=min(max_requests, max_tokens),
            cache_gib=cache_gib,
        ),
        num_replicas=data_parallel_size,
        runs_replicas=True,
    )
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
        ConfigError: If it is not.
    """
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"evaluation needs lm-evaluation-harness, which cannot be imported ({error}). `pip "
            "install 'megatron_lightning[eval]'`."
        ) from error


def sharing_of(engine: TextModel) -> AxisGroup:
    """Return the ranks with the same place in other replicas: each computes its share of the texts.

    A model that writes by its own ``generate`` computes all texts on all ranks.
    """
    return ALONE if isinstance(engine, OwnGenerate) else engine.context.dp_cp


def _evaluate(engine: TextModel, codec: Codec, arguments: Any) -> str:
    from megatron_lightning.inference import harness

    settings, output = arguments
    model = harness.HarnessModel(engine, codec, sharing_of(engine))
    results = harness.evaluate_tasks(model, **settings)
    if output is not None and engine.context.rank == 0:
        harness.write_results(results, output)
    return harness.table_of(results)
