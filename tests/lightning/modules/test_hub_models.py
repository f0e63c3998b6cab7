"""Models of a Hub are downloaded once and then cached; code of a folder runs only if trusted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_lightning.bridge import AutoBridge
from megatron_lightning.data.text.tokenizers import load_tokenizer
from megatron_lightning.errors import ConfigError, DataError
from megatron_lightning.modules import GPTLightningModule

pytest.importorskip("transformers")
from tests.helpers.hf_folders import make_folder
from tests.helpers.hub import hub

FIT = """
import torch
from torch.utils.data import DataLoader
import lightning.pytorch as pl
from megatron_lightning.modules import HuggingFaceModule
from megatron_lightning.strategies import MegatronStrategy

ids = torch.randint(0, 67, (4, 12), generator=torch.Generator().manual_seed(0))
rows = [{"tokens": row, "labels": row} for row in ids]
trainer = pl.Trainer(
    strategy=MegatronStrategy(tensor_model_parallel_size=2), devices=2, accelerator="cpu",
    max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
)
trainer.fit(HuggingFaceModule("org/tiny", revision="v1"), DataLoader(rows, batch_size=4))
print("trained", flush=True)
"""


def _run(script: Path, home: Path, endpoint: str, **more: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TRANSFORMERS_"))}
    environment = clean | {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    return subprocess.run(
        [sys.executable, str(script)],
        env=environment | {"OMP_NUM_THREADS": "1"} | more,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_hub_model_is_downloaded_once_and_then_read_from_the_cache(tmp_path: Path) -> None:
    folder = make_folder("llama", tmp_path)
    (folder / "LICENSE").write_text("yours")
    (folder / "pytorch_model.bin").write_bytes(b"the same weights")
    (folder / "consolidated.safetensors").write_bytes(b"and again")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "config.json").write_text("{}")
    script, home = tmp_path / "fit.py", tmp_path / "home"
    script.write_text(FIT)
    with hub("org/tiny", folder, "v1") as server:
        done = _run(script, home, server.endpoint)
        assert done.stdout.count("trained") == 2, done.stderr[-3000:]
        names = {file.name for file in folder.iterdir() if file.is_file()}
        wanted = names - {"consolidated.safetensors", "pytorch_model.bin"}
        assert sorted(server.downloads) == sorted(wanted)
        missing = _run(script, tmp_path / "other", "http://127.0.0.1:9")
        assert "There is neither a file nor a folder org/tiny: check the path." in missing.stderr
        assert "It cannot be downloaded as an id of the Hub either" in missing.stderr
    again = _run(script, home, "http://127.0.0.1:9", HF_HUB_OFFLINE="1")
    assert again.stdout.count("trained") == 2, again.stderr[-3000:]


CODE = """
from pathlib import Path
Path(__file__).with_name("ran").touch()
raise RuntimeError("code of the folder ran")
"""


def _with_code(folder: Path) -> None:
    (folder / "code.py").write_text(CODE)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "nobody_knows", "architectures": ["Unknown"]}
    config["auto_map"] = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = {"tokenizer_class": "Odd", "auto_map": {"AutoTokenizer": ["code.Odd", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))


TRUSTED = """
from transformers import LlamaConfig, PreTrainedTokenizerFast

class Config(LlamaConfig):
    model_type = "house_llama"

class Odd(PreTrainedTokenizerFast):
    pass
"""


def test_a_module_made_of_a_bridge_trusts_what_the_bridge_trusts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Configuration, weights and tokenizer."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on the terminal"))
    folder = make_folder("llama", tmp_path)
    (folder / "code.py").write_text(TRUSTED)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "house_llama", "auto_map": {"AutoConfig": "code.Config"}}
    (folder / "config.json").write_text(json.dumps(config))
    Tokenizer(WordLevel({"a": 0, "?": 1}, unk_token="?")).save(str(folder / "tokenizer.json"))
    tokenizer = {"tokenizer_class": "Odd", "auto_map": {"AutoTokenizer": [None, "code.Odd"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    module = AutoBridge.from_hf_pretrained(folder, trust_remote_code=True).to_module()
    module.configure_model()
    assert module.model.config.hidden_size == config["hidden_size"]
    assert module.model_folder is not None
    assert type(module.model_folder.tokenizer().tokenizer).__name__ == "Odd"
    with pytest.raises(ConfigError, match="trust_remote_code"):
        GPTLightningModule(init_from_hf=str(folder))


def test_code_of_a_folder_runs_only_if_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    folder = make_folder("llama", tmp_path)
    _with_code(folder)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on the terminal"))
    with pytest.raises(ConfigError, match="set trust_remote_code=True if you trust it"):
        AutoBridge.from_hf_pretrained(folder)
    assert not AutoBridge.can_handle(folder)
    with pytest.raises(DataError):
        load_tokenizer(folder, "huggingface")
    assert not list(tmp_path.rglob("ran"))
