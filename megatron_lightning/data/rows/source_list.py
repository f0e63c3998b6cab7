"""The sources of fine-tuning data in an option: paths, with or without weights."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from megatron_lightning.errors import ConfigError


def parse_sources(path: Any) -> tuple[list[str], list[float] | None]:
    """Return the paths named by an option, and the weights if there are any.

    Args:
        path: A path, a list of paths, or a list of pairs of a weight and a path.

    Raises:
        ConfigError: If the option has another form, names a source twice, or has bad weights.
    """
    sources = [path] if isinstance(path, str | os.PathLike) else list(path)
    entries = [os.fspath(one) if isinstance(one, os.PathLike) else one for one in sources]
    pairs = [entry for entry in entries if not isinstance(entry, str)]
    if not entries or (pairs and len(pairs) != len(entries)):
        raise ConfigError(
            f"path={path!r}: must be a path, a list of paths, or a list of pairs of a weight and a "
            "path"
        )
    if not pairs:
        paths, weights = [str(entry) for entry in entries], None
    else:
        for pair in pairs:
            is_pair = isinstance(pair, Sequence) and len(pair) == 2
            if not is_pair or not isinstance(pair[0], int | float) or not isinstance(pair[1], str):
                raise ConfigError(
                    f"path has the entry {pair!r}; a pair is a weight and a path, as in [0.3, "
                    "chats.jsonl]"
                )
        paths, weights = [pair[1] for pair in pairs], [float(pair[0]) for pair in pairs]
        if any(not weight > 0 for weight in weights):
            raise ConfigError(f"path has the weights {weights}; each must be above 0")
    if len(set(paths)) < len(paths):
        raise ConfigError(f"path names a source twice: {paths}; add the weights of equal sources")
    return paths, weights
