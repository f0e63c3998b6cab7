"""Scales and histories of Transformer Engine's layers as tensors and JSON.

Transformer Engine's ``_extra_state`` of delayed scaling is a pickle, and a checkpoint does not load
pickles. This file reads and writes the pickle's contents instead. Other recipes have no state.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from megatron_lightning.errors import CheckpointError
from megatron_lightning.precision.transformer_engine.engines import ModuleEngine

_DIRECTIONS = ("fwd", "bwd")
_TENSORS = ("scale", "amax_history")
_ABOUT = "about"


def read_state(engines: Mapping[str, ModuleEngine], version: str) -> dict[str, Any]:
    """Return the state of layers with delayed scaling: ``path.scale_fwd`` and the like -> tensor,
    and ``about``: JSON of Transformer Engine's version and the number of GEMMs of each layer.
    """
    tensors: dict[str, Any] = {}
    num_gemms: dict[str, int] = {}
    for path, engine in engines.items():
        meta = engine.module.fp8_meta
        for direction in _DIRECTIONS:
            scaling = meta.get(f"scaling_{direction}")
            for name in _TENSORS:
                value = getattr(scaling, name, None)
                if isinstance(value, Tensor) and hasattr(scaling, "amax_history"):
                    tensors[f"{path}.{name}_{direction}"] = value.detach().cpu()
                    num_gemms[path] = int(meta["num_gemms"])
    if not tensors:
        return {}
    return tensors | {_ABOUT: json.dumps({"version": version, "num_gemms": num_gemms})}


def latest_amax(engines: Mapping[str, ModuleEngine]) -> Iterator[tuple[str, Tensor]]:
    """Yield the first row of every forward history, by layer path.

    Transformer Engine writes the amax values of the current forward into the first row.
    """
    for path, engine in engines.items():
        scaling = engine.module.fp8_meta.get("scaling_fwd")
        history = getattr(scaling, "amax_history", None)
        if history is not None:
            yield path, history[0]


def join_states(states: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the states of all pipeline ranks merged into one dict."""
    states = [state for state in states if state]
    if not states:
        return {}
    about = [json.loads(state[_ABOUT]) for state in states]
    num_gemms = {path: n for about_rank in about for path, n in about_rank["num_gemms"].items()}
    joined = {name: value for state in states for name, value in state.items()}
    return joined | {_ABOUT: json.dumps({"version": about[0]["version"], "num_gemms": num_gemms})}


def load_state(
    engines: Mapping[str, ModuleEngine], state: Mapping[str, Any], recipes: Mapping[str, Any]
) -> None:
    """Restore :func:`read_state`, of a joined state as well.

    Args:
        engines: Engines by the path of their layer.
        state: The saved state.
        recipes: Transformer Engine's recipe of each layer with delayed scaling.

    Raises:
        CheckpointError: If the checkpoint has no state of a layer.
    """
    if not state:
        return
    num_gemms = json.loads(state[_ABOUT])["num_gemms"]
    if missing_paths := sorted(recipes.keys() - num_gemms.keys()):
        raise CheckpointError(
            f"the checkpoint has Transformer Engine's scales of {len(num_gemms)} layers and none "
            f"of {', '.join(missing_paths[:3])}: it was saved with another recipe, or other "
            "recomputed modules. Set those that it was saved with, or scaling to current."
        )
    for path, recipe in recipes.items():
        module = engines[path].module
        meta = module.fp8_meta
        meta["recipe"] = recipe
        meta["num_gemms"] = num_gemms[path]
        # Allocated by the engine itself, so that the state has the sizes of this version.
        module.init_fp8_meta_tensors(recipe)
        for direction in _DIRECTIONS:
            scaling = meta[f"scaling_{direction}"]
            scaling.scale.copy_(state[f"{path}.scale_{direction}"])
            history = state[f"{path}.amax_history_{direction}"]
            length = min(len(history), len(scaling.amax_history))
            scaling.amax_history[:length].copy_(history[:length])
