"""Tied parameters: a tensor under several names of a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from megatron_lightning.errors import ShardingError

_RECORDED_TIES = "_megatron_ties"


def record_ties(model: nn.Module) -> None:
    """Record in ``model`` the tied parameters (a tensor under several names), for
    :func:`tied_names`.

    Call the function before partitioning, since partitioning may send the names of a tensor to
    different ranks.
    """
    model.__dict__[_RECORDED_TIES] = {
        name: owner for owner, *names in shared_names(model) for name in names
    }


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return copy -> owner for every tied parameter of ``model``.

    The ties come from :func:`record_ties`, even if this rank holds only a single name.
    """
    return dict(vars(model).get(_RECORDED_TIES, {}))


def shared_names(model: nn.Module) -> list[list[str]]:
    """Return the names of every parameter with several names."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


@contextmanager
def untied(model: nn.Module) -> Iterator[None]:
    """Give every name of a shared parameter a parameter of its own inside the block, with the same
    data, so that each module takes shards. Afterwards, also after an error, all names share the
    first parameter.

    Raises:
        ShardingError: If the shards differ.
    """
    tied = shared_names(model)
    for owner, *copies in tied:
        parameter = model.get_parameter(owner)
        for copy in copies:
            _set(model, copy, nn.Parameter(parameter.detach(), parameter.requires_grad))
    try:
        yield
        for owner, *copies in tied:
            _check_shapes(model, owner, copies)
    finally:
        for owner, *copies in tied:
            parameter = model.get_parameter(owner)
            for copy in copies:
                _set(model, copy, parameter)


def _check_shapes(model: nn.Module, owner: str, copies: list[str]) -> None:
    shape = tuple(model.get_parameter(owner).shape)
    for copy in copies:
        copy_shape = tuple(model.get_parameter(copy).shape)
        if copy_shape != shape:
            raise ShardingError(
                f"{copy} and {owner} were one parameter, and the plan gives them the shapes "
                f"{copy_shape} and {shape}. Give both modules the same style."
            )


def _set(model: nn.Module, path: str, parameter: nn.Parameter) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, parameter)
