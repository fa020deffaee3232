"""Kernels that make work and layouts on the device: what they are compiled with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from triton.compiler import ASTSource

from stof.masks.gpu_program import Programs
from tests.kernels.assemble import Compiled, assemble


def fill_kernels() -> Iterator[tuple[Any, list[Any], dict[str, int]]]:
    """Kernels that make work on the device, with types or constants of their parameters, and compile options."""
    from stof.dynamic.block_topk import triton_kernels as fill_blocks
    from stof.dynamic.block_topk.hopper_kernels import code_tiles, fill_tiles
    from stof.dynamic.dense import triton_kernels as fill_dense
    from stof.dynamic.vertical_slash import hopper_kernels as hopper_slash
    from stof.dynamic.vertical_slash import tables as fill_slash_tables
    from stof.dynamic.vertical_slash import triton_kernels as fill_slash
    from stof.kernels.hopper.fp8 import transpose_v
    from stof.kernels.hopper.gather_columns import gather_columns
    from stof.kernels.hopper.refresh_work import refresh_work

    ints, i = "*i32", "i32"
    for kind in (ints, "*i64"):
        yield fill_slash_tables.slash_tables, [kind, kind, *[ints] * 5, *[i] * 11, 1, 2, 64, 2048], {"num_warps": 8}
        yield fill_slash.vertical_slash_fill, [ints, *[ints] * 7, *[i] * 13, 64, 64, 128, 256], {"num_warps": 1}
    yield fill_slash.slash_tiles, [*[ints] * 3, *[i] * 5, 128, 64, 64], {"num_warps": 2}
    for width, num_warps in ((512, 1), (4096, 4), (16384, 16)):
        given = ["*fp32", *[ints] * 4, i, i, i, 1, i, i, i, i, 4, True, width]
        yield fill_blocks.select_blocks, given, {"num_warps": num_warps}
    yield fill_blocks.fill_work, [*[ints] * 7, *[i] * 6, 64, True, 64, 64, 64], {"num_warps": 1}
    for size, transposed, write in ((32, False, True), (64, True, True), (64, False, False)):
        strides = (1, i) if transposed else (i, 1)
        given = ["*i8", *[ints] * 5, i, *strides, *[i] * 3, 128 // size, True, transposed, size, 64, write]
        yield fill_blocks.list_tiles, given, {}
    for block_m, width, paired in ((64, 64, False), (64, 64, True), (128, 128, False)):
        yield fill_tiles, [*[ints] * 7, *[i] * 7, width, True, block_m, width, paired, 64], {"num_warps": 1}
        yield refresh_work, [*[ints] * 3, i, 8 if paired else 1, 128], {}
    for queries in (64, 128):
        yield code_tiles, ["*i8", *[ints] * 3, *[i] * 5, queries, True], {}
    yield hopper_slash.slash_columns, [*[ints] * 5, i, 64, 1024], {"num_warps": 8}
    yield hopper_slash.slash_bitmaps, [*[ints] * 4, i, i, i, 64, 64], {"num_warps": 2}
    yield hopper_slash.slash_fill, [*[ints] * 10, *[i] * 8, 64, 64], {"num_warps": 1}
    for kind, width in (("*fp16", 64), ("*bf16", 128)):
        yield gather_columns, [*[kind] * 4, ints, *[i] * 12, 32, width, True], {}
    for listed, group in ((False, 1), (False, 4), (True, 1)):
        scales = ["*fp32"] * 4
        yield transpose_v.transpose_v, [*[ints] * 4, *scales, ints, *[i] * 18, listed, group, 32, 128, True], {}
    for in_work in (False, True):
        yield fill_dense.dense_fill, [*[ints] * 3, "*i8", *[ints] * 5, i, i, in_work, 64, 1024], {}
    for kind, form, strides in (("*u8", 0, (i, 1)), (ints, 1, (i, 1)), ("*u8", 0, (1, i)), (ints, 2, (1, i))):
        yield fill_dense.dense_classes, [kind, "*i8", i, i, *strides, *[i] * 5, form, 64, 128], {}
        yield fill_dense.dense_bitmaps, [kind, ints, ints, ints, i, i, *strides, i, i, i, form, 64, 64], {}


def layout_kernels() -> Iterator[tuple[Any, list[Any], dict[str, int]]]:
    """The same for kernels that build layouts: of programs, and of dense masks read in two ways."""
    from stof.layout.fill import mask_input as source
    from stof.layout.fill import slab_counts as survey
    from stof.layout.fill import slab_kernel as counting
    from stof.layout.fill import tile_bits as reading

    ints, i = "*i32", "i32"
    kinds = ((ints, source.PROGRAM), ("*u8", source.BYTES), (ints, source.QUADS))
    for read, kind in kinds:
        reader = source.Source(None, kind, Programs([], [], 0), (), 1, 1)
        rows = reader.rows_at_once(survey._ROWS, 256)
        yield counting.count_slabs, [read, ints, *[i] * 15, kind, 256, rows], {}
    yield reading.prepare, [ints, ints, *[i] * 5], {}
    yield from _fill_kernels(kinds)


def _fill_kernels(kinds: tuple[tuple[str, int], ...]) -> Iterator[tuple[Any, list[Any], dict[str, int]]]:
    """The same for kernels that fill tile lists and layouts."""
    from stof.kernels.hopper.backward_order import count_additions, order_tiles
    from stof.kernels.hopper.fill_work import write_work
    from stof.kernels.triton.fill_items import write_items
    from stof.layout.fill import count_kernels, layouts, tiles, write_kernels
    from stof.layout.fill import mask_input as source

    ints, i = "*i32", "i32"
    for read, kind in kinds:
        is_program = kind == source.PROGRAM
        reader = source.Source(None, kind, Programs([], [], 0), (), 1, 1)
        for block_m, block_n in ((128, 128), (64, 32), (192, 128)) if is_program else ((128, 128),):
            sizes = [kind, block_m, block_n, reader.rows_at_once(block_m, block_n)]
            counted = [kind, *([0] * 3 if is_program else sizes[1:]), tiles.COUNTED[is_program], False]
            yield count_kernels.count_tiles, [read, ints, ints, *[i] * 16, *counted], {}
            for width in (1, block_n) if kind != source.QUADS else ():
                constants = [*sizes, tiles.WRITTEN[is_program], width, False]
                yield write_kernels.write_tiles, [read, *[ints] * 7, *[i] * 15, *constants], {}
        counted, written = layouts._TOGETHER if is_program else layouts._READ, layouts._WRITTEN[is_program]
        for block_m, block_n in ((128, 128), (64, 256), (1, 128)) if is_program else ((128, 128),):
            sizes = [kind, block_m, block_n, reader.rows_at_once(block_m, block_n)]
            yield count_kernels.count_tiles, [read, ints, ints, *[i] * 16, *sizes, counted, True], {}
            yield write_kernels.write_tiles, [read, *[ints] * 7, *[i] * 15, *sizes, written, 1, True], {}
    yield count_kernels.find_unseen_keys, [ints, *[i] * 5], {"num_warps": tiles.SEARCHERS}
    yield write_items, [ints, ints, i, i], {}
    yield write_work, [*[ints] * 6, *[i] * 7], {}
    for queries in (64, 128):
        yield count_additions, [*[ints] * 4, *[i] * 6, queries], {}
        for by_code in (False, True):
            yield order_tiles, [*[ints] * 7, "*i8", ints, *[i] * 6, queries, by_code], {}


def device_source(kernel: Any, given: list[Any], arch: int) -> ASTSource:
    """A kernel with these types or constants of its parameters, pointers aligned."""
    signature, fixed, attributes = {}, {}, {}
    for place, (name, value) in enumerate(zip(kernel.arg_names, given, strict=True)):
        value = arch >= 90 if name == "USE_PDL" else value
        signature[name] = value if isinstance(value, str) else "constexpr"
        if not isinstance(value, str):
            fixed[place,] = value
        elif value.startswith("*"):
            attributes[place,] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, fixed, attributes)


def compiled_for_device(group: str, kernel: Any, given: list[Any], options: dict[str, int], arch: int) -> Compiled:
    """Compile one for one GPU."""
    made = assemble(device_source(kernel, given, arch), arch, options)
    name, taken = kernel.__name__, (made.registers, made.spilled, made.shared)
    return Compiled(group, name, arch, *taken, 0, False, 0, 1, 4, 0, made.kept, [], made.seconds)
