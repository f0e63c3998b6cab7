"""Count the bytes of live tensors, and those sent, by dispatch modes, on any device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that counts the bytes of the tensors that operators return, while they live.

    What a kernel or collective allocates for itself is not seen, nor are tensors from before, until
    :meth:`see` is told of them.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.see(*(x for x in tree_leaves(result) if isinstance(x, Tensor)))
        return result

    def see(self, *tensors: Tensor) -> None:
        """Add tensors, leave out those that are no longer alive, and note the peak."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            self._storages[reference.cdata] = reference, storage.nbytes()
        self._storages = {key: held for key, held in self._storages.items() if _is_alive(held[0])}
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    @property
    def live_bytes(self) -> int:
        """Bytes of the tensors that were alive at the last operator."""
        return sum(size for _, size in self._storages.values())


class CompiledBytes(LiveBytes):
    """Dispatch mode that counts graphs compiled by inductor on a CPU as well: the buffers that they
    allocate, and what the operators return that they call.

    Not seen: what operators of this package copy for themselves, such as operands of deferred
    weight gradients.
    """

    supports_higher_order_operators = True
    _is_on = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: graphs run compiled in this mode."""
        return True

    def see(self, *tensors: Tensor) -> None:
        """Add tensors, but for those of the compiler, which hold nothing."""
        super().see(*(tensor for tensor in tensors if not is_fake(tensor)))

    @contextmanager
    def in_graphs(self) -> Iterator[None]:
        """Count buffers of the graphs that are compiled in this context, while the mode is on."""
        allocate = torch._C._dynamo.guards._empty_strided_cpu

        def counted(*sizes: Any) -> Tensor:
            buffer: Tensor = allocate(*sizes)
            if self._is_on:
                self.see(buffer)
            return buffer

        with patch.object(torch._C._dynamo.guards, "_empty_strided_cpu", counted):
            yield

    def __enter__(self) -> CompiledBytes:
        self._is_on = True
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._is_on = False
        super().__exit__(*exception)


class NetworkBytes(LiveBytes):
    """Dispatch mode that counts the bytes given to the network as well."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[str] = Counter()
        """Bytes by collective."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).rpartition(".")[0]
        if name == "c10d.send":
            self.sent["send"] += sum(x.nbytes for x in args[0])
        elif name == "_c10d_functional.all_to_all_single":
            self.sent["all-to-all"] += args[0].nbytes
        elif name == "c10d.alltoall_base_":
            self.sent["all-to-all"] += args[1].nbytes
        elif name in ("megatron_lightning.all_gather", "megatron_lightning.reduce_scatter"):
            self.sent[name.partition(".")[2]] += args[0].nbytes
        elif name.startswith("c10d.") and not name.startswith("c10d.recv"):
            raise RuntimeError(f"{name} is not counted; add it to this class")
        return super().__torch_dispatch__(func, types, args, kwargs)


def _is_alive(reference: StorageWeakRef) -> bool:
    return not reference.expired()  # type: ignore[no-untyped-call]
