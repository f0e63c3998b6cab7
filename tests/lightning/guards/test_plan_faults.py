"""Plans that split a model wrongly: what no shape shows is found in the first step, and a shape
error names the row that is missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from megatron_lightning.assembly.checks.shape_errors import _mismatch
from megatron_lightning.errors import ShardingError
from megatron_lightning.layers.styles import (
    ColumnParallel,
    RowParallel,
    SequenceParallel,
    VocabParallel,
)
from megatron_lightning.parallel import ShardingPlan
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import Losses, trainer

IDS, WIDTH, LENGTH = 16, 8, 4


class Net(nn.Module):
    """As nanoGPT: learned positions of one dim, batch first; without a head it returns hidden
    states."""

    def __init__(self, *, head: bool = True) -> None:
        super().__init__()
        self.wte = nn.Embedding(IDS, WIDTH)
        self.wpe = nn.Embedding(LENGTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.fc1 = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.fc2 = nn.Linear(3 * WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, IDS) if head else None

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        x = x + self.fc2(F.gelu(self.fc1(self.norm(x))))
        return x if self.head is None else self.head(x)


class Module(pl.LightningModule):
    def __init__(self, *, head: bool = True, positions: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Net(head=head)
        if not positions:
            nn.init.zeros_(self.net.wpe.weight)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        out = self.net(batch)
        if self.net.head is None:
            return out.pow(2).mean()
        return F.cross_entropy(out.flatten(0, 1), (batch * 3 % IDS).flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Squared(Module):
    """Takes an output of any shape."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).pow(2).mean()


class Penalized(Module):
    """Adds a norm of all parameters to the loss."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + 0.1 * sum(
            p.square().sum() for p in self.parameters()
        )


class PenalizedLater(Penalized):
    """Adds the norm from a batch of an epoch on; at first that is nothing."""

    def __init__(self, epoch: int, batch: int) -> None:
        super().__init__()
        self.begins = epoch, batch

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        begun = (self.current_epoch, batch_idx) >= self.begins
        return (super() if begun else super(Penalized, self)).training_step(batch, batch_idx)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.net(batch)


class Wide(Module):
    """Returns the features of its one parallel layer, and reads nothing else."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net.fc1(self.net.wte(batch)).pow(2).mean()


class Direct(Wide):
    """Is itself what the plan splits."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.wte = self.net.fc1, self.net.wte
        del self.net

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.fc1(self.wte(batch)).pow(2).mean()


EMBEDDING = {"net.wte": VocabParallel(), "net.wpe": SequenceParallel()}
WORDS = VocabParallel(shard_sequence=False)
NORM = {"net.norm": SequenceParallel()}
PAIR = {"net.fc1": ColumnParallel(), "net.fc2": RowParallel()}
HEAD = {"net.head": VocabParallel(gather_output=True)}
WHOLE = {**EMBEDDING, **NORM, **PAIR, **HEAD}


def plan(modules: dict[str, Any], **options: Any) -> ShardingPlan:
    return ShardingPlan(sequence_dim=1, modules=modules, **options)


def data(*, constant: bool = False) -> DataLoader[Any]:
    ids = torch.randint(IDS, (16, LENGTH), generator=torch.Generator().manual_seed(1))
    return DataLoader(torch.zeros_like(ids) if constant else ids, batch_size=4)  # type: ignore[arg-type]


def fit(
    module: pl.LightningModule,
    table: ShardingPlan | None,
    *,
    sp: bool = True,
    constant: bool = False,
    epochs: int = 1,
    **options: Any,
) -> list[float] | str:
    """Return the losses, or the error."""
    record: Any = Losses()
    strategy: Any = (
        "auto"
        if table is None
        else MegatronStrategy(
            tensor_model_parallel_size=2, sequence_parallel=sp, sharding_plan=table, **options
        )
    )
    try:
        fitting = trainer(
            strategy,
            max_epochs=epochs,
            callbacks=[record],
            val_check_interval=0.5 if epochs > 1 else 1.0,
        )
        fitting.fit(module, data(constant=constant), data() if epochs > 1 else None)
    except ShardingError as error:
        return str(error)
    return record.losses


def right_plans() -> list[Any]:
    pieces = plan({**EMBEDDING, **NORM, **PAIR}, shards_output=True)
    return [
        fit(Module(), plan(WHOLE)),
        fit(Module(), plan({**PAIR, **HEAD}), sp=False),
        fit(Module(), plan(WHOLE), micro_batch_size=2),
        fit(Module(positions=False), plan(WHOLE), constant=True),
        fit(Module(head=False), pieces),
    ]


def test_right_plans_are_let_through() -> None:
    """Learned positions of one dim are a row as any other; constant data is no full sequence."""
    expected = fit(Module(), None)
    for whole, tensor, micro, constant, pieces in run_ranks(2, right_plans):
        assert whole == pytest.approx(expected, rel=1e-5)
        assert tensor == pytest.approx(expected, rel=1e-5)
        assert micro == pytest.approx(expected, rel=1e-5)
        alike = fit(Module(positions=False), None, constant=True)
        assert constant == pytest.approx(alike, rel=1e-5)
        assert isinstance(pieces, list)


PENALTY = (
    "the loss of the step differs",
    "and the output of the model does not",
    "A norm of parameters() counts this rank's shards only: set weight_decay",
)
SILENT: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    # With AdamW the losses would be right, with SGD they are not.
    "norms alone": (
        lambda: fit(Module(), plan({"**norm": SequenceParallel(), "net.wte": WORDS})),
        (
            "of 2 parameter(s) are equal on the tensor-parallel ranks [0, 1]",
            "2 times too large: net.norm.weight, net.norm.bias",
            "Remove their rows",
            "sequence_parallel=False",
        ),
    ),
    # The output is right, and the gradients of both layers are doubled.
    "ends in a row": (
        lambda: fit(Module(head=False), plan({**EMBEDDING, **NORM, **PAIR})),
        ("the output of net (Net) differs", "gather_output=True"),
    ),
    "head without a row": (
        lambda: fit(Squared(), plan({**EMBEDDING, **NORM, **PAIR})),
        ("net.head.weight, net.head.bias", "Give each a style"),
    ),
    "one column": (
        lambda: fit(Wide(), plan({"net.fc1": ColumnParallel()}), sp=False),
        ("the loss of the step differs", "gather_output=True"),
    ),
    "a penalty": (
        lambda: fit(Penalized(), plan(WHOLE)),
        PENALTY,
    ),
    "a layer of the step": (
        lambda: fit(Direct(), plan({"fc1": ColumnParallel()}), sp=False),
        ("the loss of the step differs",),
    ),
    "a layer of the step in micro-batches": (
        lambda: fit(Direct(), plan({"fc1": ColumnParallel()}), sp=False, micro_batch_size=2),
        ("the loss of the step differs",),
    ),
}
LATER: dict[str, Callable[[], Any]] = {
    "second batch": lambda: fit(PenalizedLater(0, 1), plan(WHOLE)),
    "after a validation": lambda: fit(PenalizedLater(0, 2), plan(WHOLE), epochs=2),
    "second epoch": lambda: fit(PenalizedLater(1, 0), plan(WHOLE), epochs=2),
    "second epoch in micro-batches": lambda: fit(
        PenalizedLater(1, 0), plan(WHOLE), epochs=2, micro_batch_size=2
    ),
}
WITHOUT_WPE = {key: style for key, style in WHOLE.items() if key != "net.wpe"}
SHAPES: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "positions": (
        lambda: fit(Module(), plan(WITHOUT_WPE)),
        (
            "net (Net) got a shard of the sequence",
            "(2) must match the size of tensor b (4)",
            "With sequence parallel on",
            "Add a row: 'net.wpe': SequenceParallel(), or set",
        ),
    ),
    "positions in micro-batches": (
        lambda: fit(Module(), plan(WITHOUT_WPE), micro_batch_size=2),
        ("net (Net) got a shard of the sequence", "'net.wpe': SequenceParallel()"),
    ),
    "head": (
        lambda: fit(Module(), plan({**EMBEDDING, **NORM, **PAIR})),
        (
            "Module got a shard of the sequence",
            "'net.head': ColumnParallel(gather_output=True)",
        ),
    ),
    "column": (
        lambda: fit(Module(), plan({"net.fc1": ColumnParallel()}), sp=False),
        (
            "net.fc2 (Linear) got a shard of the features",
            "Add a row: 'net.fc2': RowParallel()",
            "gather_output=True",
        ),
    ),
    "row": (
        lambda: fit(Module(), plan({"net.fc2": RowParallel()}), sp=False),
        ("net.fc2 (RowParallelLinear) got a shard of the features",),
    ),
}


def error_of(case: str) -> Any:
    return {**SILENT, **SHAPES}[case][0]()


@pytest.mark.parametrize("case", SILENT)
def test_what_no_shape_shows_is_found_in_the_first_step(case: str) -> None:
    for found in run_ranks(2, error_of, case):
        for words in SILENT[case][1]:
            assert words in found


def error_later(case: str) -> Any:
    return LATER[case]()


@pytest.mark.slow
@pytest.mark.parametrize("case", LATER)
def test_a_penalty_that_begins_later_is_found(case: str) -> None:
    for found in run_ranks(2, error_later, case):
        for words in PENALTY:
            assert words in found


@pytest.mark.spread(1)
@pytest.mark.parametrize("case", SHAPES)
def test_a_shape_error_names_the_row_that_is_missing(case: str) -> None:
    for found in run_ranks(2, error_of, case):
        for words in SHAPES[case][1]:
            assert words in found


def other_errors() -> str:
    class Wrong(Module):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return torch.ones(3) + torch.ones(5)

    with pytest.raises(RuntimeError) as raised:
        fit(Wrong(), plan(WHOLE))
    return type(raised.value).__name__


def test_other_shape_errors_stay() -> None:
    assert run_ranks(2, other_errors) == ["RuntimeError"] * 2


@pytest.mark.parametrize(
    ("call", "sizes", "is_feature"),
    [
        (lambda: torch.ones(2, 4) + torch.ones(2, 8), (4, 8), False),
        (lambda: torch.ones(4).expand(8), (8, 4), False),
        (lambda: torch.cat([torch.ones(2, 4), torch.ones(2, 8)]), (4, 8), False),
        (lambda: nn.Linear(8, 3)(torch.ones(5, 4)), (4, 8), True),
        (lambda: nn.LayerNorm(8)(torch.ones(5, 4)), (8, 4), True),
        (lambda: nn.RMSNorm(8)(torch.ones(4)), (8, 4), True),
        (lambda: torch.ones(2, 4).view(2, 8), (16, 8), False),
        (
            lambda: F.cross_entropy(torch.ones(4, 3), torch.zeros(8, dtype=torch.long)),
            (4, 8),
            False,
        ),
    ],
)
def test_the_sizes_are_read_from_the_message(call: Any, sizes: Any, is_feature: bool) -> None:
    with pytest.raises((RuntimeError, ValueError)) as raised:
        call()
    found = _mismatch(str(raised.value))
    assert found is not None and found.sizes == sizes and found.is_feature == is_feature
