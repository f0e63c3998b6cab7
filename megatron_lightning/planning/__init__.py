"""Plan a training before the run: floating-point operations, memory, grid and schedule, as pure
arithmetic without torch.
"""

from megatron_lightning.planning.flops import flops
from megatron_lightning.planning.megatron import MegatronMemory, megatron_memory
from megatron_lightning.planning.memory import Memory, RankMemory, memory

__all__ = ["MegatronMemory", "Memory", "RankMemory", "flops", "megatron_memory", "memory"]
