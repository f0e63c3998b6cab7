"""A tiny Llama folder with a tokenizer of bytes, a chat template, and BOS before every text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

TEXT = (
    "def f(x):\n    return x\nimport os, sys\nclass A:\n    pass\nfor i in range(10):\n    f(i)\n"
)


def make_tokenizer() -> Any:
    """Return a tokenizer of bytes with a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<s>", "</s>", "<user>", "<bot>", *alphabet]
    inner = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
        additional_special_tokens=["<user>", "<bot>"],
    )
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}"
        "{{ '<user>' if m['role'] == 'user' else '<bot>' }}{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<bot>{% endif %}"
    )
    return tokenizer


def make_spoken(parent: Path, *, name: str = "spoken", length: int = 128, **options: Any) -> Path:
    """Save a random model that writes many distinct tokens."""
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    sizes = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": length,
        "initializer_range": 0.2,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1,
        "tie_word_embeddings": False,
    }
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(sizes | options)))
    model.eval().save_pretrained(parent / name)
    tokenizer.save_pretrained(parent / name)
    return parent / name
