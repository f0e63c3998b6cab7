"""Growth of the dims of a module's parameters, relative to a narrower base, for maximal updates."""

from __future__ import annotations

import warnings

from torch import nn
from torch.nn.modules.conv import _ConvNd

from megatron_lightning.errors import ConfigError
from megatron_lightning.parallel.shards.transposed import is_transposed


def base_shapes(model: nn.Module, base: nn.Module) -> dict[str, tuple[float, ...]]:
    """Return the growth of each dim of every parameter of ``model`` relative to ``base``, by name.

    Args:
        model: The model. It may be on ``meta``.
        base: The same model in its base width. It may be on ``meta``.

    Raises:
        ConfigError: If the models have other parameters, or if stacks or kernels grow.

    Warns:
        UserWarning: If an embedding is an output layer, too.
    """
    _warn_of_ties(model)
    own, others = dict(model.named_parameters()), dict(base.named_parameters())
    if missing := own.keys() ^ others.keys():
        raise ConfigError(
            f"{', '.join(sorted(missing)[:3])} is in one of the model and its base only. Build "
            "both from one class, in two widths and one depth."
        )
    return {
        name: _in_order(
            name,
            _module_of(model, name),
            tuple(n / m for n, m in zip(own[name].shape, others[name].shape, strict=True)),
        )
        for name in own
    }


def _in_order(name: str, module: nn.Module, growth: tuple[float, ...]) -> tuple[float, ...]:
    """Return the growth as (..., fan-out, fan-in): an embedding's rows and those of GPT-2's Conv1D
    are the fan-in, and the dims of a convolution's kernel are last.

    Raises:
        ConfigError: If another dim grows.
    """
    is_table = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or is_transposed(module)
    if len(growth) > 1 and (is_table or isinstance(module, _ConvNd)):
        is_swapped = not isinstance(module, _ConvNd) or module.transposed
        channels, kernel = growth[:2], growth[2:]
        growth = (*kernel, *(channels[::-1] if is_swapped else channels))
    if any(factor != 1 for factor in growth[:-2]):
        raise ConfigError(
            f"{name} of {type(module).__name__} grows by {growth}, and maximal updates know the "
            "growth of the last two dims (fan-out, fan-in) only. Keep the size of stacks and "
            "kernels, or train this model without maximal_update."
        )
    return growth


def _warn_of_ties(model: nn.Module) -> None:
    """Warn of embeddings that are output layers: their logits grow with the width."""
    names = {id(p): name for name, p in model.named_parameters()}
    tables, outputs = (
        {id(m.weight) for m in model.modules() if isinstance(m, kind)}
        for kind in (nn.Embedding, nn.Linear)
    )
    for tied in tables & outputs:
        warnings.warn(
            f"{names[tied]} is the weight of an embedding and of an output layer, and its learning "
            "rate is that of an embedding. Divide the logits by the growth of the width in the "
            "forward, or give the output layer a weight of its own (tie_word_embeddings=False).",
            stacklevel=3,
        )


def _module_of(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])
