"""DumpTensors: a step's tensors on any layout are those of one device, entry by entry."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from megatron_lightning.bridge.dumps import compare_dumps
from megatron_lightning.callbacks import DumpTensors
from megatron_lightning.cli import main
from megatron_lightning.errors import CheckpointError, ConfigError
from megatron_lightning.modules import GPTLightningModule, PretrainDataModule
from tests.helpers.layouts import LAYOUTS, Layout, make_layout, tiny_config
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import trainer

TOLERANCE = 1e-5  # fp32: sums of other parts of a product


def _dump(layout: Layout, folder: str, spoils: bool = False) -> None:
    pl.seed_everything(1, verbose=False)
    module = GPTLightningModule(tiny_config(num_query_groups=2), learning_rate=1e-2)
    data = PretrainDataModule(
        sequence_length=16, batch_size=4 // layout.data, vocab_size=64, mock=True
    )
    callbacks: list[pl.Callback] = [DumpTensors(steps=[0, 1], folder=folder)]
    if spoils:
        callbacks.insert(0, _OneWrongRow())
    fit = trainer(layout.strategy(), max_steps=2, limit_val_batches=0, callbacks=callbacks)
    fit.fit(module, datamodule=data)


class _OneWrongRow(pl.Callback):
    def on_fit_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        name = next(n for n, _ in module.named_parameters() if "layers.1" in n and "fc1" in n)
        with torch.no_grad():
            module.get_parameter(name)[3] += 0.5


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dumps") / "single"
    run_ranks(1, _dump, LAYOUTS["single"], str(folder))
    return folder


SHAPES = [
    make_layout("tp2-pp2", 4, tp=2, pp=2, mbs=2),
    LAYOUTS["pp2"],
    LAYOUTS["cp2"],
    make_layout("dp2-mbs1", 2, mbs=1),
    LAYOUTS["fsdp2"],
    make_layout("tp2-cp2", 4, tp=2, cp=2),
]


@pytest.mark.spread(1)
@pytest.mark.parametrize("layout", SHAPES, ids=lambda layout: layout.name)
def test_dumps_are_those_of_one_device(layout: Layout, one_device: Path, tmp_path: Path) -> None:
    run_ranks(layout.ranks, _dump, layout, str(tmp_path))
    found = compare_dumps(one_device, tmp_path, TOLERANCE)
    assert not found.differing, found.lines("one", layout.name)
    assert found.num_entries > 100, found
    # Tables of rotary angles have no rows, and the strategy's loss makes no logits.
    inside = [
        name
        for name in (*found.only_in_first, *found.only_in_second)
        if "rotary" not in name and "output_layer" not in name
    ]
    assert layout.name.startswith("tp") or not inside, inside
    for kind in ("weights", "inputs", "outputs", "gradients"):
        assert any(f"/{kind}/model.decoder.layers.1" in f"/{n}" for n in _names(tmp_path)), kind


def _names(folder: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(folder / "step-0" / "dump.safetensors", framework="pt") as file:
        return list(file.keys())


def test_the_first_wrong_module_is_named(
    one_device: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_ranks(1, _dump, LAYOUTS["single"], str(tmp_path), True)
    with pytest.raises(SystemExit) as ended:
        main(["convert", "compare-dumps", str(one_device), str(tmp_path)])
    assert ended.value.code == 1
    printed = capsys.readouterr().out
    assert "first: step-0/weights/model.decoder.layers.1.mlp" in printed, printed
    assert (
        "step-0/outputs/model.decoder.layers.1.mlp" in printed
        and "layers.0" not in printed.split("then:  step-0/gradients")[0]
    ), printed
    main(["convert", "compare-dumps", str(one_device), str(one_device)])
    assert "equal within the tolerance" in capsys.readouterr().out


def test_what_cannot_be_dumped_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"what is \['grads'\]: choose some of"):
        DumpTensors(what=["grads"])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match=r"steps is \[-1\]"):
        DumpTensors(steps=[-1])
    with pytest.raises(CheckpointError, match="is no file and no folder of safetensors"):
        compare_dumps(tmp_path, tmp_path, TOLERANCE)


def test_infinities_are_equal_and_missing_entries_are_not(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    infinite = torch.tensor([torch.inf, 4.0, -torch.inf, torch.nan])
    save_file({"a": infinite, "b": torch.ones(1)}, tmp_path / "first.safetensors")
    save_file({"a": infinite}, tmp_path / "second.safetensors")
    first, second = (str(tmp_path / f"{name}.safetensors") for name in ("first", "second"))
    with pytest.raises(SystemExit):
        main(["convert", "compare-dumps", first, second])
    main(["convert", "compare-dumps", first, second, "--allow-missing"])
    save_file({"a": infinite + torch.tensor([0.0, 2.0, 0.0, 0.0])}, second)
    (found,) = compare_dumps(Path(first), Path(second), TOLERANCE).differing
    assert found.relative == 0.5, found


class _Plain(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.scale * self.net(batch[0])).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_plain_trainer_dumps_and_patterns_have_to_match(tmp_path: Path) -> None:
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 4)), 4)
    fit = trainer(max_steps=1, callbacks=[DumpTensors(["net*"], folder=tmp_path)])
    fit.fit(_Plain(), loader)
    names = _names(tmp_path)
    assert {"inputs/net", "outputs/net.1", "gradients/net.0.weight", "weights/net.2.bias"} <= {
        *names
    }
    assert "weights/scale" not in names
    fit = trainer(max_steps=1, callbacks=[DumpTensors(folder=tmp_path / "all")])
    fit.fit(_Plain(), loader)
    assert {"weights/scale", "gradients/scale"} <= {*_names(tmp_path / "all")}
    with pytest.raises(ConfigError, match=r"modules is \['layers'\], which no module of _Plain"):
        trainer(max_steps=1, callbacks=[DumpTensors(["layers"])]).fit(_Plain(), loader)


def _dump_of_other_lengths(folder: str) -> list[str]:
    dump = DumpTensors(folder=folder)
    fit = trainer(make_layout("dp2", 2).strategy(), max_steps=1, callbacks=[dump])
    rows = [torch.randn(4 + int(os.environ["RANK"]), 4) for _ in range(4)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit.fit(_Plain(), torch.utils.data.DataLoader(torch.utils.data.StackDataset(rows), 2))
    return [str(warning.message) for warning in caught]


def test_ranks_of_other_lengths_have_no_tensor_in_common(tmp_path: Path) -> None:
    messages, _ = run_ranks(2, _dump_of_other_lengths, str(tmp_path))
    expected = "such as inputs/net: the ranks' parts do not make up one tensor"
    assert any(expected in message for message in messages), messages
    names = _names(tmp_path)
    assert "weights/net.0.weight" in names and "gradients/net.0.weight" in names
    assert not [name for name in names if name.startswith(("inputs", "outputs"))], names
