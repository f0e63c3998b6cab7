"""Measure any module for a plan: work, kept bytes and parameters of every unit, by a run without
values.

The module is made on ``meta``, copied onto :class:`FakeTensorMode`, and runs once forward on its
example inputs (``example_input_array``, or ``dummy_inputs`` of ``transformers``). Operations are
counted by torch, kept bytes by the tensors that autograd saves. Sizes are divided by the samples of
the example, the length of the first input. Parameters of a rank come from the sharding plan on a
copy on ``meta``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from math import prod
from typing import Any

import torch
from jsonargparse import ArgumentParser
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from megatron_lightning.assembly.assemble import parallelize_models
from megatron_lightning.assembly.describe import copy_on_meta
from megatron_lightning.assembly.plans import PlanChoice, resolve_plans
from megatron_lightning.compat import operation_counter, unlogged_fake_tensors
from megatron_lightning.config import PipelineOptions, TransformerConfig
from megatron_lightning.errors import ConfigError, ShardingError
from megatron_lightning.models.measured import UnitMeasure
from megatron_lightning.models.transformer import GPTModel
from megatron_lightning.parallel.grid.context import ParallelContext
from megatron_lightning.parallel.grid.layout import ParallelLayout
from megatron_lightning.parallel.shards.sharding import named_shard_specs
from megatron_lightning.parallel.shards.ties import shared_names
from megatron_lightning.pipeline.schedules.actions import Placement
from megatron_lightning.pipeline.schedules.partition import Unit, unit_names
from megatron_lightning.pipeline.schedules.stage_layouts import split_units
from megatron_lightning.pipeline.stages.dependencies import Uses
from megatron_lightning.pipeline.stages.dependency_run import ExampleRun, example_inputs
from megatron_lightning.pipeline.stages.units import find_pipelined

_CPU = torch.device("cpu")
_LOSS_COPIES = 2
"""Kept copies of the module's output in fp32: log-softmax, and the gradient's room."""


def measure(
    class_path: str,
    init_args: Mapping[str, Any],
    *,
    half: bool,
    plan: PlanChoice = None,
    pipeline: PipelineOptions | None = None,
) -> MeasuredModule | TransformerConfig:
    """Return the measures of the module of a configuration file, or the configuration of the
    module's only :class:`GPTModel`.

    Args:
        class_path: Class of the module.
        init_args: The class's arguments, as in a configuration file.
        half: Whether activations have 2 bytes.
        plan: The strategy's ``sharding_plan``.
        pipeline: The strategy's options of the pipeline.

    Raises:
        ConfigError: If the module cannot be made, or has no example inputs.
    """
    module = _make(class_path, init_args)
    models = [child for child in module.modules() if isinstance(child, GPTModel)]
    if len(models) == 1:
        return models[0].config
    return MeasuredModule(module, half=half, plan=plan, pipeline=pipeline or PipelineOptions())


def _make(class_path: str, init_args: Mapping[str, Any]) -> nn.Module:
    """Return the full module, on ``meta`` if the class allows."""
    module_path, _, name = class_path.rpartition(".")
    try:
        if not hasattr(import_module(module_path), name):
            raise ImportError(f"{module_path} has no {name}")
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"model.class_path is {class_path!r}, which cannot be imported ({error}). Check the "
            "name, and start in its folder or set PYTHONPATH."
        ) from None
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(nn.Module, "model", required=True)
    failures = []
    # Some constructors compute with values, which meta tensors lack.
    for device in ("meta", "cpu"):
        try:
            values = {"model": {"class_path": class_path, "init_args": dict(init_args)}}
            settings = parser.parse_object(values)
            with torch.device(device):
                instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes
                module: nn.Module = instantiate(settings).model
                configure: Callable[[], None] | None = getattr(module, "configure_model", None)
                if configure is not None:
                    configure()
            return module
        except Exception as error:  # of the user's code, or of the parser
            failures.append(" ".join(str(error).split()))
    raise ConfigError(f"model {class_path} cannot be made: {failures[-1]}")


class MeasuredModule:
    """A module measured on the module's example inputs.

    Args:
        module: The full module. Stays unchanged.
        half: Whether activations have 2 bytes.
        plan: The strategy's ``sharding_plan``.
        pipeline: The strategy's options of the pipeline.

    Raises:
        ConfigError: If the module has no example inputs, or does not run on them.
    """

    def __init__(
        self, module: nn.Module, *, half: bool, plan: PlanChoice, pipeline: PipelineOptions
    ) -> None:
        self._module = module
        self._plan = plan
        self.name = type(module).__name__
        """Name of the module's class."""
        example = ExampleRun(module)
        self._units: tuple[Unit, ...] = ()
        self._path = ""
        self._uses: Uses | None = None
        self.no_pipeline = ""
        """Why no pipeline is possible. Empty: it is."""
        try:
            self._path, _, units = find_pipelined(
                module, pipeline.units or (), example.calls, example.operations
            )
            self._units = tuple(units)
            self._uses = example.uses(self._path, unit_names(units))
        except ConfigError as error:
            self.no_pipeline = str(error)
        # A model that no pipeline can divide is measured as a single unit.
        paths = {self._full(unit): unit for unit in unit_names(self._units)}
        run = _MeasuringRun(module, self._path, tuple(paths), half=half)
        self.samples = run.samples
        """Samples of the example."""
        self.units: dict[str, UnitMeasure] = {
            unit: run.measures[path] for path, unit in paths.items()
        }
        """Units of the pipeline in order."""
        self.outside: UnitMeasure = run.measures[""]
        """Code outside of the units, and the loss."""
        self._counts: dict[int, dict[str, int] | None] = {}

    def _full(self, unit: str) -> str:
        return f"{self._path}.{unit}" if self._path else unit

    def parameters(self, tensor_parallel_size: int) -> dict[str, int] | None:
        """Return the parameters of a rank by unit, and outside of units under "". None: the module
        cannot be divided so.
        """
        if tensor_parallel_size not in self._counts:
            self._counts[tensor_parallel_size] = self._count(tensor_parallel_size)
        return self._counts[tensor_parallel_size]

    def _count(self, tp: int) -> dict[str, int] | None:
        layout = ParallelLayout(tensor_model_parallel_size=tp)
        try:
            plans = resolve_plans(self._module, layout, self._plan)
            shell = copy_on_meta(self._module)
            context = ParallelContext(layout, planned_world_size=tp)
            parallelize_models(shell, context, plans.applied)
        except (ConfigError, ShardingError):
            return None
        specs = named_shard_specs(shell)
        copies = {name for _, *further_names in shared_names(shell) for name in further_names}
        counts = dict.fromkeys([*self.units, ""], 0)
        for name, spec in specs.items():
            if name in copies:
                continue
            unit = next((u for u in self.units if name.startswith(f"{self._full(u)}.")), "")
            counts[unit] += prod(spec.local_shape)
        return counts

    def stages(self, pp: int, vpp: int, options: PipelineOptions) -> Sequence[Sequence[str]] | None:
        """Return the units of every stage. None: the module cannot be divided so."""
        if pp * vpp == 1:
            return (tuple(self.units),)
        allows = self._uses.allows if self._uses is not None else lambda _: True
        try:
            return split_units(self._units, Placement.loop(pp, vpp), options, allows)
        except ConfigError:
            return None


class _MeasuringRun:
    """One forward of a copy on fake tensors.

    Args:
        root: The module.
        path: Path of the pipelined module.
        units: Paths of the units in the module.
        half: Whether activations have 2 bytes.

    Raises:
        ConfigError: If there are no example inputs, or the forward fails.
    """

    def __init__(self, root: nn.Module, path: str, units: Sequence[str], *, half: bool) -> None:
        example = example_inputs(root, path)
        if example is None:
            raise ConfigError(
                f"{type(root).__name__} has no example inputs, which a plan runs the model on "
                "without values. Set self.example_input_array in __init__ to inputs of a "
                "micro-batch (`transformers` models have dummy_inputs)."
            )
        self._found: dict[str, list[float]] = {unit: [0.0] * 4 for unit in ("", *units)}
        self._kept: dict[int, Tensor] = {}  # by storage, so that no identity is used twice
        self._inside = [""]
        self._widths = {"": 0}
        caller, args, kwargs = example
        prefix = "" if caller is root else f"{path}."
        failure: Exception | None = None
        # A model may cast to a dtype of its own. Sizes in the other dtype are scaled.
        for dtype in (torch.bfloat16,) if half else (torch.float32, torch.bfloat16):
            try:
                with unlogged_fake_tensors():
                    self._run(caller, prefix, args, kwargs, dtype)
                break
            except Exception as error:
                failure = error
        else:
            raise ConfigError(
                f"{type(root).__name__} does not run on its example inputs without values: "
                f"{failure}"
            ) from failure
        scale = 1.0 if half or dtype is torch.float32 else 2.0
        first = next(
            (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), None
        )
        self.samples = max(1, len(first)) if first is not None and first.dim() else 1
        scales = [1.0, scale, scale, scale]
        self.measures = {
            unit: UnitMeasure(*(v * s / self.samples for v, s in zip(values, scales, strict=True)))
            for unit, values in self._found.items()
        }

    def _run(
        self,
        caller: nn.Module,
        prefix: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        dtype: torch.dtype,
    ) -> None:
        mode = FakeTensorMode(allow_non_fake_inputs=True)

        # Fake tensors have shapes, dtypes and storages, and neither values nor memory, so that
        # models larger than the host can be measured.
        def fake(tensor: Tensor) -> Tensor:
            like = tensor.detach().to("meta")
            return FakeTensor(mode, like.to(dtype) if like.is_floating_point() else like, _CPU)

        memo: dict[int, Any] = {
            id(p): nn.Parameter(fake(p), requires_grad=p.requires_grad) for p in caller.parameters()
        }
        memo |= {id(buffer): fake(buffer) for buffer in caller.buffers()}
        module = copy.deepcopy(caller, memo).train()
        args, kwargs = tree_map_only(Tensor, fake, (args, kwargs))
        self._found = {unit: [0.0] * 4 for unit in self._found}
        # Parameters and buffers are in memory anyway: only further saved tensors count as kept.
        self._kept = {_storage(one): one for one in memo.values() if isinstance(one, Tensor)}
        with ExitStack() as undo:
            undo.enter_context(mode)
            counter = undo.enter_context(operation_counter())
            undo.enter_context(torch.autograd.graph.saved_tensors_hooks(self._keep, _same))
            for unit in self._found:
                if unit:
                    child = module.get_submodule(unit.removeprefix(prefix))
                    hook = partial(self._enter, unit, counter)
                    child.register_forward_pre_hook(hook, with_kwargs=True)
                    child.register_forward_hook(partial(self._leave, unit, counter))
            output = module(*args, **kwargs)
            total = counter.get_total_flops()
        # Everything not inside a unit belongs to the code around, plus copies of the output for a
        # loss.
        outside_values = self._found[""]
        outside_values[0] = total - sum(values[0] for unit, values in self._found.items() if unit)
        size = sum(leaf.numel() for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
        outside_values[3] += 4.0 * _LOSS_COPIES * size

    def _enter(
        self, unit: str, counter: FlopCounterMode, module: nn.Module, args: Any, kwargs: Any
    ) -> None:
        self._inside.append(unit)
        self._found[unit][0] -= counter.get_total_flops()
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        floats = [leaf for leaf in leaves if leaf.is_floating_point()]
        first = next(iter(floats or leaves), None)
        if first is not None:
            self._found[unit][1] = float(first.numel() * first.element_size())
            self._widths[unit] = first.shape[-1] if first.dim() else 0

    def _leave(self, unit: str, counter: FlopCounterMode, *_: Any) -> None:
        self._found[unit][0] += counter.get_total_flops()
        self._inside.pop()

    def _keep(self, tensor: Tensor) -> Tensor:
        """Count a tensor saved for backward, once."""
        identity = _storage(tensor)
        if identity not in self._kept:
            self._kept[identity] = tensor
            unit = self._inside[-1]
            is_wide = bool(tensor.dim()) and tensor.shape[-1] == self._widths.get(unit, 0)
            self._found[unit][2 if is_wide else 3] += tensor.numel() * tensor.element_size()
        return tensor


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _same(tensor: Tensor) -> Tensor:
    return tensor
