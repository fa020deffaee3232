"""`torch.compile(model, backend="stof")` on real model families: same outputs, one graph, the expected templates."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

import stof
from stof.errors import ArgumentError
from stof.fusion.measure.model_comparison import PLAIN, RULED, SEARCHED
from stof.fusion.planner.match import TemplateMatch
from stof.fusion.planner.search_space import Progress
from stof.integrations.torch import compile as torch_compile
from stof.integrations.torch import compile_options
from stof.integrations.torch.compile import CompileOptions, FusionReport, stof_backend
from tests.integrations import models


def make(family: str) -> tuple[nn.Module, dict[str, Tensor]]:
    if family == "vit":
        return models.vit(), {"pixel_values": torch.randn(2, 3, 24, 24)}
    model = models.t5().encoder if family == "t5" else getattr(models, family)()
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    return model, models.batch()


def run(model: nn.Module, inputs: dict[str, Tensor], **options: Any) -> tuple[Tensor, list[FusionReport]]:
    """The compiled model's first output, and the reports of its graphs. References serve, as kernels would on a GPU."""
    reports: list[FusionReport] = []
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(
            model, backend=stof_backend, options={"report": reports.append, "references": True, **options}
        )
        return compiled(**inputs)[0], reports


def templates(report: FusionReport) -> list[str]:
    """What computes segments of several operators; these products are small, so those by themselves are claimed too."""
    alone = [segment for segment in report.segments if " + " not in segment.operators]
    assert all(segment.template == "linear" for segment in alone if segment.operators.startswith("linear"))
    return [segment.template for segment in report.segments if segment.template and segment not in alone]


# Per layer; what follows the last layer differs.
EXPECTED = {
    "bert": ["linear_norm", "linear", "linear_norm"] * 2,
    "gpt2": ["norm_linear"] + ["linear_norm", "linear", "linear_norm"] * 2,
    "llama": ["linear_norm", "linear_norm"] * 2,
    "t5": ["linear_norm", "linear", "linear_norm"] * 2,
    "vit": ["linear_norm", "linear", "linear_norm"] * 2,
}


@pytest.fixture
def without_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewritten graphs run as they are: what is under test is ours, and compiling takes most of the time."""
    monkeypatch.setattr(torch_compile, "_inductor", lambda gm, inputs, options, digest: gm.forward)


@pytest.mark.parametrize("family", EXPECTED)
@pytest.mark.usefixtures("without_inductor")
def test_same_outputs_in_one_graph(family: str) -> None:
    model, inputs = make(family)
    with torch.no_grad():
        expected = model(**inputs)[0]
    out, reports = run(model, inputs)
    torch.testing.assert_close(out, expected, atol=3e-5, rtol=1e-4)
    (report,) = reports
    assert report.notes == []
    assert templates(report) == EXPECTED[family]


# Packed weights make the first layer's norm serve one product, and gate and up projection one template.
PACKED = {
    "bert": EXPECTED["bert"],
    "llama": ["norm_linear"] + ["linear_norm", "gated_linear", "linear_norm"] * 2,
}


@pytest.mark.parametrize("family", PACKED)
def test_optimised_models_give_the_same_outputs(family: str) -> None:
    model, inputs = make(family)
    with torch.no_grad():
        expected = model(**inputs)[0]
    reports: list[FusionReport] = []
    torch._dynamo.reset()
    optimised = stof.optimize(model, report=reports.append, references=True)
    with torch.inference_mode():
        out = optimised(**inputs)[0]
    # Keys that padding drops may get any value in the rows that stand for padding.
    valid = inputs["attention_mask"].bool() if "attention_mask" in inputs else torch.ones(out.shape[:2]).bool()
    torch.testing.assert_close(out[valid], expected[valid], atol=3e-5, rtol=1e-4)
    (report,) = reports
    assert report.notes == []
    assert templates(report) == PACKED[family]
    assert stof.integrations.torch.unpack_weights(model) > 0


@pytest.mark.parametrize("effort", ["none", "quick"])
@pytest.mark.usefixtures("without_inductor")
def test_a_cpu_is_left_to_inductor(effort: str, tmp_path: Path) -> None:
    """Weights are packed and attention is ours all the same; no operator hides what Inductor is to compile."""
    model, inputs = make("llama")
    with torch.no_grad():
        expected = model(**inputs)[0]
    reports: list[FusionReport] = []
    called: list[str] = []
    inner = torch_compile._inductor

    def inductor(gm: Any, *args: Any) -> Any:
        called.extend(str(node.target) for node in gm.graph.nodes if node.op == "call_function")
        return inner(gm, *args)

    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(torch_compile, "_inductor", inductor)
        out = stof.optimize(model, report=reports.append, effort=effort, store=tmp_path)(**inputs)[0]
    valid = inputs["attention_mask"].bool()
    torch.testing.assert_close(out[valid], expected[valid], atol=3e-5, rtol=1e-4)
    (report,) = reports
    assert report.notes == ["no template kernel for cpu"]
    assert (report.fused, report.measurements) == (0, 0)
    assert [name for name in called if name.startswith("stof.") and "attention" not in name] == []
    assert any("attention" in name for name in called)
    assert sum("linear" in name for name in called) == 4 * 2 + 1  # packed: q, k, v in one, gate and up in one
    assert list(tmp_path.iterdir()) == []


def add_adapter(layer: nn.Linear) -> None:
    """As many trainers add LoRA, and accelerate its hooks: the instance gets another `forward`."""
    down, up, before = torch.randn(3, layer.in_features), torch.randn(layer.out_features, 3), layer.forward
    layer.forward = lambda x: before(x) + x @ down.T @ up.T  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize("when", ["before", "after", "after a call"])
@pytest.mark.usefixtures("without_inductor")
def test_layers_keep_a_forward_that_was_replaced(when: str) -> None:
    model = models.llama(num_hidden_layers=1)
    model.config.use_cache = False
    ids = torch.randint(1, models.VOCABULARY, (2, 9))
    layer = model.model.layers[0]

    def add() -> None:
        add_adapter(layer.self_attn.q_proj)
        add_adapter(layer.mlp.gate_proj)

    if when == "before":
        add()
    torch._dynamo.reset()
    fast = stof.optimize(model, store=False)
    with torch.inference_mode():
        if when == "after a call":
            fast(ids)
        if when != "before":
            add()
        eager, compiled = model(ids).logits, fast(ids).logits
        for one in (layer.self_attn.q_proj, layer.mlp.gate_proj):
            del one.forward
        assert not torch.allclose(eager, model(ids).logits, atol=1e-3)
    torch.testing.assert_close(compiled, eager, atol=3e-5, rtol=1e-4)


@pytest.mark.usefixtures("without_inductor")
def test_layers_that_load_their_weights_when_they_run() -> None:
    model = models.llama(num_hidden_layers=1)
    model.config.use_cache = False
    ids = torch.randint(1, models.VOCABULARY, (2, 9))
    with torch.inference_mode():
        expected = model(ids).logits
    for layer in [part for part in model.modules() if type(part) is nn.Linear]:
        weight = layer.weight.detach()
        layer.to("meta")
        layer.forward = functools.partial(nn.functional.linear, weight=weight)  # type: ignore[method-assign]
    torch._dynamo.reset()
    with torch.inference_mode():
        out = stof.optimize(model, store=False)(ids).logits
    torch.testing.assert_close(out, expected, atol=3e-5, rtol=1e-4)


@pytest.mark.usefixtures("without_inductor")
def test_no_mask_is_none_of_an_earlier_optimize() -> None:
    from stof.integrations import transformers as hf

    model, ids = models.bert(num_hidden_layers=1), torch.randint(1, models.VOCABULARY, (2, 24))

    def result(**options: Any) -> Tensor:
        """Of the model that `optimize` prepares; compiled code calls the same layers."""
        stof.optimize(model, store=False, **options)
        with torch.inference_mode():
            out: Tensor = model(ids)[0]
        return out

    same = functools.partial(torch.testing.assert_close, atol=3e-5, rtol=1e-4)
    with torch.inference_mode():
        plain = model(ids)[0]
    window, wider = stof.masks.sliding_window(1, 1), stof.masks.sliding_window(3, 3)
    masked = {mask: result(mask=mask) for mask in (window, wider)}
    assert not torch.allclose(masked[window], masked[wider], atol=1e-3)
    for options in ({}, {"attention": False}):
        for mask in (window, wider, window):
            same(result(mask=mask), masked[mask])
        same(result(**options), plain)
    result(mask=wider)
    hf.sparsify(model, None)
    with hf.sparsify(model, window):  # set by hand: not taken for one of `optimize`
        same(result(), masked[window])
    same(result(), plain)
    torch._dynamo.reset()
    with torch.inference_mode():
        same(stof.optimize(model, mask=window, store=False)(ids)[0], masked[window])
        same(stof.optimize(model, store=False)(ids)[0], plain)


def test_options_in_training_mode_are_refused_before_anything_is_changed() -> None:
    model, _ = make("bert")
    before = set(model.state_dict())
    with pytest.raises(ArgumentError, match=r"call model\.eval\(\) first"):
        stof.optimize(model.train(), store=False)
    assert dict(model.named_parameters()).keys() == before - set(dict(model.named_buffers()))


def test_a_mask_needs_our_attention() -> None:
    with pytest.raises(ArgumentError, match="a mask needs stof's attention"):
        stof.optimize(nn.Linear(2, 2).eval(), mask=stof.masks.causal(), attention=False)


def test_second_compilation_comes_from_the_cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model, inputs = make("bert")
    first, (report,) = run(model, inputs)
    counters.clear()
    second, (again,) = run(model, inputs)
    assert torch.equal(first, second)
    assert report.digest == again.digest
    assert counters["inductor"]["fxgraph_cache_bypass"] == counters["inductor"]["fxgraph_cache_miss"] == 0
    assert counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"] >= 1


def test_the_entry_point_gives_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an installed package is found, whether or not this one is."""
    from torch._dynamo.backends import registry

    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 has it")
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    group = "torch_dynamo_backends"
    entry = EntryPoint("stof", project["entry-points"][group]["stof"], group)
    monkeypatch.setitem(registry._BACKENDS, "stof", entry)
    monkeypatch.delitem(registry._COMPILER_FNS, "stof", raising=False)
    assert registry.lookup_backend("stof") is stof_backend
    registry._COMPILER_FNS.pop("stof")


def test_documented_paths_of_version_0_2_are_the_same_objects() -> None:
    from stof.integrations import compile_options as options_path
    from stof.integrations import torch_compile as compile_path

    assert compile_path.optimize is torch_compile.optimize
    assert compile_path.unpack_weights is torch_compile.unpack_weights
    assert options_path.CompileOptions is CompileOptions


def test_training_is_refused() -> None:
    torch._dynamo.reset()
    layer = nn.Linear(8, 8)
    with pytest.raises(Exception, match="inference only, and this call records gradients") as caught:
        torch.compile(layer, backend=stof_backend)(torch.randn(2, 8))
    assert "torch.inference_mode()" in str(caught.value)


def test_efforts_measure_and_compare_the_whole_model(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU()).eval()
    inputs = {"input": torch.randn(4, 8)}
    with torch.no_grad():
        expected = model(**inputs)[0]
    seen: list[Progress] = []
    out, (report,) = run(model, inputs, effort="quick", budget_s=600, progress=seen.append, store=tmp_path)
    torch.testing.assert_close(out, expected, atol=3e-5, rtol=1e-4)
    assert report.measurements > 0
    assert seen
    assert not report.fused or any(note.startswith("whole model:") for note in report.notes)
    # A second process finds everything measured.
    again, (warm,) = run(model, inputs, effort="quick", store=tmp_path)
    assert warm.measurements == 0
    assert warm.segments == report.segments
    torch.testing.assert_close(again, expected, atol=3e-5, rtol=1e-4)


@pytest.mark.usefixtures("without_inductor")
def test_a_whole_model_that_is_slower_loses_its_templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Timer:
        """Every template is fast."""

        def __init__(self) -> None:
            self.failures: dict[Any, str] = {}

        def __call__(self, claim: TemplateMatch, configs: Sequence[str | None]) -> list[float]:
            return [2.0 if config is None else 1.0 for config in configs]

    monkeypatch.setattr(compile_options, "SegmentTimer", Timer)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU()).eval()
    x = torch.randn(2, 8)
    for kept in (True, False):
        times = {SEARCHED: 1.0 if kept else 3.0, RULED: 3.0, PLAIN: 2.0}
        timer = functools.partial(lambda times, calls, device: times, times)
        monkeypatch.setattr(torch_compile, "wall_us", timer)
        for notes in (1, 1):  # the second time from the store
            out, (report,) = run(model, {"input": x}, effort="quick", store=tmp_path / str(kept))
            assert report.fused == kept
            assert len(report.notes) == notes
            torch.testing.assert_close(out, model(x)[0])


@pytest.mark.parametrize("fastest", [SEARCHED, RULED, PLAIN])
@pytest.mark.usefixtures("without_inductor")
def test_what_the_rules_choose_takes_part(fastest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Timer:
        """The product alone is fast in a template, with its activation it is not."""

        def __init__(self) -> None:
            self.failures: dict[Any, str] = {}

        def __call__(self, claim: TemplateMatch, configs: Sequence[str | None]) -> list[float]:
            return [2.0 if config is None else 1.0 if len(claim.operators) == 1 else 3.0 for config in configs]

    races: list[set[str]] = []

    def wall_us(calls: Mapping[str, Any], device: torch.device) -> dict[str, float]:
        races.append(set(calls))
        return {name: 1.0 if name == fastest else 2.0 for name in calls}

    monkeypatch.setattr(compile_options, "SegmentTimer", Timer)
    monkeypatch.setattr(torch_compile, "wall_us", wall_us)
    model, x = nn.Sequential(nn.Linear(8, 16), nn.GELU()).eval(), torch.randn(2, 8)
    expected = {SEARCHED: ["linear 8>16"], RULED: ["linear 8>16 + gelu"], PLAIN: []}[fastest]
    for _ in range(3):  # later ones go by the store
        out, (report,) = run(model, {"input": x}, effort="quick", store=tmp_path)
        assert [row.operators for row in report.segments if row.template] == expected
        torch.testing.assert_close(out, model(x)[0])
    assert races == [{SEARCHED, RULED, PLAIN}]
    # What lost to the rules is not what the rules go by from now on.
    _, (report,) = run(model, {"input": x}, store=tmp_path)
    by_rule = [row.operators for row in report.segments if row.template]
    assert by_rule == (expected if fastest == RULED else ["linear 8>16"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"effort": "most"}, "effort 'most' is none of none, quick, full"),
        ({"effort": "quick", "budget_s": 0}, "positive number of seconds, got 0"),
        ({"budget_s": 3}, "effort 'none' measures nothing"),
        ({"effort": "full", "deterministic": True}, "deterministic=True measures nothing"),
        ({"references": "always"}, "references is True or False, got 'always'"),
        ({"cuda_graphs": 1}, 'cuda_graphs is True, False or "whole", got 1'),
        ({"fold": "norms"}, "fold is True or False, got 'norms'"),
    ],
)
def test_options_that_contradict_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        CompileOptions.parse(options)


def test_deterministic_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    torch._dynamo.reset()
    options = {"deterministic": True, "references": True, "report": True}
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU()).eval()
    x = torch.randn(2, 8)
    with torch.no_grad():
        out = torch.compile(model, backend=stof_backend, options=options)(x)
        torch.testing.assert_close(out, model(x))
    assert "1 of 1 segments computed by templates" in capsys.readouterr().err


@pytest.mark.usefixtures("without_inductor")
def test_dynamic_lengths_compile_once() -> None:
    model = models.bert(num_hidden_layers=1)
    reports: list[FusionReport] = []
    options = {"references": True, "report": reports.append}
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(model, backend=stof_backend, dynamic=True, options=options)
        for length in (9, 12, 17):
            if length == 12:
                reports.clear()  # Dynamo may start over within the first call, to specialise on a module's numbers
            ids = torch.randint(1, models.VOCABULARY, (2, length))
            torch.testing.assert_close(compiled(ids)[0], model(ids)[0], atol=3e-5, rtol=1e-4)
            assert all(templates(report) == EXPECTED["bert"][:3] for report in reports)
            assert bool(reports) == (length == 9)


def test_unknown_options_are_named() -> None:
    with pytest.raises(ArgumentError, match=r"no such option: speed; backend 'stof' takes effort"):
        CompileOptions.parse({"speed": 11})
    with pytest.raises(ArgumentError, match="option experimental is removed, leave it out"):
        stof.optimize(torch.nn.Linear(2, 2), experimental=True)
    with pytest.raises(ArgumentError, match="option twins is removed, give references instead"):
        stof.optimize(torch.nn.Linear(2, 2), twins=True)


def test_modes_are_refused() -> None:
    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(Exception, match="has no modes"):
        torch.compile(nn.ReLU(), backend=stof_backend, mode="max-autotune")(torch.randn(3))


def test_unclaimed_graphs_go_to_inductor() -> None:
    out, (report,) = run(nn.Sequential(nn.Tanh(), nn.Softmax(-1)), {"input": torch.randn(3, 5)})
    assert out.shape == (5,)
    assert report.fused == 0


def test_a_model_whose_whole_calls_are_recorded_is_copied_and_written() -> None:
    model = nn.Linear(8, 8).eval()
    fast = stof.optimize(model, cuda_graphs="whole", store=False)
    x = torch.randn(2, 8)
    with torch.inference_mode():
        for same in (fast, copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
            torch.testing.assert_close(same(x), model(x))


def test_options_that_nobody_gave() -> None:
    """By default nothing is measured, told or recorded, and every template is settled."""
    expected = {"effort": "none", "budget_s": None, "cuda_graphs": False, "deterministic": False, "fold": False}
    expected |= {"references": False, "report": False, "progress": False, "store": True, "lock": None}
    assert {name: value for name, value in vars(CompileOptions()).items() if name in expected} == expected
