"""Tasks of models of ``transformers``: the names of the tasks in ``peft``, and the heads that train
beside adapters.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import nn

from megatron_lightning.bridge.folders.remembered_folders import new_parameters
from megatron_lightning.models.transformer import GPTModel

_TASKS: Mapping[str, tuple[str, tuple[str, ...]]] = MappingProxyType(
    {
        "ForSequenceClassification": ("SEQ_CLS", ("classifier", "score")),
        "ForTokenClassification": ("TOKEN_CLS", ("classifier", "score")),
        "ForQuestionAnswering": ("QUESTION_ANS", ("qa_outputs",)),
    }
)
"""End of a class name -> task, and ends of the heads' names. ``peft`` trains these heads."""


def task_of(model: nn.Module) -> str | None:
    """Return the ``task_type`` of a model. None: ``peft`` has no task for the model."""
    for end, (task, _) in _TASKS.items():
        if _is_of(model, end):
            return task
    writes_text = isinstance(model, GPTModel) or hasattr(model, "prepare_inputs_for_generation")
    if not writes_text:
        return None
    config: Any = getattr(model, "config", None)
    return "SEQ_2_SEQ_LM" if getattr(config, "is_encoder_decoder", False) else "CAUSAL_LM"


def heads_of(model: nn.Module) -> tuple[str, ...]:
    """Return the paths of the modules that train beside adapters: heads of classifiers, as in
    ``peft``, and modules that the model's folder lacks.
    """
    ends = next((heads for end, (_, heads) in _TASKS.items() if _is_of(model, end)), ())
    heads = [name for name, _ in model.named_children() if ends and name.endswith(ends)]
    heads += [name.rpartition(".")[0] for name in new_parameters(model)]
    return tuple(dict.fromkeys(filter(None, heads)))


def _is_of(model: nn.Module, end: str) -> bool:
    return hasattr(model, "config") and type(model).__name__.endswith(end)
