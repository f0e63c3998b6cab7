"""LongRoPE on layouts: ranks that share a row or its layers choose frequencies as one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.data import DataLoader

from megatron_lightning.config import RopeScaling
from tests.helpers.layouts import assert_equals_one_process, make_layout, tiny_config, token_rows

CONFIG = tiny_config(
    rotary_interleaved=True,
    rope_scaling=RopeScaling(
        rope_type="longrope",
        factor=2.0,
        original_max_position_embeddings=10,
        short_factor=(1.0, 1.1, 1.3, 1.4),
        long_factor=(1.2, 2.0, 3.5, 5.0),
    ),
)
SHORT = replace(CONFIG, max_sequence_length=8)


def packed() -> DataLoader:
    """Return rows with a document of 4 tokens, and one of 12, which is long."""
    documents = torch.tensor([0] * 4 + [1] * 12)
    rows = [{**row, "document_ids": documents} for row in token_rows(8, 16, 64)]
    return DataLoader(rows, batch_size=4)


@pytest.mark.parametrize(
    ("layout", "is_packed"),
    [
        (make_layout("cp2", 2, cp=2), True),
        pytest.param(make_layout("cp2", 2, cp=2), False, marks=pytest.mark.slow),
        pytest.param(make_layout("tp2-cp2", 4, tp=2, cp=2), True, marks=pytest.mark.slow),
        pytest.param(make_layout("tp2-pp2", 4, tp=2, pp=2, mbs=1), True, marks=pytest.mark.slow),
    ],
)
def test_layouts_train_as_one_process(layout: object, is_packed: bool) -> None:
    given = {"data": packed(), "steps": 2} if is_packed else {}
    assert_equals_one_process(layout, CONFIG, **given)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tp2-pp2", "tp2-cp2"])
def test_blocks_side_by_side_train_as_one_process(name: str) -> None:
    """Cohere: one norm without bias before attention and feed-forward, and pairs of channels."""
    config = tiny_config(
        num_layers=4, norm_placement="parallel", normalization="LayerNorm", layernorm_bias=False,
        rotary_interleaved=True, logits_scaling=4.0, share_embeddings_and_output_weights=True,
    )  # fmt: skip
    assert_equals_one_process(name, config)


@pytest.mark.slow
def test_short_rows_of_two_ranks() -> None:
    assert_equals_one_process(make_layout("cp2", 2, cp=2), SHORT)
