"""Parameters that a module does not train, by patterns of names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from megatron_lightning.errors import ConfigError
from megatron_lightning.parallel.shards.patterns import compile_pattern, nearest_pattern

_SUMMARY = "frozen_parameters"
_PREFIX = "model."  # the model's name in a LightningModule of this package


@dataclass(frozen=True, kw_only=True)
class FrozenParameters:
    """Patterns of the frozen parameters, or of the trained ones.

    A pattern matches the name of a parameter, or of a module with all parameters inside. A tied
    parameter has several names.
    """

    freeze: Sequence[str] = ()
    """Patterns of the parameters that are frozen. The others are trained."""
    train_only: Sequence[str] = ()
    """Patterns of the parameters that are trained. The others are frozen."""

    def __post_init__(self) -> None:
        for name in ("freeze", "train_only"):
            if isinstance(getattr(self, name), str):
                raise ConfigError(
                    f"{name} is {getattr(self, name)!r}; must be a list of patterns. Set "
                    f"{name}=[{getattr(self, name)}]."
                )
        if self.freeze and self.train_only:
            raise ConfigError(
                f"freeze={list(self.freeze)} and train_only={list(self.train_only)} are both set, "
                "and each says of all parameters whether they are trained. Leave one out."
            )

    def __bool__(self) -> bool:
        return bool(self.freeze or self.train_only)

    def apply(self, model: nn.Module) -> None:
        """Freeze parameters of the full model, and record how many.

        Raises:
            ConfigError: If a pattern matches nothing, or nothing is trained.
        """
        option = "freeze" if self.freeze else "train_only"
        matched = _matching(model, self.freeze or self.train_only, option)
        parameters = {id(p): p for p in model.parameters()}
        for key, parameter in parameters.items():
            if (key in matched) == bool(self.freeze):
                parameter.requires_grad_(False)
        trained = [p for p in parameters.values() if p.requires_grad]
        if not trained:
            raise ConfigError(
                f"freeze={list(self.freeze)} matches all {len(parameters)} parameters of "
                f"{type(model).__name__}, so that nothing is trained. Leave some out."
            )
        model.__dict__[_SUMMARY] = (
            f"{option}: {len(trained)} of {len(parameters)} parameters of "
            f"{type(model).__name__} are trained ({sum(p.numel() for p in trained):,} of "
            f"{sum(p.numel() for p in parameters.values()):,} values)."
        )


def summary_of(model: nn.Module) -> str | None:
    """Return the line that counts a model's trained parameters. None: nothing is frozen by
    pattern.
    """
    text: str | None = vars(model).get(_SUMMARY)
    return text


def _matching(model: nn.Module, patterns: Sequence[str], option: str) -> set[int]:
    """Return the identities of the parameters that any pattern matches."""
    paths: dict[str, set[int]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        for path in _paths(name):
            paths.setdefault(path, set()).add(id(parameter))
    matched: set[int] = set()
    for pattern in patterns:
        regex = compile_pattern(pattern)
        found = [keys for path, keys in paths.items() if regex.fullmatch(path)]
        if not found:
            near = nearest_pattern(pattern, paths)
            hint = f" (did you mean {near!r}?)" if near else ""
            raise ConfigError(
                f"{option} has the pattern {pattern!r}, which matches no parameter and no module "
                f"of {type(model).__name__}{hint}. Parameters are called "
                f"{', '.join(name for name, _ in list(model.named_parameters())[:2])}; * "
                "represents a part of a segment, and ** any number of segments."
            )
        matched.update(*found)
    return matched


def _paths(name: str) -> Iterator[str]:
    """Yield the names of a parameter and of the modules around it, as they are in the model and in
    the LightningModule.
    """
    segments = name.split(".")
    for length in range(1, len(segments) + 1):
        path = ".".join(segments[:length])
        yield path
        yield _PREFIX + path
