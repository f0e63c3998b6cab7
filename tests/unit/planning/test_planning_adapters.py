"""Plans of a frozen model with adapters count what the model has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_lightning.config import DataParallelOptions, MoEConfig, TransformerConfig
from megatron_lightning.errors import ConfigError
from megatron_lightning.models import GPTModel
from megatron_lightning.models.costs import pipeline_units
from megatron_lightning.parallel.grid.layout import ParallelLayout
from megatron_lightning.parallel.shards.stored_weight import plain_tensors
from megatron_lightning.peft import LoRA
from megatron_lightning.planning import memory
from megatron_lightning.planning.ledger.adapter_memory import AdapterSizes
from megatron_lightning.planning.ledger.rank_parameters import ParameterCount
from tests.helpers.layouts import tiny_config

CONFIG = tiny_config(num_query_groups=2, ffn_hidden_size=48, vocab_size=50, init_method_std=0.02)
MOE = replace(CONFIG, moe=MoEConfig(num_experts=4, router_topk=2))


@pytest.mark.parametrize("config", [CONFIG, MOE], ids=["dense", "experts"])
@pytest.mark.parametrize(
    "options",
    [
        {"r": 4},
        {"r": 3, "fused": "one"},
        {"use_dora": True, "target_modules": ["linear_qkv", "mlp.linear_fc2"]},
        {"target_modules": ["linear_qkv", "mlp.linear_fc2"], "exclude_modules": ["layers.1.**"]},
    ],
)
def test_the_trained_parameters_are_counted(
    config: TransformerConfig, options: dict[str, Any]
) -> None:
    if config.moe is not None and "target_modules" in options:
        options = {"target_modules": ["linear_qkv", "experts.linear_fc2"]}
    with torch.device("meta"):
        model = LoRA(**options).apply(GPTModel(config))
    expected = sum(p.numel() for p in model.parameters() if p.requires_grad)
    sizes = AdapterSizes.of_options(options)
    units = [unit if isinstance(unit, str) else unit[0] for unit in pipeline_units(config)]
    counts = (sizes.count_unit(config, ParallelLayout(), unit) for unit in units)
    assert sum(counts, ParameterCount()).total == expected


def test_frozen_weights_have_no_gradients_and_no_moments() -> None:
    full = memory(CONFIG, ParallelLayout(), precision="bf16-true")
    lora = memory(CONFIG, ParallelLayout(), precision="bf16-true", adapters=AdapterSizes(r=2))
    trained = lora.fullest.parameters - full.fullest.parameters
    assert lora.weights_bytes == 2 * lora.fullest.parameters
    assert lora.gradients_bytes == 4 * trained
    assert lora.optimizer_bytes == 12 * trained
    assert full.gradients_bytes == 4 * full.fullest.parameters


def test_fsdp_shards_the_frozen_weights_in_their_dtype() -> None:
    options = DataParallelOptions(reshard_after_forward=True)
    one, four = (
        memory(
            CONFIG, ParallelLayout(), world_size=n, precision="bf16-true", data_parallel="fsdp",
            data_parallel_options=options, adapters=AdapterSizes(r=2),
        )
        for n in (2, 4)
    )  # fmt: skip
    base = memory(CONFIG, ParallelLayout()).fullest.parameters
    trained = one.fullest.parameters - base
    assert one.weights_bytes - four.weights_bytes == (2 * base + 4 * trained) // 4


def test_what_a_plan_does_not_know_is_refused() -> None:
    with pytest.raises(ConfigError, match="modules_to_save"):
        AdapterSizes.of_options({"modules_to_save": ["output_layer"]})
    with pytest.raises(ConfigError, match="base of LoRA is 'int3', which is unknown"):
        AdapterSizes.of_options({"base": "int3"})
    with pytest.raises(ConfigError, match=r"a format of bitsandbytes.* Set it to nvfp4"):
        AdapterSizes.of_options({"base": "nf4"})


@pytest.mark.parametrize("base", ["mxfp8", "nvfp4", "blockwise"])
@pytest.mark.parametrize("config", [CONFIG, MOE], ids=["dense", "experts"])
def test_a_base_in_few_bits_has_the_bytes_of_its_memory(
    config: TransformerConfig, base: str
) -> None:
    config = replace(config, hidden_size=128, ffn_hidden_size=256)  # full blocks
    with torch.device("meta"):
        model = LoRA(base=base).apply(GPTModel(config))  # type: ignore[arg-type]
    expected = sum(
        sum(inside.nbytes for inside in plain_tensors(p))
        for p in model.parameters()
        if not p.requires_grad
    )
    sizes = AdapterSizes.of_options({"base": base})
    units = [unit if isinstance(unit, str) else unit[0] for unit in pipeline_units(config)]
    held = (sizes.base_bytes(config, ParallelLayout(), unit, 4) for unit in units)
    assert sum(held, ParameterCount()).total == expected
    few = memory(config, ParallelLayout(), precision="32-true", adapters=sizes)
    values = memory(config, ParallelLayout(), precision="32-true", adapters=AdapterSizes())
    assert few.weights_bytes < 0.7 * values.weights_bytes
