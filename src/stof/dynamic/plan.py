"""Plans for masks that a model makes at run time: fixed memory, rebuilt on the device in every step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from stof.dynamic.buffers import BLOCK_WISE, HOPPER, OVERFLOW, WorkBuffers
from stof.dynamic.gradients import DynamicGradients
from stof.dynamic.mask_buffers import BLOCK, core_of, fill_buffers, make_buffers, mask_signature, mask_tensors
from stof.errors import ArgumentError, KernelError, MaskError, PlanMismatchError, UnsupportedError
from stof.kernels.hopper.prepare import PreparedTiles
from stof.kernels.implementation import BoundCall
from stof.kernels.triton.work_list import PreparedWork
from stof.layout import Layout, LayoutConfig
from stof.masks import Mask
from stof.masks.base import check_lengths, check_sizes
from stof.masks.dynamic import VerticalSlash, described
from stof.masks.tensors import DenseMask, as_mask, dense_view
from stof.plans.calls import call_sizes_of
from stof.plans.plan import Plan
from stof.runtime import streams
from stof.runtime.memory import in_capture, record_streams, tensors_on_host
from stof.runtime.recomputation import Changes
from stof.runtime.streams import Update
from stof.selection import IMPLEMENTATIONS, CallSpec, Candidate, KernelChoice, first_of, weighed
from stof.selection.gpu_candidates import runtime_choice, runtime_hopper_choices
from stof.selection.gpu_choices import shared_memory_limit
from stof.selection.mask_geometry import MaskGeometry
from stof.validation import usable_device

# What may run a plan on a GPU.
_KERNELS = (HOPPER, BLOCK_WISE)


class DynamicPlan(Plan):
    """A plan whose mask is replaced in every step. Make it with `stof.dynamic_plan`, then `update` and attend.

    On a GPU all memory is fixed and `update` only launches kernels: it can be captured in a CUDA graph together with
    the attention calls that follow, and replayed after the mask's tensors changed in place. Lists that the Hopper
    kernel reads are made by the first call it runs; make that one before a capture, within which the Triton kernel
    would serve instead. Elsewhere `update` builds anew.

    Calls may ask for gradients, except under `vertical_slash` and, on a GPU, with a bias. The first such call makes
    lists for the backward pass, which later updates fill as well; make it before an update is captured. An update
    between a call and its backward pass makes that pass raise `PlanMismatchError`, and so does one inside of a
    function under activation checkpointing. Replays of captured updates go unnoticed.

    Calls and updates may be on any streams: each waits for what it depends on. The caller orders those of one capture,
    replays of graphs that hold some of them, and calls and updates by several threads.

    Invalid indices, and tiles that do not fit the buffers, make the rows concerned NaN, and `check` raises.
    """

    is_dynamic = True

    def __init__(
        self, mask: Mask, lengths: tuple[int, int], sizes: tuple[int, int], device: torch.device, density: float | None
    ) -> None:
        self._mask, self._sizes, self._density = mask, sizes, density
        self._buffers: WorkBuffers | None = None
        # The last one, and the last one that is part of a CUDA graph: that runs in replays alone.
        self._updates = {False: Update(), True: Update()}
        self._replayed = False
        self._captured = False
        self._is_filled = True
        self._streams: set[int] = set()
        self.updates = 0
        self._changes = Changes()
        dims = mask.dims(*sizes)
        geometry = self._geometry_of(mask, lengths, device)
        super().__init__(repr(mask), lengths, dims, device, call_sizes=call_sizes_of(mask, dims), geometry=geometry)
        if device.type == "cuda":
            with tensors_on_host():
                self._buffers = make_buffers(mask, lengths, (self.mask_batch, self.mask_heads), device, density)
            self.geometry = self._buffers
            self.gradients = DynamicGradients(self, self._buffers)
        self._take(mask)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles and copies have memory of their own, filled from the present mask."""
        return DynamicPlan, (self._mask, (self.q_len, self.kv_len), self._sizes, self.device, self._density)

    def _geometry_of(self, mask: Mask, lengths: tuple[int, int], device: torch.device) -> MaskGeometry:
        if device.type != "cuda":
            mask = mask.frozen()  # layouts for gradients are built later, and the mask's tensors may have changed
        return MaskGeometry(mask, *lengths, batch=self._sizes[0], heads=self._sizes[1], device=device)

    @property
    def mask(self) -> Mask:
        """The present one."""
        return self._mask

    def update(self, mask: Mask | Tensor, *, stream: torch.cuda.Stream | None = None) -> None:
        """Take another mask of the same kind and shapes, or the same one after its tensors changed.

        Args:
            mask: its tensors must not change before the attention calls under it.
            stream: where to build, beside the work that the current stream is given next; None for the current stream.
                Building begins after the current stream's work so far, which made the mask and may still read the last
                one, and attention under this plan waits for it. May be captured, fork and join, in a CUDA graph; once
                attention was captured, updates outside of a graph make the current stream wait at once.

        Raises:
            PlanMismatchError: a mask of another kind, or tensors of other shapes.
            MaskError: elsewhere than on a GPU, indices or scores that mean nothing; on a GPU `check` reports them. The
                same mask of `from_dense` again, or one while a CUDA graph is captured: it has a copy of its tensor.
        """
        mask = _runtime_mask(mask)
        if isinstance(mask, DenseMask) and mask.copied and (mask is self._mask or in_capture()):
            raise MaskError(
                "masks.from_dense copied its tensor, so this update would not see what was or will be written to it; "
                "give the bool tensor itself"
            )
        if mask_signature(mask) != mask_signature(self._mask):
            raise PlanMismatchError(
                f"this plan takes masks like {self._mask!r}, got {mask!r}; make another with stof.dynamic_plan"
            )
        if not self._changes.note_change():
            raise PlanMismatchError(
                "a dynamic plan is updated in a backward pass, which recomputes a function that updates it (activation "
                "checkpointing); update it outside of the function, and after the backward pass"
            )
        self._take(mask, stream)

    def _take(self, mask: Mask, stream: torch.cuda.Stream | None = None) -> None:
        if self._buffers is None:
            mask.check(self.q_len, self.kv_len)  # one that means nothing leaves the plan as it was
            self._layout = None
            self._prepared.clear()
            self._calls.clear()
            self.gradients = None
        else:
            with torch.cuda.device(self.device):
                capturing = torch.cuda.is_current_stream_capturing()
                self._captured = self._captured or capturing
                current = streams.stream_id()
                if stream is None:
                    self._fill(self._buffers, mask, capturing, current)
                    self._updates[capturing] = Update() if capturing else Update.here()
                else:
                    stream.wait_stream(torch.cuda.current_stream())
                    with torch.cuda.stream(stream):
                        self._fill(self._buffers, mask, capturing, current)
                        self._updates[capturing] = Update.here()
                    for tensor in mask_tensors(mask):
                        # Their memory may be given to others when the current stream has passed this point.
                        tensor.record_stream(stream)
                    if self._replayed and not capturing:
                        self._updates[capturing].join()  # replays of attention ask nobody
        self._mask = mask
        self.mask_geometry = self._geometry_of(mask, (self.q_len, self.kv_len), self.device)
        self.updates += 1

    def _fill(self, buffers: WorkBuffers, mask: Mask, capturing: bool, ordered: int) -> None:
        """Launch what writes the lists, behind what writes and reads them; see `Update.wait_for_calls`."""
        self._is_filled = False
        last = self._updates[capturing]
        last.join()
        if not capturing:
            # A kernel that reads a range's begin under one mask and its end under another may hang.
            last.wait_for_calls(ordered)
        fill_buffers(buffers, mask)
        if streams.stream_id() not in self._streams:  # tensors are collected for the first update on a stream alone
            record_streams(buffers.tensors(), self.device, self._streams)
        self._is_filled = True

    def check(self) -> None:
        """Raise if anything could not be computed since the last check; waits for the device.

        Raises:
            MaskError: names the batch entries and heads, and what was wrong with their masks.
        """
        if self._buffers is None:
            return  # `update` has raised already
        self.wait_for_update()
        every_flags = self._buffers.flags.tolist()
        if not any(every_flags):
            return
        self._buffers.flags.zero_()
        lines, advice = [], ""
        for number, flags in enumerate(every_flags):
            if flags:
                reasons = [described(flags)] if described(flags) else []
                if flags & OVERFLOW:
                    reasons.append("more tiles than there is room for")
                    advice = "; for more room, make the plan with a larger `density`"
                b, h = divmod(number, self.mask_heads)
                lines.append(f"  - batch entry {b}, head {h}: {' and '.join(reasons)}")
        shown = lines[:8] + [f"  - and {len(lines) - 8} more"] * (len(lines) > 8)
        raise MaskError("\n".join([f"masks of this plan gave NaN since the last check{advice}:", *shown]))

    @property
    def layout(self) -> Layout:
        """The present mask's layout, built anew each time: for pictures, figures and files."""
        return self._build(LayoutConfig(BLOCK, BLOCK, 1), None)

    def choice(self, call: CallSpec, implementation: str | None = None) -> KernelChoice:
        """As for other plans; within a capture, which leaves out the Hopper kernel, for that call alone."""
        if self._buffers is not None and in_capture():
            return self._decided(call, implementation)
        return super().choice(call, implementation)

    def _decided(self, call: CallSpec, implementation: str | None) -> KernelChoice:
        if self._buffers is None:
            return super()._decided(call, implementation)
        if implementation not in (None, *_KERNELS):
            reason = f"dynamic plans run on {' and '.join(_KERNELS)}, not on {implementation}"
            raise UnsupportedError("a dynamic plan cannot run this call", {implementation: [reason]})
        return first_of(self.candidates(call), call, implementation)

    def find_call(self, *arguments: Any) -> BoundCall | None:
        """As for other plans. Every call asks for this first, so it also waits for an update on another stream."""
        if not self._changes.note_call():
            raise PlanMismatchError(
                "a dynamic plan was updated between a call and the backward pass that recomputes it (activation "
                "checkpointing), or is updated and used by several threads; update it after the backward pass"
            )
        self.wait_for_update()
        return super().find_call(*arguments)

    def wait_for_update(self) -> None:
        """Let the plan's device's current stream wait for the last update.

        Raises:
            PlanMismatchError: it failed, and lists hold parts of two masks.
        """
        if not self._is_filled:
            raise PlanMismatchError(
                "the last update of this dynamic plan failed, and its lists hold parts of two masks; update it again"
            )
        if self._buffers is not None and torch.cuda.is_initialized():
            with torch.cuda.device(self.device):
                capturing = torch.cuda.is_current_stream_capturing()
                self._replayed = self._replayed or capturing
                # An eager update has ended before a capture begins.
                update = self._updates[capturing]
                update.join()
                if not self._buffers.calls_fill:
                    return
                if not capturing:  # calls on other streams may still read what is written
                    update.wait_for_calls(streams.stream_id())
                self._buffers.run_pending_fills()
                if not capturing:
                    self._updates[False] = Update.here()

    def prepare_backward(self, call: CallSpec) -> None:
        """Make lists for the gradients of a call and fill them from the mask's tensors; later updates fill them.

        Raises:
            UnsupportedError: no gradients of such calls, or such a call for the first time after an update was captured
                in a CUDA graph, whose replays would not fill the lists.
        """
        if isinstance(core_of(self._mask)[0], VerticalSlash):
            raise UnsupportedError(
                "no gradients under a dynamic plan of vertical_slash, which is for inference; make a plan of each "
                "step's mask by stof.plan",
                {},
            )
        if self._buffers is None:
            return
        while True:
            name, tiling = self.gradients.choices(call)[0]
            if self.gradients.has_lists(name, tiling):
                return
            if self._captured or in_capture():
                raise UnsupportedError(
                    "the first call with gradients under a dynamic plan makes lists that updates fill; make one such "
                    "call before an update or a call is captured in a CUDA graph",
                    {},
                )
            try:
                with torch.cuda.device(self.device):
                    self.gradients.make_lists(name, tiling)
                    self._streams.clear()  # the new lists were recorded on none
                    self._fill(self._buffers, self._mask, False, streams.stream_id())
                    self._updates[False] = Update.here()
                return
            except KernelError as error:
                self.gradients.drop_lists(name, tiling)
                self.gradients.reject(name, tiling, error)
            except BaseException:
                self.gradients.drop_lists(name, tiling)
                raise

    def refuse_first_call(self) -> None:
        """Nothing: see `choice` for what runs within a capture."""

    def candidates(self, call: CallSpec) -> list[Candidate]:
        """The ways to run a call on a GPU: by the block-wise Triton kernel, and by the Hopper kernel where it can.

        Neither takes 8-bit tensors with tiles made at run time; these are widened.
        """
        if self._buffers is None:
            return super().candidates(call)
        wide = call.widened()
        if wide is None:
            return self._candidates_of(self._buffers, call)
        candidates = self._candidates_of(self._buffers, wide)
        return [replace(one, choice=one.choice and replace(one.choice, widened=True)) for one in candidates]

    def _candidates_of(self, buffers: WorkBuffers, call: CallSpec) -> list[Candidate]:
        """`candidates` with tensors as they are."""
        refusals = {name: list(IMPLEMENTATIONS[name].capabilities.refusals(call)) for name in _KERNELS}
        refusals[HOPPER] += buffers.hopper_refusals()
        if call.has_bias:
            refusals[HOPPER].append("no bias where tiles are made at run time")
        if in_capture():  # it makes the work list on the host
            refusals[HOPPER].append("its first call for such tensors cannot be captured; make one before the capture")
        choices = [] if refusals[HOPPER] else runtime_hopper_choices(HOPPER, call, buffers.hopper_serves)
        refused = [Candidate(name, tuple(reasons)) for name, reasons in refusals.items() if reasons]
        if refusals[BLOCK_WISE]:
            return refused
        problem = buffers.problem
        layout = LayoutConfig(problem.block_m, problem.block_n, None if buffers.work.contiguous_tiles else 1)
        block_wise = runtime_choice(BLOCK_WISE, call, layout, shared_memory_limit(self.device))
        if not choices:
            return [Candidate(BLOCK_WISE, (), block_wise), *refused]
        # Where there are no estimates, for a few rows, the first one runs.
        return weighed([block_wise, *choices], call, self.device, buffers, self._layout_errors) + refused

    def reject(self, choice: KernelChoice, call: CallSpec, error: KernelError) -> None:
        """Exclude a choice from later calls; an error of the block-wise kernel is raised, as no other is left."""
        if self._buffers is not None and choice.implementation == BLOCK_WISE:
            raise error
        super().reject(choice, call, error)

    def _prepare(self, choice: KernelChoice) -> Any:
        """The lists of the present mask; their tensors stay the same from step to step."""
        buffers, kernel = self._buffers, choice.kernel
        if buffers is None:
            return super()._prepare(choice)
        assert kernel is not None
        with tensors_on_host():
            if choice.implementation == HOPPER:
                assert choice.layout is not None
                return PreparedTiles(buffers.use_hopper(choice.layout, kernel.split_tiles, self._captured), kernel)
            buffers.use_work(self._captured)
            return PreparedWork(buffers.work, kernel)

    def extended(self, rows: int, mask: Mask | None = None) -> Plan:
        """Not for plans of fixed sizes."""
        del rows, mask
        raise ArgumentError("a dynamic plan has fixed lengths; make another with stof.dynamic_plan")

    def _check_unchanged(self) -> None:
        """The mask's tensors are meant to change."""

    def bytes(self) -> int:
        """Memory of the fixed lists."""
        return super().bytes() if self._buffers is None else self._buffers.bytes()

    def __repr__(self) -> str:
        return f"DynamicPlan({self._mask!r}, q_len={self.q_len}, kv_len={self.kv_len}, device={str(self.device)!r})"


def _runtime_mask(mask: Mask | Tensor) -> Mask:
    """A mask; of a bool tensor one that reads it at each update."""
    return dense_view(mask) if isinstance(mask, Tensor) else as_mask(mask)


def dynamic_plan(
    mask: Mask | Tensor,
    q_len: int,
    kv_len: int | None = None,
    *,
    batch: int = 1,
    heads: int = 1,
    device: torch.device | str | None = None,
    density: float | None = None,
) -> DynamicPlan:
    """A plan for masks that change in every step, whose work is built on the device.

    Args:
        mask: the first mask: `vertical_slash` (also `.with_query_offset`), `block_topk`, `from_bits`, or a dense bool
            tensor. Later ones are of the same kind and shapes.
        q_len, kv_len: lengths in tokens; `kv_len` defaults to `q_len`.
        batch, heads: sizes of the calls to come.
        device: where the calls run and the masks' tensors are; default that of the mask.
        density: largest share of all scores, over heads and rows, that the tiles may take, for bool tensors and bits;
            it bounds the plan's memory. Tiles hold a little more than the mask keeps. With gradients, it bounds the
            tiles of the transposed mask as well, in which keys take the place of queries. Default: room for any mask of
            these shapes, which `vertical_slash` and `block_topk` always have.

    Raises:
        MaskError: a mask of another kind, or (not on a GPU) one that means nothing.
        ShapeError: the mask does not fit the lengths, batch or heads.
        ArgumentError: a density outside 0 to 1, or more room than a plan can hold.

    Examples:
        >>> q, k, v = torch.randn(3, 1, 4, 256, 32)
        >>> scores = torch.randn(1, 4, 4, 4)  # of 64 x 64 blocks
        >>> plan = stof.dynamic_plan(masks.block_topk(scores, 2, causal=True), 256, heads=4)
        >>> out = stof.attention(q, k, v, plan)
        >>> plan.update(masks.block_topk(-scores, 2, causal=True))  # the next step's mask
        >>> stof.attention(q, k, v, plan).shape
        torch.Size([1, 4, 256, 32])
    """
    mask = _runtime_mask(mask)
    kv_len = q_len if kv_len is None else kv_len
    check_lengths(q_len, kv_len)
    check_sizes(batch, heads)
    if density is not None and not 0 < density <= 1:
        raise ArgumentError(f"density is above 0 and at most 1, or None for room for any mask, got {density!r}")
    mask_device = mask_tensors(mask)[0].device
    where = mask_device if device is None else usable_device(device)
    if where.type == "cuda" and where.index is None:
        where = torch.device("cuda", torch.cuda.current_device())
    if where != mask_device:
        raise ArgumentError(
            f"the mask's tensors are on {mask_device}, the plan on {where}; make them where the calls run"
        )
    return DynamicPlan(mask, (q_len, kv_len), (batch, heads), where, density)
