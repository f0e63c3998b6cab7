"""Towers of images and sound in models of ``transformers``, by their configurations."""

from __future__ import annotations

from typing import Any

from torch import nn

from megatron_lightning.layers.adapters.adapter_layers import adapted_layers

_MARK = "called_with_images"


def towers_of(model: Any) -> dict[str, nn.Module]:
    """Return path -> module of the outermost towers: modules with a configuration of their own
    inside the model's, which is not that of the text model.
    """
    config: Any = getattr(model, "config", None)
    text = type(config.get_text_config()) if hasattr(config, "get_text_config") else None
    parts = (getattr(config, name, None) for name in getattr(config, "sub_configs", ()))
    kinds = {type(part) for part in parts if part is not None} - {text, type(config)}
    towers: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        is_inside = any(path.startswith(f"{outer}.") for outer in towers)
        if type(getattr(module, "config", None)) in kinds and not is_inside:
            towers[path] = module
    return towers


def mark_towers(model: nn.Module) -> None:
    """Mark towers and the modules beside them, such as projectors: batches without images do not
    call them.
    """
    towers = towers_of(model)
    for parent in {path.rpartition(".")[0] for path in towers}:
        for name, child in model.get_submodule(parent).named_children():
            path = f"{parent}.{name}" if parent else name
            if path in towers or not _holds_text(model, child):
                child.__dict__[_MARK] = True


def is_marked(module: nn.Module) -> bool:
    """Return whether batches without images do not call a module."""
    return _MARK in vars(module)


def _holds_text(model: Any, module: nn.Module) -> bool:
    """Return whether a module has the embedding or the output layer of the text."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    return any(one is end for one in module.modules() for end in ends if end is not None)


def adapted_towers(model: nn.Module) -> str | None:
    """Return a line that counts the adapted layers of towers. None: there are none."""
    counts = {path: len(adapted_layers(tower)) for path, tower in towers_of(model).items()}
    if not any(counts.values()):
        return None
    parts = ", ".join(f"{count} in {path}" for path, count in counts.items() if count)
    return (
        f"LoRA adapts {len(adapted_layers(model))} layers, of which {parts}. To leave a tower out, "
        f"set exclude_modules to a pattern, such as **.{next(iter(counts)).rpartition('.')[2]}.**."
    )
