"""Single answers with a label as batches."""

from __future__ import annotations

from megatron_lightning.data.rows.unpaired import UnpairedData
from megatron_lightning.modules.finetune_data import FinetuneDataModule


class UnpairedDataModule(FinetuneDataModule, UnpairedData):
    """Batches ``{"tokens": [b, s], "labels": [b, s], "padding": [b, s], "desirable": [b], "row":
    [b]}`` from answers that are desirable or not, for ``DPOModule(loss="kto")``.

    A row has ``label`` (true: desirable), and ``prompt`` and ``completion``, or another schema of
    :class:`FinetuneDataModule`, whose last answer is meant. Labels of tokens are already shifted,
    and -100 in prompts and padding.

    The arguments are the fields of :class:`RowOptions`.

    Raises:
        ConfigError: If a value, or the combination, cannot work.
        DataError: If data or tokenizer cannot be read, on ``prepare_data`` and ``setup``.
    """
