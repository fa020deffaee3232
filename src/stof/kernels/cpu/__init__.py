"""Attention on the CPU: PyTorch's fused attention per row block, on the columns the row block needs."""

from stof.kernels.cpu.attention import row_block_attention
from stof.kernels.cpu.schedule import Schedule, make_schedule, schedule_of

__all__ = ["Schedule", "make_schedule", "row_block_attention", "schedule_of"]
