"""Weights that something other than the step writes: hooks, callbacks, loaders of weights."""

from __future__ import annotations

import re
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
from megatron_lightning.errors import ConfigError
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
    state = trainer.strategy.full_module_state()
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


@pytest.mark.spread(1)
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "writes",
    [(("on_train_epoch_start", 4, "fill"),), SEVERAL],
    ids=["fill", "several"],
)
@layouts(DP2, ONE, DDP2, OFFLOAD, OFFLOAD2, FSDP2, BF16_MOMENTS2)
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


@layouts(DP2, slow=[ONE, DDP2, FSDP2])
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


class _Averaging(torch.optim.Optimizer):
    """SGD that swaps an average of the weights in and out, as schedule-free optimizers do."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def _own(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for p in self._own():
            if p.grad is not None:
                p.sub_(p.grad, alpha=self.param_groups[0]["lr"])
                self.state[p].setdefault("average", p.clone()).lerp_(p, 0.1)
        return loss

    @torch.no_grad()
    def swap(self) -> None:
        for p in self._own():
            if "average" in self.state[p]:
                kept = p.clone()
                p.data.copy_(self.state[p]["average"])
                self.state[p]["average"].copy_(kept)


class _Swapping(ToyModule):
    """Validates and saves with the averages."""

    def __init__(self, clamps: bool) -> None:
        super().__init__(lr=0.5)
        self.clamps = clamps
        self.losses: list[float] = []

    def configure_optimizers(self) -> Any:
        return _Averaging(self.parameters(), self.hparams.lr)

    def _optimizer(self) -> _Averaging:
        return self.optimizers().optimizer

    def on_validation_epoch_start(self) -> None:  # after Lightning's on_validation_start
        self._optimizer().swap()

    def on_validation_end(self) -> None:
        self._optimizer().swap()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().validation_step(batch, batch_idx)
        self.losses.append(float(self.trainer.strategy.reduce(loss.detach())))
        return loss

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.losses.append(float(self.trainer.strategy.reduce(outputs["loss"].detach())))
        if self.clamps:
            for p in self._optimizer().param_groups[0]["params"]:
                p.data.clamp_(-0.2, 0.2)


class _Rebinding(_Swapping):
    """Clamps the parameters as well, in other memory."""

    def on_train_batch_end(self, outputs: Any, *args: Any) -> None:
        super().on_train_batch_end(outputs, *args)
        for parameter in self.parameters():
            parameter.data = parameter.data.clamp(-0.1, 0.1)


def _swap(
    layout: Layout,
    folder: str,
    clamps: bool,
    precision: str = "32-true",
    kind: type[_Swapping] = _Swapping,
) -> Any:
    module = kind(clamps)
    trainer = layout.trainer(folder, max_epochs=2, val_check_interval=2, precision=precision)
    trainer.fit(module, layout.data_module())
    module._optimizer().swap()
    trainer.save_checkpoint(f"{folder}/swapped.ckpt")
    return module.losses, _sums(module)


@pytest.mark.slow
@pytest.mark.parametrize("clamps", [False, True], ids=["swaps", "clamps-groups"])
@layouts(DP2, ONE, DDP2, FSDP2, OFFLOAD2)
def test_weights_that_an_optimizer_writes_outside_of_steps_are_those_of_one_device(
    layout: Layout, clamps: bool, tmp_path: Path
) -> None:
    # Sums of several ranks round differently; 16 steps of a large rate amplify it.
    assert_close(run(layout, _swap, tmp_path, clamps), [single(_swap, clamps)] * layout.ranks, 5e-5)


@pytest.mark.slow
@layouts(DP2, ONE, FSDP2)
def test_main_params_that_an_optimizer_swaps_are_validated(layout: Layout, tmp_path: Path) -> None:
    # Main params keep what bf16 rounds away.
    assert_close(
        run(layout, _swap, tmp_path, False, "bf16-true")[0][0],
        single(_swap, False, "bf16-true")[0],
        0.02,
    )


def _both_written(layout: Layout, folder: str) -> str:
    try:
        _swap(layout, folder, False, "bf16-true", _Rebinding)
    except PeerFailure:
        return "peer"
    except ConfigError as error:
        return str(error)
    return "trained"


@layouts(DP2, slow=[ONE, FSDP2])
def test_a_swap_after_a_write_of_a_hook_is_refused(layout: Layout, tmp_path: Path) -> None:
    texts = run(layout, _both_written, tmp_path)
    assert all("the optimizer wrote its copies of weights" in t for t in texts if t != "peer")
    assert set(texts) != {"peer"}


class _Twice(torch.optim.SGD):
    """Steps by the gradients at weights that it has moved."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if closure is None:
            return super().step()
        with torch.enable_grad():
            closure()
        moved = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        kept = [p.clone() for p in moved]
        for p in moved:
            p.add_(p.grad, alpha=0.5)
        with torch.enable_grad():
            loss = closure()
        for p, value in zip(moved, kept, strict=True):
            p.copy_(value)
            p.sub_(p.grad, alpha=0.1)
        return loss


def _step_twice(layout: Layout, folder: str) -> dict[str, float]:
    class Twice(ToyModule):
        def configure_optimizers(self) -> Any:
            return _Twice(self.parameters(), lr=0.1)

    module = Twice()
    layout.trainer(folder, max_epochs=1).fit(module, layout.data_module())
    return _sums(module)


@layouts(OFFLOAD, slow=[DDP2])
def test_a_closure_that_is_called_twice_sees_the_moved_weights(
    layout: Layout, tmp_path: Path
) -> None:
    assert_close(run(layout, _step_twice, tmp_path), [single(_step_twice)] * layout.ranks)


class _Draws(ToyModule):
    """Draws in hooks outside of steps: weights, and noise on gradients."""

    def on_train_epoch_start(self) -> None:
        nn.init.normal_(self.model.head.weight)

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.add_(torch.randn_like(parameter.grad) * 0.01)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        self.drawn_in_steps = float(torch.rand(()))
        return super().training_step(batch, batch_idx)


def _draw(layout: Layout, folder: str) -> tuple[float, float, dict[str, float]]:
    torch.manual_seed(3)
    module = _Draws()
    layout.trainer(folder, max_epochs=2).fit(module, layout.data_module())
    return float(torch.rand(())), module.drawn_in_steps, _sums(module)


@pytest.mark.slow
@layouts(DDP2, make_layout("ddp4", 4, 4, data_parallel="ddp"))
def test_hooks_draw_the_same_numbers_on_all_replicas_and_steps_others(
    layout: Layout, tmp_path: Path
) -> None:
    ranks = run(layout, _draw, tmp_path)
    assert {after for after, _, _ in ranks} == {ranks[0][0]}
    assert len({in_steps for _, in_steps, _ in ranks}) == layout.data
    if layout.data == layout.ranks:
        assert all(sums == ranks[0][2] for _, _, sums in ranks)


def _draw_into_shards(layout: Layout, folder: str) -> str:
    class Draws(ToyModule):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                for name, parameter in self.named_parameters():
                    if name.endswith("linear1.weight"):
                        nn.init.normal_(parameter)

    try:
        layout.trainer(folder, max_epochs=2).fit(Draws(), layout.data_module())
    except PeerFailure:
        return "peer"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


def _draw_into_stages(layout: Layout, folder: str, init: str) -> str:
    class Draws(ToyModule):
        def on_train_start(self) -> None:
            for name, parameter in self.named_parameters():
                if init == "normal_" or name.endswith("linear1.weight"):
                    getattr(nn.init, init)(parameter)

    try:
        layout.trainer(folder, max_epochs=1, limit_train_batches=1).fit(
            Draws(), layout.data_module()
        )
    except PeerFailure:
        return "peer"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


@pytest.mark.parametrize(
    ("layout", "init", "found"),
    [
        (PP2, "kaiming_uniform_", r"layers.0.linear1.weight = \S+layers.2.linear1.weight"),
        (PP2, "ones_", "trained"),
        pytest.param(PP2, "normal_", "each pipeline stage has others", marks=pytest.mark.slow),
        pytest.param(
            TP2_TOY, "xavier_normal_", "linear1.weight.* equal values", marks=pytest.mark.slow
        ),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_draws_into_layers_of_stages_are_refused(
    layout: Layout, init: str, found: str, tmp_path: Path
) -> None:
    texts = run(layout, _draw_into_stages, tmp_path, init)
    assert any(re.search(found, text) for text in texts), texts
    assert all(text == "peer" or re.search(found, text) for text in texts), texts


def _train_tiled(layout: Layout, folder: str) -> str:
    class Tiled(ToyModule):
        def configure_model(self) -> None:
            super().configure_model()
            weight = next(p for n, p in self.named_parameters() if n.endswith("linear1.weight"))
            if not self.is_tiled:
                weight.data.copy_(weight.data[: len(weight) // 2].repeat(2, 1))
                weight.requires_grad_(False)
                self.is_tiled = True

        is_tiled = False

    module = Tiled()
    trainer = layout.trainer(folder, max_epochs=2)
    trainer.fit(module, layout.data_module())
    path = f"{folder}/tiled.ckpt"
    trainer.save_checkpoint(path)
    layout.trainer(folder, max_epochs=3).fit(module, layout.data_module(), ckpt_path=path)
    return "trained"


@pytest.mark.slow
@layouts(TP2_TOY, FSDP2)
def test_shards_that_the_user_made_equal_are_trained(layout: Layout, tmp_path: Path) -> None:
    assert set(run(layout, _train_tiled, tmp_path)) == {"trained"}


@layouts(TP2_TOY, slow=[FSDP2, DP2])
def test_draws_into_shards_are_refused(layout: Layout, tmp_path: Path) -> None:
    for text in run(layout, _draw_into_shards, tmp_path):
        if layout.name == "dp2":  # a full parameter on every rank
            assert text == "trained"
        else:
            assert text == "peer" or ("ShardingError" in text and "linear1.weight" in text), text
