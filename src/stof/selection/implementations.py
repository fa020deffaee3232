"""The implementations of attention: capabilities, how each prepares a layout, and how it runs.

To add one: write the kernel under `stof.kernels`, then one entry here. `prepare` turns a layout into the tensors
the kernel reads (once per plan), `run` gets exactly those tensors back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from stof.errors import KernelError
from stof.kernels.common import empty_output
from stof.kernels.config import BoundCall, KernelConfig
from stof.kernels.cpu import Schedule, make_schedule, row_block_attention
from stof.kernels.hopper.paired_tile_lists import make_paired_lists
from stof.kernels.hopper.tile_lists import TileLists, make_fp8_lists, make_tile_lists
from stof.kernels.quantization import FP8
from stof.kernels.torch.batched import BatchedLayout, batched_attention, make_batched
from stof.kernels.torch.reference import reference_attention
from stof.kernels.triton.work_list import Work, make_work
from stof.layout import Layout
from stof.selection.capabilities import Capabilities
from stof.selection.cost_model import DECODE_ROWS
from stof.selection.resources import FP8_STAGES

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
GPU_FLOATS = FLOATS[:3]

# Integers at the front of a block-wise kernel's sizes: its settings.
_SETTINGS = len(fields(KernelConfig))


@dataclass(frozen=True, eq=False)
class PreparedLayout:
    """A layout in the form one implementation reads.

    Attributes:
        implementation: name of the implementation.
        tensors: its own tensors; their meaning is the implementation's business.
        sizes: its own integers.
    """

    implementation: str
    tensors: list[Tensor]
    sizes: list[int]


@dataclass(frozen=True)
class Options:
    """Scalars and optional tensors of a call, as kernels take them; `scales` are those of 8-bit q, k and v, or none."""

    scale: float
    softcap: float
    bias: Tensor | None
    sinks: Tensor | None
    scales: tuple[Tensor, ...] = ()

    def wide(self) -> dict[str, Any]:
        """By name, for kernels that take no 8-bit tensors."""
        return {"scale": self.scale, "softcap": self.softcap, "bias": self.bias, "sinks": self.sinks}


Run = Callable[[Tensor, Tensor, Tensor, list[Tensor], list[int], Options], tuple[Tensor, Tensor]]
Bind = Callable[[Tensor, Tensor, Tensor, list[Tensor], list[int], Options], BoundCall]


@dataclass(frozen=True)
class Implementation:
    """One way to compute masked attention.

    Attributes:
        name: what `explain` and benchmarks print.
        summary: one line for people.
        capabilities: what it can run.
        prepare: layout and the kernel's settings (None where it has none) -> the tensors and integers `run` needs.
        run: `(q, k, v, tensors, sizes, options) -> (out, lse)`, shapes as the operator's.
        bind: the same arguments -> `call(q, k, v, bias, sinks, *scales)` for repeated calls with like tensors, where
            that saves host time.
    """

    name: str
    summary: str
    capabilities: Capabilities
    prepare: Callable[[Layout, KernelConfig | None], tuple[list[Tensor], list[int]]]
    run: Run
    bind: Bind | None = None

    def bound(
        self, q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], sizes: list[int], options: Options
    ) -> BoundCall:
        """A call for tensors like these."""
        if self.bind is not None:
            return self.bind(q, k, v, tensors, sizes, options)
        scale, softcap = options.scale, options.softcap
        return lambda q, k, v, bias, sinks: self.run(q, k, v, tensors, sizes, Options(scale, softcap, bias, sinks))


def _prepare_row_block(layout: Layout, settings: KernelConfig | None) -> tuple[list[Tensor], list[int]]:
    del settings
    return make_schedule(layout).tensors(), []


def _run_row_block(
    q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], sizes: list[int], options: Options
) -> tuple[Tensor, Tensor]:
    del sizes
    return row_block_attention(q, k, v, Schedule(*tensors), **options.wide())


def _prepare_batched(layout: Layout, settings: KernelConfig | None) -> tuple[list[Tensor], list[int]]:
    del settings
    return make_batched(layout).flatten()


def _run_batched(
    q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], sizes: list[int], options: Options
) -> tuple[Tensor, Tensor]:
    return batched_attention(q, k, v, BatchedLayout.unflatten(tensors, sizes), **options.wide())


def _prepare_reference(layout: Layout, settings: KernelConfig | None) -> tuple[list[Tensor], list[int]]:
    del settings
    return [layout.to_dense()], []


def _run_reference(
    q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], sizes: list[int], options: Options
) -> tuple[Tensor, Tensor]:
    del sizes
    out, lse = reference_attention(
        q,
        k,
        v,
        tensors[0],
        scale=options.scale,
        bias=options.bias,
        softcap=options.softcap,
        sinks=options.sinks,
    )
    # The operator's fake promises q's memory order.
    return empty_output(q, v).copy_(out), lse


def _run_by(bind: Bind) -> Run:
    """Bound anew for one call."""

    def run(
        q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], sizes: list[int], options: Options
    ) -> tuple[Tensor, Tensor]:
        return bind(q, k, v, tensors, sizes, options)(q, k, v, options.bias, options.sinks, *options.scales)

    return run


def _prepare_block_wise(layout: Layout, settings: KernelConfig | None) -> tuple[list[Tensor], list[int]]:
    settings = settings or KernelConfig()
    return prepared_work(make_work(layout, settings.split_tiles), settings)


def prepared_work(work: Work, settings: KernelConfig) -> tuple[list[Tensor], list[int]]:
    """Work and settings of the block-wise kernel as `PreparedLayout` carries them."""
    tensors, sizes = work.flatten()
    return tensors, [int(value) for value in (*astuple(settings), *sizes)]


def _bind_block_wise(
    q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], sizes: list[int], options: Options
) -> BoundCall:
    from stof.kernels.triton.block_wise import bind_block_wise

    settings = KernelConfig(*sizes[:_SETTINGS])  # type: ignore[arg-type]
    work = Work.unflatten(tensors, sizes[_SETTINGS:])
    return bind_block_wise(q, k, v, work, settings, **options.wide())


def _prepare_hopper(layout: Layout, settings: KernelConfig | None) -> tuple[list[Tensor], list[int]]:
    settings = settings or KernelConfig(num_stages=2)
    lists = make_paired_lists(layout) if settings.paired else make_tile_lists(layout, settings.split_tiles)
    return prepared_tiles(lists, settings)


def prepared_tiles(lists: TileLists, settings: KernelConfig) -> tuple[list[Tensor], list[int]]:
    """Lists and settings of the Hopper kernel as `PreparedLayout` carries them."""
    tensors, sizes = lists.flatten()
    return tensors, [int(value) for value in (*astuple(settings), *sizes)]


def _bind_hopper(
    q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], sizes: list[int], options: Options
) -> BoundCall:
    try:
        from stof.kernels.hopper.forward import bind_forward
    except (ImportError, AttributeError) as error:  # Gluon came with Triton 3.4 and moves from release to release
        raise KernelError(f"this Triton has no Gluon that the kernel knows: {error}") from error

    settings = KernelConfig(*sizes[:_SETTINGS])  # type: ignore[arg-type]
    lists = TileLists.unflatten(tensors, sizes[_SETTINGS:])
    return bind_forward(q, k, v, lists, settings, **options.wide())


def _prepare_hopper_fp8(layout: Layout, settings: KernelConfig | None) -> tuple[list[Tensor], list[int]]:
    settings = settings or KernelConfig(num_stages=FP8_STAGES)
    return prepared_tiles(make_fp8_lists(layout, settings.split_tiles), settings)


def _bind_hopper_fp8(
    q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], sizes: list[int], options: Options
) -> BoundCall:
    try:
        from stof.kernels.hopper.fp8.forward import bind_fp8
    except (ImportError, AttributeError) as error:  # as for 16 bits
        raise KernelError(f"this Triton has no Gluon that the kernel knows: {error}") from error

    settings = KernelConfig(*sizes[:_SETTINGS])  # type: ignore[arg-type]
    lists = TileLists.unflatten(tensors, sizes[_SETTINGS:])
    scalars = {"scale": options.scale, "softcap": options.softcap}
    return bind_fp8(q, k, v, options.scales, lists, settings, sinks=options.sinks, **scalars)


def _prepare_row_wise(layout: Layout, settings: KernelConfig | None) -> tuple[list[Tensor], list[int]]:
    from stof.kernels.triton.row_wise import prepare_row_wise

    del settings
    return prepare_row_wise(layout)


def _bind_row_wise(
    q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], sizes: list[int], options: Options
) -> BoundCall:
    from stof.kernels.triton.row_wise import bind_row_wise

    return bind_row_wise(q, k, v, tensors, sizes, **options.wide())


_TRITON = Capabilities(
    devices=("cuda",), dtypes=GPU_FLOATS, head_dims=(1, 256), value_dims=(1, 256), compute_capability=(8, 0)
)

# In order of preference: the first that refuses nothing runs.
IMPLEMENTATIONS: dict[str, Implementation] = {
    impl.name: impl
    for impl in (
        Implementation(
            name="row_block",
            summary="PyTorch's fused CPU attention per row block, on the columns it needs",
            capabilities=Capabilities(devices=("cpu",), dtypes=FLOATS),
            prepare=_prepare_row_block,
            run=_run_row_block,
        ),
        Implementation(
            name="hopper",
            summary="Gluon, for Hopper: a warp that copies by TMA, warpgroups that compute, on persistent blocks",
            capabilities=Capabilities(
                devices=("cuda",),
                dtypes=(torch.float16, torch.bfloat16),
                head_dims=(8, 256),
                head_dim_multiple=8,
                value_dim=False,
                tiled_bias=True,
                compute_capability=(9, 0),
                one_generation=True,
            ),
            prepare=_prepare_hopper,
            run=_run_by(_bind_hopper),
            bind=_bind_hopper,
        ),
        Implementation(
            name="hopper_fp8",
            summary="the same for 8-bit tensors with scales: values laid across first, twice the rate of products",
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
            prepare=_prepare_hopper_fp8,
            run=_run_by(_bind_hopper_fp8),
            bind=_bind_hopper_fp8,
        ),
        Implementation(
            name="block_wise",
            summary="Triton: tensor cores over tiles of scores, heavy row blocks split and merged",
            capabilities=_TRITON,
            prepare=_prepare_block_wise,
            run=_run_by(_bind_block_wise),
            bind=_bind_block_wise,
        ),
        Implementation(
            name="decode",
            summary="Triton: few query rows against a long key cache, query heads packed into rows, split along keys",
            capabilities=replace(_TRITON, q_len=DECODE_ROWS, one_mask_per_group=True),
            prepare=_prepare_block_wise,
            run=_run_by(_bind_block_wise),
            bind=_bind_block_wise,
        ),
        Implementation(
            name="row_wise",
            summary="Triton: each row over its own keys, without tensor cores; for few keys a row",
            capabilities=_TRITON,
            prepare=_prepare_row_wise,
            run=_run_by(_bind_row_wise),
            bind=_bind_row_wise,
        ),
        Implementation(
            name="batched",
            summary="plain PyTorch on any device: row blocks of like width gathered into batches",
            capabilities=Capabilities(devices=(), dtypes=FLOATS),
            prepare=_prepare_batched,
            run=_run_batched,
        ),
        Implementation(
            name="reference",
            summary="dense attention in plain PyTorch, memory grows with q_len * kv_len",
            capabilities=Capabilities(devices=(), dtypes=FLOATS),
            prepare=_prepare_reference,
            run=_run_reference,
        ),
    )
}
