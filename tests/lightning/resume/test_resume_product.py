"""Stop and resume: every optimizer with every precision, schedule and way of saving, and with all
kinds of data parallelism.

Training goes through four steps in one go, saving after the second and the fourth; then from the
second's checkpoint on. Losses and gradient norms of the last two steps, and every bit of the fourth
step's two checkpoints (weights, moments, masters, random states, loss scale, position in the data),
must be equal: no tolerance. Two pipeline ranks and two replicas; many cases run one after another
in the same processes. Random masks before the model and dropout inside continue their random
numbers.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.optim import LBFGS, SGD, Adagrad, Adam, AdamW, Muon, Optimizer, RMSprop

from megatron_lightning.checkpoint.format.naming import OWN
from megatron_lightning.checkpoint.reading.source import DirectorySource, open_checkpoint
from megatron_lightning.config import CheckpointOptions
from megatron_lightning.optim import ChainedOptimizer
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.ranks import run_ranks
from tests.helpers.toy import ToyData, ToyModule
from tests.helpers.trainers import Losses, precision_options, trainer

STOP, STEPS = 2, 4
RANKS, PP, REPLICAS = 4, 2, 2
# An order of one's own: three forward passes, two backward passes, and so on.
TABLE = ["0F0 0F1 0F2 0B0 0B1 0F3 0B2 0B3", "1F0 1F1 1B0 1B1 1F2 1B2 1F3 1B3"]


class _Averaged(SGD):
    """An optimizer that nobody knows: it has to be tried before its state is sharded, and keeps a
    mean and a Python number."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                mean = state.setdefault("mean", torch.zeros_like(parameter))
                state["age"] = state.get("age", 0) + 1
                mean.lerp_(parameter.grad, 1.0 / state["age"])
                parameter.sub_(mean, alpha=group["lr"])
        return loss


def _muon(module: nn.Module) -> Optimizer:
    matrices = {
        name for name, p in module.named_parameters() if p.dim() == 2 and ".layers." in name
    }
    chosen = [p for name, p in module.named_parameters() if name in matrices]
    others = [p for name, p in module.named_parameters() if name not in matrices]
    return ChainedOptimizer(Muon(chosen, lr=0.02), AdamW(others, lr=1e-2))


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "adamw": lambda module: AdamW(module.parameters(), lr=1e-2),
    "adam": lambda module: Adam(module.parameters(), lr=1e-2, amsgrad=True),
    "sgd": lambda module: SGD(module.parameters(), lr=0.1, momentum=0.9),
    "rmsprop": lambda module: RMSprop(module.parameters(), lr=1e-3, centered=True, momentum=0.5),
    "adagrad": lambda module: Adagrad(module.parameters(), lr=1e-2, lr_decay=0.1),
    "muon": _muon,
    "unknown": lambda module: _Averaged(module.parameters(), lr=0.1),
    "lbfgs": lambda module: LBFGS(
        module.parameters(), lr=0.1, max_iter=3, history_size=4, line_search_fn="strong_wolfe"
    ),
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "gpipe": {"pipeline_schedule": "gpipe"},
    "1f1b": {"pipeline_schedule": "1f1b"},
    "interleaved": {"pipeline_schedule": "interleaved", "virtual_pipeline_model_parallel_size": 2},
    "zb-h1": {"pipeline_schedule": "zb-h1"},
    "zbv": {"pipeline_schedule": "zbv", "virtual_pipeline_model_parallel_size": 2},
    "table": {"pipeline_schedule": TABLE},
}
PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "16-mixed")
MODES = ("ddp", "zero1", "fsdp")


class Case(NamedTuple):
    """One combination; ``schedule`` is None on one device without micro-batches."""

    optimizer: str
    precision: str
    schedule: str | None
    mode: str
    background: bool

    def __str__(self) -> str:
        saving = "async" if self.background else "sync"
        return "-".join(
            [self.optimizer, self.precision, self.schedule or "single", self.mode, saving]
        )

    def strategy(self) -> MegatronStrategy:
        """Return the strategy of this case."""
        pipeline = {} if self.schedule is None else SCHEDULES[self.schedule]
        if self.schedule is not None:
            pipeline = {**pipeline, "pipeline_model_parallel_size": PP, "micro_batch_size": 1}
        saving = CheckpointOptions(async_save=self.background)
        return MegatronStrategy(data_parallel=self.mode, checkpoint_options=saving, **pipeline)

    @property
    def num_layers(self) -> int:
        """As many as there are stages."""
        return PP * SCHEDULES.get(self.schedule or "", {}).get(
            "virtual_pipeline_model_parallel_size", 1
        )


class _Module(ToyModule):
    def __init__(self, optimizer: str, num_layers: int) -> None:
        super().__init__(num_layers=num_layers, mask=True)
        self.kind = optimizer

    def configure_model(self) -> None:
        super().configure_model()
        for module in self.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.1

    def configure_optimizers(self) -> Any:
        optimizer = OPTIMIZERS[self.kind](self)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def _fit(case: Case, folder: Path, checkpoint: str | None = None) -> list[list[float]]:
    # A new process starts elsewhere.
    pl.seed_everything(7 if checkpoint is None else 8, verbose=False)
    record = Losses()
    keep = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=STOP)
    replicas = 1 if case.schedule is None else REPLICAS
    # The scale grows after the stop.
    precise = precision_options(case.precision, growth_interval=STOP + 1)
    options = {"max_steps": STEPS, "gradient_clip_val": None if case.optimizer == "lbfgs" else 0.5}
    fit = trainer(
        case.strategy(), callbacks=[record, keep], enable_checkpointing=True, **options, **precise
    )
    data = ToyData(batch_size=8 // replicas, num_samples=8 * (STEPS + 1), shuffle=True)
    fit.fit(_Module(case.optimizer, case.num_layers), datamodule=data, ckpt_path=checkpoint)
    return [record.losses, record.norms]


def _content(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a checkpoint holds: of tensors the checksums of all boxes, of the rest the
    values, without file names."""
    source = open_checkpoint(path)
    assert isinstance(source, DirectorySource)
    tensors = {
        name: (entry.shape, entry.dtype, {s.box: s.checksums for s in entry.shards})
        for name, entry in source.manifest.tensors.items()
    }
    state = source.state()
    state.pop("callbacks")  # names of files
    return tensors, _comparable(state)


def _comparable(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), value.tolist())
    if isinstance(value, dict):
        return {key: _comparable(entry) for key, entry in value.items()}
    return [_comparable(entry) for entry in value] if isinstance(value, list | tuple) else value


def _different(whole: Any, resumed: Any, place: str = "") -> Iterator[str]:
    """Name what differs between two nested values."""
    if isinstance(whole, dict) and isinstance(resumed, dict) and whole.keys() == resumed.keys():
        for key in whole:
            yield from _different(whole[key], resumed[key], f"{place}[{key!r}]")
    elif whole != resumed:
        yield f"{place}: {str(whole)[:80]} and {str(resumed)[:80]}"


def _stop_and_resume(case: Case, folder: Path) -> list[str]:
    """Return what differs between training in one go and from a checkpoint on, on this rank."""
    whole = _fit(case, folder / "whole")
    resumed = _fit(case, folder / "resumed", str(folder / "whole" / f"step={STOP}.ckpt"))
    # LBFGS has a norm each time it looks at the loss.
    assert len(resumed[1]) >= len(resumed[0]) == STEPS - STOP
    last = [numbers[-len(rest) :] for numbers, rest in zip(whole, resumed, strict=True)]
    differences = list(_different(last, resumed, "losses and norms"))
    first = not dist.is_initialized() or dist.get_rank() == 0
    if first:
        contents = [_content(folder / part / f"step={STEPS}.ckpt") for part in ("whole", "resumed")]
        assert len(contents[0][0]) > 30 and OWN in contents[0][1]
        differences += _different(contents[0][0], contents[1][0], "tensors")
        differences += _different(contents[0][1], contents[1][1], "state")
        shutil.rmtree(folder)
    return [f"{case}: {difference}" for difference in differences]


def _run(cases: Sequence[Case], folder: str) -> list[str]:
    return [text for case in cases for text in _stop_and_resume(case, Path(folder, str(case)))]


def _parts(case: Case, size: int) -> set[tuple[Any, ...]]:
    """Return the combinations of so many values of a case."""
    return set(combinations(enumerate(case), size))


def _few(cases: Sequence[Case]) -> Iterator[Case]:
    """Choose cases until every value is there."""
    missing = set().union(*(_parts(case, 1) for case in cases))
    while missing:
        best = max(cases, key=lambda case: len(_parts(case, 1) & missing))
        missing -= _parts(best, 1)
        yield best


# LBFGS decides by the whole run, on one device only.
DISTRIBUTED = [name for name in OPTIMIZERS if name != "lbfgs"]
# Every optimizer with every precision, schedule and way of saving; the mode turns so that any three
# values meet somewhere.
CASES = [
    Case(optimizer, precision, schedule, MODES[(i + j + k) % 3], background)
    for i, optimizer in enumerate(DISTRIBUTED)
    for j, precision in enumerate(PRECISIONS)
    for k, schedule in enumerate(SCHEDULES)
    for background in (False, True)
]
USUAL = list(_few(CASES))
# Not in bf16-true and 16-mixed, which are refused: it looks at the loss several times a step.
SINGLE = [
    Case("lbfgs", precision, None, "zero1", saving)
    for precision in PRECISIONS[:2]
    for saving in (False, True)
]


def test_any_three_choices_meet_in_a_case() -> None:
    choices = (DISTRIBUTED, PRECISIONS, SCHEDULES, MODES, (False, True))
    for size, cases in ((1, USUAL), (3, CASES)):
        met = set().union(*(_parts(case, size) for case in cases))
        assert met == {
            part for case in product(*choices) for part in combinations(enumerate(case), size)
        }
    assert len(USUAL) == len(DISTRIBUTED)


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases",
    [
        # Every kind of data parallelism, and both ways of saving.
        pytest.param(USUAL[1:4], id="half precision"),
        pytest.param([USUAL[0], *USUAL[4:]], id="fp32", marks=pytest.mark.slow),
    ],
)
def test_some_of_everything_resumes_bit_equal(cases: list[Case], tmp_path: Path) -> None:
    assert run_ranks(RANKS, _run, cases, str(tmp_path), timeout_s=110) == [[]] * RANKS


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_everything_resumes_bit_equal(schedule: str, tmp_path: Path) -> None:
    # Not all in the same processes: torch keeps the groups of every strategy, and their threads.
    for precision, background in product(PRECISIONS, (False, True)):
        cases = [
            case
            for case in CASES
            if case[1:3] == (precision, schedule) and case.background == background
        ]
        assert run_ranks(RANKS, _run, cases, str(tmp_path), timeout_s=450) == [[]] * RANKS


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=str(case), marks=pytest.mark.slow) for case in SINGLE]
)
def test_lbfgs_on_one_device_resumes_bit_equal(case: Case, tmp_path: Path) -> None:
    assert run_ranks(1, _run, [case], str(tmp_path), timeout_s=100) == [[]]
