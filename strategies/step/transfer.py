"""Copies of batches to a GPU, on a stream of their own.

The host runs ahead of the GPU: it hands the next batch over while the GPU computes the steps
before. On the stream of the computation the copy would wait for them, and the next step for it. On
its own stream it starts at once:

    compute   step 1                 | step 2                 | step 3
    copies    batch 2 | batch 3      ^ waits for batch 2 only

The memory of a batch belongs to the stream of the copies, so the computation is recorded as its
user: it is not reused before the step has read it.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.utils._pytree import tree_map_only

_HOOK = "transfer_batch_to_device"


class BatchCopies:
    """Copies the tensors of batches.

    Args:
        device: Where they go; other devices than CUDA's have no streams, and nothing is copied.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stream: torch.cuda.Stream | None = None
        """The stream of the copies; None: there is none."""
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(self, batch: Any, module: pl.LightningModule) -> Any:
        """Return the batch with its tensors on the device, ready for the current stream.

        Left as they are, for Lightning to move, are tensors in other containers than dicts, lists
        and tuples, and all where the module or its data moves batches by a hook of its own.

        Args:
            batch: A batch.
            module: The LightningModule that it is for.
        """
        if self.stream is None:
            return batch
        data = getattr(module.trainer, "datamodule", None)
        if any(is_overridden(_HOOK, owner) for owner in (module, data) if owner is not None):
            return batch
        copied: list[Tensor] = []

        def copy(tensor: Tensor) -> Tensor:
            plain = type(tensor) is Tensor and tensor.layout == torch.strided
            if not plain or tensor.device.type != "cpu":
                return tensor
            copied.append(tensor.to(self._device, non_blocking=True))
            return copied[-1]

        with torch.cuda.stream(self.stream):
            batch = tree_map_only(Tensor, copy, batch)
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self.stream)
        for tensor in copied:
            tensor.record_stream(current)
        return batch
