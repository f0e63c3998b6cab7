"""Muon for stacked weights: torch's, an expert at a time."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lightning.errors import ConfigError

_STACKED = 3  # dims


class Muon(torch.optim.Muon):
    """:class:`torch.optim.Muon` also for stacked weights [E, out, in]. The update of each expert is
    orthogonalized separately.

    The momentum has the shape of the stack. Under ``MegatronStrategy`` gate and up of an expert are
    separate matrices, as with dense layers.

    Args:
        params: Parameters of two or three dims, or groups of such parameters.
        **options: Options of torch's Muon.

    Raises:
        ConfigError: For a parameter of other dims.
    """

    def __init__(self, params: Iterable[Any], **options: Any) -> None:
        groups = list(params)
        if groups and not isinstance(groups[0], dict):
            groups = [{"params": groups}]
        # torch's Muon checks the dims of the parameters given to the constructor.
        super().__init__([nn.Parameter(torch.empty(1, 1))] if groups else [], **options)
        self.param_groups.clear()
        for group in groups:
            self.add_param_group(group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group."""
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            is_convolution = parameter.ndim == _STACKED and parameter.shape[1] == 1  # depthwise
            if parameter.ndim not in (2, _STACKED) or is_convolution:
                raise ConfigError(
                    f"Muon was given a parameter of shape {tuple(parameter.shape)}, which is "
                    "neither a matrix nor a stack of matrices. Step it with another optimizer "
                    "alongside: ChainedOptimizer(Muon(...), AdamW(...))."
                )

    def _init_group(
        self,
        group: MutableMapping[str, Any],
        params_with_grad: list[Tensor],
        grads: list[Tensor],
        muon_momentum_bufs: list[Tensor],
    ) -> bool:
        """Return lists of matrices, with views of stacked tensors. torch's Muon steps the views in
        place.
        """
        lists = params_with_grad, grads, muon_momentum_bufs
        has_complex: bool = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = [
                matrix
                for tensor in tensors
                for matrix in (tensor.unbind() if tensor.ndim == _STACKED else (tensor,))
            ]
        return has_complex
