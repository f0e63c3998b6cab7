"""A full module becomes a rank's part, that part is used again, and its state is read under any
layout."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_lightning.assembly.assemble import assemble, is_assembled, is_full, reattach
from megatron_lightning.assembly.part import Part
from megatron_lightning.assembly.state.module_shards import ModuleState
from megatron_lightning.assembly.state.state_entries import StateEntries
from megatron_lightning.checkpoint import open_checkpoint, read_full, save_sharded
from megatron_lightning.config import PipelineOptions
from megatron_lightning.errors import ConfigError
from megatron_lightning.models.transformer import GPTModel
from megatron_lightning.parallel.grid.context import ParallelContext
from megatron_lightning.parallel.grid.layout import ParallelLayout
from megatron_lightning.pipeline.schedules.actions import Placement
from tests.helpers.layouts import tiny_config
from tests.helpers.ranks import run_ranks

CONFIG = tiny_config(
    num_layers=2,
    hidden_size=16,
    num_attention_heads=4,
    vocab_size=13,  # not divisible by two ranks
    max_sequence_length=8,
    share_embeddings_and_output_weights=True,
)
LAYOUTS = {"tp2": (2, 1), "pp2": (1, 2), "tp2pp2": (2, 2)}


def _assembled(
    tensor: int, pipeline: int, *, on_meta: bool = False
) -> tuple[nn.Module, Part, ParallelContext, Placement]:
    layout = ParallelLayout(
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        sequence_parallel=tensor > 1,
    )
    context, placement = ParallelContext(layout), Placement.loop(pipeline)
    with torch.device("meta" if on_meta else "cpu"):
        # The model is below the module, as in a LightningModule.
        module = nn.ModuleDict({"model": GPTModel(CONFIG)})
    return module, assemble(module, context, None, placement, PipelineOptions()), context, placement


def _full_state(folder: Path) -> dict[str, Tensor]:
    state: dict[str, Tensor] = read_full(str(folder))["state_dict"]
    return state


def _save(folder: str, tensor: int, pipeline: int) -> None:
    """Save random weights, a copy of them under another key, and a tensor of nobody's."""
    module, part, context, _ = _assembled(tensor, pipeline)
    state = {
        name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)
    }
    averaged = {name: value + 1 for name, value in state.items()} | {"steps": torch.tensor([7.0])}
    checkpoint: dict[str, Any] = {"state_dict": state, "averaged": averaged, "epoch": 3}
    module_state = ModuleState(module, part, context)
    shards = module_state.module_shards(checkpoint)
    shards += StateEntries(module_state).take(checkpoint, compare=True).shards
    assert not checkpoint["averaged"] and checkpoint["epoch"] == 3
    save_sharded(folder, shards, checkpoint, group=context.axis("world"))


def _load(folder: str, tensor: int, pipeline: int) -> None:
    """Every tensor is this rank's shard of the full one."""
    module, part, context, _ = _assembled(tensor, pipeline, on_meta=True)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(-1.0)
    state, source = (
        ModuleState(module, part, context),
        open_checkpoint(folder, group=context.axis("world")),
    )
    state.load_module(source)
    full = _full_state(Path(folder))
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(
            parameter.detach(),
            part.specs[name].shard(full[part.tied.get(name, name)]),
            rtol=0,
            atol=0,
        )
    copies = source.state()
    StateEntries(state).load(source, copies)
    assert {*copies["averaged"]} == {*module.state_dict(), "steps"} and copies["averaged"][
        "steps"
    ] == 7.0
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(copies["averaged"][name], parameter.detach() + 1, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.spread(1)
@pytest.mark.parametrize("size", LAYOUTS.values(), ids=LAYOUTS)
def test_the_state_of_one_layout_is_read_by_another(size: tuple[int, int], tmp_path: Path) -> None:
    num_ranks = size[0] * size[1]
    run_ranks(1, _save, str(tmp_path / "one"), 1, 1)
    run_ranks(num_ranks, _load, str(tmp_path / "one"), *size)
    run_ranks(num_ranks, _save, str(tmp_path / "many"), *size)
    run_ranks(1, _load, str(tmp_path / "many"), 1, 1)
    one, many = _full_state(tmp_path / "one"), _full_state(tmp_path / "many")
    assert one.keys() == many.keys() and all(torch.equal(one[name], many[name]) for name in one)


def _use_again(tensor: int, pipeline: int) -> None:
    module, part, context, placement = _assembled(tensor, pipeline)
    assert is_assembled(module) and not is_full(module, context) and part.describes(module)
    values = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    for again in (module, copy.deepcopy(module)):
        second = reattach(again, context, placement, PipelineOptions())
        assert (second.specs, second.tied, second.names) == (part.specs, part.tied, part.names)
        assert (second.stage_of, second.units_of_stage) == (part.stage_of, part.units_of_stage)
        assert (
            second.num_parameters
            == part.num_parameters
            == sum(p.numel() for p in GPTModel(CONFIG).parameters())
        )
        assert all(
            torch.equal(parameter, values[name]) for name, parameter in again.named_parameters()
        )
    with pytest.raises(ConfigError, match=r"by an earlier Trainer .* Create a new module"):
        reattach(module, context, Placement.v(2), PipelineOptions())
    module["head"] = nn.Linear(16, 2)
    assert not part.describes(module)
    assert {"head.weight", "head.bias"} <= {
        *reattach(module, context, placement, PipelineOptions()).specs
    }
    del module["head"]
    module["model"] = GPTModel(CONFIG)  # built again by configure_model
    assert is_full(module, context)
    assert assemble(module, context, None, placement, PipelineOptions()).specs == part.specs


@pytest.mark.spread(1)
@pytest.mark.parametrize("size", LAYOUTS.values(), ids=LAYOUTS)
def test_a_part_is_used_again(size: tuple[int, int]) -> None:
    run_ranks(size[0] * size[1], _use_again, *size)


def test_without_a_plan_one_rank_needs_none() -> None:
    module = nn.ModuleDict({"own": nn.Linear(3, 5)})
    part = assemble(
        module, ParallelContext(ParallelLayout()), None, Placement.loop(1), PipelineOptions()
    )
    assert part.specs["own.weight"].local_shape == (5, 3) and part.units_of_stage == {}
