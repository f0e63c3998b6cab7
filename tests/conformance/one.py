"""Mode ``one``: a Trainer that would take Lightning's single-device strategy on the CPU takes ``MegatronStrategy()``."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

from megatron_lightning.strategies import MegatronStrategy


def install(config: pytest.Config) -> None:
    """Change the choice that the Trainer leaves to itself; a strategy that a test names stays."""
    choose = _AcceleratorConnector._choose_strategy

    def choose_megatron(self: _AcceleratorConnector) -> Strategy | str:
        chosen = choose(self)
        on_cpu = type(chosen) is SingleDeviceStrategy and chosen.root_device.type == "cpu"
        return MegatronStrategy() if on_cpu else chosen

    _AcceleratorConnector._choose_strategy = choose_megatron
    _MultiProcessingLauncher.launch = skip  # it takes long, and nothing of ours runs there


def skip(*_: Any, **__: Any) -> NoReturn:
    """End a test whose Trainer starts processes of Lightning's own."""
    pytest.skip("several processes, by another strategy: see modes two and pipeline")
