"""Advice at an out-of-memory error."""

from __future__ import annotations

import pytest

from megatron_lightning.resilience.out_of_memory import memory_advice

GIB = 2**30


@pytest.mark.parametrize(
    ("allocated", "reserved", "is_expandable", "advised"),
    [
        (
            60,
            75,
            False,
            "15.0 GiB that no tensor uses. That memory is in pieces. Set PYTORCH_ALLOC",
        ),
        (60, 75, True, "15.0 GiB that no tensor uses. Set a smaller micro_batch_size"),
        (74, 75, False, "tensors take 74.0 GiB, and the allocator holds 1.0 GiB that no tensor"),
        (74, 75, False, "Set a smaller micro_batch_size, recompute"),
    ],
)
def test_fragments_and_tensors_have_different_remedies(
    allocated: int, reserved: int, is_expandable: bool, advised: str
) -> None:
    advice = memory_advice(
        allocated=allocated * GIB,
        reserved=reserved * GIB,
        total=80 * GIB,
        is_expandable=is_expandable,
    )
    assert advised in advice
    assert advice.startswith("The device has 80.0 GiB;")
