"""Weights and gradients of a run as shards, under any strategy."""

from __future__ import annotations

import lightning.pytorch as pl
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_lightning.optim.gradients.gradient_proxies import gradient_of
from megatron_lightning.parallel.shards.spec import is_writer
from megatron_lightning.parallel.shards.tensor_shards import TensorShards
from megatron_lightning.strategies.trainer_ranks import run_of


def deal_chunks(trainer: pl.Trainer, *, deals: bool) -> None:
    """Set whether ranks that share sequences deal the chunks of packed rows."""
    run = run_of(trainer)
    if run is not None:
        run.steps.deal_chunks(deals=deals)


def weights_of(trainer: pl.Trainer, module: pl.LightningModule) -> dict[str, TensorShards]:
    """Return the weights and saved buffers on this rank by global name."""
    run = run_of(trainer)
    values = module.state_dict() if run is None else run.module_state()
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    if run is None:
        return {name: TensorShards.full(name, tensor) for name, tensor in tensors.items()}
    state = run.partitioned.state()
    return {name: state.shards(name, name, tensor) for name, tensor in tensors.items()}


def gradients_of(trainer: pl.Trainer, module: pl.LightningModule) -> dict[str, TensorShards]:
    """Return the reduced gradients on this rank by global name."""
    run = run_of(trainer)
    if run is None:
        given = {name: parameter.grad for name, parameter in module.named_parameters()}
        return {n: TensorShards.full(n, grad) for n, grad in given.items() if grad is not None}
    reducer, context = run.training.accumulation.reducer, run.partitioned.state().context
    found = {}
    for name, target in reducer.targets().items():
        gradient, spec, shard = gradient_of(target), reducer.specs[name], reducer.shards.get(name)
        if gradient is None:
            continue
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        boxes = spec.shards(local) if shard is None else shard.shards(spec, local)
        sends = is_writer(spec, context)
        found[name] = TensorShards(name, spec.global_shape, local.dtype, boxes, sends)
    return found
