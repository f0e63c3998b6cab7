"""Lightning has two packages with equal classes, ``lightning.pytorch`` and ``pytorch_lightning``.

For ``isinstance``, classes of the two packages are unrelated. A Trainer of ``pytorch_lightning``
therefore calls our strategy an invalid strategy name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from lightning_utilities.core.rank_zero import rank_zero_warn

from megatron_lightning.errors import ConfigError

_OTHER = "pytorch_lightning"
_ADVICE = (
    "Write `import lightning.pytorch as pl` for `import pytorch_lightning as pl`, and "
    "`from lightning.pytorch.callbacks import ...` for its callbacks and loggers."
)


def warn_of_other_namespace() -> None:
    """Warn once if ``pytorch_lightning`` is imported as well, and name the import to write.

    The Trainer of ``pytorch_lightning`` refuses this strategy before the strategy can explain.
    """
    if _OTHER in sys.modules:
        rank_zero_warn(
            f"{_OTHER} is imported beside lightning.pytorch, of which MegatronStrategy is a "
            "strategy. The two have equal classes that are not each other's: a Trainer of "
            f'{_OTHER} says "invalid strategy name", and its modules and callbacks do not fit '
            f"the other Trainer. {_ADVICE}"
        )


def check_namespace(parts: Iterable[object]) -> None:
    """Check the namespaces of callbacks, loggers and data against the Trainer's namespace.

    Raises:
        ConfigError: Names an object of the other namespace.
    """
    for part in parts:
        kinds = [kind for kind in type(part).__mro__ if kind.__module__.split(".")[0] == _OTHER]
        if kinds:
            raise ConfigError(
                f"{type(part).__name__} is a {kinds[0].__name__} of {_OTHER}, and the Trainer is "
                f"one of lightning.pytorch, which does not know that class. {_ADVICE}"
            )
