"""Layouts that a model with experts cannot have: refused before any process group exists, with the
numbers and what to set."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from megatron_lightning.config import MoEConfig, TransformerConfig
from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.moe.layer import MoELayer
from megatron_lightning.models import GPTModel
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.parallel import ParallelLayout
from megatron_lightning.parallel.grid.context import AxisGroup
from megatron_lightning.rules import check_model_layout, check_trained_experts
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.layouts import tiny_config
from tests.helpers.trainers import trainer

TP, PP, EP, ETP = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)


def _config(model: dict[str, Any], moe: dict[str, Any]) -> TransformerConfig:
    sizes = {
        "hidden_size": 16, "vocab_size": 32,
        "ffn_hidden_size": 24, "max_sequence_length": 8,
    }  # fmt: skip
    return tiny_config(**{**sizes, **model}, moe=MoEConfig(**{"num_experts": 6, **moe}))


@pytest.mark.parametrize(
    ("model", "moe", "layout", "world", "message"),
    [
        ({}, {}, {EP: 2}, 4, None),
        ({}, {}, {EP: 3, ETP: 2, TP: 2}, 6, None),
        (
            {}, {}, {EP: 4}, 4,
            r"moe.num_experts=6 is not divisible by expert_model_parallel_size=4; .* to one of "
            r"\[1, 2, 3, 6\]",
        ),
        (
            {}, {}, {EP: 3, ETP: 2}, 4,
            r"4 ranks cannot be divided into expert replicas of 6 ranks \(expert tensor 2 x expert "
            r"3 x pipeline 1\)\. Set num_nodes x devices to a multiple of 6",
        ),
        (
            {}, {}, {EP: 2, PP: 2, ETP: 2}, 4,
            r"expert replicas of 8 ranks \(expert tensor 2 x expert 2 x pipeline 2\)",
        ),
        (
            {}, {"ffn_hidden_size": 10}, {ETP: 4}, 4,
            "width of 10, which is not divisible by expert_tensor_parallel_size=4. Set "
            "moe.ffn_hidden_size to a multiple of 4, or expert_tensor_parallel_size to 1",
        ),
        ({"add_bias_linear": True}, {}, {ETP: 2}, 2, None),
        (
            {}, {"shared_expert_intermediate_size": 9}, {TP: 2}, 2,
            "shared_expert_intermediate_size=9 is not divisible by tensor_model_parallel_size=2. "
            "Set it to a multiple of 2",
        ),
    ],
)  # fmt: skip
def test_experts_and_layout(
    model: dict[str, Any],
    moe: dict[str, Any],
    layout: dict[str, Any],
    world: int,
    message: str | None,
) -> None:
    config = _config(model, moe)
    if message is None:
        check_model_layout(config, ParallelLayout(**layout), world)
        return
    with pytest.raises(ConfigError, match=message):
        check_model_layout(config, ParallelLayout(**layout), world)


def test_training_without_sequence_parallelism_is_refused_and_evaluation_is_not() -> None:
    message = (
        "experts with tensor_model_parallel_size=2 and sequence_parallel=False: each rank would "
        "route all tokens. Set sequence_parallel to True or auto."
    )
    config, layout = _config({}, {}), {TP: 2, "sequence_parallel": False}
    check_model_layout(config, ParallelLayout(**layout), 2)
    with pytest.raises(ConfigError, match=message):
        check_trained_experts(config, ParallelLayout(**layout))
    rows: Any = [{"tokens": 0, "labels": 0}]
    with pytest.raises(ConfigError, match=message):
        trainer(MegatronStrategy(**layout), devices=2, max_steps=1).fit(
            GPTLightningModule(config), DataLoader(rows)
        )
    assert not dist.is_initialized()


def test_a_model_is_checked_before_processes_start() -> None:
    fit = trainer(MegatronStrategy(**{EP: 4}), devices=4, max_steps=1)
    rows: Any = [{"tokens": 0, "labels": 0}]
    with pytest.raises(ConfigError, match="num_experts=6 is not divisible by expert_model"):
        fit.fit(GPTLightningModule(_config({}, {})), DataLoader(rows))
    assert not dist.is_initialized()


class _OwnModule(pl.LightningModule):
    """A user's module around GPTModel, without a config of its own."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.net = GPTModel(config)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        losses: Tensor = self.net(batch, labels=batch)
        return losses.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({EP: 4}, "num_experts=6 is not divisible by expert_model_parallel_size=4"),
        (
            {TP: 2, "sequence_parallel": False},
            "experts with tensor_model_parallel_size=2 and sequence_parallel=False",
        ),
    ],
)
def test_a_model_in_a_users_module_is_checked_as_well(layout: dict[str, Any], message: str) -> None:
    fit = trainer(MegatronStrategy(**layout), devices=4, max_steps=1)
    with pytest.raises(ConfigError, match=message):
        fit.fit(_OwnModule(_config({}, {})), DataLoader(torch.zeros(8, 8, dtype=torch.long)))
    assert not dist.is_initialized()


def test_a_layer_does_not_train_on_replicated_tokens() -> None:
    config = _config({}, {})
    assert config.moe is not None
    layer = MoELayer(config, config.moe)
    layer.replicas = AxisGroup("tp", (0, 1), 0, None)
    with pytest.raises(ConfigError, match="trains on 2 tensor-parallel ranks that have the same"):
        layer(torch.zeros(3, 1, 16))
