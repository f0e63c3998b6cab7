"""A training step reads no number from the device, so that the host runs ahead of it.

Exempt are what is on the host, the optimizer's step counter and the seeds of random streams, and
the first step, which looks at shapes and uses once.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from megatron_lightning.config import TransformerConfig
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.layouts import tiny_config
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import trainer

_ATEN = torch.ops.aten
_WAITS = {
    _ATEN._local_scalar_dense.default,  # item, float, bool, int and tolist
    _ATEN.equal.default,
    _ATEN.masked_select.default,
    _ATEN.nonzero.default,
}


class _Reads(TorchDispatchMode):
    """Collects where the host reads a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        by_mask = func is _ATEN.index.Tensor and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if func in _WAITS or by_mask:
            stack = "".join(traceback.format_stack(limit=16)[:-1])
            if "torch/optim/" not in stack and "draw_seed" not in stack:
                self.found.append(stack)
        return func(*args, **(kwargs or {}))


class _Watched(GPTLightningModule):
    """Watches from the start of a training step to the end of the optimizer's."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config, warmup_steps=2, decay_steps=8)
        self.reads = _Reads()
        self.is_watched = False

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> Any:
        if batch_idx and not self.is_watched:
            self.reads.__enter__()
            self.is_watched = True
        return super().training_step(batch, batch_idx)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        if self.is_watched:
            self.reads.__exit__(None, None, None)
            self.is_watched = False


def _config() -> TransformerConfig:
    return tiny_config(ffn_hidden_size=64, vocab_size=96, init_method_std=0.02)


def _reads(precision: str, options: Mapping[str, Any]) -> list[str]:
    module = _Watched(_config())
    tokens = torch.randint(0, 96, (16, 17), generator=torch.Generator().manual_seed(0))
    rows: Any = [{"tokens": row[:-1], "labels": row[1:]} for row in tokens]
    fit = trainer(
        MegatronStrategy(**options), precision=precision, gradient_clip_val=1.0, max_epochs=1
    )
    fit.fit(module, DataLoader(rows, batch_size=4))
    return module.reads.found


@pytest.mark.spread(1)
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("micro_batch_size", [None, 2])
def test_one_rank_never_waits(precision: str, micro_batch_size: int | None) -> None:
    assert _reads(precision, {"micro_batch_size": micro_batch_size}) == []


def _ranks(options: Mapping[str, Any]) -> list[str]:
    return _reads("bf16-mixed", options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tensor_model_parallel_size": 2},
        {"pipeline_model_parallel_size": 2, "micro_batch_size": 1},
    ],
    ids=["dp2", "tp2", "pp2"],
)
def test_of_several_ranks_only_a_later_stage_waits_for_what_is_logged(
    options: Mapping[str, Any],
) -> None:
    first, second = run_ranks(2, _ranks, options)
    assert first == []
    assert all("_reduce_and_broadcast" in stack for stack in second)
    assert bool(second) == ("pipeline_model_parallel_size" in options)
