"""Checkpoints of adapters without the weights of their base."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

from torch import nn

from megatron_lightning.assembly.state.module_shards import ModuleState
from megatron_lightning.errors import CheckpointError, ConfigError
from megatron_lightning.models.teacher_student import FrozenPair
from megatron_lightning.parallel.shards.tensor_shards import TensorShards
from megatron_lightning.peft.base_digest import digest_of_part, frozen_names
from megatron_lightning.peft.lora import applied_to
from megatron_lightning.peft.record import PEFT, Record, base_of, read_records, write_record

_MODULE = "state_dict."


def check_adapters_only(module: nn.Module, *, adapters_only: bool) -> None:
    """Check that a module has adapters if checkpoints are to hold adapters only.

    Raises:
        ConfigError: If LoRA was not applied to the module.
    """
    if adapters_only and not applied_to(module):
        foreign = any(type(child).__module__.startswith("peft.") for child in module.modules())
        raise ConfigError(
            f"adapters_only=True of CheckpointOptions, and {type(module).__name__} has no adapters"
            f"{' of this library (those of peft are saved with their model)' if foreign else ''}. "
            "Apply megatron_lightning.peft.LoRA(...), or leave the option out."
        )


class AdapterCheckpoints:
    """Describes adapters in the checkpoints of a run, and leaves out the base on request.

    Args:
        adapters_only: Whether to leave out the base.
    """

    def __init__(self, *, adapters_only: bool) -> None:
        self._adapters_only = adapters_only
        self._digests: dict[str, str] = {}  # the base is frozen

    def write_to(
        self, checkpoint: dict[str, Any], tensors: list[TensorShards], state: ModuleState
    ) -> list[TensorShards]:
        """Describe the adapters in Lightning's dict. Return the tensors to save. All ranks call
        this.
        """
        write_record(state.module, checkpoint)
        # A base in few bits is not saved: its own values are in its folder.
        is_rounded = any(one.lora.base is not None for one in applied_to(state.module).values())
        if not (self._adapters_only or is_rounded) or PEFT not in checkpoint:
            return tensors
        frozen, beside = set(frozen_names(state.module)), set(_beside(state.module))
        everywhere = state.context.pp.all_gather_object(sorted(frozen))
        other_names = {name for rank in state.context.pp.all_gather_object(beside) for name in rank}
        for path, entry in checkpoint[PEFT].items():
            prefix = f"{path}." if path else ""
            names = {name for rank in everywhere for name in rank if name.startswith(prefix)}
            digest = self._digest(state, path, names)
            base = replace(base_of(state.module.get_submodule(path)), digest=digest)
            own = [
                name
                for name in other_names
                if prefix.startswith(f"{name.partition('.frozen.')[0]}.")
            ]
            entry |= {"left_out": sorted(names), "beside": sorted(own), "base": asdict(base)}
        left_out = frozen | beside
        return [tensor for tensor in tensors if tensor.name.removeprefix(_MODULE) not in left_out]

    def describe(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """Return the manifest's entries about left-out tensors."""
        records = [record for record in read_records(checkpoint) if record.left_out]
        return (
            {
                "left_out": {
                    record.path: {
                        "tensors": len(record.left_out),
                        "why": "frozen weights of the base",
                        "base": asdict(record.base),
                    }
                    for record in records
                }
            }
            if records
            else {}
        )

    def check_base(self, checkpoint: Mapping[str, Any], state: ModuleState) -> None:
        """Check the module's weights against the base of the loaded adapters. All ranks call this.

        Raises:
            CheckpointError: On every rank, if the module has other weights.
        """
        for record in read_records(checkpoint):
            if record.left_out and record.base.digest is not None:
                _check_paths(state.module, record)
                digest = self._digest(state, record.path, record.left_out)
                record.base.check(digest, record.path or "the module")

    def _digest(self, state: ModuleState, path: str, names: Collection[str]) -> str:
        """Return the digest of parameters of the model at ``path``. A collective on the first call
        for a set of parameters.
        """
        key = f"{path} {hash(frozenset(names))}"  # of one process
        if key not in self._digests:
            self._digests[key] = digest_of_part(state, path, names)
        return self._digests[key]


def _beside(module: nn.Module) -> Iterator[str]:
    """Yield the names of the tensors of frozen models beside adapted models."""
    adapted = tuple(f"{path}." for path in applied_to(module))
    for path, child in module.named_modules():
        prefix = f"{path}." if path else ""
        if isinstance(child, FrozenPair) and any(one.startswith(prefix) for one in adapted):
            for name in child.frozen.state_dict():
                yield f"{prefix}frozen.{name}"


def _check_paths(module: nn.Module, record: Record) -> None:
    if record.path not in applied_to(module):
        raise CheckpointError(
            f"the checkpoint holds adapters of {record.path or 'the module'} alone, and "
            f"{type(module).__name__} has none there. Set peft=LoRA(...) as it was, or apply LoRA "
            "to that model."
        )
