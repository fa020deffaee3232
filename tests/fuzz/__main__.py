"""`python -m tests.fuzz`: random calls against float64, in several processes."""

from __future__ import annotations

import argparse
import os
import sys
import time

from tests.fuzz.campaign import case_functions, run_all


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="run the case of this number alone, and print it")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--interpret", action="store_true", help="Triton kernels, in Triton's interpreter")
    parser.add_argument("--training", action="store_true", help="steps of training, checkpointed and wrapped, on a CPU")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes; 0 for this one alone")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="leave out cases that begin later")
    given = parser.parse_args()
    if given.training and (given.interpret or given.device != "cpu"):
        parser.error("--training runs on a CPU")
    if given.case is not None:
        draw_case, _ = case_functions(given.training)
        print("\n".join(draw_case(given.seed, given.case, given.device, given.interpret).lines))
    began = time.monotonic()
    numbers = list(range(given.cases)) if given.case is None else [given.case]
    workers = 0 if given.case is not None else given.workers
    report = run_all(given.seed, numbers, given.device, given.interpret, workers, given.seconds, given.training)
    if workers == 0:
        print("\n".join(report.failures))
    for name, counts in (("calls", report.entries), ("refusals", report.refusals)):
        print(f"{name}: " + ", ".join(f"{key} {count}" for key, count in counts.most_common()))
    seconds = time.monotonic() - began
    cases = f"{report.cases} of {len(numbers)} cases, seed {given.seed}"
    print(f"{cases}, {len(report.failures)} failures, {seconds:.0f} s")
    return 1 if report.failures or report.cases < len(numbers) else 0


if __name__ == "__main__":
    sys.exit(main())
