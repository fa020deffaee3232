"""The implementations of attention and what each can run.

To add one: write `prepare` and `bind` in a folder of `stof.kernels` (`stof.kernels.implementation` says what they are),
then declare it here. Dispatch, error texts, the docs' table and the tests read this list.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from stof.kernels.config import KernelConfig
from stof.kernels.cpu import row_block_attention, schedule_of
from stof.kernels.cpu.backward import row_block_backward
from stof.kernels.hopper import prepare as hopper
from stof.kernels.hopper.backward_lists import make_backward_lists
from stof.kernels.implementation import (
    BackwardCall,
    Bind,
    backward_of,
    bind_backward_of,
    bind_nothing,
    bind_of,
)
from stof.kernels.quantization import FP8
from stof.kernels.torch.batched import batched_attention, make_batched
from stof.kernels.torch.reference import dense_backward, reference_in_q_order
from stof.kernels.triton.backward_tiles import PreparedBackward, prepare_backward
from stof.kernels.triton.row_lists import prepare as prepare_rows
from stof.kernels.triton.work_list import prepare as prepare_work
from stof.layout import Layout
from stof.selection.backward_tilings import BackwardTiling, one_pass_tilings, triton_tilings
from stof.selection.capabilities import DECODE_ROWS, CallSpec, Capabilities
from stof.selection.gpu_candidates import (
    as_16_bits,
    decode_choices,
    fp8_choices,
    hopper_choices,
    row_choices,
    tile_choices,
)
from stof.selection.kernel_choice import KernelChoice
from stof.selection.mask_geometry import Geometry, MaskGeometry
from stof.selection.resources import (
    fp8_shared_memory,
    hopper_occupancy,
    hopper_shared_memory,
    tile_occupancy,
    tile_shared_memory,
)

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
GPU_FLOATS = FLOATS[:3]
# A tile's time in 8 bits as a share of its time in 16: under a full mask of 8192 tokens an H200 takes 1123 us, the
# transposition of V included (`benchmarks/attention/fp8.py`), and 1571 us in 16 bits.
_FP8_TILE = 0.73


@dataclass(frozen=True)
class Backward:
    """How an implementation computes gradients, of calls that any implementation computed.

    Attributes:
        capabilities: what it can run; the row order does not matter.
        tilings: `(call, geometry_of) -> tilings`, the layouts and configurations to try, best first;
            `geometry_of(transposed)` is that of the mask or of the transposed mask.
        prepare: `(layout_of, tiling) -> prepared`. `layout_of((config, row_order))` gives a layout of the mask, whose
            rows are queries; with `transposed=True` of the transposed mask, whose rows are keys; `layout_of(None)`
            gives the plan's.
        bind: `(q, k, v, out, d_out, d_lse, prepared, options, needs) -> call`, see `BackwardCall`.
        keeps_tilings: a tiling serves later masks of the same structure, whose lists the GPU fills.
        one_decision: it serves all masks of a structure, or none of them, as the first one decides.
    """

    capabilities: Capabilities
    tilings: Callable[[CallSpec, Callable[[bool], MaskGeometry]], tuple[BackwardTiling, ...]]
    prepare: Callable[[Callable[..., Layout], BackwardTiling], Any]
    bind: Callable[..., BackwardCall]
    keeps_tilings: bool = False
    one_decision: bool = False


@dataclass(frozen=True)
class GpuSelection:
    """What the selector needs in order to list an implementation's choices on a GPU and to estimate their times.

    Attributes:
        choices: `(name, call, geometry, row_orders) -> choices`, whether they pay or not; see `gpu_candidates.py`.
        shared_memory: `(choice, call) -> bytes` that a thread block has.
        occupancy: `(choice, call, bytes) -> number` of thread blocks on a multiprocessor with so much shared memory.
        persistent: thread blocks stay and take one work tile after another, which they read by TMA (Hopper).
        few_rows: made for calls of at most `DECODE_ROWS` query rows, which wait for keys and values.
        by_rows: computes each row by itself, without tiles, at the cost that `DeviceModel.row_wise` says.
        transposes_v: V is transposed before the kernel runs.
        measured_as: `choice -> (choice of another implementation, factor)`: times are those of that one's tiles.
    """

    choices: Callable[[str, CallSpec, Geometry, tuple[str | None, ...]], list[KernelChoice]]
    shared_memory: Callable[[KernelChoice, CallSpec], int] = tile_shared_memory
    occupancy: Callable[[KernelChoice, CallSpec, int], int] = tile_occupancy
    persistent: bool = False
    few_rows: bool = False
    by_rows: bool = False
    transposes_v: bool = False
    measured_as: Callable[[KernelChoice], tuple[KernelChoice, float]] | None = None


@dataclass(frozen=True)
class Implementation:
    """One way to compute masked attention.

    Attributes:
        name: what `explain` and benchmarks print.
        summary: one line for people.
        capabilities: what it can run.
        prepare: a layout, and the kernel's configuration (None for the default, or where it has none), in the form that
            `bind` takes; called once for each layout of a plan. Its tensors are found by
            `stof.kernels.implementation.tensors_of`.
        bind: `(q, k, v, prepared, options) -> call`; `call(q, k, v, bias, sinks, *scales) -> (out, lse)`, with
            `seed=` too where the options have dropout, serves all calls with tensors of these shapes, strides and
            dtypes.
        backward: how it computes gradients; None where another implementation's backward serves.
        gpu: its choices on a GPU and what decides their times; None where it has one choice, without an estimate.
        ignores_unseen: keys and values that no query sees may hold NaN.
    """

    name: str
    summary: str
    capabilities: Capabilities
    prepare: Callable[[Layout, KernelConfig | None], Any]
    bind: Bind
    backward: Backward | None = None
    gpu: GpuSelection | None = None
    ignores_unseen: bool = True


_TRITON = Capabilities(
    devices=("cuda",), dtypes=GPU_FLOATS, head_dims=(1, 256), value_dims=(1, 256), compute_capability=(8, 0)
)
_TRITON_DROPOUT = replace(_TRITON, dropout=True)
_HOPPER = Capabilities(
    devices=("cuda",),
    dtypes=(torch.float16, torch.bfloat16),
    head_dims=(8, 256),
    head_dim_multiple=8,
    value_dim=False,
    tiled_bias=True,
    compute_capability=(9, 0),
    one_generation=True,
)


def _triton_backward(layout_of: Callable[..., Layout], tiling: BackwardTiling) -> PreparedBackward:
    return prepare_backward(
        layout_of(tiling.dq_layout), layout_of(tiling.dkv_layout, transposed=True), tiling.dq, tiling.dkv
    )


# In order of preference: the first that refuses nothing runs.
IMPLEMENTATIONS: dict[str, Implementation] = {
    impl.name: impl
    for impl in (
        Implementation(
            name="row_block",
            summary="PyTorch's fused CPU attention per row block, on the columns it needs",
            capabilities=Capabilities(devices=("cpu",), dtypes=FLOATS, dropout=True),
            prepare=lambda layout, config: schedule_of(layout),
            bind=bind_nothing(row_block_attention),
            backward=Backward(
                capabilities=Capabilities(devices=("cpu",), dtypes=FLOATS, dropout=True),
                tilings=lambda call, geometry_of: (BackwardTiling(),),
                prepare=lambda layout_of, tiling: schedule_of(layout_of(None)),
                bind=bind_backward_of(row_block_backward),
            ),
        ),
        Implementation(
            name="hopper",
            summary="Gluon, for Hopper: a warp that copies by TMA, warpgroups that compute, on persistent blocks",
            capabilities=_HOPPER,
            prepare=hopper.prepare,
            bind=bind_of("stof.kernels.hopper.forward"),
            backward=Backward(
                capabilities=replace(_HOPPER, head_dims=(8, 128), bias=False),
                tilings=one_pass_tilings,
                prepare=lambda layout_of, tiling: make_backward_lists(layout_of(tiling.dkv_layout, transposed=True)),
                bind=backward_of("stof.kernels.hopper.backward"),
                keeps_tilings=True,
                one_decision=True,
            ),
            gpu=GpuSelection(hopper_choices, hopper_shared_memory, hopper_occupancy, persistent=True),
        ),
        Implementation(
            name="hopper_fp8",
            summary="the same for 8-bit tensors with scales: V transposed first, matmuls at twice the rate",
            capabilities=Capabilities(
                devices=("cuda",),
                dtypes=(FP8,),
                head_dims=(128, 128),
                value_dim=False,
                bias=False,
                permuted_rows=False,
                compute_capability=(9, 0),
                one_generation=True,
            ),
            prepare=hopper.prepare_fp8,
            bind=bind_of("stof.kernels.hopper.fp8.forward"),
            gpu=GpuSelection(
                fp8_choices,
                fp8_shared_memory,
                hopper_occupancy,
                persistent=True,
                transposes_v=True,
                measured_as=lambda choice: (as_16_bits("hopper", choice), _FP8_TILE),
            ),
        ),
        Implementation(
            name="block_wise",
            summary="Triton: tensor cores over tiles of scores, heavy row blocks split and merged",
            capabilities=_TRITON_DROPOUT,
            prepare=prepare_work,
            bind=bind_of("stof.kernels.triton.block_wise"),
            backward=Backward(
                capabilities=_TRITON_DROPOUT,
                tilings=triton_tilings,
                prepare=_triton_backward,
                bind=backward_of("stof.kernels.triton.backward"),
                keeps_tilings=True,
            ),
            gpu=GpuSelection(tile_choices),
        ),
        Implementation(
            name="decode",
            summary="Triton: few query rows against a long key cache, query heads packed into rows, split along keys",
            capabilities=replace(_TRITON, q_len=DECODE_ROWS, one_mask_per_group=True),
            prepare=prepare_work,
            bind=bind_of("stof.kernels.triton.block_wise"),
            gpu=GpuSelection(decode_choices, few_rows=True),
        ),
        Implementation(
            name="row_wise",
            summary="Triton: each row over its own keys, without tensor cores; for few keys a row",
            capabilities=_TRITON,
            prepare=lambda layout, config: prepare_rows(layout),
            bind=bind_of("stof.kernels.triton.row_wise"),
            gpu=GpuSelection(row_choices, by_rows=True),
        ),
        Implementation(
            name="batched",
            summary="plain PyTorch on any device: row blocks of like width gathered into batches",
            capabilities=Capabilities(devices=(), dtypes=FLOATS),
            prepare=lambda layout, config: make_batched(layout),
            bind=bind_nothing(batched_attention),
        ),
        Implementation(
            name="reference",
            summary="dense attention in plain PyTorch, memory grows with q_len * kv_len",
            capabilities=Capabilities(devices=(), dtypes=FLOATS, dropout=True),
            prepare=lambda layout, config: layout.to_dense(),
            bind=bind_nothing(reference_in_q_order),
            backward=Backward(
                capabilities=Capabilities(devices=(), dtypes=FLOATS, dropout=True),
                tilings=lambda call, geometry_of: (BackwardTiling(),),
                prepare=lambda layout_of, tiling: layout_of(None).to_dense(),
                bind=bind_backward_of(dense_backward),
            ),
            ignores_unseen=False,  # weights of 0 are multiplied with all values
        ),
    )
}


def gpu_of(choice: KernelChoice) -> GpuSelection:
    """What the selector knows of the implementation of a choice, which has estimates."""
    gpu = IMPLEMENTATIONS[choice.implementation].gpu
    assert gpu is not None
    return gpu
