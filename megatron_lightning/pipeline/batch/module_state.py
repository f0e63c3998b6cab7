"""Send a step's changes to a module, such as ``self.correct += n``, from the last stage to all
stages.

Hooks at the end of an epoch usually read such values, and run on all ranks. In a step only the last
stage reaches the code after the pipelined call. Plain values are recorded before a pipeline run and
compared after the run: attributes of the LightningModule, of submodules outside of the pipeline's
units, and of plain objects in the attributes. The other stages apply the last stage's changes. A
stage that ran the code before the call has already made all or a part of the changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from megatron_lightning.pipeline.batch.plain_values import is_plain, packed, unpacked
from megatron_lightning.pipeline.batch.records import (
    MISSING,
    Items,
    KeptTensor,
    Record,
    Recording,
    attributes_of,
    is_changed,
    is_refilled,
    make_record,
    refill,
    restored,
    tensors_in,
)

_LIBRARIES = frozenset({"torch", "torchmetrics", "transformers", "megatron_lightning"})


@dataclass(frozen=True)
class Place:
    """Path of a module, name of an attribute, and keys and attributes inside of the attribute."""

    path: tuple[Any, ...]
    text: str
    """The place as written in code."""

    @classmethod
    def of_module(cls, path: str) -> Place:
        """Return the place of a module."""
        return cls((path,), f"self.{path}" if path else "self")

    def entry(self, key: Any, *, is_attribute: bool) -> Place:
        """Return the place of an entry of a container, or of an attribute."""
        text = f".{key}" if is_attribute else f"[{key!r}]"
        return Place((*self.path, key), self.text + text)

    def __str__(self) -> str:
        return self.text


class Change(NamedTuple):
    """Change of a step at a single place."""

    kind: str
    """``set``, ``fill`` (the same tensor or container with other contents), ``extend`` (a list),
    ``delete``, or ``replace`` (entries of a large list or dict, not sent)."""
    place: Place
    value: Any


class ModuleState:
    """Plain values on the modules outside of the pipeline's units.

    Args:
        module: The LightningModule.
        base: The extended class of the library. Attributes of the class are not the user's.
        units: Modules with attributes that stay on the module's stage.
        stages: Stages of this rank. Each stage runs the step.
        device: This rank's device.
    """

    def __init__(
        self,
        module: nn.Module,
        base: type[nn.Module],
        units: Iterable[nn.Module],
        stages: Sequence[int],
        device: torch.device,
    ) -> None:
        self._device = device
        self._stages = stages
        self._last = max(stages, default=0)
        self._foreign = vars(base()).keys()
        self._modules = dict(_own_modules(module, set(units)))
        classes = [kind for kind in reversed(type(module).__mro__) if not issubclass(base, kind)]
        self._of_class = {
            k: v for kind in classes for k, v in vars(kind).items() if isinstance(v, list | dict)
        }
        self._before: dict[str, Items] = {}
        self._stage = self._last
        self._of_stages: dict[int, dict[str, Items]] = {}
        self._run = -1
        self._kept: dict[int, KeptTensor] = {}

    # --------------------------------------------------------------------------------- around steps

    def begin(self, *, undone: bool = False) -> None:
        """Record the values before a pipeline run.

        Args:
            undone: Whether :meth:`undo` restores the values after the run.
        """
        self._of_stages.clear()
        self._kept.clear()
        self._run += 1
        self._before = self._record(copies=undone or len(self._stages) > 1)

    def enter(self, stage: int) -> None:
        """Restore the values left by a stage's own forwards. Each stage of this rank runs the code
        before the call for each micro-batch.
        """
        if stage == self._stage:
            return
        self._of_stages[self._stage] = self._record(copies=True)
        self._restore(self._of_stages.get(stage, self._before))
        self._stage = stage

    def end(self) -> None:
        """Leave the values of the last of this rank's stages."""
        self.enter(self._last)
        self._of_stages.clear()

    def undo(self) -> None:
        """Restore the values before the run."""
        self._restore(self._before)
        self._stage = self._last
        self._of_stages.clear()

    def _record(self, *, copies: bool) -> dict[str, Items]:
        """Return the current values, by the path of the module.

        Args:
            copies: Whether to copy tensors, to allow restoring.
        """
        recording = Recording(copies, self._run, self._kept)
        records = {}
        for path, values in self._values():
            entries = {name: make_record(value, recording) for name, value in values.items()}
            records[path] = Items(None, entries, len(entries))
        return records

    def _restore(self, records: dict[str, Items]) -> None:
        """Restore values recorded with copies."""
        for path, values in self._values():
            owner, record = vars(self._modules[path]), records[path]
            for name in values.keys() - record.entries.keys():
                owner.pop(name, None)
            for name, entry in record.entries.items():
                value = restored(entry)
                if (
                    owner.get(name, MISSING) is not value
                    and self._of_class.get(name, MISSING) is not value
                ):
                    owner[name] = value

    # ----------------------------------------------------------------------------------- to be sent

    def changes(self) -> tuple[list[Change], list[str]]:
        """Return the changes since :meth:`begin`, for :meth:`apply` on other stages, and the places
        of changes that cannot be sent.
        """
        all_changes: list[Change] = []
        for path, values in self._values():
            all_changes += _entry_changes(self._before[path], values, Place.of_module(path), True)
        sendable, unsent = [], []
        for kind, place, value in all_changes:
            if kind == "replace":
                unsent.append(f"entries of {place} ({len(value):,})")
            elif is_plain(value):
                sendable.append(Change(kind, place, packed(value)))
            else:
                unsent.append(str(place))
        return sendable, unsent

    def changed_paths(self) -> set[tuple[Any, ...]]:
        """Return the places of changes since :meth:`begin`: path of a module, attribute, keys
        inside of the attribute.
        """
        return {
            change.place.path
            for path, values in self._values()
            for change in _entry_changes(self._before[path], values, Place.of_module(path), True)
        }

    def tensors(self) -> list[Tensor]:
        """Return the tensors among the current values, and buffers."""
        records = self._record(copies=False).values()
        buffers = [module._buffers.values() for module in self._modules.values()]
        return [
            *(tensor for items in records for tensor in tensors_in(items)),
            *(buffer for owned in buffers for buffer in owned if buffer is not None),
        ]

    def apply(self, changes: Sequence[Change]) -> None:
        """Make the last stage's changes on this stage, replacing the stage's own changes."""
        for kind, place, value in changes:
            container = self._at(place.path[:-1])
            if container is not MISSING:
                self._apply(kind, place, container, unpacked(value, self._device))

    def _apply(self, kind: str, place: Place, container: Any, value: Any) -> None:
        key = place.path[-1]
        current = _entry(container, key)
        if kind == "delete":  # an entry or an attribute
            (container if isinstance(container, dict) else vars(container)).pop(key, None)
        elif kind == "extend" and isinstance(current, list):
            current[self._length(place) :] = value
        elif kind == "fill" and _takes(current, value):
            refill(current, value)
        elif isinstance(container, list):
            container[key : key + 1] = [value]
        elif isinstance(container, dict):
            container[key] = value
        else:
            vars(container)[key] = value

    def _at(self, path: tuple[Any, ...]) -> Any:
        """Return the object or container at ``path``. ``MISSING`` if this stage has none."""
        current: Any = self._modules.get(path[0], MISSING)
        for key in path[1:]:
            current = _entry(current, key)
        return current

    def _length(self, place: Place) -> int:
        """Return the length of a list before the run."""
        path, *keys = place.path
        record: Record = self._before[path]
        for key in keys:
            record = record.entries.get(key, MISSING) if isinstance(record, Items) else MISSING
        return record.length if isinstance(record, Items) else 0

    def _values(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for path, module in self._modules.items():
            attributes = attributes_of(module, self._foreign)
            yield path, attributes if path else {**self._of_class, **attributes}


def is_of_library(module: nn.Module) -> bool:
    """Return whether the class of a module is a library's. Attributes of the module are no state of
    the user's.
    """
    return type(module).__module__.partition(".")[0] in _LIBRARIES


def _own_modules(module: nn.Module, units: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of the user's classes outside of units and metrics, by their paths."""

    def walk(child: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
        if child in units or isinstance(child, Metric | MetricCollection):  # these are gathered
            return
        if child is module or not is_of_library(child):
            yield path, child
        for name, inner in child.named_children():
            yield from walk(inner, f"{path}.{name}" if path else name)

    yield from walk(module, "")


def _entry(container: Any, key: Any) -> Any:
    """Return an entry of a container, or an attribute of an object."""
    if isinstance(container, dict):
        return container.get(key, MISSING)
    if isinstance(container, list | tuple):
        return container[key] if isinstance(key, int) and key < len(container) else MISSING
    return MISSING if container is MISSING else getattr(container, key, MISSING)


def _takes(current: Any, value: Any) -> bool:
    """Return whether a tensor or container can hold the contents of the last stage's tensor or
    container.
    """
    if isinstance(current, Tensor):
        is_writable = torch.is_inference_mode_enabled() or not current.is_inference()
        return is_writable and current.shape == value.shape
    return type(current) is type(value)


def _entry_changes(
    before: Items, values: dict[Any, Any], place: Place, is_attribute: bool
) -> Iterator[Change]:
    if before.is_same(values):
        return
    for key in before.entries.keys() - values.keys():
        yield Change("delete", place.entry(key, is_attribute=is_attribute), None)
    for key, value in values.items():
        yield from _changes(before.entry(key), value, place.entry(key, is_attribute=is_attribute))


def _changes(before: Record, value: Any, place: Place) -> Iterator[Change]:
    """Yield the changes between a record and the current value at the same place."""
    if not isinstance(before, Items) or before.container is not value:
        if is_changed(before, value):
            yield Change("fill" if is_refilled(before, value) else "set", place, value)
        return
    length, is_large = before.length, before.length != len(before.entries)
    if isinstance(value, list) and len(value) < length:
        yield Change("fill", place, list(value))
        return
    if before.is_replaced(value):
        yield Change("replace", place, value)
    if isinstance(value, dict) and is_large:
        for key in list(value)[length:]:
            yield Change("set", place.entry(key, is_attribute=False), value[key])
        return
    if not isinstance(value, list | tuple | dict):
        yield from _entry_changes(before, attributes_of(value), place, True)
        return
    items = value if isinstance(value, dict) else dict(enumerate(value[: len(before.entries)]))
    yield from _entry_changes(before, items, place, False)
    if isinstance(value, list) and len(value) > length:
        yield Change("extend", place, value[length:])
