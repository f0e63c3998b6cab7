"""Mode ``two``: a Trainer that would take Lightning's DDP on CPUs takes MegatronStrategy with as many processes."""

from __future__ import annotations

import pytest
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

from megatron_lightning.strategies import MegatronStrategy

# Lightning's "ddp" starts pytest itself once more for the second rank; a worker does as well for a test.
START_METHODS = {"ddp": "fork", "ddp_fork": "fork", "ddp_notebook": "fork", "ddp_spawn": "spawn"}


def install(config: pytest.Config) -> None:
    """Change what the names of Lightning's DDP stand for, with ``_find_unused_parameters_…`` and without."""
    init = _AcceleratorConnector._init_strategy

    def init_megatron(self: _AcceleratorConnector) -> None:
        flag = self._strategy_flag
        name = flag.partition("_find_unused")[0] if isinstance(flag, str) else ""
        if name in START_METHODS and isinstance(self.accelerator, CPUAccelerator):
            self._strategy_flag = MegatronStrategy(start_method=START_METHODS[name], data_parallel="ddp")
        init(self)

    _AcceleratorConnector._init_strategy = init_megatron
