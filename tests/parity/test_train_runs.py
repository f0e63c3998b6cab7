"""megatron-core's own training runs, reproduced under the same layouts through a Trainer and
MegatronStrategy.

The recorded runs are fp32; megatron-core's layouts agree with its own single process to 1e-7 (loss)
and 5.4e-6 (norm), so 1e-6 and 2e-5 relative leave room for another order of summation and no more.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from megatron_lightning.strategies.megatron import MegatronStrategy
from tests.helpers import oracle_model
from tests.helpers.layouts import fit
from tests.helpers.ranks import run_ranks
from tests.helpers.recorded_run import RecordedModule, global_batch

RUNS = oracle_model.runs()
[ONE_WITH_EXPERTS] = [run for run in RUNS if run["args"]["moe"] and run["world"] == 1]


def _batches(args: dict[str, Any], rank: int, size: int) -> list[dict[str, Tensor]]:
    """Return one batch a step: this data-parallel rank's micro-batches, one after another."""
    batches = []
    for step in range(oracle_model.NUM_STEPS):
        parts = [
            oracle_model.data(args, step, m, dp_rank=rank, dp_size=size)
            for m in range(args["gbs"] // args["mbs"] // size)
        ]
        batches.append(global_batch(parts))
    return batches


def _train(args: dict[str, Any], world: int) -> list[list[float]]:
    strategy = MegatronStrategy(
        tensor_model_parallel_size=args["tp"],
        pipeline_model_parallel_size=args["pp"],
        virtual_pipeline_model_parallel_size=args["vpp"] or 1,
        expert_model_parallel_size=args["ep"],
        expert_tensor_parallel_size=args["etp"] or None,
        sequence_parallel=args["sp"],
        micro_batch_size=args["mbs"],
        data_parallel="zero1" if args["dist_opt"] else "ddp",
    )
    size = world // (args["tp"] * args["pp"])
    rank = (dist.get_rank() if world > 1 else 0) // args["tp"] % size
    module = RecordedModule(partial(oracle_model.build, args))
    run = fit(
        strategy,
        module,
        DataLoader(_batches(args, rank, size), batch_size=None),
        steps=oracle_model.NUM_STEPS,
        gradient_clip_val=oracle_model.CLIP_NORM,
        use_distributed_sampler=False,  # the batches are this rank's already
    )
    losses = torch.tensor(run.losses, dtype=torch.float64)
    group = strategy.context.dp
    if group.process_group is not None:
        dist.all_reduce(losses, group=group.process_group)
    return [
        [loss / group.size, norm] for loss, norm in zip(losses.tolist(), run.norms, strict=True)
    ]


def _name(run: dict[str, Any]) -> str:
    args = run["args"]
    flags = "".join(f"-{key}" for key in ("sp", "dist_opt", "tie") if args[key])
    chunks = f"-vpp{args['vpp']}" if args["vpp"] else ""
    experts = f"-moe{args['moe']}-ep{args['ep']}-{args['disp']}" if args["moe"] else ""
    return f"world{run['world']}-tp{args['tp']}-pp{args['pp']}{chunks}{experts}{flags}"


@pytest.mark.spread(1)
@pytest.mark.parametrize("run", RUNS, ids=_name)
def test_megatron_core_run_is_reproduced(run: dict[str, Any]) -> None:
    for steps in run_ranks(run["world"], _train, run["args"], run["world"]):
        for (loss, norm), (their_loss, their_norm) in zip(steps, run["loss_gradnorm"], strict=True):
            assert loss == pytest.approx(their_loss, rel=1e-6)
            assert norm == pytest.approx(their_norm, rel=2e-5)


def test_gradient_of_every_expert_is_reproduced() -> None:
    """Norms in the first step, recorded with six digits: 1e-5."""
    args = ONE_WITH_EXPERTS["args"]
    model = oracle_model.build(args)
    for tokens, labels in (oracle_model.data(args, 0, m) for m in range(args["gbs"])):
        (model(tokens, labels=labels).mean() / args["gbs"]).backward()
    norms: dict[str, float] = {}
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            for expert, gradient in enumerate(parameter.grad):
                key = oracle_model.expert_name(name, expert, "local_experts")
                norms[key] = gradient.norm().item()
        else:
            norms[name] = parameter.grad.norm().item()
    assert norms == pytest.approx(ONE_WITH_EXPERTS["grad_norm_step0_by_param"], rel=1e-5)
