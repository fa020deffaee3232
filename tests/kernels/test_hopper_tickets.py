"""Tickets of the one-pass backward kernel of Hopper, and the kernels around it, in Triton's interpreter."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stof.kernels.hopper.backward_lists import MOST_PARTS, TILE, BackwardLists, slots_of
from stof.kernels.implementation import NeedsGrad, Options
from stof.testing import make_inputs
from tests.examples import examples
from tests.interpreter import IN_INTERPRETER
from tests.kernels.gradients import expected_gradients
from tests.kernels.test_hopper_backward import QUERIES, WIDTH, drawn_masks, kept_scores, lists_of

pytest.importorskip("triton")

import triton.language as tl

from stof.kernels.hopper import backward, backward_lists, backward_tickets, binding
from stof.kernels.hopper.backward_tickets import TICKET
from tests.kernels.assemble import Recorded

pytestmark = [
    IN_INTERPRETER,
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning"),
]


class Launches(NamedTuple):
    """A backward call whose kernels were not launched."""

    rows: Recorded
    main: Recorded
    convert: Recorded
    call: dict[str, Any]
    of_sinks: Tensor

    @property
    def tickets(self) -> Tensor:
        return self.rows.tensors[-1]


def launches_of(
    lists: BackwardLists, call: dict[str, Any], lse: Tensor, thread_blocks: int, programs: int | None = None
) -> Launches:
    """Bind and call the kernels, and run the one that writes tickets, or the first programs of it."""
    record = Recorded()
    options = Options(call["scale"], 0.0, sinks=call.get("sinks"))
    q, k, v, out, d_out, d_lse = (call.get(name) for name in ("q", "k", "v", "out", "d_out", "d_lse"))
    needs = NeedsGrad(sinks="sinks" in call)
    with (
        mock.patch.object(backward, "Launch", record.make),
        mock.patch.object(backward, "multiprocessors", return_value=thread_blocks),
        mock.patch.dict(binding._SWIZZLED, {4: binding._SWIZZLED[2]}),  # float32 inputs: nothing is copied by TMA
        mock.patch.object(backward_tickets, "_SHORT_BLOCK", tl.constexpr(backward.SHORT_BLOCK)),
        mock.patch.object(backward_lists, "SHORT_BLOCK", backward.SHORT_BLOCK),
    ):
        bound = backward.bind_backward(q, k, v, out, d_out, d_lse, lists, options, needs)
        bound(q, k, v, out, lse.float(), d_out, d_lse, None, call.get("sinks"))
        launched = Launches(*(record.made[n] for n in (0, 2, 1)), call, record.made[0].tensors[5])
        run(launched.rows, programs)
    return launched


def run(launch: Recorded, programs: int | None = None) -> None:
    kernel, grid, static, numbers, constants = launch.given
    kernel[(programs or grid,)](*launch.tensors, *static, *numbers, *constants)


def work_of(launched: Launches, lists: BackwardLists) -> list[list[int]]:
    """Tickets with work in the order in which they are taken; check that each tile of each head is in one of them."""
    tickets = launched.tickets.tolist()
    last = next(n for n, ticket in enumerate(tickets) if ticket[TICKET.begin] < 0)
    assert len(tickets) - last >= launched.main.given[1]  # an end ticket for each thread block
    assert all(ticket[TICKET.begin] < 0 for ticket in tickets[last:])
    work = [ticket for ticket in tickets[:last] if ticket[TICKET.part] < ticket[TICKET.parts]]
    batch, heads = launched.call["q"].shape[:2]
    group = heads // launched.call["k"].shape[1]
    covered: Counter[tuple[int, int, int]] = Counter()
    written: Counter[tuple[int, int]] = Counter()
    items, sharing = defaultdict(list), defaultdict(set)
    additions_of_head: Counter[int] = Counter()
    for ticket in work:
        row_block, slot, head, count, rank, adding, begin, end, part, parts, part_slot = ticket[: len(TICKET)]
        items[head // group, row_block, rank].append((part, parts, part_slot if parts > 1 else 0))
        sharing[head // group, row_block].add((slot if adding > 1 else 0, adding))
        for bh in range(head, head + count):
            additions_of_head[bh] += MOST_PARTS if part == parts - 1 == 0 else 1
            if part == parts - 1 > 0:
                additions_of_head[bh] += MOST_PARTS - parts
            for tile in range(begin, end):
                covered[bh, row_block, tile] += 1
                number, rank_of_tile = (int(lists.tiles[tile, field]) for field in (TILE.sum, TILE.rank))
                # Contributions of lower rank have smaller tickets, or come earlier in the same one.
                assert written[bh, number] == rank_of_tile
                written[bh, number] += 1
    expected = []
    for b, h, block in torch.cartesian_prod(*(torch.arange(n) for n in (batch, heads, lists.row_blocks))).tolist():
        pattern = int(lists.pattern_of[b % len(lists.pattern_of), h % lists.pattern_of.shape[1]])
        begin, end = lists.row_block_ptr[pattern * lists.row_blocks + block :][:2].tolist()
        expected += [(b * heads + h, block, tile) for tile in range(begin, end)]
    assert covered == Counter(expected)
    # `convert_dq_kernel` waits for so many: see `accumulator`.
    additions = launched.convert.given[3][5]
    assert {2 * n for n in additions_of_head.values()} == {additions}
    assert len(additions_of_head) == batch * heads
    taken: list[int] = []
    for (kv_head, row_block), slots in sharing.items():
        ((slot, adding),) = slots
        taken += range(slot, slot + slots_of(adding))
        for rank in range(adding):
            of_item = items[kv_head, row_block, rank]
            parts = of_item[0][1]
            assert [part for part, *_ in of_item] == list(range(parts))
            assert {each[1:] for each in of_item} == {of_item[0][1:]}
            taken += range(of_item[0][2], of_item[0][2] + slots_of(parts))
    assert len(items) == sum(next(iter(slots))[1] for slots in sharing.values())
    assert len(taken) == len(set(taken))
    if taken:
        assert max(taken) < launched.main.tensors[2].shape[0]
    return work


def follow(launched: Launches, lists: BackwardLists) -> list[Tensor]:
    """Compute what the kernel computes, in the order of its tickets: its sums of dQ; return dK and dV."""
    call, stats, sums = launched.call, *(tensor_map.base for tensor_map in launched.main.maps[4:])
    q, k, v, d_out = (call[name].double() for name in ("q", "k", "v", "d_out"))
    batch, heads, q_len, _ = q.shape
    queries, group = lists.queries, heads // k.shape[1]
    blocks = -(-q_len // queries)
    padded = torch.nn.functional.pad
    q, d_out = (padded(x, (0, 0, 0, blocks * queries - q_len)).flatten(0, 1) for x in (q, d_out))
    k, v = (padded(x, (0, 0, 0, lists.row_blocks * 128 - k.shape[2])).flatten(0, 1) for x in (k, v))
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    # Half, columns / 8, warp, lane / 4, lane % 4, 2 rows 8 apart, 2 columns; halves are of columns or of queries.
    fragments = sums.view(batch * heads, lists.sums, 2, 8, 4, 8, 4, 2, 2)
    in_rows = (2, 5, 3, 0, 1, 4, 6) if queries == 64 else (0, 2, 5, 3, 1, 4, 6)
    for ticket in work_of(launched, lists):
        keys = slice(ticket[TICKET.row_block] * 128, ticket[TICKET.row_block] * 128 + 128)
        for head in range(ticket[TICKET.head], ticket[TICKET.head] + ticket[TICKET.heads]):
            for fields in lists.tiles[ticket[TICKET.begin] : ticket[TICKET.end]].tolist():
                rows = slice(fields[TILE.q_block] * queries, fields[TILE.q_block] * queries + queries)
                lse, delta = stats.view(-1, 2, queries)[head * blocks + fields[TILE.q_block]].double()
                scores = k[head // group, keys] @ q[head, rows].T * call["scale"]
                p = torch.exp2(scores * 1.4426950408889634 - lse) * kept_scores(lists, fields)
                ds = p * (v[head // group, keys] @ d_out[head, rows].T - delta)
                dk[head // group, keys] += call["scale"] * ds @ q[head, rows]
                dv[head // group, keys] += p @ d_out[head, rows]
                dq = padded(ds.T @ k[head // group, keys], (0, WIDTH[queries] - q.shape[2])).float()
                place = fragments[head, fields[TILE.sum]].permute(in_rows)
                dq = dq.view(place.shape)
                place.copy_(dq + place if fields[TILE.rank] else dq)
    return [x.view(batch, -1, *x.shape[1:])[:, :, : lists.kv_len].to(call["k"].dtype) for x in (dk, dv)]


@given(data=st.data(), queries=st.sampled_from(QUERIES))
@examples(16)
def test_gradients_in_the_order_of_tickets(data: st.DataObject, queries: int) -> None:
    """lse, delta, cleared counters, tickets and sums of dQ give the gradients, around a kernel in PyTorch."""
    from stof.kernels.torch.reference import reference_attention

    keep = data.draw(drawn_masks(400))
    batch, heads, q_len, kv_len = keep.shape
    head_dim, option = 40 if queries == 128 else 72, data.draw(st.sampled_from(["", "lse", "sinks"]))
    lists = lists_of(keep, queries)
    heads_differ = lists.seen_keys is not None and lists.pattern_of.shape[1] > 1
    kv_heads = heads if heads_differ else data.draw(st.sampled_from(sorted({1, heads})))
    inputs = make_inputs(batch=batch, heads=heads, kv_heads=kv_heads, q_len=q_len, kv_len=kv_len, head_dim=head_dim)
    q, k, v = inputs.qkv
    call: dict[str, Any] = {"q": q, "k": k, "v": v, "d_out": torch.randn_like(q), "scale": 0.3, "keep": keep}
    if option == "lse":
        call["d_lse"] = torch.randn(batch, heads, q_len)
    if option == "sinks":
        call["sinks"] = torch.randn(heads) * 3
    out, lse = reference_attention(q, k, v, keep, scale=0.3, sinks=call.get("sinks"))
    if data.draw(st.booleans()):
        lists = replace(lists, counts=None)  # as in a dynamic plan: the device decides
    with mock.patch.object(backward, "SHORT_BLOCK", data.draw(st.sampled_from([0, 24]))):
        launched = launches_of(lists, call | {"out": out}, lse, data.draw(st.integers(1, 40)))
    _, dq, counters = launched.convert.tensors
    assert not counters.any()
    dk, dv = follow(launched, lists)
    counters[2 + batch * heads * lists.sums :][: batch * heads] = launched.convert.given[3][5]
    run(launched.convert, min(3, launched.convert.given[1]))
    expected = expected_gradients(call)
    of_sinks = [(-launched.of_sinks.sum((0, 2)), "sinks")] if "sinks" in call else []
    for computed, name in ((dq, "q"), (dk, "k"), (dv, "v"), *of_sinks):
        torch.testing.assert_close(computed, getattr(expected, name).to(computed.dtype), rtol=1e-4, atol=1e-4)


# The mask of query head h; whether some of the last items are split, and whether some items have several query heads,
# if the host makes the items; the same if the device does, which does not cut blocks of keys into chunks.
MASKS = {
    "full": (lambda h, q, kv: q >= 0, (False, False), (False, False)),
    "causal": (lambda h, q, kv: q >= kv, (True, False), (True, False)),
    "window": (lambda h, q, kv: (q >= kv) & (q - kv < 512), (False, True), (False, True)),
    "documents": (lambda h, q, kv: (q >= kv) & (q // 1100 == kv // 1100), (False, True), (False, True)),
    "global keys": (lambda h, q, kv: ((q - kv).abs() < 200) | (kv < 3), (False, True), (False, False)),
    "long window, global keys": (lambda h, q, kv: ((q - kv).abs() < 1000) | (kv < 3), (True, False), (True, False)),
    "causal in some heads": (lambda h, q, kv: (q >= kv) & ((q - kv < 1200) | (h > 0)), (True, False), (True, False)),
}


@cache
def long_lists(name: str) -> BackwardLists:
    """Lists of 4096 queries and keys, of two heads if they have other masks."""
    rows, mask = torch.arange(4096), MASKS[name][0]
    heads = range(2 if "heads" in name else 1)
    return lists_of(torch.stack([mask(h, rows[:, None], rows).expand(4096, 4096) for h in heads])[None], 64)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(("batch", "kv_heads", "heads"), [(1, 8, 8), (1, 2, 8), (2, 12, 24)])
@pytest.mark.parametrize("has_counts", [True, False])
def test_tickets_of_long_sequences(name: str, batch: int, kv_heads: int, heads: int, has_counts: bool) -> None:
    """Parts of the last items, query heads of a key head in one item, chunks of long blocks of keys."""
    lists, expected = long_lists(name), MASKS[name][1:]
    if lists.pattern_of.shape[1] > 1:
        lists = replace(lists, pattern_of=lists.pattern_of.repeat(1, heads // 2))
    q, k = (torch.empty(batch, n, 4096, 128, dtype=torch.half) for n in (heads, kv_heads))
    call = {"q": q, "k": k, "v": k, "out": q, "d_out": q, "scale": 0.1}
    lists = lists if has_counts else replace(lists, counts=None)
    work = work_of(launches_of(lists, call, torch.zeros(batch, heads, 4096), 132, programs=2), lists)
    is_split, is_grouped = expected[0 if has_counts else 1]
    parts = [ticket[TICKET.end] - ticket[TICKET.begin] for ticket in work if ticket[TICKET.parts] > 1]
    assert bool(parts) == is_split
    counts = lists.row_block_ptr.diff()
    longest_part = max(float(counts.double().mean()) * 2 / 3, int(counts.max()) / 4 + 1) * 1.5
    assert max(parts, default=0) <= longest_part
    has_room = heads == 24  # fewer key heads would leave thread blocks without work
    assert any(ticket[TICKET.heads] > 1 for ticket in work) == (is_grouped and has_room)
