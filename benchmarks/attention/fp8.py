"""Attention of 8-bit tensors beside 16 bits: errors against float64, and times.

`python -m benchmarks.attention.fp8 [--lengths 8192 16384] [--json FILE]`, on a Hopper GPU. One sequence of 32 heads of
128, standard normal. Errors are root mean squares over root mean squares, of the first two heads: of each dtype's
inputs against float64 of the unrounded ones, and (`fp8 kernel`) of the 8-bit kernel against float64 of what its inputs
stand for. A result that is off by more than `WRONG` has no time. Times are of GPU work with a cold L2 cache; 8-bit
calls lay V across in theirs, and `quantise` is what rounding q, k and v beforehand takes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import stof
from benchmarks.results_io import provenance, write_json
from stof.masks import Mask
from stof.testing import oracle_attention
from stof.testing.mask_grid import grid_mask
from stof.tuning.timing import time_calls

HEADS, HEAD_DIM = 32, 128
LOOKED_AT = 2
MASKS = ("full", "causal", "window512", "longformer", "strided")
LENGTHS = (8192, 16384)
WRONG = 0.1
COLUMNS = (
    "length", "mask", "fp8 us", "fp16 us", "bf16 us", "speed-up over the faster", "fp8 TFLOP/s", "quantise us",
    "fp8 error", "bf16 error", "fp16 error", "fp8 kernel error",
)  # fmt: skip


def root_mean_square_error(out: Tensor, expected: Tensor) -> float:
    """Of the heads that are looked at, as a share."""
    got = out[:, :LOOKED_AT].double()
    return float((got - expected).norm() / expected.norm())


def expected_of(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """Float64 attention of the heads that are looked at."""
    return oracle_attention(q[:, :LOOKED_AT], k[:, :LOOKED_AT], v[:, :LOOKED_AT], keep)[0]


def row(name: str, length: int, device: torch.device) -> list[Any]:
    """One line of the table."""
    mask: Mask = grid_mask(name).mask(length)
    plan = stof.plan(mask, length, device=device)
    keep = mask.to_dense(length, device=device)
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, length, HEAD_DIM, generator=generator, device=device) for _ in range(3))
    expected = expected_of(q, k, v, keep)
    pairs = [stof.quantise_heads(x) for x in (q, k, v)]
    narrow, scales = [values for values, _ in pairs], (pairs[0][1], pairs[1][1], pairs[2][1])
    q8, k8, v8 = (values.double() * scale[:, :, None, None] for values, scale in pairs)
    calls: dict[str, Callable[[], Tensor]] = {
        "fp8": partial(stof.attention, *narrow, plan, scales=scales, implementation="hopper_fp8")
    }
    for short, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        calls[short] = partial(stof.attention, q.to(dtype), k.to(dtype), v.to(dtype), plan)
    errors = {short: root_mean_square_error(call(), expected) for short, call in calls.items()}
    of_kernel = root_mean_square_error(calls["fp8"](), expected_of(q8, k8, v8, keep))
    right = {short: call for short, call in calls.items() if errors[short] < WRONG}
    halves = [x.half() for x in (q, k, v)]
    timed = time_calls({**right, "quantise": lambda: [stof.quantise_heads(x) for x in halves]}, device)
    us = {short: timing.gpu_us for short, timing in timed.items()}
    fp8, fp16, bf16 = (us.get(short) for short in ("fp8", "fp16", "bf16"))
    flops = 4.0 * HEAD_DIM * HEADS * float(keep.sum())
    faster = min(x for x in (fp16, bf16) if x is not None)
    return [
        length, name, _rounded(fp8), _rounded(fp16), _rounded(bf16), fp8 and round(faster / fp8, 2),
        fp8 and round(flops / fp8 / 1e6), _rounded(us["quantise"]),
        *(float(f"{error:.3g}") for error in (errors["fp8"], errors["bf16"], errors["fp16"], of_kernel)),
    ]  # fmt: skip


def _rounded(us: float | None) -> float | None:
    return None if us is None else round(us, 1)


def _line(cells: Iterable[Any]) -> str:
    """Of a Markdown table."""
    return "| " + " | ".join("" if cell is None else str(cell) for cell in cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    torch.set_grad_enabled(False)
    rows: list[list[Any]] = []
    print(_line(COLUMNS), _line(["---"] * len(COLUMNS)), sep="\n")
    for length in given.lengths:
        for name in MASKS:
            rows.append(row(name, length, device))
            print(_line(rows[-1]), flush=True)
            if given.json is not None:
                write_json(given.json, {"meta": provenance(device), "columns": list(COLUMNS), "rows": rows})


if __name__ == "__main__":
    main()
