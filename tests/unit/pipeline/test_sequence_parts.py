"""Which positions a context-parallel rank holds, and which blocks of attention it computes."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import log
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_lightning.assembly.checks.dealt_rows import check_chunks, why_two_chunks
from megatron_lightning.config import ContextOptions
from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.attention.sequence_info import Documents, SequenceInfo
from megatron_lightning.layers.context.blocks import Block, blocks, visible_blocks
from megatron_lightning.layers.styles import ContextAttention, GatheredTokens, RowParallel
from megatron_lightning.models import GPTModel, TransformerConfig
from megatron_lightning.parallel import ShardingPlan
from megatron_lightning.parallel.deal import Deal, balanced_deal, chunk_numbers, chunk_work
from megatron_lightning.parallel.sequence import SequencePart, join
from megatron_lightning.pipeline.batch.sequence_arguments import SequenceArguments
from megatron_lightning.rules import check_sequence_length
from megatron_lightning.step.values import sequence_parts
from megatron_lightning.step.values.dealing import Dealing
from megatron_lightning.step.values.sequence_parts import SequenceParts
from megatron_lightning.strategies import MegatronStrategy

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


def _random_deal(num_ranks: int, chunks: int) -> Deal:
    owners = [*range(num_ranks)] * chunks
    random.Random(num_ranks * chunks).shuffle(owners)
    return Deal(tuple(owners))


@pytest.mark.parametrize("chunks", [None, 2, 4])
@pytest.mark.parametrize("window", [None, 0, 1, 3, 200])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("length", [16, 544])
def test_every_visible_pair_is_in_one_block(
    length: int, num_ranks: int, window: int | None, chunks: int | None
) -> None:
    deal = None if chunks is None else _random_deal(num_ranks, chunks)
    everything = [SequencePart(rank, num_ranks, deal).spans(length) for rank in range(num_ranks)]
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


# ------------------------------------------------------------------------------------------- deals


def _packed_rows(
    number: int, length: int, seed: int = 0, median: float = 665
) -> list[tuple[int, ...]]:
    """Return the boundaries of rows with documents of log-normal lengths, cut at the rows' ends."""
    draw, rows, row = random.Random(seed), [], [0]
    while len(rows) < number:
        row.append(min(length, row[-1] + max(16, int(draw.lognormvariate(log(median), 1.0)))))
        if row[-1] == length:
            rows.append(tuple(row))
            row = [0]
    return rows


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_a_deal_of_one_document_is_zigzag(num_ranks: int) -> None:
    work = chunk_work([(0, 64)], 2 * num_ranks)
    assert Deal.by_work(work, num_ranks) == Deal.zigzag(num_ranks)


def test_work_is_the_pairs_of_each_chunk() -> None:
    rows = [(0, 3, 20, 21, 32), (0, 32), (0, 8, 32)]
    positions = [torch.cat([torch.arange(b - a) for a, b in pairwise(row)]) for row in rows]
    pairs = sum(p + 1 for p in positions)
    assert chunk_work(rows, 8) == pairs.unflatten(0, (8, 4)).sum(1).tolist()


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_dealt_parts_are_joined_again(num_ranks: int) -> None:
    [row] = _packed_rows(1, 512)
    deal = Documents((row,)).dealt(num_ranks, [8])
    full = torch.randn(2, 512, 3)
    parts = [SequencePart(rank, num_ranks, deal).split(full, 1) for rank in range(num_ranks)]
    assert {part.shape for part in parts} == {(2, 512 // num_ranks, 3)}
    assert torch.equal(join(parts, 1, deal), full)
    assert not torch.equal(join(parts, 1), full)


def _pairs(block: Block) -> int:
    """Return the pairs of a query and a visible key in a block without window."""
    queries, keys = (x.stop - x.start for x in (block.queries, block.keys))
    if block.mask == "none":
        return queries * keys
    assert block.mask == "causal" and queries == keys
    return queries * (queries + 1) // 2


def _busiest(rows: Sequence[tuple[int, ...]], num_ranks: int, chunks: int) -> float:
    """Return the pairs that the busiest rank of a ring computes, of the mean."""
    documents = Documents(tuple(rows))
    deal = None if chunks == 2 else documents.dealt(num_ranks, [chunks])
    parts = [SequencePart(r, num_ranks, deal).spans(documents.length) for r in range(num_ranks)]
    sequence = SequenceInfo(documents=documents)
    pairs = [
        sum(_pairs(block) for keys in parts for block in visible_blocks(queries, keys, sequence))
        for queries in parts
    ]
    return max(pairs) * num_ranks / sum(pairs)


@pytest.mark.parametrize("num_ranks", [4, 8])
def test_dealt_ranks_compute_as_many_pairs(num_ranks: int) -> None:
    """Pairs in the blocks that kernels compute, the busiest rank and the mean; one row a
    micro-batch."""
    rows = _packed_rows(8, 8192)
    assert chunk_numbers(8192, num_ranks)[0] == 8
    dealt = [_busiest([row], num_ranks, 8) for row in rows]
    zigzag = [_busiest([row], num_ranks, 2) for row in rows]
    assert max(dealt) <= 1.05 and sum(zigzag) / len(zigzag) > 1.3
    assert _busiest(rows[:4], num_ranks, 8) <= 1.05


def test_short_chunks_are_not_made() -> None:
    numbers = {
        256: [2], 1024: [4], 2048: [8], 2056: [2], 4096: [8, 16],
        5896: [2, 11, 22], 6000: [6, 15, 20], 10000: [5, 10, 25], 32768: [8, 16, 32],
    }  # fmt: skip
    assert {length: chunk_numbers(length, 4) for length in numbers} == numbers


@pytest.mark.parametrize("num_ranks", [4, 8])
@pytest.mark.parametrize("median", [665, 150])
def test_long_rows_of_many_documents_have_more_chunks(num_ranks: int, median: int) -> None:
    """A chunk of a long row holds several documents, by whose number the work of ranks differs."""
    ratios, numbers = [], set()
    for length in (4096, 16384, 32768, 65536, 131072):
        for row in _packed_rows(10, length, seed=1, median=median):
            deal = balanced_deal([row], num_ranks, chunk_numbers(length, num_ranks))
            ratios.append(deal.busiest(chunk_work([row], len(deal.owners))))
            numbers.add(deal.chunks_per_rank)
    assert max(ratios) <= 1.05 and {8, 16} <= numbers


class _Joins(nn.Module):
    """Takes full rows, as GatheredTokens gives them."""


def _scope(**plans: ShardingPlan) -> Any:
    """Return what a dealing reads of a run on two ranks that share sequences."""
    module = nn.ModuleDict({name: _Joins() for name in plans})
    context = SimpleNamespace(
        context_options=ContextOptions(),
        cp=SimpleNamespace(size=2, rank=0),
        pp=SimpleNamespace(all_gather_object=lambda value: [value]),
    )
    return SimpleNamespace(
        context=context,
        module=module,
        options=SimpleNamespace(compile=None),
        part=SimpleNamespace(plans=SimpleNamespace(applied=plans)),
    )


_DIMS = {"tokens": 1, "document_ids": 1}


def test_a_plan_that_takes_no_deals_keeps_zigzag_for_all() -> None:
    """Also one that is given no positions, beside a model that takes deals."""
    model = ShardingPlan(
        modules={"": ContextAttention()}, positions="position_ids", takes_deals=True
    )
    assert Dealing.of(_scope(model=model), _DIMS).chunks is None
    joins = ShardingPlan(modules={"": GatheredTokens()})
    assert Dealing.of(_scope(model=model, joins=joins), _DIMS).chunks == 2
    scope = _scope(model=model, joins=joins)
    why = why_two_chunks(scope.module, scope.part.plans.applied)
    assert why == "the sharding plan of _Joins does not say takes_deals=True"
    check_chunks(why, "auto")
    with pytest.raises(ConfigError, match=r"chunks_per_rank is 4, .* plan of _Joins"):
        check_chunks(why, 4)
    takes = ShardingPlan(modules={"": GatheredTokens()}, takes_deals=True)
    assert Dealing.of(_scope(model=model, joins=takes), _DIMS).chunks is None
    other = ShardingPlan(modules={"": RowParallel()})
    assert Dealing.of(_scope(model=model, other=other), _DIMS).chunks is None


@pytest.mark.parametrize(
    ("first", "then", "takes"),
    [(True, None, True), (True, False, False), (None, True, True), (False, None, False)],
)
def test_the_second_plan_says_whether_a_model_takes_deals(
    first: bool | None, then: bool | None, takes: bool
) -> None:
    plans = (ShardingPlan(modules={}, takes_deals=says) for says in (first, then))
    assert next(plans) | next(plans) == ShardingPlan(modules={}, takes_deals=takes)


class _Wrapped(nn.Module):
    """Mixes tokens beside a GPTModel."""

    def __init__(self) -> None:
        super().__init__()
        config = TransformerConfig(
            num_layers=1, hidden_size=32, num_attention_heads=4, vocab_size=32
        )
        self.gpt = GPTModel(config)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.gpt(tokens)
        return x + x.roll(1, 0)


def test_code_around_a_gpt_model_keeps_zigzag() -> None:
    """The plan of the model says takes_deals=True for the model alone."""
    model = _Wrapped()
    plan = model.gpt.sharding_plan() | ShardingPlan(modules={})
    assert plan.takes_deals and why_two_chunks(model.gpt, {"": plan}) is None
    assert "code of others" in (why_two_chunks(model, {"": plan}) or "")


def _described(
    dealing: Dealing, batch: Any, length: int, *, trains: bool = True, packed: bool = True
) -> str:
    """Return the line about a batch, after a check that the batch is dealt as the line says."""
    line = dealing.described(batch, length, trains=trains) or ""
    deal = dealing.of_rows(batch, length, trains=trains)
    assert (deal is not None) == (", dealt by" in line) and packed == bool(line)
    return line


def _ids(length: int, name: str = "document_ids") -> dict[str, Tensor]:
    """Return a batch of a row with two documents."""
    ids = torch.arange(length)[None]
    return {name: (ids > length // 3).long() if name == "document_ids" else ids % (length // 2)}


def test_a_line_says_how_packed_rows_are_divided() -> None:
    line = _described(Dealing(8, None), _ids(8192), 8192)
    assert "8 to 16 chunks of a packed row of 8192 tokens, dealt" in line
    two = _described(Dealing(8, None), _ids(8168), 8168)
    assert "2 chunks of a packed row of 8168 tokens, not dealt" in two
    norm = _described(Dealing(8, 2, why_two="a norm"), _ids(8192), 8192)
    assert "not dealt by the work of attention: a norm" in norm
    _described(Dealing(8, 2), _ids(8192), 8192, packed=False)
    by_positions = Dealing(8, None, by_positions=True)
    assert ", dealt" in _described(by_positions, _ids(8192, "position_ids"), 8192)
    two = _described(replace(by_positions, chunks=2, why_two="it"), _ids(64, "position_ids"), 64)
    assert two.endswith("not dealt by the work of attention: it")


def test_no_line_is_said_where_no_row_is_packed() -> None:
    """A transformers model reads positions alone, a GPTModel document_ids alone."""
    positions, by_positions = _ids(8192, "position_ids"), Dealing(8, None, by_positions=True)
    _described(by_positions, _ids(8192), 8192, packed=False)
    _described(by_positions, {"position_ids": torch.arange(8192)[None]}, 8192, packed=False)
    of_axes = positions["position_ids"].expand(3, 1, 8192)
    _described(by_positions, {"position_ids": of_axes}, 8192, packed=False)
    _described(Dealing(8, None), positions, 8192, packed=False)
    _described(Dealing(8, None), {"document_ids": torch.zeros(1, 8192)}, 8192, packed=False)
    _described(Dealing(8, None), [torch.zeros(1, 8192)], 8192, packed=False)


@pytest.mark.parametrize("chunks", ["auto", 4])
def test_rows_are_not_dealt_by_an_entry_that_is_not_declared(chunks: Any) -> None:
    """A step that divides the entry itself counts on two chunks."""
    plan = ShardingPlan(modules={}, positions="position_ids", takes_deals=True)
    scope = _scope(model=plan)
    scope.context.context_options = ContextOptions(chunks_per_rank=chunks)
    assert Dealing.of(scope, {"tokens": 1, "document_ids": -1}).is_declared
    for dims in ({"tokens": 1}, {"tokens": 1, "document_ids": 0}, {"position_ids": 1}):
        line = _described(Dealing.of(scope, dims), _ids(8192), 8192)
        assert "2 chunks of a packed row" in line
        assert line.endswith("sequence_dims does not declare dim 1 of 'document_ids'")
    packed = _scope(model=replace(plan, packed_positions=True))
    assert not Dealing.of(packed, _DIMS).is_declared


@pytest.mark.parametrize("is_packed", [True, False])
def test_lengths_are_looked_at_before_documents(is_packed: bool) -> None:
    """Documents differ on data-parallel ranks, lengths do not. Evaluation goes on."""
    dealing, batch = Dealing(2, 4), _ids(100)
    if not is_packed:
        batch["document_ids"] = torch.zeros(1, 100)
    for asks in (dealing.of_rows, dealing.described):
        with pytest.raises(ConfigError, match=r"100 tokens do not .* multiple of 8,"):
            asks(batch, 100, trains=True)
    line = _described(dealing, batch, 100, trains=False, packed=is_packed)
    assert "100 tokens do not divide into 4 chunks for each of 2 ranks" in line or not is_packed
    assert dealing.of_rows({"tokens": batch["document_ids"]}, 100, trains=True) is None


def test_training_is_described_after_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sanity check comes first, and its rows may be others."""
    lines: list[str] = []
    monkeypatch.setattr(sequence_parts, "rank_zero_info", lines.append)
    parts = SequenceParts.__new__(SequenceParts)
    parts.deals, parts._dealing, parts._described = True, Dealing(2, None), set()
    for trains, length in ((False, 136), (True, 512)):
        for batch in ({"tokens": 0}, _ids(length), _ids(length)):
            parts._describe(batch, length, trains=trains)
    assert [line.partition(" tokens")[0] for line in lines] == [
        "MegatronStrategy: in evaluation, each rank holds 2 chunks of a packed row of 136",
        "MegatronStrategy: in training, each rank holds 4 chunks of a packed row of 512",
    ]


def test_computed_positions_of_dealt_rows_are_refused() -> None:
    plan = ShardingPlan(modules={}, positions="position_ids", documents="documents")
    group: Any = SimpleNamespace(rank=1, size=2)
    deal = Deal((1, 0, 0, 1, 1, 0))
    arguments = SequenceArguments(group, plan, 12, torch.device("cpu"), deal)
    own = SequencePart(1, 2, deal).positions(12)[None]
    assert arguments({"position_ids": own}).keys() == {"documents"}
    with pytest.raises(ConfigError, match=r"those of a rank.s two chunks .*\(chunks_per_rank=2\)"):
        arguments({"position_ids": SequencePart(1, 2).positions(12)[None]})


@pytest.mark.parametrize("chunks", [[4], True, 2.0, 1, 0, "8"])
def test_numbers_of_chunks_are_integers(chunks: Any) -> None:
    with pytest.raises(ConfigError, match="an integer from 2 on"):
        ContextOptions(chunks_per_rank=chunks)


def test_compiled_blocks_take_two_chunks() -> None:
    options = ContextOptions(chunks_per_rank=4)
    with pytest.raises(ConfigError, match=r"chunks_per_rank is 4, and compile is set"):
        MegatronStrategy(context_parallel_size=2, context_options=options, compile="block")
    MegatronStrategy(context_options=options, compile="block")
