"""Quantized layers with every other feature: one recipe on a layout equals the same recipe on one
process."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from math import sqrt
from statistics import mean, stdev
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from megatron_lightning.config import (
    ContextOptions,
    LatentAttentionConfig,
    MoEConfig,
    RecomputeOptions,
)
from megatron_lightning.layers.linear.splittable import Splittable
from megatron_lightning.layers.moe.experts import GroupedLinear
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.parallel.shards.other_stages import present_modules
from megatron_lightning.precision import FP8Recipe
from megatron_lightning.precision.assignment import apply_recipe
from megatron_lightning.strategies import MegatronFP8Precision, MegatronStrategy
from tests.helpers import hf_models
from tests.helpers.language_model import RECOMPUTE
from tests.helpers.layouts import tiny_config
from tests.helpers.quantized import counted_products, dithered_casts
from tests.helpers.ranks import run_ranks
from tests.helpers.recipe_matrix import recipe_matrix
from tests.helpers.rounding import SEEDS, STUDENT_T, formulas_of_graphs
from tests.helpers.trainers import Losses, trainer

TP, PP, VPP = (f"{kind}_model_parallel_size" for kind in ("tensor", "pipeline", "virtual_pipeline"))
EP, ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"
CP, MICRO = "context_parallel_size", "micro_batch_size"
STEPS, BATCH, SEQUENCE, VOCABULARY = 3, 4, 32, 40
SCALINGS = ("delayed", "current", "rowwise", "blockwise", "mxfp8", "nvfp4")
# Random bits come from streams of a rank, and differ between layouts.
RECIPES: dict[str, FP8Recipe] = {
    name: FP8Recipe(scaling=name, stochastic_rounding=False) for name in SCALINGS
}
Results = tuple[list[float], list[float], dict[str, float], Any]
"""Losses, gradient norms, metrics of evaluation and predicted tokens."""
OUTPUT: dict[str, FP8Recipe] = {
    name: FP8Recipe(
        scaling=name, stochastic_rounding=False, modules={"**.output_layer": {"scaling": name}}
    )
    for name in SCALINGS
}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "experts": {"moe": MoEConfig(num_experts=4)},
    "two-experts": {"moe": MoEConfig(num_experts=2)},
    "one-by-one": {"moe": MoEConfig(num_experts=4, grouped_gemm=False)},
    "latent": {
        "mla": LatentAttentionConfig(
            q_lora_rank=32, kv_lora_rank=32, qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=16
        )
    },
}


class _Module(GPTLightningModule):
    """Compiles each layer, as a user would."""

    compiled = False

    def configure_model(self) -> None:
        super().configure_model()
        for layer in self.model.decoder.layers.values():
            if self.compiled and layer._compiled_call_impl is None:
                layer.compile(backend="aot_eager")


def _rows(packed: bool) -> Any:
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(0, VOCABULARY, (BATCH * STEPS, SEQUENCE + 1), generator=generator)
    rows = [{"tokens": t[:-1], "labels": t[1:]} for t in text]
    if packed:
        for i, row in enumerate(rows):
            row["document_ids"] = (torch.arange(SEQUENCE) > 5 + i).long()
    return rows


@dataclass(frozen=True)
class Case:
    """A training and what follows it."""

    ranks: int = 1
    strategy: dict[str, Any] = field(default_factory=dict)
    model: str = "gpt"
    replicas: int = 1
    packed: bool = False
    compiled: bool = False
    traced: bool = False
    """Compared with the operations of compiled blocks."""
    output: bool = False
    coded: bool = False
    accumulated: int = 1
    band: float = 1e-5
    steps: int = STEPS

    @property
    def measure(self) -> Case:
        """The same on one process. Compiled activations round elsewhere."""
        return Case(
            model=self.model,
            packed=self.packed,
            compiled=self.compiled and bool(self.strategy),
            traced=self.traced,
            output=self.output,
        )

    def train(self, scaling: str, *callbacks: pl.Callback) -> tuple[pl.Trainer, Any, Any]:
        """Return the Trainer, its module and the data."""
        torch._dynamo.reset()
        recipe = (OUTPUT if self.output else RECIPES)[scaling]
        recipe = replace(recipe, fp8_param_gather=self.coded)
        fit = trainer(
            MegatronStrategy(**{MICRO: 1, **self.strategy}),
            max_steps=self.steps,
            accumulate_grad_batches=self.accumulated,
            callbacks=[*callbacks],
            plugins=[MegatronFP8Precision(recipe, backend="emulation")],
        )
        size = BATCH // self.replicas
        module: Any
        loader: Any
        if self.model in hf_models.MODELS:
            module = hf_models.Untouched(self.model)
            loader = hf_models.loader(self.model, size)
        else:
            module = self.module()
            loader = DataLoader(_rows(self.packed), batch_size=size)
        fit.fit(module, loader)
        return fit, module, loader

    def fit(self, scaling: str) -> Results:
        """Return losses, gradient norms, and what evaluation gives."""
        record = Losses()
        fit, module, loader = self.train(scaling, record)
        if self.model in hf_models.MODELS:
            return record.losses, record.norms, {}, []
        values = {
            **fit.validate(module, loader, verbose=False)[0],
            **fit.test(module, loader, verbose=False)[0],
        }
        predicted = torch.cat(fit.predict(module, loader)).tolist()
        return record.losses, record.norms, values, predicted

    def module(self) -> _Module:
        pl.seed_everything(1, verbose=False)
        config = tiny_config(
            num_layers=4,
            hidden_size=64,
            vocab_size=VOCABULARY,
            max_sequence_length=SEQUENCE,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            **MODELS[self.model],
        )
        module = _Module(config, learning_rate=3e-3)
        module.compiled = self.compiled
        return module


def _exchange(kind: str) -> dict[str, Any]:
    return {CP: 2, "context_options": ContextOptions(cp_comm_type=kind)}


ZB_H1 = {PP: 2, "pipeline_schedule": "zb-h1"}
ZBV = {PP: 2, VPP: 2, "pipeline_schedule": "zbv"}
LEVELS = ContextOptions(cp_comm_type="a2a+p2p", hierarchical_context_parallel_sizes=[2, 2])
OFFLOAD = RecomputeOptions(offload_modules=["mlp"], offload_min_bytes=0)
KINDS = {name: options for name, options in RECOMPUTE.items() if options} | {"offload": OFFLOAD}
# Ranks that share a sum or a sequence round their parts of it to bf16, and a code that flips moves
# a value by 2^-4; scales of rows and blocks end where a rank's tokens do.
CUT = 5e-2
EXACT: dict[str, Case] = {
    "interleaved": Case(2, {PP: 2, VPP: 2}),
    "zbv": Case(2, ZBV),
    "latent-pp2": Case(2, {PP: 2}, "latent"),
    "latent-zb-h1": Case(2, ZB_H1, "latent"),
    "packed-pp2": Case(2, {PP: 2}, packed=True),
    "compiled-operations": Case(compiled=True, traced=True),
    "compiled-zb-h1": Case(2, ZB_H1, compiled=True),
    "compiled-recompute": Case(1, {"recompute": RECOMPUTE["uniform"]}, compiled=True),
    **{f"recompute-{name}": Case(1, {"recompute": kind}) for name, kind in KINDS.items()},
    **{f"zb-h1-{name}": Case(2, {**ZB_H1, "recompute": kind}) for name, kind in KINDS.items()},
    "experts-zb-h1": Case(2, ZB_H1, "experts"),
    "one-by-one-zb-h1": Case(2, ZB_H1, "one-by-one"),
    "experts-recompute": Case(1, {"recompute": RECOMPUTE["selective"]}, "experts"),
    "output-zb-h1": Case(2, ZB_H1, output=True),
    "zero1": Case(2, replicas=2),
    "fsdp-recompute": Case(
        2, {"data_parallel": "fsdp", "recompute": RECOMPUTE["uniform"]}, replicas=2
    ),
    "hf-pp2": Case(2, {PP: 2}, "llama"),
    "hf-experts-zb-h1": Case(2, ZB_H1, "mixtral"),
    "hf-encoder-decoder": Case(2, {PP: 2}, "t5"),
}
BANDS: dict[str, Case] = {
    "compiled": Case(compiled=True, band=CUT),
    "cp2-p2p": Case(2, _exchange("p2p"), band=CUT),
    "cp2-a2a": Case(2, _exchange("a2a"), band=CUT),
    "cp2-all-gather": Case(2, _exchange("all_gather"), band=CUT),
    "cp4-levels": Case(4, {CP: 4, "context_options": LEVELS}, band=CUT),
    "packed-cp2": Case(2, {CP: 2}, packed=True, band=CUT),
    "cp2-zb-h1": Case(4, {CP: 2, **ZB_H1}, band=CUT),
    "latent-tp2": Case(2, {TP: 2}, "latent", band=CUT),
    "latent-cp2": Case(2, {CP: 2}, "latent", band=CUT),
    "compiled-tp2": Case(2, {TP: 2}, compiled=True, band=CUT),
    "output-tp2": Case(2, {TP: 2}, output=True, band=CUT),
    "zbv-tp2": Case(4, {**ZBV, TP: 2}, band=CUT),
    "hf-tp2": Case(2, {TP: 2}, "llama", band=CUT),
    "hf-tp2-pp2": Case(4, {TP: 2, PP: 2}, "llama", band=CUT),
}
# Experts multiply rows of several ranks' micro-batches together, which then share scales.
ROUTED: dict[str, Case] = {
    "experts-tp2-ep2": Case(4, {TP: 2, EP: 2, ETP: 1}, "experts", 2),
    "experts-etp2-ep2": Case(4, {TP: 2, EP: 2}, "experts", 2),
    "experts-zbv-ep2": Case(4, {**ZBV, EP: 2}, "experts", 2),
}
CASES = {**EXACT, **BANDS, **ROUTED}
# A code of 4 bits that flips moves a value by a quarter, and norms of a small Llama by 5 to 9 %.
RANDOM = [
    *(("nvfp4", case) for case in BANDS),
    *((scaling, case) for scaling in SCALINGS for case in ROUTED),
]
FAST = [
    ("delayed", "interleaved"),
    ("mxfp8", "latent-zb-h1"),
    ("delayed", "output-zb-h1"),
]


def _fit(case: Case, scaling: str) -> Results:
    # Of the compiled training, too: the last norm is in no graph.
    with formulas_of_graphs() if case.traced else nullcontext():
        return case.fit(scaling)


@cache
def _one(case: str, scaling: str) -> Results:
    [results] = run_ranks(1, _fit, CASES[case].measure, scaling, timeout_s=100)
    return results  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.timeout(200)
@recipe_matrix(SCALINGS, CASES, fast=FAST, without=RANDOM)
def test_training_and_evaluation_equal_one_process(scaling: str, case: str) -> None:
    """Norms are global; a loss is that of a replica's samples. Evaluation follows
    training: validate, test and, where numbers are equal, predict."""
    own = CASES[case]
    band = own.band
    losses, norms, values, predicted = _one(case, scaling)
    for result in run_ranks(own.ranks, _fit, own, scaling, timeout_s=150):
        assert result[1] == pytest.approx(norms, rel=band)
        if own.replicas == 1:
            assert result[0] == pytest.approx(losses, rel=band)
            assert result[2] == pytest.approx(values, rel=band)
            if case in EXACT:
                assert result[3] == predicted


INTERVAL = STUDENT_T * sqrt(1 + 1 / SEEDS)
"""Within so many standard deviations of the mean of ``SEEDS`` runs, another one lies."""
# Scales of tokens, or of the history, are those of one process; only blocks of tokens in weight
# gradients are others.
OF_TOKENS = ("delayed", "rowwise", "blockwise", "mxfp8")


def _dithered(case: Case, scaling: str) -> list[tuple[list[float], list[float]]]:
    runs = []
    for seed in range(SEEDS):
        record = Losses()
        with dithered_casts(seed):
            case.train(scaling, record)
        runs.append((record.losses, record.norms))
    return runs


@cache
def _roundings(model: str, packed: bool, output: bool, scaling: str) -> list[tuple[float, float]]:
    """Return mean and standard deviation of each loss, then of each norm, over trainings on one
    process that round every value at random."""
    case = Case(model=model, packed=packed, output=output)
    [runs] = run_ranks(1, _dithered, case, scaling, timeout_s=200)
    values = zip(*([*losses, *norms] for losses, norms in runs), strict=True)
    return [(mean(own), stdev(own)) for own in values]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("scaling", "case"), RANDOM)
def test_trainings_that_round_elsewhere_differ_as_much_as_random_roundings(
    scaling: str, case: str
) -> None:
    own = CASES[case]
    results = run_ranks(own.ranks, _fit, own, scaling, timeout_s=150)
    losses = [mean(each) for each in zip(*(result[0] for result in results), strict=True)]
    norms = results[0][1]
    assert all(result[1] == norms for result in results)
    roundings = _roundings(own.model, own.packed, own.output, scaling)
    for value, (middle, spread) in zip([*losses, *norms], roundings, strict=True):
        assert value == pytest.approx(middle, abs=INTERVAL * spread)
    if case == "experts-zbv-ep2" and scaling in OF_TOKENS:
        expected, others, _, _ = _one(case, scaling)
        assert losses[0] == pytest.approx(expected[0], rel=1e-5)
        assert norms[0] == pytest.approx(others[0], rel=1e-3)


# -------------------------------------------------------------------------- what holds on all ranks


class _Fp32(MegatronFP8Precision):
    """Activations in fp32, so that parts of sums are not rounded to bf16."""

    def forward_context(self) -> AbstractContextManager[None]:
        return nullcontext()


def _fit_fp32(strategy: dict[str, Any], scaling: str) -> Any:
    record = Losses()
    in_fp32 = partial(apply_recipe, dtype=torch.float32)
    with patch("megatron_lightning.strategies.fp8.apply_recipe", in_fp32):
        fit = trainer(
            MegatronStrategy(**{MICRO: 1, **strategy}),
            max_steps=STEPS,
            callbacks=[record],
            plugins=[_Fp32(RECIPES[scaling], backend="emulation")],
        )
        fit.fit(Case().module(), DataLoader(_rows(False), batch_size=BATCH))
    return record.losses, record.norms


@pytest.mark.parametrize(
    ("scaling", "ranks", "strategy"),
    [
        pytest.param("current", 2, {TP: 2}, marks=pytest.mark.slow),
        pytest.param("delayed", 4, {TP: 2, PP: 2}, marks=pytest.mark.slow),
        *(pytest.param(s, 2, {TP: 2}, marks=pytest.mark.slow) for s in ("delayed", "mxfp8")),
    ],
)
def test_tensor_parallel_trainings_are_equal_but_for_codes_that_flip(
    scaling: str, ranks: int, strategy: dict[str, Any]
) -> None:
    """A layer's products are equal to 1e-5 (``test_fp8_layers.py``). In a training the last bits of
    fp32 sums flip codes that lie at a tie, of 10^5 values a few: noise of 6e-8 on what norms return
    changes the losses of one process by 9e-4 and the norms by 3e-3."""
    [(losses, norms)] = run_ranks(1, _fit_fp32, {}, scaling)
    for own, others in run_ranks(ranks, _fit_fp32, strategy, scaling):
        assert own == pytest.approx(losses, rel=2e-3)
        assert others == pytest.approx(norms, rel=1e-2)


class _Watch(pl.Callback):
    """Keeps the layers, products and histories of a run."""

    def __init__(self, counts: dict[str, int]) -> None:
        self.counts = counts

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.layers = [
            name
            for name, child in present_modules(pl_module)
            if isinstance(child, (nn.Linear, Splittable, GroupedLinear))
            and not name.endswith(("output_layer", "lm_head"))
        ]

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        plugin: Any = trainer.precision_plugin
        self.histories = {name: h.entries.tolist() for name, h in plugin.layers._histories()}
        self.seen = dict(self.counts)


def _watched(case: Case, scaling: str) -> Any:
    with counted_products(4 if case.model == "experts" else 1) as counts:
        watch = _Watch(counts)
        replace(case, steps=1).train(scaling, watch)
    return len(watch.layers), watch.seen, watch.histories


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(2, {TP: 2}, "latent"), id="latent-tp2"),
        pytest.param(Case(2, {TP: 2}, "llama"), id="hf-tp2"),
        pytest.param(Case(1, {}, "llama"), id="hf"),
        pytest.param(Case(2, {TP: 2}), id="tp2"),
        pytest.param(
            Case(2, {TP: 2, EP: 2, ETP: 1}, "experts"), id="experts-tp2-ep2",
        ),
    ],
)  # fmt: skip
def test_the_three_products_of_every_layer_are_quantized(case: Case) -> None:
    """Column, row, replicated and low-rank layers, experts and untouched ``nn.Linear``."""
    for layers, counts, _ in run_ranks(case.ranks, _watched, case, "current"):
        products = 3 * layers * BATCH // case.replicas
        assert layers and counts == {"products": products, "quantized": products}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(4, {TP: 2}, replicas=2), id="tp2-dp2"),
        pytest.param(Case(4, {CP: 2}, replicas=2), id="cp2-dp2"),
        pytest.param(Case(4, {TP: 2, **ZBV}), id="tp2-zbv"),
        pytest.param(Case(4, {TP: 2, EP: 2}, "experts", 2), id="experts-tp2-ep2"),
        pytest.param(
            Case(2, {"data_parallel": "fsdp", "recompute": KINDS["uniform"]}, replicas=2),
            id="fsdp2",
        ),
    ],
)
def test_histories_are_equal_on_all_ranks(case: Case) -> None:
    """One entry a micro-batch, as in the step that all ranks of a layer take together."""
    results = run_ranks(case.ranks, _watched, case, "delayed")
    entries = BATCH // case.replicas
    everywhere: dict[str, list[float]] = {}
    for _, _, histories in results:
        assert histories and all(len(own) == entries for own in histories.values())
        for name, own in histories.items():
            assert everywhere.setdefault(name, own) == own, name
