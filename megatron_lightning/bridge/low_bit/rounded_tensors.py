"""Weights that the forward of a training with ``qat`` multiplied, and their layers."""

from __future__ import annotations

from itertools import product

from torch import nn

from megatron_lightning.bridge.folder_model import FolderModel, Plan
from megatron_lightning.bridge.low_bit.trained import TrainedWeights
from megatron_lightning.bridge.tensors.lazy import Lazy
from megatron_lightning.bridge.tensors.values import fills_of_checkpoint
from megatron_lightning.checkpoint.reading.source import CheckpointSource
from megatron_lightning.peft.fitting import fitted
from megatron_lightning.peft.merge import deltas_of, merged_fills
from megatron_lightning.peft.record import read_records
from megatron_lightning.peft.saved import SavedAdapters
from megatron_lightning.peft.sources import read_tensors
from megatron_lightning.precision.served.qat import read_qat


def rounded_tensors(
    source: CheckpointSource, path: str, place: str, plan: Plan, model: nn.Module
) -> dict[str, Lazy]:
    """Return name in the folder -> tensor, rounded where the training rounded (``qat``). Adapters
    inside of the rounding are added before it.

    Args:
        source: The checkpoint.
        path: Its path, for messages.
        place: Path of the model in the checkpoint's LightningModule.
        plan: Recipe from the model to its folder.
        model: The model on any device, without adapters.
    """
    fills = fills_of_checkpoint(source, plan.parameters, place)
    record = read_qat(source.state(), path).get(place)
    if record is None:
        return plan.tensors(fills)
    for adapted in read_records(source.state(), path):
        if adapted.path == place:
            state = read_tensors(source, adapted)
            own = SavedAdapters.of_state(
                state, adapted.applied, adapted.base, is_gpt=adapted.is_gpt
            )
            fills = merged_fills(fills, deltas_of(fitted(own, model, path), model))
    return TrainedWeights.of(plan, fills, record).values(plan.folder, plan.tensors(fills))


def layers_of_gpt(bridge: FolderModel) -> dict[str, set[str]]:
    """Return path of a layer in the ``GPTModel`` -> layers of the untouched model with its rows."""
    gpt = bridge.gpt_folder()
    theirs = gpt.pieces(gpt.config, gpt.tensors(gpt.config))
    layers: dict[str, set[str]] = {}
    for name, pieces in bridge.plan().pieces.items():
        for own, piece in product(theirs.get(name, ()), pieces):
            path = own.parameter.removesuffix(".weight")
            layers.setdefault(path, set()).add(piece.parameter.removesuffix(".weight"))
    return layers
