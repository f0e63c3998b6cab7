"""Families by name, in the order of an export's search for the first fitting family."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from megatron_lightning.bridge.families.cohere import Cohere, Cohere2
from megatron_lightning.bridge.families.deepseek import DeepseekV2, DeepseekV3
from megatron_lightning.bridge.families.exaone4 import Exaone4
from megatron_lightning.bridge.families.gemma import Gemma, Gemma2, Gemma3, VaultGemma
from megatron_lightning.bridge.families.glm import Dots1, Ernie4_5, Glm, Glm4, Glm4Moe
from megatron_lightning.bridge.families.gpt2 import GPT2
from megatron_lightning.bridge.families.gpt_oss import GptOss
from megatron_lightning.bridge.families.granite import Granite, GraniteMoe
from megatron_lightning.bridge.families.llama import Llama
from megatron_lightning.bridge.families.mamba2 import Mamba2
from megatron_lightning.bridge.families.mistral import Cwm, Ministral, Mistral
from megatron_lightning.bridge.families.mixtral import Mixtral
from megatron_lightning.bridge.families.nemotron import Arcee, Nemotron
from megatron_lightning.bridge.families.nemotron_h import NemotronH
from megatron_lightning.bridge.families.olmo2 import Olmo2, Olmo3
from megatron_lightning.bridge.families.phi import Phi3
from megatron_lightning.bridge.families.qwen import Qwen2, Qwen3
from megatron_lightning.bridge.families.qwen3_next import Qwen3Next
from megatron_lightning.bridge.families.qwen_moe import Olmoe, Qwen2Moe, Qwen3Moe
from megatron_lightning.bridge.families.seed_oss import SeedOss
from megatron_lightning.bridge.families.smollm3 import SmolLM3
from megatron_lightning.bridge.families.starcoder2 import Starcoder2
from megatron_lightning.bridge.family_rules.family import Family, UnwritableError, missing_fields
from megatron_lightning.config import TransformerConfig
from megatron_lightning.errors import ConfigError

_ALL: tuple[type[Family], ...] = (
    Llama, Mistral, Qwen2, Qwen3, Phi3, GPT2, Mixtral, Qwen3Moe, Qwen2Moe, Olmoe, DeepseekV2,
    DeepseekV3, Granite, Olmo2, Gemma,
    Gemma2, Gemma3, GptOss, SmolLM3,
    Olmo3, Ministral, Cwm, Exaone4, SeedOss, Arcee, Nemotron, Starcoder2, GraniteMoe, VaultGemma,
    Glm4Moe, Dots1, Mamba2, NemotronH, Qwen3Next, Glm, Glm4, Ernie4_5, Cohere, Cohere2,
)  # fmt: skip
FAMILIES: Mapping[str, type[Family]] = MappingProxyType(
    {family.__name__.lower(): family for family in _ALL}
)
"""Name of a family -> the family."""


def family_of(name: str) -> type[Family]:
    """Return a family by name, or a user's family by class path.

    Raises:
        ConfigError: If there is no such family.
    """
    if name in FAMILIES:
        return FAMILIES[name]
    module, _, attribute = name.rpartition(".")
    reason = "no such module"
    try:
        family = getattr(importlib.import_module(module), attribute) if module else None
    except (ImportError, AttributeError) as error:
        family, reason = None, str(error)
    if not (isinstance(family, type) and issubclass(family, Family)):
        raise ConfigError(
            f"family is {name!r}, which is neither one of {', '.join(FAMILIES)} nor the class path "
            f"of a subclass of megatron_lightning.bridge.family_rules.family.Family ({reason}). "
            "Set one of these."
        )
    return family


def family_for(architectures: Iterable[str], path: object) -> type[Family]:
    """Return the family of a folder's architectures.

    Raises:
        ConfigError: If GPTModel has no rules for any architecture.
    """
    names = list(architectures)
    for family in FAMILIES.values():
        if family.architecture in names:
            return family
    raise ConfigError(
        f"{path}/config.json names the architectures {names}, and GPTModel has rules for "
        f"{', '.join(family.architecture for family in FAMILIES.values())}. Train the untouched "
        'model: HuggingFaceModule, or to_model("transformers"). Rules of your own are given as '
        "family, the class path of a Family."
    )


def family_like(config: TransformerConfig) -> type[Family]:
    """Return the first family able to describe a configuration of ours.

    Raises:
        ConfigError: If no family does, with the fields missing from the nearest family.
    """
    missing_names: dict[str, list[str]] = {}
    for name, family in FAMILIES.items():
        try:
            missing_names[name] = missing_fields(family, config)
        except UnwritableError:
            continue
        if not missing_names[name]:
            return family
    nearest = min(missing_names, key=lambda name: len(missing_names[name]))
    raise ConfigError(
        f"no family of transformers describes the model. The nearest one, {nearest}, lacks "
        f"{', '.join(missing_names[nearest])}. Name a family with --family, the class path of your "
        "own for a class of your own."
    )
