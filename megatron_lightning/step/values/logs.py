"""``self.log`` inside of a step: captured for each micro-batch, reduced, sent to every stage and
replayed there.

Lightning expects one call per key and batch, on every rank. A step runs once for each micro-batch,
and only the last stage reaches the code after the model. Calls are therefore recorded during the
schedule. Afterwards every rank makes the real call once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from numbers import Number
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchmetrics import MaxMetric, Metric, MinMetric, SumMetric

from megatron_lightning.errors import ConfigError
from megatron_lightning.parallel.grid.context import AxisGroup
from megatron_lightning.parallel.numbers import number_on
from megatron_lightning.pipeline.batch.context_mean import gather_rows
from megatron_lightning.pipeline.batch.microbatches import weighted_mean
from megatron_lightning.pipeline.stages.parallel_call import replaced_attribute
from megatron_lightning.step.participant import StepParticipant
from megatron_lightning.step.run_context import RunContext
from megatron_lightning.step.step_run import StepRun


class LogEntry(NamedTuple):
    """A key of a step, ready to be replayed, as plain data to be sent to another stage."""

    name: str
    value: Any
    """Reduced value. For a metric object, the metric's value in this step (by kind: largest,
    smallest, sum, else mean).
    """
    metric: str | None
    """Path of a logged metric object in the LightningModule, if any."""
    batch_size: float | None
    """Weight in a mean over batches: samples, or the size named by the call. A float for float
    weights.
    """
    options: dict[str, Any]
    """Further keyword arguments of ``self.log``."""


class _Call(NamedTuple):
    """A call of ``self.log``."""

    value: Any
    """A metric's value on this micro-batch, if a metric was logged."""
    batch_size: float | None
    microbatch: int
    options: dict[str, Any]
    metric: Metric | None


class LogRecorder:
    """Records ``self.log`` calls of a step."""

    def __init__(self, module: pl.LightningModule, sizes: Sequence[int | None]) -> None:
        self._module = module
        self._sizes = sizes
        self._calls: dict[str, list[_Call]] = {}
        self.microbatch = 0

    def installed(self, *, keep: bool = True) -> AbstractContextManager[None]:
        """Inside the block, take the calls of ``module.log``. ``log_dict`` calls go through
        ``module.log``.

        Args:
            keep: Whether to record the calls. False if another stage records.
        """
        return replaced_attribute(
            self._module, "log", self._record if keep else lambda *args, **options: None
        )

    def _record(self, *args: Any, batch_size: Any = None, **options: Any) -> None:
        batch_size = batch_size.item() if isinstance(batch_size, Tensor) else batch_size
        # An override may use other names.
        names = list(inspect.signature(pl.LightningModule.log).parameters)[1:]
        arguments = {**dict(zip(names, args, strict=False)), **options}
        name, value = arguments.pop("name"), arguments.pop("value")
        _check_value(name, value)
        if "reduce_fx" in arguments and not isinstance(value, Metric):
            arguments["reduce_fx"] = _reduction_name(name, arguments["reduce_fx"])
        metric = value if isinstance(value, Metric) else None
        value = value if metric is None else metric._forward_cache
        if isinstance(value, Tensor):  # Lightning drops the dims of a single element as well
            value = value.detach().squeeze() if value.numel() == 1 else value.detach()
        self._calls.setdefault(name, []).append(
            _Call(value, batch_size, self.microbatch, arguments, metric)
        )

    def tensors(self) -> list[Tensor]:
        """Return the logged tensors."""
        calls = [call.value for calls in self._calls.values() for call in calls]
        return [value for value in calls if isinstance(value, Tensor)]

    @property
    def names(self) -> list[str]:
        """Logged keys."""
        return list(self._calls)

    def entries(self, weights: Sequence[float | Tensor], sharing: AxisGroup) -> list[LogEntry]:
        """Return the recorded values, reduced over the micro-batches. A collective of ``sharing``.

        Args:
            weights: Weight of a micro-batch in a mean for calls without ``batch_size``.
            sharing: The ranks with the other parts of the sequences.
        """
        return [self._reduced(name, calls, weights, sharing) for name, calls in self._calls.items()]

    def _reduced(
        self,
        name: str,
        calls: list[_Call],
        weights: Sequence[float | Tensor],
        sharing: AxisGroup,
    ) -> LogEntry:
        options, metric, value = calls[-1].options, calls[-1].metric, calls[-1].value
        sizes = [
            self._sizes[call.microbatch] if call.batch_size is None else call.batch_size
            for call in calls
        ]
        batch_size = None if None in sizes else sum(size or 0 for size in sizes)
        # Metrics reduce their own states. Only plain scalars are combined here.
        several = len(calls) > 1 or (sharing.size > 1 and metric is None)
        if several and (metric is None or all(_is_scalar(call.value) for call in calls)):
            values = torch.stack(
                [torch.as_tensor(c.value, dtype=torch.get_default_dtype()).squeeze() for c in calls]
            )
            call_weights = [
                weights[c.microbatch] if c.batch_size is None else c.batch_size for c in calls
            ]
            weight = torch.stack([number_on(values.device, w, values.dtype) for w in call_weights])
            rows = gather_rows(torch.stack([values, weight.to(values)], 1), sharing)
            values, weight = rows.unbind(1)
            if batch_size is not None and any(call.batch_size is not None for call in calls):
                total = float(weight.sum())
                batch_size = total if isinstance(batch_size, float) else round(total)
            reduction = (
                options.get("reduce_fx", "mean") if metric is None else _reduction_of(metric)
            )
            value = _REDUCTIONS[reduction](values, weight)
            if reduction == "sum" and metric is None and options.get("sync_dist"):
                value = value / sharing.size  # each rank adds its value, and has the sum
        return LogEntry(
            name,
            value,
            None if metric is None else self._path_of(metric, options),
            batch_size,
            options,
        )

    def _path_of(self, metric: Metric, options: dict[str, Any]) -> str:
        if options.get("metric_attribute"):
            return str(options["metric_attribute"])
        for path, module in self._module.named_modules():
            if module is metric:
                return str(path)
        raise ConfigError(
            f"self.log was given a {type(metric).__name__} that is not an attribute of the "
            "LightningModule. Assign it to self in __init__, or log metric.compute()."
        )


_REDUCTIONS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda values, weights: weighted_mean(values.unbind(), weights.unbind()),
    "sum": lambda values, weights: values.sum(),
    "min": lambda values, weights: values.min(),
    "max": lambda values, weights: values.max(),
}
_NAMES: Mapping[Any, str] = {
    torch.mean: "mean",
    torch.sum: "sum",
    sum: "sum",
    torch.min: "min",
    min: "min",
    torch.max: "max",
    max: "max",
}


def _check_value(key: str, value: Any) -> None:
    """Refuse values that Lightning refuses, in Lightning's words, at the logging line and not after
    all micro-batches.
    """
    if not isinstance(value, Tensor | Number | Metric):
        raise ConfigError(
            f"`self.log({key}, {value})` was called, but `{type(value).__name__}` values cannot be "
            "logged. Log a number, a tensor with one element or a Metric."
        )
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ConfigError(
            f"`self.log({key}, {value})` was called, but the tensor must have a single element and "
            f"its shape is {tuple(value.shape)}. Log a single number, such as its mean()."
        )


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def _reduction_of(metric: Metric) -> str:
    """Return the reduction from a metric's values on micro-batches to the value on the batch. A
    mean is exact for ratios of equal parts.
    """
    kinds: Mapping[type[Metric], str] = {MaxMetric: "max", MinMetric: "min", SumMetric: "sum"}
    return next((name for kind, name in kinds.items() if isinstance(metric, kind)), "mean")


def _reduction_name(key: str, reduce_fx: str | Callable[..., Any]) -> str:
    """Return the name of a reduction, to be sent to other stages. Lightning knows no other
    reductions.
    """
    name = (
        {"avg": "mean"}.get(reduce_fx.lower(), reduce_fx.lower())
        if isinstance(reduce_fx, str)
        else _NAMES.get(reduce_fx)
    )
    if name is None or name not in _REDUCTIONS:
        raise ConfigError(
            f"self.log({key!r}) has reduce_fx={reduce_fx!r}. Set it to mean, sum, min or max, or "
            "log a torchmetrics.Metric that reduces as you need it."
        )
    return name


def replay(module: pl.LightningModule, entries: Sequence[LogEntry]) -> None:
    """Make the real ``self.log`` calls, once for each key."""
    for name, value, metric_path, batch_size, options in entries:
        sized: dict[str, Any] = {} if batch_size is None else {"batch_size": batch_size}
        if metric_path is not None:
            metric = module.get_submodule(metric_path)
            metric._forward_cache = value
            value = metric  # noqa: PLW2901
        module.log(name, value, **sized, **options)


class StepLogs(StepParticipant):
    """Take the log calls of pipelined steps, and replay them on every rank.

    Args:
        scope: The run context.
    """

    def __init__(self, scope: RunContext) -> None:
        self._module = scope.module
        self._sharing = scope.context.cp
        self._recorder = LogRecorder(scope.module, ())

    def begin(self, run: StepRun) -> None:
        """Record the calls of a new run."""
        self._recorder = LogRecorder(self._module, run.sizes)

    def around_forward(
        self, run: StepRun, stage: int, microbatch: int
    ) -> AbstractContextManager[None]:
        """Take the calls of a forward. The last stage repeats the calls before the model from the
        other stages.
        """
        self._recorder.microbatch = microbatch
        return self._recorder.installed(keep=stage == run.last_stage)

    def end(self, run: StepRun) -> None:
        """Report the logged keys."""
        run.facts += [f"logged {name!r}" for name in self._recorder.names]

    def share(self, run: StepRun) -> list[LogEntry]:
        """Return the entries, reduced over the micro-batches. A collective of the ranks sharing
        sequences.
        """
        return self._recorder.entries(run.item_weights, self._sharing)

    def apply(self, run: StepRun, shared: Sequence[LogEntry]) -> None:
        """Make the real calls."""
        replay(self._module, shared)

    def tensors(self) -> Sequence[Tensor]:
        """Return the logged tensors."""
        return self._recorder.tensors()

    @contextmanager
    def rehearsed(self) -> Iterator[None]:
        """Drop the log calls of the block."""
        self._recorder = LogRecorder(self._module, ())
        yield
        self._recorder = LogRecorder(self._module, ())
