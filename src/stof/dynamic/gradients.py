"""Backward passes under dynamic plans: updates fill lists of fixed size, which the Triton kernels read."""

from __future__ import annotations

import torch

from stof.dynamic.buffers import BLOCK_WISE, WorkBuffers
from stof.errors import UnsupportedError
from stof.kernels.config import KernelConfig
from stof.kernels.triton.backward_tiles import PreparedBackward
from stof.layout import LayoutConfig
from stof.plans.backward import PlanGradients
from stof.plans.plan import Plan
from stof.selection import IMPLEMENTATIONS, CallSpec
from stof.selection.backward_tilings import BackwardTiling
from stof.selection.resources import head_dim_class

# Row blocks are not split: how many tiles they have differs from update to update.
KERNEL = KernelConfig(num_warps=4, num_stages=2)


def tile_size(call: CallSpec) -> int:
    """The largest rows and columns of tiles for which the kernels hold their sums in registers."""
    size = 32 if head_dim_class(call.head_dim, call.value_dim) == 256 else 64
    return size // 2 if call.dtype == torch.float32 else size


class DynamicGradients(PlanGradients):
    """Backward passes of one dynamic plan on a GPU."""

    def __init__(self, plan: Plan, buffers: WorkBuffers) -> None:
        super().__init__(plan)
        self._buffers = buffers

    def choices(self, call: CallSpec) -> list[tuple[str, BackwardTiling]]:
        """Return the only choice: the Triton kernels, in the tile size that suits the call.

        Raises:
            UnsupportedError: they refuse the call.
        """
        name, backward = BLOCK_WISE, IMPLEMENTATIONS[BLOCK_WISE].backward
        assert backward is not None
        size = self._buffers.backward_size(tile_size(call))
        layout = LayoutConfig(size, size), None
        choice = name, BackwardTiling(layout, layout, KERNEL, KERNEL)
        reasons = list(backward.capabilities.refusals(call))
        if call.has_bias:
            reasons.append("no gradients of calls with a bias where tiles are made at run time")
        if choice in self._failed:
            reasons.append(self._failed[choice])
        if reasons:
            raise UnsupportedError("no implementation can compute gradients under this dynamic plan", {name: reasons})
        return [choice]

    def prepared(self, name: str, tiling: BackwardTiling) -> PreparedBackward:
        """Return the lists in a choice's tile size; `DynamicPlan.prepare_backward` has made them."""
        del name  # that of `choices`
        assert tiling.dq_layout is not None
        lists = self._buffers.backward.get(tiling.dq_layout[0].block_m)
        if lists is None:
            raise UnsupportedError(
                "the call was not made by stof.attention, which makes the lists for its gradients", {}
            )
        return PreparedBackward(lists.dq, KERNEL, lists.dkv, KERNEL)
