"""Functions that known libraries have written, by the file of their code.

A function may compute anything, also an attention function of ``transformers``, which is found by a
name in the configuration.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from megatron_lightning.optional import require

_KNOWN = (
    "torch.", "transformers.", "megatron_lightning.", "peft.", "liger_kernel.", "bitsandbytes.",
    "torchao.", "accelerate.", "flash_attn.", "causal_conv1d.", "mamba_ssm.", "fla.", "kernels.",
    "lightning.", "pytorch_lightning.", "wandb.",
)  # fmt: skip
"""Beginnings of the names of files whose code mixes no tokens beside that of a model's family."""


def is_known(function: Any) -> bool:
    """Return whether a known library has written a function, whatever the function is called."""
    while isinstance(function, partial):
        function = function.func
    function = getattr(function, "__func__", function)
    names = getattr(function, "__globals__", {})  # a wrapper copies __module__ of what it wraps
    return is_known_file(str(names.get("__name__") or getattr(function, "__module__", "")))


def is_known_file(name: str) -> bool:
    """Return whether a file of code, by its name for imports, is of a known library."""
    return f"{name}.".startswith(_KNOWN)


def attention_functions(config: Any) -> Iterator[tuple[str, Any]]:
    """Yield the functions that models of a configuration of ``transformers`` attend and make masks
    with, each with the setting that finds it. A name without a mask function yields None: the
    models make no mask.
    """
    name = getattr(config, "_attn_implementation", None)
    if not isinstance(name, str):
        return
    require("transformers", "a model of transformers")
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    setting = f"attn_implementation={name!r}"
    attends = ALL_ATTENTION_FUNCTIONS.get(name)
    if attends is not None:  # the eager function is in the file of the model
        yield setting, attends
    yield setting, ALL_MASK_ATTENTION_FUNCTIONS.get(name)
