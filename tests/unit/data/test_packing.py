"""Documents in rows, and the order in which training reads them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_lightning.config import MoEConfig, TransformerConfig
from megatron_lightning.data.chat.documents import Document, Documents
from megatron_lightning.data.rows.packed_rows import RowDataset, RowOrder, Sources, held_out
from megatron_lightning.data.rows.packing import efficiency, pack, pack_in_windows
from megatron_lightning.errors import ConfigError, DataError
from megatron_lightning.modules import FinetuneDataModule, GPTLightningModule
from megatron_lightning.modules.data_modules.data_checks import check_model


def _one_by_one(lengths: np.ndarray[Any, Any], capacity: int) -> list[int]:
    """Return the room that is left in each row, by best fit for one document after the other."""
    rooms: list[int] = []
    for length in sorted(lengths.tolist(), reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms[rooms.index(min(fitting))] -= length
        else:
            rooms.append(capacity - length)
    return sorted(rooms)


def test_rows_are_those_of_one_document_after_the_other() -> None:
    random = np.random.default_rng(0)
    for case in range(150):
        capacity = int(random.integers(2, 60))
        most = capacity if case % 3 else min(capacity, 5)
        lengths = random.integers(1, most + 1, int(random.integers(1, 90)))
        rows = pack(lengths, capacity)
        left = sorted(capacity - int(lengths[list(row)].sum()) for row in rows)
        assert left == _one_by_one(lengths, capacity)
        assert sorted(rows.documents.tolist()) == list(range(len(lengths)))


def test_windows_keep_the_order_and_lose_nothing() -> None:
    random = np.random.default_rng(1)
    lengths, order = random.integers(1, 50, 500), random.permutation(500)
    rows = pack_in_windows(lengths, order, 100, 40)
    assert sorted(rows.documents.tolist()) == list(range(500))
    window = {int(number): position // 40 for position, number in enumerate(order)}
    seen = [{window[number] for number in row} for row in rows]
    assert all(len(windows) == 1 for windows in seen)
    assert [w for (w,) in seen] == sorted(w for (w,) in seen)
    assert all(lengths[list(row)].sum() <= 100 for row in rows)
    assert 0.8 < efficiency(lengths, rows, 100) <= 1
    assert sorted(rows.shuffled(random)) == sorted(rows)
    with pytest.raises(DataError, match="document 2 has 7 tokens and a row 5"):
        pack(np.array([1, 2, 7]), 5)


def _documents(folder: Path, lengths: list[int]) -> Documents:
    made = [
        Document(np.arange(n, dtype=np.int32) + 100 * i, np.arange(n) % 2 == 1, i // 2)
        for i, n in enumerate(lengths)
    ]
    return Documents.build(folder, made, Counter())


def test_rows_of_documents(tmp_path: Path) -> None:
    rows = RowDataset(Sources([_documents(tmp_path, [3, 2])]), 8, padding=7, packed=True)
    row = rows[(1, 0)]
    assert row["tokens"].tolist() == [100, 101, 0, 1, 2, 7, 7, 7]
    assert row["labels"].tolist() == [101, -100, 1, -100, -100, -100, -100, -100]
    assert row["document_ids"].tolist() == [0, 0, 1, 1, 1, 2, 2, 2]
    assert row["position_ids"].tolist() == [0, 1, 0, 1, 2, 0, 1, 2]
    assert row["padding"].tolist() == [False] * 5 + [True] * 3
    full = RowDataset(Sources([_documents(tmp_path, [3, 5])]), 8, padding=7, packed=True)
    assert full[(0, 1)]["position_ids"].tolist() == [0, 1, 2, 0, 1, 2, 3, 4]


@pytest.mark.parametrize("packing", ["none", "offline", "online"])
def test_epochs_go_on_where_the_one_before_ended(tmp_path: Path, packing: Any) -> None:
    random = np.random.default_rng(2)
    sources = Sources([_documents(tmp_path, random.integers(1, 30, 200).tolist())])
    order = RowOrder(sources, 64, packing, seed=5, window=40)
    epochs = []
    for epoch in range(4):
        order.set_epoch(epoch)
        epochs.append(list(order))
        assert len(epochs[-1]) == len(order)
    stream = [row for epoch in epochs for row in epoch]
    passes = [row for number in range(5) for row in order.rows(number)]
    assert stream == passes[: len(stream)]
    assert epochs[0] != epochs[1]
    order.set_epoch(2)
    assert list(order) == epochs[2]
    assert sorted(number for row in order.rows(3) for number in row) == list(range(200))


def test_ranks_have_alike_costs(tmp_path: Path) -> None:
    lengths = np.random.default_rng(4).integers(1, 60, 400)
    sources = Sources([_documents(tmp_path, lengths.tolist())])
    apart = list(RowOrder(sources, 64, "online", seed=5, window=100))
    order = list(RowOrder(sources, 64, "online", seed=5, window=100, balanced=8))

    def wait(rows: list[tuple[int, ...]], num_ranks: int) -> float:
        """Return the work of the busiest rank beyond the mean, as a share of the mean."""
        costs = np.array([int((lengths[list(row)] ** 2).sum()) for row in rows])
        ranks = costs[: len(costs) // 8 * 8].reshape(-1, 8 // num_ranks, num_ranks).sum(1)
        return float((ranks.max(1) / ranks.mean(1) - 1).mean())

    for begin in range(0, len(order), 8):
        assert sorted(order[begin : begin + 8]) == sorted(apart[begin : begin + 8])
    for num_ranks in (2, 4):
        assert wait(order, num_ranks) < 0.7 * wait(apart, num_ranks)


def test_weights_are_shares_and_sources_go_on(tmp_path: Path) -> None:
    parts = [_documents(tmp_path / "a", [2] * 30), _documents(tmp_path / "b", [2] * 10)]
    sources = Sources(parts, weights=[1, 3])
    seen = np.concatenate([sources.order(7, number) for number in range(4)])
    for number in range(4):
        one = sources.order(7, number)
        assert len(one) == 40
        assert abs(int((one < 30).sum()) - 10) <= 1
    small = seen[seen >= 30]
    for begin in range(0, len(small) - 9, 10):  # every pass over a source has all of it
        assert sorted(small[begin : begin + 10].tolist()) == list(range(30, 40))
    large = seen[seen < 30]
    assert len(set(large[:30].tolist())) == 30
    with pytest.raises(ConfigError, match="each must be a number above 0"):
        Sources(parts, weights=[1, 0])


def test_documents_of_a_row_stay_together(tmp_path: Path) -> None:
    part = _documents(tmp_path, [2] * 40)
    (train,), (validate,) = held_out([part], 0.25, seed=3)
    assert len(validate) == 10
    assert not set(part.rows[train].tolist()) & set(part.rows[validate].tolist())
    assert sorted([*train.tolist(), *validate.tolist()]) == list(range(40))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"balance_rows": -1}, "balance_rows=-1: set it to 0 or more"),
        ({"batch_size": 0}, "batch_size=0: set it to 1 or more"),
        ({"val_fraction": 1.0}, "val_fraction=1.0: set it to 0 or more, and below 1"),
        ({"val_fraction": 0.1, "val_path": "b"}, "beside val_path: set one of them"),
        ({"packing": "all"}, "packing='all'; must be one of none, offline, online"),
        ({"path": [[0.3, "a"], [0.7, "b"]], "packing": "offline"}, "packs every document once"),
        ({"path": [[0.3, "a"], "b"]}, "a list of pairs of a weight and a path"),
        ({"path": [[0.3, "a"], [0.7, "a"]]}, "names a source twice"),
        ({"path": [[-1.0, "a"]]}, "each must be above 0"),
        ({"sequence_length": 1}, "set it to 2 or more"),
        ({"truncation": "cut"}, "truncation='cut'; must be one of drop, left, middle, right"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    settings: dict[str, Any] = {"path": "a", "sequence_length": 8, "batch_size": 1, **options}
    with pytest.raises(ConfigError, match=message):
        FinetuneDataModule(settings.pop("path"), **settings)


def test_a_balancing_loss_of_rows_is_refused_with_packing() -> None:
    """It would see the documents of a row as one sequence."""
    moe = MoEConfig(num_experts=4, router_load_balancing_type="seq_aux_loss", aux_loss_coeff=0.1)
    config = TransformerConfig(
        num_layers=1, hidden_size=16, num_attention_heads=2, vocab_size=32, max_sequence_length=8,
        moe=moe,
    )  # fmt: skip
    check_model(GPTLightningModule(config), 32, packed=False)
    with pytest.raises(ConfigError, match="all documents of a packed row as one sequence"):
        check_model(GPTLightningModule(config), 32, packed=True)


def test_workers_map_the_files(tmp_path: Path) -> None:
    import pickle

    sources = Sources([_documents(tmp_path, [2000, 3000])])
    rows = RowDataset(sources, 8192, padding=0)
    packed = pickle.dumps(rows)
    assert len(packed) < 4000
    assert torch.equal(pickle.loads(packed)[1]["tokens"], rows[1]["tokens"])
