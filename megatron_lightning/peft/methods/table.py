"""All methods of adapters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from megatron_lightning.peft.methods.lora import LoRA
from megatron_lightning.peft.methods.method import AdapterMethod
from megatron_lightning.peft.methods.vera import VeRA

METHODS: Mapping[str, type[AdapterMethod]] = MappingProxyType(
    {method.peft_type: method for method in (LoRA, VeRA)}
)
"""Name of a method in folders of ``peft`` and in checkpoints -> method."""


def settings_of(method: AdapterMethod) -> dict[str, Any]:
    """Return a method as plain settings."""
    name = {} if isinstance(method, LoRA) else {"method": method.peft_type}
    return {**name, **asdict(method)}


def method_of(settings: Mapping[str, Any]) -> AdapterMethod:
    """Undo :func:`settings_of`."""
    fields = dict(settings)
    return METHODS[fields.pop("method", LoRA.peft_type)](**fields)
