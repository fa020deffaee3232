"""Gradients of `stof.attention`: against the definition in float64, under each way to call it, and what is refused."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import stof
from stof import masks
from stof.errors import UnsupportedError
from stof.kernels.implementation import Gradients
from stof.kernels.torch.reference import reference_backward
from tests.examples import examples
from tests.kernels.gradients import assert_gradients, backward_calls
from tests.strategies import mask_trees

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
Q_LEN, KV_LEN, HEADS = 40, 56, 4
MASK = masks.sliding_window(5, 9) | masks.sink_tokens(2)


def inputs(dtype: torch.dtype = torch.float64, kv_heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    sizes = ((HEADS, Q_LEN), (kv_heads, KV_LEN), (kv_heads, KV_LEN))
    q, k, v = (torch.randn(2, *size, 16, dtype=dtype, generator=generator).requires_grad_() for size in sizes)
    return q, k, v


def expected(q: Tensor, k: Tensor, v: Tensor, mask: masks.Mask, d_out: Tensor, **options: Any) -> Gradients:
    keep = mask.to_dense(q.shape[2], k.shape[2], batch=q.shape[0], heads=q.shape[1])
    return reference_backward(
        q.detach(), k.detach(), v.detach(), d_out, keep, scale=q.shape[3] ** -0.5, **options
    )  # fmt: skip


def assert_equal(gradients: tuple[Tensor, ...], reference: Gradients) -> None:
    for actual, wanted in zip(gradients, reference, strict=False):
        torch.testing.assert_close(actual, wanted, atol=1e-12, rtol=1e-12)


@examples(60)
@given(data=st.data(), dtype=st.sampled_from(DTYPES))
def test_gradients_of_random_calls(data: st.DataObject, dtype: torch.dtype) -> None:
    """Masks, shapes, strides, options; what is not asked for has no gradient."""
    call = data.draw(backward_calls(dtype, [1, 17, 64, 70], [1, 33, 64, 130], [1, 8, 16, 40]))
    names = [name for name in ("q", "k", "v", "bias", "sinks") if name in call]
    wanted = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    tensors = {name: call[name].detach().requires_grad_(name in wanted) for name in names}
    options = {name: tensors[name] for name in ("bias", "sinks") if name in tensors}
    out, lse = stof.attention(
        tensors["q"], tensors["k"], tensors["v"], call["keep"], scale=call["scale"],
        softcap=call["softcap"] or None, return_lse=True, **options,
    )  # fmt: skip
    results, gradients = [out], [call["d_out"]]
    if "d_lse" in call:
        results.append(lse)
        gradients.append(call["d_lse"].to(lse.dtype).masked_fill(lse == -torch.inf, 0.0))
        call["d_lse"] = gradients[-1]
    found = dict(zip(wanted, torch.autograd.grad(results, [tensors[n] for n in wanted], gradients), strict=True))
    for name in names:
        assert tensors[name].grad is None
    full = reference_backward(**call)
    assert_gradients(Gradients(*[found.get(n, getattr(full, n)) for n in Gradients._fields]), call)


@examples(60)
@given(data=st.data(), mask=mask_trees(kv_len=37, batch=2), planned=st.booleans())
def test_gradients_under_named_masks(data: st.DataObject, mask: masks.Mask, planned: bool) -> None:
    heads = mask.heads if mask.heads > 1 else 2
    q, k, v = (torch.randn(2, heads, 37, 8, dtype=torch.float64).requires_grad_() for _ in range(3))
    out = stof.attention(q, k, v, stof.plan(mask, 37, batch=2, heads=heads) if planned else mask)
    d_out = torch.randn_like(out)
    assert_equal(torch.autograd.grad(out, (q, k, v), d_out), expected(q, k, v, mask, d_out))


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"bias": True}, {"sinks": True}], ids=str)
def test_gradcheck(options: dict[str, Any]) -> None:
    q, k, v = (x.detach()[:1, :, :9].requires_grad_() for x in inputs())
    more = {"bias": torch.randn(1, HEADS, 1, 9, dtype=torch.float64), "sinks": torch.randn(HEADS, dtype=torch.float64)}
    chosen = {name: more[name].requires_grad_() if value is True else value for name, value in options.items()}
    names = [name for name, value in options.items() if value is True]

    def call(q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
        return stof.attention(q, k, v, MASK, return_lse=True, **(chosen | dict(zip(names, others, strict=True))))

    torch.autograd.gradcheck(call, (q, k, v, *[chosen[name] for name in names]), fast_mode=True)


GIVEN: dict[str, Callable[[], Any]] = {
    "mask": lambda: MASK,
    "text": lambda: MASK.key,
    "tensor": lambda: MASK.to_dense(Q_LEN, KV_LEN)[0, 0],
    "from_dense": lambda: masks.from_dense(MASK.to_dense(Q_LEN, KV_LEN)),
    "function": lambda: lambda b, h, q, kv: ((q - kv <= 5) & (kv - q <= 9)) | (kv < 2),
    "plan": lambda: stof.plan(MASK, Q_LEN, KV_LEN),
    "plan with a layout": lambda: stof.plan(MASK, Q_LEN, KV_LEN, config=stof.LayoutConfig(16, 32, 8)),
    "plan with a row order": lambda: stof.plan(MASK, Q_LEN, KV_LEN, row_order=torch.randperm(Q_LEN)),
    "plan without sizes": lambda: stof.plan(
        masks.from_function(lambda b, h, q, kv: (((q - kv <= 5) & (kv - q <= 9)) | (kv < 2)) & (h >= 0)), Q_LEN, KV_LEN
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", GIVEN)
def test_masks_and_plans(how: str) -> None:
    q, k, v = inputs()
    out = stof.attention(q, k, v, GIVEN[how]())
    gc.collect()  # a mask that was made for the call lives until the backward pass
    stof.plan_cache.clear()
    out.sum().backward()
    assert q.grad is not None
    assert k.grad is not None
    assert v.grad is not None
    assert_equal((q.grad, k.grad, v.grad), expected(q, k, v, MASK, torch.ones_like(out)))


def test_plans_of_files(tmp_path: Path) -> None:
    stof.plan(MASK, Q_LEN, KV_LEN).save(tmp_path / "plan")
    q, k, v = inputs()
    out = stof.attention(q, k, v, stof.Plan.load(tmp_path / "plan"))
    gradients = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert_equal(gradients, expected(q, k, v, MASK, torch.ones_like(out)))


@pytest.mark.parametrize("how", ["function", "mask", "tensor"])
def test_the_backward_pass_is_under_the_mask_of_the_call(how: str) -> None:
    width = 4
    keep = masks.sliding_window(3, 0).to_dense(Q_LEN, KV_LEN)[0, 0]

    def fn(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) & (q - kv < width)

    before = {"function": fn, "mask": masks.from_function(fn), "tensor": keep}[how]
    q, k, v = inputs()
    out = stof.attention(q, k, v, before)
    width = 9
    keep.fill_(True)
    other = stof.attention(q, k, v, before)
    gradients = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert_equal(gradients, expected(q, k, v, masks.sliding_window(3, 0), torch.ones_like(out)))
    later = masks.full() if how == "tensor" else masks.sliding_window(8, 0)
    gradients = torch.autograd.grad(other, (q, k, v), torch.ones_like(out))
    assert_equal(gradients, expected(q, k, v, later, torch.ones_like(out)))


@pytest.mark.parametrize("flag", ["_is_compiling_flag", "_is_exporting_flag"])
@pytest.mark.parametrize("how", ["function", "mask", "tensor"])
def test_calls_while_another_thread_compiles_or_exports(how: str, flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's flags are those of the process; without gradients too."""
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    monkeypatch.setattr(torch.compiler, flag, True)
    test_the_backward_pass_is_under_the_mask_of_the_call(how)
    q, k, v = (x.detach() for x in inputs())
    mask = {"function": lambda b, h, q, kv: q >= kv, "mask": masks.causal(), "tensor": torch.ones(Q_LEN, KV_LEN).tril()}
    given = mask[how].bool() if how == "tensor" else mask[how]
    assert torch.equal(stof.attention(q, k, v, given), stof.attention(q, k, v, masks.causal()))


@pytest.mark.parametrize("how", ["mask", "from_dense", "plan", "tensor"])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled(how: str, backend: str) -> None:
    torch.compiler.reset()  # the limit of recompilations counts those of other cases
    mask = GIVEN[how]()
    compiled = torch.compile(lambda q, k, v, m: stof.attention(q, k, v, m) * 2, fullgraph=True, backend=backend)
    q, k, v = inputs()
    transposed = q.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    for x in (q, transposed):
        out = compiled(x, k, v, mask)
        gradients = torch.autograd.grad(out, (x, k, v), torch.ones_like(out))
        assert_equal(gradients, expected(q, k, v, MASK, torch.full_like(out, 2.0)))


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_bool_tensors_that_are_written_to_before_a_compiled_backward_pass(backend: str) -> None:
    torch.compiler.reset()
    compiled = torch.compile(lambda q, k, v, m: stof.attention(q, k, v, m), fullgraph=True, backend=backend)
    q, k, v = inputs()
    writes: list[Callable[[Tensor], object]] = [
        lambda keep: keep.fill_(True),
        lambda keep: keep.data.fill_(True),
        lambda keep: keep.numpy().fill(True),
        lambda keep: setattr(keep, "data", torch.ones_like(keep)),
    ]
    with torch._functorch.config.patch(enable_autograd_cache=False):  # its key does not cover STOF's code
        for write in writes:
            keep = MASK.to_dense(q.shape[2], k.shape[2])
            out = compiled(q, k, v, keep)
            write(keep)
            gradients = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
            assert_equal(gradients, expected(q, k, v, MASK, torch.ones_like(out)))


def test_compiled_code_and_functions_with_state() -> None:
    """It leaves differentiated calls to Python, which `fullgraph=True` refuses: backward passes read nothing again."""
    width = torch.tensor(3)
    mask = masks.from_function(lambda b, h, q, kv: (q - kv < width) & (q >= kv))
    q, k, v = inputs()
    compiled = torch.compile(lambda q, k, v: stof.attention(q, k, v, mask & masks.causal()), backend="aot_eager")
    for now in (3, 1, 4):
        width.fill_(now)
        out = compiled(q, k, v)
        width.fill_(9)
        gradients = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        assert_equal(gradients, expected(q, k, v, masks.sliding_window(now - 1, 0), torch.ones_like(out)))
    in_one_graph = torch.compile(lambda q, k, v: stof.attention(q, k, v, mask), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="what may change"):
        in_one_graph(q, k, v)


def test_gradients_that_the_dispatcher_sees() -> None:
    """Tensors that are only marked as negated, and modes around the backward pass alone, take the operator."""
    q, k, v = inputs()
    out = stof.attention(q, k, v, MASK)
    straight = torch.autograd.grad(out, (q, k, v), torch.ones_like(out), retain_graph=True)
    negated = torch.complex(torch.zeros_like(out), torch.ones_like(out)).conj().imag
    assert negated.is_neg()
    for got, wanted in zip(torch.autograd.grad(out, (q, k, v), negated, retain_graph=True), straight, strict=True):
        assert torch.equal(got, -wanted)
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert list(counter.get_flop_counts()["Global"]) == [torch.ops.stof.masked_attention_backward]


@pytest.mark.parametrize("kind", ["reentrant", "not reentrant", "selective"])
def test_activation_checkpointing(kind: str) -> None:
    q, k, v = inputs()

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return stof.attention(q * 1.5, k, v, MASK)

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if "masked_attention" in str(operator) else CheckpointPolicy.PREFER_RECOMPUTE

    options: dict[str, Any] = {"use_reentrant": kind == "reentrant"}
    if kind == "selective":
        options["context_fn"] = lambda: create_selective_checkpoint_contexts(policy)
    out = checkpoint(call, q, k, v, **options)
    assert isinstance(out, Tensor)
    out.sum().backward()
    assert q.grad is not None
    assert k.grad is not None
    reference = expected(q.detach() * 1.5, k, v, MASK, torch.ones_like(out))
    assert reference.q is not None
    assert reference.k is not None
    torch.testing.assert_close(q.grad, reference.q * 1.5)
    torch.testing.assert_close(k.grad, reference.k)


def test_autocast() -> None:
    q, k, v = inputs(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = stof.attention(q, k, v, MASK)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    reference = expected(q, k, v, MASK, torch.ones(out.shape))
    for x, wanted in zip((q, k, v), reference, strict=False):
        assert x.grad is not None
        assert wanted is not None
        assert x.grad.dtype == torch.float32
        torch.testing.assert_close(x.grad, wanted, atol=0.05, rtol=0.05)


def test_equal_calls_have_equal_bits() -> None:
    q, k, v = inputs(torch.float32)
    first, second = (torch.autograd.grad(stof.attention(q, k, v, MASK).sin().sum(), (q, k, v)) for _ in range(2))
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("sizes", [(0, 4, 8, 8), (2, 4, 0, 8), (2, 4, 8, 0)], ids=str)
def test_empty_calls(sizes: tuple[int, int, int, int]) -> None:
    batch, heads, q_len, kv_len = sizes
    q, k, v = (torch.ones(batch, heads, n, 8).requires_grad_() for n in (q_len, kv_len, kv_len))
    stof.attention(q, k, v).sum().backward()
    assert all(x.grad is not None and x.grad.shape == x.shape and not x.grad.any() for x in (q, k, v))


def test_plans_count_what_gradients_hold() -> None:
    plan = stof.plan(masks.sliding_window(7, 1), Q_LEN, KV_LEN)  # of no other test
    q, k, v = inputs()
    out = stof.attention(q, k, v, plan)
    before = plan.bytes()
    out.sum().backward()
    assert plan.bytes() > before


def test_calls_without_gradients_take_no_graph() -> None:
    q, k, v = inputs()
    with torch.no_grad():
        assert not stof.attention(q, k, v, MASK).requires_grad
    assert not stof.attention(*(x.detach() for x in (q, k, v)), MASK).requires_grad
    out, lse = stof.attention(q.detach(), k, v, MASK, return_lse=True)
    assert out.requires_grad
    assert lse.requires_grad


def test_refusals() -> None:
    q, k, v = inputs()
    (gradient,) = torch.autograd.grad(stof.attention(q, k, v, MASK).sum(), q, create_graph=True)
    with pytest.raises(UnsupportedError, match="second derivative"):
        torch.autograd.grad(gradient.sum(), k)
    with pytest.raises(UnsupportedError, match="differentiates"):
        torch.func.grad(lambda q: stof.attention(q, k, v, MASK).sum())(q)


def test_plans_die_with_their_last_reference() -> None:
    """What they hold for backward passes can be large."""
    q = torch.randn(1, 2, 40, 16, requires_grad=True)
    plan = stof.plan(masks.causal(), 40, batch=1, heads=2)
    stof.attention(q, q, q, plan).sum().backward()
    stof.plan_cache.clear()
    gone = weakref.ref(plan)
    gc.disable()
    try:
        del plan
        assert gone() is None
    finally:
        gc.enable()
