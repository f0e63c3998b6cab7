"""validate, test and predict with ``data_parallel="fsdp"``, before and after training: the numbers
of one device.

1e-5 relative: three AdamW steps on sums in another order come before them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from megatron_lightning.config import DataParallelOptions
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import trainer
from tests.parity.test_layouts import GLOBAL_BATCH, _config, _samples

RTOL = 1e-5
TP, PP, VPP = (f"{axis}_model_parallel_size" for axis in ("tensor", "pipeline", "virtual_pipeline"))
MICRO = {"micro_batch_size": 2}
RESHARD = DataParallelOptions(reshard_after_forward=True)
KEEP = DataParallelOptions(reshard_after_forward=False)
HYBRID = DataParallelOptions(num_distributed_optimizer_instances=2)
Case = tuple[str, dict[str, Any], dict[str, Any]]
CASES: dict[int, list[Case]] = {
    2: [
        ("native", {}, {}),
        ("kept", {}, {"data_parallel_options": KEEP}),
        ("micro-batches", {}, MICRO),
    ],
    4: [
        ("tp2-sp", {}, {TP: 2, **MICRO}),
        ("tp2", {}, {TP: 2, "sequence_parallel": False}),
        ("1f1b", {"share_embeddings_and_output_weights": True}, {PP: 2, **MICRO}),
        (
            "gpipe-zero3",
            {},
            {PP: 2, **MICRO, "pipeline_schedule": "gpipe", "data_parallel_options": RESHARD},
        ),
        ("interleaved", {}, {PP: 2, VPP: 2, **MICRO}),
        ("zb-h1", {}, {PP: 2, **MICRO, "pipeline_schedule": "zb-h1"}),
        ("zbv", {}, {PP: 2, VPP: 2, **MICRO, "pipeline_schedule": "zbv"}),
        ("hybrid", {}, {**MICRO, "data_parallel_options": HYBRID}),
    ],
    8: [("tp2-pp2", {}, {TP: 2, PP: 2, **MICRO})],
}


def _evaluate(
    model: dict[str, Any], options: dict[str, Any] | None, replicas: int, precision: str
) -> dict[str, Any]:
    """Validate a new model; train another with validation in between, then validate, test and
    predict."""
    strategy = "auto" if options is None else MegatronStrategy(data_parallel="fsdp", **options)
    loader = DataLoader(_samples(), batch_size=GLOBAL_BATCH // replicas)
    common = {
        "limit_val_batches": 2,
        "limit_test_batches": 2,
        "limit_predict_batches": 1,
        "precision": precision,
    }
    fit = trainer(strategy, max_steps=3, val_check_interval=2, **common)
    module = GPTLightningModule(_config(**model), learning_rate=3e-3)
    found = {"first": float(fit.validate(module, loader, verbose=False)[0]["val_loss"])}
    fit.fit(module, loader, loader)
    found["during"] = float(fit.callback_metrics["val_loss"])
    found["after"] = float(fit.validate(module, loader, verbose=False)[0]["val_loss"])
    found["test"] = float(fit.test(module, loader, verbose=False)[0]["test_loss"])
    predicted = torch.cat(fit.predict(module, loader)).tolist()
    return {**found, "predicted": predicted}


def _evaluate_all(cases: list[Case], world: int, precision: str) -> list[dict[str, Any]]:
    sizes = [world // (options.get(TP, 1) * options.get(PP, 1)) for _, _, options in cases]
    return [
        _evaluate(model, options, size, precision)
        for (_, model, options), size in zip(cases, sizes, strict=True)
    ]


def _singles(models: list[dict[str, Any]], precision: str) -> list[dict[str, Any]]:
    return [_evaluate(model, None, 1, precision) for model in models]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "names", "precision"),
    [
        (2, ["native", "micro-batches"], "32-true"),
        pytest.param(2, [case[0] for case in CASES[2]], "32-true", marks=pytest.mark.slow),
        pytest.param(4, [case[0] for case in CASES[4]], "32-true", marks=pytest.mark.slow),
        pytest.param(8, [case[0] for case in CASES[8]], "32-true", marks=pytest.mark.slow),
        pytest.param(4, [case[0] for case in CASES[4]], "bf16-mixed", marks=pytest.mark.slow),
    ],
)
def test_evaluation_equals_one_device(world: int, names: list[str], precision: str) -> None:
    cases = [case for case in CASES[world] if case[0] in names]
    expected = run_ranks(1, _singles, [case[1] for case in cases], precision)[0]
    ranks = run_ranks(world, _evaluate_all, cases, world, precision, timeout_s=110)
    for index, ((name, _, options), single) in enumerate(zip(cases, expected, strict=True)):
        replicas = world // (options.get(TP, 1) * options.get(PP, 1))
        predicted: list[Any] = [None] * GLOBAL_BATCH
        for rank, results in enumerate(ranks):
            result = results[index]
            for key in ("first", "during", "after", "test"):
                # bf16 products of other shapes round apart, 2^-8 of a loss's terms, and their
                # errors average out
                rel = RTOL if precision == "32-true" else 2e-3
                assert result[key] == pytest.approx(single[key], rel=rel), (name, key)
            place = rank // options.get(TP, 1) % replicas
            predicted[place::replicas] = result["predicted"]
        if precision == "32-true":
            assert predicted == single["predicted"], name
