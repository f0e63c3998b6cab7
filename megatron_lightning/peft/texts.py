"""Files beside the weights of an export: the end tokens of generation, and a model card.

A base model tuned on conversations does not stop by itself. ``generation_config.json`` of the
base's folder names the end of a document, and not the end of a turn in the chat template.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from megatron_lightning.bridge.folders.new_folder import end_of_turn
from megatron_lightning.checkpoint.kept_files import KeptFiles
from megatron_lightning.checkpoint.text_record import TextRecord, end_tokens
from megatron_lightning.errors import ConfigError, MissingCheckpointError
from megatron_lightning.file_names import CARD
from megatron_lightning.optional import require
from megatron_lightning.peft.saved import SavedAdapters

_TOKENIZER = "tokenizer"
_CARD = """---
base_model: {base}
library_name: {library}
tags: [{tag}, megatron_lightning]
---

# {name}

{what} of rank {rank} for {layers} layers of {base}, trained with megatron_lightning.
{use}
"""
_USE_ADAPTERS = """
Load them with `peft.PeftModel.from_pretrained(model, folder)`, or serve them with vLLM:
`--enable-lora --max-lora-rank {rank}`."""
_USE_MERGED = """
Load them with `peft.PeftModel.from_pretrained(model, folder)`. vLLM does not serve {label}: merge
them into the base by `megatron-lightning adapters merge`."""


def stops(files: Mapping[str, bytes], template: str | None = None) -> dict[str, bytes]:
    """Return the used chat template, and a generation configuration with the end of a turn. Empty
    without a tokenizer or template.

    Args:
        files: Files of the base's folder by name.
        template: Jinja template, or a file with a template. None: the tokenizer's.

    Raises:
        ConfigError: If the template cannot be filled.
    """
    contents = TextRecord(
        chat_template=None if template is None else _text_of(template)
    ).applied_to(files)
    if any(name.startswith(_TOKENIZER) for name in files):
        contents = TextRecord(end_of_turn=_ends(contents)).applied_to(contents)
    return {name: text for name, text in contents.items() if files.get(name) != text}


def _ends(files: Mapping[str, bytes]) -> tuple[int, ...]:
    """Return the end of a turn in the chat template, behind the end of a text if no file names
    one. Empty: the template shows no end.
    """
    require("transformers", "adapters for Hugging Face")
    from transformers import AutoTokenizer

    with KeptFiles(files).unpacked() as folder:
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        except (OSError, ValueError, KeyError, TypeError):
            return ()  # a tokenizer with custom code
    end = end_of_turn(tokenizer)
    if end is None:
        return ()
    eos = None if end_tokens(files) else tokenizer.eos_token_id
    return (end,) if eos is None else (eos, end)


def card(own: SavedAdapters, name: str, *, merged: bool) -> dict[str, bytes]:
    """Return a model card."""
    ranks = {factors.rank for parts in own.layers.values() for factors in parts.values()}
    rank = max(ranks, default=0)
    label = own.method.label
    use = _USE_ADAPTERS if own.method.is_served else _USE_MERGED.format(label=label)
    text = _CARD.format(
        base=own.base.origin or "an unnamed base",
        library="transformers" if merged else "peft",
        name=name,
        what=f"The sum of the weights and of adapters ({label})"
        if merged
        else f"Adapters ({label})",
        tag=own.method.peft_type.lower(),
        rank=rank,
        layers=len(own.layers),
        use="" if merged else use.format(rank=rank),
    )
    return {CARD: text.encode()}


def _text_of(template: str) -> str:
    if "{" in template:
        return template
    if not Path(template).is_file():
        raise MissingCheckpointError(
            f"chat_template is {template!r}, which is neither a template nor a file with one."
        )
    try:
        return Path(template).read_text()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{template} is no text ({error}). Name a Jinja template.") from error
