"""``megatron-lightning generate``: continue prompts with a trained model, on one process or on a
layout.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_lightning import compat
from megatron_lightning.data.tokenizers import TokenizerType, load_tokenizer
from megatron_lightning.errors import ConfigError
from megatron_lightning.inference.model import LanguageModel, read_config
from megatron_lightning.inference.sampling import Sampling, sample
from megatron_lightning.parallel.context import ParallelContext
from megatron_lightning.parallel.layout import ParallelLayout
from megatron_lightning.pipeline.schedules import resolve
from megatron_lightning.resilience.workers import run_workers
from megatron_lightning.rules import check_model_layout


@dataclass(frozen=True, kw_only=True)
class _Job:
    """Arguments of every rank."""

    checkpoint: str
    layout: ParallelLayout
    pipeline_schedule: str | list[str]
    prompts: list[list[int]]
    sampling: Sampling
    eod: int
    device: str


def generate(  # noqa: PLR0917  # every one is an option of the command line
    checkpoint: str,
    prompts: list[str] | str,
    tokenizer_model: str,
    tokenizer_type: TokenizerType = "sentencepiece",
    max_new_tokens: int = 64,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 1234,
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int = 1,
    pipeline_schedule: str | list[str] = "auto",
    device: str = "auto",
    expert_model_parallel_size: int = 1,
    expert_tensor_parallel_size: int | None = None,
) -> list[str]:
    """Continue prompts with a model that ``GPTLightningModule`` trained.

    The checkpoint may come from any layout; the sizes given here are for generation. The same seed
    gives the same text on every layout. There is no key-value cache: each token takes a forward of
    the full text.

    Args:
        checkpoint: Checkpoint directory, or a plain Lightning .ckpt file.
        prompts: One text, or a list of texts, to continue.
        tokenizer_model: The tokenizer that made the training data.
        tokenizer_type: sentencepiece or huggingface.
        max_new_tokens: Tokens added to each prompt, at most; a text ends earlier with its document.
        temperature: Divides the logits; 0 always takes the most likely token.
        top_k: Choose among this many of the most likely tokens; leave it out for all.
        top_p: Choose among the most likely tokens that together have this probability.
        seed: Seed of the draws.
        tensor_model_parallel_size: Ranks over which each layer's matrices are split.
        pipeline_model_parallel_size: Ranks over which the layers are split into stages.
        virtual_pipeline_model_parallel_size: Stages on each of those ranks.
        pipeline_schedule: As for training; determines the stages of each rank.
        device: cpu, cuda, or auto: cuda where there is one.
        expert_model_parallel_size: Ranks over which experts are divided. They are the tensor
            parallel ones: set expert_tensor_parallel_size to 1, or as many times less.
        expert_tensor_parallel_size: Ranks over which each expert's matrices are split; leave it out
            for the same as tensor.

    Returns:
        Each prompt with its continuation; on ranks other than the first of torchrun, nothing.

    Raises:
        ConfigError: If the values cannot work together; before any process is started.
        CheckpointError: If the checkpoint cannot be read.
        DataError: If the tokenizer cannot be read.
    """
    layout = ParallelLayout(
        tensor_model_parallel_size=tensor_model_parallel_size,
        pipeline_model_parallel_size=pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=virtual_pipeline_model_parallel_size,
        expert_model_parallel_size=expert_model_parallel_size,
        expert_tensor_parallel_size=expert_tensor_parallel_size,
        sequence_parallel=False,  # a text grows by one token at a time and cannot be split evenly
    )
    _check_experts(layout)
    # Raises before processes start.
    resolve(pipeline_schedule, num_ranks=layout.pp, num_chunks=layout.vpp)
    sampling = Sampling(
        max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
    )
    tokenizer, config = load_tokenizer(tokenizer_model, tokenizer_type), read_config(checkpoint)
    if tokenizer.vocab_size > config.vocab_size:
        raise ConfigError(
            f"{tokenizer_model} has {tokenizer.vocab_size} ids and the model in {checkpoint} has "
            f"vocab_size={config.vocab_size}. Set tokenizer_model to the tokenizer that made the "
            "training data."
        )
    started = "RANK" in os.environ and "WORLD_SIZE" in os.environ  # by torchrun
    world_size = int(os.environ["WORLD_SIZE"]) if started else layout.tp * layout.pp
    check_model_layout(config, layout, world_size)
    _check_world_size(layout, world_size)
    texts = [prompts] if isinstance(prompts, str) else prompts
    job = _Job(
        checkpoint=checkpoint,
        layout=layout,
        pipeline_schedule=pipeline_schedule,
        prompts=[tokenizer.encode(text) or [tokenizer.eod] for text in texts],
        sampling=sampling,
        eod=tokenizer.eod,
        device=("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device,
    )
    if world_size == 1:
        continued = _run(job)
    elif started:
        continued = _join(job, int(os.environ["RANK"]), world_size, "env://")
    else:
        continued = _start(job, world_size)
    return [tokenizer.decode(text) for text in continued]


def _check_experts(layout: ParallelLayout) -> None:
    if layout.tp % (layout.etp * layout.ep):
        raise ConfigError(
            f"expert_tensor_parallel_size={layout.etp} x expert_model_parallel_size={layout.ep} "
            f"does not divide tensor_model_parallel_size={layout.tp}, whose ranks share the "
            "experts. Set expert_tensor_parallel_size to 1 and tensor_model_parallel_size to a "
            f"multiple of {layout.ep}."
        )


def _check_world_size(layout: ParallelLayout, world_size: int) -> None:
    if layout.data_parallel_size(world_size) > 1:
        raise ConfigError(
            f"{world_size} processes were started, and tensor_model_parallel_size={layout.tp} x "
            f"pipeline_model_parallel_size={layout.pp} uses {layout.tp * layout.pp}; the others "
            "would write the same text. Start as many as are used."
        )


def _run(job: _Job) -> list[list[int]]:
    """Generate as one rank of the default process group, or alone."""
    index = f":{os.environ.get('LOCAL_RANK', '0')}" if job.device == "cuda" else ""
    context = ParallelContext(job.layout, device=job.device + index)
    model = LanguageModel(job.checkpoint, context, job.pipeline_schedule)
    texts = sample(
        model.next_logits,
        job.prompts,
        job.sampling,
        eod=job.eod,
        max_sequence_length=model.config.max_sequence_length,
    )
    return texts if context.rank == 0 else []


def _join(job: _Job, rank: int, world_size: int, init_method: str) -> list[list[int]]:
    """Generate as one rank of several."""
    if job.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    backend = "cpu:gloo,cuda:nccl" if job.device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world_size)
    try:
        return _run(job)
    finally:
        compat.destroy_process_groups()


def _start(job: _Job, world_size: int) -> list[list[int]]:
    """Start a process for every rank and return what the first one generates."""
    with tempfile.TemporaryDirectory() as folder:
        run_workers(_worker, (job, world_size, folder), world_size)
        texts: list[list[int]] = torch.load(Path(folder, "texts"), weights_only=True)
        return texts


def _worker(rank: int, job: _Job, world_size: int, folder: str) -> None:
    os.environ["LOCAL_RANK"] = str(rank)
    texts = _join(job, rank, world_size, f"file://{folder}/store")
    if rank == 0:
        torch.save(texts, Path(folder, "texts"))
