"""Recomputation under tensor, sequence, pipeline and data parallelism: losses and norms are
bit-equal to those without it."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from megatron_lightning.config import RecomputeOptions
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.language_model import RECOMPUTE, losses_of, small_gpt
from tests.helpers.ranks import run_ranks

OPTIONS = {**RECOMPUTE, "offload": RecomputeOptions(offload_modules=["mlp"], offload_min_bytes=0)}


class _Calls(pl.Callback):
    """Counts how often the attention of this rank's layers runs in training."""

    def __init__(self) -> None:
        self.count = 0

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        for name, child in module.named_modules():
            if name.endswith(".linear_qkv"):
                # Not a hook, which the strategy refuses where it would see a shard.
                child.forward = partial(self._note, child, child.forward)

    def _note(self, child: torch.nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
        # The run that only follows what units use is not recorded.
        self.count += child.training and torch.is_grad_enabled()
        return forward(*args, **kwargs)


def _train(
    layout: dict[str, Any], kind: str, dropout: float
) -> tuple[list[float], list[float], float, int]:
    pl.seed_everything(3)
    module, calls = GPTLightningModule(small_gpt(6, dropout), learning_rate=1e-2), _Calls()
    numbers = losses_of(module, MegatronStrategy(recompute=OPTIONS[kind], **layout), [calls])
    return *numbers, calls.count


def _compare(layout: dict[str, Any], kinds: list[str]) -> dict[str, Any]:
    # With dropout random numbers are drawn again, too.
    cases = [("none", 0.0), *((kind, 0.2) for kind in ["none", *kinds])]
    return {(kind, dropout): _train(layout, kind, dropout) for kind, dropout in cases}


LAYOUTS: dict[str, tuple[int, dict[str, Any], list[str]]] = {
    "tp2-pp2-zb-h1": (
        4,
        {
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
            "micro_batch_size": 1,
            "pipeline_schedule": "zb-h1",
        },
        ["uniform", "selective"],
    ),
    "fsdp2": (2, {"data_parallel": "fsdp"}, ["uniform", "selective"]),
}
SLOW: dict[str, tuple[int, dict[str, Any], list[str]]] = {
    "pp2-vpp2-dp2": (
        4,
        {
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": 2,
            "micro_batch_size": 2,
        },
        ["uniform", "block"],
    ),
    "tp2-sp-pp2": (
        4,
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "micro_batch_size": 2},
        [],
    ),
    "tp2-dp2": (
        4,
        {"tensor_model_parallel_size": 2, "sequence_parallel": False},
        ["uniform", "selective"],
    ),
    "pp2-gpipe": (
        2,
        {"pipeline_model_parallel_size": 2, "micro_batch_size": 2, "pipeline_schedule": "gpipe"},
        [],
    ),
    "pp2-dp2-zbv": (
        4,
        {
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": 2,
            "micro_batch_size": 1,
            "pipeline_schedule": "zbv",
        },
        [],
    ),
}


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    "layout", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_bit_equal_under_every_axis_and_schedule(layout: str) -> None:
    world, options, kinds = (LAYOUTS | SLOW)[layout]
    for results in run_ranks(world, _compare, options, kinds or list(OPTIONS)[1:], timeout_s=110):
        for (kind, dropout), found in results.items():
            *numbers, calls = found
            *expected, once = results["none", dropout]
            assert numbers == expected, kind
            # every forward runs once more for its backward, also where weight gradients are put off
            assert calls == once * (2 if kind == "uniform" else 1) or kind == "block"
        assert results["none", 0.0] != results["none", 0.2]
