"""Weights after ``fit``: full tensors from the ranks' parts, and what is said where a part is taken
for the model."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM

from megatron_lightning.checkpoint import read_full
from megatron_lightning.errors import ConfigError, ShardingError
from tests.helpers.hf_models import Untouched
from tests.helpers.toy import ToyModule
from tests.lightning.support import (
    DP2,
    ONE,
    PP2,
    TP2_PP2,
    TP2_TOY,
    Layout,
    layouts,
    make_layout,
    run,
)

FSDP2 = make_layout("fsdp2", 2, 2, data_parallel="fsdp")
TP2_DP2 = Layout("tp2-dp2", 4, 2, TP2_TOY.options)
VPP2 = make_layout(
    "vpp2",
    2,
    1,
    pipeline_model_parallel_size=2,
    virtual_pipeline_model_parallel_size=2,
    micro_batch_size=2,
)


def _exported(layout: Layout, folder: str) -> dict[str, Any]:
    module = ToyModule(num_layers=4)
    trainer = layout.trainer(folder, max_steps=2)
    trainer.fit(module, datamodule=layout.data_module())
    trainer.save_checkpoint(f"{folder}/last.ckpt")
    strategy = trainer.strategy
    full = strategy.full_state_dict()
    each = dict(strategy.full_tensors())
    head = strategy.full_state_dict(module.model.head)
    with pytest.raises(ConfigError, match="no sub-module"):
        strategy.full_state_dict(torch.nn.Linear(1, 1))
    if trainer.is_global_zero:
        saved = read_full(f"{folder}/last.ckpt")["state_dict"]
        fresh = ToyModule(num_layers=4)
        fresh.configure_model()
        assert list(full) == list(each) == list(fresh.state_dict())
        assert all(torch.equal(full[name], saved[name]) for name in saved)
        fresh.load_state_dict(full, strict=True)
        assert list(head) == ["weight", "bias"]
    else:
        assert full == {} == head
    return each


@pytest.mark.spread(1)
@layouts(TP2_TOY, PP2, FSDP2, slow=[VPP2, DP2, TP2_PP2, TP2_DP2])
def test_full_tensors_are_those_of_a_checkpoint(layout: Layout, tmp_path: Path) -> None:
    first, *others = run(layout, _exported, tmp_path)
    for other in others:
        assert first.keys() == other.keys()
        assert all(torch.equal(first[name], other[name]) for name in first)


class _Asks(ToyModule):
    """Asks for its state in a hook of a save."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.state_dict()


def _warned(layout: Layout, folder: str) -> list[list[str]]:
    """Return the warnings during ``fit``, and those of states that a user asks for after it."""
    swa = StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1, annealing_epochs=1)
    trainer = layout.trainer(
        folder, max_epochs=2, enable_checkpointing=True, callbacks=[swa, ModelCheckpoint(folder)]
    )
    module, texts = _Asks(num_layers=2), []
    with warnings.catch_warnings(record=True) as during:
        warnings.simplefilter("always")
        trainer.fit(module, datamodule=layout.data_module())
    with warnings.catch_warnings(record=True) as after:
        warnings.simplefilter("always")
        torch.nn.ModuleList([module]).state_dict()  # not the part alone
        module.model.norm.state_dict()
        module.model.state_dict()
        copy.deepcopy(module).state_dict()
    for caught in (during, after):
        texts.append([str(w.message) for w in caught if "full_state_dict" in str(w.message)])
    return texts


@layouts(TP2_TOY, slow=[PP2, DP2])
def test_a_state_dict_of_a_part_is_told_once(layout: Layout, tmp_path: Path) -> None:
    ranks = run(layout, _warned, tmp_path)
    assert all(not during for during, _ in ranks)
    after = ranks[0][1]
    if layout is DP2:  # every rank has the model
        assert not after
    else:
        assert after[0].startswith("module.model.state_dict() has the part of the model")
        assert len(after) == 1 and "strategy.full_state_dict(module.model)" in after[0]


def _alone(layout: Layout, folder: str) -> str:
    """Ask for the model on rank 0 alone, while the other rank's program ends."""
    trainer = layout.trainer(folder, max_steps=1)
    trainer.fit(ToyModule(num_layers=2), datamodule=layout.data_module())
    if not trainer.is_global_zero:
        torch.distributed.destroy_process_group()
        return ""
    with pytest.raises(ConfigError) as caught:
        trainer.strategy.full_state_dict()
    return str(caught.value)


@layouts(TP2_TOY, slow=[FSDP2, PP2])
def test_one_rank_that_asks_for_the_model_is_told(layout: Layout, tmp_path: Path) -> None:
    text = run(layout, _alone, tmp_path)[0]
    assert text.startswith("strategy.full_state_dict() waits for all ranks")


class _Called(ToyModule):
    def forward(self, tokens: Tensor) -> Any:
        return self.model(tokens)


def _export(layout: Layout, folder: str) -> list[str]:
    """Return the refusals of exports of a part, after the export that they show."""
    trainer, module, refusals = layout.trainer(folder, max_steps=1), _Called(num_layers=2), []
    trainer.fit(module, datamodule=layout.data_module())
    for method in ("to_torchscript", "to_onnx"):
        with pytest.raises(ShardingError) as caught:
            getattr(module, method)(f"{folder}/model")
        refusals.append(str(caught.value))
    state = trainer.strategy.full_state_dict()
    if trainer.is_global_zero:
        full, tokens = _Called(num_layers=2), torch.zeros(1, 4, dtype=torch.long)
        full.configure_model()
        full.load_state_dict(state)
        traced = full.to_torchscript(method="trace", example_inputs=tokens)
        torch.testing.assert_close(traced(tokens), full(tokens))
    return refusals


@layouts(TP2_TOY, slow=[PP2, FSDP2])
def test_exports_of_a_part_are_refused(layout: Layout, tmp_path: Path) -> None:
    for refusals in run(layout, _export, tmp_path):
        assert all("full.load_state_dict(state); full.to_" in text for text in refusals)


def _pretrained(layout: Layout, folder: str) -> str:
    """Save a model of transformers by the line that the error shows."""
    module = Untouched("llama-tied")
    trainer = layout.trainer(folder, max_steps=1)
    rows = torch.arange(32).view(4, 8)
    trainer.fit(module, DataLoader([{"input_ids": r, "labels": r} for r in rows], batch_size=4))
    with pytest.raises(ShardingError) as caught:
        module.model.save_pretrained(folder)
    text = str(caught.value)
    line = text.partition("on every rank: ")[2].partition(". [guard:")[0]
    exec(line, {"module": module, "trainer": trainer})
    full = trainer.strategy.full_state_dict()
    trainer.strategy.barrier()
    loaded = LlamaForCausalLM.from_pretrained(folder)
    if trainer.is_global_zero:
        assert full["model.lm_head.weight"] is full["model.model.embed_tokens.weight"]
        Untouched("llama-tied").load_state_dict(full, strict=True)
        state = loaded.state_dict()
        assert all(torch.equal(state[n.removeprefix("model.")], full[n]) for n in full)
    return text


@pytest.mark.slow
@layouts(PP2, make_layout("tp2", 2, 1, tensor_model_parallel_size=2), FSDP2)
def test_save_pretrained_of_a_part_shows_the_line(layout: Layout, tmp_path: Path) -> None:
    for text in run(layout, _pretrained, tmp_path):
        assert f"module.model.save_pretrained('{tmp_path}', state_dict=trainer" in text


def _from_directory(layout: Layout, folder: str) -> None:
    module = ToyModule(num_layers=2, lr=0.02)
    trainer = layout.trainer(folder, max_steps=1)
    trainer.fit(module, datamodule=layout.data_module())
    trainer.save_checkpoint(f"{folder}/last.ckpt")
    loaded = ToyModule.load_from_checkpoint(f"{folder}/last.ckpt")
    assert loaded.hparams.lr == 0.02
    for name, value in module.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)


def test_load_from_checkpoint_reads_directories(tmp_path: Path) -> None:
    run(ONE, _from_directory, tmp_path)
