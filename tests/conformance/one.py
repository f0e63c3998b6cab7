"""Mode ``one``: a Trainer that would take Lightning's single-device strategy on the CPU takes
``MegatronStrategy()``.

Where a test counts the calls of ``Strategy.backward`` by a mock, those of
``MegatronStrategy.backward`` are counted.
"""

from __future__ import annotations

from typing import Any, NoReturn
from unittest import mock

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
    patch = mock.patch.object

    def patch_ours(target: Any, attribute: str, *args: Any, **kwargs: Any) -> Any:
        overridden = target is Strategy and attribute == "backward"
        return patch(MegatronStrategy if overridden else target, attribute, *args, **kwargs)

    mock.patch.object = patch_ours


def skip(*_: Any, **__: Any) -> NoReturn:
    """End a test whose Trainer starts processes of Lightning's own."""
    pytest.skip("several processes, by another strategy: see modes two and pipeline")
