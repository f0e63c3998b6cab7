"""Kernels of blocks by the names of the table in ``config/attention_kernels.py``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor
from typing_extensions import override

from megatron_lightning.config.attention_kernels import AttentionBackend, KernelForm, choose_kernel
from megatron_lightning.layers.context.blocks import Block
from megatron_lightning.layers.context.chunked_kernel import Chunked
from megatron_lightning.layers.context.kernels import (
    CpuFlash,
    CudaFlash,
    Inputs,
    Kernel,
    MemoryEfficient,
    Output,
    Padded,
    PlainProducts,
)

BLOCK_KERNELS: Mapping[AttentionBackend, Callable[[KernelForm], Kernel]] = {
    "flash": lambda form: Padded(CudaFlash()) if form.device == "cuda" else CpuFlash(),
    "efficient": lambda _: Padded(MemoryEfficient()),
    "math": lambda form: PlainProducts(form.softcap),
    "chunked": lambda form: Chunked(form.softcap),
}
"""Makers of the kernels that have a form for blocks."""


@lru_cache  # a layer asks in every forward and backward
def kernel_for(
    device: torch.device, backend: AttentionBackend = "auto", softcap: float | None = None
) -> Kernel:
    """Return the kernels of a device.

    Args:
        device: The device.
        backend: Kernels named by the user.
        softcap: See :class:`PlainProducts`.

    Raises:
        ConfigError: If the backend has none for blocks there, or for such scores.
    """
    form = KernelForm(device=device.type, softcap=softcap, is_block=True)
    return _ByBlock(backend, form)


class _ByBlock(Kernel):
    """The first kernel that supports a block: windows and documents cut some blocks only.

    Args:
        backend: Kernels named by the user.
        form: All blocks.
    """

    def __init__(self, backend: AttentionBackend, form: KernelForm) -> None:
        self._backend = backend
        self._form = form
        self.name = self._kernel(form).name
        self._chosen: dict[tuple[bool, torch.dtype], Kernel] = {}

    def _kernel(self, form: KernelForm) -> Kernel:
        return BLOCK_KERNELS[choose_kernel(self._backend, form)](form)

    def _of(self, inputs: Inputs, block: Block) -> Kernel:
        key = is_cut, dtype = block.mask == "band", inputs.q.dtype
        if key not in self._chosen:
            name = str(dtype).removeprefix("torch.")
            self._chosen[key] = self._kernel(replace(self._form, is_cut=is_cut, dtype=name))
        return self._chosen[key]

    @override
    def forward(self, inputs: Inputs, block: Block, scale: float) -> Output:
        return self._of(inputs, block).forward(inputs, block, scale)

    @override
    def backward(
        self, grad: Tensor, inputs: Inputs, output: Output, block: Block, scale: float
    ) -> Inputs:
        return self._of(inputs, block).backward(grad, inputs, output, block, scale)
