"""Layers with trained children of their own (adapters), and the paths of layers in a sharding plan.

An :class:`Attachment` is a child of a layer: the layer keeps class, names and forward. ``peft``
wraps layers instead. A plan names the layer's path in both cases, and the style of the row divides
the layer and the attachments.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from torch import Tensor, nn

_BASES = ("base_layer", "original_module")
"""Names of the wrapped layer in wrappers of ``peft``."""


class Attachment(nn.Module, ABC):
    """A child of a layer, sharded by the layer's style, with an initialization of its own."""

    @abstractmethod
    def init_weights(self, name: str, tensor: Tensor) -> None:
        """Fill ``tensor``, of the full shape of parameter ``name``, with the initial values."""


def attachment_of(module: nn.Module) -> Attachment | None:
    """Return the attachment of a layer. None: no attachment."""
    return next((child for child in module.children() if isinstance(child, Attachment)), None)


def is_wrapper(module: nn.Module) -> bool:
    """Return whether ``module`` is a wrapper of ``peft`` around a layer."""
    return type(module).__module__.startswith("peft.") and any(
        name in module._modules for name in _BASES
    )


def base_layer(module: nn.Module) -> nn.Module:
    """Return the layer wrapped by wrappers of ``peft``. Any other module is returned unchanged."""
    while is_wrapper(module):
        module = next(module._modules[name] for name in _BASES if name in module._modules)  # type: ignore[assignment]
    return module


def is_extended(module: nn.Module) -> bool:
    """Return whether a layer has an attachment or a wrapper."""
    return is_wrapper(module) or attachment_of(module) is not None


def without_attachments(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield path and module of ``module`` and of everything inside, without the modules of
    adapters: attachments, and the contents of wrappers.
    """
    yield prefix, module
    for name, child in () if is_wrapper(module) else module.named_children():
        if not isinstance(child, Attachment):
            yield from without_attachments(child, f"{prefix}.{name}" if prefix else name)


def own_path(path: str) -> str:
    """Return the path of a module in the model before ``peft`` wrapped layers."""
    return ".".join(segment for segment in path.split(".") if segment not in _BASES)


def saved_copies(module: nn.Module) -> list[nn.Module]:
    """Return the trained copies of a layer in a wrapper of ``peft`` (``modules_to_save``)."""
    copies = module._modules.get("modules_to_save") if is_wrapper(module) else None
    return [] if copies is None else list(copies.children())
