"""Checkpoints without frozen weights: of trained weights alone, or of adapters alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

from torch import nn

from megatron_lightning.assembly.state.left_out import (
    LEFT_OUT,
    FrozenWeights,
    check_parts,
    left_out_digests,
)
from megatron_lightning.assembly.state.module_shards import ModuleState
from megatron_lightning.config.training import CheckpointOptions
from megatron_lightning.errors import CheckpointError, ConfigError
from megatron_lightning.layers.adapters.adapter_layers import adapted_layers
from megatron_lightning.models.teacher_student import FrozenPair
from megatron_lightning.parallel.shards.tensor_shards import TensorShards
from megatron_lightning.peft.base_digest import digest_of_part
from megatron_lightning.peft.methods.applied import applied_to
from megatron_lightning.peft.record import PEFT, Record, base_of, read_records, write_record
from megatron_lightning.precision.served.qat import write_qat

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


class LeftOutWeights:
    """Leaves frozen weights out of the checkpoints of a run, on request, and checks the module's
    own when a checkpoint without them is loaded.

    ``trainable_only`` leaves out all frozen parameters, ``adapters_only`` those of adapted models.
    A base in few bits is left out always, since its own values are in its folder. Buffers are saved
    (a frozen norm may count), and so are parameters that change though frozen, such as averages.

    Args:
        options: Which weights checkpoints hold.
    """

    def __init__(self, options: CheckpointOptions) -> None:
        self._options = options
        self._frozen = FrozenWeights()
        self._digests: dict[str, str] = {}  # the base is frozen

    def before_load(self, state: ModuleState) -> None:
        """Record what the module makes itself. All ranks call this before values are loaded."""
        if self._leaves_out(state.module):
            self._frozen.before_load(state)

    def begin(self, state: ModuleState) -> None:
        """Record the frozen weights at the begin of a fit. All ranks call this."""
        if self._leaves_out(state.module):
            self._frozen.begin(state)

    def write_to(
        self, checkpoint: dict[str, Any], tensors: list[TensorShards], state: ModuleState
    ) -> list[TensorShards]:
        """Describe adapters and left-out weights in Lightning's dict. Return the tensors to save.
        All ranks call this.
        """
        write_record(state.module, checkpoint)
        write_qat(state.module, checkpoint)
        if not self._leaves_out(state.module):
            return tensors
        left_out = self._left_out(state)
        checkpoint[LEFT_OUT] = left_out
        beside = {name for rank in _gathered(state, _beside(state.module)) for name in rank}
        for path, entry in checkpoint.get(PEFT, {}).items():
            prefix = f"{path}." if path else ""
            base = {n for n in left_out if n.startswith(prefix) and n not in beside}
            if base:
                model = state.module.get_submodule(path)
                digest = self._digest(state, path, base)
                own = [n for n in beside if prefix.startswith(f"{n.partition('.frozen.')[0]}.")]
                entry |= {
                    "left_out": sorted(base),
                    "beside": sorted(own),
                    "base": asdict(replace(base_of(model), digest=digest)),
                }
        return [tensor for tensor in tensors if tensor.name.removeprefix(_MODULE) not in left_out]

    def describe(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """Return the manifest's entries about left-out tensors."""
        records = [record for record in read_records(checkpoint) if record.left_out]
        entries: dict[str, Any] = {
            record.path: {
                "tensors": len(record.left_out),
                "why": "frozen weights of the base",
                "base": asdict(record.base),
            }
            for record in records
        }
        adapted = {n for record in records for n in (*record.left_out, *record.beside)}
        children = Counter(
            n.partition(".")[0] for n in left_out_digests(checkpoint) if n not in adapted
        )
        entries |= {
            child: {"tensors": count, "why": "frozen weights, made by the module itself"}
            for child, count in children.items()
            if child not in entries
        }
        return {"left_out": entries} if entries else {}

    def check_loaded(self, checkpoint: Mapping[str, Any], state: ModuleState) -> None:
        """Check the module's own weights against those left out of a loaded checkpoint. All ranks
        call this.

        Raises:
            CheckpointError: On every rank, if the module has other weights.
        """
        digests = left_out_digests(checkpoint)
        for record in read_records(checkpoint):
            if record.left_out and record.base.digest is not None:
                _check_paths(state.module, record)
                if not digests:  # adapters from a folder, or of an earlier version
                    digest = self._digest(state, record.path, record.left_out)
                    record.base.check(digest, record.path or "the module")
        check_parts(state, digests)

    def _leaves_out(self, module: nn.Module) -> bool:
        options = self._options
        return options.trainable_only or options.adapters_only or _is_rounded(module)

    def _left_out(self, state: ModuleState) -> dict[str, str | None]:
        """Return name -> digest of the weights to leave out. None: a copy, or a buffer beside."""
        unchanged, everything = self._frozen.unchanged(state), self._options.trainable_only
        left_out: dict[str, str | None] = {}
        for rank in _gathered(state, _frozen_names(state, everything=everything).items()):
            for name, owner in rank:
                if owner in unchanged:
                    left_out[name] = unchanged[owner] if name == owner else None
        parameters = {name for rank in _gathered(state, _parameters(state.module)) for name in rank}
        for rank in _gathered(state, _beside(state.module)):
            for name in rank:
                if name in unchanged or name not in parameters:
                    left_out[name] = unchanged.get(name)
        return left_out

    def _digest(self, state: ModuleState, path: str, names: Collection[str]) -> str:
        """Return the digest of parameters of the model at ``path``. A collective on the first call
        for a set of parameters.
        """
        key = f"{path} {hash(frozenset(names))}"  # of one process
        if key not in self._digests:
            self._digests[key] = digest_of_part(state, path, names)
        return self._digests[key]


def _is_rounded(module: nn.Module) -> bool:
    return any(applied.method.base is not None for applied in applied_to(module).values())


def _gathered(state: ModuleState, values: Collection[Any] | Iterator[Any]) -> list[list[Any]]:
    """Return the values of every pipeline rank. A collective over pp."""
    return state.context.pp.all_gather_object(sorted(values))


def _parameters(module: nn.Module) -> Iterator[str]:
    return (name for name, _ in module.named_parameters(remove_duplicate=False))


def _frozen_names(state: ModuleState, *, everything: bool) -> dict[str, str]:
    """Return name -> owner's name of frozen weights, without adapters: of the module, or of adapted
    models only. A tied weight has several names.
    """
    module, owners, names = state.module, dict[int, str](), dict[str, str]()
    models = applied_to(module)
    adapters = tuple(
        f"{path}.{layer}.adapters." if path else f"{layer}.adapters."
        for path in models
        for layer in adapted_layers(module.get_submodule(path))
    )
    inside = tuple(f"{path}." if path else "" for path in models)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owner = owners.setdefault(id(parameter), state.part.tied.get(name, name))
        is_chosen = everything or name.startswith(inside)
        if is_chosen and not parameter.requires_grad and not name.startswith(adapters):
            names[name] = owner
    return names


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
