"""``convert prune``: what does nothing goes first, and the smaller folder computes the same."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megatron_lightning.bridge.auto import AutoBridge
from megatron_lightning.bridge.commands import prune
from megatron_lightning.bridge.pruning.pruned_folder import pruned_folder
from megatron_lightning.bridge.pruning.sizes import Sizes
from megatron_lightning.bridge.pruning.statistics import Statistics
from megatron_lightning.callbacks.statistics.sums import Division, LayerSums
from megatron_lightning.cli import main
from megatron_lightning.errors import CheckpointError, ConfigError
from megatron_lightning.parallel.grid.context import ALONE
from tests.helpers.gpt_folders import make_folder

TOKENS = torch.randint(0, 67, (3, 20), generator=torch.Generator().manual_seed(4))
# Query heads 0 and 3 are of two groups.
DEAD_FFN, DEAD_HEADS, DEAD_EXPERTS = (1, 7, 40, 43), (0, 3), (2, 5)


def _kill(folder: Path) -> None:
    """Set the outgoing weights of some units to zero."""
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name, x in tensors.items():
            if name.endswith("mlp.down_proj.weight"):
                x[:, DEAD_FFN] = 0
            if name.endswith("o_proj.weight"):
                x.view(len(x), 4, -1)[:, DEAD_HEADS] = 0
            if any(f".experts.{e}.down_proj" in name for e in DEAD_EXPERTS):
                x.zero_()
        save_file(tensors, file, {"format": "pt"})


def _take_statistics(folder: Path, path: Path) -> Statistics:
    model: Any = AutoBridge.from_hf_pretrained(folder).to_model("gpt").eval()
    blocks = {f"decoder.layers.{n}": layer for n, layer in model.decoder.layers.items()}
    sums = LayerSums(blocks, "", Division(ALONE, False, {}))
    with torch.no_grad():
        model(TOKENS)
    sums.close()
    found = Statistics(sums.entries, path)
    found.save(path)
    return found


def _logits(folder: Path) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits: torch.Tensor = model(TOKENS).logits
    return logits


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_folder("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=3)
    _kill(folder)
    _take_statistics(folder, folder.parent / "statistics")
    return folder


def test_units_without_effect_go_first(llama: Path, tmp_path: Path) -> None:
    file, target = str(llama.parent / "statistics"), tmp_path / "small"
    prune(str(llama), str(target), file, ffn_hidden_size=40, num_attention_heads=2)
    config = json.loads((target / "config.json").read_text())
    sizes = {key: config[key] for key in ("intermediate_size", "num_attention_heads", "head_dim")}
    assert sizes == {"intermediate_size": 40, "num_attention_heads": 2, "head_dim": 12}
    assert config["num_key_value_heads"] == 2 and config["num_hidden_layers"] == 3
    assert (_logits(llama) - _logits(target)).abs().max() < 1e-5
    living = Path(tmp_path / "less")
    prune(str(llama), str(living), file, ffn_hidden_size=39)
    assert (_logits(llama) - _logits(living)).abs().max() > 1e-2


def _leave_unreached(folder: Path) -> None:
    """Let channel 0 be the same for every token, and by it no token choose some experts."""
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name, x in tensors.items():
            if name.endswith("embed_tokens.weight"):
                x[:, 0] = 5.0
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                x[0] = 0.0
            if name.endswith("post_attention_layernorm.weight"):
                x[0] = 1.0
            if name.endswith("mlp.gate.weight"):
                x[list(DEAD_EXPERTS)] = 0.0
                x[list(DEAD_EXPERTS), 0] = -50.0
        save_file(tensors, file, {"format": "pt"})


def test_experts_without_tokens_go_first(tmp_path: Path) -> None:
    folder, target = make_folder("qwen3-moe", tmp_path, num_local_experts=8), tmp_path / "small"
    _kill(folder)
    _leave_unreached(folder)
    file = tmp_path / "statistics"
    _take_statistics(folder, file)
    # As in the Hub's folders: transformers 5 writes the number under another name.
    config = json.loads((folder / "config.json").read_text())
    config["num_experts"] = number = config.pop("num_local_experts")
    (folder / "config.json").write_text(json.dumps(config))
    prune(str(folder), str(target), str(file), num_moe_experts=number - 2, num_attention_heads=2)
    written = json.loads((target / "config.json").read_text())
    assert written["num_experts"] == number - 2 and "num_local_experts" not in written
    assert (_logits(folder) - _logits(target)).abs().max() < 1e-5
    # Rows of the router go with their experts.
    gate, up = "model.layers.1.mlp.gate.weight", "model.layers.1.mlp.experts.{}.up_proj.weight"
    small, whole = load_all(target), load_all(folder)
    for new, row in enumerate(small[gate]):
        (old,) = (
            e for e in range(number) if torch.equal(small[up.format(new)], whole[up.format(e)])
        )
        assert torch.equal(row, whole[gate][old])


def load_all(folder: Path) -> dict[str, torch.Tensor]:
    return {k: x for file in folder.glob("*.safetensors") for k, x in load_file(file).items()}


def test_layers_are_dropped_by_name_or_by_their_cosine(llama: Path, tmp_path: Path) -> None:
    file = llama.parent / "statistics"
    found = Statistics.load(file)
    turns = [1 - float(found.of(f"decoder.layers.{i}", "cosines")) / 60 for i in range(3)]
    least = turns.index(min(turns))
    prune(str(llama), str(tmp_path / "by_name"), drop_layers=[least])
    prune(str(llama), str(tmp_path / "by_cosine"), str(file), num_layers=2)
    first, second = (load_all(tmp_path / name) for name in ("by_name", "by_cosine"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    kept = [i for i in range(3) if i != least]
    name, whole = "model.layers.{}.mlp.up_proj.weight", load_all(llama)
    assert all(
        torch.equal(first[name.format(i)], whole[name.format(k)]) for i, k in enumerate(kept)
    )
    assert _logits(tmp_path / "by_name").isfinite().all()


def test_lists_with_an_entry_for_each_layer_follow(tmp_path: Path) -> None:
    folder = make_folder("qwen3", tmp_path)
    prune(str(folder), str(tmp_path / "small"), drop_layers=[0])
    assert json.loads((tmp_path / "small" / "config.json").read_text())["layer_types"] == [
        "full_attention"
    ]
    assert _logits(tmp_path / "small").isfinite().all()


def test_every_width_at_once_and_the_stream(llama: Path, tmp_path: Path) -> None:
    target = tmp_path / "small"
    prune(
        str(llama), str(target), str(llama.parent / "statistics"),
        ffn_hidden_size=20, num_attention_heads=2, hidden_size=24, num_layers=1,
    )  # fmt: skip
    assert _logits(target).isfinite().all()
    embedding = load_all(target)["model.embed_tokens.weight"]
    whole = load_all(llama)["model.embed_tokens.weight"]
    columns = [next(c for c in range(32) if torch.equal(whole[:, c], x)) for x in embedding.t()]
    assert columns == sorted(columns) and len(columns) == 24


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--num_attention_heads=3"], "num_attention_heads is 3, .* a multiple of 2, up to 4"),
        (["--ffn_hidden_size=45"], "ffn_hidden_size is 45, .* 1 to 44"),
        (["--num_moe_experts=2"], "num_moe_experts is 2, and the model has no experts"),
        (["--drop_layers=[3]"], "the layers 0 to 2"),
        (["--num_layers=2", "--drop_layers=[1]"], "name the layers to drop"),
        ([], "nothing to prune"),
        (["--ffn_size=8"], "ffn_size"),
    ],
)
def test_what_cannot_be_pruned_says_what_works(
    options: list[str], message: str, llama: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    target, file = tmp_path / "small", llama.parent / "statistics"
    with pytest.raises(SystemExit) as ended:
        main(["convert", "prune", str(llama), str(target), f"--statistics={file}", *options])
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert re.search(message, printed), printed
    assert not target.exists()


def test_statistics_are_of_the_model(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Only drop_layers needs none"):
        prune(str(llama), str(tmp_path / "a"), num_layers=1)
    with pytest.raises(CheckpointError, match="there is no file"):
        prune(str(llama), str(tmp_path / "a"), "nowhere", num_layers=1)
    other = tmp_path / "other"
    Statistics({"decoder.layers.0/cosines": torch.zeros(2)}, other).save(other)
    with pytest.raises(CheckpointError, match="Take statistics of this model"):
        prune(str(llama), str(tmp_path / "a"), str(other), num_layers=1)
    gpt2 = tmp_path / "unknown"
    transformers.OPTConfig(architectures=["OPTForCausalLM"]).save_pretrained(gpt2)
    with pytest.raises(ConfigError, match="GPTModel has rules for"):
        prune(str(gpt2), str(tmp_path / "a"), drop_layers=[0])


def test_a_failure_leaves_nothing(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("megatron_lightning.bridge.folders.export.finish_folder", killed)
    with pytest.raises(KeyboardInterrupt):
        prune(str(llama), str(tmp_path / "small"), drop_layers=[0])
    assert not list(tmp_path.iterdir())


def test_channels_that_no_kept_layer_reads_go_first(tmp_path: Path) -> None:
    folder, target = make_folder("llama", tmp_path), tmp_path / "small"
    dead = (3, 8, 17, 30)
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name, x in tensors.items():
            if name.endswith((
                "q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight",
                "up_proj.weight",
            )):  # fmt: skip
                # The layer that is dropped reads these channels alone.
                x[:, dead] = 100.0 if ".layers.0." in name else 0.0
        save_file(tensors, file, {"format": "pt"})
    _take_statistics(folder, tmp_path / "file")
    prune(str(folder), str(target), str(tmp_path / "file"), hidden_size=28, drop_layers=[0])
    name = "model.layers.{}.mlp.up_proj.weight"
    kept = [c for c in range(32) if c not in dead]
    assert torch.equal(load_all(target)[name.format(0)], load_all(folder)[name.format(1)][:, kept])


def test_the_stream_of_experts_has_no_statistics(tmp_path: Path) -> None:
    folder = make_folder("qwen3-moe", tmp_path)
    with pytest.raises(ConfigError, match="hidden_size is 24, and the model has 4 experts"):
        Sizes(hidden_size=24).check(AutoBridge.from_hf_pretrained(folder).to_config())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"num_key_value_heads": 4}),  # keys and values of their own
        ("llama-biases", {}),
        ("gpt-oss", {}),  # sinks of the heads, stacked experts with biases
    ],
)
def test_dead_heads_go_first(name: str, options: dict[str, int], tmp_path: Path) -> None:
    folder, target = make_folder(name, tmp_path, **options), tmp_path / "small"
    _kill(folder)
    _take_statistics(folder, tmp_path / "file")
    prune(str(folder), str(target), str(tmp_path / "file"), num_attention_heads=2)
    assert json.loads((target / "config.json").read_text())["num_key_value_heads"] == 2
    assert (_logits(folder) - _logits(target)).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("qwen2-moe", Sizes(drop_layers=(1,)), r"drop_layers=\[1\] leaves .*\[0\].* one of \[1\]"),
        ("phi3", Sizes(hidden_size=24), "hidden_size=24: config.json of Phi3ForCausalLM has no"),
        ("qwen2", Sizes(num_attention_heads=2), "num_attention_heads=2: .* has kv_channels=8"),
    ],
)
def test_what_config_json_cannot_say_names_the_option(
    name: str, sizes: Sizes, message: str, tmp_path: Path
) -> None:
    bridge = AutoBridge.from_hf_pretrained(make_folder(name, tmp_path))
    with pytest.raises(ConfigError, match=message):
        pruned_folder(bridge, sizes, Statistics({}, "none"))
