"""Full tensors loaded into a rank's part of a module.

``load_state_dict`` of the part accepts the state of a single device. Each rank copies, or reads,
the rank's boxes, and drops entries of other pipeline stages. Copies of the module made by callbacks
(weight averaging) load in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron_lightning.assembly.state.module_shards import ModuleState
from megatron_lightning.checkpoint.reading.memory_source import MemorySource
from megatron_lightning.checkpoint.reading.stored_tensor import StoredTensor
from megatron_lightning.layers.linear.gemm import is_quantized

_MARK = "_megatron_full_state_loading"


class FullStateLoading:
    """Hook before ``load_state_dict`` of a module's part and of copies of the part.

    Args:
        state: Returns the module's state on this rank. None: the module is full.
    """

    def __init__(self, state: Callable[[], ModuleState | None]) -> None:
        self._state = state

    @classmethod
    def attach(cls, module: nn.Module, state: Callable[[], ModuleState | None]) -> None:
        """Load so from now on, with the state of the latest run."""
        attached = vars(module).get(_MARK)
        if attached is not None:
            attached._state = state
            return
        vars(module)[_MARK] = cls(state)
        module.register_load_state_dict_pre_hook(vars(module)[_MARK])  # type: ignore[no-untyped-call]

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        """Replace full tensors by this rank's tensors, already filled in the module."""
        state = self._state()
        if state is None:
            return
        local_parameters: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
        local_parameters |= dict(module.named_buffers(remove_duplicate=False))
        elsewhere = {*state.part.names}.difference(local_parameters)
        for key in [key for key in state_dict if key.startswith(prefix)]:
            name, value = key.removeprefix(prefix), state_dict[key]
            if name in elsewhere and isinstance(value, Tensor):
                del state_dict[key]
            elif name in local_parameters and isinstance(value, Tensor):
                state_dict[key] = _own_part(state, name, local_parameters[name], value)

    def __deepcopy__(self, memo: dict[int, Any]) -> FullStateLoading:
        return self

    def __reduce__(self) -> Any:
        # In another process the module is no part of this run.
        return FullStateLoading, (_nothing,)


def _nothing() -> None:
    return None


def _own_part(state: ModuleState, name: str, own: Tensor, value: Tensor) -> Tensor:
    """Return the module's own tensor, filled from a full tensor. Return ``value`` if ``value`` is
    not full.
    """
    is_full = (
        isinstance(value, StoredTensor)
        or value.shape != own.shape
        or (isinstance(own, DTensor) and not isinstance(value, DTensor))
    )
    if not is_full or is_quantized(own.dtype) or value.shape != state.spec(name, own).global_shape:
        return value
    shards = state.copy_shards(name, name, own)
    MemorySource(None, {name: value}).read([(name, shard) for shard in shards.shards])
    return own
