"""Sizes of an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_lightning.errors import ConfigError

Storage = Literal["auto", "runs", "pages"]


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Sizes of an engine.

    Raises:
        ConfigError: If a value cannot work.
    """

    max_tokens: int = 512
    """Tokens of a step, over all requests. Longer prompts are computed in chunks."""
    max_requests: int = 64
    """Requests running at the same time, at most. Further requests wait."""
    cache_gib: float = 1.0
    """GiB for keys and values on each rank, at most. The cache is smaller if ``max_requests`` texts
    of the longest length need less, with ``prefix_cache`` twice as many."""
    block_size: int = 256
    """Slots of a page, if keys are kept in pages."""
    storage: Storage = "auto"
    """Storage of keys. "runs": neighboring slots for each request, reserved at the request's start.
    "pages": pages reserved as the text grows. "auto": runs on a CPU, pages on a GPU."""
    draft_tokens: int = 0
    """Tokens drafted for each request in a step, by as many layers of multi-token prediction, and
    verified by the model. Texts are the same. 0: no drafts."""
    prefix_cache: bool = True
    """Whether keys of ended texts are kept, as long as there is room, for requests that begin with
    the same tokens. Texts are the same. Without effect on models whose layers carry states, and
    beside ``record_routes``."""
    record_routes: bool = False
    """Whether completions have the experts of each token, for a replay in training."""

    def __post_init__(self) -> None:
        for name in ("max_tokens", "max_requests", "block_size", "cache_gib"):
            value = getattr(self, name)
            if not value > 0 or (name != "cache_gib" and value != int(value)):
                kind = "a positive number" if name == "cache_gib" else "a positive integer"
                raise ConfigError(f"{name} is {value!r}; it must be {kind}. Set it to 1 or more.")
        if self.max_requests > self.max_tokens:
            raise ConfigError(
                f"max_requests is {self.max_requests} and max_tokens is {self.max_tokens}; every "
                "running request gets a token in a step. Raise max_tokens, or lower max_requests."
            )
        if self.draft_tokens != int(self.draft_tokens) or self.draft_tokens < 0:
            raise ConfigError(
                f"draft_tokens is {self.draft_tokens!r}. Set it to 0 (no drafts) or a positive "
                "integer."
            )
        if self.draft_tokens >= self.max_tokens:
            raise ConfigError(
                f"draft_tokens is {self.draft_tokens} and max_tokens is {self.max_tokens}; a step "
                "computes a token together with the token's drafts. Raise max_tokens, or lower "
                "draft_tokens."
            )
        if self.storage not in ("auto", "runs", "pages"):
            raise ConfigError(f'storage is {self.storage!r}. Set it to "runs", "pages" or "auto".')
