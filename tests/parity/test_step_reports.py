"""Losses and values that layers report to the step, on any stage: losses, gradient norms, weights
and logs are those of one process whose step adds the same losses itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from megatron_lightning.config import RecomputeOptions
from megatron_lightning.layers import StepReport, log_reports
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.layouts import fit
from tests.helpers.ranks import run_ranks
from tests.helpers.toy import samples
from tests.helpers.toy_decoder import HIDDEN, SEQUENCE, ToyDecoder
from tests.helpers.trainers import precision_options

STEPS, BATCH, MICRO = 3, 8, 2
COEFFICIENTS = (0.7, 0.0, 1.3, 0.4)  # of the layers; at 0 a layer reports values only
RTOL = 1e-5


class KeptReport(nn.Module):
    """Keeps what a layer reports for a step that adds it itself."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []
        self.values: list[tuple[str, Tensor]] = []

    def loss(self, name: str, value: Tensor, activation: Tensor) -> Tensor:
        self.losses.append(value)
        return activation

    def value(self, name: str, value: Tensor, reduce: str = "mean") -> None:
        self.values.append((name, value.detach()))


class Reporting(nn.TransformerEncoderLayer):
    """Reports the mean of the squares of a projection that nothing else uses, times a
    coefficient."""

    def __init__(self, coefficient: float, explicit: bool) -> None:
        super().__init__(HIDDEN, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.coefficient = coefficient
        self.probe = nn.Linear(HIDDEN, 4)
        self.report = KeptReport() if explicit else StepReport(per_layer=True)

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        hidden = super().forward(hidden, *args, **kwargs)
        self.report.value("size", hidden.square().mean())
        self.report.value("tokens", torch.tensor(float(hidden[..., 0].numel())), reduce="sum")
        if not self.coefficient:
            return hidden
        squares = self.probe(hidden).float().square().mean()
        return self.report.loss("aux_loss", self.coefficient * squares, hidden)


class Module(pl.LightningModule):
    """A model whose layers report; plain Lightning trains it as well.

    Args:
        counts: How items are counted: by the ``method``, the ``dict``, or not.
    """

    explicit = False

    def __init__(self, counts: str = "method") -> None:
        super().__init__()
        self.counts = counts
        torch.manual_seed(0)
        self.model = ToyDecoder()
        for index, coefficient in enumerate(COEFFICIENTS):
            self.model.layers[str(index)] = Reporting(coefficient, self.explicit)
        if counts == "method":
            self.num_items = self._num_items

    def _num_items(self, batch: dict[str, Tensor]) -> Tensor:
        return (batch["tgt"] != -100).sum()

    def _losses(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        logits = self.model(batch["ids"]).float()
        losses = F.cross_entropy(logits.flatten(0, 1), batch["tgt"].flatten(), reduction="sum")
        items = self._num_items(batch)
        return losses / items, items

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss, items = self._losses(batch)
        log_reports(self, loss)
        return {"loss": loss, "num_items": items} if self.counts == "dict" else loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss, items = self._losses(batch)
        log_reports(self, prefix="val_", batch_size=int(items))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Explicit(Module):
    """Its step cuts the global batch into the micro-batches of all ranks, and adds the losses of
    the layers.

    Args:
        counts: As in :class:`Module`.
        parts: Rows of each micro-batch in training.
        evaluated: Rows of each micro-batch in validation.
    """

    explicit = True

    def __init__(
        self, counts: str, parts: Sequence[Sequence[int]], evaluated: Sequence[Sequence[int]]
    ) -> None:
        super().__init__(counts)
        self.parts = parts
        self.evaluated = evaluated

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self._step(batch, self.parts, "")

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self._step(batch, self.evaluated, "val_")

    def _step(
        self, batch: dict[str, Tensor], parts: Sequence[Sequence[int]], prefix: str
    ) -> Tensor:
        total, logged = torch.zeros(()), dict[str, list[Tensor]]()
        reports = [layer.report for layer in self.model.layers.values()]
        all_items = self._num_items(batch)
        for rows in parts:
            main, items = self._losses({key: value[list(rows)] for key, value in batch.items()})
            weight = 1 / len(parts) if self.counts == "none" else items / all_items
            for index, report in enumerate(reports):
                of_layer = [("aux_loss", loss.detach(), weight, 1) for loss in report.losses]
                of_layer += [
                    (name, value, weight if name == "size" else 1, len(reports))
                    for name, value in report.values
                ]
                for name, value, factor, layers in of_layer:
                    number = factor * value
                    logged.setdefault(f"{name}/model.layers.{index}", []).append(number)
                    mean = number / layers if name == "size" else number
                    logged.setdefault(name, []).append(mean)
                main = main + sum(report.losses)
                report.losses.clear()
                report.values.clear()
            total = total + weight * main
        for name, numbers in logged.items():
            kind = (
                {"reduce_fx": "sum"}
                if name.startswith("tokens")
                else {"batch_size": int(all_items)}
            )
            self.log(prefix + name, torch.stack(numbers).sum(), **kind)
        return total


def _samples(ragged: bool) -> list[dict[str, Tensor]]:
    made = samples(STEPS * BATCH, 1)
    for index, sample in enumerate(made):
        sample["tgt"] = sample["tgt"].clone()
        if ragged:  # 1 to 8 labels that count, different for micro-batches and ranks
            sample["tgt"][1 + (index * index + index // 3) % SEQUENCE :] = -100
    return made


def _parts(data: int, accumulate: int, size: int = MICRO) -> list[list[int]]:
    """Return the rows of a global batch in the micro-batches of every rank and batch."""
    batch = BATCH // accumulate
    rows = [
        list(range(start + rank, start + batch, data))
        for start in range(0, BATCH, batch)
        for rank in range(data)
    ]
    return [of_rank[i : i + size] for of_rank in rows for i in range(0, batch // data, size)]


class _Logs(pl.Callback):
    """Collects what was logged with every optimizer step, and the last validation."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.validated: dict[str, float] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        logged = trainer.callback_metrics
        self.steps.append({k: float(v) for k, v in logged.items() if not k.startswith("val")})

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        logged = trainer.callback_metrics
        self.validated = {k: float(v) for k, v in logged.items() if k.startswith("val")}


def _fit(
    module: Module,
    strategy: MegatronStrategy | None,
    ragged: bool,
    data: int,
    accumulate: int,
    precision: str,
) -> dict[str, Any]:
    logs = _Logs()
    rows, size = _samples(ragged), BATCH // data
    run = fit(
        strategy,
        module,
        DataLoader(rows, batch_size=size // accumulate),
        DataLoader(rows, batch_size=size),
        max_epochs=1,
        callbacks=[logs],
        accumulate_grad_batches=accumulate,
        log_every_n_steps=1,
        **precision_options(precision),
    )
    weights = {
        name: getattr(p, "full_tensor", lambda p=p: p)().detach().tolist()
        for name, p in module.named_parameters()
    }
    return {
        "norms": run.norms,
        "losses": run.losses,
        "logs": logs.steps,
        "validated": logs.validated,
        "weights": weights,
    }


def _reported(
    options: dict[str, Any] | None,
    counts: str,
    ragged: bool,
    data: int,
    accumulate: int,
    precision: str,
) -> dict[str, Any]:
    strategy = None if options is None else MegatronStrategy(**options)
    return _fit(Module(counts), strategy, ragged, data, accumulate, precision)


def _explicit(
    counts: str, ragged: bool, parts: Any, evaluated: Any, precision: str
) -> dict[str, Any]:
    return _fit(Explicit(counts, parts, evaluated), None, ragged, 1, 1, precision)


FULL = RecomputeOptions(
    recompute_granularity="full",
    recompute_method="uniform",
    recompute_num_layers=1,
    recompute_layers=["model.layers.*"],
)
BLOCK = RecomputeOptions(
    recompute_granularity="full",
    recompute_method="block",
    recompute_num_layers=1,
    recompute_layers=["model.layers.*"],
)
SELECTIVE = RecomputeOptions(
    recompute_granularity="selective",
    recompute_modules=["model.layers.0.norm1", "model.layers.0.probe", "model.layers.2"],
)
PP2: dict[str, Any] = {"pipeline_model_parallel_size": 2, "micro_batch_size": MICRO}
ZB = {**PP2, "pipeline_schedule": "zb-h1"}
VPP2 = {**PP2, "virtual_pipeline_model_parallel_size": 2}
ONE = {"micro_batch_size": MICRO}

# name: ranks, strategy (None: plain Lightning), data-parallel size, accumulated batches
CASES: dict[str, tuple[int, dict[str, Any] | None, int, int]] = {
    "micro-batches": (1, ONE, 1, 1),
    "pp2": (2, PP2, 1, 1),
    "pp2-zb-h1-full": (2, {**ZB, "recompute": FULL}, 1, 1),
    "pp2-vpp2-accumulated": (2, VPP2, 1, 2),
    "native-accumulated": (1, {}, 1, 4),
    "native-dp2-zero1": (2, {}, 2, 2),
}
PLAIN: dict[str, tuple[int, dict[str, Any] | None, int, int]] = {
    "plain-accumulated": (1, None, 1, 4)
}
SLOW: dict[str, tuple[int, dict[str, Any] | None, int, int]] = {
    "pp2-vpp2": (2, VPP2, 1, 1),
    "pp2-zb-h1": (2, ZB, 1, 1),
    "pp2-zb-h1-selective": (2, {**ZB, "recompute": SELECTIVE}, 1, 2),
    "pp2-block": (2, {**PP2, "recompute": BLOCK}, 1, 1),
    "micro-batches-full": (1, {**ONE, "recompute": FULL}, 1, 2),
    "native-full": (1, {"recompute": FULL}, 1, 4),
    "native-dp2-ddp": (2, {"data_parallel": "ddp"}, 2, 2),
    "native-dp2-fsdp": (2, {"data_parallel": "fsdp"}, 2, 2),
    "dp2-fsdp-full": (2, {**ONE, "data_parallel": "fsdp", "recompute": FULL}, 2, 1),
    "pp2-dp2-zero1": (4, PP2, 2, 1),
    "pp2-dp2-ddp-accumulated": (4, {**PP2, "data_parallel": "ddp"}, 2, 2),
    "pp2-dp2-fsdp": (4, {**PP2, "data_parallel": "fsdp"}, 2, 1),
    "pp4": (4, {**PP2, "pipeline_model_parallel_size": 4}, 1, 1),
}


def _compare(
    case: str, counts: str, ragged: bool, precision: str = "32-true", rtol: float = RTOL
) -> None:
    ranks, options, data, accumulate = (CASES | PLAIN | SLOW)[case]
    evaluated = _parts(data, 1, (options or {}).get("micro_batch_size", BATCH // data))
    expected = run_ranks(
        1, _explicit, counts, ragged, _parts(data, accumulate), evaluated, precision
    )[0]
    found = run_ranks(
        ranks, _reported, options, counts, ragged, data, accumulate, precision, timeout_s=110
    )
    close = {"rel": rtol, "abs": rtol * 1e-2}
    for rank in found:
        assert len(rank["norms"]) == STEPS
        assert rank["norms"] == pytest.approx(expected["norms"], **close)
        assert rank["logs"] == found[0]["logs"]  # equal everywhere
        if accumulate == 1:  # else every batch logs its own
            assert len(rank["logs"]) == STEPS
            for step, of_step in zip(rank["logs"], expected["logs"], strict=True):
                assert step == pytest.approx(of_step, **close)
        if precision == "32-true" and counts != "dict":  # which validation_step does not return
            assert rank["validated"] == pytest.approx(expected["validated"], **close)
        for name, weight in rank["weights"].items():
            torch.testing.assert_close(
                torch.tensor(weight),
                torch.tensor(expected["weights"][name]),
                rtol=rtol,
                atol=max(rtol, 1e-5),
                msg=lambda text, name=name: f"{name}: {text}",
            )


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES, *SLOW])
def test_losses_of_layers_have_the_items_of_the_main_loss(case: str) -> None:
    _compare(case, "method", ragged=True)  # plain Lightning does not weight accumulated batches


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    "case",
    [
        "pp2",
        "plain-accumulated",
        *(pytest.param(name, marks=pytest.mark.slow) for name in [*CASES, *SLOW] if name != "pp2"),
    ],
)
def test_without_items_means_are_averaged(case: str) -> None:
    _compare(case, "none", ragged=False)


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    "case",
    ["pp2", "plain-accumulated", pytest.param("native-accumulated", marks=pytest.mark.slow)],
)
def test_the_loss_scale_of_fp16(case: str) -> None:
    """fp16 rounds activations to 3 digits, and micro-batches are other products."""
    _compare(case, "none", ragged=False, precision="16-mixed", rtol=2e-3)


def _on_two_stages(counts: str, with_losses: bool) -> dict[str, Any]:
    module = Module(counts)
    if not with_losses:
        for layer in module.model.layers.values():
            layer.coefficient = 0.0
    result = _fit(module, MegatronStrategy(**PP2), True, 1, 1, "32-true")
    return {name: result[name] for name in ("norms", "logs")}


@pytest.mark.slow
def test_a_dict_with_items_is_too_late_for_losses_of_earlier_stages() -> None:
    with pytest.raises(AssertionError, match=r"'aux_loss', and .* a method num_items\(batch\)"):
        run_ranks(2, _on_two_stages, "dict", True)
    for values in run_ranks(2, _on_two_stages, "dict", False):
        counted = run_ranks(2, _on_two_stages, "method", False)[0]
        assert values["norms"] == pytest.approx(counted["norms"], rel=RTOL)
        for of_step, expected in zip(values["logs"], counted["logs"], strict=True):
            assert of_step == pytest.approx(expected, rel=RTOL)


@pytest.mark.parametrize("case", ["micro-batches", "native-dp2-zero1"])
def test_a_dict_with_items_on_one_stage(case: str) -> None:
    _compare(case, "dict", ragged=True)


def _outside() -> None:
    module = Module()
    module.report = StepReport()
    _fit(module, MegatronStrategy(**PP2), False, 1, 1, "32-true")


def test_reports_outside_of_the_units_of_a_pipeline_are_refused() -> None:
    with pytest.raises(AssertionError, match=r"report is outside of the pipeline's units 'embed'"):
        run_ranks(2, _outside)
