"""Generations as the data of a policy: loaders of places, and rows behind them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from megatron_lightning.data.chat.chat_template import ChatTemplate
from megatron_lightning.data.chat.chat_tokenizer import ChatTokenizer
from megatron_lightning.data.flat_options import takes
from megatron_lightning.data.rollouts.environments import maker_of
from megatron_lightning.data.rollouts.generation import Generation
from megatron_lightning.data.rollouts.prompts import Prompt, prompt_of, row_prompt
from megatron_lightning.data.rollouts.rewards import Rewards
from megatron_lightning.data.rollouts.rollout_options import RolloutOptions
from megatron_lightning.data.rows.sources import read_rows, source_files
from megatron_lightning.data.run_data import Batch, RunData
from megatron_lightning.errors import ConfigError, DataError

OVERLONG = "overlong"
"""Name of the reward of ``overlong_buffer``."""


class Places(Dataset[Tensor]):
    """Number of the generation and of the row [2] of every row in training, in order.

    Args:
        sizes: Rows of each generation.
        repeats: Times that the rows of a generation are trained.
    """

    def __init__(self, sizes: Sequence[int], repeats: int) -> None:
        self._sizes = sizes
        self._ends = list(accumulate(size * repeats for size in sizes))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Tensor:
        number = bisect_right(self._ends, index)
        start = self._ends[number - 1] if number else 0
        return torch.tensor([number, (index - start) % self._sizes[number]])


class RolloutData(RunData):
    """Generations of ``RolloutDataModule``, read without a Trainer."""

    @takes(RolloutOptions)
    def __init__(self, options: RolloutOptions) -> None:
        super().__init__(0)
        self.options = options
        self.batch_size = options.batch_size
        self.reward_weights: Mapping[str, float] | None = options.reward_weights
        self._read = lru_cache(maxsize=1)(Generation.read)
        self.run_folder: str | None = None
        """Where this run writes generations. None: not yet known."""
        self._counts: dict[str, int] = {}  # rows of recorded files

    def prepare_data(self) -> None:
        """Do nothing: rows are read when they are needed."""

    def setup(self, stage: str) -> None:
        """Forget the folder and the rows of the fit before."""
        if stage == "fit":
            self.run_folder = None
            self._read.cache_clear()

    @property
    def samples(self) -> bool:
        """Whether answers are sampled. False: recorded generations are read."""
        return self.options.prompts is not None

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Ids of tokens that end a text. Empty: not known."""
        if self.options.end_ids is not None:
            return tuple(self.options.end_ids)
        ends = tuple(self._model().generation_ends(self.options.tokenizer))
        if ends or not self.samples or self.tokenizer is None:
            return ends
        return (self.tokenizer.end,)

    @cached_property
    def tokenizer(self) -> ChatTokenizer | None:
        """Tokenizer of prompts and answers. None: rows and rewards have ids."""
        if self.options.tokenizer is not None:
            return ChatTokenizer.load(self.options.tokenizer)
        return self._model().tokenizer()

    @cached_property
    def rewards(self) -> Rewards:
        """Functions of the rewards."""
        return Rewards(self.options.rewards or {}, self.options.reward_timeout_s)

    @cached_property
    def prompts(self) -> Sequence[Prompt]:
        """All prompts.

        Raises:
            DataError: If a row has none, or there are no rows.
        """
        tokenizer, template = self.tokenizer, self._chat_template
        rows = list(read_rows(str(self.options.prompts)))
        if not rows:
            raise DataError(f"{self.options.prompts}: there is no row to read a prompt of.")
        if self.options.environment is not None:
            tokenizer, template = self.chat_parts()
            return [row_prompt(row, tokenizer, template) for row in rows]
        return [prompt_of(row, tokenizer, template) for row in rows]

    @cached_property
    def environment(self) -> Callable[[], Any]:
        """Function that makes environments."""
        return maker_of(self.options.environment, self.options.environment_options)

    def chat_parts(self) -> tuple[ChatTokenizer, ChatTemplate]:
        """Return tokenizer and template of conversations with an environment.

        Raises:
            ConfigError: If one is missing.
        """
        tokenizer, template = self.tokenizer, self._chat_template
        if tokenizer is None or template is None:
            missing = "tokenizer" if tokenizer is None else "chat_template"
            raise ConfigError(
                f"an environment is set, and neither the data nor the model have a {missing} to "
                f"write its messages with. Set {missing} of RolloutDataModule."
            )
        return tokenizer, template

    @cached_property
    def _chat_template(self) -> ChatTemplate | None:
        return self._template()

    def _template(self) -> ChatTemplate | None:
        special = {} if self.tokenizer is None else self.tokenizer.special_tokens
        if self.options.chat_template is not None:
            return ChatTemplate.load(self.options.chat_template, special)
        source = None if self.tokenizer is None else self.tokenizer.chat_template
        if not source:
            return None
        return ChatTemplate({"default": source} if isinstance(source, str) else source, special)

    # ------------------------------------------------------------------------------ generations

    @property
    def num_prompts(self) -> int:
        """Prompts of a generation."""
        return self._rows_of_update() * self._num_updates() // self.options.num_generations

    def prompt_of(self, generation: int, place: int) -> Prompt:
        """Return a prompt of a generation. Places beyond :attr:`num_prompts` are further ones.

        Prompts come in a new order in every pass over all of them.
        """
        count = len(self.prompts)
        passed, index = divmod(generation * self.num_prompts + place, count)
        draws = torch.Generator().manual_seed(self.options.seed + passed)
        return self.prompts[int(torch.randperm(count, generator=draws)[index])]

    def file(self, generation: int) -> str:
        """Return the file of a generation.

        Raises:
            DataError: If there is none to replay.
        """
        if self.options.replay is not None:
            files = self._recorded()
            return files[generation % len(files)]
        return str(
            Path(self.run_folder or self.free_folder()) / f"generation-{generation:06d}.jsonl"
        )

    def _recorded(self) -> Sequence[str]:
        files = source_files(str(self.options.replay))
        if not files:
            raise DataError(
                f"replay={self.options.replay}: there is no such file or folder. Set it to files "
                "of JSON lines, one for each generation."
            )
        return files

    def generation(self, number: int) -> Generation:
        """Return the rows of a generation from its file."""
        return self._read(self.file(number))

    def write(self, number: int, generation: Generation) -> None:
        """Write the rows of a generation."""
        generation.write(Path(self.file(number)))

    def number_of(self, generation: int, epoch: int) -> int:
        """Return the number over all epochs of a generation of an epoch."""
        return epoch * len(self._sizes()) + generation

    def state_dict(self) -> dict[str, Any]:
        """Return the rows of an epoch's generations, and how often they are trained."""
        return {"sizes": list(self._sizes()), "num_iterations": self._num_iterations()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Check that a resumed fit is at the same place of the same generation.

        Raises:
            ConfigError: If its generations have other numbers of rows.
        """
        if self._stage() != "fit":
            return
        now: dict[str, Any] = self.state_dict()
        if now != state_dict:
            then, here = (
                f"{len(state['sizes'])} generations of {state['sizes'][0]} rows, trained "
                f"{state['num_iterations']} times"
                for state in (state_dict, now)
            )
            raise ConfigError(
                f"an epoch of the checkpoint has {then}, and of this run {here}: the run would go "
                "on within another generation. Set batch_size, accumulate_grad_batches and the "
                "policy's options so that both are the same, or start from the weights alone."
            )

    def train_dataloader(self) -> DataLoader[Batch]:
        """Return the loader of places ``{"places": [b, 2]}``. A step asks for their rows.

        Raises:
            ConfigError: If a batch would have rows of several generations.
        """
        self._counts.clear()
        places: Dataset[Any] = Places(self._sizes(), self._num_iterations())
        return DataLoader(places, batch_size=self.batch_size, shuffle=False, collate_fn=_collate)

    def _sizes(self) -> Sequence[int]:
        """Return the rows of each generation of an epoch."""
        update = self._rows_of_update()
        parts = (
            f"batch_size={self.batch_size} x {self._num_replicas()} replicas x "
            f"accumulate_grad_batches={self._num_accumulated()} = {update}"
        )
        if self.options.replay is not None:
            files = self._recorded()
            for file in files:
                if file not in self._counts:
                    self._counts[file] = len(Generation.read(file).rows)
            sizes = [self._counts[file] for file in files]
            for file, size in zip(files, sizes, strict=True):
                if not size or size % update:
                    raise ConfigError(
                        f"{file} has {size} rows, and an update has {parts}, which does not divide "
                        "them: an update would have rows of two generations. Set batch_size to a "
                        "divisor, or write files of as many rows."
                    )
            return sizes
        rows, group = update * self._num_updates(), self.options.num_generations
        if rows % group:
            raise ConfigError(
                f"a generation has {parts} rows x updates_per_generation={self._num_updates()}, "
                f"which num_generations={group} does not divide: a prompt would have fewer answers "
                "than others. Set batch_size to a multiple."
            )
        count = len(self.prompts) * group // rows
        if not count:
            raise ConfigError(
                f"there are {len(self.prompts)} prompts, and a generation has {rows // group}. "
                "Lower batch_size, or raise num_generations."
            )
        return [rows] * count

    @property
    def updates_of_generation(self) -> int:
        """Optimizer steps between two sampled generations."""
        return self._num_updates() * self._num_iterations()

    def _rows_of_update(self) -> int:
        return self.batch_size * self._num_replicas() * self._num_accumulated()

    def _num_iterations(self) -> int:
        """Return the times that the rows of a generation are trained."""
        return 1

    def _num_updates(self) -> int:
        """Return the optimizer steps that share the rows of a sampled generation."""
        return 1

    def free_folder(self) -> str:
        """Return the folder to write generations to: the user's, or a new one of this run."""
        if self.options.folder is not None:
            return self.options.folder
        root, number = self._root() / "rollouts", 0
        while (root / f"version_{number}").exists():
            number += 1
        return str(root / f"version_{number}")

    def new_folder(self) -> str:
        """Return the folder that this run writes to, and make it, so that no other run takes it."""
        while True:
            folder = Path(self.free_folder())
            try:
                folder.mkdir(parents=True, exist_ok=self.options.folder is not None)
            except FileExistsError:
                continue  # another run was faster
            return str(folder)

    def _root(self) -> Path:
        return Path()


def _collate(places: Sequence[Tensor]) -> Batch:
    return {"places": torch.stack(list(places))}
