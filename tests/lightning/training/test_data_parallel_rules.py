"""Refusals of the data-parallel options, and the layout of the buckets."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from jsonargparse import ArgumentError, ArgumentParser
from torch import nn
from torch.optim import Adadelta, Adagrad, Adamax, AdamW, RMSprop

from megatron_lightning.assembly.checks.layout_checks import check_trained_layers
from megatron_lightning.config import DataParallelOptions
from megatron_lightning.errors import ConfigError
from megatron_lightning.optim.gradients.buckets import flat_layout
from megatron_lightning.optim.stepping import moments
from megatron_lightning.parallel.grid.grid import RankGrid
from megatron_lightning.parallel.grid.layout import ParallelLayout
from megatron_lightning.pipeline.schedules import resolve
from megatron_lightning.rules import check_data_parallel
from megatron_lightning.strategies import MegatronStrategy


@pytest.mark.spread(1)
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_counts_are_whole_numbers(value: object) -> None:
    with pytest.raises(ConfigError, match=r"bucket_size is .*; it must be a positive integer"):
        DataParallelOptions(bucket_size=value)  # type: ignore[arg-type]


def test_moments_have_two_dtypes() -> None:
    with pytest.raises(
        ConfigError, match=r"moments_dtype is 'fp8', which is unknown. Set it to one of fp32, bf16"
    ):
        DataParallelOptions(moments_dtype="fp8")  # type: ignore[arg-type]


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("cls", "options", "rounded"),
    [
        (AdamW, {"amsgrad": True}, {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}),
        (Adamax, {}, {"exp_avg", "exp_inf"}),
        (RMSprop, {"momentum": 0.9}, {"square_avg", "momentum_buffer"}),
        (RMSprop, {"centered": True}, set()),
        (Adadelta, {}, {"square_avg", "acc_delta"}),
        (Adagrad, {}, set()),
    ],
    ids=["adamw", "adamax", "rmsprop", "centered", "adadelta", "adagrad"],
)
def test_moments_of_every_optimizer_are_rounded(
    cls: Any, options: dict[str, Any], rounded: set[str]
) -> None:
    """But for sums, and for the variance of the centered RMSprop."""
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = cls([parameter], **options)
    parameter.grad = torch.ones(3)
    optimizer.step()
    moments.narrow(optimizer, [parameter])
    state = optimizer.state[parameter]
    assert {key for key, value in state.items() if value.dtype == torch.bfloat16} == rounded
    moments.widen(optimizer, [parameter])
    assert {value.dtype for value in state.values()} == {torch.float32}


def test_averages_that_bf16_cannot_follow_are_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"alpha=0.999: .* Set alpha to 0.99 or less"):
        moments.warn_if_lost(RMSprop([torch.nn.Parameter(torch.ones(3))], alpha=0.999))


def test_instances_need_shards_and_divide_the_ranks() -> None:
    options = DataParallelOptions(num_distributed_optimizer_instances=2)
    with pytest.raises(
        ConfigError,
        match=r"instances=2 divides .* is 'ddp', .* Set data_parallel=\"zero1\" or \"fsdp\"",
    ):
        check_data_parallel(RankGrid(ParallelLayout(), 4), "ddp", options)
    with pytest.raises(
        ConfigError, match=r"overlap_param_gather=True gathers .* data_parallel is 'ddp'"
    ):
        check_data_parallel(
            RankGrid(ParallelLayout(), 4), "ddp", DataParallelOptions(overlap_param_gather=True)
        )
    with pytest.raises(
        ConfigError, match=r"instances=2 does not divide the 3 data x context parallel ranks"
    ):
        check_data_parallel(
            RankGrid(ParallelLayout(tensor_model_parallel_size=2), 6), "zero1", options
        )
    check_data_parallel(RankGrid(ParallelLayout(tensor_model_parallel_size=2), 8), "zero1", options)
    experts = ParallelLayout(expert_model_parallel_size=4)
    check_data_parallel(RankGrid(experts, 8), "zero1", options)
    with pytest.raises(
        ConfigError,
        match=r"instances=2 does not divide the 1 ranks that hold the same experts "
        r"\(4 ranks in expert tensor 1 x expert 4 x pipeline 1\) .* a divisor of 1",
    ):
        check_data_parallel(RankGrid(experts, 4), "zero1", options)


def test_options_of_fsdp_are_its_own() -> None:
    hybrid = DataParallelOptions(num_distributed_optimizer_instances=2)
    check_data_parallel(RankGrid(ParallelLayout(), 4), "fsdp", hybrid)
    with pytest.raises(
        ConfigError, match=r"instances=2 divides the 2 .* shard nothing. Set data_parallel=\"ddp\""
    ):
        check_data_parallel(RankGrid(ParallelLayout(), 2), "fsdp", hybrid)
    for options in (
        DataParallelOptions(reshard_after_forward=False),
        DataParallelOptions(reduce_every_microbatch=True),
    ):
        check_data_parallel(RankGrid(ParallelLayout(), 2), "fsdp", options)
        with pytest.raises(
            ConfigError,
            match=(
                r'data_parallel is "zero1", which does not shard parameters. Set '
                r'data_parallel="fsdp"'
            ),
        ):
            check_data_parallel(RankGrid(ParallelLayout(), 2), "zero1", options)


def test_flat_layout_aligns_parameters_and_shards() -> None:
    assert flat_layout([10, 500, 64], 1) == ([0, 64, 576], 640)
    assert flat_layout([10, 500, 64], 3) == ([0, 64, 576], 768)  # a multiple of lcm(3, 128)


def test_options_come_from_yaml() -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(MegatronStrategy, "strategy")
    given = {
        "overlap_param_gather": True,
        "moments_dtype": "bf16",
        "num_distributed_optimizer_instances": 2,
    }
    strategy = parser.instantiate_classes(
        parser.parse_object({"strategy": {"data_parallel_options": given}})
    ).strategy
    assert strategy.options.data == DataParallelOptions(**given)
    with pytest.raises(ArgumentError, match="overlap_gather"):
        parser.parse_object({"strategy": {"data_parallel_options": {"overlap_gather": True}}})


class _Model(pl.LightningModule):
    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 2, sparse=sparse)


def test_sparse_gradients_are_refused() -> None:
    schedule = resolve("auto", num_ranks=1)
    with pytest.raises(
        ConfigError,
        match=r"embed has sparse=True, and .* 2 data-parallel ranks .* Set sparse=False",
    ):
        check_trained_layers(_Model(sparse=True), schedule, 2)
    check_trained_layers(_Model(sparse=True), schedule, 1)
    check_trained_layers(_Model(sparse=False), schedule, 2)
