"""Named layouts, the model that most tests share, and the training of a module on a layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from megatron_lightning.config import TransformerConfig
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.ranks import run_ranks
from tests.helpers.toy import ToyData
from tests.helpers.trainers import Losses, trainer

STEPS, BATCH, GLOBAL_BATCH = 2, 4, 8
TP = "tensor_model_parallel_size"
PP = "pipeline_model_parallel_size"
VPP = "virtual_pipeline_model_parallel_size"
CP = "context_parallel_size"
EP = "expert_model_parallel_size"
ETP = "expert_tensor_parallel_size"
SP = "sequence_parallel"
MICRO = "micro_batch_size"
AXES = {
    "tp": TP,
    "sp": SP,
    "pp": PP,
    "vpp": VPP,
    "cp": CP,
    "ep": EP,
    "etp": ETP,
    "mbs": MICRO,
    "dp": "data_parallel",
}
"""Short names of the strategy's options."""


def spelled_out(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of the strategy with the names of :data:`AXES` replaced."""
    return {AXES.get(name, name): value for name, value in options.items()}


@dataclass(frozen=True)
class Layout:
    """How many ranks, and how MegatronStrategy uses them; ``options`` None represents Lightning's
    own strategy."""

    name: str
    ranks: int
    data: int
    options: tuple[tuple[str, Any], ...] | None

    def strategy(self, **more: Any) -> MegatronStrategy | str:
        return (
            "auto" if self.options is None else MegatronStrategy(**{**dict(self.options), **more})
        )

    def trainer(self, folder: str, **options: Any) -> pl.Trainer:
        return trainer(self.strategy(), default_root_dir=folder, **options)

    def data_module(self, **options: Any) -> ToyData:
        """Return data whose global batches are those of one device."""
        return ToyData(**{"batch_size": GLOBAL_BATCH // self.data, "num_samples": 32, **options})


def make_layout(name: str, ranks: int, data: int | None = None, **axes: Any) -> Layout:
    """Return a layout; ``axes``: options of the strategy, also by the names of :data:`AXES`."""
    options = spelled_out(axes)
    model = prod(options.get(AXES[axis], 1) for axis in ("tp", "pp", "cp"))
    return Layout(name, ranks, data or ranks // model, tuple(options.items()))


LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        Layout("single", 1, 1, None),
        make_layout("one", 1),
        make_layout("tp2", 2, tp=2),
        make_layout("pp2", 2, pp=2, mbs=2),
        make_layout("pp2-vpp2", 2, pp=2, vpp=2, mbs=1),
        make_layout("cp2", 2, cp=2),
        make_layout("ep2", 2, ep=2),
        make_layout("dp2-zero1", 2),
        make_layout("ddp2", 2, dp="ddp"),
        make_layout("fsdp2", 2, dp="fsdp"),
        make_layout("tp2-pp2", 4, tp=2, pp=2, mbs=1),
        make_layout("tp2-cp2", 4, tp=2, cp=2),
    )
}
"""Layouts of the language model; "single" is Lightning's own strategy."""
AnyLayout = str | Layout | Mapping[str, Any] | MegatronStrategy | None


def tiny_config(**changes: Any) -> TransformerConfig:
    """Return a config of four heads of eight. Its gradients are large enough to tell two runs
    apart."""
    defaults: dict[str, Any] = {
        "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 64,
        "max_sequence_length": 16, "init_method_std": 0.1,
    }  # fmt: skip
    if isinstance(changes.get("layer_pattern"), str):  # it has the number of layers
        del defaults["num_layers"]
    return TransformerConfig(**{**defaults, **changes})


def token_rows(count: int, length: int, vocabulary: int, seed: int = 3) -> Any:
    """Return ``count`` samples of random tokens and the tokens after them, both [length]."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(0, vocabulary, (count, length + 1), generator=generator)
    return [{"tokens": row[:-1], "labels": row[1:]} for row in text]


def strategy_of(layout: AnyLayout) -> MegatronStrategy | str:
    """Return the strategy of a layout: a name of :data:`LAYOUTS`, options of the strategy, None:
    Lightning's own."""
    if layout is None:
        return "auto"
    if isinstance(layout, str):
        layout = LAYOUTS[layout]
    if isinstance(layout, Layout):
        return layout.strategy()
    return MegatronStrategy(**spelled_out(layout)) if isinstance(layout, Mapping) else layout


@dataclass(frozen=True)
class Fit:
    """A training that has ended."""

    losses: list[float]
    norms: list[float]
    trainer: pl.Trainer
    module: pl.LightningModule

    @property
    def logged(self) -> dict[str, float]:
        """The Trainer's ``callback_metrics``."""
        return {name: float(value) for name, value in self.trainer.callback_metrics.items()}


def fit(
    layout: AnyLayout,
    model: TransformerConfig | pl.LightningModule,
    data: Any = None,
    validation: Any = None,
    *,
    steps: int | None = None,
    callbacks: Sequence[pl.Callback] = (),
    record: Losses | None = None,
    ckpt_path: Any = None,
    **of_trainer: Any,
) -> Fit:
    """Train on this process's ranks.

    Args:
        layout: As :func:`strategy_of` takes it.
        model: A module, or the config of a ``GPTLightningModule``.
        data: A loader or a data module. None: :func:`token_rows` for the config.
        validation: A loader.
        steps: ``max_steps``.
        callbacks: Called after ``record``, the collector of losses and gradient norms.
        of_trainer: More options of the Trainer, and ``ckpt_path``.
    """
    strategy, record = strategy_of(layout), record or Losses()
    if data is None:
        assert isinstance(model, TransformerConfig), "random tokens need a config"
        steps, replicas = steps or STEPS, 1
        if isinstance(strategy, MegatronStrategy) and dist.is_initialized():
            replicas = strategy.layout.data_parallel_size(dist.get_world_size())
        rows = token_rows(steps * BATCH, model.max_sequence_length, model.vocab_size)
        data = DataLoader(rows, batch_size=BATCH // replicas)
    if isinstance(model, TransformerConfig):
        model = GPTLightningModule(model)
    if steps is not None:
        of_trainer["max_steps"] = steps
    run = trainer(strategy, callbacks=[record, *callbacks], **of_trainer)
    run.fit(model, data, validation, ckpt_path=ckpt_path)
    return Fit(record.losses, record.norms, run, model)


def fit_losses(*args: Any, **options: Any) -> tuple[list[float], list[float]]:
    """Return the losses and gradient norms of :func:`fit`."""
    run = fit(*args, **options)
    return run.losses, run.norms


def assert_equals_one_process(
    layout: str | Layout, config: TransformerConfig, **options: Any
) -> None:
    """Compare the losses and gradient norms of a layout with one process."""
    layout = LAYOUTS[layout] if isinstance(layout, str) else layout
    options = {"gradient_clip_val": 1.0, **options}
    ((expected, norms),) = run_ranks(1, partial(fit_losses, "one", config, **options))
    results = run_ranks(layout.ranks, partial(fit_losses, layout, config, **options))
    losses = [sum(step) / len(step) for step in zip(*(own for own, _ in results), strict=True)]
    # fp32, sums in another order.
    assert losses == pytest.approx(expected, rel=1e-5)
    assert results[0][1] == pytest.approx(norms, rel=1e-5)
