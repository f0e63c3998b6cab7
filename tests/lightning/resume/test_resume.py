"""Stopping and going on: bit-equal to never having stopped, the same samples in the same order,
with any number of replicas."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from megatron_lightning.errors import CheckpointError
from tests.helpers.ranks import run_ranks
from tests.helpers.toy import ToyData, ToyModule, samples
from tests.helpers.trainers import Losses
from tests.lightning.support import (
    DDP2,
    DP2,
    DP4,
    MICRO,
    ONE,
    PP2,
    PP2_DP2,
    SINGLE,
    Layout,
    assert_close,
    layouts,
    make_layout,
    run,
    single,
)

STEPS_PER_EPOCH = 5


class _Seen(pl.Callback):
    """Sample ids of every training batch on this rank."""

    def __init__(self) -> None:
        self.ids: list[list[int]] = []

    def on_train_batch_start(
        self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.ids.append(batch["id"].tolist())


class _Dropping(ToyModule):
    """Dropout inside the layers and a random mask before them: both continue their random
    numbers."""

    def __init__(self) -> None:
        super().__init__(mask=True)

    def configure_model(self) -> None:
        super().configure_model()
        for module in self.model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.1


class _Data(ToyData):
    def _loader(self, num: int, seed: int, **options: Any) -> DataLoader[Any]:
        numbered = [{**sample, "id": index} for index, sample in enumerate(samples(num, seed))]
        return DataLoader(
            numbered, batch_size=self.hparams.batch_size, drop_last=seed == 1, **options
        )


def _data(layout: Layout, shuffle: bool, num_workers: int = 0, num_samples: int = 40) -> _Data:
    return _Data(8 // layout.data, num_samples, shuffle, num_workers)


def _stopped(
    layout: Layout, folder: str, shuffle: bool, num_workers: int, stop: int
) -> dict[str, Any]:
    """Train twice: in one go (saving on the way), and from the checkpoint of step ``stop`` on."""
    whole, seen = Losses(), _Seen()
    # After an epoch's last step Lightning saves before validation and does not validate when it
    # resumes; what validation draws would be missing. So the epoch's end is saved as
    # ModelCheckpoint does it by default: after validation.
    often = {"every_n_epochs": 1} if stop == STEPS_PER_EPOCH else {"every_n_train_steps": stop}
    keep = ModelCheckpoint(folder, "{step}", save_top_k=-1, **often)
    options: dict[str, Any] = {
        "max_epochs": 2,
        "enable_checkpointing": True,
        "gradient_clip_val": 0.5,
    }
    pl.seed_everything(7, verbose=False)
    module = _Dropping()
    layout.trainer(folder, callbacks=[whole, seen, keep], **options).fit(
        module, datamodule=_data(layout, shuffle, num_workers)
    )
    # A new process starts elsewhere; the checkpoint must know better.
    pl.seed_everything(8, verbose=False)
    record, seen_again, again = Losses(), _Seen(), _Dropping()
    trainer = layout.trainer(folder, callbacks=[record, seen_again], **options)
    trainer.fit(
        again,
        datamodule=_data(layout, shuffle, num_workers),
        ckpt_path=f"{folder}/step={stop}.ckpt",
    )
    same = all(
        torch.equal(a, b) for a, b in zip(module.parameters(), again.parameters(), strict=True)
    )
    return {
        "whole": (whole.losses[stop:], whole.norms[stop:], seen.ids[stop:]),
        "resumed": (record.losses, record.norms, seen_again.ids),
        "same": same,
        "consumed": trainer.strategy.consumed_samples,
        "steps": trainer.global_step,
    }


# (shuffle, workers, step of the checkpoint: 3 lies inside the first of the epochs of 5 steps, 5 at
# its end, 7 in the second)
STOPS = [(True, 0, 3), (True, 0, 7), (False, 0, 5)]
ALL_STOPS = [
    (shuffle, workers, stop)
    for shuffle in (True, False)
    for workers in (0, 2)
    for stop in (3, 5, 7)
]


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("layout", "shuffle", "num_workers", "stop"),
    [
        pytest.param(layout, *case, id=f"{layout.name}-{case}")
        for layout, case in zip((PP2, DP2, PP2_DP2), STOPS, strict=True)
    ]
    + [
        pytest.param(layout, *case, id=f"{layout.name}-{case}", marks=pytest.mark.slow)
        for layout in (ONE, MICRO, PP2, DP2, DDP2, PP2_DP2)
        for case in ALL_STOPS
        if (layout, case) not in list(zip((PP2, DP2, PP2_DP2), STOPS, strict=True))
    ],
)
def test_resume_is_bit_equal(
    layout: Layout, shuffle: bool, num_workers: int, stop: int, tmp_path: Path
) -> None:
    for rank in run(layout, _stopped, tmp_path, shuffle, num_workers, stop):
        assert rank["resumed"] == rank["whole"]
        assert rank["same"]
        assert (rank["steps"], rank["consumed"]) == (10, 80)


def _first_part(layout: Layout, folder: str, shuffle: bool) -> Any:
    seen = _Seen()
    pl.seed_everything(7, verbose=False)
    keep = ModelCheckpoint(folder, "first", every_n_train_steps=3)
    trainer = layout.trainer(folder, max_steps=3, callbacks=[seen, keep], enable_checkpointing=True)
    trainer.fit(ToyModule(), datamodule=_data(layout, shuffle))
    return seen.ids


def _second_part(layout: Layout, folder: str, shuffle: bool) -> Any:
    seen, record = _Seen(), Losses()
    pl.seed_everything(8, verbose=False)
    trainer = layout.trainer(folder, max_epochs=2, callbacks=[seen, record])
    trainer.fit(ToyModule(), datamodule=_data(layout, shuffle), ckpt_path=f"{folder}/first.ckpt")
    return seen.ids, record.norms, trainer.strategy.consumed_samples


def _whole(layout: Layout, folder: str, shuffle: bool) -> Any:
    seen, record = _Seen(), Losses()
    pl.seed_everything(7, verbose=False)
    layout.trainer(folder, max_epochs=2, callbacks=[seen, record]).fit(
        ToyModule(), datamodule=_data(layout, shuffle)
    )
    return seen.ids, record.norms


def _global(ranks: list[list[list[int]]]) -> list[set[int]]:
    """Return the samples of each global batch."""
    return [
        {sample for batch in batches for sample in batch} for batches in zip(*ranks, strict=True)
    ]


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("before", "after", "shuffle"),
    [
        pytest.param(DP2, ONE, True, id="2-to-1"),
        pytest.param(PP2, DP2, True, id="pp2-to-dp2"),
        pytest.param(ONE, DP4, False, id="1-to-4", marks=pytest.mark.slow),
        pytest.param(DP4, DP2, True, id="4-to-2", marks=pytest.mark.slow),
        pytest.param(PP2_DP2, DP4, True, id="pp2-dp2-to-dp4", marks=pytest.mark.slow),
        pytest.param(DP2, PP2_DP2, True, id="2-to-pp2-dp2", marks=pytest.mark.slow),
        pytest.param(DDP2, DP4, False, id="ddp-to-zero1", marks=pytest.mark.slow),
    ],
)
def test_another_number_of_replicas_resumes_with_the_same_samples(
    before: Layout, after: Layout, shuffle: bool, tmp_path: Path
) -> None:
    """No sample twice, none lost; the optimizer's state moves to the other layout as well (gradient
    norms agree)."""
    expected_ids, expected_norms = run(ONE, _whole, tmp_path / "whole", shuffle)[0]
    first = _global(run(before, _first_part, tmp_path, shuffle))
    second = run(after, _second_part, tmp_path, shuffle)
    assert first + _global([rank[0] for rank in second]) == _global([expected_ids])
    for _, norms, consumed in second:
        assert_close(norms, expected_norms[3:])
        assert consumed == 80


class _Stream(IterableDataset[dict[str, Any]]):
    """An endless stream that shards itself, as streaming libraries do."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for index, sample in enumerate(samples(64, 1)):
            if index % self.size == self.rank:
                yield {**sample, "id": index}


class _StatefulLoader:
    """Like torchdata's StatefulDataLoader: its position is in its state, which differs between
    data-parallel ranks."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.position = rank, size, 0
        self.items = list(_Stream(rank, size))
        self.per_batch = 8 // size

    def __len__(self) -> int:
        return len(self.items) // self.per_batch

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while self.position < len(self):
            self.position += 1
            yield torch.utils.data.default_collate(
                self.items[(self.position - 1) * self.per_batch :][: self.per_batch]
            )
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "rank": self.rank}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["rank"] != self.rank:
            raise ValueError(f"rank {self.rank} got the state of rank {state['rank']}")
        self.position = state["position"]


class _EqualStates(_StatefulLoader):
    """The state is the position in the data, equal on all ranks."""

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "draws": torch.tensor([self.position])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = int(state["draws"])


class _Unsized(_StatefulLoader):
    """Lightning reads a batch ahead, as nobody knows which is the last."""

    def __len__(self) -> int:
        raise TypeError("an endless stream")

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while (begin := self.position * self.per_batch) < len(self.items):
            self.position += 1
            yield torch.utils.data.default_collate(self.items[begin:][: self.per_batch])
        self.position = 0


class _Live(_Unsized):
    """Returns the dict in which it counts."""

    def __init__(self, rank: int, num_replicas: int) -> None:
        self.live = {"rank": rank, "position": 0}
        super().__init__(rank, num_replicas)

    @property
    def position(self) -> int:
        return self.live["position"]

    @position.setter
    def position(self, value: int) -> None:
        self.live["position"] = value

    def state_dict(self) -> dict[str, Any]:
        return self.live


@dataclass
class _RankState:
    rank: int
    positions: list[Any]


class _Workers(dict):  # type: ignore[type-arg]
    """Like a state of Energon's workers: a dict of another class."""


class _EnergonLoader(_Unsized):
    """Energon's protocol: a state of objects, saved and restored by each rank."""

    state_dict = load_state_dict = None  # type: ignore[assignment]

    def save_state_rank(self) -> _RankState:
        workers = _Workers(position=self.position, seeds=np.arange(3))
        return _RankState(self.rank, [workers, (self.position,)])

    def restore_state_rank(self, state: _RankState) -> None:
        assert isinstance(state, _RankState) and isinstance(state.positions[0], _Workers)
        assert isinstance(state.positions[0]["seeds"], np.ndarray)
        super().load_state_dict({"position": state.positions[1][0], "rank": state.rank})


class _StreamData(pl.LightningDataModule):
    def __init__(self, stateful: Any) -> None:
        super().__init__()
        self.stateful = stateful

    def train_dataloader(self) -> Any:
        share = self.trainer.strategy.distributed_sampler_kwargs
        if self.stateful:
            kind = _StatefulLoader if self.stateful is True else self.stateful
            return kind(share["rank"], share["num_replicas"])
        return DataLoader(
            _Stream(share["rank"], share["num_replicas"]), batch_size=8 // share["num_replicas"]
        )


def _streamed(layout: Layout, folder: str, stateful: Any, part: str) -> Any:
    record, seen = Losses(), _Seen()
    keep = ModelCheckpoint(folder, "{step}", every_n_train_steps=3, save_top_k=-1)
    trainer = layout.trainer(
        folder, max_epochs=1, callbacks=[record, seen, keep], enable_checkpointing=True
    )
    path = None if part == "whole" else f"{folder}/step=3.ckpt"
    trainer.fit(ToyModule(), datamodule=_StreamData(stateful), ckpt_path=path)
    return record.losses, seen.ids


@pytest.mark.slow
@layouts(DP2, PP2_DP2, PP2, MICRO)
def test_stateful_loaders_keep_a_state_for_each_replica(layout: Layout, tmp_path: Path) -> None:
    whole = run(layout, _streamed, tmp_path, True, "whole")
    assert len(whole[0][1]) == 8
    for rank, resumed in enumerate(run(layout, _streamed, tmp_path, True, "resumed")):
        assert resumed == (whole[rank][0][3:], whole[rank][1][3:])


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param(_EnergonLoader, DP2, marks=pytest.mark.slow),
        pytest.param(_EnergonLoader, PP2_DP2, marks=pytest.mark.slow),
        pytest.param(_EnergonLoader, ONE, marks=pytest.mark.slow),
        pytest.param(_Unsized, DP2, marks=pytest.mark.slow),
        (_Live, ONE),
    ],
)
def test_states_by_rank_and_loaders_without_a_length(
    kind: Any, layout: Layout, tmp_path: Path
) -> None:
    """No batch is lost between the batch in the step and the batch read ahead."""
    whole = run(layout, _streamed, tmp_path, kind, "whole")
    for rank, resumed in enumerate(run(layout, _streamed, tmp_path, kind, "resumed")):
        assert resumed == (whole[rank][0][3:], whole[rank][1][3:])


@pytest.mark.slow
def test_equal_states_load_on_any_number_of_replicas(tmp_path: Path) -> None:
    whole = _global([ids for _, ids in run(DP2, _streamed, tmp_path, _EqualStates, "whole")])
    resumed = _global([ids for _, ids in run(ONE, _streamed, tmp_path, _EqualStates, "resumed")])
    assert resumed == whole[3:]


def _wrong_number(layout: Layout, folder: str) -> None:
    with pytest.raises(
        CheckpointError, match="data loaders of 2 data-parallel ranks, and there are 1"
    ):
        _streamed(layout, folder, True, "resumed")


def test_stateful_loaders_refuse_another_number_of_replicas(tmp_path: Path) -> None:
    run(DP2, _streamed, tmp_path, True, "whole")
    run(ONE, _wrong_number, tmp_path)


@pytest.mark.slow
@layouts(PP2, PP2_DP2, DP2)
def test_iterable_datasets_train_as_on_one_device(layout: Layout, tmp_path: Path) -> None:
    expected = single(_iterable)
    for rank in run(layout, _iterable, tmp_path):
        assert_close(rank["norms"], expected["norms"])
        assert_close(rank["consumed"], expected["consumed"])


def _iterable(layout: Layout, folder: str) -> dict[str, Any]:
    record = Losses()
    trainer = layout.trainer(folder, max_epochs=1, callbacks=[record])
    module = ToyModule()
    if layout.options is None:  # Lightning's own strategies know no share
        trainer.fit(module, DataLoader(_Stream(0, 1), batch_size=8))
        return {"norms": record.norms, "consumed": 64}
    trainer.fit(module, datamodule=_StreamData(stateful=False))
    return {"norms": record.norms, "consumed": trainer.strategy.consumed_samples}


def _plain_first(layout: Layout, folder: str) -> Any:
    keep = ModelCheckpoint(folder, "plain", every_n_epochs=1)
    trainer = layout.trainer(folder, max_epochs=1, callbacks=[keep], enable_checkpointing=True)
    trainer.fit(ToyModule(), datamodule=_data(layout, False))


def _plain_second(layout: Layout, folder: str) -> Any:
    record = Losses()
    trainer = layout.trainer(folder, max_epochs=2, callbacks=[record])
    trainer.fit(ToyModule(), datamodule=_data(layout, False), ckpt_path=f"{folder}/plain.ckpt")
    return record.norms


@layouts(PP2, slow=[DP2, PP2_DP2])
def test_a_plain_lightning_checkpoint_resumes(layout: Layout, tmp_path: Path) -> None:
    """Weights, optimizer and progress."""
    run(SINGLE, _plain_first, tmp_path)
    assert (tmp_path / "plain.ckpt").is_file()
    expected = run(SINGLE, _plain_second, tmp_path)[0]
    for norms in run(layout, _plain_second, tmp_path):
        assert_close(norms, expected)


def _fault(folder: str) -> None:
    with pytest.raises(CheckpointError, match=r"missing\.ckpt"):
        trainer = PP2.trainer(folder, max_epochs=1)
        trainer.fit(ToyModule(), datamodule=_data(PP2, False), ckpt_path=f"{folder}/missing.ckpt")


@pytest.mark.slow
def test_a_missing_checkpoint_is_named(tmp_path: Path) -> None:
    run_ranks(2, _fault, str(tmp_path))


class _Searching(ToyModule):
    """LBFGS keeps numbers, lists of tensors and tensors over all parameters in the state of its
    first parameter."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(
            self.parameters(), lr=0.1, max_iter=3, history_size=4, line_search_fn="strong_wolfe"
        )


class _Counting(torch.optim.SGD):
    """Keeps Python numbers, whose last digit matters, instead of tensors."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["steps"] = state.get("steps", 0) + 1
                state["scale"] = state.get("scale", 1.0) * (1 + 1e-12)
                parameter.data.mul_(state["scale"] - 1e-3 * state["steps"])
        return loss


class _WithNumbers(ToyModule):
    def configure_optimizers(self) -> Any:
        return _Counting(self.parameters(), lr=0.01, momentum=0.9)


def _unusual_states(layout: Layout, folder: str, kind: type[ToyModule]) -> Any:
    keep = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=1)
    whole, module = Losses(), kind()
    pl.seed_everything(7, verbose=False)
    data = _data(layout, False)
    layout.trainer(folder, max_epochs=1, callbacks=[whole, keep], enable_checkpointing=True).fit(
        module, datamodule=data
    )
    steps = sorted(
        int(path.stem.removeprefix("step=")) for path in Path(folder).glob("step=*.ckpt")
    )
    stop = steps[1]
    again, record = kind(), Losses()
    fit = layout.trainer(folder, max_epochs=1, callbacks=[record])
    fit.fit(again, datamodule=_data(layout, False), ckpt_path=f"{folder}/step={stop}.ckpt")
    same = all(
        torch.equal(a, b) for a, b in zip(module.parameters(), again.parameters(), strict=True)
    )
    return record.losses == whole.losses[2:], same


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        pytest.param(ONE, _Searching, id="lbfgs"),
        pytest.param(PP2, _WithNumbers, id="numbers", marks=pytest.mark.slow),
    ]
    + [
        pytest.param(layout, _WithNumbers, id=layout.name, marks=pytest.mark.slow)
        for layout in (ONE, DDP2, PP2_DP2)
    ],
)
def test_states_that_are_no_tensors_resume_bit_equal(
    layout: Layout, kind: type[ToyModule], tmp_path: Path
) -> None:
    assert run(layout, _unusual_states, tmp_path, kind) == [(True, True)] * layout.ranks


class _OneMore(ToyModule):
    def configure_model(self) -> None:
        super().configure_model()
        self.more = torch.nn.Linear(2, 2)


def _renamed(layout: Layout, folder: str) -> list[str]:
    keep = ModelCheckpoint(folder, "a", every_n_train_steps=1)
    layout.trainer(folder, max_steps=1, callbacks=[keep], enable_checkpointing=True).fit(
        ToyModule(), datamodule=_data(layout, False)
    )
    for module in (ToyModule(num_layers=3), _OneMore()):
        module.strict_loading = False  # the weights: what there is
        layout.trainer(folder).validate(
            module, datamodule=_data(layout, False), ckpt_path=f"{folder}/a.ckpt", verbose=False
        )
    with pytest.raises(CheckpointError) as error:
        layout.trainer(folder, max_steps=2).fit(
            module, datamodule=_data(layout, False), ckpt_path=f"{folder}/a.ckpt"
        )
    return [str(error.value)]


def test_no_parameter_silently_begins_anew(tmp_path: Path) -> None:
    for (text,) in run(DP2, _renamed, tmp_path):
        assert (
            "AdamW has parameters of which the checkpoint's optimizer knows nothing: more.weight, "
            "more.bias" in text
        )


class _Numbered(torch.nn.Module):
    """Its state is no tensor, and the first of the module's."""

    def get_extra_state(self) -> dict[str, int]:
        return {"number": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"number": 1}


class _WithStatistics(ToyModule):
    """Keeps a dict of tensors in checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self._modules = {"numbered": _Numbered(), **self._modules}
        self.loaded: dict[str, Tensor] = {}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["statistics"] = {"mean": torch.arange(3.0), "count": torch.tensor(4)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded = checkpoint["statistics"]


def _with_statistics(layout: Layout, folder: str) -> Any:
    keep, module = ModelCheckpoint(folder, "a", every_n_train_steps=1), _WithStatistics()
    fit = layout.trainer(folder, max_steps=1, callbacks=[keep], enable_checkpointing=True)
    fit.fit(_WithStatistics(), datamodule=_data(layout, False))
    layout.trainer(folder, max_steps=2).fit(
        module, datamodule=_data(layout, False), ckpt_path=f"{folder}/a.ckpt"
    )
    return {name: (type(value), value.tolist()) for name, value in module.loaded.items()}


@layouts(ONE, slow=[make_layout("fsdp2", 2, 2, data_parallel="fsdp")])
def test_a_dict_of_tensors_of_the_modules_own_comes_back(layout: Layout, tmp_path: Path) -> None:
    for loaded in run(layout, _with_statistics, tmp_path):
        assert loaded == {"mean": (Tensor, [0.0, 1.0, 2.0]), "count": (Tensor, 4)}
