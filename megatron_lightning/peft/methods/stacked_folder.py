"""Low-rank adapters of stacked experts in folders of ``peft``.

``peft`` stores the experts of a parameter flat, with the expert fastest in B:

    <module of experts>.lora_A.weight               [E r, in]    of down_proj
    <module of experts>.lora_B.weight               [out, r E]
    <module of experts>.base_layer.lora_A.weight    of gate_up_proj, if both are adapted: the module
                                                    is wrapped twice, and the inner wrapper has the
                                                    first parameter
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from megatron_lightning.errors import CheckpointError, ConfigError
from megatron_lightning.file_names import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from megatron_lightning.layers.adapters.low_rank import A, B

STACKED = ("gate_up_proj", "down_proj")
"""Parameters of a module of stacked experts, in the order of wrapping by ``peft``."""


def key_of(layer: str, stacked: Collection[str]) -> str:
    """Return the name of an expert's parameter before ".lora_A".

    Args:
        layer: Path of the parameter.
        stacked: Paths of all adapted parameters of experts.
    """
    owner, _, name = layer.rpartition(".")
    is_inner = name == STACKED[0] and f"{owner}.{STACKED[1]}" in stacked
    return f"{owner}.base_layer" if is_inner else owner


def stacked_name(key: str, config: Mapping[str, Any], keys: Collection[str]) -> str | None:
    """Return the path of the experts' parameter behind a key. None: the key is a layer's.

    Raises:
        ConfigError: If the parameters are no experts of ``transformers`` 5.
    """
    ends: list[str] = config.get("target_parameters") or []
    unknown = [end for end in ends if end.rpartition(".")[2] not in STACKED]
    if unknown:
        raise ConfigError(
            f"{ADAPTER_CONFIG} has target_parameters={ends!r}, and stacked experts (gate_up_proj, "
            "down_proj) are the parameters that are supported."
        )
    owner = key.removesuffix(".base_layer")
    for end in ends:
        module, _, name = end.rpartition(".")
        if owner == module or owner.endswith(f".{module}"):
            has_both = f"{owner}.base_layer" in keys
            if not has_both or (name == STACKED[0]) == (owner != key):
                return f"{owner}.{name}"
    return None


def flat(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return factors of stacked experts in the form of ``peft``."""
    return {A: tensors[A].flatten(0, 1), B: tensors[B].permute(1, 2, 0).flatten(1)}


def unflat(tensors: Mapping[str, Tensor], rank: int, folder: object) -> dict[str, Tensor]:
    """Return factors [E, r, in] and [E, out, r] of stacked experts.

    Raises:
        CheckpointError: If the rows are of another rank.
    """
    first, second = tensors[A], tensors[B]
    rows = len(first)
    if rows % rank:
        raise CheckpointError(
            f"{folder}/{ADAPTER_WEIGHTS}: lora_A of stacked experts has {rows} rows, which are no "
            f"multiple of the rank {rank} in {ADAPTER_CONFIG}."
        )
    second = second.view(len(second), rank, rows // rank).permute(2, 0, 1).contiguous()
    return {A: first.view(rows // rank, rank, -1), B: second}
