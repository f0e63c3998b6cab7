"""Tokenizers of ``transformers`` without the imports of their models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_lightning.file_names import CONFIG, TOKENIZER_CONFIG
from megatron_lightning.optional import require


def auto_tokenizer(source: str, *, trust_remote_code: bool = False) -> Any:
    """Return the tokenizer of ``AutoTokenizer.from_pretrained``.

    Args:
        source: A folder, or a name on the Hugging Face Hub.
        trust_remote_code: Whether code in the folder may run. False, not None: ``transformers``
            would ask on the terminal of every rank.
    """
    require("transformers", "a tokenizer of a folder")
    from transformers import AutoTokenizer

    options = {} if trust_remote_code else _configuration(Path(source))
    return AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code, **options)


def _configuration(folder: Path) -> dict[str, Any]:
    """Return the option ``config`` of a folder: the model's configuration without its class.

    ``AutoTokenizer`` reads the type of the model from the configuration, and the class of the
    configuration only in folders that do not name the tokenizer's class. The class imports the
    attention kernels of ``transformers`` and torch's compiler.
    """
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        settings = json.loads((folder / TOKENIZER_CONFIG).read_text(encoding="utf-8"))
        has_code = "auto_map" in config or "auto_map" in settings
        if has_code or not settings.get("tokenizer_class"):
            return {}
    except (OSError, ValueError, TypeError, AttributeError):  # transformers says what is wrong
        return {}
    require("transformers", "a tokenizer of a folder")
    from transformers import PreTrainedConfig

    generic: Any = PreTrainedConfig()
    generic.model_type = str(config.get("model_type", ""))
    generic.model_name = config.get("model_name")
    generic.name_or_path = str(folder)
    return {"config": generic}
