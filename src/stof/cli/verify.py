"""`stof verify`: every implementation of attention that runs here against float64, on random calls."""

from __future__ import annotations

import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stof.cli.common import device_of, table_console

if TYPE_CHECKING:
    import torch
    from rich.table import Table

    from stof.selection import Implementation
    from stof.testing import RandomCall

# Stop after so many wrong calls of an implementation.
_ENOUGH = 3
# Calls drawn when the time is up and all were refused.
_MOST_REFUSED = 20
# Times the error of plain PyTorch in the same dtype, which is exact by luck at times: by float32 and float64, or not.
_FACTORS = (8.0, 4.0)


@dataclass
class Verified:
    """What an implementation was found to do.

    Attributes:
        name: of the implementation.
        checked: calls it answered.
        refused: calls it refused, by the class of the error.
        largest: largest error as a share of what is allowed, of the answers that are right.
        wrong: numbers of the calls whose answers are wrong or which crashed, and why.
        lost: the device answers no more.
    """

    name: str
    checked: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    largest: float = 0.0
    wrong: dict[int, str] = field(default_factory=dict)
    lost: bool = False


def verify(
    device: Annotated[str, typer.Option(help="cpu or cuda; default the GPU if there is one.")] = "",
    seconds: Annotated[float, typer.Option(min=0, max=86_400, help="Time for drawing calls.")] = 60,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Other calls.")] = 0,
    only: Annotated[str | None, typer.Option(help="Only this implementation.")] = None,
    case: Annotated[int | None, typer.Option(min=0, max=2**31 - 1, help="Only the call of this number.")] = None,
) -> None:
    """Check every implementation of attention on this device against float64, on random masks, shapes and options.

    Exits with 1 where a result is wrong, or a call fails with an error that is none of STOF's own.
    """
    from rich.console import Console

    from stof.tuning.machine import device_name

    where = device_of(device)
    console = Console(stderr=True)
    implementations = available(where, only)
    console.print(
        f"seed {seed} on {device_name(where)}: {', '.join(one.name for one in implementations)}", markup=False
    )
    start, verified = time.monotonic(), []
    for place, implementation in enumerate(implementations):
        now = time.monotonic()
        end = now + (start + seconds - now) / (len(implementations) - place)
        verified.append(verify_one(implementation, where, seed, end, case))
        if verified[-1].lost:
            break
    table_console().print(_table(verified))
    for one in verified:
        for number, why in one.wrong.items():
            again = f"stof verify --device {where} --seed {seed} --only {one.name} --case {number}"
            console.print(f"{one.name}, case {number} of seed {seed}: {why}\nagain: {again}", markup=False, style="red")
    spent = time.monotonic() - start
    checked = sum(one.checked for one in verified)
    if case is None:
        console.print(f"{checked} calls checked; stopped drawing after {spent:.0f} s (--seconds {seconds:g})")
    for one in verified:
        if not one.checked and not one.wrong:
            console.print(f"{one.name}: nothing was checked, every call was refused", style="yellow")
    if verified[-1].lost:
        console.print("the device failed; what came after was left out", style="red")
    if any(one.wrong for one in verified) or not checked:
        raise typer.Exit(1)


def available(device: torch.device, only: str | None = None) -> list[Implementation]:
    """Implementations that run calls of some dtype on a device, or the one of this name.

    Raises:
        ArgumentError: there is none of this name here.
    """
    import torch

    from stof.errors import ArgumentError
    from stof.selection import IMPLEMENTATIONS, CallSpec

    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    sizes: dict[str, Any] = {"head_dim": 128, "value_dim": 128, "heads": 8, "kv_heads": 8}
    runnable = [
        one
        for one in IMPLEMENTATIONS.values()
        if any(
            not one.capabilities.refusals(CallSpec(device.type, dtype, **sizes, compute_capability=capability))
            for dtype in one.capabilities.dtypes
        )
    ]
    if only is None:
        return runnable
    if only not in [one.name for one in runnable]:
        raise ArgumentError(
            f"no implementation {only!r} runs on {device}; --only is one of {', '.join(one.name for one in runnable)}"
        )
    return [IMPLEMENTATIONS[only]]


def verify_one(
    implementation: Implementation, device: torch.device, seed: int, end: float, case: int | None = None
) -> Verified:
    """Draw calls until the time `end` and until one was checked or many were refused; or the call of this number."""
    from stof.errors import StofError
    from stof.kernels.quantization import FP8
    from stof.testing import random_call

    verified = Verified(implementation.name)
    number = 0 if case is None else case
    # Scales of 8 bits come from all values.
    poison = implementation.ignores_unseen and FP8 not in implementation.capabilities.dtypes
    while True:
        call = random_call(implementation, device, seed, number, poison=poison)
        try:
            verified.largest = max(verified.largest, _check(implementation, call, device))
            verified.checked += 1
        except StofError as error:
            verified.refused[type(error).__name__] += 1
        except AssertionError as error:
            verified.checked += 1
            verified.wrong[number] = f"{error}\n{call.text}"
        except Exception as error:  # whatever it is, it is none of the errors that STOF raises on purpose
            at = traceback.extract_tb(error.__traceback__)[-1]
            verified.wrong[number] = f"{type(error).__name__}: {error} ({at.filename}:{at.lineno})\n{call.text}"
            verified.lost = any(text in str(error) for text in ("CUDA error", "cudaError", "device-side assert"))
        number += 1
        late = time.monotonic() >= end and (verified.checked > 0 or number >= _MOST_REFUSED)
        if case is not None or verified.lost or len(verified.wrong) >= _ENOUGH or late:
            return verified


def _check(implementation: Implementation, call: RandomCall, device: torch.device) -> float:
    """The largest error of a call's result as a share of what is allowed.

    Raises:
        AssertionError: the result is wrong.
        StofError: the call is refused.
    """
    import torch

    import stof
    from stof.kernels.quantization import FP8
    from stof.testing import assert_attention

    (q, k, v), mask, options = call.inputs.qkv, call.mask, dict(call.options)
    narrow = FP8 in implementation.capabilities.dtypes
    if narrow:
        (q, q_scale), (k, k_scale), (v, v_scale) = map(stof.quantise_heads, (q, k, v))
        options["scales"] = (q_scale, k_scale, v_scale)
    given: Any = mask
    if call.config is not None:
        sizes: dict[str, Any] = {"batch": q.shape[0], "heads": q.shape[1]}
        given = stof.plan(mask, q.shape[2], k.shape[2], **sizes, device=device, config=call.config)
    plain: dict[str, Any] = {"keep": call.keep}
    plain |= {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in call.options.items()}
    share = 0.0
    for _ in range(2):  # the second call of a plan takes another way
        out, lse = stof.attention(q, k, v, given, **options, return_lse=True, implementation=implementation.name)
        if narrow:
            pairs = zip((q, k, v), options["scales"], strict=True)
            wide = [(x.double() * scale.double()[:, :, None, None]).cpu() for x, scale in pairs]
            error = _share_in_8_bits(out.cpu(), lse.cpu(), wide, plain)
        else:
            host: dict[str, Any] = {
                name: torch.where(x.isnan(), 0.0, x).cpu() for name, x in zip("qkv", (q, k, v), strict=True)
            }
            error = assert_attention(out.cpu(), lse.cpu(), **host, **plain, factor=_FACTORS[q.dtype.itemsize < 4])
        share = max(share, error)
    return share


def _share_in_8_bits(out: torch.Tensor, lse: torch.Tensor, qkv: list[torch.Tensor], options: dict[str, Any]) -> float:
    """`assert_attention` for 8 bits: probabilities are rounded to 1/16 of themselves."""
    import torch

    from stof.testing import oracle_attention

    expected, expected_lse = oracle_attention(qkv[0], qkv[1], qkv[2], **options)
    empty = expected_lse == -torch.inf
    if not torch.equal(lse == -torch.inf, empty) or bool(out[empty].any()):
        raise AssertionError("rows that keep nothing are not exactly 0 and -inf, or others are")
    error = float((out.double() - expected).abs().max()) / max(float(qkv[2].abs().max()) / 16, 1e-6)
    of_lse = (lse.double() - expected_lse).abs() / (2e-3 + 1e-3 * expected_lse.abs())
    share = max(error, float(torch.where(empty, 0.0, of_lse).max()))
    if not share <= 1:  # a NaN must fail
        raise AssertionError(f"the error is {share:.3g} times what 8 bits are allowed")
    return share


def _table(verified: list[Verified]) -> Table:
    from rich.table import Table

    table = Table()
    table.add_column("implementation")
    for heading in ("checked", "refused", "wrong", "largest error / allowed"):
        table.add_column(heading, justify="right")
    for one in verified:
        refused = ", ".join(f"{count} {name}" for name, count in one.refused.most_common())
        worst = "-" if not one.checked else "over 1" if one.wrong else f"{one.largest:.2f}"
        table.add_row(one.name, str(one.checked), refused or "0", str(len(one.wrong)), worst)
    return table
