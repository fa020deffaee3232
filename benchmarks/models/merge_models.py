"""One file of `python -m benchmarks models` from several: of GPUs that shared the cases, or of runs that went on later.

`python -m benchmarks.models.merge_models FILE... --to benchmarks/results/h200-models.json [--commit COMMIT]`. All files
are of one device, one version of everything and one commit; COMMIT is that of all of them where they ran in a copy,
which does not know its own. Of a way that several files have, the last with a time counts. What the target held is
replaced: name it among the files to keep it. Prints how many times as fast each case is as the best of its peers, and
each of our ways as our attention under Inductor's CUDA graphs without templates: what fusion alone gains.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from benchmarks.models.compare import ATTENTION, COMPILED, KEY, OURS, Row
from benchmarks.results_io import read_results, state, write_results
from stof.errors import ArgumentError

STATE = ("device", "torch", "triton", "stof", "commit")


def merged(paths: list[Path], commit: str | None = None) -> tuple[dict[str, Any], list[Row]]:
    """Provenance and rows of all files.

    Raises:
        ArgumentError: a file is no result of `python -m benchmarks models`, or files of different states.
    """
    metas: list[dict[str, Any]] = []
    found: dict[tuple[Any, ...], Row] = {}
    for path in paths:
        results = read_results(path, Row)
        metas.append(results.meta | {"commit": commit or results.meta.get("commit")})
        for row in results.rows:
            key = tuple(getattr(row, name) for name in KEY)
            if row.ms is not None or key not in found or found[key].ms is None:
                found[key] = row
    states = {tuple(str(state(meta.get(name))) for name in STATE) for meta in metas}
    if len(states) != 1:
        raise ArgumentError(f"rows of one file are of one state, got {'; '.join(' '.join(s) for s in sorted(states))}")
    return max(metas, key=lambda meta: str(meta.get("date"))), list(found.values())


def summary(rows: list[Row]) -> list[str]:
    """Lines for each case: the best of ours and of the peers, peers without a time; last the geometric mean."""
    cases: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in rows:
        ways = cases.setdefault((row.model, row.batch, row.seq, row.mask, row.dtype), {})
        if row.ms is not None:
            ways[row.impl] = row.ms
    lines, ratios = [], []
    for case, ways in cases.items():
        ours = min(((ms, impl) for impl, ms in ways.items() if impl in OURS), default=None)
        peer = min(((ms, impl) for impl, ms in ways.items() if impl in COMPILED), default=None)
        if ours is None or peer is None:
            lines.append(f"{' '.join(map(str, case))}: nothing to compare")
            continue
        ratios.append(peer[0] / ours[0])
        missing = [impl for impl in COMPILED if impl not in ways]
        apart = f"; not timed: {', '.join(missing)}" if missing else ""
        alone = ways.pop(ATTENTION, None)
        fused = [f"{impl} {alone / ms:.2f}x" for impl, ms in ways.items() if impl in OURS] if alone else []
        names = f"{ours[1]} {ours[0]:.3f} ms, {peer[1]} {peer[0]:.3f} ms"
        lines.append(f"{' '.join(map(str, case))}: {ratios[-1]:.2f}x ({names}){apart}")
        lines += [f"  over {ATTENTION}: {', '.join(fused)}"] if fused else []
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        lines.append(f"geometric mean of {len(ratios)}: {mean:.2f}x, least {min(ratios):.2f}x")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--commit", help="of the code that ran, where files do not know it")
    given = parser.parse_args()
    meta, rows = merged(given.files, given.commit)
    write_results(given.to, meta, rows)
    for line in summary(rows):
        print(line)


if __name__ == "__main__":
    main()
