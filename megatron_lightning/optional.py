"""Optional packages: each is imported where it is used, behind :func:`require`."""

from __future__ import annotations

import types
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from megatron_lightning.errors import ConfigError

EXTRAS: Mapping[str, str] = types.MappingProxyType(
    {
        "datasets": "finetune",
        "fastapi": "serve",
        "gigatoken": "gigatoken",
        "huggingface_hub": "hf",
        "lm_eval": "eval",
        "pyarrow": "data",
        "pydantic": "serve",
        "rich": "finetune",
        "starlette": "serve",
        "tokenizers": "hf",
        "transformers": "hf",
        "uvicorn": "serve",
        "zstandard": "data",
    }
)
"""Package -> extra of ``pip install 'megatron_lightning[extra]'``. Packages without an extra are
installed by their name."""
HF_FOLDER = "a folder of Hugging Face"
"""First words of a message about the packages of the extra ``hf``."""


class MissingPackageError(ConfigError, ImportError):
    """An optional package is missing, or is broken. The message names the extra to install."""


def require(module: str, what: str, instead: str = "") -> Any:
    """Import a module of an optional package.

    Args:
        module: Such as "pyarrow.parquet".
        what: What needs the package, at the beginning of the message.
        instead: What can be done without the package.

    Raises:
        MissingPackageError: If the module cannot be imported.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise missing(module, what, instead, error) from error


def missing(
    module: str, what: str, instead: str = "", error: ImportError | None = None
) -> MissingPackageError:
    """Return the error of a missing package. For arguments see :func:`require`."""
    package = module.partition(".")[0]
    is_absent = error is None or (
        isinstance(error, ModuleNotFoundError) and error.name in (None, package)
    )
    state = "is not installed" if is_absent else f"cannot be imported ({error})"
    extra = EXTRAS.get(package)
    target = package if extra is None else f"'megatron_lightning[{extra}]'"
    return MissingPackageError(
        f"{what} needs the package {package}, which {state}. `pip install {target}`"
        f"{f', or {instead}' if instead else ''}."
    )
