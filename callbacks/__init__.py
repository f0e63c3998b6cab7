"""Installed as megatron_lightning.callbacks. Always import it by that name."""

from typing import TYPE_CHECKING

from megatron_lightning._lazy import lazy_attributes

# A second copy of these classes would fail isinstance checks.
if __name__ != "megatron_lightning.callbacks":
    raise ImportError("import megatron_lightning.callbacks, not callbacks")

if TYPE_CHECKING:
    from megatron_lightning.callbacks.closing_summary import ClosingSummary
    from megatron_lightning.callbacks.dumps.dump_tensors import DumpTensors
    from megatron_lightning.callbacks.evaluate_tasks import EvaluateTasks
    from megatron_lightning.callbacks.expert_load import ExpertLoadMonitor
    from megatron_lightning.callbacks.garbage_collection import GarbageCollection
    from megatron_lightning.callbacks.gradient_norm import GradientNormMonitor
    from megatron_lightning.callbacks.hang_watch import HangWatch
    from megatron_lightning.callbacks.local_copies import LocalCopyCheckpoint
    from megatron_lightning.callbacks.memory import MemoryMonitor
    from megatron_lightning.callbacks.memory_snapshot import MemorySnapshot
    from megatron_lightning.callbacks.pipeline_timeline import PipelineTimeline
    from megatron_lightning.callbacks.profiler_window import ProfilerWindow
    from megatron_lightning.callbacks.rehearsal.faults import Fault
    from megatron_lightning.callbacks.rehearsal.injector import FaultInjector
    from megatron_lightning.callbacks.rescue import RescueCheckpoint
    from megatron_lightning.callbacks.sample_text import SampleText
    from megatron_lightning.callbacks.spike_guard import SpikeGuard
    from megatron_lightning.callbacks.stage_timers import StageTimers, StragglerMonitor
    from megatron_lightning.callbacks.statistics.layer_statistics import LayerStatistics
    from megatron_lightning.callbacks.throughput import SpeedMonitor, ThroughputMonitor

__all__ = [
    "ClosingSummary",
    "DumpTensors",
    "EvaluateTasks",
    "ExpertLoadMonitor",
    "Fault",
    "FaultInjector",
    "GarbageCollection",
    "GradientNormMonitor",
    "HangWatch",
    "LayerStatistics",
    "LocalCopyCheckpoint",
    "MemoryMonitor",
    "MemorySnapshot",
    "PipelineTimeline",
    "ProfilerWindow",
    "RescueCheckpoint",
    "SampleText",
    "SpeedMonitor",
    "SpikeGuard",
    "StageTimers",
    "StragglerMonitor",
    "ThroughputMonitor",
]

lazy_attributes(
    __name__,
    {
        "ClosingSummary": "megatron_lightning.callbacks.closing_summary",
        "DumpTensors": "megatron_lightning.callbacks.dumps.dump_tensors",
        "EvaluateTasks": "megatron_lightning.callbacks.evaluate_tasks",
        "ExpertLoadMonitor": "megatron_lightning.callbacks.expert_load",
        "GarbageCollection": "megatron_lightning.callbacks.garbage_collection",
        "GradientNormMonitor": "megatron_lightning.callbacks.gradient_norm",
        "HangWatch": "megatron_lightning.callbacks.hang_watch",
        "LocalCopyCheckpoint": "megatron_lightning.callbacks.local_copies",
        "MemoryMonitor": "megatron_lightning.callbacks.memory",
        "MemorySnapshot": "megatron_lightning.callbacks.memory_snapshot",
        "PipelineTimeline": "megatron_lightning.callbacks.pipeline_timeline",
        "ProfilerWindow": "megatron_lightning.callbacks.profiler_window",
        "Fault": "megatron_lightning.callbacks.rehearsal.faults",
        "FaultInjector": "megatron_lightning.callbacks.rehearsal.injector",
        "RescueCheckpoint": "megatron_lightning.callbacks.rescue",
        "SampleText": "megatron_lightning.callbacks.sample_text",
        "SpikeGuard": "megatron_lightning.callbacks.spike_guard",
        "StageTimers": "megatron_lightning.callbacks.stage_timers",
        "StragglerMonitor": "megatron_lightning.callbacks.stage_timers",
        "LayerStatistics": "megatron_lightning.callbacks.statistics.layer_statistics",
        "SpeedMonitor": "megatron_lightning.callbacks.throughput",
        "ThroughputMonitor": "megatron_lightning.callbacks.throughput",
    },
)
