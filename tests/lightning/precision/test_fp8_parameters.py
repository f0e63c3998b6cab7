"""Weights that are kept and gathered as quantized data of 8 bits: nothing else changes, and
less is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader

from megatron_lightning.checkpoint import read_full
from megatron_lightning.config import DataParallelOptions
from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.linear.gemm import is_quantized
from megatron_lightning.precision import FP8Recipe
from megatron_lightning.precision.assignment import apply_recipe
from megatron_lightning.precision.emulation import EmulatedGemm
from megatron_lightning.precision.weights import weight_quantizers
from megatron_lightning.strategies import MegatronFP8Precision, MegatronStrategy
from tests.helpers.fake_transformer_engine import installed
from tests.helpers.ranks import run_ranks
from tests.helpers.recipe_matrix import recipe_matrix
from tests.helpers.trainers import Losses, trainer
from tests.lightning.precision.test_fp8_combinations import (
    EP,
    ETP,
    KINDS,
    PP,
    TP,
    ZB_H1,
    ZBV,
    Case,
    Results,
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
    "experts": Case(2, {}, "experts", 2),
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
FSDP = {"data_parallel": "fsdp"}
AGAIN = {**FSDP, "data_parallel_options": DataParallelOptions(reshard_after_forward=True)}
LAYOUTS |= {
    "fsdp2": Case(2, FSDP, replicas=2),
    "fsdp3": Case(3, FSDP, replicas=3),  # which do not divide the rows
    "fsdp-again": Case(2, AGAIN, replicas=2),
    "fsdp-tp2": Case(4, {**FSDP, TP: 2}, replicas=2),
    "fsdp-zbv": Case(4, {**FSDP, **ZBV}, replicas=2),
    "fsdp-ep2": Case(4, {**FSDP, EP: 2}, "experts", 4),
    "fsdp-rows": Case(4, {**FSDP, EP: 2}, "two-experts", 4),  # of one expert, halved
    "fsdp-experts": Case(4, FSDP, "experts", 4),
    "fsdp-llama": Case(2, FSDP, "llama", 2),
    **{f"fsdp-{n}": Case(2, {**FSDP, "recompute": k}, replicas=2) for n, k in KINDS.items()},
}
FAST = [("blockwise", "dp2")]


class Seen(pl.Callback):
    """Bytes that ranks hold and gather in training."""

    def __init__(self) -> None:
        self.num_codes = self.num_weights = 0
        self.gathered: list[int] = [0]
        """Bytes of all gathers, step by step."""

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        self.num_weights = sum(p.numel() for p in module.parameters())
        self.num_codes = sum(p.numel() for p in module.parameters() if is_quantized(p.dtype))
        strategy: Any = trainer.strategy
        if strategy.part.units is None:  # also what is sent directly
            sent = strategy.run.training.accumulation.reducer.bytes_communicated["all_gather"]
            self.gathered[-1] = sent - sum(self.gathered[:-1])
        self.gathered.append(0)  # for what follows

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what collectives of torch gather into one tensor."""
        names = [n for n in ("all_gather_single", "all_gather_into_tensor") if hasattr(dist, n)]
        originals = {name: getattr(dist, name) for name in names}

        def counted(name: str) -> Any:
            def gather(*args: Any, **kwargs: Any) -> Any:
                tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
                self.gathered[-1] += max(t.nbytes for t in tensors)
                return originals[name](*args, **kwargs)

            return gather

        with ExitStack() as patches:
            for name in names:
                patches.enter_context(patch.object(dist, name, counted(name)))
            yield


def fit_kept(case: Case, scaling: str) -> Any:
    """Return the results of a case, and see that weights are codes where they should be."""
    with patch.object(EmulatedGemm, "_kept", autospec=True, side_effect=EmulatedGemm._kept) as kept:
        results = case.fit(scaling)
    assert case.compiled or kept.called == case.coded
    return results


def assert_codes_change_nothing(
    fit: Callable[[Case, str], Any], layout: Case, scaling: str
) -> None:
    plain = run_ranks(layout.ranks, fit, layout, scaling, timeout_s=200)
    coded = run_ranks(layout.ranks, fit, replace(layout, coded=True), scaling, timeout_s=200)
    for own, other in zip(coded, plain, strict=True):
        assert_equal_results(own, other)


def assert_equal_results(coded: Results, plain: Results) -> None:
    """Losses, evaluations and predictions are bit-equal: the codes are those of the full weight.
    Norms are sums of other shards, 1e-6 apart at most."""
    (losses, norms, *values), (others, sums, *same) = coded, plain
    assert losses == others
    assert norms == pytest.approx(sums, rel=1e-6)
    assert values == same


@pytest.mark.slow
@recipe_matrix(SCALINGS, LAYOUTS, fast=FAST)
@pytest.mark.timeout(240)
def test_codes_train_as_fp32_weights_do(scaling: str, case: str) -> None:
    assert_codes_change_nothing(fit_kept, LAYOUTS[case], scaling)


def _seen(case: Case, scaling: str) -> tuple[int, int, int]:
    """Return elements that are codes, all elements, and bytes gathered in a step."""
    seen = Seen()
    with seen.counting():
        case.train(scaling, seen)
    return seen.num_codes, seen.num_weights, seen.gathered[-2]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp2", pytest.param("fsdp2", marks=[pytest.mark.slow])])
def test_ranks_gather_one_byte_a_weight(layout: str) -> None:
    """Of quantized layers; embeddings, norms, biases and the output layer are gathered in fp32, and
    buckets are padded. FSDP2 gathers a unit as often as without codes."""
    case, sharded = LAYOUTS[layout], layout.startswith("fsdp")
    plain = run_ranks(case.ranks, _seen, case, "blockwise", timeout_s=100)
    coded = run_ranks(case.ranks, _seen, replace(case, coded=True), "blockwise", timeout_s=100)
    codes = 4 * 16 * 64 * 64
    for (own, weights, gathered), (_, _, before) in zip(coded, plain, strict=True):
        assert own == (0 if sharded else codes)  # FSDP2 has the main params between steps
        share = (codes + 4 * (weights - codes)) / (4 * weights)
        assert gathered / before == pytest.approx(share, rel=0.03)


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


@pytest.mark.parametrize(
    "options",
    [pytest.param({}, id="zero1"), pytest.param(FSDP, id="fsdp")],
)
@pytest.mark.slow
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
    "compiled": (
        {"data_parallel": "fsdp", "compile": "block"},
        {},
        'compile="block" and fp8_param_gather=True with data_parallel="fsdp"',
    ),
    "average": (
        {},
        {"callbacks": [WeightAveraging()]},
        "WeightAveraging reads .* data of 8 bits",
    ),
}


@pytest.mark.spread(1)
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


def test_fsdp_gathers_no_tensors_of_transformer_engine() -> None:
    with installed():
        plugin = MegatronFP8Precision(
            FP8Recipe(fp8_param_gather=True), backend="transformer_engine"
        )
        with pytest.raises(ConfigError, match=r"FSDP2 frees a layer's full weight .*zero1"):
            pl.Trainer(
                accelerator="cpu", devices=2, logger=False, plugins=[plugin],
                strategy=MegatronStrategy(start_method="fork", **FSDP),
            )  # fmt: skip
    assert not torch.distributed.is_initialized()


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
    with pytest.raises(ConfigError, match=r"quantized data .* and no scales: the fit .* has ended"):
        model.linear(torch.ones(2, 16))


def test_weights_with_two_readers_stay_in_fp32() -> None:
    model = nn.ModuleDict({name: nn.Linear(16, 16) for name in "abc"})
    model["b"].weight = model["a"].weight
    quantized = apply_recipe(model, FP8Recipe()).quantized
    assert list(weight_quantizers(model, quantized)) == ["c.weight"]
