"""Packed documents train as if each were alone: our model and an untouched one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from megatron_lightning.data.chat.documents import Document
from megatron_lightning.data.rows.packed_rows import RowDataset
from megatron_lightning.data.rows.packing import Rows, pack
from tests.helpers.layouts import fit_losses
from tests.helpers.ranks import run_ranks
from tests.parity.test_chat_data import SEQUENCE, VOCABULARY, make_folder, make_module

pytest.importorskip("transformers")

STEPS, DOCUMENTS = 3, 8
LENGTHS = (40, 24, 50, 9, 30, 34, 20, 44)
"""Of the documents of a step: four rows; the second one has padding."""


class _Documents:
    """Documents of random ids; of some none is trained, and so in the last row of every step."""

    lengths = np.array(LENGTHS * STEPS, np.int64)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, number: int) -> Document:
        random = np.random.default_rng(number)
        length = int(self.lengths[number])
        trained = random.random(length) < 0.4
        trained[0] = False
        return Document(
            random.integers(0, VOCABULARY, length).astype(np.int32),
            trained & (number % DOCUMENTS not in (0, 1)),
        )


def _rows() -> Rows:
    steps = [pack(np.array(LENGTHS), SEQUENCE) for _ in range(STEPS)]
    documents = [rows.documents + step * DOCUMENTS for step, rows in enumerate(steps)]
    bounds = [rows.bounds[:-1] + step * DOCUMENTS for step, rows in enumerate(steps)]
    return Rows(np.concatenate(documents), np.concatenate([*bounds, [STEPS * DOCUMENTS]]))


def _train(case: tuple[str, bool, dict[str, Any] | None, int], folder: str) -> Any:
    kind, packed, options, accumulated = case
    documents, rows = _Documents(), _rows()
    data: Any = RowDataset(documents, SEQUENCE, 0, rows if packed else None, packed=packed)  # type: ignore[arg-type]
    per_step = len(rows) // STEPS if packed else DOCUMENTS
    loader, module = (
        DataLoader(data, batch_size=per_step // accumulated),
        make_module(kind, folder),
    )
    return fit_losses(options, module, loader, steps=STEPS, accumulate_grad_batches=accumulated)


def _train_all(cases: list[Any], folder: str) -> list[Any]:
    return [_train(case, folder) for case in cases]


@cache
def _alone(kind: str) -> Any:
    ((losses, norms),) = run_ranks(1, _train_all, [(kind, False, None, 1)], make_folder())[0:1][0]
    return losses, norms


MICRO, CP, PP = "micro_batch_size", "context_parallel_size", "pipeline_model_parallel_size"


def test_the_last_row_has_no_trained_token() -> None:
    data = RowDataset(_Documents(), SEQUENCE, 0, _rows(), packed=True)  # type: ignore[arg-type]
    counts = [int((data[row]["labels"] != -100).sum()) for row in range(4)]
    assert 0 in counts and len(_rows()) == 4 * STEPS
    assert [len(torch.unique(data[row]["document_ids"])) for row in range(4)].count(3) == 1


@pytest.mark.timeout(250)
@pytest.mark.parametrize(
    ("world", "options", "kinds"),
    [
        pytest.param(2, {CP: 2, MICRO: 1}, (("gpt", 2), ("hf", 1)), id="cp2"),
        *(
            pytest.param(
                world,
                options,
                [*product(("gpt", "hf"), (1, 2))],
                id="cp2-all" if name == "cp2" else name,
                marks=pytest.mark.slow,
            )
            for name, world, options in (
                ("one", 1, {MICRO: 1}),
                ("cp2", 2, {CP: 2, MICRO: 1}),
                ("pp2", 2, {PP: 2, MICRO: 1}),
                ("tp2", 2, {"tensor_model_parallel_size": 2}),
                ("cp2-pp2", 4, {CP: 2, PP: 2, MICRO: 1}),
            )
        ),
    ],
)
def test_packed_is_alone(
    world: int, options: dict[str, Any], kinds: Sequence[tuple[str, int]]
) -> None:
    """Losses and gradient norms; fp32, sums in another order: 1e-5."""
    cases = [(kind, True, options, accumulated) for kind, accumulated in kinds]
    for rank in run_ranks(world, _train_all, cases, make_folder(), timeout_s=200):
        for (kind, _, _, accumulated), (losses, norms) in zip(cases, rank, strict=True):
            expected, expected_norms = _alone(kind)
            assert norms == pytest.approx(expected_norms, rel=1e-5), (kind, accumulated)
            if accumulated == 1:
                assert losses == pytest.approx(expected, rel=1e-5), kind
