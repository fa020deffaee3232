"""`benchmarks models` and `kernels`: same masks in every form, no time for what is wrong, stops lose little."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import Tensor, nn

pytest.importorskip("transformers")

from benchmarks.cli import models as bench_models
from benchmarks.models import attention_peers
from benchmarks.models import compare as model_race
from benchmarks.models import precompile as model_warm
from benchmarks.models.attention_peers import flex_mask, with_attention
from benchmarks.models.compare import COMPILED, KEY, Plan, Row, impls_of, in_order, run_case, speedups
from benchmarks.models.kernel_profile import GAPS, LONGEST, Ran, Share, by_kind, kind_of, shares
from benchmarks.results_io import RowFile
from stof.errors import ArgumentError, StofError
from stof.testing import models
from stof.testing.models import Case, mask_of

CPU = torch.device("cpu")
PLAN = Plan(CPU, torch.float32, rounds=1)
TINY: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}


@pytest.mark.parametrize(
    ("model", "mask"),
    [("vit", "neighborhood"), *((model, mask) for model in ("bert", "gpt2") for mask in models.MASKS[:-1])],
)
def test_masks_are_the_same_in_every_form(model: str, mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (models, attention_peers):
        monkeypatch.setattr(module, "WINDOW", 20)
    length = 257 if model == "vit" else 256
    case = Case(model, 1, length, mask)
    value, blocks = mask_of(case), flex_mask(case, CPU)
    q, k = torch.arange(length)[:, None], torch.arange(length)[None]
    dense = value.to_dense(length)[0, 0] if value is not None else (q >= k) | torch.tensor(model == "bert")
    of_flex = blocks.mask_mod(0, 0, q, k) if blocks is not None else torch.ones(length, length, dtype=torch.bool)
    assert torch.equal(dense, of_flex.expand(length, length))


def test_gpt2_takes_flex_attention_where_it_is_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to its first attention, which compiling for a CPU takes 10 s for."""
    monkeypatch.setitem(models._SIZES, "gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 30000})
    taken: list[Any] = []

    def stop(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        taken.append((query.shape, mask))
        raise StopIteration

    from transformers import AttentionInterface

    monkeypatch.setitem(AttentionInterface._global_mapping, "flex_attention", stop)
    case = Case("gpt2", 1, 128, "window+sinks")
    changed, arguments = with_attention(models.build("gpt2", 128), case, "flex", CPU)
    with torch.no_grad(), pytest.raises(StopIteration):
        changed(**models.inputs_of(case, CPU), **arguments)
    assert taken == [((1, 2, 128, 16), arguments["attention_mask"])]


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ArgumentError, match="unknown model 'opt'"):
        models.build("opt", 8)
    with pytest.raises(ArgumentError, match="unknown model 'opt'"):
        Case.parse("opt,1,8,full")
    with pytest.raises(ArgumentError, match="a case is model,batch,length,mask"):
        Case.parse("bert,1,many,full")
    with pytest.raises(ArgumentError, match="no mask 'spiral'"):
        mask_of(Case("bert", 1, 8, "spiral"))
    with pytest.raises(ArgumentError, match="no mask 'bigbird' for vit"):
        mask_of(Case("vit", 1, 8, "bigbird"))
    with pytest.raises(ArgumentError, match="unknown implementation 'magic'"):
        impls_of("peers magic")


def test_groups_and_order() -> None:
    impls = impls_of("reduce-overhead-sdpa peers ours")
    assert impls[0] == "reduce-overhead-sdpa"
    assert len(impls) == 9
    assert set(COMPILED) < set(impls)
    cases = [Case.parse(text) for text in bench_models._CASES.split()]
    assert " ".join(map(str, cases)) == bench_models._CASES
    order = list(in_order(cases, impls))
    assert sorted(order, key=repr) == sorted(((case, impl) for case in cases for impl in impls), key=repr)
    slow = [impl.startswith("max-autotune") for _, impl in order]
    assert slow == sorted(slow)
    late = [(case.model, impl) for case, impl in order if impl.startswith("max-autotune")]
    assert late[:6] == [("bert", "max-autotune-sdpa")] * 3 + [
        (model, "max-autotune-flex") for model in ("gpt2", "llama", "llama")
    ]


def test_a_case_is_checked_then_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models._SIZES, "bert", TINY)
    rows = run_case(Case("bert", 2, 64, "longformer"), ["eager-sdpa", "stof"], PLAN)
    assert [row.impl for row in rows] == ["eager-sdpa", "stof"]
    assert all(row.problem == "" and row.ms is not None and row.ms > 0 for row in rows)
    assert all(row.cosine == pytest.approx(1.0, abs=1e-6) for row in rows)


def test_wrong_and_failing_ways_have_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models._SIZES, "bert", TINY)

    def prepared(model: nn.Module, case: Case, impl: str, device: object, budget_s: object) -> Any:
        if impl == "fails":
            raise RuntimeError("no such kernel")
        for parameter in model.parameters():
            parameter.data.normal_()
        return model, {}

    monkeypatch.setattr(model_race, "prepared", prepared)
    wrong, fails = run_case(Case("bert", 1, 32, "full"), ["wrong", "fails"], PLAN)
    assert wrong.ms is None
    assert wrong.problem.startswith("WRONG: cosine")
    assert fails.ms is None
    assert fails.problem == "RuntimeError: no such kernel"


def timed(impl: str, ms: float | None, seq: int = 128) -> Row:
    return Row("bert", 1, seq, "full", "float16", impl, ms, 1.0, 1.0)


def test_speedups_are_over_the_fastest_of_ours() -> None:
    peer, other, broken = timed("default-sdpa", 3.0), timed("default-sdpa", 5.0, 512), timed("default-flex", None)
    rows = [peer, other, broken, timed("stof", 2.0), timed("stof-whole", 1.5), timed("stof-folded", None)]
    assert speedups(rows) == {peer: 2.0}
    assert bench_models.models_table(rows, CPU, "float16").row_count == len(rows)


def test_single_calls_after_a_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models._SIZES, "bert", TINY)
    (row,) = run_case(Case("bert", 1, 32, "full"), ["eager-sdpa"], replace(PLAN, rest_s=0.01))
    assert row.rested_ms is not None
    assert row.rested_ms > 0
    columns = [len(bench_models.models_table(rows, CPU, "float16").columns) for rows in ([row], [timed("stof", 2.0)])]
    assert columns[0] == columns[1] + 1


def test_rows_are_of_one_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "deep" / "models.json"
    monkeypatch.setattr("benchmarks.results_io._commit", lambda: "0123456789ab")
    RowFile(path, CPU, Row, KEY).add([timed("stof", 2.0), timed("default-sdpa", 3.0)])
    monkeypatch.setattr("benchmarks.results_io._commit", lambda: "0123456789ab+changes")
    again = RowFile(path, CPU, Row, KEY)
    assert ("bert", 1, 128, "full", "float16", "stof") in again.done()
    again.add([timed("stof", 1.0)])
    assert [(row.impl, row.ms) for row in RowFile(path, CPU, Row, KEY).rows] == [("default-sdpa", 3.0), ("stof", 1.0)]
    monkeypatch.setattr("benchmarks.results_io._commit", lambda: "ba9876543210")
    with pytest.raises(ArgumentError, match=r"commit 0123456789ab\+changes, which are not these; write to another"):
        RowFile(path, CPU, Row, KEY)
    path.write_text("{}")
    with pytest.raises(ArgumentError, match="no result of this benchmark"):
        RowFile(path, CPU, Row, KEY)


def test_a_stopped_run_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, ran = tmp_path / "models.json", []

    def run_way(subject: object, impl: str, plan: Plan) -> Row:
        ran.append(impl)
        if len(ran) == 2:
            raise KeyboardInterrupt
        return timed(impl, 2.0)

    monkeypatch.setattr(bench_models, "gpu", lambda dtype: (CPU, torch.float16))
    monkeypatch.setattr(model_race, "run_way", run_way)
    monkeypatch.setattr(model_race.Subject, "of", lambda *_: None)
    asked: dict[str, Any] = {"cases": "bert,1,128,full", "impls": "max-autotune-sdpa stof default-sdpa", "output": path}
    with pytest.raises(KeyboardInterrupt):
        bench_models.models(**asked)
    bench_models.models(**asked, resume=True)
    assert ran == ["stof", "default-sdpa", "default-sdpa", "max-autotune-sdpa"]
    assert len(RowFile(path, CPU, Row, KEY).rows) == 3
    bench_models.models(**asked, resume=True)
    bench_models.models(**asked, budget=-1.0)
    assert len(ran) == 4


def test_a_device_that_is_lost_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An illegal access fails every further call of its process: the failure is kept, what is left is for another."""
    from benchmarks import failures

    path, ran = tmp_path / "models.json", []

    def run_way(subject: object, impl: str, plan: Plan) -> Row:
        ran.append(impl)
        return Row("bert", 1, 128, "full", "float16", impl, None, 1.0, None, "RuntimeError: illegal memory access")

    monkeypatch.setattr(bench_models, "gpu", lambda dtype: (CPU, torch.float16))
    monkeypatch.setattr(model_race, "run_way", run_way)
    monkeypatch.setattr(model_race.Subject, "of", lambda *_: None)
    asked: dict[str, Any] = {"cases": "bert,1,128,full", "impls": "stof default-sdpa default-flex", "output": path}
    real = failures.device_problem
    monkeypatch.setattr(failures, "device_problem", lambda device: "lost" if len(ran) == 2 else real(device))
    with pytest.raises(typer.Exit) as ended:
        bench_models.models(**asked)
    assert ended.value.exit_code == 3
    bench_models.models(**asked, resume=True)
    assert ran == ["stof", "default-sdpa", "default-flex"]
    assert len(RowFile(path, CPU, Row, KEY).rows) == 3


def test_warming_ends_in_time_and_tells_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    told: list[str] = []
    real = subprocess.Popen

    def popen(command: list[str], **options: Any) -> Any:
        started.append(command[-1])
        code = "import time; time.sleep(60)" if "llama" in command[-1] else "raise SystemExit('no room')"
        return real([sys.executable, "-S", "-c", "pass" if "gpt2" in command[-1] else code], **options)

    monkeypatch.setattr(model_warm.subprocess, "Popen", popen)
    cases = [Case(name, 1, 8, "full") for name in ("llama", "bert", "gpt2")]
    jobs = [(case, ("stof", "stof-whole")) for case in cases]
    start = time.monotonic()
    problems = model_warm.warm(jobs, "float16", workers=2, seconds=3.0, tell=told.append)
    assert time.monotonic() - start < 20
    assert ["llama" in one for one in started] == [True, False, False]
    assert problems == [
        "bert,1,8,full stof stof-whole: no room",
        "llama,1,8,full stof stof-whole: ended for the budget",
    ]
    assert len(told) == 2
    late = model_warm.warm(jobs[1:2], "float16", workers=1, seconds=0.0)
    assert late == ["bert,1,8,full stof stof-whole: not begun"]


def test_warming_that_is_asked_to_end_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[str]] = []
    real = subprocess.Popen

    def popen(command: list[str], **options: Any) -> Any:
        started.append(real([sys.executable, "-S", "-c", "import time; time.sleep(60)"], **options))
        signal.raise_signal(signal.SIGTERM)
        return started[-1]

    monkeypatch.setattr(model_warm.subprocess, "Popen", popen)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit):
        model_warm.warm([(Case("bert", 1, 8, "full"), ("stof",))], "float16", workers=1, seconds=30.0)
    assert signal.getsignal(signal.SIGTERM) is before
    assert started[0].poll() is not None


def test_ways_that_are_alike_warm_together() -> None:
    cases = [Case("bert", 1, 8, "full"), Case("llama", 1, 8, "full")]
    impls = impls_of("ours default-sdpa peers eager-flex")
    jobs = model_warm.jobs_of([(case, impl) for case in cases for impl in impls])
    assert sorted(f"{case} {impl}" for case, some in jobs for impl in some) == sorted(
        f"{case} {impl}" for case in cases for impl in impls
    )
    assert [some for case, some in jobs if case == cases[0]] == [
        ("max-autotune-sdpa", "max-autotune-flex"),
        ("stof-attention", "stof-folded", "stof-whole"),
        ("default-sdpa", "reduce-overhead-sdpa"),
        ("default-flex", "reduce-overhead-flex", "eager-flex"),
    ]
    assert [some[0] for _, some in jobs[:2]] == ["max-autotune-sdpa"] * 2


def test_warming_keeps_no_picks_and_goes_on_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config

    monkeypatch.setitem(models._SIZES, "bert", TINY)
    seen = []

    def prepared(model: nn.Module, case: Case, impl: str, device: object) -> Any:
        if impl == "default-flex":
            raise RuntimeError("no such kernel")

        def call(**inputs: Any) -> Any:
            seen.append((config.autotune_local_cache, config.fx_graph_cache))
            return model(**inputs)

        return call, {}

    monkeypatch.setattr(model_warm, "prepared", prepared)
    before = config.autotune_local_cache, config.fx_graph_cache
    impls = ["max-autotune-sdpa", "default-flex", "stof"]
    with pytest.raises(StofError, match=r"default-flex: RuntimeError: no such kernel$"):
        model_warm.warm_here({"case": "bert,1,8,full", "impls": impls, "dtype": "float32"})
    assert seen == [(False, False), before]


def test_shares_of_kernels_add_up() -> None:
    ran = [Ran("a_gemm", 0.0, 4.0), Ran("row_norm_kernel", 3.0, 6.0), Ran("a_gemm", 8.0, 9.0), Ran("inner", 8.2, 8.4)]
    ran.append(Ran("copy", 10.0, 11.0))
    found = shares(reversed(ran))
    assert found == {"a_gemm": (2, 5.0), "row_norm_kernel": (1, 2.0), "copy": (1, 1.0), "inner": (1, 0.0)} | {
        LONGEST: (1, 2.0),
        GAPS: (1, 1.0),
    }
    assert sum(us for _, us in found.values()) == 11.0
    rows = [Share("bert", 1, 8, "full", "float16", "stof", kind_of(n), n, t, us) for n, (t, us) in found.items()]
    assert by_kind(rows) == {"product": 5.0, "norm": 2.0, "other": 4.0}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NTN", "product"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_f16_s16816gemm_relu_f16_256x128>", "product"),
        ("pingpong_gemm_kernel", "product"),
        ("triton_tem_fused_addmm_3", "product"),
        ("triton_tem_fused_flex_attention_0", "attention"),
        ("void pytorch_flash::flash_fwd_kernel<>", "attention"),
        ("fmha_cutlassF_f16_aligned_64x64_rf_sm80", "attention"),
        ("forward_kernel", "attention"),
        ("triton_per_fused_add_native_layer_norm_2", "Inductor's"),
        ("triton_poi_fused_scaled_dot_product_attention_gelu_2", "Inductor's"),
        ("row_statistics_kernel", "norm"),
        ("Memcpy DtoD (Device -> Device)", "copy"),
        ("void at::native::vectorized_elementwise_kernel<4>", "other"),
    ],
)
def test_kinds_of_kernels(name: str, kind: str) -> None:
    assert kind_of(name) == kind
