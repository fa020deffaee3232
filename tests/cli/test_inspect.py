"""`stof inspect`, and what all commands share: errors, versions, quick help."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import stof
from stof import LayoutConfig, masks
from stof.cli.main import app
from stof.layout import orders, statistics

MASK = "longformer(window=16, global_tokens=8)"


def stof_command(*arguments: str, code: int = 0) -> Result:
    result = CliRunner(env={"COLUMNS": "100"}).invoke(app, list(arguments))
    assert result.exit_code == code, result.output
    return result


def test_shows_figures_and_a_drawing() -> None:
    out = stof_command("inspect", MASK, "--q-len", "512").stdout
    plan = stof.plan(masks.longformer(16, 8), 512)
    found = plan.statistics()
    assert plan.mask_text in out
    assert f"{100 * found.density:.3g} %" in out
    assert f"{found.computed_over_needed:.3f}" in out
    assert f"{found.full_tiles:,}, {found.partial_tiles:,}" in out
    assert f"{found.heaviest_row_block} tiles" in out
    # A pipe has no colour: kinds are told apart by glyphs.
    assert "key position" in out
    assert "█ full  ▓ partial" in out
    assert "\x1b[" not in out


def test_masks_and_functions_of_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inspected_masks.py").write_text(
        "from stof import masks\n"
        "WINDOW = masks.sliding_window(20)\n"
        "def near(b, h, q_idx, kv_idx):\n    return (q_idx - kv_idx).abs() < 9\n"
        "def made(size=30):\n    return masks.causal() & masks.sliding_window(size)\n"
        "def other(a):\n    return a\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, mask in (
        ("WINDOW", masks.sliding_window(20)),
        ("near", masks.sliding_window(8, 8)),
        ("made", masks.causal() & masks.sliding_window(30)),
    ):
        report = json.loads(stof_command("inspect", f"inspected_masks:{name}", "--q-len", "200", "--json").stdout)
        assert report["statistics"]["needed"] == int(mask.to_dense(200).sum())
    for name, message in (("other", "is no mask, no mask function"), ("absent", "cannot load inspected_masks:absent")):
        assert message in stof_command("inspect", f"inspected_masks:{name}", code=2).stderr


def test_no_draw_leaves_the_drawing_out() -> None:
    out = stof_command("inspect", MASK, "--q-len", "512", "--no-draw").stdout
    assert "density" in out
    assert "key position" not in out


@pytest.mark.parametrize(
    ("options", "config"),
    [
        ((), LayoutConfig(64, 64, 1)),
        (("--block-m", "128", "--block-n", "32", "--slab", "8"), LayoutConfig(128, 32, 8)),
        (("--slab", "none"), LayoutConfig(64, 64, None)),
    ],
)
def test_json_has_the_statistics(options: tuple[str, ...], config: LayoutConfig) -> None:
    report = json.loads(stof_command("inspect", MASK, "--q-len", "500", "--kv-len", "300", "--json", *options).stdout)
    plan = stof.plan(masks.longformer(16, 8), 500, 300, config=config)
    assert report["statistics"] == statistics(plan.layout).as_dict()
    assert (report["q_len"], report["kv_len"], report["mask"]) == (500, 300, plan.mask_text)
    assert (report["block_m"], report["block_n"], report["slab"]) == (config.block_m, config.block_n, config.slab)
    assert report["permuted_rows"] is False


@pytest.mark.parametrize(
    ("mask", "option", "order"),
    [
        ("dilated_window(255, dilation=16)", "remainder:16", orders.by_remainder(256, 16)),
        ("neighborhood_2d(16, 16, 5)", "patch:16x16:4x4", orders.by_patch(16, 16, 4, 4)),
    ],
)
def test_row_orders(mask: str, option: str, order: object) -> None:
    report = json.loads(stof_command("inspect", mask, "--q-len", "256", "--row-order", option, "--json").stdout)
    plan = stof.plan(mask, 256, row_order=order)  # type: ignore[arg-type]
    assert report["statistics"] == plan.statistics().as_dict()
    assert report["permuted_rows"] is True


def test_the_chosen_order_is_shown_beside_the_rows_own() -> None:
    arguments = ("inspect", "dilated_window(255, dilation=16)", "--q-len", "256")
    report = json.loads(stof_command(*arguments, "--json").stdout)
    own = json.loads(stof_command(*arguments, "--row-order", "own", "--json").stdout)
    assert report["permuted_rows"] is True
    assert own["permuted_rows"] is False
    assert own["statistics_before"] is None
    assert report["statistics_before"] == own["statistics"]
    assert report["statistics"]["computed"] < 0.5 * own["statistics"]["computed"]
    out = stof_command(*arguments).stdout
    for part in ("rows in their own order", "as chosen", "rows in the layout's order"):
        assert part in out
    for ratio in (report["statistics"], own["statistics"]):
        assert f"{ratio['computed_over_needed']:.3f}" in out
    assert out.count("key position") == 2
    assert stof_command(*arguments, "--row-order", "own").stdout.count("key position") == 1


def test_alternatives_have_an_estimate_each() -> None:
    arguments = ("inspect", "dilated_window(511, dilation=16)", "--q-len", "512", "--heads", "4", "--alternatives")
    report = json.loads(stof_command(*arguments, "--json").stdout)
    estimates = [found["estimate_us"] for found in report["alternatives"] if found["estimate_us"] is not None]
    assert len(estimates) > 4
    assert estimates == sorted(estimates)
    assert any("rows by remainder 16" in found["choice"] for found in report["alternatives"])
    assert any("rows by" not in found["choice"] for found in report["alternatives"])
    assert all(found["measured_us"] is None for found in report["alternatives"])
    out = stof_command(*arguments, "--no-draw", "--head-dim", "128").stdout
    assert "B1 H4/4 D128 S512x512, float16, NVIDIA H200" in out
    assert "own order" in out
    assert "remainder 16" in out


def test_reordering_all_tensors_is_one_more_alternative() -> None:
    arguments = ("inspect", "dilated_window(255, dilation=16)", "--q-len", "256", "--reorder")
    report = json.loads(stof_command(*arguments, "--json").stdout)
    assert {found["reordered"] for found in report["alternatives"]} == {False, True}
    assert "reordered first" in stof_command(*arguments, "--no-draw").stdout


def test_a_better_order_of_the_tokens_is_named() -> None:
    arguments = ("inspect", "neighborhood_2d(32, 64, 13)", "--q-len", "2048", "--heads", "12")
    found = json.loads(stof_command(*arguments, "--json").stdout)["token_order"]
    assert found["order"] == "Z order of a 32 x 64 grid"
    assert found["call"] == "B1 H12/12 D64 S2048x2048, float16, NVIDIA H200"
    assert found["scores"] < 0.9 * found["scores_now"]
    assert found["estimate_us"] < 0.9 * found["estimate_us_now"]
    out = " ".join(stof_command(*arguments, "--no-draw").stdout.split())
    assert f"{found['call']}: tokens in {found['order']} (masks.reordered) would compute" in out
    assert json.loads(stof_command("inspect", MASK, "--q-len", "512", "--json").stdout)["token_order"] is None
    assert "masks.reordered" not in stof_command("inspect", MASK, "--q-len", "512", "--no-draw").stdout


def test_measured_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    arguments = ("inspect", "neighborhood_2d(16, 16, 5)", "--q-len", "256", "--measure", "--json")
    report = json.loads(stof_command(*arguments).stdout)
    timed = [found for found in report["alternatives"] if found["measured_us"] is not None]
    assert {found["choice"].split("; ")[-1] for found in timed} >= {"rows by patch 16 16 8 8)"}
    assert all(found["choice"].startswith("row_block") and not found["note"] for found in timed)


def test_masks_bound_to_a_batch_or_heads_need_no_options() -> None:
    report = json.loads(stof_command("inspect", "padding([3, 60, 64])", "--q-len", "64", "--json").stdout)
    assert (report["mask_batch"], report["mask_heads"]) == (3, 1)
    out = stof_command("inspect", "per_head([causal, full])", "--q-len", "64", "--pattern", "1").stdout
    assert "1 x 2, 2 distinct" in out
    assert "░" * 64 not in out  # the full mask, not the causal one


def test_an_empty_mask_is_shown() -> None:
    report = json.loads(stof_command("inspect", "padding(0)", "--q-len", "64", "--json").stdout)
    assert report["statistics"]["density"] == 0
    assert "64 x 64" in stof_command("inspect", "padding(0)", "--q-len", "64").stdout


def test_plan_files(tmp_path: Path) -> None:
    plan = stof.plan(masks.causal(), 200, config=LayoutConfig(32, 32, 8))
    path = tmp_path / "plan.safetensors"
    plan.save(path)
    report = json.loads(stof_command("inspect", str(path), "--json").stdout)
    assert report["statistics"] == plan.statistics().as_dict()
    assert report["mask"] == "causal()"
    assert "leave out --q-len" in stof_command("inspect", str(path), "--q-len", "100", code=2).stderr


def test_png_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "mask.png"
    out = stof_command("inspect", MASK, "--q-len", "256", "--png", str(path), "--no-draw").stdout
    assert f"wrote {path}" in out
    assert path.read_bytes().startswith(b"\x89PNG")
    report = json.loads(stof_command("inspect", MASK, "--q-len", "256", "--png", str(path), "--json").stdout)
    assert report["png"] == str(path)


@pytest.mark.parametrize("link", [False, True])
def test_a_picture_does_not_replace_the_plan(link: bool, tmp_path: Path) -> None:
    path = picture = tmp_path / "plan.safetensors"
    stof.plan(masks.causal(), 64).save(path)
    if link:
        picture = tmp_path / "mask.png"
        picture.symlink_to(path)
    content = path.read_bytes()
    result = stof_command("inspect", str(path), "--png", str(picture), code=2)
    assert result.stderr.startswith("error: cannot write")
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("longfromer(16)",), "did you mean 'longformer'?"),
        (("causal(",), "not a mask expression"),
        (("causal(3)",), "causal"),
        (("causal", "--block-m", "63"), "block_m is one of"),
        (("causal", "--slab", "2"), "slab is one of"),
        (("causal", "--slab", "some"), "--slab is 1, 8, 16 or none"),
        (("causal", "--row-order", "random"), "--row-order is own, remainder:STRIDE"),
        (("causal", "--row-order", "remainder:0"), "stride is >= 1"),
        (("causal", "--row-order", "patch:8x8:2x2"), "64 rows, --q-len is 32"),
        (("no.safetensors", "--measure"), "leave out --alternatives and --measure"),
        (("causal", "--pattern", "1"), "--pattern is between 0 and 0"),
        (("causal", "--png", "/no/such/folder/mask.png"), "write /no/such/folder/mask.png"),
        (("causal", "--png", "/tmp"), "cannot write /tmp: it is a folder"),
        (("padding(99)",), "padding lengths up to 99"),
    ],
)
def test_errors_are_one_message_without_a_traceback(arguments: tuple[str, ...], message: str) -> None:
    if "--png" in arguments:
        pytest.importorskip("matplotlib")
    result = stof_command("inspect", *arguments, "--q-len", "32", code=2)
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert result.stdout == ""


def test_a_missing_plan_file_is_an_error(tmp_path: Path) -> None:
    result = stof_command("inspect", str(tmp_path / "none.safetensors"), code=2)
    assert result.stderr.startswith("error: no plan file at")


def test_a_corrupt_plan_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(b"not a plan")
    assert "is not a plan file" in stof_command("inspect", str(path), code=2).stderr


def test_version_and_help() -> None:
    assert stof_command("--version").stdout.split() == ["stof", stof.__version__]
    out = stof_command("--help").stdout
    assert all(name in out for name in ("inspect", "info", "tune", "demo"))


@pytest.mark.parametrize("words", [(), ("--help",), ("attention", "--masks", "full causal")], ids=" ".join)
def test_benchmarks_are_run_from_the_sources(words: tuple[str, ...]) -> None:
    told = stof_command("bench", *words, code=2).stderr
    assert shlex.join(("python", "-m", "benchmarks", *words)) in told
    assert len(told.strip().splitlines()) == 1


def test_the_command_line_itself_imports_nothing_heavy() -> None:
    """`stof --help` pays for `import stof` at most: a bare package stands in for it here."""
    code = """
import sys, types
package = types.ModuleType("stof")
package.__path__ = [sys.argv[1]]
sys.modules["stof"] = package
from stof.cli.main import app
app(["--help"], standalone_mode=False)
print("heavy:", sorted({"torch", "numpy", "matplotlib", "triton", "transformers"} & set(sys.modules)))
"""
    folder = str(Path(stof.__file__).parent)
    ran = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=True)
    assert "heavy: []" in ran.stdout
