"""Mode ``pipeline``: two pytest processes run the same tests in step, as the two stages of a pipeline.

A Trainer of one CPU device becomes one of two, with pipeline_model_parallel_size=2; both processes are there already. They
share temporary folders, and wait for each other before every test. The ``BoringModel`` has a layer of two units.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
from torch import Tensor, nn

from megatron_lightning.strategies import MegatronStrategy

RANK, PORT, FOLDER = "CONFORMANCE_RANK", "CONFORMANCE_PORT", "CONFORMANCE_FOLDER"
_PATIENCE = timedelta(seconds=300)


class Layer(nn.Module):
    """The ``BoringModel``'s linear layer, and a second unit that hands its output on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 2), nn.Identity()

    def pipeline_units(self) -> list[str]:
        return ["first", "second"]

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) if self.first is not None else x
        return self.second(x) if self.second is not None else x


class InStep(ClusterEnvironment):
    """Two processes that the harness has started; environment variables, which tests clear, play no part."""

    def __init__(self, rank: int, port: int) -> None:
        self._rank, self._port = rank, port

    creates_processes_externally = True
    main_address = "127.0.0.1"

    @property
    def main_port(self) -> int:
        return self._port

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return 2

    def set_world_size(self, size: int) -> None:
        pass

    def global_rank(self) -> int:
        return self._rank

    def set_global_rank(self, rank: int) -> None:
        pass

    def local_rank(self) -> int:
        return self._rank

    def node_rank(self) -> int:
        return 0


class Together:
    """Keeps the two processes at the same test, in the same folder."""

    def __init__(self, rank: int, port: int, folder: Path) -> None:
        self._folder = folder
        self._store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, timeout=_PATIENCE)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._store.add(nodeid, 1)
        self._store.wait([nodeid])
        while self._store.add(nodeid, 0) < 2:
            pass

    @pytest.fixture
    def tmp_path(self, request: pytest.FixtureRequest) -> Iterator[Path]:
        folder = self._folder / hashlib.sha1(request.node.nodeid.encode()).hexdigest()[:16]
        folder.mkdir(parents=True, exist_ok=True)
        yield folder


def install(config: pytest.Config) -> None:
    """Make every Trainer of one CPU device a rank of two stages."""
    rank, port = int(os.environ.pop(RANK)), int(os.environ.pop(PORT))
    config.pluginmanager.register(Together(rank, port, Path(os.environ.pop(FOLDER))), "megatron-together")
    choose, build = _AcceleratorConnector._choose_strategy, BoringModel.__init__

    def choose_megatron(self: _AcceleratorConnector) -> Strategy | str:
        chosen = choose(self)
        if type(chosen) is not SingleDeviceStrategy or chosen.root_device.type != "cpu":
            return chosen
        self._parallel_devices = [torch.device("cpu")] * 2
        self.cluster_environment = InStep(rank, port + 1)
        return MegatronStrategy(pipeline_model_parallel_size=2)

    def build_in_units(self: BoringModel) -> None:
        build(self)
        self.layer = Layer()

    _AcceleratorConnector._choose_strategy, BoringModel.__init__ = choose_megatron, build_in_units
