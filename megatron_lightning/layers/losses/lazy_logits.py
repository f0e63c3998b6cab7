"""Logits that an output layer computes only if code reads them, because the loss is known.

In a call of a model with labels, the output layer sees the labels' targets (:class:`AwaitedLoss`).
The layer computes the token losses in chunks (:mod:`megatron_lightning.layers.losses.linear_loss`),
and returns :class:`PendingLogits` in place of the logits. The loss function of the call takes the
token losses from the pending logits. Any other code gets the logits themselves: each torch function
with pending logits as an argument computes the logits first, by the layer's usual forward.

Multiplication by a number stays pending. The first call learns the factor, and later calls compute
the losses of multiplied logits at once.

Units of FSDP2 gather weights for each call, and all steps must have the same calls. An output layer
that is a unit therefore computes logits in the first call, which tells what the model and the step
do with logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from megatron_lightning.errors import ShardingError
from megatron_lightning.layers.losses.linear_loss import Head, linear_losses
from megatron_lightning.layers.losses.loss import ALONE, CrossEntropy, losses_of

T = TypeVar("T")


@dataclass
class Habits:
    """How a model treats its logits, learned from earlier calls."""

    factor: float = 1.0
    """Number that the model multiplies logits by before the loss."""
    is_known: bool = False
    """Whether a loss has been computed."""
    reads: bool = False
    """Whether the model itself reads logits before the loss, or code read logits in two calls in a
    row. The layer then computes logits as usual."""
    read_last: bool = False
    """Whether code read the logits of the last call."""
    read_before: bool = False
    """Whether code read the logits of the call before the last."""

    def begin_call(self) -> None:
        """Begin another call."""
        self.read_before, self.read_last = self.read_last, False


@dataclass
class AwaitedLoss:
    """The loss of a call, known before the output layer runs."""

    targets: Tensor
    """[b, s]: ids of the full vocabulary."""
    habits: Habits
    can_repeat: bool = True
    """Whether the layer can be called again in a step."""
    loss: CrossEntropy = field(default_factory=CrossEntropy)
    """Loss of logits and targets. Only its options matter."""
    is_over: bool = field(default=False, init=False)
    """Whether the call has ended. A pipeline's run without values sets attributes of a layer again,
    and the layer must not await the loss of an earlier call."""
    is_taken: bool = field(default=False, init=False)
    """Whether the loss function of the call has run."""
    is_paused: bool = field(default=False, init=False)
    """Whether the layer computes logits."""

    def losses(self, layer: Any, x: Tensor, factor: float) -> Tensor:
        """Return the token losses [b, s] of the logits of ``layer`` times ``factor``.

        Args:
            layer: The output layer.
            x: Input of the layer [b, s, h], or a sequence shard.
            factor: Multiplies the logits.
        """
        head = _head_of(layer, self)
        x = x if factor == 1.0 else x * factor
        return linear_losses(x, layer.weight, layer.bias, self.targets.to(x.device), head)

    def __call__(self, layer: Any, x: Tensor) -> Tensor | None:
        """Return pending logits for the input ``x`` of ``layer``. None: the layer computes logits,
        because the targets are of other tokens, or of an earlier call.
        """
        if self.is_over or self.is_paused:
            return None
        axis = getattr(layer, "sequence_axis", None)
        shape = list(x.shape[:-1])
        if axis is not None:
            shape[axis.dim] *= axis.group.size
        if not self.can_repeat and not self.habits.is_known:
            logits = self.without(layer, lambda: type(layer).forward(layer, x))
            return PendingLogits.make(_Computed(self, layer, logits))
        is_scaled = self.habits.factor != 1.0 and layer.bias is not None
        if shape != list(self.targets.shape) or is_scaled or torch.compiler.is_compiling():
            return None
        factor = self.habits.factor
        return PendingLogits.make(_Pending(self, layer, x, self.losses(layer, x, factor), factor))

    def of_logits(self, logits: Tensor) -> Tensor:
        """Return the losses [b, s] of ``logits`` [b, s, v]."""
        vocabulary = self.loss.vocabulary(logits.shape[-1])
        return losses_of(logits, self.targets.to(logits.device), vocabulary)

    def without(self, layer: Any, compute: Callable[[], T]) -> T:
        """Return the result of ``compute``, with no loss awaited by ``layer``."""
        # Not by an attribute of the layer, which a pipeline would take for state of the forward.
        current: AwaitedLoss = vars(layer).get("awaited") or self
        current.is_paused = True
        try:
            return compute()
        finally:
            current.is_paused = False


def _head_of(layer: Any, awaited: AwaitedLoss) -> Head:
    """Return how ``layer``, alone or with parts of a vocabulary on several ranks, computes
    losses.
    """
    axis = getattr(layer, "sequence_axis", None)
    vocabulary = awaited.loss.vocabulary(layer.out_features, getattr(layer, "group", ALONE))
    copies = getattr(layer, "copy_input", False)
    compiles = getattr(layer, "compiles_loss", False)
    return Head(layer.gemm, vocabulary, axis, copies, compiles=compiles)


@dataclass
class _Pending:
    """Logits to be computed, and the losses."""

    awaited: AwaitedLoss
    layer: Any
    x: Tensor
    computed: Tensor
    """Losses [b, s] of the logits times ``factor``."""
    factor: float
    scale: float = 1.0
    """Number by which code has multiplied the logits."""
    version: int = field(init=False)
    """Of the layer's weight."""
    dtype: torch.dtype = field(init=False)
    """Of the logits."""
    logits: Tensor | None = field(default=None, init=False)
    is_apart: bool = field(default=False, init=False)
    """Whether the losses have been computed without logits."""

    def __post_init__(self) -> None:
        self.version = self.layer.weight._version
        device = self.x.device.type
        is_cast = torch.is_autocast_enabled(device)
        self.dtype = torch.get_autocast_dtype(device) if is_cast else self.x.dtype

    def scaled(self, factor: float) -> _Pending:
        """Return the logits times ``factor``."""
        return _Pending(
            self.awaited, self.layer, self.x, self.computed, self.factor, self.scale * factor
        )

    def cloned(self) -> _Pending:
        """Return a copy with separate logits."""
        computed = self.computed.clone()
        return _Pending(self.awaited, self.layer, self.x, computed, self.factor, self.scale)

    def losses(self) -> Tensor:
        """Return the losses [b, s]."""
        self.awaited.is_taken = self.awaited.habits.is_known = True
        if self.logits is not None:  # code may have written into the logits
            return self.awaited.of_logits(self.logits)
        self.is_apart = True
        if self.scale != self.factor:
            self._check_repeats()
            self.awaited.habits.factor = self.factor = self.scale
            self.computed = self.awaited.losses(self.layer, self.x, self.scale)
        return self.computed

    def check_gradient(self) -> None:
        """Check that the losses have been, or will be, computed from the logits.

        Raises:
            ShardingError: If the logits get no gradient of the losses.
        """
        if self.is_apart:
            raise ShardingError(
                "the gradient of logits is asked for (register_hook or retain_grad), and the loss "
                "of the call has been computed without logits, which get no gradient. Set "
                "fused_loss=False."
            )

    def _check_repeats(self) -> None:
        """Check that the layer can compute again.

        Raises:
            ShardingError: If the layer's weight is no longer gathered.
        """
        if not self.awaited.can_repeat:
            raise ShardingError(
                "the logits of a call with labels are read, and in earlier calls they were not. "
                'With data_parallel="fsdp" all steps must use the same layers in the same order. '
                "Read the logits in every step from the first on, set fused_loss=False, or set "
                'data_parallel to "zero1".'
            )

    def read(self) -> Tensor:
        """Return the logits.

        Raises:
            ShardingError: If the weights have changed since the call.
        """
        if self.logits is None:
            habits = self.awaited.habits
            # A model that changes its logits before the loss does so in each call.
            habits.reads |= habits.read_before or not self.awaited.is_taken
            habits.read_last = True
            if self.layer.weight._version != self.version:
                raise ShardingError(
                    "the logits of a call with labels are read after the weights have changed, and "
                    "they are computed when they are read. Read them in the step, such as "
                    "outputs.logits.detach(), or set fused_loss=False."
                )
            self._check_repeats()
            # Without the calls that a pipeline records.
            logits = self.awaited.without(self.layer, lambda: self.layer._call_impl(self.x))
            self.logits = logits if self.scale == 1.0 else logits * self.scale
        return self.logits


@dataclass
class _Computed:
    """Logits of a first call, computed already."""

    awaited: AwaitedLoss
    layer: Any
    computed: Tensor
    """Logits [b, s, v]."""
    scale: float = 1.0
    """As in :class:`_Pending`."""
    logits: Tensor | None = field(default=None, init=False)

    @property
    def dtype(self) -> torch.dtype:
        """As in :class:`_Pending`."""
        return self.computed.dtype

    def scaled(self, factor: float) -> _Computed:
        """Return the logits times ``factor``."""
        return _Computed(self.awaited, self.layer, self.computed, self.scale * factor)

    def cloned(self) -> _Computed:
        """As in :class:`_Pending`."""
        return _Computed(self.awaited, self.layer, self.computed.clone(), self.scale)

    def losses(self) -> Tensor:
        """Return the losses [b, s]."""
        habits = self.awaited.habits
        self.awaited.is_taken = habits.is_known = True
        habits.factor = self.scale
        return self.awaited.of_logits(self._scaled())

    def check_gradient(self) -> None:
        """Do nothing: the losses are computed from the logits."""

    def read(self) -> Tensor:
        """Return the logits."""
        self.awaited.habits.reads = True
        return self._scaled()

    def _scaled(self) -> Tensor:
        if self.logits is None:
            self.logits = self.computed if self.scale == 1.0 else self.computed * self.scale
        return self.logits


class PendingLogits(Tensor):
    """Logits [b, s, v], computed when code reads the values.

    Until then the tensor has the memory of the losses [b, s], and the losses' place in autograd's
    graph.
    """

    pending: _Pending | _Computed

    @classmethod
    def make(cls, pending: _Pending | _Computed) -> PendingLogits:
        """Return the logits."""
        logits = pending.computed.as_subclass(cls)
        logits.pending = pending
        return logits

    @property
    def stands_for(self) -> Tensor:
        """Computed values in place of the logits: NaN in one is NaN in the other."""
        return self.pending.computed

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[Any], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run a function of torch on the logits. Only functions of values compute the logits."""
        kwargs = kwargs or {}
        first = args[0] if args else None
        with torch._C.DisableTorchFunctionSubclass():
            if isinstance(first, PendingLogits):
                pending = first.pending
                if func in _OF_VIEWS:  # FSDP2 asks
                    return None
                if func in _OF_LOSSES or _is_library_hook(func, args, kwargs):
                    return func(pending.computed, *args[1:], **kwargs)
                if func in _OF_SHAPE:
                    return func(_shell(pending), *args[1:], **kwargs)
                if func in _OF_GRADIENTS:
                    pending.check_gradient()
                if func in _COPIES and pending.logits is None and not (args[1:] or kwargs):
                    return cls.make(pending.cloned())
            factor = _factor(func, args, kwargs)
            if factor is not None:
                pending = next(x for x in args if isinstance(x, PendingLogits)).pending
                return cls.make(pending.scaled(factor))
            return func(*tree_map(_read, args), **tree_map(_read, kwargs))


def _read(value: Any) -> Any:
    return value.pending.read() if isinstance(value, PendingLogits) else value


def _shell(pending: _Pending | _Computed) -> Tensor:
    """Return a tensor with the shape and dtype of logits."""
    shape = (*pending.awaited.targets.shape, pending.layer.out_features)
    return torch.empty(shape, dtype=pending.dtype, device="meta")


def _factor(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | None:
    """Return the number by which a call multiplies pending logits. None: the call does something
    else, or the layer has a bias.
    """
    if kwargs or len(args) != 2 or func not in _PRODUCTS | _QUOTIENTS:
        return None
    logits, number = args if isinstance(args[0], PendingLogits) else args[::-1]
    if not isinstance(number, float | int) or logits.pending.layer.bias is not None:
        return None
    if func in _PRODUCTS:
        return float(number)
    return 1.0 / number if number and isinstance(args[0], PendingLogits) else None


def _is_library_hook(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call registers a hook of units of FSDP2. These hooks wait for backward and
    read no gradient.
    """
    hook = args[1] if len(args) > 1 else kwargs.get("hook")
    package = str(getattr(hook, "__module__", None)).partition(".")[0]
    return func is Tensor.register_hook and package in ("torch", "megatron_lightning")


def _getters(*names: str) -> frozenset[Callable[..., Any]]:
    return frozenset(getattr(Tensor, name).__get__ for name in names)


_PRODUCTS = frozenset((torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__))
_QUOTIENTS = frozenset((torch.div, Tensor.div, Tensor.__truediv__))
_COPIES = frozenset((torch.clone, Tensor.clone))  # a pipeline marks copies of a unit's output
_OF_VIEWS = _getters("_base")
_OF_SHAPE = _getters("shape", "dtype", "ndim", "layout") | {
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.__len__,
    Tensor.is_floating_point,
    Tensor.is_complex,
    torch.is_floating_point,
    torch.numel,
}
_OF_LOSSES = _getters("device", "requires_grad", "grad_fn", "is_leaf", "is_cuda", "is_meta") | {
    Tensor.get_device,
    Tensor.untyped_storage,
}
_OF_GRADIENTS = frozenset((Tensor.register_hook, Tensor.retain_grad))
