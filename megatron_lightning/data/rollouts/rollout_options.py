"""Options of ``RolloutDataModule``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

from megatron_lightning.config.value_checks import check_counts
from megatron_lightning.data.rollouts.turns import History
from megatron_lightning.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class RolloutOptions:
    """Options of ``RolloutDataModule``.

    Args:
        batch_size: Rows of a batch on a replica. An update has ``accumulate_grad_batches`` of them
            on each replica.
        prompts: File, folder, pattern or data set with the rows to sample answers of. See
            :func:`megatron_lightning.data.rollouts.prompts.prompt_of`.
        rewards: Functions ``reward(prompt, answer, row) -> float | None``, ordinary or
            asynchronous, or their class paths, with ``init_args`` beside ``class_path`` for a class
            such as ``RewardModel``: a list, or a mapping of names. They run once a replica.
        reward_weights: Factor of each reward. Default: 1.
        num_generations: Answers of a prompt.
        replay: Recorded generations in the place of prompts: a file, a folder or a pattern. A file
            of JSON lines is a generation, in the order of the names.
        folder: Where generations are written. Default: a new ``rollouts/version_N`` in the
            Trainer's ``default_root_dir``.
        dynamic_sampling: Rounds, at most, in which groups without signal are replaced by further
            prompts.
        overlong_buffer: Last tokens of the budget that cost a reward ``overlong``, from 0 down to
            -1 for an answer of all tokens. Default: no such reward.
        reward_timeout_s: Seconds after which an answer has no reward.
        environment: Class of the environment that answers are given to, or its class path. See
            :mod:`megatron_lightning.data.rollouts.environments`. Default: a sample is one answer.
        environment_options: Arguments of the environment.
        max_turns: Answers of a sample, at most.
        timeout_s: Seconds after which a call of the environment is given up.
        history: ``refuse`` chat templates that change earlier messages once more follow, ``keep``
            the sampled ids, whatever the template would show, or ``split`` the conversation: its
            row has another text from there.
        seed: Seed of the order of prompts, and of the answers.
        tokenizer: Folder or name of a tokenizer. Default: that of the model's folder.
        chat_template: Text or file of a chat template. Default: the tokenizer's.
        end_ids: Ids of tokens that end a text. Default: those of the model's folder.
        pad_to: Rows of a batch are padded to a multiple of this.
        generators: Addresses of ``megatron-lightning serve --accept-weights``, which sample in the
            place of the fit. They need the API key in ``MEGATRON_LIGHTNING_API_KEY``.
        weights_folder: Folder that the fit writes weights to, and that generators read:
            ``--accept-weights`` of all of them.
        max_staleness: Generations, at most, between the weights that a row is sampled by and its
            training. 0: none, as without generators.
        generator_timeout_s: Seconds for a share of a generation's texts. Behind it a generator
            counts as away, and another one is asked. Seconds without an answer of any generator,
            before the fit ends.

    Raises:
        ConfigError: If a value, or the combination, cannot work.
    """

    batch_size: int
    prompts: str | None = None
    rewards: dict[str, Any] | list[Any] | None = None
    reward_weights: dict[str, float] | None = None
    num_generations: int = 8
    replay: str | None = None
    folder: str | None = None
    dynamic_sampling: int = 0
    overlong_buffer: int | None = None
    reward_timeout_s: float = 60.0
    environment: Any = None
    environment_options: dict[str, Any] | None = None
    max_turns: int = 8
    timeout_s: float = 60.0
    history: History = "refuse"
    seed: int = 0
    tokenizer: str | None = None
    chat_template: str | None = None
    end_ids: list[int] | None = None
    pad_to: int = 64
    generators: list[str] | None = None
    weights_folder: str | None = None
    max_staleness: int = 0
    generator_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        check_counts(
            self, "batch_size", "num_generations", "pad_to", "overlong_buffer", "max_turns"
        )
        if (self.prompts is None) == (self.replay is None):
            both = "both set" if self.prompts is not None else "both left out"
            raise ConfigError(
                f"prompts and replay are {both}: rows are either sampled or recorded. Set one."
            )
        if self.prompts is not None and not self.rewards and self.environment is None:
            raise ConfigError(
                "prompts are set, and rewards are not, so that no answer is better than another. "
                "Set rewards to functions reward(prompt, answer, row), or to their class paths, or "
                "set an environment."
            )
        if self.prompts is not None and self.num_generations < 2:
            raise ConfigError(
                f"num_generations is {self.num_generations}, and an advantage compares answers of "
                "the same prompt. Set it to 2 or more."
            )
        if self.dynamic_sampling < 0 or min(self.reward_timeout_s, self.timeout_s) <= 0:
            raise ConfigError(
                f"dynamic_sampling={self.dynamic_sampling}, reward_timeout_s="
                f"{self.reward_timeout_s} and timeout_s={self.timeout_s}; must not be negative, "
                "and times not 0."
            )
        if self.history not in get_args(History):
            raise ConfigError(
                f"history is {self.history!r}; must be one of {', '.join(get_args(History))}."
            )
        if self.environment is None and self.environment_options is not None:
            raise ConfigError(
                "environment_options are set, and environment is not. Set it to a class path, or "
                "leave the options out."
            )
        self._check_generators()

    def _check_generators(self) -> None:
        if self.generators is None:
            if self.weights_folder is not None or self.max_staleness:
                raise ConfigError(
                    f"max_staleness={self.max_staleness} and weights_folder={self.weights_folder} "
                    "are of generators, and generators is not set. Set it to the addresses of "
                    "servers, or leave both out."
                )
            return
        if not self.generators or self.prompts is None or self.weights_folder is None:
            raise ConfigError(
                f"generators={self.generators}, prompts={self.prompts} and weights_folder="
                f"{self.weights_folder}: generators sample answers to prompts, by weights in a "
                "folder that both sides reach. Set all three."
            )
        if self.max_staleness < 0 or self.generator_timeout_s <= 0:
            raise ConfigError(
                f"max_staleness={self.max_staleness} and generator_timeout_s="
                f"{self.generator_timeout_s}; must not be negative, and the time not 0."
            )
