"""Sampled texts with rewards as the data of a policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from megatron_lightning.data.rollouts.rollout_data import OVERLONG, RolloutData
from megatron_lightning.errors import ConfigError
from megatron_lightning.modules.data_modules.run_data_module import RunDataModule
from megatron_lightning.modules.post_training.generators.client import Generator, api_key
from megatron_lightning.modules.post_training.trained_generation import check_split


class RolloutDataModule(RunDataModule, RolloutData):
    """Rows for :class:`PolicyModule`: answers that the policy samples to ``prompts`` at the
    beginning of an update, with rewards, or ``replay`` of recorded generations.

    A generation is the rows that one set of weights has sampled. Its advantages are computed
    together, over all replicas, and it is written to a file of JSON lines, from which ``replay``
    trains. For the fields of a row see ``data.rollouts.generation``.

    The arguments are the fields of :class:`RolloutOptions`.

    Raises:
        ConfigError: If a value, or the combination, cannot work.
        DataError: If files cannot be read, on ``train_dataloader``.
    """

    @property
    def row_divisor(self) -> int:
        """Number that layout and precision of the run divide rows by."""
        return self._row_divisor()

    def _policy(self) -> Any:
        return getattr(self._run_module(), "policy", None)

    def _num_iterations(self) -> int:
        return getattr(self._policy(), "num_iterations", 1)

    def _num_updates(self) -> int:
        return getattr(self._policy(), "updates_per_generation", 1)

    def _root(self) -> Path:
        return Path("." if self.trainer is None else self.trainer.default_root_dir)

    def check_files(self, stage: str, module: pl.LightningModule) -> None:
        """Check files, prompts and rewards before the strategy starts a process.

        Args:
            stage: The Trainer's next action.
            module: The module of the action.

        Raises:
            ConfigError: If a reward cannot be imported, a weight is of none, or generators have no
                address or no API key.
            DataError: If a file is missing, or a row has no prompt.
        """
        self.use_model(module)
        for url in self.options.generators or ():
            Generator(url, api_key())
        if self.samples:
            _ = self.rewards, self.prompts
            if self.options.environment is not None:
                _ = self.environment
                self._check_ends()
                if self.options.history == "split" and self._policy() is not None:
                    check_split(self._policy())
            else:
                self._check_weights()
        else:
            self.file(0)

    def on_exception(self, exception: BaseException) -> None:
        """End the sampler of a fit that has failed: no hook of its module is called then."""
        close = getattr(self._run_module(), "close_sampler", None)
        if close is not None:
            close(has_failed=True)

    def _check_ends(self) -> None:
        if not self.end_ids:
            raise ConfigError(
                "an environment is set, and no end tokens are known, so that no answer would end "
                "before max_completion_length. Set end_ids of RolloutDataModule."
            )

    def _check_weights(self) -> None:
        names = {*self.rewards.functions}
        if self.options.overlong_buffer is not None:
            names.add(OVERLONG)
        if unknown := {*(self.reward_weights or ())} - names:
            raise ConfigError(
                f"reward_weights has {', '.join(sorted(unknown))}, and the rewards are "
                f"{', '.join(sorted(names)) or 'none'}. Set it to weights of these."
            )
