"""``data_parallel="fsdp"`` trains as one device does, and in half precision as ``zero1`` on the
same ranks.

1e-5 relative in fp32: sums in another order, and AdamW steps that amplify that a little. Half
precision is compared with zero1, which rounds the same products and sums them in fp32 in another
order: 1e-5 in the first step, where the weights are the same; later a weight on the edge between
two bf16 or fp16 values may round to the other, 2^-9 of it, and 1e-3 is allowed.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from megatron_lightning.config import DataParallelOptions, LossScaleOptions, MoEConfig
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.strategies import MegatronMixedPrecision, MegatronStrategy
from tests.helpers.layouts import fit_losses
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import Losses, trainer
from tests.parity.test_layouts import GLOBAL_BATCH, STEPS, _config, _samples

RTOL = 1e-5
RESUMED_STEPS = 5
TP, PP, VPP = (f"{axis}_model_parallel_size" for axis in ("tensor", "pipeline", "virtual_pipeline"))
TIED = {"share_embeddings_and_output_weights": True}
EP = "expert_model_parallel_size"
EXPERTS = {"moe": MoEConfig(num_experts=4, router_topk=2, ffn_hidden_size=24)}
RESHARD = DataParallelOptions(reshard_after_forward=True)
KEEP = DataParallelOptions(reshard_after_forward=False)
EVERY = DataParallelOptions(reduce_every_microbatch=True)
HYBRID = DataParallelOptions(num_distributed_optimizer_instances=2)
HYBRID_EVERY = DataParallelOptions(
    num_distributed_optimizer_instances=2, reduce_every_microbatch=True
)
HYBRID_RESHARD = DataParallelOptions(
    num_distributed_optimizer_instances=2, reshard_after_forward=True
)
OFFLOAD = DataParallelOptions(optimizer_cpu_offload=True)
# Name, model, strategy, flushes of an optimizer step.
Case = tuple[str, dict[str, Any], dict[str, Any], int]
CASES: dict[int, list[Case]] = {
    2: [
        ("native", {}, {}, 1),
        ("native-accumulated", {}, {"data_parallel_options": KEEP}, 2),
        ("tied", TIED, {}, 1),
        ("micro-batches", {}, {"micro_batch_size": 1}, 1),
        ("zero3", {}, {"micro_batch_size": 2, "data_parallel_options": RESHARD}, 2),
        ("zero2", {}, {"micro_batch_size": 2, "data_parallel_options": EVERY}, 2),
    ],
    4: [
        ("tp2-sp", {}, {TP: 2, "micro_batch_size": 2}, 1),
        ("pp2-tied", TIED, {PP: 2, "micro_batch_size": 1}, 1),
        (
            "pp2-bias",
            {"normalization": "LayerNorm", "add_bias_linear": True},
            {PP: 2, "micro_batch_size": 1},
            2,
        ),
        (
            "interleaved-zero3",
            {},
            {PP: 2, VPP: 2, "micro_batch_size": 1, "data_parallel_options": RESHARD},
            1,
        ),
        ("zb-h1", {}, {PP: 2, "micro_batch_size": 1, "pipeline_schedule": "zb-h1"}, 1),
        ("zbv-tied", TIED, {PP: 2, VPP: 2, "micro_batch_size": 1, "pipeline_schedule": "zbv"}, 1),
        ("hybrid", TIED, {"data_parallel_options": HYBRID}, 1),
        ("hybrid-zero2", {}, {"micro_batch_size": 1, "data_parallel_options": HYBRID_EVERY}, 2),
        ("pp2-offload", {}, {PP: 2, "micro_batch_size": 1, "data_parallel_options": OFFLOAD}, 1),
        ("experts", EXPERTS, {TP: 2, EP: 2, "micro_batch_size": 2}, 1),
        (
            "zbv-zero3",
            {},
            {
                PP: 2,
                VPP: 2,
                "micro_batch_size": 1,
                "pipeline_schedule": "zbv",
                "data_parallel_options": EVERY,
            },
            1,
        ),
    ],
    8: [
        ("tp2-pp2", {}, {TP: 2, PP: 2, "micro_batch_size": 1}, 1),
        (
            "tp2-hybrid",
            {},
            {TP: 2, "micro_batch_size": 1, "data_parallel_options": HYBRID_EVERY},
            1,
        ),
        (
            "pp2-hybrid",
            TIED,
            {PP: 2, "micro_batch_size": 1, "data_parallel_options": HYBRID_RESHARD},
            1,
        ),
        (
            "zb-h1-hybrid",
            {},
            {
                PP: 2,
                "micro_batch_size": 1,
                "pipeline_schedule": "zb-h1",
                "data_parallel_options": HYBRID,
            },
            1,
        ),
    ],
}


def _train(
    world: int,
    case: Case | None,
    model: dict[str, Any],
    precision: str = "32-true",
    mode: str = "fsdp",
) -> list[Any]:
    """Return the loss of every batch and the norm of every optimizer step."""
    options, flushes = ({}, 1) if case is None else (case[2], case[3])
    replicas = world // (options.get(TP, 1) * options.get(PP, 1))
    precise: dict[str, Any] = {"precision": precision}
    if precision == "16-mixed":  # the string means bf16 on a CPU
        precise = {
            "plugins": [
                MegatronMixedPrecision(precision, "cpu", LossScaleOptions(initial_scale=2.0**10))
            ]
        }
    if mode == "zero1" and "data_parallel_options" in options:
        kept = {"reshard_after_forward": None, "reduce_every_microbatch": False}
        options = {
            **options,
            "data_parallel_options": replace(options["data_parallel_options"], **kept),
        }
    layout = None if case is None else {"data_parallel": mode, **options}
    of_trainer = {"gradient_clip_val": 1.0, "accumulate_grad_batches": flushes, **precise}
    loader = DataLoader(_samples(), batch_size=GLOBAL_BATCH // replicas // flushes)
    module = GPTLightningModule(_config(**model), learning_rate=3e-3)
    return [*fit_losses(layout, module, loader, steps=STEPS, **of_trainer)]


def _train_all(world: int, cases: list[Case], *args: Any) -> dict[str, list[Any]]:
    return {case[0]: _train(world, case, case[1], *args) for case in cases}


def _train_again(
    world: int, cases: list[Case]
) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
    return _train_all(world, cases), _train_all(
        world, [case for case in cases if case[0] in ("pp2-tied", "zb-h1")]
    )


def _singles(models: list[dict[str, Any]]) -> list[list[Any]]:
    return [_train(1, None, model) for model in models]


LONGER = ("hybrid", "pp2-offload")


@pytest.mark.parametrize(
    ("world", "longer"),
    [
        (2, False),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((4, False), (4, True), (8, False))
        ),
    ],
)
def test_fsdp_equals_one_device(world: int, longer: bool) -> None:
    """And as itself, to the bit, when it trains again."""
    cases = [case for case in CASES[world] if (case[0] in LONGER) == longer]
    expected = run_ranks(1, _singles, [case[1] for case in cases])[0]
    for rank, again in run_ranks(world, _train_again, world, cases, timeout_s=200):
        assert again == {name: rank[name] for name in again}
        for case, (_, norms) in zip(cases, expected, strict=True):
            assert rank[case[0]][1] == pytest.approx(norms, rel=RTOL), case[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "world", "names"),
    [
        ("bf16-true", 2, ["tied", "micro-batches"]),
        *(
            (precision, 4, [case[0] for case in CASES[4]])
            for precision in ("bf16-true", "bf16-mixed", "16-mixed")
        ),
    ],
)
def test_fsdp_equals_zero1_in_half_precision(precision: str, world: int, names: list[str]) -> None:
    cases = [case for case in CASES[world] if case[0] in names]
    ranks = run_ranks(world, _train_all, world, cases, precision, timeout_s=200)
    for rank, expected in zip(
        ranks,
        run_ranks(world, _train_all, world, cases, precision, "zero1", timeout_s=200),
        strict=True,
    ):
        for name in names:
            first, *later = rank[name][1]
            assert first == pytest.approx(expected[name][1][0], rel=RTOL), name
            # Masters that agree in fp32 may fall on two sides of a rounding boundary, and such
            # weights are 2^-8 apart in bf16.
            assert later == pytest.approx(expected[name][1][1:], rel=2**-8), name
            assert torch.tensor(rank[name][0]).isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [["micro-batches"], ["native", "micro-batches", "zero2"]],
    ids=len,
)
def test_gradients_travel_in_bf16_on_request(names: list[str]) -> None:
    """As zero1 sends them: the sums over micro-batches are fp32, and only what travels is rounded,
    so that both round alike."""
    low = DataParallelOptions(grad_reduce_in_bf16=True)
    micro = {"micro_batch_size": 1, "data_parallel_options": low}
    cases: list[Case] = [
        ("native", {}, {"data_parallel_options": low}, 1),
        ("micro-batches", {}, micro, 2),
        (
            "zero2",
            {},
            {**micro, "data_parallel_options": replace(low, reduce_every_microbatch=True)},
            1,
        ),
        ("fp32", {}, {}, 1),
    ]
    cases = [case for case in cases if case[0] in (*names, "fp32")]
    sharded, zero1 = (
        run_ranks(2, _train_all, 2, cases, "32-true", mode, timeout_s=100)[0]
        for mode in ("fsdp", "zero1")
    )
    for name in names:
        if name == "zero2":  # rounded four times a step
            assert sharded[name][1] == pytest.approx(sharded["fp32"][1], rel=2**-7)
        else:
            assert sharded[name][1] == pytest.approx(zero1[name][1], rel=RTOL)
        assert sharded[name][1] != pytest.approx(sharded["fp32"][1], rel=RTOL)


def _resumed(
    case: Case, precision: str, folder: str, resume: bool
) -> tuple[list[Any], dict[str, Any]]:
    """Train five batches, with evaluation and prediction in between; stop after the third, or
    resume from there."""
    record, world = Losses(), dist.get_world_size()
    replicas = world // (case[2].get(TP, 1) * case[2].get(PP, 1))
    fit = trainer(
        MegatronStrategy(data_parallel="fsdp", **case[2]),
        max_steps=RESUMED_STEPS,
        callbacks=[
            record,
            ModelCheckpoint(dirpath=folder, filename="at", every_n_train_steps=3, save_top_k=-1),
        ],
        gradient_clip_val=1.0,
        precision=precision,
        enable_checkpointing=True,
        val_check_interval=2,
        limit_val_batches=1,
        num_sanity_val_steps=1,
    )
    module = GPTLightningModule(_config(**case[1]), learning_rate=3e-3)
    loader = DataLoader(_samples(RESUMED_STEPS), batch_size=GLOBAL_BATCH // replicas)
    fit.fit(module, loader, loader, ckpt_path=f"{folder}/at.ckpt" if resume else None)
    metrics = {name: float(value) for name, value in fit.callback_metrics.items()}
    fit.validate(module, loader, verbose=False)
    again = float(fit.callback_metrics["val_loss"])
    return [record.losses, record.norms], {**metrics, "again": again}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "world", "name"),
    [
        ("bf16-true", 2, "micro-batches"),
        ("bf16-true", 4, "pp2-tied"),
        ("32-true", 4, "pp2-tied"),
    ],
)
def test_fsdp_resumes_bit_equal(precision: str, world: int, name: str, tmp_path: Path) -> None:
    """Between evaluations, which gather parameters too; in bf16 the fp32 masters are part of the
    checkpoint."""
    case = next(case for case in CASES[world] if case[0] == name)
    whole = run_ranks(world, _resumed, case, precision, str(tmp_path), False, timeout_s=100)
    for rank, rest in zip(
        whole,
        run_ranks(world, _resumed, case, precision, str(tmp_path), True, timeout_s=100),
        strict=True,
    ):
        assert rest[0] == [rank[0][0][3:], rank[0][1][3:]]
        assert rest[1] == rank[1]
