"""Settings that cannot work are refused with the values found, why, and what to set; nobody
hangs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BackboneFinetuning, BatchSizeFinder, ModelPruning
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from megatron_lightning.config import (
    DataParallelOptions,
    PipelineOptions,
    RecomputeOptions,
)
from megatron_lightning.errors import ConfigError, MegatronLightningError, PipelineError
from megatron_lightning.launch.popen_launcher import ScriptLauncher
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.optim import LRSchedule, ParamGroup
from megatron_lightning.optim.optimizer_checks import check_optimizers
from megatron_lightning.parallel import ParallelLayout
from megatron_lightning.pipeline.schedules import resolve
from megatron_lightning.pipeline.schedules.advice import advice_on_few_microbatches
from megatron_lightning.resilience.failure import PeerFailure
from megatron_lightning.strategies import MegatronStrategy
from megatron_lightning.strategies.checks.module import check_fused_losses
from tests.helpers.layouts import tiny_config
from tests.helpers.toy import ToyData, ToyModule
from tests.helpers.trainers import trainer
from tests.lightning.support import DDP2, DP2, MICRO, ONE, PP2, PP2_DP2, Layout, make_layout, run


@pytest.mark.spread(4)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"expert_model_parallel_size": 0},
            r"expert_model_parallel_size is 0; it must be a positive integer",
        ),
        (
            {"data_parallel": "zero9"},
            r"data_parallel is 'zero9', which is unknown. Set it to one of ddp, zero1, fsdp",
        ),
        ({"micro_batch_size": 0}, r"micro_batch_size is 0; it must be a positive integer"),
        ({"micro_batch_size": 1.5}, r"micro_batch_size is 1.5; it must be a positive"),
        ({"micro_batch_size": "4"}, r"micro_batch_size is '4'; it must be a positive"),
        ({"timeout_s": 0.0}, r"timeout_s is 0.0; .* Set it above 0"),
        ({"timeout_s": "60"}, r"timeout_s is '60'; .* Set it above 0"),
        ({"start_method": "thread"}, r"'thread'. Set it to"),
        ({"pipeline_schedule": "zigzag"}, r"zigzag"),
        (
            {"pipeline_schedule": "zbv", "pipeline_model_parallel_size": 2},
            r"two model chunks.* there are 1",
        ),
        (
            {"pipeline_schedule": ["0F0 0B0", "1B0 1F0"], "pipeline_model_parallel_size": 2},
            r"deadlocks: pp rank 0 waits at 1B0",
        ),
        ({"pipeline_model_parallel_size": 0}, r"pipeline.*0"),
        ({"tensor_model_parallel_size": -1}, r"tensor.*-1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_values(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MegatronStrategy(**options)


def test_data_with_more_ids_than_the_model() -> None:
    class Wide(ToyData):
        vocab_size = 17

    config = tiny_config(num_layers=4, hidden_size=8, num_attention_heads=2, vocab_size=16)
    with pytest.raises(
        ConfigError,
        match=r"vocab_size=17 .* above the model's 16, .* Set the model's vocab_size to 17",
    ):
        trainer(MegatronStrategy(), devices=1, max_steps=1).fit(GPTLightningModule(config), Wide())
    assert not dist.is_initialized()


def test_a_cut_that_does_not_fit_the_model() -> None:
    config = tiny_config(num_layers=4, hidden_size=8, num_attention_heads=2, vocab_size=16)
    cut = PipelineOptions(pipeline_model_parallel_layout="Et|ttttL")
    strategy = MegatronStrategy(pipeline_model_parallel_size=2, pipeline_options=cut)
    with pytest.raises(
        ConfigError, match=r"has 5 layers t \(decoder\), and pipeline_units\(\) lists 4. Write 4"
    ):
        trainer(strategy, devices=2, max_steps=1).fit(GPTLightningModule(config), ToyData())
    assert not dist.is_initialized()


def test_micro_batches_that_the_schedule_is_not_for() -> None:
    rows = ["1F0 1B0", "0F0 0B0"]
    strategy = MegatronStrategy(
        pipeline_model_parallel_size=2, micro_batch_size=2, pipeline_schedule=rows
    )
    with pytest.raises(ConfigError, match=r"table for 1 micro-batches, and the run has 4"):
        trainer(strategy, devices=2, max_steps=1).fit(ToyModule(), ToyData(batch_size=8))
    assert not dist.is_initialized()


def test_few_micro_batches_are_advised_against() -> None:
    choice = resolve("auto", num_ranks=4, num_chunks=2)
    advice = advice_on_few_microbatches(choice, 2) or ""
    assert (
        "2 micro-batches, fewer than the 4 pipeline ranks, which are idle 56%" in advice
        and "9% with 16" in advice
    )
    assert advice_on_few_microbatches(choice, 4) is None


def test_a_world_that_the_layout_does_not_divide() -> None:
    with pytest.raises(ConfigError, match=r"3"):
        trainer(MegatronStrategy(pipeline_model_parallel_size=2), devices=3)


def test_experts_that_do_not_divide_the_world() -> None:
    strategy = MegatronStrategy(
        tensor_model_parallel_size=2, expert_model_parallel_size=3, expert_tensor_parallel_size=2
    )
    with pytest.raises(
        ConfigError,
        match=r"4 ranks cannot be divided into expert replicas of 6 ranks "
        r"\(expert tensor 2 x expert 3 x pipeline 1\). Set num_nodes x devices to a multiple of 6",
    ):
        trainer(strategy, devices=4)
    assert not dist.is_initialized()


class _Fp8(Precision):
    precision = "transformer-engine"


def test_a_precision_for_whole_models_on_several_ranks() -> None:
    with pytest.raises(
        ConfigError,
        match=r"'transformer-engine' is Lightning's.* here are 2 ranks.*MegatronFP8Precision",
    ):
        trainer(MegatronStrategy(), devices=2, plugins=[_Fp8()])


def test_a_backend_without_cpu_tensors() -> None:
    with pytest.raises(
        ConfigError,
        match=r"'nccl' has no backend for CPU tensors.* Leave it unset.*cpu:gloo,cuda:nccl",
    ):
        MegatronStrategy(process_group_backend="nccl")
    for backend in ("gloo", "cpu:gloo,cuda:nccl"):
        MegatronStrategy(process_group_backend=backend)


class _Manual(ToyModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class _Backward(ToyModule):
    def backward(self, loss: Tensor, *args: Any, **options: Any) -> None:
        loss.backward()


class _Twice(ToyModule):
    def _loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        super()._loss(batch)
        return super()._loss(batch)


class _Never(ToyModule):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return batch["ids"].float().mean().requires_grad_()


class _Unequal(ToyModule):
    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        if self.trainer.strategy.context.pp.rank == 1:  # holds stage 0
            return None
        return super().validation_step(batch, batch_idx)


class _Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)


class _NoUnits(ToyModule):
    def configure_model(self) -> None:
        self.model = _Whole()


class _TwoPipelines(ToyModule):
    def configure_model(self) -> None:
        super().configure_model()
        other = ToyModule()
        other.configure_model()
        self.second = other.model


class _ZeroRedundancy(ToyModule):
    def configure_optimizers(self) -> Any:
        return ZeroRedundancyOptimizer(self.parameters(), torch.optim.Adam, lr=0.1)


class _Lbfgs(ToyModule):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1)


class _LowLbfgs(_Lbfgs):
    def configure_model(self) -> None:
        super().configure_model()
        self.bfloat16()


class _TooFewUnits(ToyModule):
    def configure_model(self) -> None:
        super().configure_model()
        self.model.pipeline_units = lambda: ["embed"]


class _NotATensor(ToyModule):
    def configure_model(self) -> None:
        super().configure_model()
        self.model.layers["1"].forward = lambda *_, **__: object()


class _ForeignMetric(ToyModule):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        from torchmetrics import MeanMetric

        loss, _ = self._loss(batch)
        metric = MeanMetric()
        metric.update(loss)
        self.log("foreign", metric)
        return loss


class _OwnReduction(ToyModule):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss, _ = self._loss(batch)
        self.log("own", loss, reduce_fx=lambda values: values.median())
        return loss


class _Unsendable(ToyModule):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss, _ = self._loss(batch)
        return {"loss": loss, "later": lambda: loss}


class _Sparse(ToyModule):
    def configure_model(self) -> None:
        super().configure_model()
        self.model.embed.sparse = True


class _Built(ToyModule):
    """Exists from the start."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        ToyModule.configure_model(self)

    configure_model = pl.LightningModule.configure_model


class _Nested(_Built):
    def __init__(self) -> None:
        super().__init__()
        self.model.pipeline_units = lambda: ["embed", "layers", "layers.0", "norm", "head"]


class _Compiled(_Built):
    def __init__(self) -> None:
        super().__init__()
        self.model.head.compile()


def _selective(name: str) -> RecomputeOptions:
    return RecomputeOptions(recompute_granularity="selective", recompute_modules=[name])


RECOMPUTE = make_layout(
    "recompute",
    2,
    1,
    pipeline_model_parallel_size=2,
    recompute=_selective("self_atn"),
)
CASES: dict[str, tuple[Layout, type[ToyModule], type[Exception], str]] = {
    "manual": (
        PP2,
        _Manual,
        ConfigError,
        r"_Manual optimizes manually.*pipeline 2.* Set automatic_optimization=True",
    ),
    "manual-micro": (
        MICRO,
        _Manual,
        ConfigError,
        r"_Manual optimizes manually.*micro_batch_size 2",
    ),
    "backward": (
        PP2,
        _Backward,
        ConfigError,
        r"_Backward overrides backward\(\).* Remove the override",
    ),
    "backward-micro": (MICRO, _Backward, ConfigError, r"overrides backward\(\)"),
    "twice": (
        PP2,
        _Twice,
        PipelineError,
        r"training_step called the pipelined module twice on stage .* micro-batch 0",
    ),
    "never": (
        PP2,
        _Never,
        PipelineError,
        r"without calling the pipelined module. Call it exactly once",
    ),
    "unequal": (
        PP2,
        _Unequal,
        PipelineError,
        r"validation_step called the pipelined module on stage 1 and not on the stage",
    ),
    "no-units": (PP2, _NoUnits, MegatronLightningError, r"has no list of modules"),
    "two-pipelines": (PP2, _TwoPipelines, MegatronLightningError, r"pipeline_units"),
    "too-few-units": (PP2, _TooFewUnits, MegatronLightningError, r"at least 2 layers.*lists 1"),
    "not-a-tensor": (
        PP2,
        _NotATensor,
        PipelineError,
        r"unit 'layers.1' returns a object, and only tensors, plain values",
    ),
    "foreign-metric": (
        PP2,
        _ForeignMetric,
        ConfigError,
        r"MeanMetric that is not an attribute .* Assign it to self",
    ),
    "reduction": (
        MICRO,
        _OwnReduction,
        ConfigError,
        r"self.log\('own'\) has reduce_fx=<function .* Set it to mean, sum",
    ),
    "output": (
        PP2,
        _Unsendable,
        ConfigError,
        r"cannot be sent to the other pipeline stages .* Return and log tensors",
    ),
    "recompute": (
        RECOMPUTE,
        ToyModule,
        ConfigError,
        r"'self_atn' of recompute_modules matches .* Did you mean 'self_attn'\?",
    ),
    "sparse": (
        PP2_DP2,
        _Sparse,
        ConfigError,
        r"embed has sparse=True, and .* 2 data-parallel ranks .* Set sparse=False",
    ),
    "zero-redundancy": (
        DP2,
        _ZeroRedundancy,
        ConfigError,
        r"ZeroRedundancyOptimizer, which shards its state .*zero1",
    ),
    "zero-redundancy-ddp": (
        DDP2,
        _ZeroRedundancy,
        ConfigError,
        r"ZeroRedundancyOptimizer, which shards its state .*zero1",
    ),
    "lbfgs": (
        PP2,
        _Lbfgs,
        ConfigError,
        r"LBFGS, which runs the step several times .* Use a first-order",
    ),
    "lbfgs-data": (DP2, _Lbfgs, ConfigError, r"LBFGS"),
    "lbfgs-masters": (
        ONE,
        _LowLbfgs,
        ConfigError,
        r"LBFGS, which .* tries weights .* precision=\"32-true\" or \"bf16-mixed\"",
    ),
}


def _refused(layout: Layout, folder: str, case: str) -> str | None:
    """Return the error of this rank; one rank may see only that its peer is gone."""
    _, module, kind, _ = CASES[case]
    try:
        layout.trainer(folder, max_epochs=1).fit(module(), datamodule=layout.data_module())
    except kind as error:
        return str(error)
    except (PeerFailure, RuntimeError) as error:
        return f"peer: {error}"
    return None


@pytest.mark.spread(1)
@pytest.mark.parametrize("case", ["recompute", "sparse"])
def test_what_a_hook_builds_is_refused_alike_on_every_rank(case: str, tmp_path: Path) -> None:
    """Also on the stages that hold none of it."""
    layout, *_ = CASES[case]
    [error] = set(run(layout, _refused, tmp_path, case))
    assert re.search(CASES[case][3], error) and "\n" not in error


@pytest.mark.spread(2)
@pytest.mark.parametrize("case", [case for case in CASES if case not in ("recompute", "sparse")])
def test_modules(case: str, tmp_path: Path) -> None:
    layout, _, _, message = CASES[case]
    errors = run(layout, _refused, tmp_path, case)
    assert None not in errors
    said = [error for error in errors if not error.startswith("peer: ")]
    assert said
    for error in said:
        assert re.search(message, error, re.DOTALL), error


def _language_model() -> GPTLightningModule:
    """Its layers follow from its configuration."""
    return GPTLightningModule(tiny_config(hidden_size=8, num_attention_heads=2, vocab_size=16))


def _with_groups(name: str, **settings: Any) -> Callable[[], pl.LightningModule]:
    """The same with a table of parameter groups."""
    config = tiny_config(hidden_size=8, num_attention_heads=2, vocab_size=16)
    return lambda: GPTLightningModule(
        config, param_groups=[ParamGroup(name="own", params=[name])], **settings
    )


class _Unlaunched(ToyModule):
    """Its model exists from the start, and cannot be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.model = _Whole()

    configure_model = pl.LightningModule.configure_model


_PRUNING = ModelPruning("l1_unstructured", amount=0.5)


@pytest.mark.parametrize(
    ("module", "callbacks", "options", "message"),
    [
        (_Manual, [], {"pipeline_model_parallel_size": 2}, "_Manual optimizes manually"),
        (_Backward, [], {"micro_batch_size": 2}, r"overrides backward\(\)"),
        (
            _Unlaunched,
            [],
            {"pipeline_model_parallel_size": 2},
            r"_Unlaunched has no list of modules",
        ),
        (
            _Nested,
            [],
            {"pipeline_model_parallel_size": 2},
            r"pipeline unit 'layers' contains unit 'layers.0'",
        ),
        (
            _Built,
            [],
            {"tensor_model_parallel_size": 2},
            r"no module of _Built declares how it is split",
        ),
        pytest.param(
            _Compiled,
            [],
            {"data_parallel": "fsdp", "pipeline_schedule": ["0F0 0I0 0W0"], "micro_batch_size": 8},
            (
                r"model\.head is compiled, schedule table .* defers weight gradients.*Set "
                r"data_parallel to \"zero1\""
            ),
            marks=pytest.mark.slow,
        ),
        (
            _language_model,
            [],
            {"recompute": _selective("core_atn")},
            r"'core_atn' of .* Did you mean 'core_attn'\? Its modules",
        ),
        (
            _with_groups("**.embeding.**"),
            [],
            {"pipeline_model_parallel_size": 2},
            (
                r"parameter group 'own' takes no parameter of .*embeding.* are called "
                r"'model.embedding.*remove the row"
            ),
        ),
        (
            _with_groups(
                "**.linear_fc1.*",
                learning_rate=1e-4,
                lr_schedule=LRSchedule(lr_decay_steps=9, min_lr=1e-3),
            ),
            [],
            {},
            r"parameter group 0 has min_lr=0.001 above its learning rate 0.0001",
        ),
        (
            ToyModule,
            [BackboneFinetuning()],
            {},
            "BackboneFinetuning adds parameters to the optimizer",
        ),
        (
            ToyModule,
            [BackboneFinetuning()],
            {"pipeline_model_parallel_size": 2},
            "the 2 pipeline ranks, which hold different",
        ),
        (ToyModule, [BatchSizeFinder()], {}, "BatchSizeFinder .* several ranks.*plan"),
        (ToyModule, [_PRUNING], {}, 'ModelPruning chooses .* one rank sees.*data_parallel="zero1"'),
        (
            ToyModule,
            [_PRUNING],
            {"pipeline_model_parallel_size": 2},
            "ModelPruning chooses .* one rank sees.* pipeline 2",
        ),
    ],
    ids=[
        *(
            "manual",
            "backward",
            "units",
            "nested",
            "table",
            "compiled",
            "recompute",
            "groups",
            "rates",
        ),
        *("finetuning", "finetuning-stages", "batch-finder", "pruning-shards", "pruning-stages"),
    ],
)
def test_modules_are_refused_before_any_process_starts(
    module: Callable[[], pl.LightningModule],
    callbacks: list[pl.Callback],
    options: dict[str, Any],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The launcher would start the other rank, and the strategy would create the groups."""
    monkeypatch.setattr(ScriptLauncher, "_start", lambda self: pytest.fail("a process is started"))
    refused = trainer(MegatronStrategy(**options), devices=2, callbacks=callbacks)
    with pytest.raises(ConfigError, match=message):
        refused.fit(module(), datamodule=ToyData())


@pytest.mark.parametrize("num_batches", [0, -1])
def test_steps_of_no_batch_are_refused_before_any_process_starts(
    num_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ScriptLauncher, "_start", lambda self: pytest.fail("a process is started"))
    refused = trainer(MegatronStrategy(), devices=2, accumulate_grad_batches=num_batches)
    with pytest.raises(
        ConfigError, match=rf"accumulate_grad_batches is {num_batches}; .* Set it to 1 or more"
    ):
        refused.fit(ToyModule(), datamodule=ToyData())


def test_shards_are_not_given_to_what_is_no_torch_optimizer() -> None:
    """Lightning steps any object that has the methods; what it holds would be whole parameters
    without gradients."""
    check_optimizers([object()], None, 2, DataParallelOptions(), sharded=False)
    with pytest.raises(
        ConfigError,
        match=r'a object, which is no torch.optim.Optimizer.*Derive it .* data_parallel="ddp"',
    ):
        check_optimizers([object()], None, 2, DataParallelOptions(), sharded=True)


def _lce_forward(self: nn.Module, x: Tensor) -> Tensor:
    return x


_lce_forward.__module__ = "liger_kernel.transformers.model.llama"


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("sizes", "sharded", "refused"),
    [
        ({"tensor_model_parallel_size": 2}, False, "tensor 2, pipeline 1"),
        ({"pipeline_model_parallel_size": 2}, False, "tensor 1, pipeline 2"),
        ({}, True, "tensor 1, pipeline 1, fsdp"),
        ({"context_parallel_size": 2}, False, None),
    ],
)
@pytest.mark.parametrize("on_instance", [True, False])
def test_a_loss_that_reads_the_weight_of_a_divided_output_layer(
    sizes: dict[str, int], sharded: bool, refused: str | None, on_instance: bool
) -> None:
    """Liger replaces the forward of the class, or of a model that exists."""

    class Model(nn.Module):
        forward = nn.Identity.forward if on_instance else _lce_forward

    module, layout = ToyModule(), ParallelLayout(**sizes)
    module.lm = Model()
    if on_instance:
        module.lm.forward = MethodType(_lce_forward, module.lm)
    if refused is None:
        check_fused_losses(module, layout, sharded=sharded)
        return
    with pytest.raises(ConfigError, match=rf"lm \(Model\).*\({refused}\).*cross_entropy=False"):
        check_fused_losses(module, layout, sharded=sharded)
