"""``non_finite``: what is infinite or NaN is named with rank, parameter and micro-batch, or its
optimizer step is left out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lightning.config import LossScaleOptions
from megatron_lightning.errors import ConfigError, NonFiniteError
from megatron_lightning.strategies import MegatronMixedPrecision, MegatronStrategy
from tests.helpers.toy import ToyModule
from tests.lightning.support import DP2, MICRO, PP2, PP2_DDP2, PP2_DP2, Layout, layouts, run

STEPS, BAD_STEP, BAD_SAMPLE = 4, 2, 5


class _NotANumber(torch.autograd.Function):
    """The identity, whose gradient is NaN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * float("nan")


class _Poisoned(ToyModule):
    """One sample, marked with an impossible id, spoils the loss, the output of layer 1, or the
    gradients from layer 1 on."""

    def __init__(self, where: str) -> None:
        super().__init__(lr=1e-3)
        self.where, self.poisoned, self.calls = where, False, 0
        self.found: list[tuple[int, int]] = []

    def configure_model(self) -> None:
        super().configure_model()
        assert self.model is not None
        self.model.layers["1"].linear2.register_forward_hook(lambda *args: self._spoil(args[2]))

    def _spoil(self, output: Tensor) -> Tensor:
        if not self.poisoned:
            return output
        return (
            _NotANumber.apply(output)
            if self.where == "gradient"
            else output / 0.0
            if self.where == "output"
            else output
        )

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.calls = 0

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        self.poisoned = bool((batch["ids"] == -1).any())
        if self.poisoned:
            self.found.append((dist.get_rank() if dist.is_initialized() else 0, self.calls))
        self.calls += 1
        output = super().training_step({**batch, "ids": batch["ids"].clamp(min=0)}, batch_idx)
        if self.poisoned and self.where == "loss":
            output["loss"] = output["loss"] * float("inf")
        return output


class _Weights(pl.Callback):
    """Whether each step moved the weights, and the learning rate after it."""

    def __init__(self) -> None:
        self.moved: list[bool] = []
        self.rates: list[float] = []
        self._before: list[Tensor] = []

    def on_train_batch_start(
        self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any
    ) -> None:
        self._before = [_local(p).clone() for p in module.parameters()]

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        after = [_local(p) for p in module.parameters()]
        self.moved.append(
            any(not torch.equal(a, b) for a, b in zip(self._before, after, strict=True))
        )
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


def _local(parameter: Any) -> Tensor:
    return parameter.to_local().detach() if hasattr(parameter, "to_local") else parameter.detach()


def _train(
    layout: Layout, folder: str, where: str, policy: str, more: dict[str, Any]
) -> dict[str, Any]:
    ours = {key: value for key, value in more.items() if key != "plugins"}
    strategy, weights, module = (
        layout.strategy(non_finite=policy, **ours),
        _Weights(),
        _Poisoned(where),
    )
    data = layout.data_module(num_samples=8 * STEPS)
    loader = data.train_dataloader()
    loader.dataset[8 * BAD_STEP + BAD_SAMPLE]["ids"] = torch.full_like(loader.dataset[0]["ids"], -1)
    options = {
        "max_steps": STEPS,
        "callbacks": [weights],
        "limit_val_batches": 0,
        "gradient_clip_val": 1.0,
    }
    options["plugins"] = more.get("plugins")
    message = ""
    try:
        _trainer(strategy, folder, options).fit(module, loader)
    except NonFiniteError as error:
        message = str(error)
    assert isinstance(strategy, MegatronStrategy)
    assert module.model is not None
    return {
        "message": message,
        "found": module.found,
        "has_layer": any(True for _ in module.model.layers["1"].parameters()),
        "has_loss": module.model.head is not None,
        "moved": weights.moved,
        "rates": weights.rates,
        "skipped": strategy.skipped_steps,
    }


def _trainer(strategy: Any, folder: str, options: dict[str, Any]) -> pl.Trainer:
    from tests.helpers.trainers import trainer

    return trainer(strategy, default_root_dir=folder, **options)


WHAT = {
    "loss": "the loss",
    "output": r"the output of stage 0|the loss",
    "gradient": r"the gradient of model\.layers\.1\.linear2\.(weight|bias)",
}
FSDP = {"data_parallel": "fsdp"}
ZB = {"pipeline_schedule": "zb-h1"}
# It cannot fall.
LOWEST = {"plugins": MegatronMixedPrecision("16-mixed", "cpu", LossScaleOptions(initial_scale=1.0))}


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("layout", "where", "more"),
    [
        pytest.param(PP2_DP2, "gradient", {}, id="pp2-dp2-gradient"),
        pytest.param(PP2_DP2, "output", {}, id="pp2-dp2-output"),
        pytest.param(PP2_DP2, "gradient", {**FSDP, **ZB}, id="pp2-fsdp2-zb-gradient"),
        pytest.param(DP2, "loss", {}, id="dp2-loss"),
        pytest.param(MICRO, "gradient", LOWEST, id="micro-lowest-scale-gradient"),
        pytest.param(DP2, "gradient", FSDP, id="fsdp2-gradient", marks=pytest.mark.slow),
        pytest.param(MICRO, "gradient", {}, id="micro-gradient", marks=pytest.mark.slow),
        pytest.param(PP2, "loss", {}, id="pp2-loss", marks=pytest.mark.slow),
        pytest.param(PP2_DDP2, "gradient", ZB, id="pp2-ddp2-zb-gradient", marks=pytest.mark.slow),
    ],
)
def test_raise_names_rank_parameter_and_microbatch(
    layout: Layout, where: str, more: dict[str, Any], tmp_path: Path
) -> None:
    ranks = run(layout, _train, tmp_path, where, "raise", more)
    key = "has_loss" if where == "loss" else "has_layer"
    ((guilty, microbatch),) = {rank["found"][0] for rank in ranks if rank["found"] and rank[key]}
    pattern = (
        rf"optimizer step {BAD_STEP}: ({WHAT[where]}) is infinite or NaN in micro-batch "
        rf"{microbatch} on rank {guilty} \("
    )
    for rank in ranks:
        assert re.search(pattern, rank["message"]), rank["message"]
        assert rank["moved"] == [True] * BAD_STEP


@layouts(PP2_DP2, slow=[MICRO, DP2, PP2_DDP2])
@pytest.mark.parametrize("more", [{}, pytest.param(FSDP, marks=pytest.mark.slow)], ids=["", "fsdp"])
def test_skip_leaves_the_step_out_on_all_ranks(
    layout: Layout, more: dict[str, Any], tmp_path: Path
) -> None:
    for rank in run(layout, _train, tmp_path, "gradient", "skip", more):
        assert rank["moved"] == [step != BAD_STEP for step in range(STEPS)]
        assert rank["rates"] == pytest.approx([1e-3 * 0.98**steps for steps in (1, 2, 2, 3)])
        assert rank["skipped"] == 1


def test_unknown_policy() -> None:
    with pytest.raises(ConfigError, match=r"non_finite is 'stop', .* one of ignore, raise, skip"):
        MegatronStrategy(non_finite="stop")  # type: ignore[arg-type]


class _Spoils(pl.Callback):
    """Gradient hooks on rank 1 that return or write NaN in the second step."""

    def __init__(self, kind: str) -> None:
        self.kind, self.finite = kind, list[bool]()

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        parameter = next(p for p in module.parameters() if p.requires_grad)

        def is_bad() -> bool:
            return trainer.global_rank == trainer.world_size - 1 and trainer.global_step == 1

        def spoil(leaf: Tensor) -> None:
            if is_bad() and leaf.grad is not None:
                leaf.grad.fill_(torch.nan)

        if self.kind == "returned":
            parameter.register_hook(lambda g: torch.full_like(g, torch.nan) if is_bad() else None)
        else:
            parameter.register_post_accumulate_grad_hook(spoil)

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        self.finite.append(all(bool(_local(p).isfinite().all()) for p in module.parameters()))


def _train_spoiled(layout: Layout, folder: str, cases: list[tuple[str, dict[str, Any]]]) -> Any:
    found = []
    for kind, more in cases:
        strategy, callback = layout.strategy(non_finite="skip", **more), _Spoils(kind)
        options = {"max_steps": 3, "callbacks": [callback], "limit_val_batches": 0}
        loader = layout.data_module(num_samples=24).train_dataloader()
        _trainer(strategy, folder, options).fit(ToyModule(lr=1e-3), loader)
        assert isinstance(strategy, MegatronStrategy)
        found.append((callback.finite, strategy.skipped_steps))
    return found


@pytest.mark.slow
@layouts(DP2, MICRO, PP2_DP2)
def test_gradients_are_seen_behind_the_hooks_of_users(layout: Layout, tmp_path: Path) -> None:
    cases = [
        (kind, more) for kind in ("returned", "written") for more in ({}, {"data_parallel": "ddp"})
    ]
    if layout is DP2:
        cases.append(("returned", FSDP))
    for rank in run(layout, _train_spoiled, tmp_path, cases):
        assert rank == [([True] * 3, 1)] * len(cases)
