"""Calls of a model with short rows of random tokens, alike on every rank."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from megatron_lightning.layers.shared_rows.places import tensors
from megatron_lightning.layers.shared_rows.row_names import RowNames
from megatron_lightning.parallel.grid.context import AxisGroup

_PROBED_ROWS, _PROBED_TOKENS = 2, 40


RunOnStages = Callable[[dict[str, Any]], Any]
"""Keywords of a call of a model -> its output on the last pipeline stage, None on others. A
collective."""


class ProbedCall:
    """Calls a model with random tokens.

    Args:
        model: A model of ``transformers``.
        length: Tokens of a row.
        run: Calls the model. None: with all its blocks, on this rank.
        takes_media: Whether tokens may be those of images or sounds.
    """

    def __init__(
        self,
        model: nn.Module,
        length: int,
        run: RunOnStages | None = None,
        *,
        takes_media: bool = False,
    ) -> None:
        self._model, self._length, self._run = model, length, run
        self._takes_media = takes_media
        self.device = next(model.parameters()).device
        config: Any = model.config
        self._vocabulary = int(config.get_text_config().vocab_size)

    def __call__(self, seed: int) -> Tensor | None:
        """Return the logits of rows of one document. None: a later pipeline stage has them."""
        rows = self._rows(seed)
        return self._logits(rows, **self._types(rows))

    def noise(self, seed: int, expected: Tensor | None) -> float:
        """Return the largest difference that roundings make: of rows called one by one, with
        products of other shapes. A collective.
        """
        rows = torch.split(self._rows(seed), 1)
        alone = _joined([self._logits(row, **self._types(row)) for row in rows], 0)
        if alone is None or expected is None:
            return 0.0
        return float((alone - expected).abs().max())

    def packed(self, seed: int) -> Tensor | None:
        """Return the logits of rows with two documents, told by positions."""
        lengths = self._documents
        positions = torch.cat([torch.arange(n, device=self.device) for n in lengths])
        rows = self._rows(seed)
        return self._logits(rows, position_ids=positions.expand_as(rows))

    def alone(self, seed: int) -> Tensor | None:
        """Return the logits of the same documents, each called alone."""
        documents = torch.split(self._rows(seed), self._documents, 1)
        return _joined([self._logits(document) for document in documents], 1)

    @property
    def _documents(self) -> list[int]:
        first = self._length // 3
        return [first, self._length - first]

    def _rows(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        shape = (_PROBED_ROWS, self._length)
        rows = torch.randint(0, self._vocabulary, shape, generator=generator, device="cpu")
        if self._takes_media:  # marks of images would ask for images
            special = torch.tensor(list(_special_tokens(self._model)))
            usual = next(n for n in range(self._vocabulary) if n not in special)
            rows[torch.isin(rows, special)] = usual
        return rows.to(self.device)

    def _types(self, rows: Tensor) -> dict[str, Tensor]:
        """Return types of tokens, of which some are those of an image, where the model makes a mask
        of them. Tokens of text stand there: no image is needed for a mask.
        """
        if not self._takes_media:
            return {}
        names = RowNames.of(self._model)
        types = torch.zeros_like(rows)
        types[:, self._length // 4 : self._length // 2] = 1
        known = inspect.signature(inspect.unwrap(type(self._model).forward)).parameters
        return {name: types for name in (names.types, names.media_types) if name in known}

    def _logits(self, rows: Tensor, **given: Tensor) -> Tensor | None:
        names = RowNames.of(self._model)
        keywords: dict[str, Any] = {names.tokens: rows, **given, **without_cache(self._model)}
        if names.source:
            keywords |= _source(rows)
        output = self._model(**keywords) if self._run is None else self._run(keywords)
        return None if output is None else first_tensor(output)


def _special_tokens(model: nn.Module) -> dict[int, str]:
    """Return the ids of tokens that a configuration names, and the names."""
    config: Any = model.config
    ends = ("_token_id", "_token_index", "_token_ids")
    named = {name: value for name, value in config.to_dict().items() if name.endswith(ends)}
    return {
        number: name
        for name, value in named.items()
        for number in (value if isinstance(value, list) else [value])
        if isinstance(number, int)
    }


def media_tokens(model: nn.Module) -> dict[int, str]:
    """Return the ids of tokens that stand for images or sounds, and their names."""
    usual = ("pad_", "bos_", "eos_", "sep_", "unk_", "decoder_")
    named = _special_tokens(model).items()
    return {number: name for number, name in named if not name.startswith(usual)}


def _source(rows: Tensor) -> dict[str, Tensor]:
    """Return an encoder's rows and their mask: of another length than the decoder's, so that no
    size tells the one for the other, and padded, so that a mask is made.
    """
    tokens = rows.flip(1)[:, 3:]
    mask = torch.ones_like(tokens)
    mask[:, -2:] = 0
    return {"input_ids": tokens, "attention_mask": mask}


def _joined(parts: Sequence[Tensor | None], dim: int) -> Tensor | None:
    own = [part for part in parts if part is not None]
    return torch.cat(own, dim) if own else None


def tried(call: Callable[[int], Any], seed: int) -> tuple[Any, str]:
    """Return the output of a call, or None and the error, which is the same on every rank."""
    try:
        return call(seed), ""
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        return None, str(error).splitlines()[0]


def first_tensor(output: Any) -> Tensor:
    """Return the first tensor in a model's output: its logits."""
    values = output.values() if isinstance(output, Mapping) else output
    return next(x for _, x in tensors(tuple(values)))


def without_cache(module: nn.Module) -> dict[str, bool]:
    """Return the argument that keeps a model from caching keys, where the model takes it."""
    parameters = inspect.signature(inspect.unwrap(type(module).forward)).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {"use_cache": False} if takes_all or "use_cache" in parameters else {}


def probed_length(model: nn.Module, num_ranks: int, pp: AxisGroup | None = None) -> int:
    """Return tokens of a row that ranks can divide, of which neither all nor a rank's part is
    another size of the model. A collective of the pipeline's ranks.
    """
    config: Any = cast(Any, model.config).get_text_config()
    values = config.to_dict().values()
    own = {size for p in model.parameters() for size in p.shape}
    sizes = own if pp is None else set[int]().union(*pp.all_gather_object(own))
    sizes |= {value for value in values if isinstance(value, int)} | {_PROBED_ROWS}
    step, most = 2 * num_ranks, getattr(config, "max_position_embeddings", None) or -1
    most = 4096 if most < 0 else most  # some configurations say -1 for any number
    # Compressed keys need several blocks of tokens.
    blocks = [vars(module).get("compress_rate") for module in model.modules()]
    longest = max((size for size in blocks if isinstance(size, int)), default=0)
    first = -(-max(_PROBED_TOKENS, 2 * longest) // step) * step
    lengths = [*range(first, 4096, step), *range(first, 0, -step)]
    found: int = next(n for n in lengths if n <= most and not {n, n // num_ranks} & sizes)
    return found
