"""Routes of tokens: recorded while text is written, and replayed in training.

Text and training compute the same token with other roundings, so that routers near a tie choose
other experts, and the probability of a token differs between rollout and training (R3,
https://arxiv.org/abs/2510.11370). A replay gives each token the experts of the rollout. The weights
of the experts stay scores of the trained router, so that the router has gradients.

Shapes: ``t`` = s b tokens, sequence-major, ``m`` layers of experts, ``k`` experts of a token, ``E``
experts.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lightning.config.moe import MoEConfig
from megatron_lightning.errors import ConfigError


class Routes(Protocol):
    """Routes of the tokens of a forward, as seen by a layer of experts."""

    def given(self, layer: int | None, first: int, count: int) -> Tensor | None:
        """Return the experts [count, k] of tokens ``first`` to ``first + count`` - 1, beyond the
        end -1. None: the router chooses.
        """

    def take(self, layer: int | None, first: int, chosen: Tensor) -> None:
        """Take the choices [count, E] of tokens from ``first`` on."""


class GivenRoutes:
    """Routes to replay.

    Args:
        experts: [b, s, m, k] experts. Negative: the router chooses the experts of the token.
    """

    def __init__(self, experts: Tensor) -> None:
        self._experts = experts

    @classmethod
    def of(
        cls, experts: Tensor, tokens: Tensor, moe: MoEConfig | None, num_layers: int
    ) -> GivenRoutes:
        """Return the routes of ``tokens`` [b, s].

        Raises:
            ConfigError: If the routes are of another model, or of other tokens.
        """
        top = 0 if moe is None else moe.router_topk
        expected_shape = (*tokens.shape, num_layers, top)
        if not num_layers or experts.shape != expected_shape or experts.is_floating_point():
            raise ConfigError(
                f"routes have the shape {list(experts.shape)} and dtype {experts.dtype}, and the "
                f"tokens {list(tokens.shape)} of a model with {num_layers} layers of experts and "
                f"{top} experts a token have routes {list(expected_shape)} of integers. Pass the "
                "routes of these tokens, recorded by the same model, with -1 where there are none."
            )
        return cls(experts)

    def given(self, layer: int | None, first: int, count: int) -> Tensor | None:
        """See :class:`Routes`."""
        if layer is None:
            return None
        tokens = self._experts[:, :, layer].transpose(0, 1).flatten(0, 1)[first : first + count]
        return F.pad(tokens, (0, 0, 0, count - len(tokens)), value=-1)

    def take(self, layer: int | None, first: int, chosen: Tensor) -> None:
        """See :class:`Routes`."""


class TakenRoutes:
    """Records the choices of this rank's layers for this rank's tokens."""

    def __init__(self) -> None:
        self.experts: list[tuple[int, int, Tensor]] = []
        """Layer, first token, and experts [count, k] of tokens from the first on."""

    def given(self, layer: int | None, first: int, count: int) -> Tensor | None:
        """See :class:`Routes`."""
        return None

    def take(self, layer: int | None, first: int, chosen: Tensor) -> None:
        """See :class:`Routes`."""
        if layer is not None:
            experts = chosen.nonzero()[:, 1].view(len(chosen), -1)
            self.experts.append((layer, first, experts.to(torch.int32)))
