"""Digests of the frozen weights that adapters belong to, on ranks with a part of the model each."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import nn

from megatron_lightning.assembly.state.module_shards import ModuleState
from megatron_lightning.layers.adapters.adapter_layers import adapted_layers
from megatron_lightning.models.transformer import GPTModel
from megatron_lightning.parallel.shards.digest import as_text, digest_of_shards
from megatron_lightning.peft.methods.applied import applied_to
from megatron_lightning.peft.record import take_expected_bases


def check_loaded_base(state: ModuleState) -> None:
    """Check the weights of models against the base of adapters loaded earlier by ``load_adapters``,
    when the models had no weights yet. All ranks call this when the weights are read.

    Raises:
        CheckpointError: On every rank, if a model has other weights.
    """
    for path, base in take_expected_bases(state.module).items():
        prefix = f"{path}." if path else ""
        names = [name for name in frozen_names(state.module) if name.startswith(prefix)]
        base.check(digest_of_part(state, path, names), path or type(state.module).__name__)


def digest_of_part(state: ModuleState, path: str, names: Collection[str]) -> str:
    """Return the digest of the named parameters of the model at ``path``. A collective of all
    ranks.
    """
    prefix = f"{path}." if path else ""
    chosen = set(names)
    shards = (
        state.shards(name.removeprefix(prefix), name, parameter.detach())
        for name, parameter in state.module.named_parameters()
        if name in chosen and name not in state.part.tied
    )
    own_digest = digest_of_shards(shards)
    total = sum(state.context.axis("world").all_gather_object(own_digest))
    is_gpt = isinstance(state.module.get_submodule(path), GPTModel)
    return as_text(total, "gpt" if is_gpt else "own")


def frozen_names(module: nn.Module) -> Iterator[str]:
    """Yield the names of the frozen weights of adapted models. A tied weight has several names."""
    for path in applied_to(module):
        model = module.get_submodule(path)
        prefixes = tuple(f"{layer}.adapters." for layer in adapted_layers(model))
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if not parameter.requires_grad and not name.startswith(prefixes):
                yield f"{path}.{name}" if path else name
