"""A tokenizer of the Llama 2 kind: words that begin with a space, and bytes for the rest."""

from __future__ import annotations

from typing import Any

import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, processors

WORDS = ("▁Hello", "▁world", "▁how", "you", "▁you", "▁", "a", "b", ".")
SPECIAL = ("<unk>", "<s>", "</s>", "<|im_end|>")


def llama_tokenizer() -> Any:
    """Return the tokenizer. Ids: special tokens, 256 bytes, words."""
    vocabulary = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    scores = [(word, -1.0 if word in WORDS else -100.0) for word in vocabulary]
    inner = Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=True))
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    inner.add_special_tokens(list(SPECIAL))
    inner.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
