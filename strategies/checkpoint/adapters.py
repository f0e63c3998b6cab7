"""Checkpoints of adapters without the weights of their base."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

from torch import nn

from megatron_lightning.assembly.module_shards import ModuleState
from megatron_lightning.errors import CheckpointError, ConfigError
from megatron_lightning.layers.adapters import adapted_layers
from megatron_lightning.parallel.digest import as_text, digest_of_shards
from megatron_lightning.parallel.tensor_shards import TensorShards
from megatron_lightning.peft.lora import applied_to
from megatron_lightning.peft.record import PEFT, Record, base_of, read_records, write_record
from megatron_lightning.peft.sources import take_expected_bases

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
        if not self._adapters_only or PEFT not in checkpoint:
            return tensors
        frozen = set(_frozen(state.module))
        everywhere = state.context.pp.all_gather_object(sorted(frozen))
        for path, entry in checkpoint[PEFT].items():
            prefix = f"{path}." if path else ""
            names = {name for rank in everywhere for name in rank if name.startswith(prefix)}
            digest = self._digest(state, path, names)
            base = replace(base_of(state.module.get_submodule(path)), digest=digest)
            entry |= {"left_out": sorted(names), "base": asdict(base)}
        return [tensor for tensor in tensors if tensor.name.removeprefix(_MODULE) not in frozen]

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
            self._digests[key] = _digest_of(state, path, names)
        return self._digests[key]


def check_loaded_base(state: ModuleState) -> None:
    """Check the weights of models against the base of adapters loaded earlier by ``load_adapters``,
    when the models had no weights yet. All ranks call this when the weights are read.

    Raises:
        CheckpointError: On every rank, if a model has other weights.
    """
    for path, base in take_expected_bases(state.module).items():
        prefix = f"{path}." if path else ""
        names = [name for name in _frozen(state.module) if name.startswith(prefix)]
        base.check(_digest_of(state, path, names), path or type(state.module).__name__)


def _digest_of(state: ModuleState, path: str, names: Collection[str]) -> str:
    """Return the digest of parameters of the model at ``path``. A collective."""
    prefix = f"{path}." if path else ""
    chosen = set(names)
    shards = (
        state.shards(name.removeprefix(prefix), name, parameter.detach())
        for name, parameter in state.module.named_parameters()
        if name in chosen and name not in state.part.tied
    )
    own = digest_of_shards(shards)
    total = sum(state.context.axis("world").all_gather_object(own))
    record: dict[str, Any] = {}
    write_record(state.module, record)
    return as_text(total, record[PEFT][path]["names"])


def _frozen(module: nn.Module) -> Iterator[str]:
    """Yield the names of the frozen weights of adapted models. A tied weight has several names."""
    for path in applied_to(module):
        model = module.get_submodule(path)
        own = tuple(f"{layer}.adapters." for layer in adapted_layers(model))
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if not parameter.requires_grad and not name.startswith(own):
                yield f"{path}.{name}" if path else name


def _check_paths(module: nn.Module, record: Record) -> None:
    if record.path not in applied_to(module):
        raise CheckpointError(
            f"the checkpoint holds adapters of {record.path or 'the module'} alone, and "
            f"{type(module).__name__} has none there. Set peft=LoRA(...) as it was, or apply LoRA "
            "to that model."
        )
