"""Backend "stof" on an NVIDIA GPU: the kernels of the templates, under Inductor and CUDA graphs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor, nn

pytest.importorskip("transformers")

import stof
from stof import masks
from stof.fusion.graph.operator_recognition import recognize_operators
from stof.fusion.measure.parallel_compile import compile_candidates
from stof.fusion.measure.segment_timer import SegmentTimer, check
from stof.fusion.pipeline import Search, fuse
from stof.fusion.planner import heuristics
from stof.fusion.planner.match import find_matches
from stof.fusion.records.choices import ChoiceTable, current_versions
from stof.fusion.records.report import FusionReport
from stof.fusion.templates import folded_weights, operators
from stof.fusion.templates.gemm_config import GemmConfig
from stof.fusion.templates.registry import KernelPolicy
from tests.fusion.graphs import calls, capture, products

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # Inductor's own: of LLaMA's float32 rotary tables, and of the first graph that its CUDA graphs record.
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty"),
]

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 512,
    "initializer_range": 0.1,
}


def model(family: str) -> nn.Module:
    import transformers as t

    torch.manual_seed(0)
    if family == "bert":
        return t.BertModel(t.BertConfig(**SIZES), add_pooling_layer=False).eval().cuda()
    if family == "gpt2":
        config = t.GPT2Config(n_embd=256, n_layer=3, n_head=4, use_cache=False, initializer_range=0.1)
        return t.GPT2Model(config).eval().cuda()
    config = t.LlamaConfig(**SIZES, num_key_value_heads=2, vocab_size=30000, use_cache=False)
    return t.LlamaModel(config).eval().cuda()


def exact(module: nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return module(ids)[0].double()


@pytest.mark.parametrize("cuda_graphs", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_models_by_rule(family: str, dtype: torch.dtype, cuda_graphs: bool) -> None:
    torch.compiler.reset()
    module, ids = model(family), torch.randint(1, 30000, (2, 200), device="cuda")
    expected = exact(module, ids)
    reports: list[FusionReport] = []
    module.to(dtype)
    with torch.no_grad():
        plain = module(ids)[0].double()
    optimised = stof.optimize(module, dynamic=False, cuda_graphs=cuda_graphs, report=reports.append)
    with torch.no_grad():
        for _ in range(3):  # eager warm-up, capture, replay
            out = optimised(ids)[0].double()
    assert reports[-1].fused > 0
    assert reports[-1].notes == []
    assert (out - expected).norm() <= 1.5 * (plain - expected).norm()


@pytest.mark.parametrize("cuda_graphs", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_folded_model(dtype: torch.dtype, cuda_graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # Small products would take the norms after them.
    monkeypatch.setattr(heuristics, "FEW_FLOPS", 0.0)
    torch.compiler.reset()
    module, ids = model("llama"), torch.randint(1, 30000, (2, 200), device="cuda")
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "norm" in name:
                parameter.normal_(1.0, 0.3)
    expected = exact(module, ids)
    reports: list[FusionReport] = []
    module.to(dtype)
    with torch.no_grad():
        plain = module(ids)[0].double()
        optimised = stof.optimize(module, dynamic=False, cuda_graphs=cuda_graphs, fold=True, report=reports.append)
        for _ in range(3):
            out = optimised(ids)[0].double()
    assert sum(row.template != "" and row.operators.startswith("rms_norm + ") for row in reports[-1].segments) == 3
    assert (out - expected).norm() <= 1.5 * (plain - expected).norm()
    if not cuda_graphs:  # which would go on with what they recorded
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if "norm" in name:
                    parameter.mul_(0.5)
            plain, out = module(ids)[0].double(), optimised(ids)[0].double()
        changed = model("llama")
        changed.load_state_dict(module.state_dict())
        assert (out - exact(changed, ids)).norm() <= 1.5 * (plain - exact(changed, ids)).norm()


def test_products_with_packed_weights_are_made_once_and_see_writes_to_every_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(heuristics, "FEW_FLOPS", 0.0)
    made: list[int] = []
    fold = folded_weights._fold
    monkeypatch.setattr(folded_weights, "_fold", lambda *given: made.append(1) or fold(*given))
    torch.compiler.reset()
    module, ids = model("llama").half(), torch.randint(1, 30000, (2, 200), device="cuda")
    attention = module.get_submodule("layers.0.self_attn")
    with torch.no_grad():
        optimised = stof.optimize(module, dynamic=False, fold=True, store=False)
        for _ in range(3):
            optimised(ids)
        count = len(made)
        optimised(ids)
        assert 0 < len(made) == count
        for name in ("q_proj", "k_proj", "v_proj"):
            attention.get_submodule(name).weight.mul_(-0.5)
            out, expected = optimised(ids)[0].double(), module(ids)[0].double()
            assert torch.nn.functional.cosine_similarity(out.flatten(), expected.flatten(), 0) > 0.9999


@triton.jit
def copy_rows(x_ptr, out_ptr, stride_xs, width: tl.constexpr):  # type: ignore[no-untyped-def]
    row, columns = tl.program_id(0), tl.arange(0, width)
    tl.store(out_ptr + row * width + columns, tl.load(x_ptr + row * stride_xs + columns))


def test_a_kernel_that_is_told_strides_reads_by_them() -> None:
    class Copied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(64, 64) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
            out = torch.empty(q.shape, device=q.device, dtype=q.dtype)
            copy_rows[(q.shape[0] * q.shape[1],)](q, out, q.stride(1), width=64)
            return out + k + v

    torch.compiler.reset()
    module, x = Copied().cuda().half().eval(), torch.randn(2, 33, 64, device="cuda", dtype=torch.float16)
    with torch.no_grad():
        expected = module(x)
        torch.testing.assert_close(stof.optimize(module, store=False)(x), expected, atol=4e-3, rtol=4e-3)


def test_any_length_runs_the_graph_of_the_first() -> None:
    torch.compiler.reset()
    module = model("llama").half()
    with torch.no_grad():
        optimised = stof.optimize(copy.deepcopy(module), dynamic=True)
        for place, length in enumerate((100, 57, 128, 300, 1000, 57)):
            ids = torch.randint(1, 30000, (2, length), device="cuda")
            with torch._dynamo.config.patch(error_on_recompile=place > 0):
                out = optimised(ids)[0].double()
            expected = module(ids)[0].double()
            assert torch.nn.functional.cosine_similarity(out.flatten(), expected.flatten(), 0) > 0.9999


def test_a_searched_model_is_right_and_its_search_is_kept(tmp_path: Path) -> None:
    module, ids = model("bert"), torch.randint(1, 30000, (4, 256), device="cuda")
    expected = exact(module, ids)
    module.half()
    with torch.no_grad():
        plain = module(ids)[0].double()
    reports: list[FusionReport] = []
    options: dict[str, Any] = {"effort": "quick", "budget_s": 15, "store": tmp_path, "cuda_graphs": True}
    for _ in range(2):
        torch.compiler.reset()
        optimised = stof.optimize(module, dynamic=False, report=reports.append, **options)
        with torch.no_grad():
            out = optimised(ids)[0].double()
        assert (out - expected).norm() <= 1.5 * (plain - expected).norm()
    first, second = reports
    assert first.measurements > 0
    if not any("budget" in note or "could not be told" in note for note in first.notes):
        assert second.measurements == 0
    assert any(note.startswith("whole model:") for note in first.notes)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(256, 1024), nn.Linear(1024, 256), nn.LayerNorm(256)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down(torch.nn.functional.gelu(self.up(x))))


def test_what_threads_compile_is_not_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    # No other test has this activation: what this process has compiled before would not be compiled at all.
    layer = nn.Sequential(nn.Linear(256, 1024), nn.ReLU()).eval().half().cuda()
    gm = capture(layer, torch.randn(512, 256, dtype=torch.half, device="cuda"))
    ((match, *_), _) = find_matches(recognize_operators(gm.graph)[:2], KernelPolicy.KERNELS)
    configs = match.template.configs(match.problem, KernelPolicy.KERNELS)
    some = ["", *{GemmConfig.parse(text).kind: text for text in configs if text}.values()]
    compiled: list[str] = []
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.listener = lambda *, src, cache_hit, **rest: compiled.extend(
            [src.name] * (not cache_hit)
        )
        compile_candidates([(match, some)])
        assert len(compiled) >= 3
        compiled.clear()
        assert [check(match, config) for config in some] == [""] * len(some)
    assert compiled == []


def test_a_lock_gives_the_same_model(tmp_path: Path) -> None:
    module, ids = model("bert").half(), torch.randint(1, 30000, (4, 256), device="cuda")
    reports: list[FusionReport] = []
    torch.compiler.reset()
    with torch.no_grad():
        stof.optimize(module, dynamic=False, effort="quick", budget_s=20, store=tmp_path, report=reports.append)(ids)
        lock = ChoiceTable(torch.cuda.get_device_name(), current_versions())
        for report in reports:
            report.add_to(lock)
        lock.write_lock(tmp_path / "bert.lock")
        torch.compiler.reset()
        options: dict[str, Any] = {"lock": tmp_path / "bert.lock", "store": False, "report": reports.append}
        stof.optimize(module, dynamic=False, **options)(ids)
    locked = reports[1]
    assert (locked.measurements, locked.notes) == (0, [])
    # If the whole model was not faster with templates, there are none, and nothing that parts the rest.
    kept = [[(s.start, s.template, s.config) for s in one.segments if s.template] for one in reports]
    assert kept[0] == kept[1]


def test_segments_are_timed_under_graph_replay() -> None:
    timer = SegmentTimer(rounds=2)
    gm = capture(Layer().eval().half().cuda(), torch.randn(512, 256, dtype=torch.half, device="cuda"))
    report = fuse(gm, Search(timer, seconds=60, per_segment=2))
    assert report.measurements > 4
    assert not [why for why in timer.failures.values() if why.startswith("wrong")]
    assert len(calls(gm)) + products(gm) == report.fused


@pytest.mark.parametrize(("n", "shape"), [(64, (3, 0)), (64, (0, 64)), (0, (3, 64))])
def test_products_without_elements(n: int, shape: tuple[int, ...]) -> None:
    x, residual = torch.randn(shape, device="cuda").half(), torch.randn(*shape[:-1], n, device="cuda").half()
    weight, bias = torch.randn(n, shape[-1], device="cuda").half(), torch.randn(n, device="cuda").half()
    plain = torch.nn.functional.linear(x, weight, bias)
    assert torch.equal(operators.linear(x, weight, bias, residual, "none", "64x64x64,4w,4s,tile"), plain + residual)
    h, normed = operators.linear_norm(x, weight, bias, None, None, None, "layer", 1e-5, "")
    assert torch.equal(h, plain)
    assert normed.shape == h.shape
    factors = torch.ones(shape[:-1], device="cuda")
    folded = operators.rms_linear(x, factors, torch.ones(shape[-1], device="cuda").half(), weight, bias, "none", "")
    assert torch.equal(folded, plain)


@pytest.mark.parametrize("tensors", [False, True], ids=["named", "tensor"])
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_a_sparse_mask_and_templates_together(family: str, tensors: bool) -> None:
    torch.compiler.reset()
    module, ids = model(family), torch.randint(1, 30000, (1, 512), device="cuda")
    mask = masks.longformer(32, 16)
    if tensors:
        mask = mask & masks.from_dense(torch.rand(512, 512, device="cuda") < 0.7) | masks.sliding_window(0, 0)
    own = mask if family == "bert" else masks.causal() & mask
    keep = own.to_dense(512, device="cuda")
    with torch.no_grad():
        expected = module(ids, attention_mask=keep)[0].double()
        module.half()
        plain = module(ids, attention_mask=keep)[0].double()
        out = stof.optimize(module, mask=mask, dynamic=False)(ids)[0].double()
    assert (out - expected).norm() <= 1.5 * (plain - expected).norm()
