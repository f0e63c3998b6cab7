"""Hooks that write weights which a step cannot take over: quantized data, and parts of matrices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader

from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.linear.gemm import is_quantized
from megatron_lightning.optim import ChainedOptimizer
from megatron_lightning.optim.write_watch import WriteWatch
from megatron_lightning.resilience.failure import PeerFailure
from megatron_lightning.strategies import MegatronFP8Precision, MegatronStrategy
from tests.helpers.ranks import run_ranks
from tests.helpers.toy import ToyModule
from tests.helpers.trainers import Losses, trainer
from tests.lightning.precision.test_fp8_combinations import RECIPES, Case, _rows
from tests.lightning.precision.test_fp8_parameters import FSDP
from tests.lightning.support import ONE, TP2_TOY, Layout, make_layout, run

FSDP2 = make_layout("fsdp2", 2, 2, data_parallel="fsdp")


class _Halves(pl.Callback):
    """Halves weights at the start of the fit, after every step, or once between two steps."""

    def __init__(self, when: str) -> None:
        self.when = when

    def on_fit_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._write("start", module)

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        self._write("every", module)
        if trainer.global_step == 3:
            self._write("once", module)

    def _write(self, when: str, module: nn.Module) -> None:
        if when != self.when:
            return
        with torch.no_grad():
            for parameter in module.parameters():
                if is_quantized(parameter.dtype):
                    parameter.copy_((parameter.float() * 0.5).to(parameter.dtype))
                else:
                    parameter.mul_(0.5)


class _Matrices(ToyModule):
    def configure_optimizers(self) -> Any:
        names = {n for n, p in self.named_parameters() if p.dim() == 2 and ".layers." in n}
        chosen = [p for n, p in self.named_parameters() if n in names]
        others = [p for n, p in self.named_parameters() if n not in names]
        assert chosen
        return ChainedOptimizer(
            torch.optim.Muon(chosen, lr=0.02), torch.optim.SGD(others, lr=self.hparams.lr)
        )


def _matrices(layout: Layout, folder: str, when: str) -> list[float] | str:
    record = Losses()
    fit = layout.trainer(
        folder, max_epochs=1, limit_train_batches=5, callbacks=[_Halves(when), record]
    )
    try:
        fit.fit(_Matrices(), layout.data_module())
    except (ConfigError, PeerFailure) as error:
        return f"{type(error).__name__}: {error}"
    return record.losses


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "when"),
    [
        pytest.param(TP2_TOY, "every", id="tp2-every"),
        pytest.param(FSDP2, "once", id="fsdp2-once"),
        pytest.param(TP2_TOY, "start", id="tp2-start"),
        pytest.param(TP2_TOY, "once", id="tp2-once"),
        pytest.param(FSDP2, "every", id="fsdp2-every"),
    ],
)
def test_written_parts_of_matrices_are_those_of_one_device_or_refused(
    layout: Layout, when: str, tmp_path: Path
) -> None:
    ranks = run(layout, _matrices, tmp_path, when)
    if when == "once":
        for text in ranks:
            assert isinstance(text, str) and ("Peer" in text or "written between two" in text)
        return
    [single] = run(ONE, _matrices, tmp_path, when)
    means = [sum(losses) / len(losses) for losses in zip(*ranks, strict=True)]
    assert means == pytest.approx(single, rel=1e-4)  # five steps of Muon in bf16


def _codes(coded: bool, options: dict[str, Any], when: str) -> list[float] | str:
    record = Losses()
    recipe = replace(RECIPES["blockwise"], fp8_param_gather=coded)
    fit = trainer(
        MegatronStrategy(micro_batch_size=1, **options),
        max_epochs=1, callbacks=[record, _Halves(when)],
        plugins=[MegatronFP8Precision(recipe, backend="emulation")],
    )  # fmt: skip
    try:
        fit.fit(Case().module(), DataLoader(ConcatDataset([_rows(False)] * 3), batch_size=2))
    except (ConfigError, PeerFailure) as error:
        return f"{type(error).__name__}: {error}"
    return record.losses


@pytest.mark.slow
@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("options", "when"),
    [
        pytest.param({}, "once", id="zero1-once"),
        pytest.param(FSDP, "every", id="fsdp-every"),
        pytest.param({}, "start", id="zero1-start"),
        pytest.param(FSDP, "start", id="fsdp-start"),
        pytest.param(FSDP, "once", id="fsdp-once"),
    ],
)
def test_weights_that_are_quantized_data_are_written_as_others_or_refused(
    options: dict[str, Any], when: str
) -> None:
    ranks = run_ranks(2, _codes, True, options, when, timeout_s=100)
    if when == "once" or not options:
        for text in ranks:
            assert isinstance(text, str) and ("Peer" in text or "fp8_param_gather=False" in text)
        return
    plain = run_ranks(2, _codes, False, options, when, timeout_s=100)
    assert ranks == plain


def test_a_watch_names_what_was_written() -> None:
    watch, tensors = WriteWatch(), [torch.ones(3), torch.ones(5, 2, dtype=torch.bfloat16).t()]
    watch.record(tensors)
    watch.look(tensors, ["first", "second"], "Do not.")
    tensors[1][0, 3] = 2.0
    assert watch.was_written(tensors)
    with pytest.raises(ConfigError, match=r"^second: written between two steps .*\. Do not\.$"):
        watch.look(tensors, ["first", "second"], "Do not.")
    watch.record(tensors)
    assert not watch.was_written(tensors)
    watch.forget()
    tensors[0].zero_()
    watch.look(tensors, ["first", "second"], "Do not.")
