"""Layers with trained children of their own (adapters), and how a sharding plan sees them.

An :class:`Attachment` is a child of a layer: the layer keeps its class, names and forward. ``peft``
wraps layers instead. A plan names the layer's path in both cases, and the style of the row divides
the layer and what is attached to it.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

_BASES = ("base_layer", "original_module")
"""Names under which wrappers of ``peft`` keep the layer that they wrap."""


class Attachment(nn.Module):
    """A child of a layer: the layer's style divides it, and it fills itself with initial values."""

    def init_weights(self, name: str, tensor: Tensor) -> None:
        """Fill ``tensor``, which has the full shape of parameter ``name``, with its initial
        values.
        """
        raise NotImplementedError


def attachment_of(module: nn.Module) -> Attachment | None:
    """Return the attachment of a layer; None: it has none."""
    return next((child for child in module.children() if isinstance(child, Attachment)), None)


def is_wrapper(module: nn.Module) -> bool:
    """Return whether ``module`` is a wrapper of ``peft`` around one layer."""
    return type(module).__module__.startswith("peft.") and any(
        name in module._modules for name in _BASES
    )


def base_layer(module: nn.Module) -> nn.Module:
    """Return the layer that wrappers of ``peft`` wrap; other modules are returned."""
    while is_wrapper(module):
        module = next(module._modules[name] for name in _BASES if name in module._modules)  # type: ignore[assignment]
    return module


def is_extended(module: nn.Module) -> bool:
    """Return whether something is attached to a layer, or wraps it."""
    return is_wrapper(module) or attachment_of(module) is not None


def without_attachments(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield path and module of ``module`` and of everything in it, less what adapters consist of:
    attachments, and the contents of wrappers.
    """
    yield prefix, module
    for name, child in () if is_wrapper(module) else module.named_children():
        if not isinstance(child, Attachment):
            yield from without_attachments(child, f"{prefix}.{name}" if prefix else name)


def own_path(path: str) -> str:
    """Return the path of a module in the model that wrappers of ``peft`` were put into."""
    return ".".join(segment for segment in path.split(".") if segment not in _BASES)


def saved_copies(module: nn.Module) -> list[nn.Module]:
    """Return the trained copies of a layer in a wrapper of ``peft`` (``modules_to_save``)."""
    copies = module._modules.get("modules_to_save") if is_wrapper(module) else None
    return [] if copies is None else list(copies.children())
