"""The order in which data-parallel ranks call FSDP2 units."""

from __future__ import annotations

import pytest
import torch

from megatron_lightning.errors import ShardingError
from megatron_lightning.optim.fsdp.unit_order import UnitOrder
from megatron_lightning.parallel.grid.context import ALONE


def test_texts_and_forwards_without_gradients_leave_the_order_of_a_step() -> None:
    order = UnitOrder(["first", "second"], ALONE, torch.device("cpu"))
    for num_texts in (0, 3, 1):
        with order.forward("training_step"):
            with order.apart():
                for _ in range(num_texts):
                    order.called(0)
                    order.called(1)
            if num_texts:
                with order.forward("scores"):
                    order.called(0)
            order.called(0)
            order.called(1)
    assert (list(order.known("training_step")), list(order.known("scores"))) == ([0, 1], [0])
    named = r"calls second, and until now every .* calls first"
    with pytest.raises(ShardingError, match=named), order.forward("training_step"):
        order.called(1)
