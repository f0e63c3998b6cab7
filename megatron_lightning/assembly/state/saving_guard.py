"""Guard a module's part from looking like the full model: ``save_pretrained`` and Lightning's
exports of a part are errors, and ``state_dict`` warns.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron_lightning.assembly.state.module_shards import ModuleState
from megatron_lightning.errors import ShardingError

_MARK = "_megatron_saving_guard"
_EXPORTS = ("to_onnx", "to_torchscript", "to_tensorrt")
"""Methods of a LightningModule."""


Warn: TypeAlias = "Callable[[str], None]"
Refuse: TypeAlias = "Callable[[ShardingError], None]"


class SavingGuard:
    """Guard of a module's part. Deep copies share the guard.

    Args:
        warn: Called with the path of a module when user code asks for the module's ``state_dict``.
        refuse: Called with the error of an export. None: parts are exported as parts.
    """

    def __init__(self, warn: Warn | None = None, refuse: Refuse | None = None) -> None:
        self.warn = warn
        self.refuse = refuse

    @classmethod
    def attach(cls, state: ModuleState, warn: Warn, refuse: Refuse | None) -> None:
        """Guard the modules with a part on this rank, for the modules' lives."""
        modules = dict(state.module.named_modules())
        for path in _partial_paths(state):
            module: nn.Module | None = modules.get(path)
            if module is None:
                continue
            attached = vars(module).get(_MARK)
            if attached is not None:
                attached.warn, attached.refuse = warn, refuse
                continue
            guard = vars(module)[_MARK] = cls(warn, refuse)
            module.register_state_dict_pre_hook(partial(guard.asked, path))  # type: ignore[no-untyped-call]
            if callable(getattr(module, "save_pretrained", None)):
                vars(module)["save_pretrained"] = PartSaving(module, path, guard)
            for name in _EXPORTS if module is state.module else ():
                vars(module)[name] = PartExport(module, name, guard)

    def asked(self, path: str, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Warn about a state dict of ``module``, unless the state dict of a parent calls for the
        state dict.
        """
        if not prefix and self.warn is not None:
            self.warn(path)

    def __deepcopy__(self, memo: dict[int, Any]) -> SavingGuard:
        return self

    def __reduce__(self) -> Any:
        return SavingGuard, ()


class PartSaving:
    """``save_pretrained`` of a module with a part on this rank.

    Args:
        module: The module.
        path: Path of the module, for messages.
        guard: The module's.
    """

    def __init__(self, module: nn.Module, path: str, guard: SavingGuard) -> None:
        self._module = module
        self._path = path
        self._guard = guard

    def __call__(self, save_directory: Any = "folder", *args: Any, **kwargs: Any) -> Any:
        """Save a full state. Ranks with an empty state do nothing.

        Raises:
            ShardingError: Without ``state_dict``.
        """
        state = kwargs.get("state_dict", args[1] if len(args) > 1 else None)
        if state is None and self._guard.refuse is not None:
            place = f"module.{self._path}" if self._path else "module"
            self._guard.refuse(
                ShardingError(
                    f"{type(self._module).__name__}.save_pretrained would write the part of the "
                    "model that this rank holds. Write, on every rank: "
                    f"{place}.save_pretrained({str(save_directory)!r}, "
                    f"state_dict=trainer.strategy.full_state_dict({place}))."
                )
            )
        if state is not None and not state:
            return None
        kind: Any = type(self._module)
        return kind.save_pretrained(self._module, save_directory, *args, **kwargs)


class PartExport:
    """An export of a LightningModule with a part on this rank.

    Args:
        module: The module.
        method: Name of the export.
        guard: The module's.
    """

    def __init__(self, module: nn.Module, method: str, guard: SavingGuard) -> None:
        self._module = module
        self._method = method
        self._guard = guard

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse.

        Raises:
            ShardingError: Unless the user has passed the guard.
        """
        kind = type(self._module)
        name = kind.__name__
        if self._guard.refuse is not None:
            self._guard.refuse(
                ShardingError(
                    f"{name}.{self._method} would export the part of the model that this rank "
                    "holds, with the collectives of all ranks in the forward. Write, on every "
                    "rank: state = trainer.strategy.full_state_dict(); then, if "
                    f"trainer.is_global_zero: full = {name}(...); full.load_state_dict(state); "
                    f"full.{self._method}(...). Or export {name}.load_from_checkpoint(...) in "
                    "another program."
                )
            )
        return getattr(kind, self._method)(self._module, *args, **kwargs)


def _partial_paths(state: ModuleState) -> set[str]:
    """Return the paths of the modules that this rank holds a part of, or nothing of."""
    local_state = state.module.state_dict(keep_vars=True)
    partial_names = [name for name in state.part.names if name not in local_state]
    for name, tensor in local_state.items():
        if isinstance(tensor, Tensor):
            spec = state.spec(name, tensor)
            if isinstance(tensor, DTensor) or spec.local_shape != spec.global_shape:
                partial_names.append(name)
    paths = set[str]()
    for name in partial_names:
        parts = name.split(".")[:-1]
        paths |= {".".join(parts[:n]) for n in range(len(parts) + 1)}
    return paths
