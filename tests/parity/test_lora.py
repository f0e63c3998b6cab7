"""Adapters train on every layout as stock ``peft`` does on one process."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", "5")
pytest.importorskip("peft", "0.21")

from megatron_lightning.peft import LoRA
from tests.helpers.adapted import train
from tests.helpers.ranks import run_ranks

TP, PP, SP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "sequence_parallel"
MICRO, VPP = "micro_batch_size", "virtual_pipeline_model_parallel_size"

LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "one": (1, 1, {}),
    "tp": (2, 1, {TP: 2}),
    "tp-sp": (2, 1, {TP: 2, SP: True}),
    "tp4": (4, 1, {TP: 4}),  # ranks share keys
    "pp": (2, 1, {PP: 2, MICRO: 1}),
    "zbv": (2, 1, {PP: 2, VPP: 2, MICRO: 1, "pipeline_schedule": "zbv"}),
    "zero1": (2, 2, {}),
    "ddp": (2, 2, {"data_parallel": "ddp"}),
    "fsdp": (2, 2, {"data_parallel": "fsdp"}),
    "cp": (2, 1, {"context_parallel_size": 2}),
    "tp-pp": (4, 1, {TP: 2, PP: 2, MICRO: 2}),
    "tp-fsdp": (4, 2, {TP: 2, "data_parallel": "fsdp"}),
}


@lru_cache(maxsize=8)
def _one_process(**of_module: Any) -> tuple[list[float], list[float]]:
    [result] = run_ranks(1, _train, "", "peft", None, 1, of_module)
    return result


def _train(*args: Any) -> tuple[list[float], list[float]]:
    *own, of_module = args
    return train(*own, **of_module)


def _check(kind: str, layout: str, folder: Path | str = "", **of_module: Any) -> None:
    losses, norms = _one_process(**of_module)
    world, data, options = LAYOUTS[layout]
    ranks = run_ranks(world, _train, str(folder), kind, options, data, of_module, timeout_s=110)
    # fp32, sums in another order; SGD does not amplify them.
    for step, loss in enumerate(losses):
        own = sum(rank[0][step] for rank in ranks) / world
        assert own == pytest.approx(loss, rel=1e-6), (step, own, loss)
    for _, own_norms in ranks:
        assert own_norms == pytest.approx(norms, rel=2e-6)


_USUAL = [("llama", "tp", False), ("gpt", "pp", False)]
_ALL = [(kind, layout) for kind in ("llama", "gpt") for layout in LAYOUTS]
_ALL += [("peft", layout) for layout in ("tp", "pp", "fsdp", "tp-pp")]


@pytest.mark.parametrize(
    ("kind", "layout", "zero"),
    [
        pytest.param(*case, zero, marks=() if (*case, zero) in _USUAL else pytest.mark.slow)
        for case in _ALL
        for zero in (False, True)
    ],
)
def test_adapters_train_as_in_stock_peft(kind: str, layout: str, zero: bool) -> None:
    if kind == "llama" and layout == "cp":
        pytest.skip("its loss of the step needs full sequences")
    _check(kind, layout, zero=zero)


def _saved(kind: str, options: dict[str, Any] | None) -> tuple[list[float], list[float]]:
    names = {"gpt": ["output_layer"]}.get(kind, ["lm_head"])
    if kind == "peft":
        return train("", kind, options, modules_to_save=names)
    return train("", kind, options, lora=LoRA(modules_to_save=names))


@pytest.mark.parametrize("kind", ["llama", "gpt"])
@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.slow) for name in ("tp", "tp-pp")]
)
def test_modules_to_save_are_trained_as_in_stock_peft(kind: str, layout: str) -> None:
    [(losses, norms)] = run_ranks(1, _saved, "peft", None)
    world, _, options = LAYOUTS[layout]
    for own, own_norms in run_ranks(world, _saved, kind, options, timeout_s=110):
        assert own == pytest.approx(losses, rel=1e-6)
        assert own_norms == pytest.approx(norms, rel=2e-6)
