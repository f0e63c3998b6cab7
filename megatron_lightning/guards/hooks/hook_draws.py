"""Refuse hooks that draw random numbers for all parameters.

Random numbers drawn in a loop over ``parameters()`` belong to one device's tensors, and a rank has
shards of them, or other layers. Equal draws of a generator are found by no comparison of values:
noise added to shards, say. Draws are judged by the parameters that are filled in place, and by
shapes: as many tensors as there are parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from megatron_lightning.assembly.fsdp import is_sharded
from megatron_lightning.errors import ShardingError
from megatron_lightning.guards.guard import Fit, Guard
from megatron_lightning.step.run_context import RunContext

_DRAWS = frozenset((
    "normal_", "uniform_", "bernoulli_", "random_", "exponential_", "log_normal_", "cauchy_",
    "geometric_", "randn", "rand", "randint", "normal", "bernoulli", "randn_like", "rand_like",
    "randint_like", "kaiming_uniform_", "kaiming_normal_",
))  # fmt: skip
_NUM_WATCHED = 2  # calls of a hook with a watch on random numbers
_MIN_TENSORS = 2  # drawn in a loop over parameters


class HookDraws(Guard):
    """Watch random numbers drawn by hooks, in the first calls of every hook."""

    sentence = (
        "a hook draws random numbers for all parameters of a rank, of which every rank has others: "
        "each rank draws the same numbers for other values of the model"
    )

    @classmethod
    def applies(cls, scope: RunContext, fit: Fit | None) -> bool:
        """Return whether a rank has a part of the model."""
        return scope.context.layout.replica_size > 1 or is_sharded(scope.module)

    @contextmanager
    def user_code(self, where: str, number: int) -> Iterator[None]:
        """Watch a call of a hook.

        Raises:
            ShardingError: After the hook.
        """
        if number > _NUM_WATCHED:
            yield
            return
        parameters = dict(self.scope.module.named_parameters())
        sharded = {name for name in parameters if self._is_shard(name, parameters[name])}
        if self.scope.context.pp.size == 1 and not sharded:
            yield
            return
        names = {_address(parameter): name for name, parameter in parameters.items()}
        with _DrawWatch() as draws:
            yield
        # Two traces of a draw: parameters filled in place, by address, and tensors drawn in
        # parameters' shapes, to be added.
        filled = {names[address] for address in draws.filled if address in names}
        shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        shapes_left = list(draws.shapes)
        drawn = {name for name, shape in shapes.items() if _take(shape, shapes_left)}
        # A few equal shapes may be chance (a mask of a batch). Addresses are no chance.
        if len(drawn) < max(_MIN_TENSORS, len(shapes)):
            drawn = filled if self._fills_layers(filled) else filled & sharded
        if not drawn:
            return
        part = f"shards, as of {min(sharded & drawn)}" if sharded & drawn else "layers of a stage"
        self.judge.refuse(
            ShardingError(
                f"{where} draws random numbers for {len(drawn)} of the {len(shapes)} parameters "
                f"that this rank has, and the rank has {part}. Every rank draws the same numbers "
                "for other values of the model. Initialize weights in __init__ or configure_model, "
                "where they are full. For noise, draw tensors of the full shapes on all ranks, "
                "from strategy.full_tensors(), and write the sums with load_state_dict of the "
                "LightningModule."
            )
        )

    def _is_shard(self, name: str, parameter: Tensor) -> bool:
        """Return whether this rank has only a shard of a parameter."""
        if isinstance(parameter, DTensor):
            return parameter.device_mesh.size() > 1
        specs = self.scope.part.specs
        return name in specs and bool(specs[name].sharded_over)

    def _fills_layers(self, names: Collection[str]) -> bool:
        """Return whether a hook fills matrices of every pipeline unit of this rank, and of at least
        two units, as a loop over layers does. Draws for a single head are right on the head's
        stage.
        """
        part = self.scope.part
        units = {
            unit
            for unit in part.stage_of_unit
            for name, parameter in self.scope.module.named_parameters()
            if parameter.ndim > 1 and name.startswith(f"{unit}.") and part.in_unit(name)
        }
        with_draws = {unit for unit in units if any(n.startswith(f"{unit}.") for n in names)}
        return with_draws == units and len(units) >= _MIN_TENSORS


def _address(tensor: Tensor) -> int:
    """Return the address of a tensor's values on this rank. ``p.data`` has the address of ``p``."""
    local_tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local_tensor.data_ptr()


def _take(shape: tuple[int, ...], shapes: list[tuple[int, ...]]) -> bool:
    """Remove ``shape`` from ``shapes``. Return whether ``shape`` was there."""
    if shape not in shapes:
        return False
    shapes.remove(shape)
    return True


class _DrawWatch(TorchFunctionMode):
    """Notes shapes and addresses of tensors that the user's code fills with random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []
        self.filled: set[int] = set()

    def __torch_function__(
        self, func: Any, types: Sequence[Any], args: Any = (), kwargs: Any = None
    ) -> Any:  # called by torch
        """Call a function."""
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in _DRAWS and isinstance(result, Tensor):
            self.shapes.append(tuple(result.shape))
            if name.endswith("_"):
                self.filled.add(_address(result))
        return result
