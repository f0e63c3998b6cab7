"""Adapters in the modules of the library, and what would go wrong in silence with them."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

pytest.importorskip("transformers", "5")

from megatron_lightning.config import CompileOptions, RecomputeOptions
from megatron_lightning.layers.dropout import Dropout
from megatron_lightning.layers.styles import adapters as styles
from megatron_lightning.modules import GPTLightningModule, HuggingFaceModule
from megatron_lightning.peft import LoRA
from megatron_lightning.precision import FP8Recipe
from megatron_lightning.strategies import MegatronFP8Precision, MegatronStrategy
from tests.helpers.adapted import BATCH, CONFIG, MODELS, TEXT, Tuned, llama, train
from tests.helpers.fake_transformer_engine import installed
from tests.helpers.layouts import fit
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import trainer

ROWS: Any = [{"tokens": row[:-1], "labels": row[1:]} for row in TEXT]
TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"


def _fit(
    make: Any, options: dict[str, Any] | None, data: int = 1, **of_trainer: Any
) -> tuple[Any, list[float]]:
    loader = DataLoader(ROWS, batch_size=BATCH // data)
    run = fit(options, make(), loader, steps=4, **of_trainer)
    return run.module, run.losses


def _gpt() -> GPTLightningModule:
    return GPTLightningModule(CONFIG, learning_rate=1e-2, peft=LoRA())


def _losses_of_gpt(options: dict[str, Any] | None, data: int = 1) -> list[float]:
    return _fit(_gpt, options, data)[1]


@pytest.mark.spread(1)
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


@pytest.mark.parametrize(
    "zero", [pytest.param(False, marks=pytest.mark.slow), True], ids=["filled", "zero"]
)
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


@pytest.mark.slow
def test_fully_sharded_frozen_weights_keep_their_dtype() -> None:
    for num_bytes, elements, trained in run_ranks(2, _frozen_bytes):
        assert num_bytes == elements  # bf16 over two ranks
        assert trained == {torch.float32}  # main params


def _masks(layout: dict[str, Any], targets: list[str]) -> dict[str, torch.Tensor]:
    """Return what the dropouts of a layer kept in the first step, by the adapter's path."""
    seen: dict[str, torch.Tensor] = {}
    paths: dict[int, str] = {}
    drop = Dropout.forward

    def record(self: Dropout, x: torch.Tensor) -> torch.Tensor:
        out = drop(self, x)
        if id(self) in paths:
            seen.setdefault(paths[id(self)], (out != 0).cpu())
        return out

    def make() -> Tuned:
        module = Tuned("gpt", lora=LoRA(lora_dropout=0.5, target_modules=targets))
        module.configure_model()
        for path, child in module.named_modules():
            if "layers.1." in path and path.endswith(".dropout") and "adapters" in path:
                paths[id(child)] = path
        return module

    with patch.object(Dropout, "forward", record):
        _, losses = _fit(make, layout)
    return {**seen, "losses": torch.tensor(losses)}


@pytest.mark.slow
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


class _Moved(pl.Callback):
    """Names of the trained parameters that end where they began."""

    def __init__(self) -> None:
        self.before: dict[str, torch.Tensor] = {}
        self.still: list[str] = []

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self.before = {name: p.detach().clone() for name, p in trained.items()}

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        after = dict(module.named_parameters())
        self.still = [n for n, value in self.before.items() if torch.equal(after[n], value)]


def _still(case: str, rank_options: dict[str, Any]) -> tuple[int, list[str]]:
    options: dict[str, Any] = {}
    of_trainer: dict[str, Any] = {}
    engines: Any = nullcontext()
    if case == "recompute":
        options["recompute"] = RecomputeOptions(
            recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
        )
    elif case == "compile":
        options["compile"] = "block"
        options["compile_options"] = CompileOptions(backend="aot_eager")
    elif case == "fp8":
        recipe = FP8Recipe(scaling="current")
        of_trainer["plugins"] = [MegatronFP8Precision(recipe, backend="emulation")]
    elif case == "transformer_engine":
        engines = installed()
    moved = _Moved()
    with engines:
        if case == "transformer_engine":
            recipe = FP8Recipe(scaling="delayed", amax_history_len=16)
            plugin = MegatronFP8Precision(recipe, backend="transformer_engine")
            of_trainer["plugins"] = [plugin]
        fit = trainer(
            MegatronStrategy(**rank_options, **options),
            max_steps=2,
            callbacks=[moved],
            **of_trainer,
        )
        module = GPTLightningModule(CONFIG, learning_rate=1e-2, weight_decay=0.0, peft=LoRA(r=4))
        fit.fit(module, DataLoader(ROWS, batch_size=BATCH))
    return len(moved.before), moved.still


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        "recompute",
        "compile",
        "fp8",
        "transformer_engine",
    ],
)
def test_every_trained_parameter_has_moved_after_two_steps(case: str) -> None:
    """B is zero at first, so that A has a gradient in the second step only."""
    for count, still in run_ranks(2, _still, case, {TP: 2}):
        assert count == 56  # of 4 layers with 7 matrices
        assert not still


def _half(kind: str) -> tuple[int, int]:
    """Return the elements that this rank holds, and those of the full model."""
    full = sum(p.numel() for p in MODELS[kind]().parameters())
    strategy = MegatronStrategy(tensor_model_parallel_size=2)
    module = Tuned(kind)
    trainer(strategy, max_steps=1).fit(module, DataLoader(ROWS, batch_size=BATCH))
    return sum(p.numel() for p in module.parameters()), full


@pytest.mark.slow
def test_a_stock_peft_model_is_sharded() -> None:
    pytest.importorskip("peft", "0.21")
    for own, full in run_ranks(2, _half, "peft"):
        assert own < 0.56 * full  # norms, A of column- and B of row-parallel layers are full
