"""A run of the full model on example inputs, before it is divided: which modules are called, and
what reaches what.

The model is copied without its tensors and runs under :class:`FakeTensorMode`
(https://docs.pytorch.org/docs/stable/torch.compiler_fake_tensor.html), which computes shapes and no
values: no memory, a few times the host time of a forward, once. Models that cannot run like that in
fp32 (kernels of grouped products) run in bf16; those whose forward branches on values run for real,
where their weights exist.

Example inputs are ``example_input_array`` of the LightningModule, or ``dummy_inputs`` of a
``transformers`` model.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map_only

from megatron_lightning.compat import unlogged_fake_tensors
from megatron_lightning.pipeline.stages.taint import Taint, Uses
from megatron_lightning.pipeline.stages.units import Calls, has_own_forward

_log = logging.getLogger(__name__)

_CPU = torch.device("cpu")


class ExampleRun:
    """Runs of a full module on its example inputs.

    Args:
        root: The full LightningModule, or any module; it stays as it is.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root

    def calls(self, path: str) -> Calls | None:
        """Return how often a forward calls the modules in the one at ``path``; None: there are no
        example inputs, or no run succeeds with them.
        """
        calls: Calls | None = self._try(path, _count_calls)
        return calls

    def uses(self, path: str, units: Sequence[str]) -> Uses | None:
        """Return which units of the module at ``path`` use what; None: unknown."""
        uses: Uses | None = self._try(path, partial(_follow, units))
        return uses

    def _try(self, path: str, observe: Callable[..., Any]) -> Any:
        given = _inputs(self._root, path)
        if given is None:
            return None
        caller, args, kwargs = given
        inner = path if caller is self._root else ""
        ways: list[Callable[..., Any]] = [
            partial(_fake, torch.float32),
            partial(_fake, torch.bfloat16),
        ]
        if not any(parameter.is_meta for parameter in caller.parameters()):
            ways.append(_real)
        for way in ways:
            try:
                with unlogged_fake_tensors(), way(caller, args, kwargs) as (module, call):
                    return observe(module.get_submodule(inner), call)
            except Exception as error:
                _log.debug("%s on example inputs: %r", type(caller).__name__, error)
        return None


def _inputs(root: nn.Module, path: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]] | None:
    """Return the module to call and its arguments."""
    module = root.get_submodule(path)
    example: Any = getattr(root, "example_input_array", None)
    if example is not None:
        caller = root if has_own_forward(root) else module
        if isinstance(example, Mapping):
            return caller, (), dict(example)
        return caller, example if isinstance(example, tuple) else (example,), {}
    try:
        dummy: Any = getattr(module, "dummy_inputs", None)
    except Exception:
        return None
    return (module, (), dict(dummy)) if isinstance(dummy, Mapping) else None


@contextmanager
def _fake(
    dtype: torch.dtype, caller: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[nn.Module, Callable[[], Any]]]:
    """Yield a copy of the module without tensors, and its call."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(tensor: Tensor) -> Tensor:
        like = tensor.detach().to("meta")
        if tensor.dtype == torch.float32:
            like = like.to(dtype)
        return FakeTensor(mode, like, _CPU)

    memo: dict[int, Any] = {
        id(p): nn.Parameter(fake(p), requires_grad=False) for p in caller.parameters()
    }
    memo |= {id(buffer): fake(buffer) for buffer in caller.buffers()}
    module = copy.deepcopy(caller, memo)
    args, kwargs = tree_map_only(Tensor, fake, (args, kwargs))
    with mode, torch.no_grad():
        yield module, lambda: module(*args, **kwargs)


@contextmanager
def _real(
    caller: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[nn.Module, Callable[[], Any]]]:
    """Yield the module itself; its buffers and the random state are restored at the end."""
    before = [(buffer, buffer.clone()) for buffer in caller.buffers()]
    device = next((parameter.device for parameter in caller.parameters()), _CPU)
    args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to(device), (args, kwargs))
    with torch.random.fork_rng(), torch.no_grad():
        try:
            yield caller, lambda: caller(*args, **kwargs)
        finally:
            for buffer, value in before:
                buffer.copy_(value)


def _count_calls(module: nn.Module, call: Callable[[], Any]) -> Calls:
    counts: dict[str, int] = {}

    def count(name: str, *_: Any) -> None:
        counts[name] = counts.get(name, 0) + 1

    with ExitStack() as undo:
        for name, child in module.named_modules():
            undo.callback(child.register_forward_pre_hook(partial(count, name)).remove)
        call()
    return counts


def _follow(units: Sequence[str], module: nn.Module, call: Callable[[], Any]) -> Uses:
    taint = Taint(dict(module.named_parameters()))
    with ExitStack() as undo:
        for index, name in enumerate(units):
            undo.enter_context(
                intercepted(module.get_submodule(name), partial(_run_unit, taint, index))
            )
        undo.callback(module.register_forward_hook(lambda *given: taint.end(given[2])).remove)
        with taint:
            call()
    return taint.uses()


def _run_unit(taint: Taint, index: int, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return taint.run_unit(index, run, args, kwargs)


@contextmanager
def intercepted(module: nn.Module, call: Callable[..., Any]) -> Iterator[None]:
    """Replace the calls of one module, hooks included, inside the block.

    ``call`` is given what the call would run, compiled or not, and the arguments. It takes the
    place of what ``Module.compile`` sets, the one way in which ``Module.__call__`` is decided on
    the instance.
    """
    before: Callable[..., Any] | None = module.__dict__.get("_compiled_call_impl")
    module._compiled_call_impl = partial(call, before or module._call_impl)
    try:
        yield
    finally:
        if before is None:
            module.__dict__.pop("_compiled_call_impl", None)
        else:
            module._compiled_call_impl = before
