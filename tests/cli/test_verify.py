"""`stof verify`: right implementations pass, wrong and crashing ones are named with a way to repeat the call."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from stof.cli.main import app
from stof.cli.verify import _share_in_8_bits, available
from stof.errors import UnsupportedError
from stof.kernels.implementation import BoundCall
from stof.selection import IMPLEMENTATIONS
from stof.testing import make_inputs, oracle_attention, random_call
from stof.testing.random_calls import _draw_kernel

CPU = torch.device("cpu")
ON_CPU = ["row_block", "batched", "reference"]


def run(*options: str) -> Any:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["verify", "--device", "cpu", *options])


def break_batched(monkeypatch: pytest.MonkeyPatch, wrong: Any) -> None:
    """`wrong(out, lse)` gives the results instead."""
    right = IMPLEMENTATIONS["batched"]

    def bind(*given: Any) -> BoundCall:
        call = right.bind(*given)
        return lambda *tensors: wrong(*call(*tensors))

    monkeypatch.setitem(IMPLEMENTATIONS, "batched", replace(right, bind=bind))


def test_right_implementations_pass() -> None:
    done = run("--seconds", "1")
    assert done.exit_code == 0, done.output
    assert all(name in done.stdout for name in ON_CPU)
    assert "calls checked; stopped drawing after" in done.stderr


def test_each_implementation_is_checked_once_however_long_that_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first calls of a GPU kernel may be refused, and compile for longer than its share of the time."""
    right, refused = IMPLEMENTATIONS["batched"], []

    def bind(*given: Any) -> BoundCall:
        if len(refused) < 3:
            refused.append(given)
            raise UnsupportedError("not yet", {})
        return right.bind(*given)

    monkeypatch.setitem(IMPLEMENTATIONS, "batched", replace(right, bind=bind))
    done = run("--seconds", "0", "--only", "batched")
    assert done.exit_code == 0, done.output
    assert "1 calls checked" in done.stderr


def _nan(out: torch.Tensor, lse: torch.Tensor) -> Any:
    return out.fill_(torch.nan), lse


def _off_a_little(out: torch.Tensor, lse: torch.Tensor) -> Any:
    return out * 1.1, lse


def _wrong_lse(out: torch.Tensor, lse: torch.Tensor) -> Any:
    return out, lse + 1.0


@pytest.mark.parametrize("wrong", [_nan, _off_a_little, _wrong_lse])
def test_a_wrong_implementation_is_named(monkeypatch: pytest.MonkeyPatch, wrong: Any) -> None:
    break_batched(monkeypatch, wrong)
    done = run("--case", "3")
    assert done.exit_code == 1, done.output
    told = done.stderr.replace("\n", " ")
    assert "batched, case" in told
    assert "row_block, case" not in told
    again = told.split("again: stof verify ")[1].split()[:8]
    assert again[4:6] == ["--only", "batched"]
    repeated = CliRunner().invoke(app, ["verify", *again])
    assert repeated.exit_code == 1
    assert f"case {again[7]} of seed 0" in repeated.stderr.replace("\n", " ")


def test_a_crash_is_wrong_and_a_refusal_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(out: torch.Tensor, lse: torch.Tensor) -> Any:
        raise ZeroDivisionError("in a kernel")

    break_batched(monkeypatch, crash)
    done = run("--seconds", "0", "--only", "batched")
    assert done.exit_code == 1
    assert "ZeroDivisionError: in a kernel" in done.stderr

    refusals = []

    def refuse(out: torch.Tensor, lse: torch.Tensor) -> Any:
        refusals.append(out.shape)
        if len(refusals) % 3 == 1:  # an answered call is made twice
            raise UnsupportedError("not today", {})
        return out, lse

    monkeypatch.undo()
    break_batched(monkeypatch, refuse)
    done = run("--seconds", "1", "--only", "batched")
    assert done.exit_code == 0, done.output
    assert "UnsupportedError" in done.stdout


def test_nothing_checked_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(out: torch.Tensor, lse: torch.Tensor) -> Any:
        raise UnsupportedError("never", {})

    break_batched(monkeypatch, refuse)
    done = run("--seconds", "0", "--only", "batched")
    assert done.exit_code == 1
    assert "nothing was checked" in done.stderr


def test_other_implementations_are_refused() -> None:
    done = run("--only", "hopper")
    assert done.exit_code == 2
    assert "row_block, batched, reference" in done.stderr.replace("\n", " ")
    assert [one.name for one in available(CPU)] == ON_CPU


def test_calls_are_the_same_for_the_same_numbers() -> None:
    kinds = set()
    for number in range(40):
        one, same = (random_call(IMPLEMENTATIONS["row_block"], CPU, 3, number) for _ in range(2))
        assert all(
            torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(one.inputs.qkv, same.inputs.qkv, strict=True)
        )
        assert torch.equal(one.keep, same.keep)
        assert one.config == same.config
        kinds.add((one.inputs.q.dtype, one.poisoned, one.config is None, "bias" in one.options))
        if one.poisoned:
            q, k, v = one.inputs.qkv
            seen = one.keep.expand(q.shape[0], q.shape[1], -1, -1).any(2).unflatten(1, (k.shape[1], -1)).any(2)
            assert torch.equal(k.isnan().all(3), ~seen)
            assert torch.equal(v.isnan().any(3), ~seen)
    assert len(kinds) > 8


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_calls_are_ones_that_the_implementation_takes(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    implementation = IMPLEMENTATIONS[name]
    device = torch.device(*implementation.capabilities.devices[:1] or ("cpu",))
    draw = random.Random(0)
    taken = [_draw_kernel(draw, device, implementation) for _ in range(500)]
    assert any(not implementation.capabilities.refusals(kernel) for kernel in taken)
    assert name in [one.name for one in available(device)]


def test_the_check_of_8_bits() -> None:
    q, k, v = make_inputs().qkv
    keep = torch.ones(64, 64, dtype=torch.bool).tril()
    keep[3] = False
    out, lse = oracle_attention(q, k, v, keep)
    assert _share_in_8_bits(out, lse, [q, k, v], {"keep": keep}) == 0
    for wrong, wrong_lse in ((out + torch.nan, lse), (out + 1, lse), (out, lse + 1), (out, lse.nan_to_num())):
        with pytest.raises(AssertionError):
            _share_in_8_bits(wrong, wrong_lse, [q, k, v], {"keep": keep})
