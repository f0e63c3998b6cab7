"""Mode ``two``: where a Trainer would take Lightning's DDP on several CPU devices, it takes
MegatronStrategy with as many processes, started as the name of the strategy says, by ``fork`` or by
``spawn``.

Tests for GPUs run as well, on the CPU; those that never come by a DDP strategy are left out.
"""

from __future__ import annotations

import inspect
import re

import pytest
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
from lightning.pytorch.utilities import testing

from megatron_lightning.strategies import MegatronStrategy

# Lightning's "ddp" starts pytest itself once more for the second rank; a worker does as well for a
# test.
START_METHODS = {"ddp": "fork", "ddp_fork": "fork", "ddp_notebook": "fork", "ddp_spawn": "spawn"}
_SEVERAL = re.compile(r"ddp|devices\W{1,4}[2-9]|multi_gpu|distrib")


def names_several_devices(test: pytest.Item) -> bool:
    """Whether a test's source, name or parameters speak of more than one device."""
    parameters = getattr(getattr(test, "callspec", None), "params", "")
    return bool(_SEVERAL.search(f"{inspect.getsource(test.function)}{test.name}{parameters}"))  # type: ignore[attr-defined]


class _OfSeveral:
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        # What the names of strategies mean, which test_accelerator_connector.py asks, is what this
        # mode changes.
        several = [
            test
            for test in items
            if names_several_devices(test) and "test_accelerator_connector" not in test.nodeid
        ]
        config.hook.pytest_deselected(items=[test for test in items if test not in several])
        items[:] = several


def install(config: pytest.Config) -> None:
    """Change what the names of Lightning's DDP mean, with ``_find_unused_parameters_…`` and
    without."""
    config.pluginmanager.register(_OfSeveral(), "megatron-several")
    reasons = testing._runif_reasons
    testing._runif_reasons = (
        lambda *, standalone=False, min_cuda_gpus=0, bf16_cuda=False, **kwargs: reasons(**kwargs)
    )
    connect, init = _AcceleratorConnector.__init__, _AcceleratorConnector._init_strategy

    def connect_cpu(
        self: _AcceleratorConnector, devices: object = "auto", **kwargs: object
    ) -> None:
        if kwargs.get("accelerator") in ("gpu", "cuda"):
            kwargs["accelerator"] = "cpu"
            devices = (
                len(devices)
                if isinstance(devices, list)
                else 2
                if devices in (-1, "-1")
                else devices
            )
        connect(self, devices=devices, **kwargs)

    def init_megatron(self: _AcceleratorConnector) -> None:
        flag = self._strategy_flag
        name = (
            flag.partition("_find_unused")[0]
            if isinstance(flag, str)
            else "ddp"
            if type(flag) is DDPStrategy
            else ""
        )
        on_cpus = isinstance(self.accelerator, CPUAccelerator) and len(self._parallel_devices) > 1
        if name in START_METHODS and on_cpus:
            self._strategy_flag = MegatronStrategy(start_method=START_METHODS[name])
        init(self)

    _AcceleratorConnector.__init__, _AcceleratorConnector._init_strategy = (
        connect_cpu,
        init_megatron,
    )
