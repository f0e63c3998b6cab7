"""Trainings by the Transformer Engine backend with a package that computes in fp32, against torch's
own layers on one process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from megatron_lightning.checkpoint import read_full
from megatron_lightning.config import DataParallelOptions, RecomputeOptions
from megatron_lightning.layers.linear.gemm import is_quantized
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.precision import FP8Recipe
from megatron_lightning.strategies import MegatronFP8Precision, MegatronStrategy
from tests.helpers.fake_transformer_engine import installed
from tests.helpers.layouts import fit_losses
from tests.helpers.ranks import run_ranks
from tests.helpers.te_contract import STATE
from tests.helpers.trainers import trainer
from tests.helpers.transformer_engine_cases import GPT, LLAMA, MOE, config

TP, PP, VPP, EP = (
    f"{kind}_model_parallel_size" for kind in ("tensor", "pipeline", "virtual_pipeline", "expert")
)
CP = "context_parallel_size"
BATCH, SEQUENCE, STEPS = 8, 32, 3
MICRO = 2
DELAYED = FP8Recipe(scaling="delayed", amax_history_len=16)
CURRENT = FP8Recipe(scaling="current")
RECOMPUTE = RecomputeOptions(
    recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
)


class InFp32(MegatronFP8Precision):
    """The plugin without torch's autocast: layers that are not quantized compute in fp32, too."""

    def autocast_context_manager(self) -> Any:
        return nullcontext()


class Module(GPTLightningModule):
    """Keeps the first sum of gradients apart from momentum: plain SGD."""

    sequence_dims = {"tokens": 1, "labels": 1}  # noqa: RUF012

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _data(batch_size: int, steps: int) -> DataLoader[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(0, 40, (BATCH * steps, SEQUENCE + 1), generator=generator)
    rows: Any = [{"tokens": t[:-1], "labels": t[1:]} for t in text]
    return DataLoader(rows, batch_size=batch_size)


def _fit(
    strategy: dict[str, Any],
    options: dict[str, Any],
    recipe: FP8Recipe | None,
    *,
    replicas: int = 1,
    steps: int = STEPS,
    batches: int = STEPS,
    validates: bool = False,
    callbacks: tuple[pl.Callback, ...] = (),
    **of_trainer: Any,
) -> tuple[list[float], list[float]]:
    """Return losses and gradient norms; without a recipe those of torch's layers."""
    pl.seed_everything(1)
    plugins = [] if recipe is None else [InFp32(recipe, backend="transformer_engine")]
    of_trainer |= {
        "steps": steps,
        "callbacks": callbacks,
        "plugins": plugins,
        "val_check_interval": 1 if validates else None,
    }
    module = Module(config(**{"num_layers": 2, "init_method_std": 0.1, **options}))
    validation = _data(BATCH // replicas, 1) if validates else None
    layout = {"micro_batch_size": MICRO, **strategy}
    training = _data(BATCH // replicas, batches)
    return fit_losses(layout, module, training, validation, **of_trainer)


def _with_engines(body: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with installed():
        result = body(*args, **kwargs)
        flags = list(STATE.first_flags.values())
        return result, flags, list(STATE.reductions), {name for name, _ in STATE.calls}


def _by_engines(strategy: dict[str, Any], options: dict[str, Any], **others: Any) -> Any:
    recipe = others.pop("recipe", DELAYED)
    return _with_engines(_fit, strategy, options, recipe, **others)


def _compared(strategy: dict[str, Any], options: dict[str, Any], others: dict[str, Any]) -> Any:
    return _by_engines(strategy, options, **others)


SINGLE = {"micro_batch_size": 1}
CENTERED = {"layernorm_zero_centered_gamma": True, "activation": "geglu_tanh"}
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "one": (1, {}, LLAMA, {}),
    "native": (1, {"micro_batch_size": None}, GPT, {}),
    "tp2-pp2": (4, {TP: 2, PP: 2}, LLAMA, {}),
    "tp2-biases": (2, {TP: 2}, GPT, {}),
    "tp2-without-sp": (2, {TP: 2, "sequence_parallel": False}, GPT, {}),
    "vpp2": (2, {PP: 2, VPP: 2}, {**LLAMA, "num_layers": 4}, {}),
    "zb-h1": (2, {PP: 2, "pipeline_schedule": "zb-h1"}, LLAMA, {}),
    "recompute": (2, {PP: 2, "recompute": RECOMPUTE}, LLAMA, {}),
    "dp2": (2, SINGLE, LLAMA, {"replicas": 2}),
    "fsdp2": (2, {"data_parallel": "fsdp", **SINGLE}, LLAMA, {"replicas": 2}),
    "cp2": (2, {CP: 2}, LLAMA, {}),
    "zero-centered": (2, {TP: 2}, LLAMA | CENTERED, {}),
    "experts-tp2": (2, {TP: 2}, MOE, {}),
    "experts-ep2": (2, {EP: 2, **SINGLE}, MOE, {"replicas": 2}),
}
FAST = ("tp2-pp2", "experts-tp2")


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if c in FAST else [pytest.mark.slow]) for c in CASES]
)
def test_layouts_equal_torchs_layers_on_one_process(case: str) -> None:
    """1e-5: sums in another order. Every module's calls in a step begin with True and go on with
    False, whatever the schedule, or are None where shards are gathered for a layer only. Largest
    values are reduced over the ranks that share the layers, once for every forward, and never by
    one that is computed again."""
    ranks, strategy, options, others = CASES[case]
    size = strategy.get("micro_batch_size", MICRO)
    plain = {"micro_batch_size": size}
    [(losses, norms)] = run_ranks(1, _fit, plain, options, None, timeout_s=100)
    tensor = strategy.get(TP, 1) * strategy.get(CP, 1)
    sharing = tensor * others.get("replicas", 1) if EP not in strategy else 2
    for result, flags, reductions, calls in run_ranks(
        ranks, _compared, strategy, options, others, timeout_s=110
    ):
        own, own_norms = result
        assert own_norms == pytest.approx(norms, rel=1e-5)
        if others.get("replicas", 1) == 1:
            assert own == pytest.approx(losses, rel=1e-5)
        microbatches = 1 if size is None else BATCH // others.get("replicas", 1) // size
        recomputed = "recompute" in strategy
        calls_a_step = microbatches * (1 + recomputed)
        once = [True] + [False] * (calls_a_step - 1)
        if strategy.get("data_parallel") == "fsdp":
            once = [None] * calls_a_step
        if PP in strategy:  # each stage has run once without gradients, to learn what it sends
            assert all(flag.pop(0) is None for flag in flags)
        assert flags and all(flag == once * STEPS for flag in flags)
        assert set(reductions) == {sharing}
        stages = strategy.get(VPP, 1)
        assert len(reductions) <= len(flags) * STEPS * microbatches * stages
        assert ("checkpoint" in calls) == recomputed


def test_weights_are_quantized_once_for_accumulated_batches() -> None:
    [(_, flags, _, _)] = run_ranks(1, _accumulated)
    # 2 batches of 4 micro-batches a step.
    assert flags and all(flag == ([True] + [False] * 7) * 2 for flag in flags)


def _accumulated() -> Any:
    return _by_engines({}, LLAMA, steps=2, batches=4, accumulate_grad_batches=2)


def _dropped() -> Any:
    options = {**LLAMA, "hidden_dropout": 0.2}
    with installed():
        return [_fit({TP: 2, **more}, options, DELAYED) for more in ({}, {"recompute": RECOMPUTE})]


@pytest.mark.slow
def test_a_forward_that_is_computed_again_draws_the_same() -> None:
    """Transformer Engine restores our streams, from which sequence shards draw."""
    for once, again in run_ranks(2, _dropped, timeout_s=100):
        assert once == again


# ------------------------------------------------------------------------------------------- codes


class _Codes(pl.Callback):
    """Counts the elements of parameters, and those that are codes."""

    def __init__(self) -> None:
        self.during: tuple[int, int] = (0, 0)
        self.after = -1

    @staticmethod
    def _count(module: pl.LightningModule) -> tuple[int, int]:
        sizes = [(p.numel(), p.numel() * is_quantized(p.dtype)) for p in module.parameters()]
        return sum(size for size, _ in sizes), sum(codes for _, codes in sizes)

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        self.during = self._count(module)

    def teardown(self, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
        self.after = self._count(module)[1]


def _coded(coded: bool, strategy: dict[str, Any], options: dict[str, Any], replicas: int) -> Any:
    """Return losses and norms, flags, elements, and how often weights were quantized."""
    counts = _Codes()
    with installed() as state:
        state.rounds_weights = True
        recipe = replace(CURRENT, fp8_param_gather=coded)
        result = _fit(strategy, options, recipe, replicas=replicas, callbacks=(counts,))
        calls = [name for name, _ in state.calls]
        flags = list(state.first_flags.values())
    num_quantized = calls.count("quantize_master_weights")
    return result, flags, counts.during, counts.after, num_quantized


ZERO1 = {"data_parallel": "zero1", **SINGLE}
CODED: dict[str, tuple[int, dict[str, Any], dict[str, Any], int]] = {
    "one": (1, {}, LLAMA, 1),
    "dp2": (2, ZERO1, LLAMA, 2),
    "tp2": (4, {**ZERO1, TP: 2}, GPT, 2),
    "pp2": (4, {**ZERO1, PP: 2}, LLAMA, 2),
    "vpp2": (4, {**ZERO1, PP: 2, VPP: 2}, {**LLAMA, "num_layers": 4}, 2),
    "tp2-pp2": (8, {**ZERO1, TP: 2, PP: 2}, LLAMA, 2),
    "cp2": (2, {CP: 2}, LLAMA, 1),
    "experts-ep2": (4, {**ZERO1, EP: 2}, MOE, 4),
    "recompute": (2, {**ZERO1, "recompute": RECOMPUTE}, LLAMA, 2),
    "overlapped": (
        2,
        {**ZERO1, "data_parallel_options": DataParallelOptions(overlap_param_gather=True)},
        LLAMA,
        2,
    ),
}


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if c == "dp2" else [pytest.mark.slow]) for c in CODED]
)
@pytest.mark.timeout(240)
def test_weights_kept_as_codes_train_as_weights_quantized_in_the_module(case: str) -> None:
    """Losses are bit-equal, since codes are those of the full weight; norms sum other shards, and
    gradients of four data ranks add up in another order in other buckets (1e-6). Codes are made
    when training begins (twice: after what a callback may load), and once a step."""
    ranks, strategy, options, replicas = CODED[case]
    plain, coded = (
        run_ranks(ranks, _coded, on, strategy, options, replicas, timeout_s=200)
        for on in (False, True)
    )
    for before, after in zip(plain, coded, strict=True):
        (losses, norms), flags, _, _, none = before
        (own, sums), own_flags, (size, codes), left, num_quantized = after
        assert own == pytest.approx(losses, rel=1e-6 if replicas == 4 else 0, abs=0)
        assert sums == pytest.approx(norms, rel=1e-6)
        assert own_flags == flags
        assert none == left == 0
        if case == "one":  # nothing is gathered
            assert codes == num_quantized == 0
        else:
            assert size / 4 < codes < size
            assert num_quantized > STEPS and num_quantized % (STEPS + 2) == 0


def _resumed(folder: str) -> Any:
    """Return losses of a full run and of the resumed ones; with codes and without them."""
    layout: dict[str, Any] = {**ZERO1, "micro_batch_size": 2}
    losses = []
    with installed() as state:
        state.rounds_weights = True
        for coded in (False, True):
            recipe = replace(DELAYED, fp8_param_gather=coded)
            options: dict[str, Any] = {"batches": 4, "replicas": 2, "validates": True}
            losses += [_fit(layout, LLAMA, recipe, steps=4, **options)[0]]
            saved = _saved(f"{folder}/{coded}")
            saving = {"enable_checkpointing": True, "callbacks": (saved,)}
            _fit(layout, LLAMA, recipe, steps=2, **options, **saving)
        for coded in (False, True):
            path = f"{folder}/{not coded}/at.ckpt"
            recipe = replace(DELAYED, fp8_param_gather=coded)
            losses += [_fit(layout, LLAMA, recipe, steps=4, ckpt_path=path, **options)[0][-2:]]
        path = f"{folder}/True/at.ckpt"
        losses += [_fit(layout, LLAMA, recipe, steps=4, ckpt_path=path, **options)[0][-2:]]
    return losses


@pytest.mark.slow
def test_checkpoints_of_codes_hold_fp32_weights(tmp_path: Path) -> None:
    """The same names and values as without codes, so that each resumes the other, bit by bit;
    validated after every step."""
    for plain, coded, *resumed in run_ranks(2, _resumed, str(tmp_path), timeout_s=110):
        assert plain == coded
        assert all(losses == plain[-2:] for losses in resumed)
    (before, after) = (read_full(tmp_path / str(on) / "at.ckpt") for on in (False, True))
    assert list(before["state_dict"]) == list(after["state_dict"])
    for name, value in before["state_dict"].items():
        assert type(value) is Tensor and value.dtype == torch.float32
        assert torch.equal(value, after["state_dict"][name]), name


# -------------------------------------------------------------------------------------- checkpoints


def _saved(folder: str) -> ModelCheckpoint:
    return ModelCheckpoint(dirpath=folder, filename="at", every_n_train_steps=2, save_top_k=1)


class _State(pl.Callback):
    """Keeps this rank's weights and the plugin's state at the start."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self.scales: dict[str, Any] = {}

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.weights = {name: p.detach().clone() for name, p in module.named_parameters()}
        self.scales = dict(trainer.precision_plugin.state_dict().get("transformer_engine", {}))


def _moved(folder: str, layout: dict[str, Any]) -> Any:
    options: dict[str, Any] = {"enable_checkpointing": True, "callbacks": (_saved(folder),)}
    with installed():
        full, _ = _fit(layout, LLAMA, DELAYED, steps=4, batches=4)
        _fit(layout, LLAMA, DELAYED, steps=2, batches=4, **options)
        path, by_engines, by_torch = f"{folder}/at.ckpt", _State(), _State()
        again, _ = _fit(
            layout, LLAMA, DELAYED, steps=4, batches=4, ckpt_path=path, callbacks=(by_engines,)
        )
    plain, _ = _fit(layout, LLAMA, None, steps=4, batches=4, ckpt_path=path, callbacks=(by_torch,))
    equal = all(torch.equal(by_engines.weights[n], w) for n, w in by_torch.weights.items())
    same_names = list(by_engines.weights) == list(by_torch.weights)
    histories = [
        value.count_nonzero().item()
        for name, value in by_engines.scales.items()
        if name.endswith("amax_history_fwd")
    ]
    return full, again, plain, equal and same_names, histories


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, {PP: 2}),
        (4, {TP: 2, PP: 2}),
    ],
)
def test_checkpoints_move_between_backends(
    ranks: int, layout: dict[str, Any], tmp_path: Path
) -> None:
    """Resumed training is bit-equal with its scales, and torch's layers continue from the same
    weights bit by bit, to 1e-5 as before."""
    for full, again, plain, equal, histories in run_ranks(
        ranks, _moved, str(tmp_path), layout, timeout_s=110
    ):
        assert again[-2:] == full[-2:]
        assert plain[-2:] == pytest.approx(full[-2:], rel=1e-5)
        assert equal
        assert len(histories) == 6 and min(histories) > 0  # of both stages


# --------------------------------------------------------------------------------------- evaluation


class _Swap(pl.Callback):
    """Other weights during validation, as averaging has."""

    def on_validation_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.kept = [p.detach().clone() for p in module.parameters()]
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(1.5)

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        with torch.no_grad():
            for parameter, value in zip(module.parameters(), self.kept, strict=True):
                parameter.copy_(value)


def _evaluated(validates: bool) -> Any:
    with installed():
        pl.seed_everything(1)
        plugin = InFp32(DELAYED, backend="transformer_engine")
        fit = trainer(
            MegatronStrategy(micro_batch_size=MICRO), max_steps=2, plugins=[plugin],
            callbacks=[_Swap()], val_check_interval=1, limit_val_batches=int(validates),
        )  # fmt: skip
        module = Module(config(**LLAMA))
        fit.fit(module, _data(BATCH, 2), _data(BATCH, 1))
        left = [name for name, child in module.named_modules() if "engine" in vars(child)]
        state = {n: v.tolist() for n, v in plugin._state.items() if n != "about"}
        return list(STATE.first_flags.values()), len(STATE.reductions), left, state


def test_evaluation_keeps_no_codes_and_notes_nothing_and_a_run_leaves_the_module() -> None:
    [(flags, reductions, left, state)] = run_ranks(1, _evaluated, True)
    [(*_, expected)] = run_ranks(1, _evaluated, False)
    assert state == expected and state
    training, validation = [True, False, False, False], [None] * 4
    assert flags and all(flag == (training + validation) * 2 for flag in flags)
    assert reductions == 3 * 4 * 2  # modules, micro-batches, steps
    assert not left
