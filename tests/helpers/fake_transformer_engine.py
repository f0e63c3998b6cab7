"""A package ``transformer_engine`` that computes with torch in fp32, on any device; weights are
rounded to 8 bits where modules have quantized ones, or ``rounds_weights`` is set.

Every call is bound to the signatures of the real package (``tests/oracles/te_contract.json``), so
that a keyword it does not have fails, and is recorded. What the real package does silently wrong
is an error here: quantized weights that are kept although the weights have changed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from enum import Enum
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from megatron_lightning.precision.backends import Gpu
from tests.helpers import fake_transformer_engine_modules as layers
from tests.helpers import fake_transformer_engine_tensors as tensors
from tests.helpers.te_contract import CONTRACT, STATE, State, bind

GPU = Gpu("a GPU that is not there", (9, 0), (13, 0))
_LAYERS = (
    "Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear", "Fp8Padding", "Fp8Unpadding",
    "RMSNorm", "LayerNorm", "DotProductAttention",
)  # fmt: skip


class autocast:
    """Counts its depth; the end of the outermost one reduces and appends largest values."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = bind("autocast.__init__", args, kwargs)
        STATE.calls.append(("autocast", kwargs))
        self.entry = (given["enabled"], given["recipe"], given["amax_reduction_group"])

    def __enter__(self) -> None:
        STATE.stack.append(self.entry)

    def __exit__(self, *exception: object) -> None:
        enabled, _, _ = STATE.stack.pop()
        if enabled and not STATE.stack and torch.is_grad_enabled():
            self._reduce()

    @staticmethod
    def _reduce() -> None:
        for group, history in STATE.histories:
            amax = history[0].clone()
            size = 1 if group is None else dist.get_world_size(group)
            if size > 1:
                dist.all_reduce(amax, dist.ReduceOp.MAX, group=group)
            STATE.reductions.append(size)
            history.copy_(history.roll(1, 0))
            history[1].copy_(amax)
            history[0].zero_()


def checkpoint(*args: Any, **kwargs: Any) -> Any:
    """As torch's, with the autocast and the random states of the first forward."""
    get_tracker = kwargs.pop("get_rng_state_tracker")
    STATE.calls.append(("checkpoint", dict(kwargs)))
    outer, tracker = list(STATE.stack), get_tracker()
    states = tracker.get_states()

    @contextmanager
    def again() -> Iterator[None]:
        now, STATE.recomputing = tracker.get_states(), True
        tracker.set_states(states)
        enabled, recipe, _ = outer[-1] if outer else (False, None, None)
        try:
            with autocast(enabled=enabled, recipe=recipe):
                yield
        finally:  # torch's checkpoint leaves early, by an exception
            STATE.recomputing = False
            tracker.set_states(now)

    return torch_checkpoint(*args, context_fn=lambda: (nullcontext(), again()), **kwargs)


def _recipe(name: str) -> type[Any]:
    def __init__(self: Any, **kwargs: Any) -> None:
        vars(self).update(bind(f"{name}.__init__", (), kwargs))

    return type(name, (), {"__init__": __init__})


def _available(name: str) -> Callable[..., Any]:
    def is_available(*args: Any, **kwargs: Any) -> Any:
        return (True, "") if bind(name, args, kwargs)["return_reason"] else True

    return is_available


def _modules() -> dict[str, ModuleType]:
    modules = {
        name: ModuleType(name)
        for name in (
            "transformer_engine",
            "transformer_engine.common",
            "transformer_engine.common.recipe",
            "transformer_engine.pytorch",
            "transformer_engine.pytorch.tensor",
            "transformer_engine.pytorch.tensor.utils",
        )
    }
    for name, module in modules.items():
        module.__path__ = []  # type: ignore[attr-defined]
        module.__spec__ = ModuleSpec(name, None)
    package, _, recipe, pytorch, _, utils = modules.values()
    package.__version__ = CONTRACT["version"]  # type: ignore[attr-defined]
    for kind in (*(getattr(layers, name) for name in _LAYERS), autocast, checkpoint):
        setattr(pytorch, kind.__name__, kind)
    pytorch.quantized_model_init = tensors.quantized_model_init  # type: ignore[attr-defined]
    for name in ("post_all_gather_processing", "quantize_master_weights", "replace_raw_data"):
        setattr(utils, name, getattr(tensors, name))
    for name in CONTRACT["signatures"]:
        if name.startswith("is_"):
            setattr(pytorch, name, _available(name))
    for name in CONTRACT["recipes"]:
        setattr(recipe, name, _recipe(name))
    recipe.Format = Enum("Format", CONTRACT["formats"])  # type: ignore[attr-defined, misc]
    return modules


@contextmanager
def installed() -> Iterator[State]:
    """Fake the import of ``transformer_engine``, and a GPU for the plugin; yield the record."""
    from megatron_lightning.strategies import fp8

    find_gpu = fp8.find_gpu
    modules = _modules()
    vars(STATE).update(vars(State()))
    sys.modules.update(modules)
    fp8.find_gpu = lambda device=None: GPU  # type: ignore[assignment]
    try:
        yield STATE
    finally:
        fp8.find_gpu = find_gpu  # type: ignore[assignment]
        for name in modules:
            del sys.modules[name]
