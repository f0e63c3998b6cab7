"""Reports of layers to the step: auxiliary losses, and values to log or to count.

A reporting layer has a :class:`StepReport` as a child and calls the report in its forward, on any
pipeline stage. With w the weight of a micro-batch in the main loss (its items, or its share of the
samples), a step minimizes

    sum over data and context ranks and micro-batches of  w (main loss + sum of reported losses)

divided by the sum of w. A reported loss does not travel to the main loss. The gradient of a
reported loss begins at an activation of the layer: :meth:`StepReport.loss` returns the activation
through an identity. The identity's backward passes the activation's gradient on, and gives the
reported loss the gradient of the main loss of the same micro-batch. :class:`LossScale` is read in
backward, when every stage knows the gradient of the main loss. Items, accumulation and the scale of
fp16 are included.

A rank reports values of its own tokens on data- and context-parallel ranks. Over tensor-parallel
ranks the log takes the mean, and losses are equal. If a loss covers tokens of several ranks, each
rank reports the full loss, summed from parts: over tensor-parallel ranks by ``reduce_from_axis``
(backward: identity), over context-parallel ranks by ``copy_to_axis(reduce_from_axis(part, cp),
cp)`` (backward: all-reduce, since each context-parallel rank weighs the loss separately).

A recomputation runs a forward again inside of backward. The second forward attaches losses and
    records nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from megatron_lightning import compat
from megatron_lightning.errors import ConfigError
from megatron_lightning.parallel.numbers import number_on
from megatron_lightning.parallel.shards.other_stages import present_modules

Kind = Literal["loss", "mean", "sum", "peak", "each"]
_OF_VECTORS = ("peak", "each")


class Key(NamedTuple):
    """Name of a report, and reduction of the reports to one number."""

    name: str
    kind: Kind
    """loss: sum over layers of the means over micro-batches. mean: over all reports. sum: sum of
    all reports. peak: largest element of a layer's sum over the mean element, and the largest of
    the layers' peaks. each: every element of a layer's sum.
    """
    layer: str = ""
    """Path of a single layer. Empty: all layers."""
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
        self.is_followed = False  # the main loss exists: later reports belong to another loss

    def follow(self, loss: Tensor) -> None:
        """Record the gradient that arrives at ``loss``."""

        def note(gradient: Tensor) -> None:
            self.value = gradient.detach()

        if loss.requires_grad:
            loss.register_hook(note)  # type: ignore[no-untyped-call]
            self.is_followed = True


class CurrentMicrobatch:
    """The micro-batch in forward or backward. All reports of a run share one object.

    Copied or pickled modules hold a fresh object that belongs to no run.
    """

    def __init__(self, *, is_bound: bool = False, records: bool = True) -> None:
        self.is_bound = is_bound
        """Whether a strategy sets the scales and logs the values."""
        self.records = records
        """Whether reports are recorded. False in forwards for analysis."""
        self.index = 0
        self.loss_scale = LossScale()

    def scale_of_reports(self) -> LossScale:
        """Return the scale for a loss reported now."""
        if self.loss_scale.is_followed and not compat.is_in_backward():
            self.loss_scale = LossScale()
        return self.loss_scale

    def __reduce__(self) -> tuple[type[CurrentMicrobatch], tuple[()]]:
        return CurrentMicrobatch, ()


class _Recorded:
    """Reports of one layer since the last read. A copy of the module starts empty."""

    def __init__(self) -> None:
        self.sums: dict[Key, dict[int, tuple[Tensor, int]]] = {}  # and number, by micro-batch
        self.counts: dict[str, Tensor] = {}
        self.training = True  # training mode of the recorded sums

    def __reduce__(self) -> tuple[type[_Recorded], tuple[()]]:
        return _Recorded, ()


class _Attach(torch.autograd.Function):
    """Forward: return the activation.

    Backward: pass the activation's gradient on, and start the gradient of the loss with the scale
    of the main loss.
    """

    @staticmethod
    def forward(ctx: Any, activation: Tensor, loss: Tensor, scale: LossScale) -> Tensor:
        ctx.scale = scale
        ctx.shape = loss.shape
        ctx.dtype = loss.dtype
        ctx.device = loss.device
        return activation.detach()  # may be modified in place, unlike a returned input

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradient, number_on(ctx.device, ctx.scale.value, ctx.dtype).expand(ctx.shape), None


class StepReport(nn.Module):
    """Reports of a layer to the step. A child of the layer, without parameters.

    The report also works alone: in plain PyTorch losses have the scale 1, and in plain Lightning
    :func:`log_reports` scales and logs.

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
        """Add ``value`` to the loss of the micro-batch, and log the value.

        Args:
            name: Key of the log. Losses of several layers are summed.
            value: A number, times the coefficient, in fp32 if the activation is less precise.
            activation: Any tensor on the way to the main loss.

        Returns:
            The activation to use instead of ``activation``. Otherwise the loss has no gradient.
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
        context-parallel ranks. Means are weighted like losses.

        With ``peak``, ``value`` is a vector of non-negative numbers, such as the tokens of each
        expert. The vector is summed over micro-batches and all ranks, including tensor-parallel
        ranks. The log holds the largest element over the mean element, for each layer and, under
        the name alone, for the layer with the largest peak. With ``each``, ``value`` is also a
        vector. Each element is summed like a single number, and logged as ``name/path of the
        layer/index``.
        """
        self._record(Key(name, reduce), value)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def count(self, name: str, value: Tensor) -> None:
        """Add a tensor to :attr:`counts` in training. Counts are neither logged nor exchanged."""
        if self.training and self.is_recorded:
            counts, value = self.counts, value.detach()
            counts[name] = counts[name] + value if name in counts else value.clone()

    @property
    def counts(self) -> dict[str, Tensor]:
        """Sums over micro-batches and batches, on this rank, until a reader clears the sums."""
        return self._recorded.counts

    @property
    def is_recorded(self) -> bool:
        """Whether current reports count. False in a recomputation."""
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
        total, number = of_key.get(index, (None, 0))
        of_key[index] = (value if total is None else total + value, number + 1)

    def take(self) -> dict[Key, dict[int, tuple[Tensor, int]]]:
        """Return and clear the recorded sums, with the number of reports, by micro-batch."""
        sums, self._recorded.sums = self._recorded.sums, {}
        return sums


def find_reports(module: nn.Module) -> dict[str, StepReport]:
    """Return the reports in this rank's part of ``module``, by path."""
    return {p: child for p, child in present_modules(module) if isinstance(child, StepReport)}


def add_up(
    reports: Mapping[str, StepReport], weights: Sequence[float | Tensor]
) -> dict[Key, Tensor]:
    """Return for every key [size + 1] numbers: the sum of the reports (weighted for a mean), and
    the sum of the weights. Clears the reports.

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
            for entry in _keys(key, path, report):
                totals[entry] = sum(sums, totals.get(entry, torch.zeros_like(sums[0])))
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
        weight: Sum of the weights of all micro-batches. 0 if nothing counts.
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

_MARK = "_megatron_reports"  # on a LightningModule: the micro-batch set by a strategy


def bind(module: nn.Module, microbatch: CurrentMicrobatch) -> Callable[[], None]:
    """Bind the reports in ``module`` to a strategy that reads them. Return the undo function."""
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


def is_recording(module: nn.Module) -> bool:
    """Return whether a forward of the LightningModule ``module`` counts now. False in runs without
    values and in repetitions of a strategy.
    """
    mark: CurrentMicrobatch | None = vars(module).get(_MARK)
    return mark is None or mark.records


def log_reports(
    module: nn.Module, loss: Tensor | None = None, *, prefix: str = "", **options: Any
) -> None:
    """Log the layers' reports since the last call, and scale reported losses like ``loss`` in its
    backward.

    Call the function in every step of a LightningModule with reporting layers, so that the module
    trains under any of Lightning's strategies, with accumulated batches and a loss scale. Under
    MegatronStrategy the function does nothing, because the strategy scales and logs.

    Args:
        module: The LightningModule.
        loss: The returned training loss.
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
