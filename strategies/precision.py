"""Precision plugins: Lightning's own, made right for several ranks.

``Trainer(precision=...)`` builds Lightning's plugin. The strategy replaces Lightning's plugin by
ours, so strings and plugins both work:

    32-true      as Lightning's
    bf16-mixed   as Lightning's: fp32 weights, autocast
    16-mixed     autocast, and Megatron's dynamic loss scaling. All ranks agree on overflow
    bf16-true    bf16 weights. Main params and reductions are fp32. Masks and positions are kept
    16-true      as bf16-true, in fp16 without a loss scale, like Lightning's

On the CPU Lightning turns the string ``16-mixed`` into ``bf16-mixed``. The plugin itself runs
there: ``Trainer(plugins=[MegatronMixedPrecision("16-mixed", device="cpu")])``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from megatron_lightning.config import LossScaleOptions
from megatron_lightning.errors import ConfigError
from megatron_lightning.optim.loss_scale import DynamicLossScale, unscale_
from megatron_lightning.parallel.grid.context import AxisGroup


class MegatronMixedPrecision(MixedPrecision):
    """Autocast in fp16 or bf16 with fp32 weights, for fp16 with a dynamic loss scale.

    Args:
        precision: ``"16-mixed"`` or ``"bf16-mixed"``.
        device: Kind of device, such as ``"cuda"``.
        loss_scale: Rules for the scale of ``16-mixed``. None: Megatron's defaults.
    """

    def __init__(
        self,
        precision: Literal["16-mixed", "bf16-mixed"],
        device: str = "cuda",
        loss_scale: LossScaleOptions | None = None,
    ) -> None:
        # Without Lightning's GradScaler for fp16.
        super().__init__("bf16-mixed", device)
        if precision not in ("16-mixed", "bf16-mixed"):
            raise ConfigError(
                f'precision is {precision!r} for {type(self).__name__}. Set it to "16-mixed" or '
                '"bf16-mixed".'
            )
        self.precision = precision
        self.loss_scale = DynamicLossScale(loss_scale) if precision == "16-mixed" else None
        self.ranks: AxisGroup | None = None
        """All ranks, for a common verdict on overflow. Set by the strategy."""
        self.read_by: Callable[[Optimizer], list[Tensor]] | None = None
        """Returns the gradients about to be read by an optimizer, including gradients of main
        params. Set by the strategy.
        """
        self._scaled_by = 1.0  # factor of the losses behind the current gradients
        self.step_skipped = False
        """Whether the last optimizer step was skipped because of an overflow."""

    @property
    def scale(self) -> float:
        """Factor of the losses."""
        return 1.0 if self.loss_scale is None else self.loss_scale.scale

    def pre_backward(self, tensor: Tensor, module: pl.LightningModule) -> Tensor:  # type: ignore[override]
        """Scale the loss, then run the hooks on the scaled loss."""
        self._scaled_by = self.scale
        scaled = tensor if self.loss_scale is None else tensor.float() * self.scale
        return super().pre_backward(scaled, module)

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run the closure, unscale, run hooks and clipping, and step unless a gradient of any rank
        overflowed.

        Raises:
            ConfigError: For LBFGS, since LBFGS evaluates the loss several times a step.
        """
        if self.loss_scale is None:
            return super().optimizer_step(optimizer, model, closure, **kwargs)
        if isinstance(optimizer, LBFGS):
            raise ConfigError(
                "LBFGS evaluates the loss several times a step, and 16-mixed scales it once. Set "
                "another precision."
            )
        self.step_skipped = False
        # The closure runs before the step, and not inside as in Lightning, since only its gradients
        # show whether there is a step.
        result = closure()
        # There are no gradients: ``training_step`` returned None.
        if result is None and model.automatic_optimization:
            self._after_closure(model, optimizer)
            return result
        overflowed = self._unscale(optimizer, model.device)
        self._after_closure(model, optimizer)
        self.step_skipped = overflowed
        self.loss_scale.update(overflowed)
        return result if overflowed else optimizer.step(**kwargs)

    def _unscale(self, optimizer: Optimizer, device: torch.device) -> bool:
        """Divide this optimizer's gradients by the scale. Return whether a gradient on any rank is
        not finite.
        """
        gradients = [
            p.grad
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        gradients = gradients if self.read_by is None else self.read_by(optimizer)
        # Another optimizer's step may have moved the scale since.
        overflow = unscale_(gradients, self._scaled_by, device)
        if self.ranks is not None and self.ranks.process_group is not None:
            dist.all_reduce(overflow, dist.ReduceOp.MAX, group=self.ranks.process_group)
        return bool(overflow.item())

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loss scale."""
        return {} if self.loss_scale is None else self.loss_scale.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the loss scale."""
        if self.loss_scale is not None:
            self.loss_scale.load_state_dict(state_dict)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the loss scale under the name of a plain Trainer's plugin, too."""
        if self.loss_scale is not None:
            checkpoint[MixedPrecision.__qualname__] = self.loss_scale.torch_state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take over the loss scale saved by a plain Trainer under the name of Lightning's
        plugin.
        """
        theirs = checkpoint.get(MixedPrecision.__qualname__)
        if theirs and type(self).__qualname__ not in checkpoint:
            self.load_state_dict(theirs)


class MegatronHalfPrecision(HalfPrecision):
    """bf16 or fp16 weights. The batch is cast to the same dtype, except for entries that must stay
    exact.

    Args:
        precision: ``"bf16-true"`` or ``"16-true"``.
        keep: Name patterns of batch entries with unchanged dtype. Loss masks with weights and
            fractional positions lose digits in bf16: 257 becomes 256.
    """

    def __init__(
        self,
        precision: Literal["bf16-true", "16-true"],
        keep: Sequence[str] = ("*mask*", "*position*"),
    ) -> None:
        super().__init__(precision)
        self.keep = tuple(keep)

    def convert_input(self, data: Any) -> Any:
        """Cast floating tensors of a batch. Entries of (nested) mappings with a name matching
        ``keep`` stay unchanged.
        """
        if isinstance(data, Mapping):
            entries = {
                name: value if self._keeps(name) else self.convert_input(value)
                for name, value in data.items()
            }
            kind: Any = type(data)
            return kind(entries)
        if isinstance(data, list | tuple):
            items = [self.convert_input(item) for item in data]
            return type(data)(*items) if hasattr(data, "_fields") else type(data)(items)
        return super().convert_input(data)

    def _keeps(self, name: object) -> bool:
        return isinstance(name, str) and any(
            fnmatch(name.lower(), pattern) for pattern in self.keep
        )


def megatron_plugin(plugin: Precision) -> Precision:
    """Return our counterpart of a plugin of Lightning's. All other plugins are returned unchanged.

    Raises:
        ConfigError: If the plugin was given a gradient scaler of its own.
    """
    if type(plugin) is MixedPrecision:
        _check_default_scaler(plugin)
        return MegatronMixedPrecision(
            "16-mixed" if plugin.precision == "16-mixed" else "bf16-mixed", plugin.device
        )
    if type(plugin) is HalfPrecision:
        return MegatronHalfPrecision(plugin.precision)
    return plugin


def _check_default_scaler(plugin: MixedPrecision) -> None:
    scaler = plugin.scaler
    if scaler is None:
        return
    default = torch.amp.GradScaler(device=plugin.device)
    settings = ("_init_scale", "_growth_factor", "_backoff_factor", "_growth_interval")
    if type(scaler) is not type(default) or any(
        getattr(scaler, name) != getattr(default, name) for name in settings
    ):
        raise ConfigError(
            f"MixedPrecision has a {type(scaler).__name__} of its own, and MegatronStrategy keeps "
            "the loss scale itself, equal "
            'on all ranks. Pass MegatronMixedPrecision("16-mixed", '
            "loss_scale=LossScaleOptions(...)) instead."
        )
