"""Images and sounds beside rows that ranks share.

Towers, the merge and positions run on full rows, before the first block. What a call brings beside
tokens may change what the blocks compute: a mask by which the tokens of an image see one another,
or features that are added between blocks. The first call that brings something is therefore
computed once in full on every rank, with its own rows and without gradients. Each module that mixes
tokens, each block and the whole call have to give the rank's part of it. Where code between two
blocks changes hidden states, the ranks' parts are joined behind the first one, and the next one
divides them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.shared_rows.conditions import (
    evaluating,
    exact_products,
    is_close,
)
from megatron_lightning.layers.shared_rows.mixers import MixerSlot, SharingRanks, full_rows
from megatron_lightning.layers.shared_rows.other_names import without_other_names
from megatron_lightning.layers.shared_rows.places import changed, hidden_states, tensors
from megatron_lightning.layers.shared_rows.probe import Agree, Block, Probe
from megatron_lightning.layers.shared_rows.probed_call import first_tensor, media_tokens, tried
from megatron_lightning.layers.shared_rows.ring import Maskless, RingMixer, leave_masks_out
from megatron_lightning.layers.shared_rows.row_names import RowNames

Divide = Callable[[Block, Any, Any, int], tuple[Any, Any]]
"""Block, its arguments and the length of their full rows -> the rank's part of them."""

Full = Callable[[], AbstractContextManager[None]]
"""Context of calls of which nothing is divided."""


@dataclass
class Media:
    """Proves calls with images and sounds, and joins hidden states behind blocks for them.

    Args:
        model: The model, with its modules bound.
        ranks: The context-parallel ranks.
        probe: Has found the modules.
        agree: Tells all ranks whether all succeeded.
        blocks: The blocks, by path.
        slots: The modules that mix tokens, by path.
        divide: Divides the arguments of a block.
    """

    model: nn.Module
    ranks: SharingRanks
    probe: Probe
    agree: Agree
    blocks: Mapping[str, Block]
    slots: Mapping[str, MixerSlot]
    divide: Divide
    maskless: Maskless = field(default_factory=list)
    """Configurations without masks."""
    _joined: dict[frozenset[str], frozenset[str]] = field(
        default_factory=lambda: {frozenset(): frozenset()}
    )
    """Names of what a call brings -> paths of blocks behind which hidden states are joined."""
    _now: frozenset[str] = frozenset()

    @property
    def kinds(self) -> dict[str, str]:
        """The ways of the modules that mix tokens, by path."""
        return {path: slot.way.kind for path, slot in self.slots.items()}

    def bind(self) -> None:
        """Have blocks join their outputs, where it is needed, and the model make no masks, where
        nothing reads them.

        Raises:
            ConfigError: If a block is compiled with its hooks.
        """
        for path, block in self.blocks.items():
            module = self.model.get_submodule(path)
            if module._compiled_call_impl is not None:
                raise ConfigError(
                    f"{path} of {type(self.model).__name__} was compiled by its compile(), hooks "
                    "and all, and ranks join hidden states in a hook where images need it, which "
                    'makes no graph. Set MegatronStrategy(compile="block") instead, which leaves '
                    "hooks out, or set context_parallel_size to 1."
                )
            module.register_forward_hook(_Join(self, block), with_kwargs=True)
        self._leave_masks_out()

    def _leave_masks_out(self) -> None:
        rings = {path for path, slot in self.slots.items() if slot.way.kind == RingMixer.kind}
        self.maskless = leave_masks_out(self.model, rings, self.blocks)

    def begin(self, given: dict[str, Any], length: int, full: Full) -> None:
        """Prepare for a call. What no call has brought before is proven. A collective of the ranks
        that ``agree`` joins.

        Args:
            given: Arguments of full rows.
            length: Tokens of the rows.
            full: Context of calls with full rows.

        Raises:
            ConfigError: If the call on ranks gives something else than in one process.
        """
        names = RowNames.of(self.model)
        brings = self._brought(names, given)
        if not self.agree(brings in self._joined):
            call = {k: v for k, v in given.items() if k not in names.of_logits}
            self._prove(call, brings, length, full)
        self._now = self._joined[brings]

    def _brought(self, names: RowNames, given: Mapping[str, Any]) -> frozenset[str]:
        """Return the names of what a call brings beside tokens, and the kinds of its tokens: images
        may be passed with rows that have none of their tokens.
        """
        known = (names.tokens, names.embeddings, *names.of_logits)
        brings = {k for k, v in given.items() if k not in known and any(tensors(v))}
        for name in brings & {names.types, names.media_types}:
            brings |= {f"{name} above 0"} if bool((given[name] > 0).any()) else set()
        if (tokens := given.get(names.tokens)) is not None:
            special = media_tokens(self.model)
            found = torch.isin(tokens, torch.tensor(list(special), device=tokens.device))
            ids = set(tokens[found].unique().tolist())
            brings |= {name for number, name in special.items() if number in ids}
        return frozenset(brings)

    def joined(self, block: Block, args: Any, kwargs: Any, output: Any) -> Any:
        """Return a block's output, with hidden states of full rows where code behind needs them."""
        hidden = hidden_states((args, kwargs), block.divided)
        if block.path not in self._now or hidden is None:
            return output
        place, states = hidden
        dim, ranks = block.divided[place], self.ranks

        def join(_: str, tensor: Tensor) -> Tensor:
            return (
                full_rows(tensor, ranks.group, dim, ranks.deal)
                if tensor.shape == states.shape
                else tensor
            )

        return changed(output, join)

    # ---------------------------------------------------------------------------------------- proof

    def _prove(self, call: dict[str, Any], brings: frozenset[str], length: int, full: Full) -> None:
        finding = ""
        # A mask that rows at hand do not need may still be one that the ring does not read.
        for without_ring in (False, True):
            finding = self._difference(call, brings, length, full, without_ring)
            if self.agree(not finding):
                return
            if RingMixer.kind not in self.kinds.values():
                break
        what = ", ".join(sorted(brings)) or "text"
        raise ConfigError(
            f"{type(self.model).__name__} called with {what} does not give on ranks that share "
            f"rows what it gives in one process ({finding or 'on other ranks'}). Set "
            "context_parallel_size to 1."
        )

    def _difference(
        self,
        call: dict[str, Any],
        brings: frozenset[str],
        length: int,
        full: Full,
        without_ring: bool,
    ) -> str:
        """Find ways for a call, and return what differs with them, or an empty text."""
        device = next(self.model.parameters()).device.type

        def output(_: int) -> Tensor:
            return first_tensor(self.model.forward(**call))

        self._now = frozenset()
        with (
            torch.autocast(device, enabled=False),
            torch.compiler.set_stance("force_eager"),
            torch.no_grad(),
            evaluating(self.model),
            exact_products(),
            _without_head(self.model),
        ):
            watch = _FullCall(self, length, without_ring)
            with full(), self._off(), watch.watching():
                expected = output(0)
            self._rebind()
            self._now = self._joined[brings] = frozenset(watch.changed)
            found, finding = tried(output, 0)
            is_equal = is_close(found, self.ranks.part.split(expected, 1))
            return watch.finding or finding or ("" if is_equal else "hidden states differ")

    @contextmanager
    def _off(self) -> Iterator[None]:
        """Context in which the model is that of one process."""
        with ExitStack() as undo:
            for slot in self.slots.values():
                undo.callback(setattr, slot, "is_off", False)
                slot.is_off = True
            for config, own in self.maskless:
                undo.callback(setattr, config, "_attn_implementation", config._attn_implementation)
                config._attn_implementation = own
            undo.enter_context(without_other_names(self.model))
            yield

    def _rebind(self) -> None:
        """Bind the ways that were taken with the rows at hand."""
        for path, slot in self.slots.items():
            slot.way.bind(self.model.get_submodule(path), slot)
        for config, own in self.maskless:
            config._attn_implementation = own
        self._leave_masks_out()


@dataclass
class _Join:
    """Forward hook of a block."""

    media: Media
    block: Block

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        return self.media.joined(self.block, args, kwargs, output)


@dataclass
class _FullCall:
    """Watches a call of full rows: each module that mixes tokens, and each block, has to give the
    rank's part of its output.
    """

    media: Media
    length: int
    without_ring: bool
    changed: set[str] = field(default_factory=set)
    """Paths of blocks behind which code changes hidden states."""
    finding: str = ""
    """The first block that differs."""
    _outputs: list[tuple[Tensor, int | Tensor]] = field(default_factory=list)
    """Outputs of the block before, and their versions, or copies of them."""
    _before: str = ""
    _is_trying: bool = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context of the call."""
        media = self.media
        with ExitStack() as undo:
            for path, slot in media.slots.items():
                module = media.model.get_submodule(path)
                hook = _MixerEnds(self, path, slot)
                undo.callback(_hooked(module, hook).remove)
            for path, block in media.blocks.items():
                module = media.model.get_submodule(path)
                begins = _BlockBegins(self, block)
                handle = module.register_forward_pre_hook(begins, with_kwargs=True)
                undo.callback(handle.remove)
                undo.callback(_hooked(module, _BlockEnds(self, block)).remove)
            yield

    def mixer_ends(
        self, path: str, slot: MixerSlot, module: nn.Module, values: Any, output: Any
    ) -> None:
        """Take the first way, from the module's own on, whose output is equal."""
        if self._is_trying:
            return
        probe = self.media.probe
        with probe.precise(module, values, output) as (wide, full_output):
            after = self.without_ring and slot.way.kind == RingMixer.kind
            slot.way = probe.taken(path, module, slot.way, wide, full_output, after=after)

    def block_begins(self, block: Block, values: Any) -> None:
        """Note whether the block gets what the one before has returned."""
        hidden = hidden_states(values, block.divided)
        if hidden is None or not self._before:
            return
        states = hidden[1]
        if not any(x is states and _is_unchanged(x, before) for x, before in self._outputs):
            self.changed.add(self._before)

    def block_ends(self, block: Block, module: nn.Module, values: Any, output: Any) -> None:
        """Compare the block on the rank's part, with what it gets for the first time in full."""
        self._before = block.path
        block.seen |= {place for place, _ in tensors(values)}
        self._outputs = [(x, _version(x)) for _, x in tensors(output)]
        hidden = hidden_states(values, block.divided)
        if hidden is not None and not self.finding:
            self._is_trying = True
            self.finding = self._difference(block, module, values, output, hidden)
            self._is_trying = False
        if not self.media.agree(not self.finding) and not self.finding:
            self.finding = f"{block.path} on other ranks"

    def _difference(
        self, block: Block, module: nn.Module, values: Any, output: Any, hidden: tuple[str, Tensor]
    ) -> str:
        """Return what differs in a block on the rank's part, or an empty text."""
        dim, shape = block.divided[hidden[0]], hidden[1].shape
        part = self.media.ranks.part
        with self.media.probe.precise(module, values, output) as (wide, full_output):
            found, finding = tried(lambda _: self._of_part(block, module, wide), 0)
            if finding:
                return f"{block.path}: {finding}"
            own = dict(tensors(found))
            full = {place: x for place, x in tensors(full_output) if x.shape == shape}
            if full and all(is_close(own.get(p), part.split(x, dim)) for p, x in full.items()):
                return ""
        return f"{block.path} has other outputs"

    def _of_part(self, block: Block, module: nn.Module, values: Any) -> Any:
        """Return the outputs of a block whose modules share rows."""
        args, kwargs = self.media.divide(block, values[0], values[1], self.length)
        with ExitStack() as on:
            for path, slot in self.media.slots.items():
                if f"{path}.".startswith(f"{block.path}."):
                    on.enter_context(slot.way.bound(self.media.model.get_submodule(path)))
                    on.callback(setattr, slot, "is_off", True)
                    slot.is_off = False
            return module.forward(*args, **kwargs)


@dataclass
class _MixerEnds:
    call: _FullCall
    path: str
    slot: MixerSlot

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self.call.mixer_ends(self.path, self.slot, module, (args, kwargs), output)


@dataclass
class _BlockBegins:
    call: _FullCall
    block: Block

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.call.block_begins(self.block, (args, kwargs))


@dataclass
class _BlockEnds:
    call: _FullCall
    block: Block

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self.call.block_ends(self.block, module, (args, kwargs), output)


def _version(tensor: Tensor) -> int | Tensor:
    """Return what tells changes in place: a copy in evaluation on GPUs, where Lightning enters
    inference mode, which counts no versions.
    """
    return tensor.clone() if tensor.is_inference() else tensor._version


def _is_unchanged(tensor: Tensor, before: int | Tensor) -> bool:
    if isinstance(before, Tensor):
        return torch.equal(tensor, before)
    return tensor._version == before


def _hooked(module: nn.Module, hook: Any) -> Any:
    """Register a forward hook: before FSDP lets weights go."""
    return module.register_forward_hook(hook, with_kwargs=True, prepend=True)


@contextmanager
def _without_head(model: Any) -> Iterator[None]:
    """Context in which a model returns hidden states in place of logits, which would need more
    memory than all else.
    """
    head = model.get_output_embeddings()
    if head is None:
        yield
        return
    own = vars(head).get("forward")
    vars(head)["forward"] = lambda hidden: hidden
    try:
        yield
    finally:
        del vars(head)["forward"]
        if own is not None:
            vars(head)["forward"] = own
