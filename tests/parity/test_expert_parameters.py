"""Parameters of experts, which are divided over axes of their own: reduction, norm, clipping,
initial values and checkpoints equal those of one process.

The layer is made up (``tests.helpers.toy_experts``). Losses, norms and weights: 1e-5, since sums
over ranks have another order in fp32. Scaling an expert's gradient by the wrong number of ranks
changes its norm by a factor, and leaving out its reduction by tens of percent.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_lightning.assembly.assemble import assemble
from megatron_lightning.assembly.checks.replicas import check_replicas
from megatron_lightning.checkpoint import consolidate, read_full
from megatron_lightning.config import DataParallelOptions, PipelineOptions
from megatron_lightning.errors import ConfigError, ShardingError
from megatron_lightning.optim.gradients.accumulation import GradientAccumulation
from megatron_lightning.parallel import ParallelContext, ParallelLayout
from megatron_lightning.pipeline.schedules.actions import Placement
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.ranks import run_ranks
from tests.helpers.toy import ToyData, ToyModule
from tests.helpers.toy_experts import EXPERTS, HIDDEN, WIDTH, ExpertModule, ToyNet, loader
from tests.helpers.trainers import trainer

STEPS, STOP, GLOBAL_BATCH, CLIP = 6, 3, 16, 0.3
TOLERANCE = 1e-5


def _sizes(tp: int = 1, ep: int = 1, etp: int = 1, pp: int = 1) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": tp,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": etp,
        "pipeline_model_parallel_size": pp,
    }


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, _sizes()),
    "ep4": (4, _sizes(ep=4)),  # dp 4, edp 1
    "ep2-etp2": (4, _sizes(ep=2, etp=2)),  # dp 4, edp 1
    "etp2": (4, _sizes(etp=2)),  # dp 4, edp 2
    "ep2": (4, _sizes(ep=2)),  # dp 4, edp 2
    "ep2-on-two": (2, _sizes(ep=2)),
    "tp2-ep2": (4, _sizes(tp=2, ep=2)),  # dp 2, edp 2
    "tp4-ep2": (4, _sizes(tp=4, ep=2)),  # dp 1, edp 2
    "tp2-ep4": (4, _sizes(tp=2, ep=4)),  # dp 2, edp 1
    "ep2-w8": (8, _sizes(ep=2)),  # dp 8, edp 4
    "tp2-ep4-w8": (8, _sizes(tp=2, ep=4)),  # dp 4, edp 2
    "ep2-etp2-w8": (8, _sizes(ep=2, etp=2)),  # dp 8, edp 2
    "tp2-etp4-w8": (8, _sizes(tp=2, etp=4)),  # dp 4, edp 2
    "tp2-pp2-ep2-w8": (8, _sizes(tp=2, ep=2, pp=2)),  # dp 2, edp 2
    "pp2-ep2-etp2-w8": (8, _sizes(ep=2, etp=2, pp=2)),  # dp 4, edp 1
}
"""Name -> ranks and sizes."""


class _Steps(pl.Callback):
    """Saves before the first step; collects, per step, this replica's items and their summed loss,
    and the norm of the gradients."""

    def __init__(self, first: str) -> None:
        self.sums: list[tuple[float, float]] = []
        self.norms: list[float] = []
        self._first = first

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.save_checkpoint(self._first)

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *_: Any
    ) -> None:
        count = float(outputs["num_items"])
        self.sums.append((float(outputs["loss"]) * count, count))

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if isinstance(trainer.strategy, MegatronStrategy):
            self.norms.append(float(trainer.strategy.gradient_norm()))
        else:
            gradients = [p.grad for p in module.parameters() if p.grad is not None]
            self.norms.append(float(torch.nn.utils.get_total_norm(gradients)))


@dataclass(frozen=True, kw_only=True)
class _Case:
    """How a training runs; without a layout, under plain Lightning."""

    layout: str | None
    optimizer: str = "adamw"
    strategy: dict[str, Any] = field(default_factory=lambda: {"data_parallel": "zero1"})
    steps: int = STEPS
    resumed: str | None = None
    dropout: float = 0.0
    precision: Any = "32-true"

    @property
    def ranks(self) -> int:
        return 1 if self.layout is None else LAYOUTS[self.layout][0]

    def train(self, saved: str) -> tuple[int, list[tuple[float, float]], list[float]]:
        """Train on one rank; save at ``saved`` after the last step and at ``saved.first`` before
        the first; return the data-parallel rank and what its steps gave."""
        strategy: Any = "auto"
        if self.layout is not None:
            sizes = LAYOUTS[self.layout][1]
            if sizes["pipeline_model_parallel_size"] > 1:
                sizes = {**sizes, "micro_batch_size": 2}
            strategy = MegatronStrategy(**sizes, **self.strategy)
        record = _Steps(f"{saved}.first")
        fit = trainer(
            strategy,
            max_steps=self.steps,
            callbacks=[record],
            gradient_clip_val=CLIP,
            precision=self.precision,
        )
        replicas = 1
        if self.layout is not None:
            replicas = ParallelLayout(**LAYOUTS[self.layout][1]).data_parallel_size(self.ranks)
        data = loader(STEPS * GLOBAL_BATCH, GLOBAL_BATCH // replicas)
        fit.fit(ExpertModule(self.optimizer, self.dropout), data, ckpt_path=self.resumed)
        fit.save_checkpoint(saved)
        return 0 if self.layout is None else strategy.context.dp.rank, record.sums, record.norms


@dataclass(frozen=True)
class _Run:
    losses: list[float]
    norms: list[float]
    first: dict[str, Any]
    """Checkpoint before the first step."""
    last: dict[str, Any]
    """Checkpoint after the last one."""


def _run(case: _Case, saved: Path) -> _Run:
    results = run_ranks(case.ranks, case.train, str(saved), timeout_s=110)
    norms = results[0][2]
    assert all(result[2] == norms for result in results)
    replicas = {rank: sums for rank, sums, _ in results}
    losses = [
        sum(total for total, _ in step) / sum(count for _, count in step)
        for step in zip(*replicas.values(), strict=True)
    ]
    return _Run(losses, norms, *(_read(f"{saved}{suffix}") for suffix in (".first", "")))


def _read(path: str) -> dict[str, Any]:
    if Path(path).is_dir():
        return read_full(path)
    loaded: dict[str, Any] = torch.load(path, weights_only=False)
    return loaded


@cache
def _reference(optimizer: str) -> _Run:
    """Return what plain Lightning gives on one process."""
    with tempfile.TemporaryDirectory() as folder:
        return _run(_Case(layout=None, optimizer=optimizer), Path(folder, "saved.ckpt"))


def _compare(found: _Run, expected: _Run, first: int = 0) -> None:
    assert found.losses == pytest.approx(expected.losses[first:], rel=TOLERANCE)
    assert found.norms == pytest.approx(expected.norms[first:], rel=TOLERANCE)
    assert min(found.norms) > CLIP  # so that all steps were clipped
    weights = found.last["state_dict"]
    assert weights.keys() == expected.last["state_dict"].keys()
    for name, weight in expected.last["state_dict"].items():
        torch.testing.assert_close(weights[name], weight, rtol=TOLERANCE, atol=TOLERANCE, msg=name)


def _assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def _slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("layout", "data_parallel", "optimizer"),
    [
        ("ep4", "zero1", "adamw"),
        ("etp2", "zero1", "sgd"),
        ("tp2-ep4", "ddp", "adamw"),
        _slow("one", "zero1", "adamw"),
        _slow("ep2", "ddp", "sgd"),
        _slow("ep2", "fsdp", "sgd"),
        _slow("etp2", "fsdp", "adamw"),
        _slow("tp4-ep2", "zero1", "adamw"),
        _slow("tp4-ep2", "fsdp", "sgd"),
        _slow("ep2-etp2", "zero1", "sgd"),
        _slow("tp2-ep2", "zero1", "muon"),
        _slow("tp2-ep4-w8", "zero1", "adamw"),
        _slow("tp2-ep4-w8", "ddp", "sgd"),
        _slow("tp2-ep4-w8", "fsdp", "adamw"),
        _slow("ep2-etp2-w8", "zero1", "adamw"),
        _slow("tp2-etp4-w8", "zero1", "sgd"),
        _slow("tp2-pp2-ep2-w8", "zero1", "adamw"),
        _slow("tp2-pp2-ep2-w8", "ddp", "sgd"),
        _slow("pp2-ep2-etp2-w8", "fsdp", "sgd"),
    ],
)
def test_training_equals_one_process(
    layout: str, data_parallel: str, optimizer: str, tmp_path: Path
) -> None:
    case = _Case(layout=layout, optimizer=optimizer, strategy={"data_parallel": data_parallel})
    run, expected = _run(case, tmp_path / "saved.ckpt"), _reference(optimizer)
    _assert_equal(run.first["state_dict"], expected.first["state_dict"])
    _compare(run, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "data_parallel", "options"),
    [
        ("etp2", "zero1", {"optimizer_cpu_offload": True}),
        _slow("etp2", "zero1", {"bucket_size": 1, "overlap_param_gather": True}),
        _slow("ep2-w8", "zero1", {"num_distributed_optimizer_instances": 2}),
        _slow("ep2-w8", "zero1", {"num_distributed_optimizer_instances": 4}),  # shards of one
        _slow("ep2-w8", "fsdp", {"num_distributed_optimizer_instances": 2}),
    ],
)
def test_options_of_the_data_parallel_ranks(
    layout: str, data_parallel: str, options: dict[str, Any], tmp_path: Path
) -> None:
    strategy = {
        "data_parallel": data_parallel,
        "data_parallel_options": DataParallelOptions(**options),
    }
    _compare(_run(_Case(layout=layout, strategy=strategy), tmp_path / "a"), _reference("adamw"))


@pytest.mark.slow
def test_moments_in_bf16(tmp_path: Path) -> None:
    """Against one rank with the same rounding. 1e-3: a moment that lies between two bf16 numbers is
    rounded to either of them, which are 4e-3 apart."""
    options = {"data_parallel_options": DataParallelOptions(moments_dtype="bf16")}
    one, many = (
        _run(_Case(layout=layout, strategy=options), tmp_path / layout)
        for layout in ("one", "etp2")
    )
    assert many.losses == pytest.approx(one.losses, rel=1e-3)
    moment = _tensors(many.last)["net.blocks.0.experts.fc1.exp_avg"]
    assert moment.dtype == torch.bfloat16 and moment.shape == (EXPERTS, 2 * WIDTH, HIDDEN)


def _tensors(checkpoint: dict[str, Any]) -> dict[str, Tensor]:
    """Return the weights and the optimizer's state by name, from a plain checkpoint."""
    [optimizer] = checkpoint["optimizer_states"]
    names = [f"net.{name}" for name, _ in ToyNet().named_parameters()]
    state = {
        f"{names[index]}.{key}": torch.as_tensor(value)
        for index, values in optimizer["state"].items()
        for key, value in values.items()
    }
    return {**checkpoint["state_dict"], **state}


@pytest.mark.parametrize(
    ("saved_by", "read_by", "precision"),
    [
        # test_expert_checkpoints has one of the usual run.
        _slow("ep4", "ep2-etp2", "32-true"),
        _slow("ep4", "ep2-etp2", "bf16-true"),
        _slow("ep2-etp2", "tp2-ep4", "32-true"),
        _slow("tp2-ep4-w8", "etp2", "32-true"),
        _slow("tp2-pp2-ep2-w8", "ep4", "32-true"),
        _slow("etp2", "pp2-ep2-etp2-w8", "bf16-true"),
        _slow("tp4-ep2", "one", "32-true"),
        _slow("one", "tp2-etp4-w8", "32-true"),
    ],
)
@pytest.mark.parametrize("data_parallel", ["zero1", _slow("fsdp"), _slow("ddp")])
def test_every_layout_reads_the_checkpoint_of_another(
    saved_by: str, read_by: str, precision: str, data_parallel: str, tmp_path: Path
) -> None:
    """What was loaded is saved again before the next step, and holds the same bits."""
    path, strategy = tmp_path / "stopped.ckpt", {"data_parallel": data_parallel}
    stopped = _run(_Case(layout=saved_by, steps=STOP, precision=precision, strategy=strategy), path)
    resumed = _Case(layout=read_by, resumed=str(path), precision=precision)
    run = _run(resumed, tmp_path / "resumed.ckpt")
    saved = _tensors(stopped.last)
    _assert_equal(_tensors(run.first), saved)
    fc1 = "net.blocks.1.experts.fc1"
    for name in (fc1, f"{fc1}.exp_avg", f"{fc1}.exp_avg_sq"):
        assert saved[name].shape == (EXPERTS, 2 * WIDTH, HIDDEN) and saved[name].any()
    if precision == "32-true":
        _compare(run, _reference("adamw"), STOP)


@pytest.mark.slow
def test_plain_lightning_and_a_layout_read_each_other(tmp_path: Path) -> None:
    sharded, plain = tmp_path / "sharded.ckpt", tmp_path / "plain.ckpt"
    stopped = _run(_Case(layout="ep2-on-two", steps=STOP), sharded)
    consolidate(str(sharded), str(plain))
    run = _run(_Case(layout=None, resumed=str(plain)), tmp_path / "a")
    _assert_equal(_tensors(run.first), _tensors(stopped.last))
    stopped = _run(_Case(layout=None, steps=STOP), plain)
    run = _run(_Case(layout="ep2-on-two", resumed=str(plain)), tmp_path / "b")
    _assert_equal(_tensors(run.first), _tensors(stopped.last))


def test_resuming_is_bit_equal_with_random_numbers_of_the_experts(tmp_path: Path) -> None:
    """Data-parallel ranks hold different experts, and so draw different numbers."""
    path = tmp_path / "stopped.ckpt"
    case = _Case(layout="ep2-on-two", dropout=0.4)
    whole = _run(case, tmp_path / "whole.ckpt")
    _run(replace(case, steps=STOP), path)
    run = _run(replace(case, resumed=str(path)), tmp_path / "resumed.ckpt")
    assert run.losses == whole.losses[STOP:] and run.norms == whole.norms[STOP:]
    _assert_equal(run.last["state_dict"], whole.last["state_dict"])


def _layout(name: str) -> ParallelLayout:
    return ParallelLayout(**LAYOUTS[name][1])


def _assembled(name: str, *, on_meta: bool = False) -> tuple[nn.Module, Any, ParallelContext]:
    context = ParallelContext(_layout(name))
    with torch.device("meta" if on_meta else "cpu"):
        torch.manual_seed(3)
        module = nn.ModuleDict({"net": ToyNet()})
    return module, assemble(module, context, None, Placement.loop(1), PipelineOptions()), context


def _initialize(name: str) -> None:
    """Each rank holds its boxes of the values that the full model has."""
    module, part, context = _assembled(name, on_meta=True)
    full = ToyNet()
    for path, parameter in module.named_parameters():
        value = torch.empty(part.specs[path].global_shape)
        full.init_weights(path.removeprefix("net."), value)
        assert torch.equal(parameter.detach(), part.specs[path].shard(value))
    fc1 = module.get_parameter("net.blocks.0.experts.fc1")
    assert fc1.shape == (EXPERTS // context.ep.size, 2 * WIDTH // context.etp.size, HIDDEN)
    if dist.is_initialized():
        dist.barrier()  # else a rank ends while a peer still connects to it


@pytest.mark.spread(1)
@pytest.mark.parametrize("layout", ["one", "ep2-etp2", "tp2-ep4"])
def test_initial_values_of_a_model_on_meta(layout: str) -> None:
    run_ranks(LAYOUTS[layout][0], _initialize, layout)


def _stepped(layout: str) -> tuple[int, float]:
    """Return how many elements this rank steps under zero1, and its share of all it holds."""
    module, part, context = _assembled(layout)
    optimizer = torch.optim.AdamW(module.parameters())
    GradientAccumulation(
        module, part.specs, context, [optimizer], sharded=True,
        options=DataParallelOptions(), stage_of=part.stage_of,
    )  # fmt: skip
    stepped = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    share = sum(
        p.numel() / context.axis(part.specs[name].data_axes).size
        for name, p in module.named_parameters()
    )
    return stepped, share


@pytest.mark.parametrize("layout", ["etp2", "tp4-ep2"])
def test_optimizer_state_is_sharded_over_the_ranks_that_hold_the_same(layout: str) -> None:
    """Also where dense parameters have one copy only (tp4-ep2)."""
    ranks = run_ranks(LAYOUTS[layout][0], _stepped, layout)
    assert sum(stepped for stepped, _ in ranks) == sum(share for _, share in ranks)


def _perturb(layout: str, name: str, axis: str) -> None:
    """Change a parameter on the second rank of every group over an axis."""
    module, part, context = _assembled(layout)
    path = f"net.blocks.0.experts.{name}"
    parameters = dict(module.named_parameters())
    check_replicas(parameters, part.specs, context)
    with torch.no_grad():
        if context.axis(axis).rank == 1:
            parameters[path].view(-1)[-1] += 1e-6
    with pytest.raises(
        ShardingError, match=rf"1 parameter\(s\) differ between the {axis} ranks .*: {path}\."
    ):
        check_replicas(parameters, part.specs, context)


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("layout", "name", "axis"),
    [("etp2", "fc1", "edp"), ("ep2-etp2", "bias", "etp"), ("ep4", "router", "dp-cp")],
)
def test_copies_that_differ_are_found(layout: str, name: str, axis: str) -> None:
    run_ranks(LAYOUTS[layout][0], _perturb, layout, name, axis)


def _fit_without_experts(sizes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"no parameter of the model is split over ep or etp"):
        trainer(MegatronStrategy(**sizes), max_steps=1).fit(ToyModule(), ToyData())


@pytest.mark.parametrize(
    "sizes", [{"expert_model_parallel_size": 2}, {"expert_tensor_parallel_size": 2}], ids=str
)
def test_a_model_without_experts_is_refused(sizes: dict[str, Any]) -> None:
    run_ranks(2, _fit_without_experts, sizes)
