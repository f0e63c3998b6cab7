"""Batches of rows cut to their longest text train as batches of full rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

pytest.importorskip("transformers", "5")

from megatron_lightning.config import MoEConfig, TransformerConfig
from megatron_lightning.data.rows.cut_rows import CutRows, row_multiple
from megatron_lightning.modules import (
    FinetuneDataModule,
    GPTLightningModule,
    PreferenceDataModule,
)
from tests.helpers.chats import make_tokenizer, turn, write_rows
from tests.helpers.layouts import CP, EP, MICRO, PP, TP, fit, tiny_config
from tests.helpers.ranks import run_ranks

LENGTH, BATCH, STEPS = 64, 4, 4
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {TP: 2},
    "cp2": {CP: 2},
    "pp2": {PP: 2, MICRO: 2},
    "ep2": {EP: 2},
}


class _Shapes(pl.Callback):
    def __init__(self) -> None:
        self.lengths: list[int] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self.lengths.append(args[2]["tokens"].shape[1])


def _config() -> TransformerConfig:
    moe = MoEConfig(num_experts=4, router_topk=2)
    return tiny_config(vocab_size=400, max_sequence_length=LENGTH, moe=moe)


def _chats(folder: Path) -> str:
    rows = [
        {"messages": [turn("user", "a " * n), turn("assistant", "sky " * (1 + n % 3))]}
        for n in (1, 9, 2, 3, 14, 4, 2, 1, 3, 2, 12, 1, 5, 2, 1, 3, 2, 2, 1, 4)
    ]
    return write_rows(folder / "chats.jsonl", rows)


def _data(path: str, replicas: int, **options: Any) -> FinetuneDataModule:
    return FinetuneDataModule(
        path,
        sequence_length=LENGTH,
        batch_size=BATCH // replicas,
        tokenizer=make_tokenizer(),
        cache_dir=str(Path(path).parent / "cache"),
        **options,
    )


def _train(path: str, options: Any, pad_to: int, replicas: int = 1) -> Any:
    shapes = _Shapes()
    module = GPTLightningModule(_config(), learning_rate=1e-3)
    data = _data(path, replicas, pad_to=pad_to)
    run = fit(options, module, data, steps=STEPS, callbacks=[shapes])
    return run.losses, run.norms, shapes.lengths


def _train_all(path: str, names: list[str]) -> list[Any]:
    return [_train(path, LAYOUTS[n], 8, 2 if n == "ep2" else 1) for n in names]


@pytest.mark.slow
@pytest.mark.parametrize("names", [["cp2", "pp2", "ep2"], ["tp2"]], ids=str)
def test_cut_rows_train_as_full_rows(names: list[str], tmp_path: Path) -> None:
    """fp32, sums in another order: 1e-5."""
    path = _chats(tmp_path)
    losses, norms, lengths = _train(path, {}, LENGTH)
    assert lengths == [LENGTH] * STEPS
    cut = _train(path, {}, 8)
    assert cut[2][0] == LENGTH > max(cut[2][1:]) and all(n % 8 == 0 for n in cut[2])
    for rank in run_ranks(2, _train_all, path, names):
        for name, found in [("one", cut), *zip(names, rank, strict=True)]:
            assert found[1] == pytest.approx(norms, rel=1e-5), name
            if name != "ep2":  # its ranks have losses of their own rows
                assert found[0] == pytest.approx(losses, rel=1e-5), name
            assert found[2][0] == LENGTH and max(found[2][1:]) < LENGTH


def test_batches_have_the_same_lengths_after_a_resume(tmp_path: Path) -> None:
    data = _data(_chats(tmp_path), 1, pad_to=8)
    data.prepare_data()
    data.setup("fit")
    order, loader = data.row_order(), data.train_dataloader()
    lengths = [batch["tokens"].shape[1] for batch in loader]
    assert lengths[0] == LENGTH > max(lengths[1:])
    order.set_epoch(1)
    assert max(batch["tokens"].shape[1] for batch in loader) < LENGTH
    order.set_epoch(0)
    assert [batch["tokens"].shape[1] for batch in loader] == lengths


def test_packed_rows_and_short_rows_keep_their_length(tmp_path: Path) -> None:
    path = _chats(tmp_path)
    for options in ({"packing": "offline", "pad_to": 8}, {"pad_to": LENGTH}, {}):
        assert _data(path, 1, **options)._cuts is None
    capacity = MoEConfig(
        num_experts=4, router_topk=2, expert_capacity_factor=1.0, pad_expert_input_to_capacity=True
    )
    module = GPTLightningModule(tiny_config(moe=capacity))
    data = _data(path, 1, pad_to=8)
    assert data._cuts is not None
    data.use_model(module)
    assert data._cuts is None
    assert row_multiple(1024, None) == 64
    assert row_multiple(1024, 6) == 6


def test_both_answers_of_a_pair_have_one_length() -> None:
    data = PreferenceDataModule.sequence_dims
    flags = tuple(name for name in data if name.endswith("padding"))
    samples = []
    for chosen, rejected in ((3, 11), (5, 2)):
        sample = {"pair": torch.tensor(0), "scores": torch.zeros(2)}
        for side, count in (("chosen", chosen), ("rejected", rejected)):
            rows = {"": torch.arange(64), "_labels": torch.arange(64)}
            rows["_padding"] = torch.arange(64) >= count
            sample |= {f"{side}{name}": row for name, row in rows.items()}
        samples.append(sample)
    batch = CutRows(tuple(data), flags, 4)(samples)
    assert {batch[name].shape[1] for name in data} == {12}
    assert batch["scores"].shape == (2, 2)
