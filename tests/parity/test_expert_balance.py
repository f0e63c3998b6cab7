"""Biases of experts and counts of the global batch over a step: equal to one process, however the
tokens are divided."""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from megatron_lightning.callbacks import ExpertLoadMonitor
from megatron_lightning.config import MoEConfig, TransformerConfig
from megatron_lightning.layers.moe import balance_experts
from megatron_lightning.layers.step_report import find_reports
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.language_model import RECOMPUTE
from tests.helpers.layouts import CP, EP, ETP, MICRO, PP, TP, VPP, tiny_config
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import precision_options, trainer

STEPS, BATCH, SEQUENCE, VOCABULARY = 5, 8, 16, 30
# name: ranks, replicas, strategy (None: plain Lightning), accumulated batches
LAYOUTS: dict[str, tuple[int, int, Any, int]] = {
    "plain": (1, 1, None, 1),
    "plain-accumulate": (1, 1, None, 2),
    "plain-ddp2": (2, 2, "ddp", 1),
    "one": (1, 1, {}, 1),
    "micro": (1, 1, {MICRO: 2}, 1),
    "accumulate": (1, 1, {MICRO: 2}, 2),
    "dp2": (2, 2, {}, 1),
    "dp2-micro": (2, 2, {MICRO: 2}, 1),
    "ep2": (2, 2, {EP: 2}, 1),
    "ep2-micro": (2, 2, {EP: 2, MICRO: 2}, 1),
    "tp2": (2, 1, {TP: 2}, 1),
    "cp2": (2, 1, {CP: 2, MICRO: 2}, 1),
    "pp2": (2, 1, {PP: 2, MICRO: 2}, 1),
    "pp2-vpp2": (2, 1, {PP: 2, VPP: 2, MICRO: 2}, 1),
    "pp2-accumulate": (2, 1, {PP: 2, MICRO: 2}, 2),
    "recompute": (1, 1, {MICRO: 2, "recompute": RECOMPUTE["uniform"]}, 1),
    "recompute-native": (1, 1, {"recompute": RECOMPUTE["block"]}, 2),
    "tp2-ep2": (4, 2, {TP: 2, ETP: 1, EP: 2}, 1),
    "tp2-pp2": (4, 1, {TP: 2, PP: 2, MICRO: 2}, 1),
    "ep2-pp2": (4, 2, {EP: 2, PP: 2, MICRO: 2}, 1),
}
BIAS = {
    "router_enable_expert_bias": True,
    "router_bias_update_rate": 0.02,
    "router_score_function": "sigmoid",
}
GLOBAL: dict[str, Any] = {"router_load_balancing_type": "global_aux_loss", "aux_loss_coeff": 1.0}
MODELS = {"bias": BIAS, "global": GLOBAL}
NAMES = ("aux_loss", "z_loss", "expert_load", "drop_rate")


def _config(moe: dict[str, Any]) -> TransformerConfig:
    return tiny_config(
        num_layers=4,
        vocab_size=VOCABULARY,
        ffn_hidden_size=48,
        moe=MoEConfig(num_experts=4, router_topk=2, layer_freq=[0, 1, 1, 1], **moe),
    )


def _rows(replicas: int, accumulate: int) -> Any:
    """Return rows in an order in which the sampler gives each replica consecutive rows of a step's,
    as micro-batches of one process have them."""
    text = torch.randint(
        0, VOCABULARY, (STEPS, accumulate, BATCH // accumulate, SEQUENCE + 1),
        generator=torch.Generator().manual_seed(3),
    )  # fmt: skip
    text = text.unflatten(2, (replicas, -1)).transpose(2, 3).flatten(0, 3)
    return [{"tokens": t[:-1], "labels": t[1:]} for t in text]


class Record(pl.Callback):
    """Collects losses and, after every batch, the biases by layer."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.biases: list[dict[str, list[float]]] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *_: Any
    ) -> None:
        self.losses.append(float(outputs["loss"]))
        self.biases.append(
            {n: b.tolist() for n, b in module.named_buffers() if n.endswith("expert_bias")}
        )


class Manual(GPTLightningModule):
    """Steps its optimizer itself, every second batch."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
        output = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        self.manual_backward(output["loss"] / 2)
        if batch_idx % 2:
            with balance_experts(self, optimizer):
                optimizer.step()
            optimizer.zero_grad()
        return output


class Poisoned(GPTLightningModule):
    """The gradients of one step are not finite."""

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
        output = super().training_step(batch, batch_idx)
        if self.trainer.global_step == 2 and not self.trainer.strategy.skipped_steps:
            output["loss"] = output["loss"] * float("nan")
        return output


def _train(
    moe: dict[str, Any],
    replicas: int,
    options: Any,
    accumulate: int = 1,
    kind: type[GPTLightningModule] = GPTLightningModule,
    checkpoint: str | None = None,
    **more: Any,
) -> tuple[Record, pl.Trainer]:
    record = Record()
    strategy = MegatronStrategy(**options) if isinstance(options, dict) else options or "auto"
    if kind is not Manual:
        more["accumulate_grad_batches"] = accumulate
    callbacks = [record, *more.pop("callbacks", ())]
    fit = trainer(strategy, callbacks=callbacks, **{"max_steps": STEPS, **more})
    rows = _rows(replicas, accumulate)
    # Lightning's own strategies shuffle.
    sampler = DistributedSampler(rows, shuffle=False) if options == "ddp" else None
    loader = DataLoader(rows, batch_size=BATCH // accumulate // replicas, sampler=sampler)
    fit.fit(kind(_config(moe), learning_rate=1e-3), loader, ckpt_path=checkpoint)
    return record, fit


def _trained(moe: dict[str, Any], cases: list[Any]) -> Any:
    found = []
    for replicas, options, accumulate in cases:
        record, fit = _train(moe, replicas, options, accumulate)
        logged = {name: float(value) for name, value in fit.callback_metrics.items()}
        found.append((record.losses, record.biases, logged))
    return found


@cache
def _found(model: str) -> dict[str, Any]:
    """Return losses, biases and logs of all layouts, by rank."""
    found = {}
    for world in (1, 2, 4):
        names = [
            name
            for name, layout in LAYOUTS.items()
            if layout[0] == world and (model == "bias" or name != "plain-ddp2")
        ]
        cases = [LAYOUTS[name][1:] for name in names]
        ranks = run_ranks(world, _trained, MODELS[model], cases, timeout_s=200)
        found |= {name: [rank[i] for rank in ranks] for i, name in enumerate(names)}
    return found


def _step_losses(name: str, ranks: Any) -> list[float]:
    """Return the mean losses of the optimizer steps; Lightning has divided accumulated ones."""
    batches = [mean(of_batch) for of_batch in zip(*(rank[0] for rank in ranks), strict=True)]
    size = LAYOUTS[name][3]
    return [sum(batches[i : i + size]) for i in range(0, len(batches), size)]


# ------------------------------------------------------------------------------------------- biases


@pytest.mark.timeout(400)
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "plain"])
def test_biases_equal_one_process(name: str) -> None:
    """Losses in fp32, with sums in another order: 1e-5. Biases follow integers: equal."""
    found = _found("bias")
    _, expected, _ = found["plain"][0]
    assert _step_losses(name, found[name]) == pytest.approx(
        _step_losses("plain", found["plain"]), rel=1e-5
    )
    layers = set()
    for _, biases, _ in found[name]:
        size = LAYOUTS[name][3]
        layers |= biases[0].keys()
        for step, of_step in enumerate(biases[size - 1 :: size]):
            assert of_step == {layer: expected[step][layer] for layer in of_step}
        if size > 1:  # within a step
            assert biases[0] == {layer: [0.0] * 4 for layer in biases[0]}
            assert biases[2] == biases[1] != biases[3]
    assert layers == expected[0].keys() and len(layers) == 3


@pytest.mark.slow
def test_biases_change_the_routing() -> None:
    found = _found("bias")
    _, biases, logged = found["plain"][0]
    assert len({tuple(b) for step in biases for b in step.values()}) > STEPS
    (without,) = run_ranks(1, _trained, {"router_score_function": "sigmoid"}, [(1, None, 1)])[0]
    gap = abs(_step_losses("plain", [without])[-1] / _step_losses("plain", found["plain"])[-1] - 1)
    assert gap > 1e-4
    assert logged["expert_load"] < without[2]["expert_load"]


def _resumed(options: Any, folder: str) -> Any:
    straight, _ = _train(BIAS, 1, options)
    _, stopped = _train(BIAS, 1, options, max_steps=2)
    path = f"{folder}/stopped.ckpt"
    stopped.save_checkpoint(path)
    rest, _ = _train(BIAS, 1, options, checkpoint=path)
    return straight.losses[2:], straight.biases[2:], rest.losses, rest.biases


@pytest.mark.spread(1)
@pytest.mark.parametrize("options", [{EP: 2}, {PP: 2, MICRO: 2}], ids=["ep2", "pp2"])
def test_a_resumed_run_is_bit_equal(options: Any, tmp_path: Path) -> None:
    for losses, biases, resumed_losses, resumed_biases in run_ranks(
        2, _resumed, options, str(tmp_path)
    ):
        assert losses == resumed_losses and biases == resumed_biases


def _skipping(options: Any, kind: Any, precision: str) -> Any:
    if precision == "16-mixed":
        plugins = precision_options(precision)["plugins"]
        plugins[0].loss_scale.scale = 2.0**60
        more = {"plugins": plugins}
    else:
        more = {}
    record, fit = _train(BIAS, 1, options, kind=kind, **more)
    return record.biases, fit.strategy.skipped_steps


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {PP: 2, MICRO: 2}], ids=["one", "pp2"])
def test_a_skipped_step_changes_no_bias(options: Any) -> None:
    world = options.get(PP, 1)
    for biases, skipped in run_ranks(
        world, _skipping, {**options, "non_finite": "skip"}, Poisoned, "32-true"
    ):
        assert skipped == 1
        assert biases[2] == biases[1] != biases[3]
    for biases, skipped in run_ranks(world, _skipping, options, GPTLightningModule, "16-mixed"):
        assert skipped > 1
        layer = next(iter(biases[0]))
        assert biases[skipped - 1][layer] == [0.0] * 4
        if len(biases) > skipped:
            assert max(map(abs, biases[skipped][layer])) == pytest.approx(0.02)


def _manual(cases: list[Any]) -> Any:
    return [_train(BIAS, *case, 2, Manual)[0].biases for case in cases]


@pytest.mark.slow
def test_manual_optimization() -> None:
    case = LAYOUTS["plain-accumulate"][1:]
    (((_, expected, _),),) = run_ranks(1, _trained, MODELS["bias"], [case])
    for found in run_ranks(1, _manual, [(1, None), (1, {})])[0]:
        assert found == expected
    for (found,) in run_ranks(2, _manual, [(2, {})]):
        assert found == expected


# ------------------------------------------------------------------------------------ global counts


@pytest.mark.timeout(400)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("reference", "names"),
    [
        # One micro-batch on each rank: together, that of one process.
        ("plain", ["one", "dp2", "ep2", "tp2", "tp2-ep2"]),
        # The same micro-batches one after another.
        ("plain-accumulate", ["recompute-native"]),
        (
            "micro",
            [
                "accumulate", "cp2", "pp2", "pp2-vpp2", "pp2-accumulate", "recompute", "tp2-pp2",
            ],
        ),
        # Several at a time: f of a micro-batch depends on how many.
        ("dp2-micro", ["ep2-micro", "ep2-pp2"]),
    ],
)  # fmt: skip
def test_losses_of_the_global_batch(reference: str, names: list[str]) -> None:
    found = _found("global")
    expected = found[reference]
    for name in names:
        assert _step_losses(name, found[name]) == pytest.approx(
            _step_losses(reference, expected), rel=1e-5
        ), name
        for rank in found[name]:
            if LAYOUTS[name][3] == LAYOUTS[reference][3]:
                assert rank[2].keys() == expected[0][2].keys(), name
                for key, value in expected[0][2].items():
                    if key != "train_loss":
                        assert rank[2][key] == pytest.approx(value, rel=1e-5), (name, key)


@pytest.mark.slow
def test_counts_of_the_global_batch_grow_over_micro_batches_and_matter() -> None:
    found = _found("global")
    losses = {name: _step_losses(name, found[name]) for name in ("plain", "micro", "dp2-micro")}
    (local,) = run_ranks(1, _trained, {"aux_loss_coeff": 1.0}, [(1, {MICRO: 2}, 1)])[0]
    losses["aux_loss"] = local[0]
    last = [of_run[-1] for of_run in losses.values()]
    assert all(abs(a / b - 1) > 1e-4 for i, a in enumerate(last) for b in last[:i]), last


def _plain_ddp() -> None:
    _train(GLOBAL, 2, "ddp")


def test_counts_of_other_ranks_are_refused_without_the_strategy() -> None:
    with pytest.raises(AssertionError, match=r"global_aux_loss with 2 ranks under DDPStrategy"):
        run_ranks(2, _plain_ddp)


# ------------------------------------------------------------------------------------------- logged

LOSSES = {"aux_loss_coeff": 0.02, "z_loss_coeff": 0.01}
DROPPING = {**LOSSES, "expert_capacity_factor": 1.0}


def _logged(moe: dict[str, Any], replicas: int, options: Any, folder: str) -> Any:
    logger = pl.loggers.CSVLogger(folder, name="", version="")
    more = {"logger": logger, "log_every_n_steps": 1, "callbacks": [ExpertLoadMonitor()]}
    _, fit = _train(moe, replicas, options, **more)
    logged = {name: float(value) for name, value in fit.logged_metrics.items()}
    return logged, len(find_reports(fit.lightning_module))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moe", "options", "num_reports"),
    [
        # Capacity is that of a rank's micro-batch: one process with the same micro-batches.
        pytest.param(DROPPING, {EP: 2, PP: 2, MICRO: 2}, [1, 1, 2, 2], id="ep2-pp2"),
        pytest.param(LOSSES, {TP: 2, ETP: 1, EP: 2, MICRO: 2}, [3] * 4, id="tp2-ep2"),
    ],
)
def test_every_rank_logs_the_balance_of_every_layer(
    moe: dict[str, Any], options: dict[str, Any], num_reports: list[int], tmp_path: Path
) -> None:
    folders = [str(tmp_path / name) for name in ("one", "divided")]
    run_ranks(1, _logged, moe, 1, {MICRO: 2}, folders[0])
    ranks = run_ranks(4, _logged, moe, 2, options, folders[1])
    tables = []
    for folder in folders:
        with Path(folder, "metrics.csv").open() as file:
            tables.append(list(csv.DictReader(file)))
    one, divided = tables
    alone = [name for name in NAMES if name != "drop_rate" or moe is DROPPING]
    layers = [f"model.decoder.layers.{i}.mlp" for i in (1, 2, 3)]
    tokens = {
        layer: [f"tokens_per_expert/{layer}/{expert}" for expert in range(4)] for layer in layers
    }
    names = [*alone, *(f"{name}/{layer}" for name in alone for layer in layers)]
    names += [name for of_layer in tokens.values() for name in of_layer]
    assert {*names, "train_loss", "epoch", "step"} == one[0].keys() == divided[0].keys()
    assert len(one) == len(divided) == STEPS
    for row, other in zip(one, divided, strict=True):
        for name in names:
            assert float(other[name]) == pytest.approx(float(row[name]), rel=1e-5), name
        loads = {}
        for layer in layers:
            counts = [float(row[name]) for name in tokens[layer]]
            assert sum(counts) == BATCH * SEQUENCE * 2  # each token has two experts
            loads[layer] = 4 * max(counts) / sum(counts)
            assert float(row[f"expert_load/{layer}"]) == pytest.approx(loads[layer], rel=1e-6)
        assert float(row["expert_load"]) == pytest.approx(max(loads.values()), rel=1e-6)
        assert moe is LOSSES or 0.0 < float(row["drop_rate"]) < 1.0
    for logged, _ in ranks:
        for name in names:
            assert logged[name] == pytest.approx(float(one[-1][name]), rel=1e-5), name
    assert sorted(number for _, number in ranks) == num_reports


def test_a_model_without_experts_is_warned_of() -> None:
    module = pl.LightningModule()
    module.model = torch.nn.Linear(2, 2)
    with pytest.warns(UserWarning, match="ExpertLoadMonitor logs nothing: .* Set moe in its"):
        ExpertLoadMonitor().on_fit_start(pl.Trainer(logger=False), module)
