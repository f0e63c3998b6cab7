"""Random samples instead of data."""

from __future__ import annotations

import pytest
import torch

from megatron_lightning.errors import CheckpointError, ConfigError
from megatron_lightning.modules import PretrainDataModule


def _module(**options: object) -> PretrainDataModule:
    settings = {"mock": True, "sequence_length": 8, "batch_size": 2, "vocab_size": 11, **options}
    data = PretrainDataModule(**settings)  # type: ignore[arg-type]
    data.check_files("fit")
    data.prepare_data()
    data.setup("fit")
    return data


def test_mock_samples_are_those_of_a_file_in_form_and_always_the_same() -> None:
    first, again = (next(iter(_module().train_dataloader())) for _ in range(2))
    other = next(iter(_module(seed=2).train_dataloader()))
    assert {name: tuple(value.shape) for name, value in first.items()} == {
        "tokens": (2, 8), "labels": (2, 8), "loss_mask": (2, 8),
    }  # fmt: skip
    assert torch.equal(first["tokens"][:, 1:], first["labels"][:, :-1])
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["tokens"], other["tokens"]) and first["tokens"].max() < 11
    validation = next(iter(_module().val_dataloader()))
    assert not torch.equal(first["tokens"], validation["tokens"])
    _module().load_state_dict(_module().state_dict())
    with pytest.raises(CheckpointError, match="another order"):
        _module(seed=2).load_state_dict(_module().state_dict())
    assert len(_module(num_train_samples=6).train_dataloader()) == 3


def test_files_and_random_samples_exclude_each_other() -> None:
    for options in ({"data_prefix": "x"}, {"mock": False}):
        with pytest.raises(ConfigError, match=r"the tokens come from files, or are random"):
            _module(**options)
    with pytest.raises(ConfigError, match=r"mock=True draws tokens below .* Set vocab_size"):
        _module(vocab_size=None)
