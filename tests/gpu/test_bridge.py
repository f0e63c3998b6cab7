"""Hugging Face folders on a GPU: read onto it, trained, and given back."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from megatron_lightning.assembly.assemble import assemble
from megatron_lightning.bridge import AutoBridge
from megatron_lightning.bridge.hf_models.meta_models import deferred_weights
from megatron_lightning.bridge.hf_models.transformers_model import read_weights
from megatron_lightning.config import PipelineOptions
from megatron_lightning.modules import GPTLightningModule, HuggingFaceModule
from megatron_lightning.parallel.grid.context import ParallelContext
from megatron_lightning.parallel.grid.layout import ParallelLayout
from megatron_lightning.peft import LoRA, load_adapters, save_adapters
from megatron_lightning.pipeline.schedules import resolve
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.trainers import Losses, trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
transformers = pytest.importorskip("transformers")

CUDA = "cuda:0"
ACCELERATOR = "gpu"
BATCH, STEPS, SEQUENCE = 4, 3, 16
EXPERTS = ("mixtral", "gpt-oss", "deepseek-v3", "qwen3-moe")
EVEN = {"intermediate_size": 48, "moe_intermediate_size": 16}
FAMILIES = ("llama", "gpt2", "gemma2", *EXPERTS)


def make_folder(name: str, parent: Path, dtype: torch.dtype = torch.float32) -> Path:
    from tests.helpers.gpt_folders import make_folder as make
    from tests.helpers.gpt_folders import make_model

    # The grouped products of transformers need rows of a multiple of 16 bytes.
    sizes = EVEN if name in EXPERTS else {}
    if dtype == torch.float32:
        return make(name, parent, **sizes)
    make_model(name, **sizes).to(dtype).save_pretrained(parent / name)
    return parent / name


def stock(folder: Path, dtype: torch.dtype) -> Any:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.to(CUDA).eval()


def read_onto_gpu(folder: Path, kind: Any, dtype: torch.dtype) -> Any:
    """Read each parameter from the folder into memory of the GPU."""
    context = ParallelContext(ParallelLayout(), device=CUDA)
    with deferred_weights():
        model = AutoBridge.from_hf_pretrained(folder).to_model(kind, dtype=dtype)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    placement = resolve("auto", num_ranks=1, num_chunks=1).placement
    part = assemble(model.eval(), context, None, placement, PipelineOptions())
    read_weights(model, part, context)
    assert {p.device for p in model.parameters()} == {torch.device(CUDA)}
    return model.to(CUDA)  # buffers that no file has


def tokens(seed: int = 0) -> torch.Tensor:
    draws = torch.Generator().manual_seed(seed)
    return torch.randint(0, 60, (2, SEQUENCE), generator=draws).to(CUDA)


def digests(folder: Path) -> dict[str, str]:
    """Return the sha256 of each tensor of a folder."""
    from safetensors.torch import load_file

    return {
        name: hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_an_untouched_model_is_that_of_transformers(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    folder = make_folder(name, tmp_path, dtype)
    model, other = read_onto_gpu(folder, "transformers", dtype), stock(folder, dtype)
    state = model.state_dict()
    for key, tensor in other.state_dict().items():
        assert state[key].dtype == tensor.dtype and torch.equal(state[key], tensor), key
    # The same kernels on the same values.
    assert torch.equal(model(input_ids=tokens()).logits, other(input_ids=tokens()).logits)
    AutoBridge.from_hf_pretrained(folder).save_hf_pretrained(model, tmp_path / "back")
    assert digests(tmp_path / "back") == digests(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_a_gpt_model_is_that_of_transformers(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = make_folder(name, tmp_path, dtype)
    model = read_onto_gpu(folder, "gpt", dtype)
    found, expected = model(tokens()), stock(folder, dtype)(input_ids=tokens()).logits
    assert float(expected.float().std()) > 0.5
    if dtype == torch.float32:
        # fp32: other kernels, logits up to 20
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    elif name in ("llama", "gpt2", "gemma2"):  # rounding moves tokens to other experts
        exact = stock(folder, torch.float32)(input_ids=tokens()).logits
        error, scale = ((x.float() - exact).abs().mean().item() for x in (found, expected))
        assert error < 2 * scale, (error, scale)
    AutoBridge.from_hf_pretrained(folder).save_hf_pretrained(model, tmp_path / "back")
    assert digests(tmp_path / "back") == digests(folder)


def rows() -> Any:
    draws = torch.Generator().manual_seed(5)
    text = torch.randint(0, 60, (STEPS * BATCH, SEQUENCE + 1), generator=draws)
    return [{"tokens": line[:-1], "labels": line[1:]} for line in text]


def fit(module: Any, precision: Any, *, plain: bool = False, accelerator: str = ACCELERATOR) -> Any:
    losses = Losses()
    strategy: Any = "auto" if plain else MegatronStrategy(micro_batch_size=2)
    run = trainer(
        strategy, accelerator=accelerator, devices=1, max_epochs=1, callbacks=[losses],
        precision=precision,
    )  # fmt: skip
    run.fit(module, DataLoader(rows(), batch_size=BATCH))
    assert run.strategy.root_device.type == ("cpu" if accelerator == "cpu" else "cuda")
    half = torch.bfloat16 in {p.dtype for p in module.parameters()}
    assert half == (precision == "bf16-true")
    return losses.losses, run


def module_of(kind: str, folder: Path, **options: Any) -> Any:
    """Return an untouched model's module, or one of a GPT model."""
    if kind == "gpt":
        return GPTLightningModule(init_from_hf=str(folder), **options)
    return HuggingFaceModule(str(folder), **options)


@pytest.mark.parametrize("kind", ["untouched", "gpt"])
def test_training_a_folder_equals_the_cpu(kind: str, tmp_path: Path) -> None:
    folder = make_folder("llama", tmp_path)
    module = partial(module_of, kind, folder, learning_rate=1e-3)
    expected, _ = fit(module(), "32-true", plain=True, accelerator="cpu")
    found, run = fit(module(), "32-true")
    assert found == pytest.approx(expected, rel=1e-4)  # kernels add up in another order
    run.strategy.save_hf_pretrained(tmp_path / "trained")
    trained, before = digests(tmp_path / "trained"), digests(folder)
    assert trained.keys() == before.keys() and trained != before
    model = stock(tmp_path / "trained", torch.float32)
    for name, tensor in run.strategy.export_hf_weights():
        assert torch.equal(model.state_dict()[name].cpu(), tensor.cpu()), name
    for precision in ("bf16-mixed", "bf16-true"):
        low, _ = fit(module(), precision)
        # bf16 has 8 bits, averaged over 64 tokens
        assert low == pytest.approx(expected, rel=2e-2)


def test_the_command_line_trains_a_bf16_folder_and_writes_one(tmp_path: Path) -> None:
    from megatron_lightning.data.text.preprocess import preprocess
    from tests.helpers.spoken import TEXT, make_spoken

    folder = make_spoken(tmp_path)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    lines = tmp_path / "lines.jsonl"
    lines.write_text("\n".join(json.dumps({"text": TEXT * 3}) for _ in range(20)))
    preprocess(
        str(tmp_path / "text"), str(lines), tokenizer_type="huggingface",
        tokenizer_model=str(folder), append_eod=True,
    )  # fmt: skip
    command = [
        *(sys.executable, "-m", "megatron_lightning", "fit", "--model=HuggingFaceModule"),
        *(f"--model.path={folder}", "--model.learning_rate=1e-3"),
        f"--data.data_prefix={tmp_path}/text_text_document",
        *("--data.sequence_length=32", "--data.batch_size=4", "--data.split=100,0,0"),
        *(f"--trainer.accelerator={ACCELERATOR}", "--trainer.devices=1", "--trainer.max_steps=3"),
        *("--trainer.precision=bf16-true", "--trainer.logger=false"),
        *("--trainer.limit_val_batches=0", "--trainer.enable_progress_bar=false"),
        f"--trainer.default_root_dir={tmp_path}/run",
        "--trainer.strategy.checkpoint_options.also_save_hf=end",
    ]
    found = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-4000:]
    [written] = {file.parent for file in (tmp_path / "run").rglob("config.json")}
    trained, before = digests(written), digests(folder)
    assert trained.keys() == before.keys() and trained != before
    model = transformers.AutoModelForCausalLM.from_pretrained(written, dtype="auto").to(CUDA)
    assert model.dtype == torch.bfloat16
    with torch.no_grad():
        assert bool(model(input_ids=tokens()).logits.isfinite().all())


@pytest.mark.parametrize("kind", ["untouched", "gpt"])
def test_adapters_are_trained_and_written(kind: str, tmp_path: Path) -> None:
    folder = make_folder("llama", tmp_path)
    module = partial(module_of, kind, folder, learning_rate=1e-2, peft=LoRA(r=4))
    expected, _ = fit(module(), "32-true", plain=True, accelerator="cpu")
    found, run = fit(module(), "32-true")
    assert found == pytest.approx(expected, rel=1e-4)  # kernels add up in another order
    own = run.lightning_module
    save_adapters(own, tmp_path / "adapter")
    bridge = AutoBridge.from_hf_pretrained(folder)
    base = bridge.to_model("gpt" if kind == "gpt" else "transformers", dtype=torch.float32)
    again = load_adapters(base.to(CUDA), tmp_path / "adapter").eval()
    with torch.no_grad():
        results = []
        for model in (again, own.model.to(CUDA).eval()):
            out = model(tokens())
            results.append(out if kind == "gpt" else out.logits)
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-5)  # fp32
    try:
        from peft import PeftModel
    except ImportError:
        return
    other = PeftModel.from_pretrained(stock(folder, torch.float32), tmp_path / "adapter")
    with torch.no_grad():
        theirs = other(input_ids=tokens()).logits
    torch.testing.assert_close(results[0], theirs, rtol=1e-4, atol=1e-4)  # fp32, other kernels
