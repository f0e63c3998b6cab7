"""Window around the user's hooks outside of steps, on the module and on callbacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_lightning.step.overrides import override, users_methods
from megatron_lightning.step.participant import Participants
from megatron_lightning.step.run_context import RunContext

_LOOPS = ("train", "validation", "test", "predict")
_HOOKS = (
    "on_fit_start", "on_fit_end", "on_sanity_check_start", "on_sanity_check_end",
    *(f"on_{loop}_{event}" for loop in _LOOPS for event in ("start", "end")),
    *(f"on_{loop}_epoch_{event}" for loop in _LOOPS for event in ("start", "end")),
    *(f"on_{loop}_batch_{event}" for loop in _LOOPS for event in ("start", "end")),
    "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad",
)  # fmt: skip


def watch_hooks(scope: RunContext, participants: Participants) -> None:
    """Enter the participants around every hook of the user in this run, if one asks for hooks."""
    if not participants.overrides("user_code"):
        return
    num_calls: dict[tuple[int, str], int] = {}

    def watched(owner: object, name: str) -> Callable[..., Any]:
        where, key = f"{name} of {type(owner).__name__}", (id(owner), name)

        def hook(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            number = num_calls[key] = num_calls.get(key, 0) + 1
            with participants.user_code(where, number):
                return original(*args, **kwargs)

        return hook

    for name in _HOOKS:
        for owner, _ in users_methods(scope.module, name):
            override(owner, name, watched(owner, name), scope.undo)
