"""Description of the adapters in a checkpoint, in the checkpoint's state under ``"peft"``.

The entry maps the path of each adapted model in the LightningModule to a dict:

    lora        settings of the method
    targets, largest, fused, saved, ties, modules, task
                see :class:`AppliedAdapters`
    names       "gpt" (of a ``GPTModel``), or "own"
    base        origin, revision and digest of the weights that the adapters belong to
    left_out    names of the tensors that an adapters-only checkpoint does without
    beside      names of the tensors of a frozen model beside the adapted, left out as well
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from torch import nn

from megatron_lightning.assembly.state.left_out import left_out_digests
from megatron_lightning.bridge.folders.remembered_folders import kept_folders
from megatron_lightning.checkpoint.reading.source import CheckpointSource
from megatron_lightning.errors import CheckpointError
from megatron_lightning.layers.adapters.part import AdapterKind
from megatron_lightning.models.transformer import GPTModel
from megatron_lightning.peft.methods.applied import AppliedAdapters, FusedRows, applied_to
from megatron_lightning.peft.methods.method import AdapterMethod
from megatron_lightning.peft.methods.table import method_of, settings_of
from megatron_lightning.peft.saved import Base

PEFT = "peft"
"""Entry of a checkpoint's state."""
EXPECTED_BASE = "_megatron_expected_base"
"""Attribute of a model with adapters loaded before its weights: the base of the adapters."""
_MODULE = "state_dict."
_CACHED = re.compile(r"models--([^/]+)/snapshots/([0-9a-f]+)/?$")


class Record(NamedTuple):
    """The entry of a model."""

    path: str
    """Path of the adapted model in the LightningModule."""
    applied: AppliedAdapters
    is_gpt: bool
    base: Base
    left_out: tuple[str, ...]
    """Names of tensors in the LightningModule left out of the checkpoint."""
    beside: tuple[str, ...] = ()
    """Names of left-out tensors of a frozen model beside the adapted."""


def base_of(model: nn.Module) -> Base:
    """Return the origin of a model's initial weights, without a digest."""
    folder = kept_folders(model).get("")
    if folder is None:
        return Base()
    cached = _CACHED.search(folder.origin)
    if cached is None:
        return Base(origin=folder.origin, revision=folder.revision)
    # A path in the cache of the Hub means nothing elsewhere.
    return Base(origin=cached[1].replace("--", "/"), revision=folder.revision or cached[2])


def take_expected_bases(module: nn.Module) -> dict[str, Base]:
    """Return and forget path -> base of the models adapted before loading weights."""
    bases = {path: vars(child).pop(EXPECTED_BASE, None) for path, child in module.named_modules()}
    return {path: base for path, base in bases.items() if base is not None}


def check_describable(kind: AdapterKind, whose: str) -> None:
    """Check that a checkpoint describes all frozen values of adapters.

    Raises:
        CheckpointError: If they are values of a folder.
    """
    if kind.has_own_values:
        raise CheckpointError(
            f"{whose} has projections that its seed does not draw here, which a checkpoint does "
            "not hold. Merge the adapters into their base: megatron-lightning adapters merge."
        )


def write_record(module: nn.Module, checkpoint: dict[str, Any]) -> None:
    """Describe the adapters of a module in the module's checkpoint, unless already described.

    Raises:
        CheckpointError: If a checkpoint cannot describe them.
    """
    if PEFT in checkpoint:
        return
    check_adapters(module)
    entries = {
        path: {
            **method_entry(applied.method),
            "targets": list(applied.targets),
            "largest": list(applied.largest),
            "fused": {name: [list(f.rows), f.num_periods] for name, f in applied.fused.items()},
            "saved": list(applied.saved),
            "ties": dict(applied.ties),
            "modules": list(applied.modules),
            "task": applied.task,
            **({"imported": True} if applied.imported else {}),
            "names": "gpt" if isinstance(module.get_submodule(path), GPTModel) else "own",
            "base": asdict(base_of(module.get_submodule(path))),
            "left_out": [],
        }
        for path, applied in applied_to(module).items()
    }
    if entries:
        checkpoint[PEFT] = entries


def check_adapters(module: nn.Module) -> None:
    """Check that checkpoints can describe the adapters of a module.

    Raises:
        CheckpointError: If not.
    """
    for path, applied in applied_to(module).items():
        name = type(module.get_submodule(path)).__name__
        check_describable(applied.kind, f"the folder of {name}'s adapters")


def read_records(state: Mapping[str, Any], where: str = "the checkpoint") -> list[Record]:
    """Return the entries of a checkpoint's state.

    Raises:
        CheckpointError: If an entry is damaged.
    """
    try:
        return [_record(path, entry) for path, entry in (state.get(PEFT) or {}).items()]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{where}: what it says of adapters is damaged ({error!r})."
        ) from error


def left_out_of(state: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the tensors left out of a checkpoint of trained weights or adapters
    alone.
    """
    of_adapters = (n for record in read_records(state) for n in (*record.left_out, *record.beside))
    return frozenset((*left_out_digests(state), *of_adapters))


def is_partial(source: CheckpointSource) -> bool:
    """Return whether a checkpoint leaves weights out."""
    return bool(left_out_of(source.state()))


def attach_recorded(model: nn.Module, state: Mapping[str, Any], path: str = "model") -> bool:
    """Attach the adapters described by a checkpoint's state to a newly built model, in place.
    Return whether there were adapters to attach.

    Call this function before the model is sharded. The checkpoint's tensors then match the model's.

    Args:
        model: The full model, on any device.
        state: The checkpoint's state.
        path: Path of the model in the saved LightningModule.
    """
    for record in read_records(state):
        if record.path == path:
            record.applied.method.apply(model)
            return True
    return False


def _record(path: str, entry: Mapping[str, Any]) -> Record:
    fused = {name: FusedRows(tuple(rows), n) for name, (rows, n) in entry["fused"].items()}
    method, saved = _method(entry), tuple(entry["saved"])
    rows, columns = entry.get("largest", (0, 0))
    ties, modules = dict(entry.get("ties", {})), tuple(entry.get("modules", ()))
    applied = AppliedAdapters(
        method,
        method.kind_of((rows, columns)),
        tuple(entry["targets"]),
        (rows, columns),
        fused,
        saved,
        ties,
        modules,
        task=entry.get("task", "CAUSAL_LM"),
        imported=bool(entry.get("imported")),
    )
    is_gpt = entry["names"] == "gpt"
    left_out, beside = tuple(entry["left_out"]), tuple(entry.get("beside", ()))
    return Record(path, applied, is_gpt, Base.of(entry["base"]), left_out, beside)


def method_entry(method: AdapterMethod) -> dict[str, Any]:
    """Return the description of a method."""
    return {"lora": _plain(settings_of(method))}


def _method(entry: Mapping[str, Any]) -> AdapterMethod:
    # Adapters fit the base in any precision. Tools read the base's own values.
    return method_of({**entry["lora"], "base": None})


def _plain(value: Any) -> Any:
    """Return lists in the place of tuples, and dicts in the place of mappings."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value
