"""Weights that something other than the step writes: hooks, callbacks, loaders of weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from megatron_lightning.config import DataParallelOptions
from megatron_lightning.resilience.failure import PeerFailure
from tests.helpers.toy import ToyModule
from tests.lightning.support import (
    DDP2,
    DP2,
    ONE,
    PP2,
    TP2_TOY,
    Layout,
    assert_close,
    layouts,
    make_layout,
    run,
    single,
)

FSDP2 = make_layout("fsdp2", 2, 2, data_parallel="fsdp")
_OFFLOAD = DataParallelOptions(optimizer_cpu_offload=True)
OFFLOAD = make_layout("offload", 1, 1, data_parallel_options=_OFFLOAD)
OFFLOAD2 = make_layout("offload2", 2, 2, data_parallel_options=_OFFLOAD)
BF16_MOMENTS2 = make_layout(
    "bf16-moments2", 2, 2, data_parallel_options=DataParallelOptions(moments_dtype="bf16")
)


def _fill(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(0.02)


def _clamp_data(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data.clamp_(-0.1, 0.1)


def _rebind(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data = parameter.data * 0.5


def _vector(module: nn.Module) -> None:
    vector_to_parameters(parameters_to_vector(module.parameters()) * 0.5, module.parameters())


def _load(module: nn.Module) -> None:
    state = {name: value * 0.25 for name, value in module.state_dict().items()}
    module.load_state_dict(state)


WRITES: dict[str, Callable[[nn.Module], None]] = {
    "fill": _fill,
    "clamp": _clamp_data,
    "rebind": _rebind,
    "vector": _vector,
    "load": _load,
}


class _Written(ToyModule):
    """Writes its weights in hooks: (hook, number of earlier steps, kind of write)."""

    def __init__(self, writes: tuple[tuple[str, int, str], ...], lr: float) -> None:
        super().__init__(lr=lr)
        self.writes = writes

    def _at(self, hook: str) -> None:
        for where, step, write in self.writes:
            if (where, step) == (hook, self.trainer.global_step):
                WRITES[write](self)

    def on_fit_start(self) -> None:
        self._at("on_fit_start")

    def on_train_epoch_start(self) -> None:
        self._at("on_train_epoch_start")

    def on_train_batch_start(self, *_: Any) -> None:
        self._at("on_train_batch_start")

    def on_before_optimizer_step(self, *_: Any) -> None:
        self._at("on_before_optimizer_step")

    def on_train_batch_end(self, *_: Any) -> None:
        self._at("on_train_batch_end")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)


def _full(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value.clone()


def _sums(module: nn.Module, dtype: torch.dtype = torch.float32) -> dict[str, float]:
    """Return sums of the full parameters in the dtype in which they are used."""
    return {
        name: float(_full(parameter.detach()).to(dtype).double().abs().sum())
        for name, parameter in module.named_parameters()
    }


def _fit(
    layout: Layout,
    folder: str,
    writes: tuple[tuple[str, int, str], ...],
    precision: str,
    lr: float,
) -> dict[str, float]:
    module = _Written(writes, lr)
    trainer = layout.trainer(folder, max_epochs=3, limit_train_batches=2, precision=precision)
    trainer.fit(module, layout.data_module())
    return _sums(module, torch.bfloat16 if precision == "bf16-true" else torch.float32)


def _fit_full(layout: Layout, folder: str, *args: Any) -> dict[str, float]:
    """Return sums of the full parameters; under tp and pp read from a checkpoint."""
    if layout.name not in ("pp2", "tp2-toy"):
        return _fit(layout, folder, *args)
    writes, precision, lr = args
    trainer = layout.trainer(folder, max_epochs=3, limit_train_batches=2, precision=precision)
    module = _Written(writes, lr)
    trainer.fit(module, layout.data_module())
    state = trainer.strategy.full_module_state(folder)
    names = [] if state is None else [name for name in state if name.startswith("model.")]
    return {name: float(state[name].double().abs().sum()) for name in names}


SEVERAL = (
    ("on_fit_start", 0, "load"),
    ("on_train_batch_end", 1, "clamp"),
    ("on_train_epoch_start", 2, "rebind"),
    ("on_before_optimizer_step", 3, "rebind"),
)
# torch cannot flatten shards of unequal length.
VECTOR = (("on_train_batch_start", 4, "vector"),)


@pytest.mark.parametrize(
    ("layout", "writes"),
    [
        pytest.param(DP2, SEVERAL + VECTOR, id="dp2"),
        pytest.param(OFFLOAD2, SEVERAL + VECTOR, id="offload2"),
        pytest.param(FSDP2, SEVERAL, id="fsdp2"),
        *(
            pytest.param(layout, SEVERAL + VECTOR, id=layout.name, marks=pytest.mark.slow)
            for layout in (ONE, OFFLOAD, DDP2, PP2, TP2_TOY)
        ),
    ],
)
def test_fits_whose_hooks_write_weights_equal_one_device(
    layout: Layout, writes: tuple[tuple[str, int, str], ...], tmp_path: Path
) -> None:
    args = (writes, "32-true", 0.05)
    ranks = run(layout, _fit_full, tmp_path, *args)
    assert ranks[0]
    for sums in filter(None, ranks):
        assert_close(sums, single(_fit_full, *args))


@pytest.mark.parametrize(
    "writes",
    [(("on_train_epoch_start", 4, "fill"),), SEVERAL],
    ids=["fill", "several"],
)
@layouts(ONE, DP2, slow=[DDP2, OFFLOAD, OFFLOAD2, FSDP2, BF16_MOMENTS2])
def test_written_bf16_weights_stay_through_steps_of_rate_zero(
    layout: Layout, writes: tuple[tuple[str, int, str], ...], tmp_path: Path
) -> None:
    args = (writes, "bf16-true", 0.0)
    # The same bits, added in the same order.
    ranks = run(layout, _fit, tmp_path, *args)
    assert_close(ranks, [single(_fit, *args)] * layout.ranks, tolerance=0.0)


class _Swaps(pl.Callback):
    """Swap an average in for validation, and back."""

    def on_validation_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.kept = [parameter.detach().clone() for parameter in module.parameters()]
        _rebind(module)

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        for parameter, kept in zip(module.parameters(), self.kept, strict=True):
            parameter.data = kept


def _main_params(layout: Layout, folder: str, swaps: bool) -> dict[str, float]:
    module = ToyModule()
    trainer = layout.trainer(
        folder, max_epochs=2, precision="bf16-true", callbacks=[_Swaps()] if swaps else []
    )
    trainer.fit(module, layout.data_module())
    [optimizer] = trainer.optimizers
    return {
        str(number): float(main.detach().double().sum())
        for number, main in enumerate(optimizer.param_groups[0]["params"])
    }


@layouts(ONE, DP2, slow=[DDP2, FSDP2])
def test_an_average_swapped_in_and_back_loses_no_bit(layout: Layout, tmp_path: Path) -> None:
    swapped = run(layout, _main_params, tmp_path, True)
    assert swapped == run(layout, _main_params, tmp_path, False)


def _assigns_other_dtype(layout: Layout, folder: str) -> str:
    class Halves(ToyModule):
        def on_train_start(self) -> None:
            for parameter in self.parameters():
                parameter.data = parameter.data.to(torch.float64)

    try:
        layout.trainer(folder, max_epochs=1).fit(Halves(), layout.data_module())
    except PeerFailure:
        return "peer"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


@layouts(FSDP2)
def test_assigned_data_of_another_dtype_is_refused(layout: Layout, tmp_path: Path) -> None:
    for text in run(layout, _assigns_other_dtype, tmp_path):
        assert text == "peer" or ("ConfigError" in text and "torch.float64" in text)
