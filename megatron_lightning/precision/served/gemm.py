"""A layer that multiplies by the values of its weight that a server will multiply by.

    forward      Y  = X Q(W)^T
    input_grad   dX = dY Q(W)
    weight_grad  dW = dY^T X

With rounded inputs X is Q(X) in both. Gradients are not rounded, and those of Q(W) and Q(X) are
passed to W and X (a straight-through estimator). The weight is first cast to the dtype of the GEMM,
as autocast casts it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.adapters.adapter_layers import adapters_of
from megatron_lightning.layers.adapters.stacked_adapters import StackedAdapters
from megatron_lightning.layers.adapters.weight_adapters import factors_of, summed
from megatron_lightning.layers.linear.gemm import Gemm, Operand, Role
from megatron_lightning.parallel.collectives import all_reduce
from megatron_lightning.parallel.grid.context import AxisGroup
from megatron_lightning.parallel.shards.spec import ShardSpec
from megatron_lightning.precision.served.inputs import is_of_token, rounded_inputs
from megatron_lightning.precision.served.rounding import Rounding
from megatron_lightning.precision.served.values import ServedFormat, encode


class ServedGemm(Gemm):
    """The GEMMs of a layer with a rounded weight.

    Args:
        form: The format.
        path: Path of the layer, for messages.
        layers: All layers that servers multiply as one matrix, with the gemm's first.
        rounding: Switch of the model.
        one_by_one: See the base class.
        rounded_as: Dtype of a weight before it is rounded. None: that of the GEMM.
        rounds_inputs: Whether inputs are rounded in the same format.
        rounds_weight: Whether the weight is rounded. False: it has rounded values.
    """

    differentiable = False  # the gradient of the rounding is passed on

    def __init__(
        self,
        form: ServedFormat,
        path: str,
        layers: tuple[nn.Module, ...],
        rounding: Rounding,
        *,
        one_by_one: bool = False,
        rounded_as: torch.dtype | None = None,
        rounds_inputs: bool = False,
        rounds_weight: bool = True,
    ) -> None:
        super().__init__(one_by_one=one_by_one)
        self.rounds_inputs = rounds_inputs
        self.rounds_weight = rounds_weight
        self.rounding = rounding
        self.rounded_as = rounded_as
        self.form = form
        self.path = path
        self.layers = layers

    def __repr__(self) -> str:
        return f"ServedGemm({self.form.name})"

    def value(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the rounded weight in ``dtype``. See the base class."""
        layer = self.layers[0]
        if not self.rounding.is_on:
            return summed(layer, weight)
        if not self.rounds_weight:
            check_shards(self.path, _spec_of(layer, "weight"), self.form)  # of inputs as well
            return summed(layer, weight)
        # The weight of an adapted layer is the parameter with an edge to its adapters.
        parameter = layer._parameters.get("weight")
        source = weight if parameter is None else parameter
        source = source if source.data_ptr() == weight.data_ptr() else weight
        factors = factors_of(layer)
        return self.rounding.value(
            self.path, source, dtype, lambda: self._value(weight, dtype), factors
        )

    def _value(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        with torch.no_grad(), torch.autocast(weight.device.type, enabled=False):
            weight = summed(self.layers[0], weight.detach()).to(self.rounded_as or dtype)
            amax = self._shared_amax(weight)
            return encode(weight, self.form, amax).values(self.form).to(dtype)

    def operand(
        self,
        tensor: Tensor,
        role: Role,
        *,
        transposed: bool = False,
        counts: Tensor | None = None,
    ) -> Operand:
        """Return an input rounded, and other tensors as they are. See the base class."""
        if role == "input" and self.rounds_inputs:
            tensor = self._rounded_input(tensor)
        return super().operand(tensor, role, transposed=transposed, counts=counts)

    def _rounded_input(self, x: Tensor) -> Tensor:
        scales, amax = self.rounding.inputs, None
        if not self.rounding.is_on:
            if scales is not None:
                scales.note(self.path, x)
            return x
        if scales is not None:
            amax = scales.of(self.path, x)
            return x if amax is None else rounded_inputs(x, self.form, amax)
        if is_of_token(self.form) and _divides(self.layers[0], -1):
            amax = self._over_ranks(x.abs().amax(-1, keepdim=True))
        return rounded_inputs(x, self.form, amax)

    def forward(
        self, x: Operand, weight: Operand, bias: Tensor | None = None, counts: Tensor | None = None
    ) -> Tensor:
        """See the base class."""
        return super().forward(x, self._rounded(weight, x), bias, counts)

    def input_grad(self, grad: Operand, weight: Operand, counts: Tensor | None = None) -> Tensor:
        """See the base class."""
        return super().input_grad(grad, self._rounded(weight, grad), counts)

    def _rounded(self, weight: Operand, like: Operand) -> Operand:
        return Operand(self.value(weight.data, like.data.dtype))

    def _shared_amax(self, weight: Tensor) -> Tensor | None:
        """Return what a part of the fused matrix does not know alone: of all parts and ranks."""
        check_shards(self.path, _spec_of(self.layers[0], "weight"), self.form)
        amax = self.form.shared_amax(weight)
        if amax is None:
            return None
        if not self.form.is_of_matrix:  # of a row, which ranks of a row-parallel layer divide
            return self._over_ranks(amax) if _divides(self.layers[0], -1) else amax
        for layer in self.layers[1:]:
            other: Any = layer.weight
            part = self.form.shared_amax(summed(layer, other.detach()).to(weight.dtype))
            amax = amax if part is None else torch.maximum(amax, part)
        return self._over_ranks(amax)

    def _over_ranks(self, amax: Tensor) -> Tensor:
        groups = (getattr(layer, "group", None) for layer in self.layers)
        group = next((g for g in groups if isinstance(g, AxisGroup) and g.size > 1), None)
        return amax if group is None else all_reduce(amax, group, "max")


def _spec_of(module: nn.Module, name: str) -> ShardSpec | None:
    specs: dict[str, ShardSpec] = getattr(module, "shard_specs", {})
    return specs.get(name)


def _divides(layer: nn.Module, dim: int) -> bool:
    """Return whether ranks hold parts of a dim of the weight."""
    spec = _spec_of(layer, "weight")
    return spec is not None and spec.boxes[0].shape[dim] != spec.global_shape[dim]


def check_shards(path: str, spec: ShardSpec | None, form: ServedFormat) -> None:
    """Check that no scale belongs to values of several ranks that do not share an amax.

    Raises:
        ConfigError: If tensor-parallel ranks cut a block, with the ranks that do not.
    """
    if spec is None:
        return
    for dim, size in ((-1, form.block.columns), (-2, form.block.rows)):
        full, own = spec.global_shape[dim], [box.shape[dim] for box in spec.boxes]
        if size is None or sum(own) == full or all(n % size == 0 for n in own):
            continue
        num_ranks = full // sum(own)
        parts = full // len(own)
        fitting = [n for n in range(1, num_ranks) if parts % (n * size) == 0]
        largest = fitting[-1] if fitting else 1
        raise ConfigError(
            f"qat rounds {path} to {form.name}, with {size} values of a "
            f"{'row' if dim == -1 else 'column'} to a scale, and {num_ranks} tensor-parallel ranks "
            f"cut its {full:,} into parts of {own[0]:,}. Set tensor_model_parallel_size to "
            f"{largest}, or qat to fp8_channel."
        )


# ----------------------------------------------------------------------------------------- experts


class ServedStack:
    """Forward hooks of a module that holds the experts' weights itself, as in ``transformers`` 5.
    During a call the parameters' names hold rounded values.

    Args:
        form: The format.
        path: Path of the module, for messages.
        names: The parameters [E, out, in].
        rounding: Switch of the model.
    """

    def __init__(
        self, form: ServedFormat, path: str, names: tuple[str, ...], rounding: Rounding
    ) -> None:
        self.form = form
        self.path = path
        self.names = names
        self.rounding = rounding

    def attach(self, module: nn.Module) -> None:
        """Add the hooks to the module."""
        module.register_forward_pre_hook(self.set_values)
        module.register_forward_hook(self.remove_values, always_call=True)

    def set_values(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Forward pre-hook: make the names hold rounded values."""
        adapters = adapters_of(module)
        sums: dict[str, Tensor] = {}
        if isinstance(adapters, StackedAdapters) and adapters.enabled:
            sums = adapters.sums(module)
        for name in self.names if self.rounding.is_on else ():
            weight: Any = sums.get(name, module._parameters[name])
            self._check(module, name)
            # Before _parameters, which keep the parameter, in the lookup of an attribute.
            vars(module)[name] = self._value(name, weight)

    def _value(self, name: str, weight: Tensor) -> Tensor:
        device, dtype = weight.device.type, weight.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)

        @torch.no_grad()
        def rounded() -> Tensor:
            values = encode(weight.detach().to(dtype), self.form).values(self.form)
            return values.to(weight.dtype)

        value = self.rounding.value(f"{self.path}.{name}", weight, weight.dtype, rounded)
        result: Tensor = _StraightThrough.apply(weight, value)  # type: ignore[no-untyped-call]
        return result

    def remove_values(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Forward hook: make the names hold parameters again."""
        for name in self.names:
            vars(module).pop(name, None)

    def _check(self, module: nn.Module, name: str) -> None:
        spec = _spec_of(module, name)
        if spec is not None and spec.boxes[0].shape[-2:] != spec.global_shape[-2:]:
            raise ConfigError(
                f"qat rounds {self.path}.{name} matrix by matrix, and tensor-parallel ranks hold "
                "parts of the matrices. Set expert_tensor_parallel_size to 1 and divide the "
                "experts by expert_model_parallel_size."
            )


class _StraightThrough(torch.autograd.Function):
    """Rounded values of a weight, with the gradient passed on."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
