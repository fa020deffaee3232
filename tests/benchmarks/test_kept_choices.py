"""The regret of kept choices, on a few short masks."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.attention.kept_choices import STRUCTURES, regrets
from benchmarks.cli.attention import app
from stof.selection import MaskGeometry
from stof.testing.mask_grid import Shape


@pytest.mark.parametrize("name", STRUCTURES)
def test_masks_fit_their_lengths_and_have_a_structure(name: str) -> None:
    structures = set()
    for seed in range(3):
        mask = STRUCTURES[name](random.Random(seed), 1088)
        mask.check(1088, 1088)
        outline = MaskGeometry(mask, 1088, 1088, batch=mask.batch).outline
        assert outline is not None
        structures.add(outline.structure)
    assert len(structures) == 1


def test_a_mask_that_is_surveyed_has_the_best_choice() -> None:
    rows = regrets(Shape.parse("1,4,64,512"), ["window", "causal-documents"], 2)
    assert len(rows) == 8
    for row in rows:
        assert row.share >= -1e-9
        assert not row.surveyed or row.share == 0


def test_command(tmp_path: Path) -> None:
    output = tmp_path / "kept.json"
    words = ["kept", "--shapes", "1,4,64,512", "--structures", "window", "--count", "1", "--output", str(output)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "window" in done.output
    assert len(json.loads(output.read_text())["regrets"]) == 2
