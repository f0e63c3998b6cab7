"""Watch of the user's hooks outside of steps, on the module and on callbacks.

In a hook, a sum or gather over all ranks counts the values of a replica once for every rank of the
replica. Random numbers drawn in a loop over ``parameters()`` belong to one device's tensors, and a
rank has shards of them, or other layers. Equal draws of a generator are found by no comparison of
values: noise added to shards, say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from megatron_lightning.errors import ShardingError
from megatron_lightning.strategies.step.checks.world_guard import WorldGuard
from megatron_lightning.strategies.step.overrides import override, users_methods
from megatron_lightning.strategies.step.participant import StepParticipant
from megatron_lightning.strategies.step.run_context import RunContext

_LOOPS = ("train", "validation", "test", "predict")
_HOOKS = (
    "on_fit_start", "on_fit_end", "on_sanity_check_start", "on_sanity_check_end",
    *(f"on_{loop}_{event}" for loop in _LOOPS for event in ("start", "end")),
    *(f"on_{loop}_epoch_{event}" for loop in _LOOPS for event in ("start", "end")),
    *(f"on_{loop}_batch_{event}" for loop in _LOOPS for event in ("start", "end")),
    "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad",
)  # fmt: skip
_DRAWS = frozenset((
    "normal_", "uniform_", "bernoulli_", "random_", "exponential_", "log_normal_", "cauchy_",
    "geometric_", "randn", "rand", "randint", "normal", "bernoulli", "randn_like", "rand_like",
    "randint_like",
))  # fmt: skip
_NUM_WATCHED = 2  # calls of a hook with a watch on random numbers
_MIN_TENSORS = 2  # drawn in a loop over parameters


class UserHooks(StepParticipant):
    """Watches the hooks of a run.

    Args:
        scope: The run context.
        guard: Watches the default process group.
    """

    def __init__(self, scope: RunContext, guard: WorldGuard) -> None:
        self._scope = scope
        self._guard = guard
        self._num_calls: dict[tuple[int, str], int] = {}
        for name in _HOOKS:
            for owner, _ in users_methods(scope.module, name):
                override(owner, name, self._watched(owner, name), scope.undo)

    def _watched(self, owner: object, name: str) -> Callable[..., Any]:
        where, key = f"{name} of {type(owner).__name__}", (id(owner), name)

        def hook(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            number = self._num_calls[key] = self._num_calls.get(key, 0) + 1
            with self._guard.watching_hook(where):
                if number > _NUM_WATCHED:
                    return original(*args, **kwargs)
                with self._watching_draws(where):
                    return original(*args, **kwargs)

        return hook

    @contextmanager
    def _watching_draws(self, where: str) -> Iterator[None]:
        """Refuse random numbers for all parameters.

        Raises:
            ShardingError: After the hook.
        """
        scope = self._scope
        parameters = dict(scope.module.named_parameters())
        shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        sharded = {
            name
            for name in parameters
            if name in scope.part.specs and scope.part.specs[name].sharded_over
        }
        if scope.context.pp.size == 1 and not sharded:
            yield
            return
        with _DrawWatch() as draws:
            yield
        left = list(draws.shapes)
        drawn = [name for name, shape in shapes.items() if _take(shape, left)]
        if len(drawn) < max(_MIN_TENSORS, len(shapes)):
            return
        part = f"shards, as of {min(sharded)}" if sharded else "a part of the layers"
        raise ShardingError(
            f"{where} draws random numbers of the shapes of all {len(drawn)} parameters that this "
            f"rank has, which are {part}. Every rank draws the same numbers for other values of "
            "the model. Initialize weights in __init__ or configure_model, where they are full. "
            "For noise, draw tensors of the full shapes on all ranks, from "
            "strategy.full_tensors(), and write the sums with load_state_dict of the "
            "LightningModule."
        )


def _take(shape: tuple[int, ...], shapes: list[tuple[int, ...]]) -> bool:
    """Remove ``shape`` from ``shapes``. Return whether ``shape`` was there."""
    if shape not in shapes:
        return False
    shapes.remove(shape)
    return True


class _DrawWatch(TorchFunctionMode):
    """Notes the shapes of tensors that the user's code fills with random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_function__(
        self, func: Any, types: Sequence[Any], args: Any = (), kwargs: Any = None
    ) -> Any:  # called by torch
        """Call a function."""
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") in _DRAWS and isinstance(result, Tensor):
            self.shapes.append(tuple(result.shape))
        return result
