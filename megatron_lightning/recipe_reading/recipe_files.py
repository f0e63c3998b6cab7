"""Recipes by name: the YAML files of ``configs/``, which every installation has. No torch here."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from megatron_lightning.errors import ConfigError
from megatron_lightning.recipe_reading.from_megatron.recipe import from_megatron

_FOLDER = Path(__file__).parents[1] / "recipes"
_OPTION = "--config"
_SUFFIX = ".yaml"


@cache
def recipes() -> Mapping[str, Path]:
    """Return name -> file, in order. Names are paths in ``configs/`` without the suffix."""
    files = sorted(_FOLDER.rglob(f"*{_SUFFIX}"), key=lambda file: (len(file.parts), file))
    return {file.relative_to(_FOLDER).with_suffix("").as_posix(): file for file in files}


def recipe_named(name: str) -> Path:
    """Return the file of a recipe.

    Raises:
        ConfigError: If there is no such recipe.
    """
    file = recipes().get(_bare(name))
    if file is None:
        nearest = get_close_matches(_bare(name), recipes(), n=1)
        raise ConfigError(
            f"there is no recipe {name!r}.{f' Did you mean {nearest[0]!r}?' if nearest else ''} "
            "`megatron-lightning recipe list` lists the recipes."
        )
    return file


def with_recipes(args: Sequence[str]) -> list[str]:
    """Return arguments with the file of a recipe for every name behind ``--config``. A file of that
    name in the current folder comes first.
    """
    result, is_value = [], False
    for word in args:
        name, equals, value = word.partition("=")
        if name == _OPTION and equals:
            result.append(f"{_OPTION}={_resolved(value)}")
        else:
            is_value = word == _OPTION or (is_value and not word.startswith("-"))
            result.append(_resolved(word) if is_value and word != _OPTION else word)
    return result


def _resolved(name: str) -> str:
    for own in (name, f"{name}{_SUFFIX}"):
        if Path(own).is_file():
            return own
    file = recipes().get(_bare(name))
    return name if file is None else str(file)


def _bare(name: str) -> str:
    return name.removeprefix("configs/").removesuffix(_SUFFIX)


# --------------------------------------------------------------------------------------- commands


def list_recipes() -> None:
    """Print the name of every recipe and its first sentence."""
    width = max(map(len, recipes()))
    for name, file in recipes().items():
        print(f"{name:<{width}}  {_summary(file.read_text(encoding='utf-8'))}")


def show_recipe(name: str) -> None:
    """Print the file of a recipe.

    Args:
        name: Name of the recipe.
    """
    print(recipe_named(name).read_text(encoding="utf-8"), end="")


def copy_recipe(name: str, output: str | None = None) -> None:
    """Copy a recipe into the current folder, to be changed. ``--config NAME`` then takes the copy.

    Args:
        name: Name of the recipe.
        output: File to write. None: the name of the recipe with .yaml.

    Raises:
        ConfigError: If the file exists already.
    """
    source = recipe_named(name)
    target = Path(output or source.name)
    if target.exists():
        raise ConfigError(f"{target} exists already. Name another file by --output.")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(source.read_bytes())
    print(target)


def _summary(text: str) -> str:
    """Return the first sentence of the comment at the top of a file."""
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    first = re.split(r"\.(?=\s+[A-Z]|$)|:(?=\s|$)", " ".join(lines))[0]
    return f"{first}."


COMMANDS: Mapping[str, Callable[..., None]] = {
    "list": list_recipes,
    "show": show_recipe,
    "copy": copy_recipe,
    "from-megatron": from_megatron,
}
"""Name in ``megatron-lightning recipe NAME`` -> function."""
