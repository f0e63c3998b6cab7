"""Towers of images and sound in models of ``transformers``, by their configurations."""

from __future__ import annotations

from typing import Any

from torch import nn

from megatron_lightning.layers.adapters.adapter_layers import adapted_layers


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
