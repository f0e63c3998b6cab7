"""Modules of Transformer Engine that compute layers with the layers' parameters.

An engine is no child module of the layer, so that names and checkpoints do not change. The engine
binds the parameters at every call, because sharded data parallelism exchanges parameters. Copies
and pickles of a layer hold None instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from megatron_lightning.layers.attention.self_attention import CoreAttention
from megatron_lightning.layers.attention.sequence_info import SequenceInfo
from megatron_lightning.precision.transformer_engine.weights import QuantizedWeight

Parameters = Callable[[], Mapping[str, Tensor]]


class Surroundings(Protocol):
    """Interface of the backend to engines during a step."""

    def scope(self, recipe: Any) -> AbstractContextManager[Any]:
        """Return the context that runs a layer with a separate recipe."""
        ...

    @property
    def checkpoint(self) -> Callable[..., Any]:
        """See :class:`~megatron_lightning.layers.engine.Engine`."""
        ...

    def is_first_microbatch(self, engine: ModuleEngine) -> bool | None:
        """Return whether the weights have changed since the engine's last call.

        None: nothing is cached.
        """
        ...


class ModuleEngine:
    """Computes a layer by a module.

    Args:
        layer: The layer.
        module: Transformer Engine's module, with parameters on ``meta``.
        parameters: Returns the layer's parameters by the module's names.
        around: The backend.
        recipe: Recipe of the layer, if different from the step's recipe.
        weights: Weights that may be stored as quantized data.
    """

    def __init__(
        self,
        layer: nn.Module,
        module: Any,
        parameters: Parameters,
        around: Surroundings,
        recipe: Any = None,
        *,
        weights: Sequence[QuantizedWeight] = (),
    ) -> None:
        self.module = module
        self.cached_version = -1
        """Version of the weights in the module's quantized copies."""
        self.checkpoint: Callable[..., Any] | None = around.checkpoint
        self._layer = layer
        self._parameters = parameters
        self._around = around
        self._recipe = recipe
        self.weights = weights

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def takes(self, x: Tensor, *args: Any) -> bool:
        """See :class:`~megatron_lightning.layers.engine.Engine`.

        The layer computes tensors without values.
        """
        return not isinstance(x, FakeTensor)

    def __call__(self, x: Tensor, *args: Any) -> Tensor:
        """Compute the layer."""
        self.module._parameters.update(self._parameters())
        for weight in self.weights:
            if weight.holds_quantized:
                self.module._parameters.update(weight.bound())
        if self.module.training != self._layer.training:
            self.module.train(self._layer.training)
        with self._around.scope(self._recipe):
            return self._compute(x, *args)

    def _compute(self, x: Tensor, *args: Any) -> Tensor:
        out: Tensor = self.module(x)
        return out

    def _is_first(self) -> bool | None:
        return self._around.is_first_microbatch(self)


class NormEngine(ModuleEngine):
    """Computes a norm."""


class LinearEngine(ModuleEngine):
    """Computes a linear layer, or a norm with the following layers.

    Args:
        sequence_dim: Dim of the sequence. Transformer Engine gathers and scatters along the first
            dim.
        given: The other arguments, by name.
    """

    def __init__(self, *args: Any, sequence_dim: int = 0, **given: Any) -> None:
        super().__init__(*args, **given)
        self._dim = sequence_dim

    def _compute(self, x: Tensor, *args: Any) -> Tensor:
        x = x.transpose(0, self._dim) if self._dim else x
        out: Tensor = self.module(x, is_first_microbatch=self._is_first())
        return out.transpose(0, self._dim).contiguous() if self._dim else out


class GroupedEngine(ModuleEngine):
    """Computes the experts of a layer. Rows of each expert are padded to the recipe's multiple.

    Args:
        pad: Adds rows of zeros.
        unpad: Removes the rows of zeros.
        given: The other arguments.
    """

    def __init__(self, *args: Any, pad: Any, unpad: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self._pad = pad
        self._unpad = unpad

    def _compute(self, x: Tensor, *args: Any) -> Tensor:
        (counts,) = args
        sizes = counts.tolist()  # Transformer Engine reads sizes on the host
        padded, padded_sizes = self._pad(x, sizes)
        out: Tensor = self.module(
            padded, torch.tensor(padded_sizes), is_first_microbatch=self._is_first()
        )
        out = self._unpad(out, sizes)
        return out


class AttentionEngine:
    """Computes causal, full and sliding-window attention over sequences of one document.

    Args:
        core: The layer.
        build: Returns a ``DotProductAttention`` for heads (n, g), sizes (d, e) and a scale, known
            at the first call.
    """

    checkpoint: Callable[..., Any] | None = None

    def __init__(
        self,
        core: CoreAttention,
        build: Callable[[tuple[int, int], tuple[int, int], float], Any],
    ) -> None:
        self._core = core
        self._build = build
        self._modules: dict[tuple[Any, ...], Any] = {}

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def takes(self, x: Tensor, *args: Any) -> bool:
        """Return whether the engine supports the sequences.

        The layer computes documents in a shared row, cached keys, capped scores, sinks, attention
        in fp32, and attention by kernels of torch that the user names.
        """
        sequence: SequenceInfo = args[0]
        core = self._core
        windowed = sequence.window is not None and core.cp_comm is not None
        return (
            sequence.documents is None
            and sequence.cache is None
            and not windowed
            and not core.in_fp32
            and core.backend == "auto"
            and core.has_plain_scores
            and (core.cp_comm is None or core.takes_parts)
            and not isinstance(x, FakeTensor)
        )

    def __call__(self, x: Tensor, *args: Any) -> Tensor:
        """Map queries [s, b, n, d], keys [s, b, g, d] and values [s, b, g, e] to [s, b, n*e]."""
        k, v, sequence, scale = args
        key = ((x.shape[2], k.shape[2]), (x.shape[3], v.shape[3]), scale)
        if key not in self._modules:
            self._modules[key] = self._build(*key)
        module = self._modules[key]
        module.train(self._core.training)
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, k, v = (tensor.to(dtype) for tensor in (x, k, v))
        window = None if sequence.window is None else (sequence.window, 0)
        out: Tensor = module(
            x.contiguous(),
            k.contiguous(),
            v.contiguous(),
            attn_mask_type="causal" if sequence.causal else "no_mask",
            window_size=window,
        )
        return out


class PassedNorm:
    """Engine of a norm that the next layer's engine computes. Returns the input."""

    checkpoint: Callable[..., Any] | None = None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def takes(self, x: Tensor, *args: Any) -> bool:
        """See :class:`~megatron_lightning.layers.engine.Engine`."""
        return not isinstance(x, FakeTensor)

    def __call__(self, x: Tensor, *args: Any) -> Tensor:
        """Return ``x``."""
        return x
