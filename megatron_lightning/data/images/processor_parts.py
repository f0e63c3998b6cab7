"""Classes and parts of a folder's processor, as ``transformers`` makes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_lightning.data.images.media import MEDIA
from megatron_lightning.errors import ConfigError
from megatron_lightning.file_names import (
    CONFIG,
    IMAGE_PROCESSOR_CONFIG,
    PROCESSOR_CONFIG,
    TOKENIZER_CONFIG,
)
from megatron_lightning.optional import require

_NEEDS = "images in chats"
_NAMED_IN = (PROCESSOR_CONFIG, IMAGE_PROCESSOR_CONFIG, TOKENIZER_CONFIG)


class NoProcessorError(ConfigError):
    """A folder without a processor: its model reads text alone."""


def with_missing_parts(kind: Any) -> Any:
    """Return a subclass of a processor that takes None for parts that nobody calls."""

    class Processor(kind):  # type: ignore[misc]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument is None:
                return None
            return super().check_argument_for_proper_class(argument_name, argument)

    Processor.__name__ = kind.__name__
    return Processor


def processor_class(folder: Path, *, trusts: bool) -> Any:
    """Return the class of a folder's processor.

    Raises:
        ConfigError: If the folder names none.
    """
    require("transformers", _NEEDS)
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    for name in _NAMED_IN:
        file = folder / name
        named = json.loads(file.read_text()).get("processor_class") if file.is_file() else None
        kind = getattr(transformers, named, None) if isinstance(named, str) else None
        if kind is not None:
            return kind
    if (folder / CONFIG).is_file():
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=trusts)
        if type(config) in PROCESSOR_MAPPING:
            return PROCESSOR_MAPPING[type(config)]
    raise NoProcessorError(
        f"{folder} has no processor known to transformers, which chats with images need; copy "
        f"{PROCESSOR_CONFIG} and {IMAGE_PROCESSOR_CONFIG} of the model into the folder"
    )


def kind_of_folder(folder: Path, wanted: str) -> str:
    """Return the kind of a folder's inputs beside text: ``wanted``, unless the processor reads the
    other one alone.

    Raises:
        NoProcessorError: If the folder has no processor.
        ConfigError: If the processor needs a package that is missing.
    """
    try:
        names = processor_class(folder, trusts=False).get_attributes()
    except ImportError as error:
        raise missing_package(folder, error) from error
    kinds = [kind for kind, medium in MEDIA.items() if medium.part in names]
    return wanted if wanted in kinds or not kinds else kinds[0]


def missing_package(folder: Path, error: ImportError) -> ConfigError:
    """Return the error of a processor that needs a package."""
    reason = " ".join(str(error).split())
    install = "Install what it names."
    if "torchvision" in reason.lower():
        install = (
            "Install torchvision of the same build as torch: pip install torchvision --index-url "
            "https://download.pytorch.org/whl/cpu, or …/whl/cu130 with CUDA."
        )
    return ConfigError(f"the processor of {folder} cannot be made ({reason}). {install}")


def input_part(folder: Path, options: Mapping[str, Any], *, trusts: bool, medium: str) -> Any:
    """Return the part of a folder's processor that makes inputs of a medium."""
    require("transformers", _NEEDS)
    from transformers import AutoFeatureExtractor, AutoImageProcessor

    kind: Any = AutoImageProcessor if medium == "image" else AutoFeatureExtractor
    load: Any = kind.from_pretrained
    try:
        made = load(folder, trust_remote_code=trusts, **options)
    except (OSError, ValueError) as error:
        reason = str(error).partition(". ")[0]  # a list of all kinds may follow
        raise ConfigError(
            f"{folder} has no {medium} processor ({reason}); copy {IMAGE_PROCESSOR_CONFIG} of the "
            "model into the folder"
        ) from error
    unknown = [name for name in options if name not in made.to_dict() and not hasattr(made, name)]
    if unknown:
        raise ConfigError(
            f"processor_options has {unknown[0]!r}, which {type(made).__name__} does not know; it "
            f"knows {', '.join(sorted(made.to_dict()))}"
        )
    return made
