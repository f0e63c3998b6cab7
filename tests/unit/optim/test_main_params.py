"""Main params take over what was written into parameters, and lose no bit otherwise."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from megatron_lightning.errors import ConfigError
from megatron_lightning.optim.gradients.parameter_shard import ParameterShard
from megatron_lightning.optim.stepping.column_sums import column_sums
from megatron_lightning.optim.stepping.main_params import MainParams, take_over


def _made(*shapes: tuple[int, ...]) -> tuple[list[nn.Parameter], list[nn.Parameter], MainParams]:
    """Return bf16 parameters, their main params (which hold bits that bf16 does not), and the
    object under test.
    """
    mains = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    parameters = [nn.Parameter(main.detach().to(torch.bfloat16)) for main in mains]
    shards = [ParameterShard.full(parameter) for parameter in parameters]
    return parameters, mains, MainParams(zip(shards, mains, strict=True))


WRITES: dict[str, Callable[[Tensor], object]] = {
    "fill": lambda value: value.fill_(3.0),
    "clamp": lambda value: value.clamp_(-0.1, 0.1),
    "mask": lambda value: value.mul_(torch.rand(value.shape) < 0.5),
    "flip": lambda value: value.copy_(value.flip(0)),
    "negate": lambda value: value.neg_(),
    "nan": lambda value: value.view(-1)[0].fill_(float("nan")),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_written_elements_are_taken_over_and_others_keep_their_bits(
    write: Callable[[Tensor], object],
) -> None:
    (parameter, _), (main, other_main), params = _made((33, 5), (7,))
    before, other_before = main.detach().clone(), other_main.detach().clone()
    write(parameter.data)

    assert not params.were_written()
    params.take_over()

    expected = torch.where(parameter == before.to(parameter.dtype), before, parameter.float())
    assert torch.equal(main.nan_to_num(77.0), expected.nan_to_num(77.0))
    assert torch.equal(other_main, other_before)
    assert not params.were_written()


def test_a_swap_and_back_loses_no_bit() -> None:
    parameters, mains, params = _made((33, 5), (7,))
    before = [main.detach().clone() for main in mains]
    for parameter in parameters:
        kept = parameter.detach().clone()
        parameter.data.fill_(1.0)
        parameter.data.copy_(kept)

    params.take_over()

    assert all(torch.equal(main, old) for main, old in zip(mains, before, strict=True))


def test_main_params_that_an_optimizer_wrote_are_told_from_written_parameters() -> None:
    (parameter,), (main,), params = _made((33, 5))
    main.data.lerp_(torch.randn(33, 5), 0.5)
    written = main.detach().clone()

    assert params.were_written()
    assert torch.equal(main, written)

    parameter.data.copy_(main)
    params.record()
    assert not params.were_written()


def test_main_params_and_parameters_that_were_both_written_are_refused() -> None:
    (parameter,), (main,), params = _made((33, 5))
    main.data.neg_()
    parameter.data.clamp_(-0.1, 0.1)
    with pytest.raises(ConfigError, match="hook or callback wrote the weights"):
        params.were_written()

    params.take_over()  # they agree again
    assert not params.were_written()
    params.record()
    main.data.add_(1.0)
    assert params.were_written()


def test_a_tensor_larger_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_lightning.optim.stepping.main_params._CHUNK", 64)
    parameters, mains, params = _made((200,), (3,), (3,), (100,))
    for parameter in parameters:
        parameter.data.fill_(2.0)
    params.take_over()
    assert all(bool((main.bfloat16() == 2.0).all()) for main in mains)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("size", [3, 4096, 9000])
def test_column_sums_see_a_moved_or_negated_element(dtype: torch.dtype, size: int) -> None:
    values = torch.arange(size).remainder(50).to(dtype)
    sums = column_sums(values)
    assert torch.equal(column_sums(values.clone()), sums)
    assert not torch.equal(column_sums(values.roll(1)), sums)
    if dtype.is_floating_point:
        assert not torch.equal(column_sums(-values), sums)


def test_column_sums_see_rows_that_change_places() -> None:
    rows = torch.randn(64, 4096).bfloat16()
    assert not torch.equal(column_sums(rows.flip(0).flatten()), column_sums(rows.flatten()))
    # Memory that does not start at a word.
    assert torch.equal(column_sums(rows.flatten()[3:]), column_sums(rows.flatten()[3:].clone()))


def test_nothing_is_taken_over_where_no_parameter_was_written() -> None:
    main, value = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0], dtype=torch.bfloat16)
    take_over(main, value, torch.tensor(False))
    assert main.tolist() == [1.0, 2.0]
    take_over(main, value, torch.tensor(True))
    assert main.tolist() == [1.0, 3.0]


def test_take_over_keeps_main_params_of_equal_values() -> None:
    main, value = torch.tensor([1.0 + 2**-12, 2.0]), torch.tensor([1.0, 3.0], dtype=torch.bfloat16)
    take_over(main, value)
    assert main.tolist() == [1.0 + 2**-12, 3.0]
