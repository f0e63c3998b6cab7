"""Find data dependencies between units by dependency runs without values: of the full model before
the model is partitioned, and of every stage before the first micro-batch of a kind of call.

The model is copied without tensors and runs under :class:`FakeTensorMode`
(https://docs.pytorch.org/docs/stable/torch.compiler_fake_tensor.html), which computes shapes and no
values: no memory, a few times the host time of a forward, once. Models that fail in a fake run in
fp32 (kernels of grouped GEMMs) run in bf16. Models with a forward that branches on values run for
real, if the weights exist.

Example inputs are ``example_input_array`` of the LightningModule, or ``dummy_inputs`` of a
``transformers`` model.

Before the first micro-batch of a kind of call, every stage runs the forward once on placeholders,
in order, under a :class:`DependencyTrace`. The combined findings of the stages determine the
outputs that a boundary carries. The run of the full model also sees side channels between stages,
but a step may call the model in another way than the example does.
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

from megatron_lightning.compat import operation_counter, unlogged_fake_tensors
from megatron_lightning.errors import ConfigError
from megatron_lightning.parallel.grid.context import ParallelContext
from megatron_lightning.parallel.random.rng import host_state
from megatron_lightning.pipeline.stages.dependencies import (
    EPILOGUE,
    CallFacts,
    DependencyTrace,
    Uses,
)
from megatron_lightning.pipeline.stages.preludes import PreludeCalls, name_of
from megatron_lightning.pipeline.stages.stage import StagePartition
from megatron_lightning.pipeline.stages.unit_values import UnitValues
from megatron_lightning.pipeline.stages.units import Calls, Operations, has_own_forward

_log = logging.getLogger(__name__)

_CPU = torch.device("cpu")


class ExampleRun:
    """Runs of a full module on the module's example inputs.

    Args:
        root: The full LightningModule, or any module. Stays unchanged.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root

    def calls(self, path: str) -> Calls | None:
        """Return how often a forward calls the modules inside of the module at ``path``. None: no
        example inputs, or no run succeeds with the inputs.
        """
        calls: Calls | None = self._try(path, _count_calls)
        return calls

    def operations(self, path: str) -> Operations | None:
        """Return the floating-point operations of a forward, by the module inside of the module at
        ``path``. None: unknown.
        """
        operations: Operations | None = self._try(path, _count_operations)
        return operations

    def uses(self, path: str, units: Sequence[str], preludes: Sequence[str] = ()) -> Uses | None:
        """Return the dependencies between the units, and preludes, of the module at ``path``. None:
        unknown.
        """
        uses: Uses | None = self._try(path, partial(_follow, units, preludes))
        return uses

    def _try(self, path: str, observe: Callable[..., Any]) -> Any:
        example = example_inputs(self._root, path)
        if example is None:
            return None
        caller, args, kwargs = example
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


def example_inputs(
    root: nn.Module, path: str
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]] | None:
    """Return the module to call on the example inputs of ``root``, and the arguments. None: there
    are no example inputs.
    """
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
    """Yield a copy of the module without tensors, and a call of the copy."""
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
    """Yield the module itself. The buffers and the random state are restored at the end."""
    buffers = [(buffer, buffer.clone()) for buffer in caller.buffers()]
    device = next((parameter.device for parameter in caller.parameters()), _CPU)
    args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to(device), (args, kwargs))
    with torch.random.fork_rng(), torch.no_grad():
        try:
            yield caller, lambda: caller(*args, **kwargs)
        finally:
            for buffer, value in buffers:
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


def _count_operations(module: nn.Module, call: Callable[[], Any]) -> Operations:
    """Count operations between the start and the end of every call."""
    counts: dict[str, float] = {}
    starts: dict[str, int] = {}
    with ExitStack() as undo:
        counter = undo.enter_context(operation_counter())

        def start(name: str, *_: Any) -> None:
            starts[name] = counter.get_total_flops()

        def end(name: str, *_: Any) -> None:
            counts[name] = counts.get(name, 0.0) + counter.get_total_flops() - starts[name]

        for name, child in module.named_modules():
            undo.callback(child.register_forward_pre_hook(partial(start, name)).remove)
            undo.callback(child.register_forward_hook(partial(end, name)).remove)
        call()
    return counts


def _follow(
    units: Sequence[str], preludes: Sequence[str], module: nn.Module, call: Callable[[], Any]
) -> Uses:
    trace = DependencyTrace(dict(module.named_parameters()))
    calls = PreludeCalls(len(preludes))
    with ExitStack() as undo:
        for index, name in enumerate(units):
            undo.enter_context(
                intercepted(module.get_submodule(name), partial(_run_unit, trace, index))
            )
        for position, name in enumerate(preludes):
            run = partial(_run_prelude, trace, calls, position)
            undo.enter_context(intercepted(module.get_submodule(name), run))
        undo.callback(module.register_forward_hook(lambda *given: trace.end(given[2])).remove)
        with trace:
            call()
    return trace.uses()


def _run_unit(
    trace: DependencyTrace, index: int, run: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    return trace.run_unit(index, run, args, kwargs)


def _run_prelude(
    trace: DependencyTrace,
    calls: PreludeCalls,
    position: int,
    run: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    return trace.run_unit(calls.next(position), run, args, kwargs)


@contextmanager
def intercepted(module: nn.Module, call: Callable[..., Any]) -> Iterator[None]:
    """Replace the calls of a module, hooks included, inside the block.

    ``call`` receives the original call, compiled or not, and the arguments. ``call`` is set in the
    place used by ``Module.compile``, the only place to replace ``Module.__call__`` on an instance.
    """
    original: Callable[..., Any] | None = module.__dict__.get("_compiled_call_impl")
    module._compiled_call_impl = partial(call, original or module._call_impl)
    try:
        yield
    finally:
        if original is None:
            module.__dict__.pop("_compiled_call_impl", None)
        else:
            module._compiled_call_impl = original


class CallAnalysis:
    """A run of all stages without values.

    Args:
        partition: The pipelined module and the module's stages.
    """

    def __init__(self, partition: StagePartition) -> None:
        self._partition = partition
        self._uses: list[Uses] = []
        self.values = UnitValues()
        """Attributes that units set on themselves in the forward."""
        self.draws_on_host = False

    def follow(self) -> DependencyTrace:
        """Return the mode for a stage's forward."""
        return DependencyTrace(dict(nn.Module.named_parameters(self._partition.module)))

    def learn(self, trace: DependencyTrace) -> None:
        """Record the findings of a stage's forward."""
        self._uses.append(trace.uses())

    @contextmanager
    def watching_draws(self) -> Iterator[None]:
        """Context of a forward that may draw from Python's or NumPy's generators."""
        state = host_state()
        yield
        self.draws_on_host |= host_state() != state

    @contextmanager
    def running(self, root: nn.Module) -> Iterator[None]:
        """Context of the run. Nothing is recorded for a backward. The buffers of ``root``, which
        the step may use, and the values on units are restored at the end.
        """
        with _unchanged(root), torch.no_grad():
            yield
        self.values.undo()

    def conclude(self, facts: CallFacts, context: ParallelContext) -> None:
        """Write the findings of all stages to ``facts``. A collective of the pipeline.

        Raises:
            ConfigError: If a side channel of units crosses a stage boundary.
        """
        partition = self._partition
        facts.notes.clear()  # dtypes may differ from a run with values: autocast, fused paths
        ranks = context.pp.all_gather_object((self._uses, self.values.left, self.draws_on_host))
        all_uses = [uses for of_rank, *_ in ranks for uses in of_rank]
        facts.left = {value for _, of_rank, _ in ranks for value in of_rank}
        facts.draws_on_host = any(draws for *_, draws in ranks)
        # Fewer findings than stages if the step calls the units itself: everything is carried then.
        if len(all_uses) == len(partition.stages):
            facts.uses = Uses.union(all_uses)
            starts = [first for first, _ in partition.bounds]
            check_boundaries(facts.uses, partition.units, starts, partition.preludes)
            self._check_epilogue(facts.uses, starts[-1])

    def _check_epilogue(self, uses: Uses, last: int) -> None:
        """Check that the units of the last stage have no side channel that units of the same class,
        on earlier stages, would have as well.
        """
        units, module = self._partition.units, self._partition.module
        kinds = [type(module.get_submodule(unit)) for unit in units]
        for source, reader in sorted(uses.side_channels):
            if reader == EPILOGUE and source >= 0 and kinds[source] in kinds[:last]:
                raise ConfigError(
                    f"unit {units[source]!r} hands state to the code behind the units by a list, "
                    "an attribute or a hook, and the same state of units on earlier stages is "
                    "missing there. Return it from the units, or switch it off (transformers: "
                    "output_attentions=False, output_router_logits=False)."
                )


def check_boundaries(
    uses: Uses, units: Sequence[str], starts: Sequence[int], preludes: Sequence[str] = ()
) -> None:
    """Check that no side channel of units crosses a boundary.

    Args:
        uses: Uses of the units.
        units: Their paths.
        starts: The first unit of every stage.
        preludes: Paths of the preludes.

    Raises:
        ConfigError: Naming the units and the boundaries that work.
    """
    name = partial(name_of, units=units, preludes=preludes)
    # Received copies do not share memory, so that a write into one copy misses the other.
    for source, alias in sorted(uses.aliased) if len(starts) > 1 else ():
        # Only a write makes shared memory visible to the model.
        written_units = {source, alias} & (uses.written_between | {j for j, _ in uses.writes})
        if written_units:
            raise ConfigError(
                f"unit {name(alias)!r} returns memory that it was given, or the same memory "
                f"twice, and the model writes into the output of {name(min(written_units))!r} in "
                "place, which changes both. A stage that receives copies would not see it. Return "
                "a copy from the unit (x.clone()), or write into one."
            )
    for start in starts:
        carried = uses.carried(start) if start else ()
        for source, writer in sorted(uses.writes):
            if writer < start and source in carried:
                raise ConfigError(
                    f"unit {name(writer)!r} writes into the output of unit {name(source)!r} in "
                    f"place, which a stage that begins with {units[start]!r} uses too. Let it "
                    "write into a copy (inplace=False)."
                )
        if start and not uses.allows(start):
            source, reader = min((j, i) for j, i in uses.side_channels if j < start <= i)
            if source < 0:
                raise _side_channel_of_prelude(name(source))
            by = "the code behind the units" if reader >= len(units) else repr(units[reader])
            works = ", ".join(repr(units[cut]) for cut in range(1, len(units)) if uses.allows(cut))
            otherwise = (
                f"or begin stages only with {works} (pipeline_model_parallel_layout)"
                if works
                else "otherwise this model cannot be partitioned"
            )
            raise ConfigError(
                f"unit {units[source]!r} hands state to {by} by a list, an attribute or a hook, "
                f"and a stage begins with {units[start]!r} between them. Return it from the unit, "
                f"or switch it off (transformers: output_router_logits=False); {otherwise}."
            )


def _side_channel_of_prelude(name: str) -> ConfigError:
    return ConfigError(
        f"{name!r}, which the first pipeline stage holds, hands state to code behind the stage by "
        "a list, an attribute or a hook. Return it from the module, or set "
        f"PipelineOptions(replicated_modules=[{name!r}]), so that every stage runs the module. "
        "State to look at, which no loss and no log uses, can be kept outside of the "
        "LightningModule: in a list of a callback, on the ranks of the first stage."
    )


@contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Restore the buffers of the module after the block."""
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers() if not buffer.is_meta]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
