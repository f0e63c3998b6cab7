"""megatron-core's own training runs of hybrid models, reproduced under the same layouts.

The recorded runs are fp32; megatron-core's layouts agree with its own single process to 1e-7 (loss)
and 1e-6 (norm), so 1e-6 and 1e-5 relative leave room for another order of summation and no more.
"""

from __future__ import annotations

import hashlib
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from megatron_lightning.config import DeltaNetConfig, MambaConfig, TransformerConfig
from megatron_lightning.models import GPTModel
from megatron_lightning.parallel.shards.sharding import named_shard_specs
from megatron_lightning.strategies.megatron import MegatronStrategy
from tests.helpers import oracle_model
from tests.helpers.ranks import run_ranks
from tests.helpers.recorded_run import RecordedModule, global_batch
from tests.helpers.trainers import Losses, trainer

FACTS = Path(__file__).parents[1] / "oracles/families/hybrid_train.json"
RUNS = json.loads(FACTS.read_text())["facts"]["runs"]


def config_of(args: dict[str, Any]) -> TransformerConfig:
    """Return the configuration of a recorded run."""
    mamba = MambaConfig(
        state_dim=args["state"], head_dim=args["head_dim"], num_groups=args["ssm_groups"],
        num_heads=args["mamba_heads"], chunk_size=args["chunk"],
    )  # fmt: skip
    delta_net = DeltaNetConfig(
        num_key_heads=args["k_heads"], num_value_heads=args["v_heads"],
        key_head_dim=args["k_dim"], value_head_dim=args["v_dim"], chunk_size=args["chunk"],
    )  # fmt: skip
    return TransformerConfig(
        layer_pattern=args["pattern"],
        hidden_size=args["hidden"],
        num_attention_heads=args["heads"],
        num_query_groups=args["groups"],
        ffn_hidden_size=args["ffn"],
        activation="silu",
        vocab_size=args["vocab"],
        max_sequence_length=args["seq"],
        share_embeddings_and_output_weights=args["tie"],
        mamba=mamba if "M" in args["pattern"] else None,
        delta_net=delta_net if "G" in args["pattern"] else None,
    )


def recorded_name(name: str) -> str:
    """Return Megatron-Core's name of a parameter."""
    return name.replace("mixer.conv1d.", "mixer.conv1d_").replace("final_layernorm", "final_norm")


def fill(name: str, shape: tuple[int, ...]) -> Tensor:
    """Return the full initial value of the parameter with this recorded name, by formula."""
    if "norm" in name:
        return torch.ones(shape)
    h = int(hashlib.md5(name.encode()).hexdigest()[:8], 16) % 10007
    k = torch.arange(math.prod(shape), dtype=torch.float64)
    wave = torch.sin(k * 0.7391 + h) * torch.cos(k * 0.0137 + h * 0.1)
    if name.endswith("A_log"):
        values = torch.log(1 + k % 15)
    elif name.endswith("dt_bias"):
        values = -2 + wave
    elif name.endswith(".D"):
        values = 1 + 0.1 * wave
    else:
        values = (0.4 if "conv1d" in name else 0.1) * wave
    return values.float().view(shape)


def build(args: dict[str, Any]) -> GPTModel:
    """Return the full model of a run, filled."""
    model = GPTModel(config_of(args))
    specs = named_shard_specs(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            source = specs[name].tied_to or name
            parameter.copy_(fill(recorded_name(source), tuple(parameter.shape)))
    return model


def _batches(args: dict[str, Any]) -> list[dict[str, Tensor]]:
    """Return one batch a step: its micro-batches, one after another."""
    batches = []
    for step in range(oracle_model.NUM_STEPS):
        parts = [oracle_model.data(args, step, m) for m in range(args["gbs"] // args["mbs"])]
        batches.append(global_batch(parts))
    return batches


def train(args: dict[str, Any]) -> list[tuple[float, float]]:
    """Return loss and gradient norm of every step."""
    strategy = MegatronStrategy(
        tensor_model_parallel_size=args["tp"],
        pipeline_model_parallel_size=args["pp"],
        context_parallel_size=args["cp"],
        sequence_parallel=args["sp"],
        micro_batch_size=args["mbs"],
        data_parallel="ddp",
    )
    record = Losses()
    fit = trainer(
        strategy,
        max_steps=oracle_model.NUM_STEPS,
        callbacks=[record],
        gradient_clip_val=oracle_model.CLIP_NORM,
        use_distributed_sampler=False,
    )
    fit.fit(RecordedModule(partial(build, args)), DataLoader(_batches(args), batch_size=None))
    losses = torch.tensor(record.losses, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(losses)
        losses /= dist.get_world_size()
    return list(zip(losses.tolist(), record.norms, strict=True))


def _name(run: dict[str, Any]) -> str:
    args = run["args"]
    return f"{args['pattern']}-tp{args['tp']}-pp{args['pp']}-cp{args['cp']}"


@pytest.mark.spread(2)
@pytest.mark.parametrize("run", RUNS, ids=_name)
def test_megatron_core_run_is_reproduced(run: dict[str, Any]) -> None:
    for steps in run_ranks(run["world"], train, run["args"]):
        for (loss, norm), (their_loss, their_norm) in zip(steps, run["loss_gradnorm"], strict=True):
            assert loss == pytest.approx(their_loss, rel=1e-6)
            assert norm == pytest.approx(their_norm, rel=1e-5)


@pytest.mark.slow
def test_the_norm_shared_by_heads_is_summed_without_sequence_parallelism() -> None:
    """Equal to one process. megatron-core 0.19 sums the gradient of gated delta net's norm over the
    tensor-parallel ranks with sequence parallelism alone.
    """
    [one] = [run for run in RUNS if "G" in run["args"]["pattern"] and run["world"] == 1]
    for steps in run_ranks(2, train, one["args"] | {"tp": 2}):
        for (loss, norm), (their_loss, their_norm) in zip(steps, one["loss_gradnorm"], strict=True):
            assert loss == pytest.approx(their_loss, rel=1e-6)
            assert norm == pytest.approx(their_norm, rel=1e-5)


@pytest.mark.parametrize("run", [run for run in RUNS if run["world"] == 1], ids=_name)
def test_parameters_and_gradients_are_reproduced(run: dict[str, Any]) -> None:
    args, model = run["args"], build(run["args"])
    shapes = {recorded_name(n): list(p.shape) for n, p in model.named_parameters()}
    assert shapes == run["parameter_shapes"]
    for tokens, labels in (oracle_model.data(args, 0, m) for m in range(args["gbs"])):
        (model(tokens, labels=labels).mean() / args["gbs"]).backward()
    norms = {recorded_name(n): p.grad.norm().item() for n, p in model.named_parameters()}
    assert norms == pytest.approx(run["grad_norm_step0"], rel=1e-5)
