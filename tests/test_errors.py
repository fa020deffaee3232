"""Every bad input has its own error class, and a message that says what was given and what is accepted."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import stof
from stof import errors, masks
from stof.errors import (
    ArgumentError,
    DeviceError,
    DtypeError,
    HeadCountError,
    LayoutError,
    MaskError,
    MaskFunctionError,
    PlanFileError,
    PlanMismatchError,
    ShapeError,
    StofError,
    UnknownMaskError,
    UnsupportedError,
)
from stof.selection import IMPLEMENTATIONS, CallSpec, candidates, choose

Q, K, V = (torch.zeros(2, 4, 8, 16) for _ in range(3))
KG, VG = K[:, :2], V[:, :2]
META = Q.to("meta")
USED_PLAN = stof.plan(masks.causal(), 8)
stof.attention(Q, K, V, USED_PLAN)


def attend(q: Any = Q, k: Any = K, v: Any = V, mask: Any = None, **options: Any) -> Any:
    return stof.attention(q, k, v, mask, **options)


def nested(layout: torch.layout) -> Any:
    rows = [torch.zeros(n, 4, 16) for n in (3, 8)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "prototype"
        return torch.nested.nested_tensor(rows, layout=layout).transpose(1, 2)


def raising(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    raise RuntimeError("boom")


CASES: dict[str, tuple[Callable[[], Any], type[StofError], str]] = {
    # tensors
    "q is no tensor": (lambda: attend(q=[1]), DtypeError, "q is a torch.Tensor, got list"),
    "v is no tensor": (lambda: attend(v=None), DtypeError, "v is a torch.Tensor, got NoneType"),
    "3-D q": (lambda: attend(q=Q[0]), ShapeError, r"q is \[batch, heads, length, head_dim\].*got \[4, 8, 16\]"),
    "0-D k": (lambda: attend(k=torch.tensor(1.0)), ShapeError, r"k is .*got \[\]"),
    "no head_dim": (lambda: attend(q=Q[..., :0], k=K[..., :0]), ShapeError, r"head_dim above 0, got \[2, 4, 8, 0\]"),
    "no value head_dim": (lambda: attend(v=V[..., :0]), ShapeError, r"v is .* head_dim above 0, got \[2, 4, 8, 0\]"),
    "no sequence": (lambda: attend(q=Q[:0]), ShapeError, r"q and k share batch and head_dim, got q \[0, 4, 8, 16\]"),
    "no key heads": (lambda: attend(k=K[:, :0], v=V[:, :0]), HeadCountError, "got 4 and 0"),
    "no keys, but values": (lambda: attend(k=K[:, :, :0]), ShapeError, r"\[2, 4, 0\] and \[2, 4, 8\]"),
    "sparse q": (lambda: attend(q=Q.to_sparse()), DtypeError, "q is a strided tensor, got layout torch.sparse_coo"),
    "MKL-DNN k": (lambda: attend(k=K.to_mkldnn()), DtypeError, "k is a strided tensor, got layout torch._mkldnn"),
    "sparse bias": (lambda: attend(bias=torch.ones(8, 8).to_sparse()), DtypeError, "bias is a strided tensor"),
    "sparse bias, plan": (
        lambda: attend(mask=USED_PLAN, bias=torch.ones(8, 8).to_sparse()),
        DtypeError,
        "bias is a strided tensor",
    ),
    "sparse sinks": (lambda: attend(sinks=torch.ones(4).to_sparse()), DtypeError, "sinks is a strided tensor"),
    "nested q": (lambda: attend(q=nested(torch.strided)), ShapeError, "got a nested tensor; pad it and give"),
    "jagged k": (lambda: attend(k=nested(torch.jagged)), ShapeError, "k is one tensor .* got a nested tensor"),
    "nested q, plan": (
        lambda: attend(q=nested(torch.strided), mask=USED_PLAN),
        ShapeError,
        "got a nested tensor; pad it and give",
    ),
    "integer q": (lambda: attend(q=Q.long()), DtypeError, "float64 or float8_e4m3fn, got torch.int64"),
    "complex k": (lambda: attend(k=K.cfloat()), DtypeError, "got torch.complex64"),
    "float8 v": (lambda: attend(v=V.to(torch.float8_e4m3fn)), DtypeError, "share one dtype, got .*float8_e4m3fn"),
    "dtype mix": (lambda: attend(k=K.half()), DtypeError, r"share one dtype, got torch.float32, torch.float16.*\.to\("),
    "device mix": (lambda: attend(q=META), DeviceError, "share one device, got meta, cpu, cpu"),
    "device mix, v": (lambda: attend(v=V.to("meta")), DeviceError, "share one device, got cpu, cpu, meta"),
    "k and v lengths": (lambda: attend(v=V[:, :, :4]), ShapeError, r"k and v share .*\[2, 4, 8\] and \[2, 4, 4\]"),
    "k and v heads": (lambda: attend(v=VG), ShapeError, "k and v share batch, heads and length"),
    "batch": (lambda: attend(q=Q[:1]), ShapeError, r"q and k share batch and head_dim, got q \[1, 4, 8, 16\]"),
    "head_dim": (lambda: attend(q=Q[..., :8]), ShapeError, "q and k share batch and head_dim"),
    "head counts": (lambda: attend(q=Q[:, :3], k=KG, v=VG), HeadCountError, "multiple of .* got 3 and 2"),
    "more key heads": (lambda: attend(q=Q[:, :2]), HeadCountError, "got 2 and 4"),
    # scalars
    "NaN scale": (lambda: attend(scale=math.nan), ArgumentError, "scale is a finite float or None.*got nan"),
    "infinite scale": (lambda: attend(scale=math.inf), ArgumentError, "got inf"),
    "infinite scale of numpy": (lambda: attend(scale=numpy.float32("inf")), ArgumentError, "finite float.*got .*inf"),
    "NaN softcap of numpy": (lambda: attend(softcap=numpy.float32("nan")), ArgumentError, "finite float.*got .*nan"),
    "huge scale": (lambda: attend(scale=10**400), ArgumentError, "scale is a finite float"),
    "scale of text": (lambda: attend(scale="1"), ArgumentError, "got '1'"),
    "tensor scale": (lambda: attend(scale=torch.tensor(1.0)), ArgumentError, "got tensor"),
    "complex scale": (lambda: attend(scale=1j), ArgumentError, "got 1j"),
    "zero softcap": (lambda: attend(softcap=0.0), ArgumentError, "softcap is a finite float above 0 or None, got 0.0"),
    "negative softcap": (lambda: attend(softcap=-1.0), ArgumentError, "got -1.0"),
    "NaN softcap": (lambda: attend(softcap=math.nan), ArgumentError, "got nan"),
    "infinite softcap": (lambda: attend(softcap=math.inf), ArgumentError, "got inf"),
    "softcap of text": (lambda: attend(softcap="x"), ArgumentError, "got 'x'"),
    # bias and sinks
    "bias shape": (lambda: attend(bias=torch.zeros(8, 7)), ShapeError, r"= \[2, 4, 8, 8\], got \[8, 7\]"),
    "bias rank": (lambda: attend(bias=torch.zeros(1, 2, 4, 8, 8)), ShapeError, "bias broadcasts to"),
    "empty bias": (lambda: attend(bias=torch.zeros(0, 8)), ShapeError, r"got \[0, 8\]"),
    "bias of keys that are not": (
        lambda: attend(k=K[:, :, :0], v=V[:, :, :0], bias=torch.zeros(8, 8)),
        ShapeError,
        r"= \[2, 4, 8, 0\], got \[8, 8\]",
    ),
    "bool bias": (lambda: attend(bias=torch.ones(8, 8).bool()), DtypeError, "a boolean mask is the mask argument"),
    "integer bias": (lambda: attend(bias=torch.ones(8, 8).int()), DtypeError, "got torch.int32"),
    "bias of text": (lambda: attend(bias="alibi"), DtypeError, "bias is a torch.Tensor or None, got str"),
    "bias device": (lambda: attend(bias=torch.zeros(8, 8, device="meta")), DeviceError, "bias is on meta"),
    "sinks shape": (lambda: attend(sinks=torch.zeros(2)), ShapeError, r"per query head \[4\], got \[2\]"),
    "sinks rank": (lambda: attend(sinks=torch.zeros(4, 1)), ShapeError, r"got \[4, 1\]"),
    "integer sinks": (lambda: attend(sinks=torch.zeros(4).long()), DtypeError, "got torch.int64"),
    "sinks of a list": (lambda: attend(sinks=[0.0] * 4), DtypeError, "got list"),
    "sinks device": (lambda: attend(sinks=torch.zeros(4, device="meta")), DeviceError, "sinks is on meta"),
    # masks
    "dense mask shape": (
        lambda: attend(mask=torch.ones(8, 9, dtype=torch.bool)),
        ShapeError,
        r"dense mask is \[8, 9\], the call has q_len 8 and kv_len 8",
    ),
    "empty dense mask": (lambda: attend(mask=torch.ones(0, 8).bool()), ShapeError, r"dense mask is \[0, 8\]"),
    "dense mask of no sequence": (
        lambda: attend(mask=torch.ones(0, 1, 8, 8).bool()),
        ShapeError,
        "of 0, the inputs have 2",
    ),
    "mask of an empty call": (
        lambda: attend(q=Q[:, :, :0], mask=torch.ones(8, 8).bool()),
        ShapeError,
        "q_len 0 and kv_len 8",
    ),
    "padding of an empty call": (
        lambda: attend(q=Q[:0], k=K[:0], v=V[:0], mask=masks.padding([1, 2])),
        ShapeError,
        "of 2, the inputs have 0",
    ),
    "plan of an empty call": (
        lambda: attend(q=Q[:, :, :0], mask=USED_PLAN),
        PlanMismatchError,
        "for q_len 8 and kv_len 8, the inputs have 0 and 8",
    ),
    "integer mask of an empty call": (lambda: attend(q=Q[:, :, :0], mask=torch.ones(0, 8)), DtypeError, "`bias=`"),
    "dense mask batch": (lambda: attend(mask=torch.ones(3, 1, 8, 8).bool()), ShapeError, "of 3, the inputs have 2"),
    "dense mask heads": (lambda: attend(mask=torch.ones(3, 8, 8).bool()), ShapeError, "heads of 3, the inputs have 4"),
    "additive mask": (lambda: attend(mask=torch.zeros(8, 8)), DtypeError, "additive float mask .* goes into `bias="),
    "integer mask": (lambda: attend(mask=torch.zeros(8, 8).long()), DtypeError, "becomes boolean with `mask.bool"),
    "meta mask": (lambda: attend(mask=torch.ones(8, 8, device="meta").bool()), DeviceError, "holds values"),
    "sparse mask": (
        lambda: attend(mask=torch.ones(8, 8).bool().to_sparse()),
        MaskError,
        "strided tensor, got a torch.sparse_coo",
    ),
    "mask of a number": (lambda: attend(mask=4), MaskError, "a mask is a stof mask, .* got int"),
    "mask function raises": (lambda: attend(mask=raising), MaskFunctionError, "raising raised RuntimeError: boom"),
    "mask function of floats": (
        lambda: attend(mask=lambda b, h, i, j: (i - j).float()),
        MaskFunctionError,
        "returned a torch.float32 tensor; return a torch.bool",
    ),
    "unknown name": (lambda: attend(mask="casual"), UnknownMaskError, "unknown mask 'casual'; did you mean 'causal'"),
    "padding too long": (lambda: attend(mask=masks.padding([9, 1])), ShapeError, "up to 9 do not fit kv_len 8"),
    "padding batch": (lambda: attend(mask=masks.padding([1, 2, 3])), ShapeError, "batch size of 3, the inputs have 2"),
    "documents length": (lambda: attend(mask=masks.documents([0] * 9)), ShapeError, "cover 9 tokens"),
    "per head": (
        lambda: attend(mask=masks.per_head([masks.causal()] * 3)),
        ShapeError,
        "heads of 3, the inputs have 4",
    ),
    "negative window": (lambda: masks.sliding_window(-1), MaskError, "left is between 0 and .* got -1"),
    # plans
    "plan of other lengths": (
        lambda: attend(mask=stof.plan(masks.causal(), 9, 8)),
        PlanMismatchError,
        "for q_len 9 and kv_len 8, the inputs have 8 and 8; make one with stof.plan",
    ),
    "plan of other batch": (
        lambda: attend(mask=stof.plan(masks.padding([1, 2, 3]), 8, batch=3)),
        PlanMismatchError,
        "depends on the batch entry, and the plan was made for batch=3; the inputs have 2",
    ),
    "plan of other heads": (
        lambda: attend(mask=stof.plan(masks.per_head([masks.causal(), masks.full()]), 8, heads=2)),
        PlanMismatchError,
        "depends on the head, and the plan was made for heads=2; the inputs have 4",
    ),
    "plan on another device": (
        lambda: stof.plan(masks.causal(), 8).check_call(META, META),
        DeviceError,
        "inputs are meta tensors, which hold no values; give inputs on cpu, or the mask itself",
    ),
    "plan without data": (lambda: stof.plan(masks.causal(), 8, device="meta"), DeviceError, "'meta' holds none"),
    "plan moved to no data": (lambda: stof.plan(masks.causal(), 8).to("meta"), DeviceError, "'meta' holds none"),
    "plan without length": (lambda: stof.plan(masks.causal(), 0), ShapeError, "q_len is between 1 and .* got 0"),
    "plan of negative length": (lambda: stof.plan(masks.causal(), 4, -4), ShapeError, "kv_len is between 1.* got -4"),
    "plan of half a length": (lambda: stof.plan(masks.causal(), 4.5), ShapeError, "q_len is an int, got float 4.5"),
    "plan of no sequence": (
        lambda: stof.plan(masks.causal(), 4, batch=0),
        ShapeError,
        "batch is an int .* got 0",
    ),
    "plan of no head": (
        lambda: stof.plan(masks.causal(), 4, heads=-2),
        ShapeError,
        "heads is an int .* got -2",
    ),
    "config of another type": (
        lambda: stof.plan(masks.causal(), 4, config="x"),  # type: ignore[arg-type]
        ArgumentError,
        "config is a stof.LayoutConfig or None, got 'x'",
    ),
    "plan on no device": (lambda: stof.plan(masks.causal(), 4, device="foo"), DeviceError, "'foo' is no device"),
    "plan on a device that is not there": (
        lambda: stof.plan(masks.causal(), 4).to("cuda:99"),
        DeviceError,
        "'cuda:99' is none of them",
    ),
    "plan of a batch-bound mask": (
        lambda: stof.plan(masks.padding([1, 2]), 8, batch=3),
        ShapeError,
        "of 2, the inputs have 3",
    ),
    "row order": (lambda: stof.plan(masks.causal(), 4, row_order=torch.zeros(4).long()), ArgumentError, "permutation"),
    "block size": (lambda: stof.LayoutConfig(block_m=65), ArgumentError, r"block_m is one of .*, got 65"),
    # implementations
    "unknown implementation": (
        lambda: attend(implementation="fast"),
        ArgumentError,
        "unknown implementation 'fast'; there are row_block",
    ),
    "unknown implementation of an empty call": (
        lambda: attend(q=Q[:, :, :0], implementation="fast"),
        ArgumentError,
        "unknown implementation 'fast'",
    ),
    "no implementation": (
        lambda: choose(CallSpec("cpu", torch.int8, 1, 1, 1, 1)),
        UnsupportedError,
        "(?s)no implementation.*row_block: takes float16.*not torch.int8.*reference: takes",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_error(name: str) -> None:
    call, kind, message = CASES[name]
    with pytest.raises(kind, match=message) as caught:
        call()
    assert type(caught.value) is kind


def test_corrupt_plan_file(tmp_path: Path) -> None:
    path = tmp_path / "plan"
    stof.plan(masks.causal(), 8).save(path)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(PlanFileError, match=f"{path} is not a plan file.*make it again with plan.save"):
        stof.Plan.load(path)


def test_layout_errors_list_all_problems() -> None:
    error = LayoutError(["first", "second"])
    assert error.problems == ("first", "second")
    assert "2 problem(s)" in str(error)


@pytest.mark.parametrize("name", [n for n, kind in vars(errors).items() if inspect.isclass(kind) and n != "Any"])
def test_the_catalogue(name: str) -> None:
    kind = getattr(errors, name)
    if kind.__module__ != errors.__name__:
        return
    assert issubclass(kind, StofError)
    assert kind.__doc__
    # `except ValueError` and the like in callers' code keep working
    builtin = (ValueError, TypeError, NotImplementedError, ImportError, RuntimeError)
    assert kind is StofError or issubclass(kind, builtin)


@pytest.mark.parametrize(
    ("kind", "base"),
    [
        (HeadCountError, ShapeError),
        (PlanMismatchError, ShapeError),
        (MaskFunctionError, MaskError),
        (errors.MaskSyntaxError, MaskError),
        (UnknownMaskError, errors.MaskSyntaxError),
        (errors.UnfitLayoutError, errors.KernelError),
    ],
)
def test_errors_of_a_kind(kind: type[StofError], base: type[StofError]) -> None:
    """Who catches the general one catches the special one."""
    assert issubclass(kind, base)


def test_nothing_runs_before_the_checks() -> None:
    """A wrong argument is found before a mask is planned."""
    stof.plan_cache.clear()
    for options in ({"scale": math.nan}, {"bias": torch.zeros(3, 3)}, {"sinks": torch.zeros(3)}):
        with pytest.raises(StofError):
            attend(mask=masks.causal(), **options)
    assert stof.plan_cache.info().misses == 0


def test_kept_calls_do_not_hide_the_checks() -> None:
    """A plan that has served a call finds the next one by likeness; what is wrong with that one is still said."""
    ready = stof.plan(masks.causal(), Q.shape[2], K.shape[2])
    stof.attention(Q, K, V, ready)
    with pytest.raises(DtypeError, match="k is a "):
        stof.attention(Q, None, V, ready)
    with pytest.raises(ArgumentError, match="scale"):
        stof.attention(Q, K, V, ready, scale=[1.0])


def test_a_plan_on_another_device_says_how_to_move_it() -> None:
    plan = stof.plan(masks.causal(), 8)
    plan.device = torch.device("cuda", 0)  # there may be none here
    with pytest.raises(DeviceError, match=r"plan is on cuda:0, the inputs on cpu; move it once with plan.to\('cpu'\)"):
        plan.check_call(Q, K)
    stof.plan_cache.clear()


def test_explain() -> None:
    weighed = stof.explain(Q, KG, VG, masks.causal(), softcap=3.0)
    assert {candidate.name for candidate in weighed} == set(IMPLEMENTATIONS)
    assert [candidate.name for candidate in weighed if not candidate.refusals] == ["row_block", "batched", "reference"]
    assert all(any("cuda" in reason for reason in candidate.refusals) for candidate in weighed[3:])
    assert [str(candidate) for candidate in weighed][:1] == ["row_block: no estimate"]
    title, first, *_ = str(weighed).splitlines()
    assert title.split() == ["implementation", "estimate", "refuses"]
    assert first.split() == ["row_block", "-"]
    assert len(str(weighed).splitlines()) == 1 + len(weighed)
    refused = candidates(CallSpec("cpu", torch.int8, 2**20, 1, 1, 1))
    assert all(len(candidate.refusals) >= 2 for candidate in refused), "all reasons, not the first"
    with pytest.raises(ShapeError):
        stof.explain(Q[0], K, V)


def test_backward() -> None:
    q = Q.clone().requires_grad_()
    out = stof.attention(q, K, V)
    (gradient,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(UnsupportedError, match=r"first order.*torch.inference_mode\(\)"):
        gradient.sum().backward()


@pytest.mark.parametrize("device", ["meta", "nonsense", "cuda:77"])
def test_plans_are_loaded_on_a_device_of_this_machine(tmp_path: Path, device: str) -> None:
    stof.plan(masks.causal(), 8).save(tmp_path / "plan")
    with pytest.raises(DeviceError, match=r"device"):
        stof.Plan.load(tmp_path / "plan", device)
