"""Fingerprints of tensors that are compared between ranks."""

from __future__ import annotations

import pytest
import torch

from megatron_lightning.assembly.checks import replicas
from megatron_lightning.assembly.checks.replicas import fingerprint, fingerprints


@pytest.mark.parametrize("size", [0, 3, 64, 1001])
def test_parts_of_a_tensor_add_up_to_its_fingerprint(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = torch.randn(size)
    before, mark = values.clone(), fingerprint(values)
    monkeypatch.setattr(replicas, "_FINGERPRINT_BYTES", 64)
    assert torch.equal(fingerprint(values), mark)
    assert torch.equal(values, before)
    if size:
        assert not torch.equal(fingerprint(values.roll(1)), mark)


def test_every_bit_counts_in_any_company() -> None:
    """Working memory of several tensors leaves nothing of a larger tensor in a smaller one."""
    tensors = [torch.randn(300), torch.arange(7, dtype=torch.uint8), torch.tensor(True)]
    marks = fingerprints(tensors)
    assert marks.tolist() == [int(fingerprint(tensor)) for tensor in tensors]
    for tensor, mark in zip(tensors, marks, strict=True):
        raw = tensor.clone().view(-1)
        raw.view(torch.uint8)[-1] ^= 1
        assert fingerprint(raw) != mark
