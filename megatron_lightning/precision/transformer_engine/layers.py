"""torch's norms with a place for an engine.

A change of class converts a norm to the engine class and back.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from megatron_lightning.layers.engine import Engine
from megatron_lightning.layers.linear import make_adaptable, make_plain
from megatron_lightning.layers.norm import RMSNorm


class EngineRMSNorm(nn.RMSNorm):
    """An ``nn.RMSNorm`` computed by an engine."""

    engine: Engine | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Normalize [..., size]."""
        if self.engine is not None and self.engine.takes(x):
            return self.engine(x)
        return super().forward(x)


class EngineModelRMSNorm(EngineRMSNorm, RMSNorm):
    """The RMSNorm of our models, computed by an engine."""


class EngineLayerNorm(nn.LayerNorm):
    """An ``nn.LayerNorm`` computed by an engine."""

    engine: Engine | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Normalize [..., size]."""
        if self.engine is not None and self.engine.takes(input):
            return self.engine(input)
        return super().forward(input)


_WITH_ENGINE: Mapping[type[nn.Module], type[nn.Module]] = {
    nn.RMSNorm: EngineRMSNorm,
    RMSNorm: EngineModelRMSNorm,
    nn.LayerNorm: EngineLayerNorm,
}
_PLAIN: Mapping[type[nn.Module], type[nn.Module]] = {
    changed: plain for plain, changed in _WITH_ENGINE.items()
}


def put_engine(layer: nn.Module, engine: Engine) -> None:
    """Replace the computation of ``layer`` by ``engine``."""
    make_adaptable(layer)
    layer.__class__ = _WITH_ENGINE.get(type(layer), type(layer))
    layer.engine = engine  # type: ignore[assignment]


def remove_engines(module: nn.Module) -> None:
    """Restore the own computation of all layers of ``module``."""
    for child in module.modules():
        vars(child).pop("engine", None)
        make_plain(child)
        child.__class__ = _PLAIN.get(type(child), type(child))
