"""What masks read may change between calls, wherever it is kept and whoever writes to it: results follow."""

from __future__ import annotations

import functools
import random
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask

import stof
from stof import masks
from stof.errors import MaskError, MaskFunctionError, StofError
from stof.masks import Mask, elementwise, functions
from stof.testing import assert_attention, make_inputs

LENGTH, HEADS = 40, 2
INPUTS = make_inputs(batch=1, heads=HEADS, q_len=LENGTH, kv_len=LENGTH, head_dim=16).qkv
AT = torch.arange(LENGTH)
GLOBAL: Any = 0

# A mask function, and what sets the width of its window.
Changing = tuple[Callable[..., Tensor], Callable[[int], object]]


def window(q: Tensor, kv: Tensor, width: Any) -> Tensor:
    return (q >= kv) & (q - kv < width)


def keep_of(width: int) -> Tensor:
    return window(AT[:, None], AT, width)


def closure() -> Changing:
    width: Any = 1

    def assign(to: int) -> None:
        nonlocal width
        width = to

    return lambda b, h, q, kv: window(q, kv, width), assign


def closure_of_a_helper() -> Changing:
    width: Any = 1

    def helper(q: Tensor, kv: Tensor) -> Tensor:
        return window(q, kv, width)

    def assign(to: int) -> None:
        nonlocal width
        width = to

    return lambda b, h, q, kv: helper(q, kv), assign


def global_name() -> Changing:
    def assign(to: int) -> None:
        global GLOBAL
        GLOBAL = to

    return lambda b, h, q, kv: (q >= kv) & (q - kv < GLOBAL), assign


def default() -> Changing:
    def fn(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, width: int = 1) -> Tensor:
        return window(q, kv, width)

    return fn, lambda to: setattr(fn, "__defaults__", (to,))


def keyword_default() -> Changing:
    def fn(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, width: int = 1) -> Tensor:
        return window(q, kv, width)

    return fn, lambda to: fn.__kwdefaults__.update(width=to)


def code() -> Changing:
    def fn(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return q >= kv

    def assign(to: int) -> None:
        source = f"lambda b, h, q, kv: (q >= kv) & (q - kv < {to})"
        fn.__code__ = eval(source).__code__

    return fn, assign


def item_of_a_list() -> Changing:
    values = [1]
    return lambda b, h, q, kv: window(q, kv, values[0]), lambda to: values.__setitem__(0, to)


def partial_of_a_dict() -> Changing:
    values = {"width": 1}
    fn = functools.partial(lambda values, b, h, q, kv: window(q, kv, values["width"]), values)
    return fn, lambda to: values.update(width=to)


def nested_attribute() -> Changing:
    config = SimpleNamespace(attention=SimpleNamespace(width=1))
    return lambda b, h, q, kv: window(q, kv, config.attention.width), lambda to: setattr(config.attention, "width", to)


def bound_method() -> Changing:
    class Window:
        width = 1

        def mask(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return window(q, kv, self.width)

    held = Window()
    mask = held.mask  # bound methods are made anew when they are asked for
    return mask, lambda to: setattr(Window, "width", to)


def callable_object() -> Changing:
    class Window:
        def __init__(self) -> None:
            self.widths = (1, 2)

        @property
        def width(self) -> int:
            return self.widths[0]

        def __call__(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return window(q, kv, self.width)

    held = Window()
    return held, lambda to: setattr(held, "widths", (to, 2))


def buffer_of_a_module() -> Changing:
    module = nn.Module()
    module.register_buffer("width", torch.tensor([1]))
    return lambda b, h, q, kv: window(q, kv, module.width[0]), lambda to: module.width.fill_(to)  # type: ignore


def array() -> Changing:
    values = np.array([1])
    return lambda b, h, q, kv: window(q, kv, int(values[0])), lambda to: values.__setitem__(0, to)


def memory_of_an_array() -> Changing:
    values = np.array([1])
    tensor = torch.from_numpy(values)
    return lambda b, h, q, kv: window(q, kv, tensor[0]), lambda to: values.__setitem__(0, to)


def written(write: Callable[[Tensor, int], object]) -> Callable[[], Changing]:
    def make() -> Changing:
        width = torch.tensor([1])
        return lambda b, h, q, kv: window(q, kv, width[0]), lambda to: write(width, to)

    return make


def table(write: Callable[[Tensor, Tensor], object]) -> Callable[[], Changing]:
    def make() -> Changing:
        keep = keep_of(1)
        return lambda b, h, q, kv: keep[q, kv], lambda to: write(keep, keep_of(to))

    return make


def reduced() -> Changing:
    """Not elementwise: evaluated under vmap."""
    offsets = torch.arange(3)
    return lambda b, h, q, kv: ((q - offsets) == kv).any(), lambda to: offsets.copy_(torch.arange(3).clamp(max=to - 1))


STATES: dict[str, Callable[[], Changing]] = {
    **{f.__name__: f for f in (
        closure, closure_of_a_helper, global_name, default, keyword_default, code, item_of_a_list, partial_of_a_dict,
        nested_attribute, bound_method, callable_object, buffer_of_a_module, array, memory_of_an_array,
    )},
    "counted write": written(lambda width, to: width.fill_(to)),
    "write through .data": written(lambda width, to: width.data.fill_(to)),
    "write through a NumPy view": written(lambda width, to: width.numpy().fill(to)),
    "assigned .data": written(lambda width, to: setattr(width, "data", torch.tensor([to]))),
    "table": table(lambda keep, to: keep.copy_(to)),
    "table, assigned .data": table(lambda keep, to: setattr(keep, "data", to)),
}  # fmt: skip
GIVEN: dict[str, Callable[[Any], Any]] = {
    "function": lambda fn: fn,
    "mask": masks.from_function,
    "composed": lambda fn: masks.from_function(fn) & masks.causal(),
    "block mask": lambda fn: create_block_mask(
        lambda b, h, q, kv: fn(b, h, q, kv) | (q < 0), None, None, LENGTH, LENGTH, device="cpu"
    ),
}


def drawn(draw: random.Random) -> int:
    return draw.randint(1, 3)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("state", "given"), [(s, g) for s in STATES for g in GIVEN if s != "code" or g == "function"])
def test_functions_follow_what_they_read(state: str, given: str) -> None:
    draw = random.Random(f"{state} {given}")
    fn, change = STATES[state]()
    change(3)  # the block lists of a BlockMask stay as they are: the widest window
    mask = GIVEN[given](fn)
    for _ in range(4):
        width = drawn(draw)
        change(width)
        out, lse = stof.attention(*INPUTS, mask, return_lse=True)
        assert_attention(out, lse, *INPUTS, keep_of(width))


def test_reduced_functions_follow_what_they_read() -> None:
    fn, change = reduced()
    for width in (1, 3, 2):
        change(width)
        out, lse = stof.attention(*INPUTS, fn, return_lse=True)
        assert_attention(out, lse, *INPUTS, keep_of(width))


@pytest.mark.parametrize("state", ["closure", "nested_attribute", "counted write", "assigned .data", "table"])
def test_compiled_code_follows_what_functions_read(state: str) -> None:
    torch._dynamo.reset()
    fn, change = STATES[state]()
    mask = masks.from_function(fn)
    compiled = torch.compile(lambda q, k, v: stof.attention(q, k, v, mask), backend="aot_eager", fullgraph=True)
    draw = random.Random(state)
    for _ in range(4):
        width = drawn(draw)
        change(width)
        assert_attention(compiled(*INPUTS), None, *INPUTS, keep_of(width))


@pytest.mark.parametrize("write", ["copy_", "data.copy_", "assign"])
def test_masks_of_index_lists_follow_their_tensors(write: str) -> None:
    columns, distances = torch.tensor([0, 7, 20]), torch.tensor([0, 1, 5])
    scores = torch.randn(3, 3)
    words = torch.randint(-(2**31), 2**31, (LENGTH, 2)).int()
    cases: list[tuple[Any, list[Tensor], list[Tensor]]] = [
        (masks.vertical_slash(columns, distances), [columns, distances], [columns + 1, distances + 2]),
        (masks.block_topk(scores, 1, block_size=16), [scores], [-scores]),
        (masks.from_bits(words, LENGTH) | masks.causal(), [words], [~words]),
    ]
    for mask, tensors, others in cases:
        before = mask.to_dense(LENGTH)
        assert_attention(stof.attention(*INPUTS, mask), None, *INPUTS, before)
        for old, new in zip(tensors, others, strict=True):
            if write == "assign":
                old.data = new
            else:
                (old.data if write == "data.copy_" else old).copy_(new)
        after = mask.to_dense(LENGTH)
        assert not torch.equal(before, after)
        assert_attention(stof.attention(*INPUTS, mask), None, *INPUTS, after)


def test_block_lists_and_functions_that_are_assigned() -> None:
    block_mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 256, 256, device="cpu")
    q, k, v = make_inputs(batch=1, heads=1, q_len=256, kv_len=256, head_dim=16).qkv
    at = torch.arange(256)
    causal = at[:, None] >= at
    assert_attention(stof.attention(q, k, v, block_mask), None, q, k, v, causal)
    block_mask.mask_mod = lambda b, h, q, kv: q - kv >= 3
    block_mask.full_kv_num_blocks = torch.zeros_like(block_mask.full_kv_num_blocks)
    rows = block_mask.kv_num_blocks[0, 0].repeat_interleave(128)
    assert rows.tolist() == [1] * 256
    near = (at[:, None] // 128 == at // 128) & (at[:, None] - at >= 3)
    assert_attention(stof.attention(q, k, v, block_mask), None, q, k, v, near)


READS: dict[str, Callable[..., Any]] = {
    "LongTensor": lambda b, h, q, kv: q - kv < torch.LongTensor([h])[0] + 1,
    "Tensor": lambda b, h, q, kv: q - kv < torch.Tensor([h])[0] + 1,
    "new": lambda b, h, q, kv: q - kv < AT.new([h])[0] + 1,
    "sparse": lambda b, h, q, kv: (
        torch.sparse_coo_tensor([[h]], [1.0], (4,), check_invariants=True).to_dense().argmax() > q - kv
    ),
    "text": lambda b, h, q, kv: (q >= kv) if "1" in repr(h) else (q < kv),
    "formatted": lambda b, h, q, kv: (q >= kv) if f"{b}" == "0" else (q < kv),
    "NumPy": lambda b, h, q, kv: q - kv < int(np.asarray(h)) + 1,
    "DLPack": lambda b, h, q, kv: q - kv < int(np.from_dlpack(kv)),
    "split": lambda b, h, q, kv: q - kv < len(AT.tensor_split(h)[0]),
    "storage": lambda b, h, q, kv: q - kv < h.untyped_storage()[0],
    "pickle": lambda b, h, q, kv: q - kv < int(__import__("pickle").loads(__import__("pickle").dumps(h))),
    "list index": lambda b, h, q, kv: q - kv < [1, 2, 3][q % 3],
    "allclose": lambda b, h, q, kv: (q >= kv) if torch.allclose(kv, torch.tensor(0)) else (q < kv),
}


@pytest.mark.parametrize("read", READS)
def test_functions_that_read_an_index_in_python_are_refused(read: str) -> None:
    for call in (
        lambda: stof.attention(*INPUTS, READS[read]),
        lambda: stof.plan(READS[read], LENGTH, batch=1, heads=1),
        lambda: masks.from_function(READS[read]).to_dense(LENGTH),
    ):
        with pytest.raises(MaskFunctionError, match="decides in Python"):
            call()


def test_slices_of_block_masks_are_refused() -> None:
    block_mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 256, 256, device="cpu")
    x = make_inputs(batch=1, heads=1, q_len=256, kv_len=256).qkv
    for sliced in (block_mask[:, :, :1], block_mask[:, :, torch.tensor([1])]):
        with pytest.raises(StofError, match=r"it is a slice|made for q_len"):  # the second since PyTorch 2.14
            stof.attention(*x, sliced)
    with pytest.raises(MaskFunctionError, match="sliced BlockMask"):  # PyTorch takes its mask_mod away
        stof.attention(*x, block_mask[0])


SCRATCH = torch.zeros((), dtype=torch.int64)
STATE = SimpleNamespace(n=3)


def read_twice(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    SCRATCH.fill_(0)
    keep = q >= kv + SCRATCH
    SCRATCH.fill_(STATE.n)
    return keep & (q - kv < SCRATCH)


def written_in_part(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    pair = q.new_zeros(2)
    pair[1] = STATE.n
    pair[0] = q
    return (q >= kv) & (pair[0] - kv < pair[1])


def by_globals(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q >= kv) & (q - kv < globals()["STATE"].n)


def bound_late(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q >= kv) & (q - kv < LATE.n)  # type: ignore[name-defined]  # noqa: F821


@torch.library.custom_op("stof_tests::within", mutates_args=())
def within(distance: Tensor) -> Tensor:
    return distance < STATE.n


@within.register_vmap
def _within_vmap(info: Any, in_dims: Any, distance: Tensor) -> Any:
    return within(distance), in_dims[0]


def by_an_operator(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q >= kv) & torch.ops.stof_tests.within(q - kv)


def test_operators_of_others_are_refused() -> None:
    with pytest.raises(MaskFunctionError, match="calls stof_tests"):
        stof.attention(*INPUTS, by_an_operator)


def by_flags(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q >= kv) & (q - kv < torch.get_num_threads())


def by_seed(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return torch.logical_and(q >= kv, q - kv < torch.initial_seed())


@pytest.mark.parametrize("given", ["function", "mask"])
def test_state_of_torch(given: str) -> None:
    threads = torch.get_num_threads()
    changes: dict[Any, Callable[[int], object]] = {by_flags: torch.set_num_threads, by_seed: torch.manual_seed}
    for fn, change in changes.items():
        mask = GIVEN[given](fn)
        try:
            for n in (1, 2, 1):
                change(n)
                assert_attention(stof.attention(*INPUTS, mask), None, *INPUTS, keep_of(n))
        finally:
            torch.set_num_threads(threads)


@pytest.mark.parametrize("fn", [read_twice, written_in_part, by_globals, bound_late])
def test_state_that_the_operators_hide(fn: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    mask = masks.from_function(fn)
    monkeypatch.setitem(globals(), "LATE", STATE)
    for n in (3, 9, 3, 1):
        monkeypatch.setattr(STATE, "n", n)
        for given in (fn, mask):
            assert_attention(stof.attention(*INPUTS, given), None, *INPUTS, keep_of(n))


def test_frozen_masks_are_not_evaluated_under_other_state(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (x[:, :, :20] for x in INPUTS)
    monkeypatch.setattr(STATE, "n", 3)
    plan = stof.plan(by_globals, LENGTH)
    monkeypatch.setattr(STATE, "n", 9)
    frozen = plan.mask
    assert frozen is not None
    for use in (
        lambda: stof.attention(q, k, v, frozen),
        lambda: stof.attention(q, k, v, frozen & masks.full()),
        lambda: (~frozen).to_dense(LENGTH),
        lambda: plan.extended(8, frozen),
        lambda: stof.plan(frozen, 24),
    ):
        with pytest.raises(MaskError, match="was changed after"):
            use()
    monkeypatch.setattr(STATE, "n", 3)
    assert_attention(stof.attention(q, k, v, by_globals), None, q, k, v, keep_of(3)[:20, :20])


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("frequent_switches")
def test_threads_for_which_a_function_does_something_else() -> None:
    """The first calls of a function interleave, in each of several functions."""
    local = threading.local()
    failed: list[BaseException] = []

    def work(fn: Callable[..., Tensor], width: int) -> None:
        local.width = width
        try:
            for _ in range(5):
                assert_attention(stof.attention(*INPUTS, fn), None, *INPUTS, keep_of(width))
        except BaseException as error:
            failed.append(error)

    for _ in range(15):

        def fn(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return window(q, kv, local.width)

        threads = [threading.Thread(target=work, args=(fn, width)) for width in (3, 20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed, failed[0]


def test_variables_of_many_types() -> None:
    """Functions that read numbers alone are compared by these, all others by a trace."""
    width: Any = 1

    def fn(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *, low: int = 0, high: int = 0) -> Tensor:
        return (q - kv >= low) & (q - kv < high + width)

    mask = masks.from_function(fn)
    for low, high, width in [
        (0, 1, 1), (1, 0, 3), (0, 1, torch.tensor(2)), (0, 1, 2), (0, 1, 2.5), (0, 1, torch.tensor(1)), (0, 1, True),
    ]:  # fmt: skip
        values = {"low": low, "high": high}
        fn.__kwdefaults__ = dict(reversed(values.items())) if low else values
        distance = AT[:, None] - AT
        expected = (distance >= low) & (distance < high + width)
        for one in (fn, mask):
            assert_attention(stof.attention(*INPUTS, one), None, *INPUTS, expected)
        assert torch.equal(mask.to_dense(LENGTH)[0, 0], expected)


def test_the_default_dtype_is_state() -> None:
    """It decides in which precision integers are multiplied with a float."""
    scale = 1.0 + 2.0**-20
    mask = masks.from_function(lambda b, h, q, kv: (q + 2**22) * scale > kv + 2**22 + 4)
    kept = []
    for dtype in (torch.float64, torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            kept.append((AT[:, None] + 2**22) * scale > AT + 2**22 + 4)
            got = stof.attention(*INPUTS, mask)
        finally:
            torch.set_default_dtype(torch.float32)
        assert_attention(got, None, *INPUTS, kept[-1])
    assert not torch.equal(kept[0], kept[1])


def test_functions_that_differ_in_their_tensors_are_traced_as_a_whole_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is shared is how the function is called, never what it keeps."""
    functions.forget_functions()
    whole: list[object] = []
    check = elementwise._refuse_reads
    monkeypatch.setattr(elementwise, "_refuse_reads", lambda fn, *rest: whole.append(fn) or check(fn, *rest))

    def same(ids: Tensor, window: int, flag: bool = False) -> Mask:
        def keep(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            near = (ids[i] == ids[j]) & (i - j < window)
            return near & (h > 0) if flag else near

        return masks.from_function(keep)

    def expected(ids: Tensor, window: int) -> Tensor:
        at = torch.arange(len(ids))
        return (ids[:, None] == ids) & (at[:, None] - at < window)

    for traced, (length, window) in ((1, (20, 5)), (1, (20, 5)), (2, (20, 6)), (3, (30, 5)), (3, (30, 5))):
        ids = torch.randint(0, 3, (length,))
        assert torch.equal(same(ids, window).to_dense(20)[0, 0], expected(ids, window)[:20, :20])
        assert len(whole) == traced
    flagged = same(ids, 5, flag=True)
    assert flagged.dims(1, 4) == (1, 4)
    assert not same(ids, 5).depends_on_heads
    int32 = same(ids.int(), 5)
    assert torch.equal(int32.to_dense(20), same(ids, 5).to_dense(20))


def test_a_table_that_is_written_in_ways_that_pytorch_does_not_count() -> None:
    ids = torch.zeros(20, dtype=torch.int64)
    mask = masks.from_function(lambda b, h, i, j: ids[i] == ids[j])
    first = mask.frozen()
    assert mask.frozen().record is first.record
    ids.numpy()[10:] = 1
    second = mask.frozen()
    assert second.record is not first.record
    assert second.to_dense(20).sum() == 200
    assert first.changed()
    ids.numpy()[10:] = 0
    assert not first.changed()
    functions.forget_functions()
    assert not first.changed()


@pytest.mark.parametrize("change", ["attribute", "requires_grad", "gradient"])
def test_what_functions_read_of_tensors_besides_their_values(change: str) -> None:
    table: Any = torch.ones(20)
    table.window = 3

    def of_attribute(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (table[j] > 0) & (i - j < table.window)

    def of_flag(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (table[j] > 0) & (i - j < (3 if table.requires_grad else 7))

    def of_gradient(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (table[j] > 0) & (i - j < (3 if table.grad is None else 7))

    fn = {"attribute": of_attribute, "requires_grad": of_flag, "gradient": of_gradient}[change]
    mask = masks.from_function(fn)
    first = mask.frozen()
    dense = first.to_dense(20)
    if change == "attribute":
        table.window = 7
    elif change == "requires_grad":
        table.requires_grad_()
    else:
        table.grad = torch.ones(20)
    assert first.changed()
    assert mask.frozen() != first
    assert not torch.equal(mask.to_dense(20), dense)


def test_functions_that_mean_something_else_on_broadcast_indices_are_told_apart_once_for_all() -> None:
    def made(table: Tensor) -> Mask:
        def keep(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return table[j] & (j <= i) if i.ndim == 0 else table[j] & (j <= i + 1)

        return masks.from_function(keep)

    tables = [torch.rand(20) < 0.7 for _ in range(3)]
    frozen = [made(table).frozen() for table in tables]
    for mask, table in zip(frozen, tables, strict=True):
        assert torch.equal(mask.to_dense(20)[0, 0], table & torch.ones(20, 20, dtype=torch.bool).tril())
