"""Copies of batches on a stream of their own: what is copied, and in which order streams wait."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from megatron_lightning.step.loaders.transfer import BatchCopies


class _Stream:
    def __init__(self, name: str, events: list[Any]) -> None:
        self.name = name
        self._events = events

    def wait_stream(self, other: _Stream) -> None:
        self._events.append(f"{self.name} waits for {other.name}")


class _Streams:
    """Takes the place of the streams of ``torch.cuda``."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self._compute = _Stream("compute", self.events)

    def Stream(self, device: torch.device) -> _Stream:
        return _Stream("copies", self.events)

    def current_stream(self, device: torch.device) -> _Stream:
        return self._compute

    @contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        self.events.append(f"on {stream.name}")
        yield
        self.events.append(f"off {stream.name}")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> _Streams:
    """Streams for copies to a "GPU", which are copies to ``meta``."""
    made, to = _Streams(), Tensor.to

    def copied(tensor: Tensor, device: torch.device, *, non_blocking: bool = False) -> Tensor:
        assert device == torch.device("cuda", 0) and non_blocking
        made.events.append(f"copy {tensor.numel()}")
        return to(tensor, "meta")

    def used(tensor: Tensor, stream: _Stream) -> None:
        assert tensor.is_meta
        made.events.append(f"{tensor.numel()} is used by {stream.name}")

    for name in ("Stream", "stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(made, name))
    monkeypatch.setattr(Tensor, "to", copied)
    monkeypatch.setattr(Tensor, "record_stream", used)
    return made


class _Module(pl.LightningModule):
    trainer: Any = None


class _Own(_Module):
    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return batch


def test_the_computation_waits_for_the_copies_and_not_they_for_it(streams: _Streams) -> None:
    copies = BatchCopies(torch.device("cuda", 0))
    batch = {"tokens": torch.zeros(2), "more": [torch.zeros(3), "text"], "n": 4}
    found = copies.copy(batch, _Module())
    assert found["tokens"].is_meta and found["more"][0].is_meta
    assert found["more"][1] == "text" and found["n"] == 4
    assert batch["tokens"].device.type == "cpu"
    assert streams.events == [
        "on copies", "copy 2", "copy 3", "off copies", "compute waits for copies",
        "2 is used by compute", "3 is used by compute",
    ]  # fmt: skip


class _Batch:
    """A container that moves itself."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def test_what_others_move_is_left_to_them(streams: _Streams) -> None:
    copies, plain = BatchCopies(torch.device("cuda", 0)), torch.zeros(2)
    there, own = torch.zeros(2, device="meta"), _Batch(plain)
    sparse, part = torch.eye(2).to_sparse(), torch.nn.Parameter(torch.zeros(2))
    found = copies.copy([there, own, sparse, part], _Module())
    assert found[0] is there and found[1] is own and found[2] is sparse and found[3] is part
    assert not any("copy" in event for event in streams.events)
    assert copies.copy([plain], _Own())[0] is plain

    class Data(pl.LightningDataModule):
        def transfer_batch_to_device(self, *args: Any) -> Any:
            return args[0]

    class Trainer:
        datamodule = Data()

    module = _Module()
    module.trainer = Trainer()
    assert copies.copy([plain], module)[0] is plain


def test_a_cpu_has_no_streams() -> None:
    copies, batch = BatchCopies(torch.device("cpu")), [torch.zeros(2)]
    assert copies.stream is None and copies.copy(batch, _Module()) is batch
