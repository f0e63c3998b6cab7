"""A tiny random folder of a model with an audio tower and a processor, and rows with sounds."""

from __future__ import annotations

import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from tests.helpers.chats import make_tokenizer, write_rows
from tests.helpers.image_folders import MARKED, words

RATE = 16_000
_TOKENS = ("<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>")
_TEXT: dict[str, Any] = {
    "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 352, "max_position_embeddings": 512,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 4,
}  # fmt: skip
_AUDIO = {
    "d_model": 16, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 24,
    "num_mel_bins": 8, "max_source_positions": 50,
}  # fmt: skip


def make_sound_folder(parent: Path) -> Path:
    """Save a tiny Qwen2-Audio that hears one second, its tokenizer and its processor."""
    template = MARKED.replace("== 'image'", "== 'audio'").replace("IMAGE", "".join(_TOKENS))
    tokens = make_tokenizer(
        ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", *_TOKENS],
        template=template,
        vocab_size=340,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="<|im_end|>",
    )
    config = transformers.Qwen2AudioConfig(
        audio_config=transformers.Qwen2AudioEncoderConfig(**_AUDIO),
        text_config=transformers.Qwen2Config(**_TEXT),
        audio_token_index=tokens.convert_tokens_to_ids("<|AUDIO|>"),
    )
    torch.manual_seed(0)
    model = transformers.Qwen2AudioForConditionalGeneration(config)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=draw))
    folder = parent / "qwen2_audio"
    model.save_pretrained(folder)
    tokens.save_pretrained(folder)
    transformers.WhisperFeatureExtractor(
        feature_size=8, sampling_rate=RATE, chunk_length=1
    ).save_pretrained(folder)
    (folder / "processor_config.json").write_text(
        json.dumps({"processor_class": "Qwen2AudioProcessor"})
    )
    return folder


def write_sound(
    path: Path,
    seconds: float,
    *,
    rate: int = RATE,
    width: int = 2,
    channels: int = 1,
    seed: int = 0,
) -> str:
    """Write a WAV file of noise with ``width`` bytes a sample. Return its name."""
    shape = (round(seconds * rate), channels, width)
    samples = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(samples.tobytes())
    return path.name


def write_sound_rows(folder: Path, count: int = 8) -> str:
    """Write conversations with none, one and two sounds of three lengths. Return the rows' path."""
    files = [
        write_sound(folder / f"{n}.wav", seconds, seed=n) for n, seconds in enumerate((0.3, 0.5, 1))
    ]
    rows = []
    for index in range(count):
        sounds = [{"type": "audio", "audio": files[(index + n) % 3]} for n in range(index % 3)]
        content = [*sounds, words(f"what is it {index}")]
        turns = [("user", content), ("assistant", "a red one " + "green " * (index % 4))]
        rows.append({"messages": [{"role": role, "content": one} for role, one in turns]})
    return write_rows(folder / "chats.jsonl", rows)
