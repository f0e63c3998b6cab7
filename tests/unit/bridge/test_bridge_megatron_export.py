"""Checkpoints and folders as checkpoints of Megatron-Core: read by torch and by us, and back."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.utils.data import DataLoader

pytest.importorskip("transformers", "5")

import transformers

from megatron_lightning.bridge.commands import export, import_
from megatron_lightning.bridge.megatron_checkpoints import export_megatron
from megatron_lightning.bridge.megatron_checkpoints.megatron_args import check_exported
from megatron_lightning.bridge.megatron_checkpoints.torch_dist import MegatronFolder
from megatron_lightning.checkpoint import open_checkpoint
from megatron_lightning.config import MoEConfig, RopeScaling, TransformerConfig
from megatron_lightning.errors import CheckpointError, ConfigError
from megatron_lightning.modules import GPTLightningModule, HuggingFaceModule
from megatron_lightning.parallel.shards.spec import Shard
from tests.helpers.layouts import fit, tiny_config
from tests.helpers.record_torch_dist import LENGTH, VOCABULARY
from tests.helpers.torch_dist import unpack, write_config

CASES = ("dense", "experts", "uneven")


def _rows() -> Any:
    text = torch.randint(0, VOCABULARY, (4, LENGTH + 1), generator=torch.Generator().manual_seed(9))
    return [{"tokens": line[:-1], "labels": line[1:]} for line in text]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For every case, a Hugging Face folder and checkpoints of two steps."""
    path = tmp_path_factory.mktemp("megatron")
    for case in CASES:
        config = transformers.AutoConfig.from_pretrained(write_config(case, path / f"{case}-cfg"))
        torch.manual_seed(1)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path / case)
        kinds: dict[str, Any] = {"gpt": GPTLightningModule(init_from_hf=str(path / case))}
        if case == "experts":
            kinds["hf"] = HuggingFaceModule(str(path / case))
        for kind, module in kinds.items():
            run = fit({}, module, DataLoader(_rows(), batch_size=2), steps=2)
            run.trainer.save_checkpoint(path / f"{case}-{kind}.ckpt")
    unpack(path / "recorded")
    return path


def _values(source: Any, name: str) -> Tensor:
    info = source.tensors()[name]
    out = torch.empty(info.shape, dtype=info.dtype)
    source.read([(name, Shard((0,) * out.ndim, out))])
    return out


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("case", "kind"),
    [("dense", "gpt"), ("experts", "hf"), ("uneven", "gpt")],
)
def test_what_comes_back_is_equal_to_the_bit(
    folder: Path, tmp_path: Path, case: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights and moments, also where Megatron's names and ours differ."""
    checkpoint = folder / f"{case}-{kind}.ckpt"
    export(str(checkpoint), str(tmp_path / "out"), format="torch_dist")
    assert "Adam after 2 steps" in capsys.readouterr().out
    assert (tmp_path / "out/latest_checkpointed_iteration.txt").read_text() == "2"
    like = str(folder / f"{case}-cfg")
    import_(str(tmp_path / "out"), str(tmp_path / "back"), like=like, to=kind)  # type: ignore[arg-type]
    ours, back = open_checkpoint(checkpoint), open_checkpoint(tmp_path / "back")
    names = [n for n in ours.tensors() if n.startswith(("state_dict", "optimizer_states"))]
    assert len(names) > 60
    for name in names:
        assert torch.equal(_values(ours, name), _values(back, name)), name


@pytest.mark.spread(1)
@pytest.mark.parametrize("case", CASES)
def test_keys_are_those_of_megatron_core(folder: Path, tmp_path: Path, case: str) -> None:
    """Of a checkpoint that Megatron-Core itself has saved, without its padding."""
    export(str(folder / f"{case}-gpt.ckpt"), str(tmp_path / "out"), format="torch_dist")
    theirs = MegatronFolder(folder / "recorded" / case).tensors
    ours = MegatronFolder(tmp_path / "out").tensors
    weights = {key for key in theirs if "optimizer." not in key}
    assert weights <= ours.keys()
    for key in weights:
        assert list(ours[key].shape)[1:] == list(theirs[key].shape)[1:], key
    extra = {key for key in ours.keys() - weights if "optimizer." not in key}
    assert all("pre_mlp_layernorm" in key for key in extra)  # of Transformer Engine's experts
    parameters = weights | extra
    for state in ("param", "exp_avg", "exp_avg_sq"):
        prefix = f"optimizer.state.{state}."
        found = {key.removeprefix(prefix) for key in ours if key.startswith(prefix)}
        assert found == {key for key in parameters if "expert_bias" not in key}
    if case == "dense":  # its optimizer is the sharded one, by the same keys
        assert {key for key in theirs if "optimizer." in key} <= ours.keys()
    table = dcp.FileSystemReader(tmp_path / "out/iter_0000002").read_metadata()
    recorded = dcp.FileSystemReader(folder / "recorded" / case / "iter_0000007").read_metadata()
    objects = {k for k in recorded.state_dict_metadata if "_extra_state/" in k}
    assert objects and objects <= table.state_dict_metadata.keys()


def test_torch_reads_a_folder_and_its_table_names_torch_alone(folder: Path, tmp_path: Path) -> None:
    export(str(folder / "experts"), str(tmp_path / "out"), format="torch_dist", dtype="bfloat16")
    path = tmp_path / "out/release"
    reader = dcp.FileSystemReader(path)
    entries = reader.read_metadata().state_dict_metadata
    shapes = {key: e.size for key, e in entries.items() if hasattr(e, "size")}
    state = {key: torch.empty(size, dtype=torch.bfloat16) for key, size in shapes.items()}
    dcp.load(state, storage_reader=reader, no_dist=True)
    for key, tensor in MegatronFolder(tmp_path / "out").tensors.items():
        assert torch.equal(tensor.read(), state[key]), key
    table = _Modules(path.joinpath(".metadata").open("rb"))
    table.load()
    assert table.found == {"torch"}
    common = torch.load(path / "common.pt", weights_only=False)
    assert common["args"].num_experts == 4 and common["args"].no_save_optim
    assert "optimizer" not in common and common["checkpoint_version"] == 3.0


def test_what_resumes_reads_is_there(folder: Path, tmp_path: Path) -> None:
    export(str(folder / "experts-gpt.ckpt"), str(tmp_path / "out"), format="torch_dist")
    common = torch.load(tmp_path / "out/iter_0000002/common.pt", weights_only=False)
    assert common["iteration"] == 2 and common["args"].consumed_train_samples == 4
    assert common["content_metadata"]["distrib_optim_sharding_type"] == "fully_reshardable"
    # Experts have an optimizer of their own in Megatron-Core.
    groups = [g for n in (0, 1) for g in common["optimizer"][n]["optimizer"]["param_groups"]]
    assert [(g["wd_mult"], g["is_expert_parallel"], g["step"]) for g in groups] == [
        (1.0, False, 2.0), (0.0, False, 2.0), (1.0, True, 2.0)
    ]  # fmt: skip
    assert common["opt_param_scheduler"]["num_steps"] == 4


class _Modules(pickle.Unpickler):
    """Records the packages of the classes in a pickle."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self.found: set[str] = set()

    def find_class(self, module: str, name: str) -> Any:
        self.found.add(module.partition(".")[0])
        return super().find_class(module, name)


class _Killed(BaseException):
    pass


def test_a_kill_at_any_write_leaves_nothing_or_all(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, calls = tmp_path / "out", [0]
    real = {"save": torch.save, "write": export_megatron.write_file}

    def counted(name: str, limit: int) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            calls[0] += 1
            if calls[0] > limit:
                raise _Killed
            return real[name](*args, **options)

        return call

    total = None
    for limit in (0, 1, 40, 41, 42, 43, 10**6):
        calls[0] = 0
        monkeypatch.setattr(torch, "save", counted("save", limit))
        monkeypatch.setattr(export_megatron, "write_file", counted("write", limit))
        try:
            export(str(folder / "dense"), str(target), format="torch_dist")
        except _Killed:
            assert not target.exists()
        else:
            total = calls[0]
        monkeypatch.undo()
    assert total is not None and MegatronFolder(target).tensors
    with pytest.raises(CheckpointError, match="out exists"):
        export(str(folder / "dense"), str(target), format="torch_dist")


def test_what_megatron_does_not_have_is_refused(folder: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    write_config("latent", tmp_path / "latent-cfg")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "latent-cfg")
    config.num_nextn_predict_layers = 0
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "latent")
    with pytest.raises(ConfigError, match=r"the model has mla=.*Megatron Bridge"):
        export(str(tmp_path / "latent"), out, format="torch_dist")
    sizes: dict[str, Any] = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 4}
    for options, message in (
        ({"rotary_interleaved": True}, "rotary_interleaved=True"),
        ({"rope_scaling": RopeScaling(
            rope_type="llama3", factor=8.0, original_max_position_embeddings=4096,
        )}, "rope_scaling=RopeScaling"),
        ({"moe": MoEConfig(num_experts=4, latent_size=8)}, "moe.latent_size=8"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            check_exported(TransformerConfig(**sizes, vocab_size=64, **options))
    with pytest.raises(ConfigError, match="Leave scales out"):
        export(str(folder / "dense"), out, scales="mse", format="torch_dist")
    with pytest.raises(ConfigError, match="Leave like out"):
        export(str(folder / "dense"), out, like="x", format="torch_dist")
    with pytest.raises(ConfigError, match="is a checkpoint of Megatron already"):
        export(str(folder / "recorded/dense"), out, format="torch_dist")


def test_another_optimizer_is_left_out_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class OfSGD(GPTLightningModule):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    config = tiny_config(num_layers=1, vocab_size=VOCABULARY)
    run = fit({}, OfSGD(config), DataLoader(_rows(), batch_size=2), steps=1)
    run.trainer.save_checkpoint(tmp_path / "sgd.ckpt")
    export(str(tmp_path / "sgd.ckpt"), str(tmp_path / "out"), format="torch_dist")
    printed = capsys.readouterr().out
    assert "SGD, and Megatron's is Adam" in printed and "--no-load-optim" in printed
