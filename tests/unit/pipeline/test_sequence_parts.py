"""Which positions a context-parallel rank holds, and which blocks of attention it computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.context.blocks import blocks
from megatron_lightning.parallel.sequence import SequencePart, join
from megatron_lightning.rules import check_sequence_length

ORACLE = json.loads((Path(__file__).parents[2] / "oracles" / "rope_cp.json").read_text())


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_parts_are_joined_again(num_ranks: int) -> None:
    full = torch.randn(2, 32, 3)
    parts = [SequencePart(rank, num_ranks).split(full, 1) for rank in range(num_ranks)]
    assert torch.equal(join(parts, 1), full)
    positions = [SequencePart(rank, num_ranks).positions(32) for rank in range(num_ranks)]
    assert torch.equal(join(positions, 0), torch.arange(32))


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (2, 2), (4, 2), (2, 4)])
def test_parts_of_neighbors_are_a_part_of_fewer_ranks(sizes: tuple[int, int]) -> None:
    """What "a2a+p2p" rests on."""
    inner, outer = sizes
    full = torch.arange(64)
    parts = [SequencePart(rank, inner * outer).split(full, 0) for rank in range(inner * outer)]
    for group in range(outer):
        neighbors = parts[group * inner : (group + 1) * inner]
        assert torch.equal(join(neighbors, 0), SequencePart(group, outer).split(full, 0))


@pytest.mark.parametrize(
    "case", ORACLE["facts"]["cp_zigzag"], ids=lambda case: f"{case['cp']}-{case['rank']}"
)
def test_positions_are_those_of_megatron(case: dict[str, Any]) -> None:
    part = SequencePart(case["rank"], case["cp"])
    assert part.positions(case["seq"]).tolist() == case["token_positions"]
    assert part.split(torch.arange(case["seq"]), 0).tolist() == case["token_positions"]


@pytest.mark.parametrize(
    ("length", "num_ranks", "tensor_ranks", "words"),
    [
        (126, 4, 1, "126 positions.* multiple of 8.* 120 or 128"),
        (40, 4, 4, "sequence parallelism over 4.* multiple of 16.* 32 or 48"),
        (3, 4, 1, "to 8,"),
    ],
)
def test_lengths_that_do_not_divide(
    length: int, num_ranks: int, tensor_ranks: int, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        check_sequence_length(length, num_ranks, tensor_ranks, "the sequence")
    check_sequence_length(128, num_ranks, tensor_ranks, "the sequence")
    check_sequence_length(127, 1, 1, "the sequence")


@pytest.mark.parametrize("window", [None, 0, 1, 3, 200])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("length", [16, 544])
def test_every_visible_pair_is_in_one_block(
    length: int, num_ranks: int, window: int | None
) -> None:
    everything = [SequencePart(rank, num_ranks).spans(length) for rank in range(num_ranks)]
    for queries in everything:
        for keys in everything:
            at = torch.cat([torch.arange(span.start, span.stop) for span in queries])
            to = torch.cat([torch.arange(span.start, span.stop) for span in keys])
            back = at[:, None] - to
            visible = (back >= 0) & (back <= (length if window is None else window))
            count = torch.zeros_like(back)
            for block in blocks(queries, keys, causal=True, window=window):
                rows = torch.arange(length)[block.queries][: len(at)]
                inside = torch.arange(len(rows))[:, None] + block.shift
                local = inside - torch.arange(block.keys.stop - block.keys.start)
                seen = {
                    "none": torch.ones_like(local, dtype=torch.bool),
                    "causal": local >= 0,
                    "band": (local >= 0) & (local <= (length if window is None else window)),
                }[block.mask]
                count[block.queries, block.keys] += seen
            assert torch.equal(count, visible.long())


def test_without_a_window_a_step_is_one_block() -> None:
    """As many calls of a kernel as ranks: chunks are joined where they are visible as a whole."""
    parts = [SequencePart(rank, 4).spans(64) for rank in range(4)]
    for queries in parts:
        for keys in parts:
            assert len(blocks(queries, keys, causal=True, window=None)) == 1
    [block] = blocks(parts[1], parts[0], causal=True, window=None)
    assert (block.queries, block.keys) == (slice(0, 16), slice(0, 8))
    [block] = blocks(parts[1], parts[2], causal=True, window=None)
    assert (block.queries, block.keys) == (slice(8, 16), slice(0, 16))


def test_masks_of_a_window_are_no_larger_than_pieces() -> None:
    for block in blocks([range(4096)], [range(4096)], causal=True, window=256):
        assert (block.queries.stop - block.queries.start) <= 256
        assert (block.keys.stop - block.keys.start) <= 512
