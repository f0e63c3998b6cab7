"""Less usual features of modules: weights used twice, buffers that training changes, steps of more
than one part."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from megatron_lightning.checkpoint import read_full
from megatron_lightning.errors import ConfigError, PipelineError, ShardingError
from megatron_lightning.resilience.failure import PeerFailure
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.trainers import Losses, trainer
from tests.lightning.support import (
    DDP2,
    DP2,
    MICRO,
    ONE,
    PP2,
    PP2_DP2,
    PP2_WHOLE,
    Layout,
    assert_close,
    layouts,
    make_layout,
    metrics_of,
    run,
    single,
)
from tests.lightning.vectors import Net, VectorModule, loader, vectors


class _Tied(nn.Module):
    """Embedding and output layer share their weight, and say so nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def pipeline_units(self) -> list[str]:
        return ["embed", "first", "second", "head"]

    def forward(self, x: Tensor) -> Tensor:
        for unit in (self.embed, self.first, self.second, self.head):
            x = unit(x)
        return x


def _tied(layout: Layout, folder: str) -> dict[str, Any]:
    ids = torch.randint(0, 11, (32,), generator=torch.Generator().manual_seed(0))
    data = TensorDataset(ids, ids * 3 % 11)
    torch.manual_seed(0)
    module, record = VectorModule(_Tied()), Losses()
    first = layout.trainer(folder, max_epochs=1, callbacks=[record])
    first.fit(module, loader(layout, data))
    first.save_checkpoint(path := f"{folder}/tied.ckpt")
    torch.manual_seed(1)
    again = layout.trainer(folder, max_epochs=2, callbacks=[record])
    again.fit(VectorModule(_Tied()), loader(layout, data), ckpt_path=path)
    saved = (
        read_full(path)["state_dict"]
        if os.path.isdir(path)
        else torch.load(path, weights_only=True)["state_dict"]
    )
    return {
        "norms": record.norms,
        "metrics": metrics_of(again),
        "names": sorted(saved),
        "head": saved["net.head.weight"],
    }


@layouts(PP2, slow=[ONE, MICRO, DP2, PP2_DP2])
def test_weights_tied_by_hand(layout: Layout, tmp_path: Path) -> None:
    for rank in run(layout, _tied, tmp_path):
        assert_close(rank, single(_tied))


class _Shared(VectorModule):
    """Two layers on ranks in the middle of the pipeline share their weight."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(8, 8) for _ in range(5)]
        layers[3].weight = layers[1].weight
        super().__init__(nn.Sequential(*layers[:4], nn.Linear(8, 4)))


def _shared(layout: Layout, folder: str) -> dict[str, Any]:
    record, module = Losses(), _Shared()
    fit = layout.trainer(folder, max_epochs=2, callbacks=[record])
    fit.fit(module, loader(layout))
    return {"norms": record.norms, "metrics": metrics_of(fit)}


@pytest.mark.slow
@layouts(make_layout("pp4", 4, 1, pipeline_model_parallel_size=4, micro_batch_size=2))
def test_weights_tied_between_any_stages(layout: Layout, tmp_path: Path) -> None:
    for rank in run(layout, _shared, tmp_path):
        assert_close(rank, single(_shared))


def test_a_module_that_is_two_layers_is_no_unit() -> None:
    layer = nn.Linear(8, 8)
    module = VectorModule(Net(nn.Linear(8, 8), layer, nn.Linear(8, 8), layer, nn.Linear(8, 4)))
    strategy = MegatronStrategy(pipeline_model_parallel_size=2, micro_batch_size=2)
    with pytest.raises(ConfigError, match=r"units '1' and '3' are one module"):
        trainer(strategy, devices=2, max_epochs=1).fit(module, loader(PP2))


class _Normalised(VectorModule):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(Net(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4)))


def _share(num: int, seed: int) -> DataLoader[Any]:
    """Lightning's DDP would shuffle what it splits itself."""
    data = vectors(num, seed)
    return DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False))


def _statistics(layout: Layout, folder: str, strategy: str | None = None) -> dict[str, Any]:
    module = _Normalised()
    chosen = (
        layout.trainer(folder, max_epochs=2)
        if strategy is None
        else trainer(strategy, max_epochs=2)
    )
    chosen.fit(module, _share(32, 0), _share(16, 1))
    validated = metrics_of(chosen)
    if strategy is None:
        chosen.save_checkpoint(path := f"{folder}/statistics.ckpt")
        saved = read_full(path)["state_dict"]
        for name, buffer in module.named_buffers():
            assert torch.equal(saved[name], buffer), "every rank continues with what was saved"
    return {"buffers": dict(module.named_buffers()), "metrics": validated}


@layouts(DP2, slow=[DDP2])
def test_running_statistics_are_the_first_replicas(layout: Layout, tmp_path: Path) -> None:
    """As in DistributedDataParallel, by Lightning's own strategy."""
    [expected, _] = run(DP2, _statistics, tmp_path, "ddp")
    for rank in run(layout, _statistics, tmp_path):
        assert_close(rank, expected)


class _Smoothed(VectorModule):
    """Has a buffer outside of the model that is cut, which only the last stage reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("smooth", torch.zeros(()))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.smooth.mul_(0.9).add_(loss.detach())
        return loss


class _Smooth(pl.Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        self.seen.append(float(module.smooth))


def _smoothed(layout: Layout, folder: str) -> list[float]:
    record = _Smooth()
    layout.trainer(folder, max_epochs=2, callbacks=[record]).fit(_Smoothed(), loader(layout))
    return record.seen


@layouts(PP2, slow=[PP2_DP2])
def test_buffers_after_the_call_are_the_last_stages(layout: Layout, tmp_path: Path) -> None:
    first, *others = run(layout, _smoothed, tmp_path)
    assert len(set(first)) == len(first) > 2 and others == [first] * len(others)


def test_batch_norm_over_replicas_needs_gpus() -> None:
    with pytest.raises(
        ConfigError, match=r"no CPU kernels, and 2 data-parallel ranks .* Set sync_batchnorm=False"
    ):
        trainer(MegatronStrategy(), devices=2, sync_batchnorm=True)
    # One replica.
    trainer(MegatronStrategy(pipeline_model_parallel_size=2), devices=2, sync_batchnorm=True)


class _OwnShares(VectorModule):
    """Shares its validation data out among all ranks, as one does under DDP."""

    def val_dataloader(self) -> DataLoader[Any]:
        trainer, data = self.trainer, vectors(16, 1)
        return DataLoader(
            data,
            batch_size=4,
            sampler=DistributedSampler(data, trainer.world_size, trainer.global_rank),
        )


def _own_shares(layout: Layout, folder: str) -> None:
    with pytest.raises(
        ShardingError, match=r"read different first batches.* trainer\.distributed_sampler_kwargs"
    ):
        layout.trainer(folder, max_epochs=1).fit(_OwnShares(), loader(layout))


def test_stages_that_validate_on_different_samples_are_told(tmp_path: Path) -> None:
    run(PP2, _own_shares, tmp_path)


class _LogsVectors(VectorModule):
    value: Any = None

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.log("odd", self.value)
        return super().training_step(batch, batch_idx)


def test_what_cannot_be_logged_is_told_at_once(tmp_path: Path) -> None:
    """In Lightning's words."""
    single, kind = (
        "the tensor must have a single element and its shape is [(]4,[)]",
        "`dict` values cannot be logged",
    )
    for value, message in ((torch.ones(4), single), ({"a": 1.0}, kind)):
        module = _LogsVectors()
        module.value = value
        with pytest.raises(ValueError, match=rf"`self.log[(]odd, .*[)]` was called, but {message}"):
            trainer(MegatronStrategy(micro_batch_size=4), devices=1, max_epochs=1).fit(
                module, loader(MICRO)
            )


def _logged_vector(layout: Layout, folder: str) -> dict[str, float]:
    module = _LogsVectors()
    module.value = torch.tensor([3])
    trainer = layout.trainer(folder, max_epochs=1)
    trainer.fit(module, loader(layout))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


@layouts(PP2_WHOLE, slow=[PP2, MICRO])
def test_a_vector_of_one_element_is_logged_as_a_number(layout: Layout, tmp_path: Path) -> None:
    for rank in run(layout, _logged_vector, tmp_path):
        assert rank["odd"] == 3.0


class _Iterates(VectorModule):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        """Takes what it likes."""


def test_steps_that_take_the_iterator_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"_Iterates.training_step takes the iterator .* Take batch and batch_idx"
    ):
        trainer(MegatronStrategy(micro_batch_size=4), devices=1, max_epochs=1).fit(
            _Iterates(), loader(MICRO)
        )


class _Samples(VectorModule):
    def on_train_epoch_end(self) -> None:
        self.net(torch.ones(2, 8))


_A_PART = r"Net was called outside of a .* step, and this rank holds only part of its layers"


def _sampling(layout: Layout, folder: str) -> None:
    with pytest.raises(PipelineError, match=_A_PART):
        layout.trainer(folder, max_epochs=1).fit(_Samples(), loader(layout))


def _sampling_afterwards(layout: Layout, folder: str) -> None:
    module = VectorModule()
    for _ in range(2):
        layout.trainer(folder, max_epochs=1).fit(module, loader(layout))
        for net in (module.net, copy.deepcopy(module.net), pickle.loads(pickle.dumps(module.net))):
            with pytest.raises(PipelineError, match=_A_PART):
                net(torch.ones(2, 8))
    assert len(module.net._forward_pre_hooks) == 1


_ASKING: dict[str, Callable[[pl.Trainer], Any]] = {
    "barrier": lambda trainer: trainer.strategy.barrier(),
    "log_dir": lambda trainer: trainer.log_dir,  # a broadcast
    "decision": lambda trainer: trainer.strategy.reduce_boolean_decision(True),
    "checkpoint": lambda trainer: trainer.save_checkpoint(
        Path(trainer.default_root_dir, "in-step.ckpt")
    ),
}


class _AsksInStep(VectorModule):
    def __init__(self, what: Callable[[pl.Trainer], Any]) -> None:
        super().__init__()
        self.what = what

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.what(self.trainer)
        return super().training_step(batch, batch_idx)


def _asking(layout: Layout, folder: str, what: str) -> None:
    with pytest.raises((PipelineError, PeerFailure)) as error:
        layout.trainer(folder, max_epochs=1).fit(_AsksInStep(_ASKING[what]), loader(layout))
    assert isinstance(error.value, PeerFailure) or "Ask for it in a hook before the step" in str(
        error.value
    )


@pytest.mark.spread(1)
@pytest.mark.parametrize("what", _ASKING)
def test_what_ranks_exchange_is_not_asked_for_in_a_pipelined_step(
    what: str, tmp_path: Path
) -> None:
    """It would wait forever."""
    run(PP2, _asking, tmp_path, what)


@pytest.mark.parametrize("body", [_sampling, _sampling_afterwards])
def test_part_of_a_model_is_not_taken_for_the_whole(
    body: Callable[[Layout, str], None], tmp_path: Path
) -> None:
    run(PP2, body, tmp_path)


class _Exemplary(VectorModule):
    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.ones(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class _Computed(VectorModule):
    """Has a property without a setter."""

    @property
    def example_input_array(self) -> Tensor:  # type: ignore[override]
        return torch.ones(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def _summarised(layout: Layout, folder: str) -> list[Any]:
    return [_summary(layout, folder, kind) for kind in (_Exemplary, _Computed)]


def _summary(layout: Layout, folder: str, kind: type[VectorModule]) -> dict[str, Any]:
    module, logger = kind(), pl.loggers.TensorBoardLogger(folder, log_graph=True)
    chosen = layout.trainer(folder, max_epochs=1, enable_model_summary=True, logger=logger)
    chosen.fit(module, loader(layout))
    assert type(module) is kind
    return {"metrics": metrics_of(chosen), "example": module.example_input_array}


@pytest.mark.slow
@layouts(PP2, DP2)
def test_an_example_input_is_left_alone(layout: Layout, tmp_path: Path) -> None:
    for rank in run(layout, _summarised, tmp_path):
        assert_close(rank, single(_summarised))


class _Collects(VectorModule):
    """Collects in its steps what it puts together at the end of the epoch, as Lightning's guides
    show."""

    indices: ClassVar[list[int]] = []

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []
        self.answers: dict[str, list[Any]] = {}
        self._by_loader: list[list[Tensor]] = [[], []]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.losses.append(torch.zeros(()))  # on every stage
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("sum", torch.stack(self.losses).sum() / len(self.losses))
        self.losses.clear()

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        out = self.net(batch[0])
        self.answers.setdefault("out", []).append(out)
        self.answers.setdefault("text", []).extend(map(str, batch[1].tolist()))
        self._by_loader[dataloader_idx].append(out.sum())
        self.indices.append(batch_idx + dataloader_idx)

    def on_validation_epoch_end(self) -> None:
        self.log("out", torch.cat(self.answers.pop("out")).square().sum())
        self.log("index", sum(self.indices) / len(self.indices))
        self.indices.clear()
        self.log("ones", float(self.answers.pop("text").count("1")))
        self.log_dict(
            {
                f"loader_{index}": torch.stack(sums).sum()
                for index, sums in enumerate(self._by_loader)
            }
        )
        self._by_loader = [[], []]


def _collected(layout: Layout, folder: str) -> dict[str, float]:
    chosen = layout.trainer(folder, max_epochs=2)
    chosen.fit(
        _Collects(), loader(layout), [loader(layout, vectors(16, 1)), loader(layout, vectors(8, 2))]
    )
    return metrics_of(chosen)


@pytest.mark.slow
@layouts(PP2, MICRO)
def test_lists_that_steps_append_to(layout: Layout, tmp_path: Path) -> None:
    for rank in run(layout, _collected, tmp_path):
        assert_close(rank, single(_collected))
