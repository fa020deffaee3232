"""Backward passes under dynamic plans: updates fill the lists of fixed size that the kernels read."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from stof.dynamic.backward_lists import TritonLists
from stof.dynamic.block_topk.one_pass import OnePassLists
from stof.dynamic.buffers import BLOCK_WISE, HOPPER, WorkBuffers
from stof.errors import UnsupportedError
from stof.kernels.config import KernelConfig
from stof.kernels.hopper.backward_lists import LAYOUTS, BackwardLists
from stof.kernels.triton.backward_tiles import PreparedBackward
from stof.layout import LayoutConfig
from stof.plans.backward import PlanGradients
from stof.plans.plan import Plan
from stof.runtime.memory import outside_graph_pool
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
        """Return the only choice: Hopper's one-pass kernel where it serves, or else the Triton kernels.

        Raises:
            UnsupportedError: both refuse the call.
        """
        reasons = {}
        for name, tiling, refusals in (self._one_pass(call), self._two_passes(call)):
            if (name, tiling) in self._failed:
                refusals.append(self._failed[name, tiling])
            if not refusals:
                return [(name, tiling)]
            reasons[name] = refusals
        raise UnsupportedError("no implementation can compute gradients under this dynamic plan", reasons)

    def _one_pass(self, call: CallSpec) -> tuple[str, BackwardTiling, list[str]]:
        """Hopper's kernel, its tiles, and why it does not serve."""
        backward = IMPLEMENTATIONS[HOPPER].backward
        assert backward is not None
        refusals = [*backward.capabilities.refusals(call), *self._buffers.one_pass_refusals(call)]
        # Wider heads are refused, and have no tiles.
        layout = LAYOUTS[min(head_dim_class(call.head_dim, call.value_dim), max(LAYOUTS))]
        return HOPPER, BackwardTiling(dkv_layout=(layout, None)), refusals

    def _two_passes(self, call: CallSpec) -> tuple[str, BackwardTiling, list[str]]:
        """The Triton kernels, their tiles, and why they do not serve."""
        backward = IMPLEMENTATIONS[BLOCK_WISE].backward
        assert backward is not None
        size = self._buffers.backward_size(tile_size(call))
        layout = LayoutConfig(size, size), None
        refusals = list(backward.capabilities.refusals(call))
        if call.has_bias:
            refusals.append("calls with a bias have no gradients where tiles are made at run time")
        return BLOCK_WISE, BackwardTiling(layout, layout, KERNEL, KERNEL), refusals

    def make_lists(self, name: str, tiling: BackwardTiling) -> None:
        """Make the lists of a choice, to be filled by the next update."""
        buffers, layout = self._buffers, _layout_of(tiling)
        make: Callable[[], TritonLists | OnePassLists] = partial(buffers.backward_lists, layout.block_m)
        if name == HOPPER:
            make = partial(buffers.one_pass_lists, layout)
        buffers.backward[name, layout] = outside_graph_pool(buffers.flags.device, make)

    def drop_lists(self, name: str, tiling: BackwardTiling) -> None:
        """Forget the lists of a choice, which could not be filled."""
        self._buffers.backward.pop((name, _layout_of(tiling)), None)

    def has_lists(self, name: str, tiling: BackwardTiling) -> bool:
        """Whether the lists of a choice were made."""
        return (name, _layout_of(tiling)) in self._buffers.backward

    def prepared(self, name: str, tiling: BackwardTiling) -> PreparedBackward | BackwardLists:
        """Return the lists of a choice; `DynamicPlan.prepare_backward` has made them."""
        lists = self._buffers.backward.get((name, _layout_of(tiling)))
        if lists is None:
            raise UnsupportedError(
                "the lists for gradients of this call were not made; call stof.attention(q, k, v, plan) again, which "
                "makes them",
                {},
            )
        if isinstance(lists, OnePassLists):
            return lists.lists
        return PreparedBackward(lists.dq, KERNEL, lists.dkv, KERNEL)


def _layout_of(tiling: BackwardTiling) -> LayoutConfig:
    """The layout of the transposed mask."""
    assert tiling.dkv_layout is not None
    return tiling.dkv_layout[0]
