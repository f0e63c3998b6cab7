"""Adapters in the modules of the library, and what would go wrong in silence with them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

pytest.importorskip("transformers", "5")

from megatron_lightning.layers.styles import adapters as styles
from megatron_lightning.modules import GPTLightningModule, HuggingFaceModule
from megatron_lightning.peft import LoRA
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.adapted import BATCH, CONFIG, TEXT, Tuned, llama, train
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import Losses, trainer

ROWS: Any = [{"tokens": row[:-1], "labels": row[1:]} for row in TEXT]
TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"


def _fit(
    make: Any, options: dict[str, Any] | None, data: int = 1, **of_trainer: Any
) -> tuple[Any, list[float]]:
    record = Losses()
    strategy: Any = "auto" if options is None else MegatronStrategy(**options)
    fit = trainer(strategy, max_steps=4, callbacks=[record], **of_trainer)
    module = make()
    fit.fit(module, DataLoader(ROWS, batch_size=BATCH // data))
    return module, record.losses


def _gpt() -> GPTLightningModule:
    return GPTLightningModule(CONFIG, learning_rate=1e-2, peft=LoRA())


def _losses_of_gpt(options: dict[str, Any] | None, data: int = 1) -> list[float]:
    return _fit(_gpt, options, data)[1]


@pytest.mark.parametrize("options", [{PP: 2, "micro_batch_size": 2}, {TP: 2}], ids=["pp", "tp"])
def test_a_gpt_begins_alike_on_every_layout(options: dict[str, Any]) -> None:
    """Under the strategy the model is built on meta, where B must be zero and A uniform."""
    [expected] = run_ranks(1, _losses_of_gpt, None)
    for losses in run_ranks(2, _losses_of_gpt, options):
        # AdamW divides by roots of small numbers in the first steps.
        assert losses == pytest.approx(expected, rel=1e-5)
    assert expected[-1] != expected[0]


def _losses_of_folder(folder: str, options: dict[str, Any] | None) -> list[float]:
    def make() -> HuggingFaceModule:
        return HuggingFaceModule(folder, learning_rate=1e-2, peft=LoRA(target_modules=["q_proj"]))

    return _fit(make, options)[1]


def test_a_folder_is_tuned_on_ranks_that_read_what_they_own(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    [expected] = run_ranks(1, _losses_of_folder, str(tmp_path), None)
    for losses in run_ranks(2, _losses_of_folder, str(tmp_path), {TP: 2}):
        assert losses == pytest.approx(expected, rel=1e-5)


def _forgotten_sum(zero: bool) -> str:
    """Train with adapters whose partial sums are not declared; return the error."""
    with patch.object(styles, "partial_over", lambda module, _: module):
        try:
            train("", "gpt", {TP: 2}, zero=zero, lora=LoRA(target_modules=["linear_qkv"]))
        except Exception as error:
            return str(error)
    return ""


@pytest.mark.parametrize("zero", [False, True], ids=["filled", "zero"])
def test_a_gradient_that_begins_at_zero_is_compared_later(zero: bool) -> None:
    """While B is zero, A has no gradient, and the first step shows nothing about A."""
    for error in run_ranks(2, _forgotten_sum, zero):
        assert "differ between the tensor-parallel ranks" in error
        assert "lora_A" in error


def _frozen_bytes() -> tuple[int, int, set[torch.dtype]]:
    """Return bytes of frozen shards, elements of the full ones, and the dtypes of trained ones."""
    module, _ = _fit(_gpt, {"data_parallel": "fsdp"}, 2, precision="bf16-true")
    frozen = [p for p in module.parameters() if isinstance(p, DTensor) and not p.requires_grad]
    trained = {p.dtype for p in module.parameters() if isinstance(p, DTensor) and p.requires_grad}
    return sum(p.to_local().nbytes for p in frozen), sum(p.numel() for p in frozen), trained


def test_fully_sharded_frozen_weights_keep_their_dtype() -> None:
    for num_bytes, elements, trained in run_ranks(2, _frozen_bytes):
        assert num_bytes == elements  # bf16 over two ranks
        assert trained == {torch.float32}  # main params


def _masks(layout: dict[str, Any], targets: list[str]) -> dict[str, torch.Tensor]:
    """Return what the dropouts of a layer kept in the first step, by the adapter's path."""
    seen: dict[str, torch.Tensor] = {}

    def record(path: str, module: Any, args: Any, out: torch.Tensor) -> None:
        seen.setdefault(path, (out != 0).cpu())

    def make() -> Tuned:
        module = Tuned("gpt", lora=LoRA(lora_dropout=0.5, target_modules=targets))
        module.configure_model()
        for path, child in module.named_modules():
            if "layers.1." in path and path.endswith(".dropout") and "adapters" in path:
                child.register_forward_hook(partial(record, path))
        return module

    _, losses = _fit(make, layout)
    return {**seen, "losses": torch.tensor(losses)}


def test_dropout_draws_alike_for_equal_inputs_and_apart_for_shards() -> None:
    """Without sequence parallelism column-parallel layers see the same tokens on every rank, so
    that losses are those of one process; row-parallel layers see shards."""
    layout = {TP: 2, "sequence_parallel": False}
    [expected] = run_ranks(1, _masks, {}, ["linear_qkv", "linear_fc1"])
    for rank in run_ranks(2, _masks, layout, ["linear_qkv", "linear_fc1"]):
        torch.testing.assert_close(rank["losses"], expected["losses"], rtol=1e-6, atol=0)
    first, second = run_ranks(2, _masks, layout, ["linear_fc2"])
    paths = [path for path in first if path != "losses"]
    assert paths
    for path in paths:
        assert (first[path] != second[path]).any()
    torch.testing.assert_close(first["losses"], second["losses"], rtol=1e-6, atol=0)
