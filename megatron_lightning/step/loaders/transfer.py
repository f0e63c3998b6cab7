"""Copies of batches to a GPU, on a separate stream.

The host runs ahead of the GPU, and hands the next batch over while the GPU still computes earlier
steps. On the stream of the computation, the copy would wait for the earlier steps, and the next
step would wait for the copy. On a separate stream, the copy starts at once:

    compute   step 1                 | step 2                 | step 3
    copies    batch 2 | batch 3      ^ waits for batch 2 only

The memory of a batch belongs to the stream of the copies. The computation is therefore recorded as
a user of the memory, so the memory is not reused before the step has read the batch.
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
        device: Target of the copies. Only CUDA devices have streams. For other devices nothing is
            copied.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stream: torch.cuda.Stream | None = None
        """The stream of the copies. None: no stream."""
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(self, batch: Any, module: pl.LightningModule) -> Any:
        """Return the batch with all tensors on the device, ready for the current stream.

        Lightning still moves tensors in containers other than dicts, lists and tuples. Lightning
        moves all tensors if the module or the data module has a hook for moving batches.

        Args:
            batch: A batch.
            module: The LightningModule that receives the batch.
        """
        if self.stream is None:
            return batch
        data = getattr(module.trainer, "datamodule", None)
        if any(is_overridden(_HOOK, owner) for owner in (module, data) if owner is not None):
            return batch
        copied: list[Tensor] = []

        def copy(tensor: Tensor) -> Tensor:
            is_plain = type(tensor) is Tensor and tensor.layout == torch.strided
            if not is_plain or tensor.device.type != "cpu":
                return tensor
            copied.append(tensor.to(self._device, non_blocking=True))
            return copied[-1]

        with torch.cuda.stream(self.stream):
            batch = tree_map_only(Tensor, copy, batch)
        current = torch.cuda.current_stream(self._device)
        # Later kernels wait for the copies on the device, while the host continues. The memory
        # belongs to the copying stream, and must not be reused before the step has read it.
        current.wait_stream(self.stream)
        for tensor in copied:
            tensor.record_stream(current)
        return batch
