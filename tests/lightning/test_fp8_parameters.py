"""Weights that are kept and gathered as codes of 8 bits: nothing else changes, and less is sent."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader

from megatron_lightning.checkpoint import read_full
from megatron_lightning.config import DataParallelOptions
from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.gemm import is_code
from megatron_lightning.precision import FP8Recipe
from megatron_lightning.precision.assignment import apply_recipe
from megatron_lightning.precision.weights import weight_coders
from megatron_lightning.strategies import MegatronFP8Precision, MegatronStrategy
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import Losses, trainer
from tests.lightning.test_fp8_combinations import (
    EP,
    ETP,
    KINDS,
    PP,
    TP,
    ZB_H1,
    ZBV,
    Case,
    _rows,
)

SCALINGS = ("delayed", "current", "blockwise")
LAYOUTS: dict[str, Case] = {
    "dp2": Case(2, replicas=2),
    "dp4": Case(4, replicas=4),
    "tp2": Case(4, {TP: 2}, replicas=2),
    "pp2": Case(4, {PP: 2}, replicas=2),
    "zb-h1": Case(4, ZB_H1, replicas=2),
    "zbv": Case(4, ZBV, replicas=2),
    "cp2": Case(2, {"context_parallel_size": 2}),
    "experts-ep2": Case(4, {EP: 2}, "experts", 4),
    "experts-tp2": Case(4, {TP: 2, ETP: 1}, "experts", 2),
    "latent": Case(2, {}, "latent", 2),
    "llama": Case(2, {}, "llama", 2),
    "compiled": Case(2, replicas=2, compiled=True),
    "compiled-zb-h1": Case(4, ZB_H1, replicas=2, compiled=True),
    "output": Case(2, replicas=2, output=True),
    "overlapped": Case(
        2,
        {"data_parallel_options": DataParallelOptions(overlap_param_gather=True)},
        replicas=2,
    ),
    "offload": Case(
        2,
        {"data_parallel_options": DataParallelOptions(optimizer_cpu_offload=True)},
        replicas=2,
    ),
    "instances": Case(
        4,
        {"data_parallel_options": DataParallelOptions(num_distributed_optimizer_instances=2)},
        replicas=4,
    ),
    **{f"recompute-{n}": Case(2, {"recompute": k}, replicas=2) for n, k in KINDS.items()},
}
FAST = [("blockwise", "tp2"), ("current", "experts-ep2"), ("delayed", "zb-h1")]


class Seen(pl.Callback):
    """What ranks hold and send in training."""

    def __init__(self) -> None:
        self.num_codes = self.num_others = 0
        self.sent: list[int] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        sizes = Counter({True: 0, False: 0})
        for parameter in module.parameters():
            sizes[is_code(parameter.dtype)] += parameter.numel()
        self.num_codes, self.num_others = sizes[True], sizes[False]
        strategy: Any = trainer.strategy
        self.sent.append(
            strategy.run.training.accumulation.reducer.bytes_communicated["all_gather"]
        )


def _fit(case: Case, scaling: str) -> Any:
    return case.fit(scaling)


@pytest.mark.parametrize(
    ("scaling", "case"),
    [
        pytest.param(scaling, case, marks=[] if (scaling, case) in FAST else [pytest.mark.slow])
        for scaling in SCALINGS
        for case in LAYOUTS
    ],
)
@pytest.mark.timeout(240)
def test_codes_train_as_fp32_weights_do(scaling: str, case: str) -> None:
    """Losses and evaluations are bit-equal: the codes are those of the full weight. Norms are sums
    of other shards, 1e-6 apart at most."""
    layout = LAYOUTS[case]
    plain = run_ranks(layout.ranks, _fit, layout, scaling, timeout_s=200)
    coded = run_ranks(layout.ranks, _fit, replace(layout, coded=True), scaling, timeout_s=200)
    for (losses, norms, *values), (others, sums, *same) in zip(coded, plain, strict=True):
        assert losses == others
        assert norms == pytest.approx(sums, rel=1e-6)
        assert values == same


def _seen(case: Case, scaling: str) -> tuple[int, int, int]:
    """Return elements that are codes, others, and bytes gathered in a step."""
    seen = Seen()
    case.train(scaling, seen)
    return seen.num_codes, seen.num_others, seen.sent[-1] - seen.sent[-2]


@pytest.mark.parametrize("layout", ["dp2"])
def test_ranks_gather_one_byte_a_weight(layout: str) -> None:
    """Of quantized layers; embeddings, norms, biases and the output layer are gathered in fp32.
    Buckets are padded to 64 and 128 elements."""
    case = replace(LAYOUTS[layout], coded=True)
    for codes, others, gathered in run_ranks(case.ranks, _seen, case, "blockwise", timeout_s=100):
        assert codes == 4 * 16 * 64 * 64
        assert gathered == pytest.approx(codes + 4 * others, rel=0.03)


def _data(size: int) -> DataLoader[Any]:
    return DataLoader(_rows(False), batch_size=size)


def _trained(
    folder: str, coded: bool, steps: int, ckpt_path: str | None, options: dict[str, Any]
) -> tuple[list[float], list[float]]:
    """Return losses of training and of validation, during fit and after it."""
    record, losses = Losses(), list[float]()
    saved = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    recipe = FP8Recipe(scaling="delayed", format="hybrid", fp8_param_gather=coded)
    plugin = MegatronFP8Precision(recipe, backend="emulation")
    fit = trainer(
        MegatronStrategy(micro_batch_size=1, **options),
        max_steps=steps, callbacks=[record, saved], plugins=[plugin], enable_checkpointing=True,
        val_check_interval=1, limit_val_batches=1,
    )  # fmt: skip
    module = Case().module()
    hook = module.on_validation_end
    module.on_validation_end = lambda: (  # type: ignore[method-assign]
        hook(),
        losses.append(float(fit.callback_metrics["val_loss"])),
    )
    fit.fit(module, _data(2), _data(2), ckpt_path=ckpt_path)
    losses.append(fit.validate(module, _data(2), verbose=False)[0]["val_loss"])
    return record.losses, losses


def _in_bf16(path: str) -> list[float]:
    record = Losses()
    fit = trainer(
        MegatronStrategy(micro_batch_size=1), max_steps=3, callbacks=[record],
        precision="bf16-mixed",
    )  # fmt: skip
    fit.fit(Case().module(), _data(4), ckpt_path=path)
    return record.losses


@pytest.mark.parametrize("options", [{}], ids=["zero1"])
@pytest.mark.timeout(240)
def test_checkpoints_hold_fp32_weights(tmp_path: Path, options: dict[str, Any]) -> None:
    """They equal those of a training without codes, resume bit by bit, also beside it, and in bf16
    on one process."""
    paths = {coded: str(tmp_path / str(coded)) for coded in (True, False)}
    runs = {
        coded: run_ranks(2, _trained, path, coded, 4, None, options, timeout_s=100)
        for coded, path in paths.items()
    }
    assert runs[True] == runs[False]
    states = [read_full(f"{path}/step=2.ckpt") for path in paths.values()]
    coded, plain = (state["state_dict"] for state in states)
    assert list(coded) == list(plain)
    for name, weight in coded.items():
        assert weight.dtype == plain[name].dtype == torch.float32
        assert torch.equal(weight, plain[name])
    [(losses, _), *_] = runs[True]
    for other in (True, False):
        resumed = run_ranks(
            2, _trained, str(tmp_path / f"resumed {other}"), other, 4, f"{paths[True]}/step=2.ckpt",
            options, timeout_s=100,
        )  # fmt: skip
        assert resumed[0][0] == losses[2:]
    [own] = run_ranks(1, _in_bf16, f"{paths[True]}/step=2.ckpt", timeout_s=100)
    [other_own] = run_ranks(1, _in_bf16, f"{paths[False]}/step=2.ckpt", timeout_s=100)
    assert own == other_own


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "ddp": ({"data_parallel": "ddp"}, {}, 'data_parallel="ddp": .*nothing to gather.*zero1'),
    "average": ({}, {"callbacks": [WeightAveraging()]}, "WeightAveraging reads .* codes of 8 bits"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_before_a_process_group(case: str) -> None:
    strategy, options, message = REFUSED[case]
    plugin = MegatronFP8Precision(FP8Recipe(fp8_param_gather=True), backend="emulation")
    with pytest.raises(ConfigError, match=message):
        fit = pl.Trainer(
            accelerator="cpu", devices=2, logger=False, plugins=[plugin],
            strategy=MegatronStrategy(start_method="fork", **strategy), **options,
        )  # fmt: skip
        fit.fit(Case().module(), _data(2))
    assert not torch.distributed.is_initialized()


def test_transformer_engine_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"quantized_model_init is not called.*native"):
        MegatronFP8Precision(FP8Recipe(fp8_param_gather=True), backend="transformer_engine")


class Casting(nn.Module):
    """Casts its input to the dtype of a weight, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x.to(self.linear.weight.dtype))
        return y


def test_a_model_that_casts_to_the_dtype_of_a_weight_is_told() -> None:
    model = Casting()
    apply_recipe(model, FP8Recipe())
    model.linear.weight.data = model.linear.weight.data.to(torch.float8_e4m3fn)
    with pytest.raises(ConfigError, match=r"casts its activations .*fp8_param_gather=False"):
        model(torch.ones(2, 16))
    with pytest.raises(ConfigError, match=r"codes .* and no scales: the fit .* has ended"):
        model.linear(torch.ones(2, 16))


def test_weights_with_two_readers_stay_in_fp32() -> None:
    model = nn.ModuleDict({name: nn.Linear(16, 16) for name in "abc"})
    model["b"].weight = model["a"].weight
    quantized = apply_recipe(model, FP8Recipe()).quantized
    assert list(weight_coders(model, quantized)) == ["c.weight"]
