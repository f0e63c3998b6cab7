"""Find attention that misses tokens of the sequence, in the first step of each kind.

Where ranks share a sequence, attention without a ``ContextAttention`` row mixes the tokens of one
rank only, and the loss looks like any other. A call of torch's own attention and an uncalled bound
module are therefore errors.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from megatron_lightning.assembly.checks.attention_rows import bound_attention
from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.shared_rows.entry import shared_models
from megatron_lightning.layers.shared_rows.own_modules import TokenSharer
from megatron_lightning.layers.styles.divided_embeddings import dividing_hooks
from megatron_lightning.parallel.shards.other_stages import present_modules
from megatron_lightning.step.judge import Judge

_FOREIGN = (
    F.scaled_dot_product_attention,
    F.multi_head_attention_forward,
    torch._native_multi_head_attention,
    torch._transformer_encoder_layer_fwd,
)
"""Functions of torch for attention over a sequence."""


class AttentionWatch(TorchFunctionMode):
    """Watches the attention of a module inside a block.

    Args:
        module: This rank's part of the model.
        judge: Verdict on findings.
    """

    def __init__(self, module: nn.Module, judge: Judge) -> None:
        super().__init__()
        self._judge = judge
        self._uncalled: dict[str, nn.Module] = dict(bound_attention(module))
        self._undo = ExitStack()
        present = list(present_modules(module))
        self._entries = {path: child for path, child in present if dividing_hooks(child)}
        self._outer = [
            child
            for path, child in present
            if any(entry.startswith(f"{path}." if path else "") for entry in self._entries)
        ]
        # Before a text model divides its rows, towers attend to full images.
        self._is_divided = not self._entries
        self._num_shared = 0
        self._shared = [module.get_submodule(path) for path in shared_models(module)]
        self._shared += [m for m in self._uncalled.values() if isinstance(m, TokenSharer)]
        self.called: set[str] = set()
        """Paths of the bound modules called so far."""

    def __enter__(self) -> AttentionWatch:
        for path, child in self._uncalled.items():  # called modules are removed later
            hook = child.register_forward_pre_hook(self._called(path))
            self._undo.callback(hook.remove)
        # Calls around begin before the division, and a stage of a pipeline may not return from one.
        for outer in self._outer:
            self._undo.callback(outer.register_forward_pre_hook(self._begun).remove)
        for entry in self._entries.values():
            self._undo.callback(entry.register_forward_pre_hook(self._entered).remove)
        # What mixes tokens in these was found and proven, or gets full rows.
        for shared in self._shared:
            begin = shared.register_forward_pre_hook(self._begin_shared, prepend=True)
            end = shared.register_forward_hook(self._end_shared)
            self._undo.callback(begin.remove)
            self._undo.callback(end.remove)
        self._undo.enter_context(torch.compiler.set_stance("force_eager"))  # hooks see the calls
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._undo.close()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # called by torch
        # A recomputation in backward repeats what a forward has shown.
        is_forward = torch._C._current_graph_task_id() == -1
        if func in _FOREIGN and self._is_divided and not self._num_shared and is_forward:
            self._judge.refuse(
                ConfigError(
                    f"the model calls {func.__name__} in a module that its sharding plan does not "
                    "bind to the context-parallel ranks, so that a token would see those of one "
                    "rank only. Build this attention from megatron_lightning.layers.CoreAttention "
                    "and add a row ContextAttention() for it, or set context_parallel_size to 1."
                )
            )
        return func(*args, **(kwargs or {}))

    def check(self) -> None:
        """Check that the forward called every bound module.

        Raises:
            ConfigError: Naming an uncalled module.
        """
        if self._uncalled:
            self._judge.refuse(
                ConfigError(
                    f"{next(iter(self._uncalled))} is bound to the context-parallel ranks, and the "
                    "forward did not call it: its attention is computed elsewhere. Call it with "
                    "queries, keys and values, or set context_parallel_size to 1."
                )
            )

    def _begin_shared(self, *_: Any) -> None:
        self._num_shared += 1

    def _end_shared(self, *_: Any) -> None:
        self._num_shared -= 1

    def _entered(self, *_: Any) -> None:
        self._is_divided = True

    def _begun(self, *_: Any) -> None:
        self._is_divided = False

    def _called(self, path: str) -> Any:
        def called(*_: Any) -> None:
            self.called.add(path)
            self._uncalled.pop(path, None)

        return called
