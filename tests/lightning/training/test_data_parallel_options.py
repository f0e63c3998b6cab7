"""The options of data parallelism through a Trainer: the same training, whatever travels when and
lies where."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EMAWeightAveraging,
    StochasticWeightAveraging,
)
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_lightning.config import DataParallelOptions
from megatron_lightning.errors import ConfigError, PipelineError
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.toy import ToyModule
from tests.helpers.trainers import Losses, trainer
from tests.lightning.support import (
    DP2,
    PP2_DP2,
    SINGLE,
    Layout,
    assert_close,
    make_layout,
    mean_over_ranks,
    metrics_of,
    run,
    single,
)

FSDP2 = make_layout("fsdp2", 2, 2, data_parallel="fsdp")
PP2_FSDP2 = make_layout(
    "pp2-fsdp2", 4, 2, data_parallel="fsdp", pipeline_model_parallel_size=2, micro_batch_size=2
)
SINGLE_OURS = Layout("single-ours", 1, 1, ())
OPTIONS = {
    # A bucket for each parameter.
    "overlap": DataParallelOptions(overlap_param_gather=True, bucket_size=1),
    "offload": DataParallelOptions(optimizer_cpu_offload=True, bucket_size=500),
    "hybrid": DataParallelOptions(num_distributed_optimizer_instances=2),
}


class _Resting(pl.Callback):
    """Counts the gathers under way when a batch ends, and looks at what a checkpoint in that place
    holds."""

    def __init__(self, path: Path) -> None:
        self.under_way, self._path = 0, path

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if isinstance(trainer.strategy, MegatronStrategy):
            reducer = trainer.strategy.run.training.accumulation.reducer
            self.under_way += sum(bucket.gathering is not None for bucket in reducer.buckets)
        if trainer.global_step == 3:
            trainer.save_checkpoint(self._path)


def _whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach().clone()


def _train(layout: Layout, folder: str, name: str) -> dict[str, Any]:
    path, record = Path(folder) / f"{layout.name}-{name}", Losses()
    resting = _Resting(path)
    options = {} if layout is SINGLE else {"data_parallel_options": OPTIONS[name]}
    common: dict[str, Any] = {"gradient_clip_val": 0.5, "val_check_interval": 2, "max_epochs": 1}
    fit = trainer(
        layout.strategy(**options), default_root_dir=folder, callbacks=[record, resting], **common
    )
    module = ToyModule()
    fit.fit(module, datamodule=layout.data_module(num_samples=48))
    ended = {n: _whole(p) for n, p in module.named_parameters() if not n.endswith("in_proj_bias")}
    resumed = trainer(layout.strategy(**options), default_root_dir=folder, **common)
    again = ToyModule()
    resumed.fit(again, datamodule=layout.data_module(num_samples=48), ckpt_path=path)
    same = all(torch.equal(ended[n], _whole(p)) for n, p in again.named_parameters() if n in ended)
    return {
        "losses": record.losses,
        "norms": record.norms,
        "metrics": metrics_of(fit),
        "weights": ended,
        "resumes": same,
        "under_way": resting.under_way,
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "name"),
    [
        (DP2, "overlap"),
        (DP2, "offload"),
        (DP2, "hybrid"),
        (SINGLE_OURS, "offload"),
        (FSDP2, "offload"),
        (PP2_FSDP2, "offload"),
        (PP2_DP2, "overlap"),
        (PP2_DP2, "offload"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_training_and_resuming_are_the_same(layout: Layout, name: str, tmp_path: Path) -> None:
    """Validation in the middle and a checkpoint between steps see the weights of the last step."""
    expected, ranks = single(_train, name), run(layout, _train, tmp_path, name)
    assert_close(mean_over_ranks([rank["losses"] for rank in ranks]), expected["losses"])
    for rank in ranks:
        assert rank["resumes"] and (rank["under_way"] > 0) == (name == "overlap")
        assert_close(rank["norms"], expected["norms"])
        assert_close(rank["metrics"], expected["metrics"])
        for parameter in rank["weights"]:
            assert_close(
                rank["weights"][parameter], expected["weights"][parameter], where=parameter
            )


class _Peeks(ToyModule):
    """Uses weights, after the first step without calling their layers."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        if batch_idx == 0:
            return super().training_step(batch, batch_idx)
        return (self.model.head.weight * self.model.layers["0"].norm1.weight).square().mean()


def _peek(layout: Layout, folder: str) -> str:
    options = DataParallelOptions(overlap_param_gather=True)
    fit = trainer(layout.strategy(data_parallel_options=options), max_steps=4, limit_val_batches=0)
    with pytest.raises(PipelineError) as caught:
        fit.fit(_Peeks(), datamodule=layout.data_module())
    return str(caught.value)


def test_a_use_that_nobody_announced_is_an_error(tmp_path: Path) -> None:
    for message in run(DP2, _peek, tmp_path):
        assert (
            "was used while its new value was still on its way" in message
            and "overlap_param_gather=False" in message
        )


def test_callbacks_that_read_weights_are_refused() -> None:
    options = DataParallelOptions(overlap_param_gather=True)
    strategy = MegatronStrategy(data_parallel_options=options)
    with pytest.raises(
        ConfigError, match=r"EMAWeightAveraging reads the weights .* Set overlap_param_gather=False"
    ):
        trainer(strategy, devices=1, callbacks=[EMAWeightAveraging()], max_steps=1).fit(
            ToyModule(), DP2.data_module()
        )


def test_options_are_checked_before_any_process() -> None:
    options = DataParallelOptions(num_distributed_optimizer_instances=3)
    with pytest.raises(ConfigError, match=r"instances=3 does not divide the 4 data x context"):
        trainer(MegatronStrategy(data_parallel_options=options), devices=4)


class _ByHand(ToyModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def _refused_fsdp(layout: Layout, folder: str) -> list[str]:
    messages = []
    averaging = StochasticWeightAveraging(swa_lrs=1e-3)
    for module, callbacks in (
        (_ByHand(), []),
        (ToyModule(), [averaging]),
        (ToyModule(), [BackboneFinetuning()]),
    ):
        with pytest.raises(ConfigError) as caught:
            trainer(MegatronStrategy(data_parallel="fsdp"), max_steps=1, callbacks=callbacks).fit(
                module, layout.data_module()
            )
        messages.append(str(caught.value))
    module = ToyModule()
    trainer(MegatronStrategy(data_parallel="fsdp"), max_steps=1).fit(module, layout.data_module())
    with pytest.raises(ConfigError) as caught:
        trainer(MegatronStrategy(), max_steps=1).fit(module, layout.data_module())
    return [*messages, str(caught.value)]


def test_what_fsdp_cannot_shard(tmp_path: Path) -> None:
    expected = [
        r"_ByHand optimizes manually .* the 2 data-parallel ranks .* or data_parallel=\"zero1\"",
        (
            r"StochasticWeightAveraging copies full modules, and data_parallel=\"fsdp\" .* 2 "
            r"parts. Set data_parallel=\"zero1\""
        ),
        r"BackboneFinetuning adds parameters .* 2 data-parallel ranks with data_parallel=\"fsdp\"",
        (
            r"ToyModule was sharded by an earlier Trainer with data_parallel=\"fsdp\" .* Create a "
            r"new module"
        ),
    ]
    for rank in run(DP2, _refused_fsdp, tmp_path):
        for message, pattern in zip(rank, expected, strict=True):
            assert re.search(pattern, message), message
