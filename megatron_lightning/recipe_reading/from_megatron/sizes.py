"""Ranks, batches and steps of a command."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

from megatron_lightning.errors import ConfigError
from megatron_lightning.recipe_reading.from_megatron.options import Options

_RANKS_OF_NODE = 8
_MODEL_RANKS = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
)  # fmt: skip


class Sizes(NamedTuple):
    """Numbers that other options are counted in."""

    nodes: int
    devices: int
    global_batch_size: int
    steps: int | None
    """Optimizer steps of the run. None: unknown, because the batch size changes."""
    samples: int | None
    """Samples of the run. None: the command counts in steps."""

    def steps_of(self, samples: float) -> int:
        """Return samples in steps."""
        return round(samples / self.global_batch_size)


def read_sizes(options: Options) -> Sizes:
    """Return the sizes of a run.

    Raises:
        ConfigError: If the ranks do not divide, or the length of the run is unknown.
    """
    replica = prod(options.look(name) for name in _MODEL_RANKS)
    nodes, devices = options.take("nnodes"), options.take("nproc_per_node")
    if not isinstance(nodes, int):
        raise ConfigError(f"--nnodes {nodes} is no number. Write one in its place.")
    if not isinstance(devices, int):
        if nodes > 1:
            raise ConfigError(
                f"--nnodes is {nodes}, and the command does not say how many ranks a node has. "
                'Give the number: --extra "--nproc-per-node 8".'
            )
        devices = min(replica, _RANKS_OF_NODE)
        nodes = -(-replica // devices)
    if nodes * devices % replica:
        raise ConfigError(
            f"{nodes} nodes x {devices} ranks are no multiple of {replica} ranks of tensor, "
            "pipeline and context parallelism. Give --nproc-per-node and --nnodes: --extra "
            f'"--nproc-per-node 8 --nnodes {max(1, replica // 8)}".'
        )
    replicas = nodes * devices // replica
    batch = options.take("global_batch_size") or options.look("micro_batch_size") * replicas
    steps, samples = options.look("train_iters"), options.look("train_samples")
    if steps is None and samples is None:
        raise ConfigError(
            "the command has neither --train-iters nor --train-samples, and the run's length is "
            'unknown. Give one: --extra "--train-iters 1000".'
        )
    is_constant = not {"rampup_batch_size", "step_batch_size_schedule"} & options.rest().keys()
    if steps is None and is_constant:
        steps = samples // batch
    return Sizes(nodes, devices, batch, steps, samples)


def convert_sizes(options: Options, sizes: Sizes) -> dict[str, Any]:
    """Return the values of ranks, batches and steps, by Megatron's names."""
    steps, samples = options.take("train_iters"), options.take("train_samples")
    values: dict[str, Any] = {"nnodes": sizes.nodes, "nproc_per_node": sizes.devices}
    values["train_samples"] = samples or steps * sizes.global_batch_size
    if sizes.steps is None:
        options.leave("exit_interval")  # max_steps would end the decay, too
    last = options.take("exit_interval", sizes.steps)
    if sizes.steps is not None:
        values["train_iters"] = min(last, sizes.steps)
    interval = options.take("eval_interval")
    values["eval_interval"] = min(interval, values.get("train_iters", interval))
    if minutes := options.take("exit_duration_in_mins"):
        hours, minutes = divmod(minutes, 60)
        values["exit_duration_in_mins"] = f"{hours // 24:02}:{hours % 24:02}:{minutes:02}:00"
    if minutes := options.take("distributed_timeout_minutes"):
        values["distributed_timeout_minutes"] = minutes * 60.0
    return values | _batch_size(options, sizes)


def _batch_size(options: Options, sizes: Sizes) -> dict[str, Any]:
    schedule: dict[str, Any] = {"global_batch_size": sizes.global_batch_size}
    if ramp := options.take("rampup_batch_size"):
        return {"rampup_batch_size": schedule | {"rampup_batch_size": ramp}}
    if words := options.take_words("step_batch_size_schedule"):
        schedule |= {
            "step_batch_size_schedule": " ".join(words),
            "sequence_length": options.look("seq_length"),
        }
        return {"rampup_batch_size": schedule}
    return {"global_batch_size": sizes.global_batch_size}


def convert_parallelism(options: Options) -> dict[str, Any]:
    """Return the values of parallelism that are no plain numbers."""
    values: dict[str, Any] = {}
    tensor = options.look("tensor_model_parallel_size")
    if tensor > 1:
        values["sequence_parallel"] = options.take("sequence_parallel", default=False)
    options.take("sequence_parallel")
    if chunk := options.take("num_layers_per_virtual_pipeline_stage"):
        stages = options.look("pipeline_model_parallel_size")
        chunks = options.look("num_layers") // (stages * chunk)
        values["virtual_pipeline_model_parallel_size"] = chunks
    values["use_distributed_optimizer"], parts = _data_parallel(options)
    values |= {f"trainer.strategy.data_parallel_options.{name}": parts[name] for name in parts}
    if values["use_distributed_optimizer"] != "zero1":
        options.take("overlap_param_gather")
    backend = options.take("distributed_backend", "nccl")
    if backend != "nccl":  # the default on GPUs, with gloo on CPUs
        values["distributed_backend"] = backend
    if options.take("use_precision_aware_optimizer") is None:
        options.take("exp_avg_dtype")
    return values


def _data_parallel(options: Options) -> tuple[str, dict[str, bool]]:
    """Return the mode, and what fsdp shards beside the optimizer's state. Megatron reduces the
    gradients of every micro-batch, so that no rank keeps full ones.
    """
    strategy = options.take("data_parallel_sharding_strategy", "no_shard")
    fsdp = [
        options.take(name) for name in ("use_megatron_fsdp", "use_custom_fsdp", "use_torch_fsdp2")
    ]
    zero1 = options.take("use_distributed_optimizer")
    keeps = options.take("torch_fsdp2_no_reshard_after_forward", default=False)
    if any(fsdp[:2]):
        mode = {"no_shard": "ddp", "optim": "zero1"}.get(strategy, "fsdp")
        keeps = strategy == "optim_grads"
    else:
        mode = "fsdp" if fsdp[2] else "zero1" if zero1 else "ddp"
    if mode != "fsdp":
        return mode, {}
    return mode, {"reshard_after_forward": not keeps, "reduce_every_microbatch": True}
