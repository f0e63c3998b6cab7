"""Sampled texts with rewards as the data of a policy."""

from __future__ import annotations

from megatron_lightning.data.rollouts.rollout_data import RolloutData
from megatron_lightning.modules.run_data import RunDataModule


class RolloutDataModule(RunDataModule, RolloutData):
    """Rows for :class:`PolicyModule`: texts with log-probabilities and rewards, from files of
    recorded generations.

    Each file of JSON lines is a generation: texts that one set of weights has sampled, whose
    advantages are computed together. For the fields of a row see ``data.rollouts.generation``.

    The arguments are the fields of :class:`RolloutOptions`.

    Raises:
        ConfigError: If a value cannot work.
        DataError: If files cannot be read, on ``train_dataloader``.
    """

    def _num_iterations(self) -> int:
        policy = getattr(self._run_module(), "policy", None)
        return getattr(policy, "num_iterations", 1)

    def row_divisor(self) -> int:
        """Return the number that layout and precision of the run divide rows by."""
        return self._row_divisor()
