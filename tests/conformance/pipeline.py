"""Mode ``pipeline``: every test runs in two processes in step, as the two stages of a pipeline.

A Trainer of one CPU device becomes one of two, with pipeline_model_parallel_size=2. The suite's
models get units: names, shapes and values of parameters stay what they are. A model that is one
linear layer multiplies on the first stage and adds its bias on the last one, a ``Sequential`` is
cut between its layers.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
from torch import Tensor, nn
from torchmetrics import Metric
from typing_extensions import override

from megatron_lightning.strategies import MegatronStrategy
from megatron_lightning.strategies.checks import preflight
from megatron_lightning.strategies.partitioned_module import PartitionedModule
from tests.conformance.in_step import InStep, run_in_step
from tests.conformance.two import names_several_devices


class Product(nn.Module):
    """First unit of a layer."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """Multiply by ``weight``."""
        return x @ weight.t()


class Sum(nn.Module):
    """Second unit of a layer."""

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """Add ``bias``."""
        return x + bias


class CutLinear(nn.Linear):
    """Two units without parameters: weight and bias are on both stages, under their names."""

    @classmethod
    def of(cls, layer: nn.Linear) -> None:
        """Cut ``layer``, which stays the object that it is."""
        layer.__class__ = cls
        layer.product, layer.sum = Product(), Sum()

    def pipeline_units(self) -> list[str]:
        """Return the ordered names of the units."""
        return ["product", "sum"]

    def forward(self, x: Tensor) -> Tensor:
        """Compute what a linear layer computes."""
        return self.sum(self.product(x, self.weight), self.bias)


class CutSequential(nn.Sequential):
    """A unit for each layer."""

    def pipeline_units(self) -> list[str]:
        """Return the ordered names of the units."""
        return list(self._modules)


def give_units(module: pl.LightningModule) -> None:
    """Make the one linear layer or sequence of ``module`` what a pipeline cuts, if nothing else
    is."""
    if any(hasattr(child, "pipeline_units") for child in module.modules()):
        return
    own = {
        name: child
        for name, child in module.named_children()
        if not isinstance(child, Metric | nn.modules.loss._Loss)
    }
    trained = [child for child in own.values() if any(True for _ in child.parameters())]
    if type(module).forward is BoringModel.forward:
        trained = [module.layer]  # whatever else there is
    if len(trained) == 1 and type(trained[0]) is nn.Linear and trained[0].bias is not None:
        CutLinear.of(trained[0])
    elif len(trained) == 1 and type(trained[0]) is nn.Sequential and len(trained[0]) > 1:
        trained[0].__class__ = CutSequential
    elif "layer_end" in own:
        _chain(module)


def _chain(module: pl.LightningModule) -> None:
    """Allow the suite's classification and regression models, which call their layers by name, to
    run without absent ones."""
    kind = type(module)
    whole = kind.forward

    def layers(self: Any) -> dict[str, nn.Module | None]:
        return {name: child for name, child in self._modules.items() if name.startswith("layer_")}

    def forward(self: Any, x: Tensor) -> Tensor:
        if None not in layers(self).values():
            return whole(self, x)
        for child in layers(self).values():
            x = x if child is None else child(x)
        return (
            torch.softmax(x, dim=1)
            if self.layer_end is not None and hasattr(self, "train_acc")
            else x
        )

    kind.forward, kind.pipeline_units = forward, lambda self: list(layers(self))


class StagedStrategy(MegatronStrategy):
    """Waits where tests look into a folder."""

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        """Come back on no rank before it is gone."""
        super().remove_checkpoint(filepath)
        self.barrier()


def give_units_first() -> None:
    """Give a module units before the checks at the start look for them, and before it is divided.

    Raises:
        AttributeError: If what is wrapped has another name: an override would be called no more.
    """
    check, assemble = preflight.check_before_launch, PartitionedModule.assemble_built

    def check_cut(options: Any, world_size: int, module: pl.LightningModule, *args: Any) -> None:
        give_units(module)
        check(options, world_size, module, *args)

    def assemble_cut(self: PartitionedModule) -> None:
        give_units(self._module)  # with the layers that configure_model has built
        assemble(self)

    preflight.check_before_launch = check_cut
    PartitionedModule.assemble_built = assemble_cut  # type: ignore[method-assign]


class _Ranks:
    """Runs the call of every test in two processes; tests of several devices are left out."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self.environment: InStep | None = None  # of this process, if it is a rank

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        config.hook.pytest_deselected(items=[test for test in items if names_several_devices(test)])
        items[:] = [test for test in items if not names_several_devices(test)]

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool:
        arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}

        def test(environment: InStep) -> None:
            self.environment = environment
            pyfuncitem.obj(**arguments)

        outcomes = run_in_step(2, test, self._limit_s)
        states = [outcome.state for outcome in outcomes]
        if "failed" in states or set(states) == {"followed"}:
            pytest.fail(
                "\n".join(
                    f"rank {rank} {state}: {text}" for rank, (state, text) in enumerate(outcomes)
                ),
                pytrace=False,
            )
        if "skipped" in states:
            pytest.skip(outcomes[states.index("skipped")].text)
        return True


def install(config: pytest.Config) -> None:
    """Make every Trainer of one CPU device a rank of two stages."""
    ranks = _Ranks(float(config.getoption("--timeout") or 60) / 2)
    config.pluginmanager.register(ranks, "megatron-in-step")
    give_units_first()
    choose = _AcceleratorConnector._choose_strategy

    def choose_megatron(self: _AcceleratorConnector) -> Strategy | str:
        chosen = choose(self)
        if type(chosen) is not SingleDeviceStrategy or chosen.root_device.type != "cpu":
            return chosen
        self._parallel_devices = [torch.device("cpu")] * 2
        self.cluster_environment = ranks.environment
        return StagedStrategy(pipeline_model_parallel_size=2)

    _AcceleratorConnector._choose_strategy = choose_megatron
