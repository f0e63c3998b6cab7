"""The state of a Trainer: when it is restored, that it can be pickled and copied, and who writes
its checkpoints."""

from __future__ import annotations

import copy
import pickle
import warnings
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.plugins.io import AsyncCheckpointIO, CheckpointIO
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from megatron_lightning.errors import ConfigError
from megatron_lightning.models import GPTModel
from megatron_lightning.strategies.megatron import MegatronStrategy
from tests.helpers.layouts import fit, tiny_config
from tests.helpers.ranks import run_ranks
from tests.helpers.toy import SEQUENCE, VOCABULARY, ToyData, ToyModule, samples
from tests.helpers.trainers import trainer
from tests.lightning.support import PP2, SINGLE, History, Layout, Lines, assert_close, run


class _Remembering(pl.Callback):
    """Keeps what it had restored when fit started, and the keys of the checkpoint that hooks were
    shown."""

    def __init__(self, value: int = 0) -> None:
        self.value, self.at_fit_start = value, -1
        self.keys: list[str] = []

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict["value"]

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self.keys = sorted(checkpoint)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.at_fit_start = self.value


class _CountingIO(TorchCheckpointIO):
    """A user's own plugin: plain files, and what was asked of it."""

    def __init__(self) -> None:
        self.saved: list[dict[str, Any]] = []
        self.options: list[Any] = []
        self.loaded = 0

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        self.saved.append(checkpoint)
        self.options.append(storage_options)
        super().save_checkpoint(checkpoint, path)

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        self.loaded += 1
        return super().load_checkpoint(path, map_location, weights_only)


def _fit(steps: int, *, ckpt_path: Any = None, **options: Any) -> tuple[pl.Trainer, list[float]]:
    pl.seed_everything(3)
    run = fit({}, ToyModule(), ToyData(num_samples=32), steps=steps, ckpt_path=ckpt_path, **options)
    return run.trainer, run.losses


def _restored_before_fit_start(folder: str, options: dict[str, Any]) -> tuple[int, list[str]]:
    path = Path(folder) / "a.ckpt"
    for value, ckpt_path in ((7, None), (0, path)):
        callback = _Remembering(value)
        fitted = trainer(
            MegatronStrategy(**options),
            max_steps=2 if ckpt_path is None else 3,
            callbacks=[callback],
        )
        fitted.fit(ToyModule(), ToyData(num_samples=32), ckpt_path=ckpt_path)
        if ckpt_path is None:
            fitted.save_checkpoint(path)
    return callback.at_fit_start, callback.keys


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, {}),
        pytest.param(
            2,
            {"pipeline_model_parallel_size": 2, "micro_batch_size": 2},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_callbacks_are_restored_before_fit_starts(
    tmp_path: Path, ranks: int, options: dict[str, Any]
) -> None:
    """A Timer, for one, decides in on_fit_start whether its time is over."""
    results = run_ranks(ranks, _restored_before_fit_start, str(tmp_path), options)
    assert [restored for restored, _ in results] == [7] * ranks
    assert all("state_dict" in keys and "megatron_lightning" not in keys for _, keys in results)


def test_a_trainer_can_be_pickled_after_fit() -> None:
    fitted = trainer(MegatronStrategy(), max_steps=1)
    fitted.fit(BoringModel())
    assert pickle.loads(pickle.dumps(fitted)).global_step == 1


def test_a_checkpoint_can_be_saved_and_read_before_setup(tmp_path: Path) -> None:
    module, path = ToyModule(), tmp_path / "whole.ckpt"
    fresh = trainer(MegatronStrategy())
    fresh.strategy.connect(module)
    fresh.save_checkpoint(path, weights_only=True)
    loaded = trainer(MegatronStrategy()).strategy.load_checkpoint(path)
    assert all(
        torch.equal(loaded["state_dict"][name], tensor)
        for name, tensor in module.state_dict().items()
    )


def test_the_users_checkpoint_plugin_saves_and_resumes(tmp_path: Path) -> None:
    _, whole = _fit(4)
    plugin, path = _CountingIO(), tmp_path / "a.ckpt"
    stopped, first = _fit(2, plugins=[plugin])
    stopped.save_checkpoint(path, storage_options={"key": 1})
    assert path.is_file()
    assert plugin.options == [{"key": 1}]
    assert plugin.saved[0]["optimizer_states"][0]["state"]
    _, rest = _fit(4, plugins=[plugin], ckpt_path=path)
    assert plugin.loaded == 1
    assert first + rest == whole  # bit-equal


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("plugin", "is_file"),
    [
        (TorchCheckpointIO(), True),
        (AsyncCheckpointIO(TorchCheckpointIO()), True),
        (AsyncCheckpointIO(), False),
    ],
)
def test_lightnings_own_plugin_asks_for_plain_files(
    plugin: CheckpointIO, is_file: bool, tmp_path: Path
) -> None:
    path = tmp_path / "a.ckpt"
    stopped, _ = _fit(2, plugins=[plugin])
    stopped.save_checkpoint(path)
    stopped.strategy.teardown()  # what is written in the background
    assert isinstance(stopped.strategy.checkpoint_io, CheckpointIO)
    assert path.exists() and path.is_file() == is_file


def test_a_checkpoint_plugin_is_refused_on_several_ranks() -> None:
    with pytest.raises(ConfigError, match="2 ranks hold a part each"):
        pl.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=MegatronStrategy(),
            plugins=[_CountingIO()],
            logger=False,
        )


def test_storage_options_are_refused(tmp_path: Path) -> None:
    fitted, _ = _fit(1)
    with pytest.raises(ConfigError, match="storage_options"):
        fitted.save_checkpoint(tmp_path / "a.ckpt", storage_options={"key": 1})


def test_one_device_needs_no_rank_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Slurm environment that was given by hand, outside of a job, as on a single device."""
    for name in ("SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    fitted = trainer(
        MegatronStrategy(), max_steps=1, plugins=[SLURMEnvironment(auto_requeue=False)]
    )
    fitted.fit(BoringModel())
    assert fitted.global_rank == 0


def test_the_process_that_started_the_ranks_can_save_and_restore(tmp_path: Path) -> None:
    """The ranks are forked; this process was none of them."""
    fitted = trainer(MegatronStrategy(start_method="fork"), devices=2, max_steps=1)
    module = BoringModel()
    fitted.fit(module)
    fitted.save_checkpoint(tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)["state_dict"]
    assert torch.equal(saved["layer.weight"], module.layer.weight)
    fitted._checkpoint_connector.restore(tmp_path / "a.ckpt")


class _Language(pl.LightningModule):
    """A model that exists from the beginning, in the process that starts the ranks as well."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = {
            "hidden_size": 16,
            "num_attention_heads": 2,
            "ffn_hidden_size": 32,
            "vocab_size": VOCABULARY,
        }
        self.model = GPTModel(tiny_config(max_sequence_length=SEQUENCE, **sizes))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.model(batch["ids"], labels=batch["tgt"]).mean()
        self.log("loss", loss)
        return loss

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fitted(folder: Path, layout: dict[str, int] | None) -> dict[str, Any]:
    def strategy() -> MegatronStrategy | str:
        return "auto" if layout is None else MegatronStrategy(start_method="fork", **layout)

    devices = 1 if layout is None else 2
    fitted = trainer(
        strategy(), devices=devices, max_steps=2, default_root_dir=folder, enable_checkpointing=True
    )
    module, data = _Language(), ToyData(8, 16)
    fitted.fit(module, data)
    loss, best = float(fitted.callback_metrics["loss"]), fitted.checkpoint_callback.best_model_path
    return {
        "loss": loss,
        "best": (Path(best).name, Path(best).exists()),
        "state": dict(module.state_dict()),
        "finished": fitted.state.finished,
        # Ranks that get what came back.
        "tested": trainer(strategy(), devices=devices).test(module, data, verbose=False),
    }


@pytest.mark.spread(1)
@pytest.mark.parametrize("axis", ["pipeline", "tensor"])
def test_the_process_that_started_the_ranks_gets_all_weights(axis: str, tmp_path: Path) -> None:
    expected = _fitted(tmp_path / "plain", None)
    assert_close(_fitted(tmp_path / axis, {f"{axis}_model_parallel_size": 2}), expected)
    assert not [path for path in (tmp_path / axis).iterdir() if "weights" in path.name]


class _Batches(pl.Callback):
    """Sample ids of the training and validation batches."""

    def __init__(self) -> None:
        self.training: list[list[int]] = []
        self.validation: list[list[int]] = []

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.training.append(batch["id"].tolist())

    def on_validation_batch_start(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self.validation.append(batch["id"].tolist())


def _given_batch_sampler(strategy: bool) -> tuple[list[list[int]], list[list[int]]]:
    pl.seed_everything(3)
    seen = _Batches()
    dataset = [{**sample, "id": torch.tensor(i)} for i, sample in enumerate(samples(20, seed=1))]
    loaders = [
        DataLoader(
            dataset,
            batch_sampler=BatchSampler(
                RandomSampler(dataset, generator=_generator()), 4, drop_last=True
            ),
        )
        for _ in range(2)
    ]
    fitted = trainer(MegatronStrategy() if strategy else "auto", max_epochs=2, callbacks=[seen])
    fitted.fit(ToyModule(), *loaders)
    return seen.training, seen.validation


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def test_a_batch_sampler_of_the_users_own_keeps_its_batches() -> None:
    plain = run_ranks(1, _given_batch_sampler, False)[0]
    assert run_ranks(1, _given_batch_sampler, True)[0] == plain
    assert len(plain[0]) == 10
    assert {len(ids) for ids in plain[0]} == {4}
    shared = run_ranks(2, _given_batch_sampler, True)
    assert {len(ids) for training, _ in shared for ids in training} == {4}
    # Each replica takes every second sample of the user's order, so ten of them: two batches of
    # four an epoch.
    first = [
        sample
        for batch in zip(*(training[:2] for training, _ in shared), strict=True)
        for sample in _interleave(*batch)
    ]
    assert first == [sample for batch in plain[0][:5] for sample in batch][:16]


def _interleave(left: list[int], right: list[int]) -> list[int]:
    return [sample for pair in zip(left, right, strict=True) for sample in pair]


class _LogsEverywhere(pl.Callback):
    """Logs a value of its own in every hook in which Lightning allows it, by Lightning's defaults
    for that hook."""

    HOOKS = (
        "on_train_start",
        "on_train_epoch_start",
        "on_train_batch_start",
        "on_before_zero_grad",
        "on_before_backward",
        "on_after_backward",
        "on_before_optimizer_step",
        "on_train_batch_end",
        "on_train_epoch_end",
        "on_validation_start",
        "on_validation_epoch_start",
        "on_validation_batch_start",
        "on_validation_batch_end",
        "on_validation_epoch_end",
    )

    def __init__(self) -> None:
        self.count = 0
        for hook in self.HOOKS:
            setattr(self, hook, partial(self._log, hook))

    def _log(self, hook: str, trainer: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
        self.count += 1
        options = {"on_epoch": True} if hook == "on_train_start" else {}
        module.log(hook, float(self.count), batch_size=8, **options)


def _progress(trainer: pl.Trainer) -> dict[str, Any]:
    """The state of all loops, which counts every batch, step, epoch and scheduler call; without the
    loaders' own."""
    loops = {
        name: getattr(trainer, f"{name}_loop").state_dict()
        for name in ("fit", "validate", "test", "predict")
    }
    loops["fit"].pop("combined_loader", None)
    return loops


def _observed(layout: Layout, folder: str, resuming: bool) -> dict[str, Any]:
    logger, history = Lines(), History()
    callbacks: list[pl.Callback] = [_LogsEverywhere(), history]
    if not resuming:
        callbacks += [
            _StopsAt(7),
            # Behind each validation. Of a save before one, Lightning alone loses the validation.
            ModelCheckpoint(folder, "{step}", save_top_k=-1),
        ]
    options: dict[str, Any] = {
        "max_epochs": 3,
        "logger": logger,
        "log_every_n_steps": 2,
        "val_check_interval": 2,
    }
    fitted = layout.trainer(
        folder, callbacks=callbacks, enable_checkpointing=not resuming, **options
    )
    with nullcontext() if resuming else pytest.raises(KeyError, match="on purpose"):
        fitted.fit(
            ToyModule(),
            datamodule=layout.data_module(),
            ckpt_path=f"{folder}/step=4.ckpt" if resuming else None,
        )
    return {"lines": logger.lines, "history": history.seen, "progress": _progress(fitted)}


class _Copies(pl.Callback):
    """Copies the other callbacks and, by those that know it, the Trainer; and the module, as weight
    averaging does."""

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        copied = copy.deepcopy(trainer)
        assert copied.strategy is not trainer.strategy and copied.global_step == trainer.global_step
        assert copy.deepcopy(pl_module).state_dict().keys() == pl_module.state_dict().keys()


def _copied(layout: Layout, folder: str) -> int:
    fitted = layout.trainer(folder, max_epochs=1, callbacks=[_Copies()], gradient_clip_val=1.0)
    # Its other scheduler has a lambda.
    fitted.fit(ToyModule(plateau=True), datamodule=layout.data_module())
    return int(copy.deepcopy(fitted).global_step) + int(
        pickle.loads(pickle.dumps(fitted)).global_step
    )


@pytest.mark.slow
def test_a_trainer_can_be_copied_during_fit_and_pickled_after_it(tmp_path: Path) -> None:
    assert run(PP2, _copied, tmp_path) == [4 + 4] * 2


class _StopsAt(pl.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(
        self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self.step:
            raise KeyError("on purpose")


@pytest.mark.slow
def test_logs_of_every_hook_and_the_progress_of_every_loop(tmp_path: Path) -> None:
    """Of a run that fails in the middle of an epoch on all ranks, and of one that resumes from its
    checkpoint."""
    for resuming in (False, True):
        expected = run(SINGLE, _observed, tmp_path / "single", resuming)[0]
        assert len(expected["lines"]) > 5
        for index, rank in enumerate(run(PP2, _observed, tmp_path / "pp2", resuming)):
            assert_close(rank["lines"], expected["lines"] if index == 0 else [], where="lines")
            for key in ("history", "progress"):
                assert_close(rank[key], expected[key], where=key)


@pytest.mark.parametrize("saved_by", ["plain", "megatron"])
def test_data_that_comes_again_is_warned_of(saved_by: str, tmp_path: Path) -> None:
    """A checkpoint of plain Lightning from the middle of an epoch does not know the position in the
    data."""
    path = tmp_path / "a.ckpt"
    first = trainer(MegatronStrategy() if saved_by == "megatron" else "auto", max_steps=2)
    first.fit(ToyModule(), ToyData(num_samples=32))
    assert first.num_training_batches > 2
    first.save_checkpoint(path)
    with warnings.catch_warnings(record=True) as caught:
        rest = trainer(MegatronStrategy(), max_steps=3)
        warnings.simplefilter("always")
        rest.fit(ToyModule(), ToyData(num_samples=32), ckpt_path=path)
        # The next fit of the process hears what it has to.
        assert not any("resuming" in str(hidden[1]) for hidden in warnings.filters)
    assert any("You're resuming" in str(warning.message) for warning in caught) == (
        saved_by == "plain"
    )
