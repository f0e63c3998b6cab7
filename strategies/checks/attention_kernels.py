"""Kernels of attention on this rank: printed once, and refused if the kernels named by the user
cannot compute the attention.
"""

from __future__ import annotations

from dataclasses import replace

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor

from megatron_lightning.config import TransformerConfig
from megatron_lightning.config.attention_kernels import choose_kernel
from megatron_lightning.layers.attention.attention_backend import chosen_backend
from megatron_lightning.layers.attention.self_attention import CoreAttention
from megatron_lightning.layers.context.kernel_choice import kernel_for
from megatron_lightning.models.transformer import GPTModel
from megatron_lightning.parallel.grid.context import ParallelContext
from megatron_lightning.rules import attention_dtype, check_attention_backend

_LENGTH = 128  # of sequences in the question to torch


def check_named_backend(
    config: TransformerConfig, num_context_ranks: int, trainer: pl.Trainer | None
) -> None:
    """Check the kernels named by a configuration, before any process group exists.

    Raises:
        ConfigError: If the device lacks the kernels, or the kernels do not support the options.
    """
    if trainer is None:
        return
    check_attention_backend(
        config,
        num_context_ranks,
        device=trainer.strategy.root_device.type,
        precision=getattr(trainer.strategy.precision_plugin, "precision", None),
        training=trainer.state.fn == TrainerFn.FITTING,
    )


def report_attention(
    module: pl.LightningModule, context: ParallelContext, precision: Precision, *, training: bool
) -> None:
    """Print this rank's kernels of attention on rank 0.

    Args:
        module: The LightningModule, assembled.
        context: Groups of this rank.
        precision: The Trainer's.
        training: Whether backward is needed, and weights are dropped.

    Raises:
        ConfigError: If torch lacks the named kernels for the layers.
    """
    dtype, device = attention_dtype(precision.precision), context.device
    configs = {
        core: model.config
        for model in module.modules()
        if isinstance(model, GPTModel)
        for core in model.modules()
    }
    descriptions: dict[str, None] = {}  # without repetitions, in order
    for core in module.modules():
        if not isinstance(core, CoreAttention):
            continue
        config = configs.get(core)
        if core.engine is not None and core.backend == "auto" and core.has_plain_scores:
            descriptions["by Transformer Engine"] = None
        elif core.cp_comm is not None or core.in_blocks:
            form = core.kernel_form()
            form = replace(
                form,
                device=device.type,
                dtype="float32" if core.in_fp32 else dtype,
                trained=training,
                dropout=form.dropout if training else 0.0,
            )
            # Blocks at the edge of a window may have another kernel than the layer's first choice.
            kernel = choose_kernel(core.backend, form)
            by = "by FlexAttention"
            if kernel != "flex":
                by = f"in blocks by {kernel_for(device, core.backend, core.softcap).name}"
            descriptions[f"{by} (attention_backend={core.backend})"] = None
        elif config is not None:
            # torch chooses a kernel by shape and dtype: it is asked with tensors like those of the
            # step.
            scores = "float32" if core.in_fp32 else dtype
            q, k, v = _inputs(config, context, getattr(torch, scores))
            dropout = core.dropout.p if training else 0.0
            chosen = chosen_backend(
                *(x.requires_grad_(training) for x in (q, k, v)),
                backend=core.backend,
                dropout_p=dropout,
                causal=True,
            )
            descriptions[
                f"by torch's {chosen} kernels (attention_backend={core.backend}; {q.shape[1]} "
                f"heads of {q.shape[3]}, {str(q.dtype).removeprefix('torch.')}, {device.type})"
            ] = None
    for description in descriptions:
        rank_zero_info(f"MegatronStrategy: attention runs {description}.")


def _inputs(
    config: TransformerConfig, context: ParallelContext, dtype: torch.dtype
) -> list[Tensor]:
    """Return queries [1, n, s, d], keys and values [1, g, s, d] in the shapes of a layer on this
    rank.
    """
    num_ranks, length = context.layout.tp, min(_LENGTH, config.max_sequence_length)
    heads = config.num_attention_heads // num_ranks
    groups = max(1, config.query_groups // num_ranks)
    size = config.head_dim if config.mla is None else max(config.head_dim, config.mla.v_head_dim)
    return [
        torch.empty(length, 1, number, size, dtype=dtype, device=context.device).permute(1, 2, 0, 3)
        for number in (heads, groups, groups)
    ]
