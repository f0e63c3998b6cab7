"""Pipeline parallelism: schedules as data, a validator, and an executor of schedules."""

from typing import TYPE_CHECKING

from megatron_lightning._lazy import lazy_attributes

if TYPE_CHECKING:
    from megatron_lightning.pipeline.schedules import simulate as simulate

lazy_attributes(__name__, {"simulate": "megatron_lightning.pipeline.schedules"})
