"""Layers that are unfrozen, parameter groups and optimizers that change during a fit: trained as on
one device, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from megatron_lightning.errors import ConfigError
from megatron_lightning.resilience.failure import PeerFailure
from tests.helpers.toy import ToyModule
from tests.lightning.support import (
    DDP2,
    DP2,
    MICRO,
    ONE,
    PP2,
    Layout,
    assert_close,
    layouts,
    make_layout,
    run,
    single,
    thinned,
)

FSDP2 = make_layout("fsdp2", 2, 2, data_parallel="fsdp")


class _Unfreezes(BaseFinetuning):
    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        self.freeze(pl_module.model.layers)

    def finetune_function(
        self, pl_module: pl.LightningModule, epoch: int, optimizer: torch.optim.Optimizer
    ) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.model.layers, optimizer, lr=1e-2)


class _Changes(ToyModule):
    """Changes what is trained by ``change(self)`` at the given batch of the second epoch."""

    def __init__(self, change: Callable[[_Changes], None] | None = None, at: int = 0) -> None:
        super().__init__(num_layers=2)
        self.change, self.at = change, at
        self.configure_model()  # callbacks freeze layers before Lightning calls it

    def configure_optimizers(self) -> Any:
        frozen = {id(p) for p in self.model.layers["0"].parameters()} if self.change else set()
        stepped = [p for p in self.parameters() if p.requires_grad and id(p) not in frozen]
        return SGD(stepped, lr=0.1, momentum=0.9)

    def num_items(self, batch: dict[str, Tensor]) -> int:
        return len(batch["ids"])

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.change and self.current_epoch == 1 and batch_idx == self.at:
            self.change(self)


class _Frozen(_Changes):
    """The first layer is frozen, and in the optimizer."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.model.layers["0"].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.1, momentum=0.9)


def _torch_optimizer(module: pl.LightningModule) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = module.optimizers().optimizer
    return optimizer


def _add(module: _Changes) -> None:
    _torch_optimizer(module).add_param_group({"params": module.model.layers["0"].parameters()})


def _replace(module: _Changes) -> None:
    module.trainer.strategy.optimizers = [AdamW(module.parameters(), lr=1e-3, eps=1e-3)]


def _shrink(module: _Changes) -> None:
    group = _torch_optimizer(module).param_groups[0]
    group["params"] = group["params"][:2]


def _toggle(module: _Changes) -> None:
    module.model.layers["0"].requires_grad_(True)
    module.model.layers["1"].requires_grad_(False)


def _register(module: _Changes) -> None:
    module.bias = nn.Parameter(torch.full((1,), 0.1))
    module.model.head.register_forward_hook(lambda _, __, output: output * module.bias)
    _torch_optimizer(module).add_param_group({"params": [module.bias]})


def _fit(
    layout: Layout, folder: str, kind: type[_Changes], change: Any, at: int, accumulate: int
) -> dict[str, Tensor]:
    trainer = layout.trainer(
        folder,
        max_epochs=2,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=0.3,
        limit_val_batches=0,
        callbacks=[] if change else [_Unfreezes()],
    )
    module = kind(change, at)
    trainer.fit(module, datamodule=layout.data_module())
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("kind", "change", "at", "accumulate"),
    [
        pytest.param(_Changes, None, 0, 2, id="callback"),
        pytest.param(_Changes, _add, 0, 1, id="group"),
        pytest.param(_Changes, _replace, 1, 1, id="optimizer"),
        pytest.param(_Changes, _shrink, 0, 1, id="fewer"),
        pytest.param(_Frozen, _toggle, 1, 2, id="toggled-while-accumulating"),
    ],
)
@layouts(DDP2, slow=[ONE, MICRO])
def test_changes_are_trained_as_on_one_device(
    layout: Layout, kind: Any, change: Any, at: int, accumulate: int, tmp_path: Path
) -> None:
    expected = single(_fit, kind, change, at, accumulate)
    for rank in run(layout, _fit, tmp_path, kind, change, at, accumulate):
        assert_close(rank, expected)


@layouts(MICRO, slow=[ONE])
def test_a_parameter_made_during_fit(layout: Layout, tmp_path: Path) -> None:
    expected = single(_fit, _Changes, _register, 0, 2)
    assert_close(run(layout, _fit, tmp_path, _Changes, _register, 0, 2)[0], expected)


class _Toggled(pl.LightningModule):
    """Two optimizers that take turns; the second one's layer gets a frozen part in the second
    epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.first, self.second, self.late = (nn.Linear(4, 4) for _ in range(3))
        self.late.requires_grad_(False)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        x = batch["ids"][:, :4].float() / 16
        for optimizer in self.optimizers():
            with optimizer.toggle_model():
                optimizer.zero_grad()
                output = self.late(self.second(self.first(x).tanh()).tanh())
                self.manual_backward(F.mse_loss(output, x.flip(1)))
                optimizer.step()

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.late.requires_grad_(True)
            self.optimizers()[1].add_param_group({"params": self.late.parameters()})

    def configure_optimizers(self) -> Any:
        return [
            SGD(layer.parameters(), lr=0.1, momentum=0.9) for layer in (self.first, self.second)
        ]


def _take_turns(layout: Layout, folder: str) -> dict[str, Tensor]:
    trainer = layout.trainer(folder, max_epochs=2)
    module = _Toggled()
    trainer.fit(module, datamodule=layout.data_module())
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


@layouts(DDP2, slow=[ONE])
def test_unfreezing_between_toggled_optimizers(layout: Layout, tmp_path: Path) -> None:
    expected = single(_take_turns)
    for rank in run(layout, _take_turns, tmp_path):
        assert_close(rank, expected)


def _refused(layout: Layout, folder: str, kind: type[_Changes], change: Any, **options: Any) -> str:
    trainer = layout.trainer(folder, max_epochs=2, limit_val_batches=0, **options)
    with pytest.raises((ConfigError, PeerFailure)) as error:
        trainer.fit(kind(change), datamodule=layout.data_module())
    return "" if isinstance(error.value, PeerFailure) else str(error.value)


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("layout", "kind", "change", "text"),
    thinned(
        [
            (DP2, _Changes, _add, r"model.layers.0.\S+, .* more came into the .* SGD during fit"),
            (DP2, _Changes, _replace, "the optimizers were replaced during fit by AdamW"),
            (DP2, _Changes, _shrink, "tensors left the parameter groups of SGD"),
            (DP2, _Frozen, _toggle, r"model.layers.0.\S+, .* more became trainable during fit"),
            (FSDP2, _Changes, _add, "came into the parameter groups of SGD during fit"),
            (PP2, _Frozen, _toggle, r"model.layers.0.\S+, .* more became trainable during fit"),
            (PP2, _Changes, _replace, "replaced during fit by AdamW. The 2 pipeline ranks"),
            (DDP2, _Changes, _register, "bias was added to the module during fit"),
        ]
    ),
    ids=[
        "group",
        "optimizer",
        "fewer",
        "toggled",
        "fsdp",
        "stages",
        "stages-optimizer",
        "registered",
    ],
)
def test_changes_that_cannot_be_trained_are_refused_by_name(
    layout: Layout, kind: Any, change: Any, text: str, tmp_path: Path
) -> None:
    texts = [text for text in run(layout, _refused, tmp_path, kind, change) if text]
    assert texts
    for found in texts:
        with pytest.raises(ConfigError, match=text):
            raise ConfigError(found)


def test_main_params_are_not_regrouped(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"more came into .* step shards, main params or copies"):
        ONE.trainer(str(tmp_path), max_epochs=2, precision="bf16-true", limit_val_batches=0).fit(
            _Changes(_add), datamodule=ONE.data_module()
        )


def test_callbacks_that_unfreeze_need_parameters_that_are_stepped_themselves(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match=r"_Unfreezes adds .* Set precision=\"bf16-mixed\""):
        ONE.trainer(str(tmp_path), precision="bf16-true", callbacks=[_Unfreezes()]).fit(
            _Changes(), datamodule=ONE.data_module()
        )
