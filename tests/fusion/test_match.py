"""Which segments templates match, and that lowered graphs compute what they did."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stof.fusion import pipeline
from stof.fusion.graph.fx_utils import copy_graph, insert_call
from stof.fusion.graph.mutations import GraphOrder, may_mutate_inputs
from stof.fusion.graph.nodes import op_name
from stof.fusion.graph.operator_recognition import recognize_operators
from stof.fusion.graph.symbolic_shapes import is_symbolic
from stof.fusion.measure.segment_timer import SegmentTimer
from stof.fusion.pipeline import Search
from stof.fusion.planner.match import find_matches
from stof.fusion.templates.registry import KernelPolicy, no_kernel
from tests.fusion.graphs import RMSNorm, calls, capture, fuse, products

K, N = 8, 6


class Block(nn.Module):
    """Modules to write segments with; `body` is the function under test."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.up, self.down, self.square, self.pair = (
            nn.Linear(K, N),
            nn.Linear(N, K),
            nn.Linear(K, K),
            nn.Linear(K, 2 * N),
        )
        self.plain = nn.Linear(K, K, bias=False)
        self.stored = nn.Parameter(torch.randn(K, N))
        self.layer, self.rms, self.drop = nn.LayerNorm(K), RMSNorm(K), nn.Dropout(0.3)
        self.body = body

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


def gate(m: Block, x: Tensor) -> Tensor:
    a, b = m.pair(x).chunk(2, -1)
    return F.silu(a) * b


def dequantized(m: Block, x: Tensor) -> Tensor:
    """A weight of 8-bit values and a factor for each row, which Inductor widens before the GEMM."""
    return (64 * m.up.weight).to(torch.int8).to(x.dtype) * m.up.bias[:, None]


def residual_then_norm(m: Block, x: Tensor) -> tuple[Tensor, Tensor]:
    h = x + m.drop(m.square(x))
    return m.rms(h), h


CLAIMED: dict[str, tuple[list[str], Callable[[Block, Tensor], Any]]] = {
    "gelu": (["linear"], lambda m, x: F.gelu(m.up(x))),
    "relu_residual": (["linear"], lambda m, x: F.relu(m.square(x)) + x),
    "residual": (["linear"], lambda m, x: x + m.drop(m.plain(x))),
    "conv1d": (["linear"], lambda m, x: F.gelu((x.view(-1, K) @ m.stored).view(2, 3, N), approximate="tanh")),
    "widened_weight": (["linear"], lambda m, x: F.gelu(F.linear(x, dequantized(m, x)))),
    "norm_first": (["norm_linear"], lambda m, x: m.up(m.layer(x))),
    "norm_dropout_silu": (["norm_linear"], lambda m, x: F.silu(m.up(m.drop(m.rms(x))))),
    "norm_last": (["linear_norm"], lambda m, x: m.layer(m.square(x))),
    "residual_then_norm": (["linear_norm"], residual_then_norm),
    "gate": (["gated_linear"], gate),
    "two": (["linear", "linear"], lambda m, x: m.down(F.gelu(m.up(x))) + x),
    "chain": (["linear_norm", "linear"], lambda m, x: F.relu(m.up(m.layer(m.square(x) + x)))),
}


def lowered(body: Callable[..., Any], x: Tensor) -> tuple[list[str], Any, Any]:
    """Template calls of a lowered graph, its outputs, and those of the module itself."""
    model = Block(body).eval().to(x.dtype)
    gm = capture(model, x)
    sources = dict(model.named_parameters())
    args = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            named = [
                p
                for name, p in sources.items()
                if node.target.lower().rstrip("_").endswith(name.replace(".", "_parameters_"))
            ]
            args.append(named[0] if named else x.clone())
    report = fuse(gm)
    assert report.notes == []
    with torch.no_grad():
        return calls(gm), gm(*args), model(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CLAIMED)
def test_claimed_segments_compute_what_they_did(name: str, dtype: torch.dtype) -> None:
    expected, body = CLAIMED[name]
    found, out, want = lowered(body, torch.randn(2, 3, K).to(dtype))
    assert found == expected
    tolerance = {} if dtype == torch.float32 else {"atol": 0.05, "rtol": 0.05}
    wants = want if isinstance(want, tuple) else (want,)
    for got, value in zip(out, wants, strict=True):
        torch.testing.assert_close(got, value, **tolerance)


def leaked(m: Block, x: Tensor) -> tuple[Tensor, Tensor]:
    h = m.up(x)
    return F.gelu(h), h


def reversed_gate(m: Block, x: Tensor) -> Tensor:
    a, b = m.pair(x).chunk(2, -1)
    return a * F.silu(b)


def doubled(m: Block, x: Tensor) -> Tensor:
    h = m.square(x)
    return h + h


def shared_norm(m: Block, x: Tensor) -> Tensor:
    h = m.layer(x)
    return m.square(h) + h.sin()


REFUSED: dict[str, tuple[slice, str, Callable[[Block, Tensor], Any]]] = {
    "leaked": (slice(0, 2), "the value of linear 8>6 is used elsewhere as well", leaked),
    "reversed": (slice(0, 2), "the gate is not the first half of the GEMM", reversed_gate),
    "unpacked": (slice(2, 4), "stof.optimize packs their weights", lambda m, x: F.silu(m.up(x)) * m.up(x + 1)),
    "doubled": (slice(0, 2), "adds a value to itself", doubled),
    "norm_shared": (slice(0, 2), "the value of layer_norm is used elsewhere as well", shared_norm),
    "strangers": (slice(0, 2), "gelu does not read linear 8>6", lambda m, x: (m.up(x), F.gelu(x))),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_says_why(name: str) -> None:
    where, reason, body = REFUSED[name]
    operators = recognize_operators(capture(Block(body).eval(), torch.randn(2, 3, K)).graph)
    served, refused = find_matches(operators[where], KernelPolicy.REFERENCE)
    assert served == []
    assert any(reason in line for line in refused), refused


GPU = torch.device("cuda", 0)
HALF, SINGLE, DOUBLE = torch.float16, torch.float32, torch.float64


@pytest.mark.parametrize(
    ("device", "dtype", "capability", "by_rule", "measured"),
    [
        (torch.device("cpu"), HALF, None, "cpu", "cpu"),
        (GPU, HALF, (8, 0), "", ""),
        (GPU, HALF, (7, 5), "compute capability 7.5", "compute capability 7.5"),
        (GPU, SINGLE, (9, 0), "float32 without measuring", ""),
        (GPU, DOUBLE, (9, 0), "float64", "float64"),
    ],
)
def test_what_has_no_kernel_is_named(
    device: torch.device,
    dtype: torch.dtype,
    capability: tuple[int, int] | None,
    by_rule: str,
    measured: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert no_kernel(device, dtype, KernelPolicy.DEFAULTS) == by_rule
    assert no_kernel(device, dtype, KernelPolicy.KERNELS) == measured
    assert no_kernel(device, dtype, KernelPolicy.REFERENCE) == ""


@pytest.mark.parametrize("name", [name for name in CLAIMED if name != "conv1d"])
def test_without_a_kernel_nothing_is_claimed_and_one_line_says_so(name: str) -> None:
    gm = capture(Block(CLAIMED[name][1]).eval(), torch.randn(2, 3, K))
    before = [str(node.target) for node in gm.graph.nodes]
    report = pipeline.fuse(gm)
    assert [str(node.target) for node in gm.graph.nodes] == before
    assert report.notes == ["no template kernel for cpu"]
    assert all((row.template, row.reason) == ("", "") for row in report.segments)


def test_graphs_without_products_miss_no_kernel() -> None:
    assert pipeline.fuse(capture(nn.Softmax(-1), torch.randn(2, K))).notes == []


def test_products_in_another_dtype_are_left() -> None:
    def mixed(m: Block, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.gelu(m.up(x))

    gm = capture(Block(mixed).eval(), torch.randn(2, K))
    report = fuse(gm)
    assert calls(gm) == []
    assert report.notes == ["the whole graph is left to Inductor: it turns autocast on or off inside"]


def test_autocast_from_outside_is_left() -> None:
    model, x = Block(lambda m, x: F.gelu(m.up(x))).eval(), torch.randn(2, K)
    with torch.autocast("cpu", torch.bfloat16):
        gm = capture(model, x)
    report = fuse(gm)
    assert calls(gm) == []
    assert "dtypes differ: bfloat16, float32" in report.segments[0].reason


def test_sizes_that_depend_on_data_leave_the_graph_alone() -> None:
    def filtered(m: Block, x: Tensor) -> Tensor:
        return F.gelu(m.up(x[x[:, 0] > 0]))

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        gm = capture(Block(filtered).eval(), torch.randn(4, K))
    report = fuse(gm)
    assert calls(gm) == []
    assert "sizes depend on data" in report.notes[0]


def test_writes_amid_a_segment_keep_it_from_being_claimed() -> None:
    def written(m: Block, x: Tensor) -> Tensor:
        h = m.up(x)
        x.add_(1)
        return F.gelu(h)

    gm = capture(Block(written).eval(), torch.randn(2, K))
    assert calls(gm) == []
    fuse(gm)
    assert calls(gm) == []

    def before(m: Block, x: Tensor) -> Tensor:
        x.add_(1)
        return F.gelu(m.up(x))

    gm = capture(Block(before).eval(), torch.randn(2, K))
    fuse(gm)
    assert calls(gm) == ["linear"]


def test_graphs_that_change_what_they_are_given_are_told() -> None:
    def changes(body: Callable[[Tensor], Tensor]) -> bool:
        return may_mutate_inputs(capture(body, torch.randn(2, K)).graph)

    def own(x: Tensor) -> Tensor:
        y = x + 1
        y += x
        y[0] = 3.0
        return y.view(-1).mul_(2)

    assert not changes(own)
    assert changes(lambda x: x.add_(1))
    assert changes(lambda x: x.view(-1)[2:].mul_(3))
    assert changes(lambda x: unknown(x))


@torch._dynamo.allow_in_graph
def unknown(x: Tensor) -> Tensor:
    """Dynamo does not look inside, so it may write."""
    return x.sin()


def test_what_may_write_keeps_a_segment_from_being_claimed() -> None:
    def opaque(m: Block, x: Tensor) -> tuple[Tensor, Tensor]:
        h = m.up(x)
        return unknown(x), F.gelu(h)

    gm = capture(Block(opaque).eval(), torch.randn(2, K))
    report = fuse(gm)
    assert calls(gm) == []
    assert report.fused == products(gm) == 1


@torch.library.custom_op("stof_tests::tripled", mutates_args=("x",))
def tripled(places: Tensor, x: Tensor) -> None:
    x.mul_(3)


WRITERS: dict[str, Callable[[Tensor], object]] = {
    "by keyword": lambda x: F.hardswish(x, inplace=True),
    "by place": lambda x: F.leaky_relu(x, 0.1, True),
    "operator": lambda x: tripled(torch.zeros(1, dtype=torch.long), x),
    "operator without overload": lambda x: torch.ops.stof_tests.tripled(torch.zeros(1, dtype=torch.long), x),
    "out": lambda x: torch.where(x > 0, x, x.exp(), out=x),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_spelling_of_a_write_keeps_its_place(name: str) -> None:
    """GEMMs with rows of one weight stay on their sides of a write to what they read."""

    def body(m: Block, x: Tensor) -> tuple[Tensor, Tensor]:
        rows = F.linear(x, m.square.weight[:4])
        WRITERS[name](x)
        return rows, F.linear(x, m.square.weight[4:])

    model, x = Block(body).eval(), torch.randn(2, K)
    gm = capture(model, x.clone())
    assert may_mutate_inputs(gm.graph)
    fuse(gm)
    names = [op_name(node) for node in gm.graph.nodes]
    assert names.count("stof.linear") == 2


def test_integer_writes_do_not_matter() -> None:
    def counted(m: Block, x: Tensor) -> tuple[Tensor, Tensor]:
        count = torch.zeros(2, dtype=torch.long)
        h = m.up(x)
        count += 1
        return F.gelu(h), count

    gm = capture(Block(counted).eval(), torch.randn(2, K))
    fuse(gm)
    assert calls(gm) == ["linear"]


NAMED: dict[str, tuple[Callable[[Block, Tensor], Tensor], list[str]]] = {
    "chunk": (lambda m, x: _gated(torch.chunk(input=m.pair(x), chunks=2, dim=-1)), ["gated_linear"]),
    "split": (lambda m, x: _gated(torch.split(tensor=m.pair(x), split_size_or_sections=N, dim=-1)), ["gated_linear"]),
    "dropout": (lambda m, x: m.layer(F.dropout(input=m.square(x), p=0.1, training=False)), ["linear_norm"]),
    "reshape": (lambda m, x: F.gelu(torch.reshape(input=m.up(x), shape=(-1, N))), ["linear"]),
    "mean": (lambda m, x: m.up(x * torch.rsqrt(torch.mean(input=x * x, dim=-1, keepdim=True) + 1e-6)), ["rms_linear"]),
    "linear": (lambda m, x: _gated([F.linear(x, weight=half) for half in m.pair.weight.chunk(2)]), []),
    "rows": (
        lambda m, x: _gated([F.linear(x, weight=m.pair.weight[i : i + N]) for i in (0, N)]),
        ["gated_linear"],
    ),
}


def _gated(halves: Sequence[Tensor]) -> Tensor:
    return F.silu(halves[0]) * halves[1]


@pytest.mark.parametrize("name", NAMED)
def test_arguments_may_be_given_by_name(name: str) -> None:
    function, expected = NAMED[name]
    gm = capture(Block(function).eval(), torch.randn(2, K))
    fuse(gm)
    assert calls(gm) == expected


def test_norms_over_symbolic_sizes_and_function_transforms_are_left() -> None:
    gm = capture(Block(lambda m, x: F.layer_norm(m.square(x), x.shape)).eval(), torch.randn(3, K), dynamic=True)
    fuse(gm)
    assert calls(gm) == []
    gm = capture(Block(lambda m, x: torch.vmap(lambda row: F.gelu(m.up(row)))(x)).eval(), torch.randn(3, 5, K))
    assert "torch.func" in fuse(gm).notes[0]


def test_symbolic_sizes_stay_symbolic() -> None:
    model = Block(lambda m, x: m.layer(m.square(x) + x)).eval()
    gm = capture(model, torch.randn(5, 7, K), dynamic=True)
    report = fuse(gm)
    assert calls(gm) == ["linear_norm"]
    assert report.notes == []
    (node,) = (n for n in gm.graph.nodes if "linear_norm" in str(n.target))
    assert not all(isinstance(size, int) for size in node.meta["example_value"][0].shape)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(("k", "n", "shape"), [(0, N, (2, 3, 0)), (K, 0, (2, 3, K)), (K, N, (2, 0, K)), (0, 0, (0, 0))])
def test_products_without_elements_are_left(k: int, n: int, shape: tuple[int, ...]) -> None:
    model, x = nn.Sequential(nn.LayerNorm(k), nn.Linear(k, n), nn.GELU()).eval(), torch.randn(shape)
    gm = capture(model, x)
    report = fuse(gm, Search(SegmentTimer(rounds=1), 60))
    assert calls(gm) == []
    assert "takes no time" in report.segments[0].reason
    assert (report.measurements, report.notes) == (0, [])


def test_new_nodes_and_rewritten_graphs_fix_no_size() -> None:
    """Padding asks for sizes as numbers unless it is run as Dynamo runs it; so do GEMMs under torch 2.11."""
    gm = capture(Block(lambda m, x: F.pad(F.gelu(m.up(x)), (1, 1))).eval(), torch.randn(5, 7, K), dynamic=True)
    (pad,) = (node for node in gm.graph.nodes if node.op == "call_function" and "pad" in str(node.target))
    product = next(node for node in gm.graph.nodes if "linear" in str(node.target))
    shapes = pad.meta["example_value"].fake_mode.shape_env
    before = len(shapes.guards)
    for node in (pad, product):
        with gm.graph.inserting_before(pad.next):
            new = insert_call(gm.graph, node, node.op, node.target, node.args)
        assert is_symbolic(new.meta["example_value"].shape[:1])
        gm.graph.erase_node(new)
    report = fuse(gm)
    assert calls(gm) == ["linear"]
    assert report.notes == []
    assert len(shapes.guards) == before


def test_copies_of_graphs_know_where_parameters_come_from() -> None:
    gm = capture(Block(lambda m, x: m.up(x)).eval(), torch.randn(2, K))
    before = [getattr(node, "_dynamo_source", None) for node in gm.graph.nodes]
    assert any(before)
    assert [getattr(node, "_dynamo_source", None) for node in copy_graph(gm.graph).nodes] == before


def test_a_graph_that_no_longer_fits_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    gm = capture(Block(lambda m, x: F.gelu(m.up(x))).eval(), torch.randn(2, K))
    monkeypatch.setattr("stof.fusion.pipeline.propagate", lambda gm: "a view does not fit")
    report = fuse(gm)
    assert calls(gm) == []
    assert report.fused == 0
    assert "a view does not fit" in report.notes[0]


def test_results_read_before_all_inputs_exist() -> None:
    def crossed(m: Block, x: Tensor) -> Tensor:
        h = m.square(x)
        other = h.sin()
        return m.layer(h + other)

    operators = recognize_operators(capture(Block(crossed).eval(), torch.randn(2, K)).graph)
    kinds = [str(o.kind) for o in operators]
    assert kinds == ["linear", "other", "residual", "layer_norm"]
    gm = capture(Block(crossed).eval(), torch.randn(2, K))
    assert GraphOrder(gm.graph).writes == []
    fuse(gm)
    assert calls(gm) == []
