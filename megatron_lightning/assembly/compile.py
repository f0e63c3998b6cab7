"""``compile="block"``: compile the repeated blocks of a model separately.

A block is a unit of the pipeline (``pipeline.units``) and either a numbered layer or one of several
units of a class. Compilation replaces ``forward`` on the block's instance, inside of the work of
``nn.Module.__call__``. Hooks (of FSDP2, of the pipeline, of users) therefore stay outside of the
graphs, and parameters keep their names. Recomputation of a full block wraps ``forward`` earlier and
is traced as a part of the graph. With experts or named random streams inside, recomputation cannot
be traced: the recomputation stays outside, and runs the compiled forward again. So it does where
ranks find what mixes tokens, which runs uncompiled between the graphs of a block. Blocks of a kind
share graphs, since the compiler's cache belongs to the shared code. With inductor, output layers
get compiled kernels for the logits of their losses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from megatron_lightning.assembly.part import Part
from megatron_lightning.compat import compiled
from megatron_lightning.config import CompileOptions, PipelineOptions
from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.losses.linear_loss import TakesLoss
from megatron_lightning.layers.moe.layer import MoELayer
from megatron_lightning.layers.shared_rows.entry import shared_models
from megatron_lightning.layers.state.recompute import (
    draws_from_streams,
    recomputed_forward,
    replace_recomputed,
)
from megatron_lightning.parallel.shards.other_stages import is_absent
from megatron_lightning.pipeline.schedules.partition import is_layer, unit_names
from megatron_lightning.pipeline.stages.units import find_pipelined


class CompiledForward:
    """A forward compiled at the first call.

    Copies and pickles of a module compile their own.

    Args:
        forward: The forward to compile.
        options: How.
    """

    def __init__(self, forward: Callable[..., Any], options: CompileOptions) -> None:
        self.original = forward
        """Uncompiled forward."""
        self._options = options
        self._run = compiled(
            forward,
            backend=options.backend,
            mode=None if options.mode == "default" else options.mode,
            dynamic=options.dynamic,
            fullgraph=options.fullgraph,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return CompiledForward, (self.original, self._options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled forward."""
        return self._run(*args, **kwargs)


def compile_blocks(
    module: nn.Module, part: Part, pipeline: PipelineOptions, options: CompileOptions
) -> list[str]:
    """Compile the blocks of this rank's part, except for blocks already compiled by the user.

    Args:
        module: The LightningModule, assembled.
        part: Description of the module's part.
        pipeline: Names the units, if the user does.
        options: Options of the compiler.

    Returns:
        The paths of the compiled blocks.
    """
    if part.partition is None:
        path, units = _units(module, pipeline)
    else:
        path, units = part.path or "", part.partition.units
    breaks = bool(shared_models(module))
    paths = []
    for name in _blocks(module.get_submodule(path), units):
        block = module.get_submodule(path).get_submodule(name)
        if not is_absent(block) and not is_compiled(block):
            _compile(block, options, breaks=breaks)
            paths.append(f"{path}.{name}" if path else name)
    for child in module.modules():
        if isinstance(child, TakesLoss):
            # The kernels are written by inductor, which another backend replaces.
            child.compiles_loss = options.backend == "inductor"
    return paths


def _compile(block: nn.Module, options: CompileOptions, *, breaks: bool) -> None:
    """Compile a block. ``breaks``: modules in it run between graphs."""
    for child in block.modules():
        forward = recomputed_forward(child)
        if forward is not None and (breaks or _is_untraceable(child)):
            replace_recomputed(child, CompiledForward(forward, options))
    if not is_compiled(block):
        block.__dict__["forward"] = CompiledForward(block.forward, options)


def _is_untraceable(recomputed: nn.Module) -> bool:
    """Return whether recomputation of the module cannot be a part of a graph."""
    has_experts = any(isinstance(child, MoELayer) for child in recomputed.modules())
    return has_experts or draws_from_streams(recomputed)


def uncompile_blocks(module: nn.Module) -> None:
    """Undo :func:`compile_blocks`."""
    for child in module.modules():
        if isinstance(child, TakesLoss):
            child.compiles_loss = False
        recomputed = recomputed_forward(child)
        if isinstance(recomputed, CompiledForward):
            replace_recomputed(child, recomputed.original)
        forward = child.__dict__.get("forward")
        if isinstance(forward, CompiledForward):
            del child.__dict__["forward"]
            if child.forward != forward.original:  # replaced by recomputation
                child.__dict__["forward"] = forward.original


def is_compiled(module: nn.Module) -> bool:
    """Return whether calls of the module run compiled code."""
    return (
        module._compiled_call_impl is not None
        or hasattr(module, "_orig_mod")
        or isinstance(module.__dict__.get("forward"), CompiledForward)
        or isinstance(recomputed_forward(module), CompiledForward)
    )


def fills_cache(module: nn.Module) -> bool:
    """Return whether a ``transformers`` model makes a cache of keys and values in every forward,
    the default of ``transformers``.
    """
    can_generate = getattr(module, "can_generate", None)
    uses_cache = getattr(getattr(module, "config", None), "use_cache", False)
    return bool(uses_cache and callable(can_generate) and can_generate())


def check_blocks(module: nn.Module, pipeline: PipelineOptions) -> None:
    """Check that a full module has blocks to compile.

    Raises:
        ConfigError: If the module has no blocks.
    """
    reason = ""
    try:
        path, units = _units(module, pipeline)
        if any(_blocks(module.get_submodule(path), units)):
            return
    except ConfigError as error:
        reason = f" ({error})"
    raise ConfigError(
        f'compile="block" compiles the repeated blocks of a model, and {type(module).__name__} has '
        f"none{reason}. Name units in PipelineOptions(units=[...]), several of them of one class, "
        "or leave compile out and compile what you want: module.compile()."
    )


def _units(module: nn.Module, pipeline: PipelineOptions) -> tuple[str, Sequence[str]]:
    path, _, units = find_pipelined(module, pipeline.units or ())
    return path, unit_names(units)


def _blocks(pipelined: nn.Module, units: Sequence[str]) -> Iterator[str]:
    """Yield the blocks among the units: units of several modules, either numbered or of a class
    with several units.
    """
    modules = {name: pipelined.get_submodule(name) for name in units}
    kinds = Counter(map(type, modules.values()))
    for name, child in modules.items():
        repeated = is_layer(name) or kinds[type(child)] > 1
        if repeated and child._modules and not isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield name


def uncompiled(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the submodules outside of compiled modules, since a new hook would compile a module
    again.
    """
    compiled: list[str] = []
    for path, child in module.named_modules():
        if is_compiled(child):
            compiled.append(f"{path}." if path else "")
        elif not any(f"{path}.".startswith(outer) for outer in compiled):
            yield path, child
