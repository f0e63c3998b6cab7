"""Reports of layers to the step: auxiliary losses, and values to log or to count.

A layer that reports has a :class:`StepReport` as a child and calls it in its forward, on whatever
pipeline stage it is. One step minimizes, with w the weight that the main loss of a micro-batch has
(its items, or its share of the samples),

    sum over data and context ranks and micro-batches of  w (main loss + sum of reported losses)

divided by the sum of w. A reported loss does not travel to the main loss. Its gradient begins at an
activation of the layer: :meth:`StepReport.loss` returns the activation through an identity whose
backward passes its gradient on, and gives the reported loss the gradient that the main loss of the
same micro-batch has. That is read in backward (:class:`LossScale`), when it is known on every
stage: items, accumulation and the scale of fp16 are in it.

What a rank passes in holds for its own tokens on data- and context-parallel ranks. Over
tensor-parallel ranks the mean is logged, and losses are equal. Where a loss is of tokens that
several ranks hold, each passes in the full loss, summed from parts: over tensor-parallel ranks by
``reduce_from_axis`` (backward: identity), over context-parallel ones by
``copy_to_axis(reduce_from_axis(part, cp), cp)`` (backward: all-reduce, since each of them weighs
the loss by itself).

A recomputation runs a forward again inside of backward: it attaches and does not record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from megatron_lightning import compat
from megatron_lightning.errors import ConfigError
from megatron_lightning.parallel.absent import present_modules
from megatron_lightning.parallel.numbers import number_on

Kind = Literal["loss", "mean", "sum", "peak", "each"]
_OF_VECTORS = ("peak", "each")


class Key(NamedTuple):
    """A name under which layers report, and how their reports become one number."""

    name: str
    kind: Kind
    """loss: sum over layers of the means over micro-batches; mean: over all reports; sum; peak:
    largest element of a layer's sum over their mean, and the largest of the layers' peaks; each:
    every element of a layer's sum."""
    layer: str = ""
    """Path of the one layer that is meant; empty: all."""
    size: int = 1
    """Elements of a report."""

    @property
    def label(self) -> str:
        """The name in the log."""
        return f"{self.name}/{self.layer}" if self.layer else self.name


class LossScale:
    """Gradient of the main loss of one micro-batch, set before the backward of the layers."""

    def __init__(self) -> None:
        self.value: Tensor | float = 1.0
        self.is_followed = False  # the main loss exists: later reports belong to another one

    def follow(self, loss: Tensor) -> None:
        """Take over the gradient that arrives at ``loss``."""

        def note(gradient: Tensor) -> None:
            self.value = gradient.detach()

        if loss.requires_grad:
            loss.register_hook(note)  # type: ignore[no-untyped-call]
            self.is_followed = True


class CurrentMicrobatch:
    """The micro-batch whose forward or backward runs; all reports of a run share one object.

    Copies, of modules that are copied or pickled, belong to no run.
    """

    def __init__(self, *, is_bound: bool = False, records: bool = True) -> None:
        self.is_bound = is_bound
        """Whether a strategy sets the scales and logs the values."""
        self.records = records
        """Whether reports are recorded; not in forwards that are only analyzed."""
        self.index = 0
        self.loss_scale = LossScale()

    def scale_of_reports(self) -> LossScale:
        """Return the scale for a loss that is reported now."""
        if self.loss_scale.is_followed and not compat.is_in_backward():
            self.loss_scale = LossScale()
        return self.loss_scale

    def __reduce__(self) -> tuple[type[CurrentMicrobatch], tuple[()]]:
        return CurrentMicrobatch, ()


class _Recorded:
    """Reports of one layer since they were read; a copy of the module begins without."""

    def __init__(self) -> None:
        self.sums: dict[Key, dict[int, tuple[Tensor, int]]] = {}  # and number, by micro-batch
        self.counts: dict[str, Tensor] = {}
        self.training = True  # mode in which the sums were recorded

    def __reduce__(self) -> tuple[type[_Recorded], tuple[()]]:
        return _Recorded, ()


class _Attach(torch.autograd.Function):
    """Forward: return the activation. Backward: pass its gradient on, and start that of the loss
    with the scale of the main loss.
    """

    @staticmethod
    def forward(ctx: Any, activation: Tensor, loss: Tensor, scale: LossScale) -> Tensor:
        ctx.scale = scale
        ctx.shape = loss.shape
        ctx.dtype = loss.dtype
        ctx.device = loss.device
        return activation.detach()  # may be modified in place, unlike an input that is returned

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradient, number_on(ctx.device, ctx.scale.value, ctx.dtype).expand(ctx.shape), None


class StepReport(nn.Module):
    """Reports of a layer to the step; a child of the layer, without parameters.

    It works alone as well: in plain PyTorch losses have the scale 1, and in plain Lightning
    :func:`log_reports` does the rest.

    Args:
        per_layer: Whether every layer's number is logged too, as ``name/path of the layer``.
    """

    def __init__(self, *, per_layer: bool = False) -> None:
        super().__init__()
        self.per_layer = per_layer
        self.microbatch = CurrentMicrobatch()
        self._recorded = _Recorded()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def loss(self, name: str, value: Tensor, activation: Tensor) -> Tensor:
        """Add ``value`` to the loss of the micro-batch, and log it.

        Args:
            name: Key of the log; losses of several layers are summed.
            value: One number, times its coefficient, in fp32 where the activation is less precise.
            activation: Any tensor on the way to the main loss.

        Returns:
            The activation, to be used in its place: without it the loss has no gradient.
        """
        self._record(Key(name, "loss"), value)
        if not (torch.is_grad_enabled() and value.requires_grad):
            return activation
        attach: Callable[..., Tensor] = _Attach.apply
        return attach(activation, value, self.microbatch.scale_of_reports())

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def value(
        self, name: str, value: Tensor, reduce: Literal["mean", "sum", "peak", "each"] = "mean"
    ) -> None:
        """Log a number, averaged or summed over micro-batches, layers, and data- and
        context-parallel ranks; means are weighted as losses are.

        With ``peak``, ``value`` is a vector of numbers that are not negative, such as the tokens of
        each expert. Over micro-batches and ranks, tensor-parallel ones as well, it is summed; what
        is logged is the largest element over the mean of all, of each layer and, under the name
        alone, of the layer where it is largest. With ``each``, ``value`` is a vector, too, and its
        elements are summed as one number is, and logged as ``name/path of the layer/index``.
        """
        self._record(Key(name, reduce), value)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def count(self, name: str, value: Tensor) -> None:
        """Add a tensor to :attr:`counts` in training; it is neither logged nor exchanged."""
        if self.training and self.is_recorded:
            counts, value = self.counts, value.detach()
            counts[name] = counts[name] + value if name in counts else value.clone()

    @property
    def counts(self) -> dict[str, Tensor]:
        """Sums over micro-batches and batches, on this rank, until someone clears them."""
        return self._recorded.counts

    @property
    def is_recorded(self) -> bool:
        """Whether what is reported now counts: not in a recomputation."""
        return self.microbatch.records and not compat.is_in_backward()

    def _record(self, key: Key, value: Tensor) -> None:
        if key.kind in _OF_VECTORS:
            key = key._replace(size=value.numel())
        elif value.numel() != 1:
            raise ConfigError(
                f"a layer reports {key.name!r} with the shape {list(value.shape)}, which cannot be "
                "logged. Report one number, such as its mean(), or count() it."
            )
        if not self.is_recorded:
            return
        recorded, index = self._recorded, self.microbatch.index
        if recorded.training != self.training:  # the other mode's were not read: a summary's, say
            recorded.sums.clear()
            recorded.training = self.training
        of_key = recorded.sums.setdefault(key, {})
        value = value.detach().reshape(key.size).double()
        before, number = of_key.get(index, (None, 0))
        of_key[index] = (value if before is None else before + value, number + 1)

    def take(self) -> dict[Key, dict[int, tuple[Tensor, int]]]:
        """Return the sums that were recorded, and of how many reports, by micro-batch; forget
        them.
        """
        sums, self._recorded.sums = self._recorded.sums, {}
        return sums


def find_reports(module: nn.Module) -> dict[str, StepReport]:
    """Return the reports in what this rank holds of ``module``, by path."""
    return {p: child for p, child in present_modules(module) if isinstance(child, StepReport)}


def add_up(
    reports: Mapping[str, StepReport], weights: Sequence[float | Tensor]
) -> dict[Key, Tensor]:
    """Return for every key [size + 1] numbers: the sum of the reports, weighted where it is for a
    mean, and the sum of their weights. The reports are forgotten.

    Args:
        reports: Reports by path.
        weights: Weight of each micro-batch.
    """
    totals: dict[Key, Tensor] = {}
    for path, report in reports.items():
        for key, of_key in report.take().items():
            sums = [
                torch.cat([value, value.new_full((1,), number)])
                * (weights[index] if key.kind in ("loss", "mean") else 1.0)
                for index, (value, number) in of_key.items()
            ]
            for named in _keys(key, path, report):
                totals[named] = sum(sums, totals.get(named, torch.zeros_like(sums[0])))
    return totals


def _keys(key: Key, path: str, report: StepReport) -> Iterator[Key]:
    if key.kind not in _OF_VECTORS:
        yield key
    if report.per_layer or key.kind in _OF_VECTORS:
        yield key._replace(layer=path.rpartition(".")[0])


def reduced(totals: Mapping[Key, Tensor], weight: Any) -> dict[Key, Tensor]:
    """Return the numbers to log.

    Args:
        totals: As in :func:`add_up`, over all ranks.
        weight: Sum of the weights of all micro-batches; 0 where nothing counts.
    """
    numbers: dict[Key, Tensor] = {}
    peaks: dict[str, list[Tensor]] = {}
    for key, total in totals.items():
        if key.kind == "peak":
            numbers[key] = _ratio(total[:-1].max(), total[:-1].mean())
            peaks.setdefault(key.name, []).append(numbers[key])
        elif key.kind == "each":
            for index, number in enumerate(total[:-1]):
                numbers[Key(key.name, "sum", f"{key.layer}/{index}")] = number
        else:
            divisor = {"loss": weight, "mean": total[1], "sum": 1.0}[key.kind]
            numbers[key] = _ratio(total[0], divisor)
    largest = {Key(name, "peak"): torch.stack(of_all).max() for name, of_all in peaks.items()}
    return largest | numbers


def _ratio(value: Tensor, divisor: Any) -> Tensor:
    if isinstance(divisor, Tensor):
        return value / torch.where(divisor != 0, divisor, 1)
    return value / (divisor or 1.0)


# ------------------------------------------------------------------------------- in plain Lightning

_MARK = "_megatron_reports"  # on a LightningModule, the micro-batch that a strategy sets


def bind(module: nn.Module, microbatch: CurrentMicrobatch) -> Callable[[], None]:
    """Bind the reports in ``module`` to a strategy, which reads them; return the undo."""
    reports = find_reports(module).values()
    vars(module)[_MARK] = microbatch
    for report in reports:
        report.microbatch = microbatch
        report.take()
        report.counts.clear()

    def release() -> None:
        vars(module).pop(_MARK, None)
        for report in reports:
            report.microbatch = CurrentMicrobatch()

    return release


def is_bound(module: nn.Module) -> bool:
    """Return whether a strategy reads the reports in the LightningModule ``module``."""
    mark: CurrentMicrobatch | None = vars(module).get(_MARK)
    return mark is not None and mark.is_bound


def log_reports(
    module: nn.Module, loss: Tensor | None = None, *, prefix: str = "", **options: Any
) -> None:
    """Log what the layers reported since the last call, and give their losses the scale that
    ``loss`` has in its backward.

    Call it in every step of a LightningModule whose layers report, so that it trains under any of
    Lightning's strategies: with accumulated batches, and with a loss scale. Under MegatronStrategy,
    which does both itself, it does nothing.

    Args:
        module: The LightningModule.
        loss: The loss that is returned, in training.
        prefix: Put before the names, such as ``"val_"``.
        options: Further arguments of ``self.log``.
    """
    if is_bound(module):
        return
    reports = find_reports(module)
    if loss is not None:
        for report in reports.values():
            report.microbatch.loss_scale.follow(loss)
    log = cast("Callable[..., None]", module.log)
    for key, number in reduced(add_up(reports, [1.0]), 1.0).items():
        added = {"reduce_fx": "sum"} if key.kind == "sum" else {}
        log(f"{prefix}{key.label}", number.float(), **(options | added))
