"""Find what mixes tokens in a model: one call with a short row, watched, and two tokens changed.

The call runs on the placed ranks, inside of the model's own blocks, so that weights are what a step
has. A module that a block calls mixes tokens if a change of tokens changes the output of
another. The first way (:mod:`~megatron_lightning.layers.shared_rows.mixers`) is taken whose output
equals the rank's part of the full output, on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.shared_rows.conditions import has_16_bits, in_fp32, is_close
from megatron_lightning.layers.shared_rows.mixers import Arguments, SharedMixer, SharingRanks
from megatron_lightning.layers.shared_rows.places import Places, changed, hidden_states, tensors
from megatron_lightning.parallel.shards.other_stages import present_modules

_FELT = 1e-6
"""Share of the largest output, from which on a change of another token is felt."""

Agree = Callable[[bool], bool]
"""Whether all ranks of the job say True. A collective."""


@dataclass
class _Call:
    module: nn.Module
    path: str
    is_block: bool
    from_outside: frozenset[int] = frozenset()
    """Ids of the tensors that a block gets, but for its hidden states."""
    mixers: list[_Mixer] = field(default_factory=list)


@dataclass
class _Mixer:
    path: str
    way: SharedMixer
    handed_on: frozenset[int]
    """Ids of the block's arguments among the mixer's."""


@dataclass
class Block:
    """Arguments of a block that are divided before it."""

    path: str
    divided: dict[str, int]
    """Place -> dim of the tokens."""
    seen: frozenset[str]
    """Places of all tensors in the block's call."""


@dataclass
class Findings:
    """Blocks of a model, and the modules in them that mix tokens."""

    blocks: list[Block] = field(default_factory=list)
    mixers: dict[str, SharedMixer] = field(default_factory=dict)


class Probe:
    """Watches a call of a model.

    Args:
        model: The model that calls the blocks.
        length: Tokens of a row in the call; no other size of the model.
        ranks: The context-parallel ranks.
        agree: Tells all ranks whether all succeeded.
        kinds: The ways to try for a path, in order.
    """

    def __init__(
        self,
        model: nn.Module,
        length: int,
        ranks: SharingRanks,
        agree: Agree,
        kinds: Callable[[str], Sequence[type[SharedMixer]]],
    ) -> None:
        self._model = model
        self.length = length
        """Tokens of a row."""
        self._ranks = ranks
        self._agree = agree
        self._kinds = kinds
        self._paths = {module: path for path, module in model.named_modules()}
        self._items = {item for m in model.modules() if isinstance(m, nn.ModuleList) for item in m}
        self._stack: list[_Call] = []
        self._outputs: list[Tensor] = []
        """Outputs of blocks so far, which are a rank's part in later blocks. Alive, since ids tell
        tensors apart.
        """
        self._is_trying = False
        self._findings = Findings()

    def run(self, call: Callable[[], Any]) -> Findings:
        """Return the findings of a call of the model.

        Raises:
            ConfigError: If no list of blocks gets hidden states, or a module that mixes tokens
                cannot be shared.
        """
        with self._watching(), torch.no_grad():
            try:
                call()
            except ConfigError:
                raise
            except (RuntimeError, ValueError, TypeError) as error:  # on every rank alike
                raise ConfigError(
                    f"{type(self._model).__name__} cannot be called with a short row, or modules "
                    f"in it not twice ({str(error).splitlines()[0]}), and ranks that share "
                    "sequences look for what mixes tokens. Set context_parallel_size to 1."
                ) from error
        if not self._findings.blocks:
            raise ConfigError(
                f"{type(self._model).__name__} has no list of blocks that get hidden states, which "
                "ranks that share sequences divide. Set context_parallel_size to 1."
            )
        return self._findings

    @contextmanager
    def _watching(self) -> Iterator[None]:
        with ExitStack() as undo:
            for _, module in present_modules(self._model):
                # After FSDP has gathered weights, and before it lets them go.
                enter = module.register_forward_pre_hook(self._enter, with_kwargs=True)
                leave = module.register_forward_hook(self._leave, with_kwargs=True, prepend=True)
                undo.callback(enter.remove)
                undo.callback(leave.remove)
            yield

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._is_trying:
            return
        if module is self._model:  # a pipeline leaves the forward of an earlier stage without end
            self._stack.clear()
        call = _Call(module, self._paths[module], is_block=False)
        if module in self._items and not any(outer.is_block for outer in self._stack):
            values = (args, kwargs)
            hidden = hidden_states(values, Places.of(values, self.length).dims)
            if hidden is not None:
                inner = {id(hidden[1])} | {id(x) for x in self._outputs}
                ids = frozenset(id(x) for _, x in tensors(values)) - inner
                call = _Call(module, call.path, is_block=True, from_outside=ids)
        self._stack.append(call)

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._is_trying:
            return
        call = self._stack.pop()
        self._is_trying = True
        try:
            if self._stack and self._stack[-1].is_block:
                mixer = self._tried(call, args, kwargs)
                if mixer is not None:
                    self._stack[-1].mixers.append(mixer)
            elif call.is_block:
                self._end_block(call, args, kwargs, output)
        finally:
            self._is_trying = False

    def _end_block(self, call: _Call, args: Any, kwargs: Any, output: Any) -> None:
        """Note what is divided before a block, and by whom. A block returns hidden states."""
        hidden = hidden_states((args, kwargs), Places.of((args, kwargs), self.length).dims)
        if hidden is None or all(x.shape != hidden[1].shape for _, x in tensors(output)):
            return
        if not call.mixers:
            mixer = self._tried(call, args, kwargs)
            call.mixers += [] if mixer is None else [mixer]
        self._findings.mixers |= {mixer.path: mixer.way for mixer in call.mixers}
        handed_on = frozenset[int]().union(*(mixer.handed_on for mixer in call.mixers))
        seen = {place: id(x) for place, x in tensors((args, kwargs))}
        full = {place for place, own in seen.items() if own in handed_on & call.from_outside}
        divided = Places.of((args, kwargs), self.length).without(full)
        self._outputs += [x for _, x in tensors(output)]
        self._findings.blocks.append(Block(call.path, divided.dims, frozenset(seen)))

    # ------------------------------------------------------------------------------------ a module

    def _tried(self, call: _Call, args: Any, kwargs: Any) -> _Mixer | None:
        """Return the way in which a module shares rows. None: it does not mix tokens."""
        values = (args, kwargs)
        places = Places.of(values, self.length)
        if hidden_states(values, places.dims) is None:
            return None
        # Full rows are what the block has from its caller; hidden states are divided before it.
        block = call if call.is_block else self._stack[-1]
        full = {place: id(x) for place, x in tensors(values) if id(x) in block.from_outside}
        with self.precise(call.module, values) as (values, full_output):
            if not self._mixes(call.module, values, places.dims, full_output):
                _check_weights(call.module, call.path, full_output)
                return None
            outputs = Places.of(full_output, self.length)
            arguments = Arguments(places, outputs, frozenset(full))
            kinds = self._kinds(call.path)
            way = self._first_equal(call, arguments, values, full_output, kinds)
        return _Mixer(call.path, way, frozenset(full.values()))

    def taken(
        self,
        path: str,
        module: nn.Module,
        way: SharedMixer,
        values: Any,
        full_output: Any,
        *,
        after: bool,
    ) -> SharedMixer:
        """Return the first way that is right for arguments of full rows: from the given one on, or
        after it, if there is another.
        """
        call, kinds = _Call(module, path, is_block=False), self._kinds(path)
        known = [kind.kind for kind in kinds].index(way.kind)
        later = kinds[known + after :] or kinds[known:]
        return self._first_equal(call, way.arguments, values, full_output, later)

    @contextmanager
    def precise(
        self, module: nn.Module, values: Any, output: Any = None
    ) -> Iterator[tuple[Any, Any]]:
        """Context of a proof. Yield the arguments and the outputs of full rows, in fp32 where the
        module can compute in fp32: in 16 bits, roundings flip choices of experts and keys.

        Args:
            module: The module.
            values: Its arguments.
            output: Its output, in its own precision. None: it is computed.
        """
        with ExitStack() as undo:
            if has_16_bits(module):
                try:
                    wide = undo.enter_context(in_fp32(module, values))
                    output = module.forward(*wide[0], **wide[1])
                except ConfigError:
                    raise
                except (RuntimeError, ValueError, TypeError):  # a kernel of 16 bits alone
                    undo.close()
                else:
                    yield wide, output
                    return
            known = output is not None
            yield values, output if known else module.forward(*values[0], **values[1])

    def _first_equal(
        self,
        call: _Call,
        arguments: Arguments,
        values: Any,
        full_output: Any,
        kinds: Sequence[type[SharedMixer]],
    ) -> SharedMixer:
        for kind in kinds:
            way = kind(arguments, self._ranks)
            is_equal = kind.suits(call.module, arguments) and self._is_equal(
                way, call.module, values, full_output
            )
            if self._agree(is_equal):
                return way
        raise ConfigError(
            f"{call.path} (a {type(call.module).__name__}) mixes the tokens of a row, and ranks "
            "that share sequences cannot share it "
            f"({', '.join(kind.kind for kind in kinds)}: other outputs than of full rows). "
            'Set context_parallel_size to 1, or ContextOptions(mixers="auto").'
        )

    def _mixes(self, module: nn.Module, values: Any, inputs: dict[str, int], output: Any) -> bool:
        """Return whether a change of two tokens changes the output of another."""
        hidden = hidden_states(values, inputs)
        if hidden is None:
            return False
        # Not neighbors: both may be the last tokens of a chunk, which no later token sees.
        at = slice(self.length // 3, self.length // 3 + 3, 2)
        place, states = hidden
        dim = inputs[place]
        other = states.clone()
        chosen = other.movedim(dim, 0)[at]
        generator = torch.Generator().manual_seed(5)
        chosen.add_(torch.randn(chosen.shape, generator=generator, device="cpu").to(other))
        args, kwargs = changed(values, lambda p, x: other if p == place else x)
        found = dict(tensors(module.forward(*args, **kwargs)))
        dims = Places.of(output, self.length).dims
        for name, expected in tensors(output):
            if name in dims and expected.is_floating_point():
                difference = (found[name] - expected).abs().movedim(dims[name], 0).flatten(1)
                difference[at] = 0
                if float(difference.max()) > _FELT * float(expected.abs().max()):
                    return True
        return False

    def _is_equal(self, way: SharedMixer, module: nn.Module, values: Any, expected: Any) -> bool:
        """Return whether a way gives the rank's part of the outputs, in a call with its part of the
        arguments.
        """
        known, part = way.arguments, self._ranks.part

        def split(place: str, tensor: Tensor) -> Tensor:
            dim = known.inputs.dims.get(place)
            return tensor if dim is None or place in known.full else part.split(tensor, dim)

        args, kwargs = changed(values, split)
        try:
            with way.bound(module):
                found = dict(tensors(way(module.forward, *args, **kwargs)))
        except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError):
            return False  # on every rank alike: the way is not for this module
        compared = [
            is_close(found.get(place), part.split(tensor, known.outputs.dims[place]))
            for place, tensor in tensors(expected)
            if place in known.outputs.dims and tensor.is_floating_point()
        ]
        return bool(compared) and all(compared)


def _check_weights(module: nn.Module, path: str, output: Any) -> None:
    """Check that no weights of zeros hide whether a module mixes tokens. Biases add the same to
    each token, and adapters, which begin with zeros, change layers that treat each token alone.

    Raises:
        ConfigError: If there are weights of zeros, or outputs of zeros.
    """
    zeros = []
    for name, weight in module.named_parameters():
        is_free = "bias" in name or "adapters." in name or "lora_" in name
        # A norm may store its weights less one, in one dim.
        if weight.ndim > 1 and weight.is_floating_point() and not is_free and not weight.any():
            zeros.append(name)
    if any(True for _ in module.parameters()) and not any(x.any() for _, x in tensors(output)):
        zeros.append("outputs")
    if zeros:
        raise ConfigError(
            f"{path} (a {type(module).__name__}) has {zeros[0]} of zeros, with which nothing shows "
            "whether it mixes the tokens of a row, and ranks that share sequences must know. Begin "
            "with other weights, such as small random ones, or set context_parallel_size to 1."
        )
