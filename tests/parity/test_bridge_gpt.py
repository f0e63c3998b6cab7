"""``GPTModel`` from Hugging Face folders: trained under every layout as on one device, and given
back; each rank reads the bytes that it owns."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from megatron_lightning.bridge import AutoBridge, commands
from megatron_lightning.bridge.hf_models import transformers_model
from megatron_lightning.modules import GPTLightningModule
from tests.helpers.layouts import fit
from tests.helpers.ranks import run_ranks

pytest.importorskip("transformers")
from tests.helpers.gpt_folders import FOLDERS, LENGTH, make_folder, make_predicting_folder, tokens

BATCH, STEPS = 8, 3
PIPELINE: dict[str, Any] = {"pipeline_model_parallel_size": 2, "micro_batch_size": 4}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero1": (2, {}),
    "fsdp": (2, {"data_parallel": "fsdp"}),
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "pp2": (2, PIPELINE),
    "tp2 x pp2": (4, {"tensor_model_parallel_size": 2} | PIPELINE),
    "ep2": (2, {"expert_model_parallel_size": 2}),
    "ep2 x pp2": (4, {"expert_model_parallel_size": 2} | PIPELINE | {"micro_batch_size": 2}),
    "cp2": (2, {"context_parallel_size": 2}),
}
EXPERTS = (
    "predicting", "mixtral", "qwen3-moe", "qwen2-moe", "olmoe", "deepseek", "kimi", "gpt-oss",
    "granite-moe", "glm4-moe", "dots1", "qwen3-next",
)  # fmt: skip
FEW = [
    ("llama", "tp2 x pp2"), ("qwen3", "fsdp"), ("mistral", "cp2"), ("qwen2-moe", "ep2"),
    ("olmo2", "tp2"), ("predicting", "pp2"), ("gpt-oss", "tp2"), ("gemma2", "cp2"),
    ("qwen3-next", "cp2"),
]  # fmt: skip


class Outcome(NamedTuple):
    """What one rank saw."""

    losses: list[float]
    read: int
    owned: int


def _fit(path: Path, options: dict[str, Any] | None, batch_size: int, target: Path) -> Outcome:
    """Train, and save a checkpoint."""
    rows: Any = [{"tokens": t[:-1], "labels": t[1:]} for t in tokens(STEPS * BATCH, LENGTH + 1)]
    module = GPTLightningModule(
        init_from_hf=str(path),
        learning_rate=1e-2,
        eps=1e-3,  # Adam would make steps of gradients that are 0 but for rounding (key biases)
    )
    counted, read = [0, 0], transformers_model.read_weights

    def count(module: Any, *args: Any) -> int:
        num_bytes = read(module, *args)
        if num_bytes:
            counted[:] = num_bytes, sum(tensor.nbytes for tensor in _local(module))
        return num_bytes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron_lightning.bridge.hf_models.transformers_model.read_weights", count)
        run = fit(options, module, DataLoader(rows, batch_size=batch_size), max_epochs=1)
    run.trainer.save_checkpoint(target)
    module.save_hf_pretrained(str(target.with_suffix(".live")))  # from the parts of the ranks
    return Outcome(run.losses, *counted)


def _local(module: pl.LightningModule) -> list[Tensor]:
    """Return this rank's parameters and saved buffers, each once."""
    saved = module.state_dict()
    buffers = [b for name, b in module.named_buffers() if name in saved]
    own = {id(p): p for p in (*module.parameters(), *buffers) if p.numel()}.values()
    return [getattr(p, "_local_tensor", p) for p in own]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("folders")
    made = {"predicting": make_predicting_folder(parent)}
    return made | {name: make_folder(name, parent) for name in FOLDERS}


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=[] if (name, layout) in FEW else pytest.mark.slow)
        for name in (*FOLDERS, "predicting")
        for layout in LAYOUTS
        if not layout.startswith("ep2") or name.startswith(EXPERTS)
    ],
)
def test_a_folder_trains_as_on_one_device_and_is_given_back(
    folders: dict[str, Path], tmp_path: Path, name: str, layout: str
) -> None:
    num_ranks, options = LAYOUTS[layout]
    (plain,) = run_ranks(1, _fit, folders[name], None, BATCH, tmp_path / "plain.ckpt")
    num_data_ranks = 2 if {"fsdp", "zero1", "ep2"} & set(layout.split()) else 1
    ranks = run_ranks(
        num_ranks, _fit, folders[name], options, BATCH // num_data_ranks, tmp_path / "c.ckpt"
    )
    losses = [sum(values) / len(ranks) for values in zip(*(r.losses for r in ranks), strict=True)]
    assert losses == pytest.approx(plain.losses, rel=1e-5)  # fp32, sums in another order
    for rank in ranks:
        assert 0 < rank.read == rank.owned
    exported, live = tmp_path / "c.ckpt.hf", tmp_path / "c.live"
    found, expected = (_exported(tmp_path, file) for file in ("c.ckpt", "plain.ckpt"))
    for file in exported.iterdir():
        assert file.read_bytes() == (live / file.name).read_bytes(), file.name
    before = _weights(folders[name])
    for key, value in found.items():
        torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-5)
    assert max(float((found[key] - before[key]).abs().max()) for key in found) > 1e-3


def _exported(parent: Path, checkpoint: str) -> dict[str, Tensor]:
    """Return the weights that stock transformers loads from an export."""
    target = parent / f"{checkpoint}.hf"
    commands.export(str(parent / checkpoint), str(target))
    return _weights(target)


def _weights(path: Path) -> dict[str, Tensor]:
    import transformers

    config = AutoBridge.from_hf_pretrained(path).config  # transformers does not know Kimi's name
    model = getattr(transformers, config.architectures[0]).from_pretrained(path, config=config)
    state: dict[str, Tensor] = model.state_dict()
    return state
