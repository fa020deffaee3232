"""`python -m tests.mutants`: draw mutants of one line each, and run the tests that import the mutated module."""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from tests.mutants.draw import Mutant, draw_mutants, left_out
from tests.mutants.run import ROOT, Runner, record

# 28 of 30.
ENOUGH = 0.93


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the mutants to run; all others are left out")
    parser.add_argument("--limit", type=float, default=600, help="seconds for each mutant's tests")
    parser.add_argument("--workers", type=int, default=1, help="mutants at a time, a process each")
    parser.add_argument("--gpu", action="store_true", help="run the tests that need a GPU instead of the others")
    parser.add_argument("--list", action="store_true", help="print the mutants, run nothing")
    parser.add_argument("--record", action="store_true", help="run all tests, and write how long they take")
    given = parser.parse_args()
    if given.record:
        return record()
    drawn = list(enumerate(draw_mutants(ROOT, given.seed, given.count)))
    drawn = [(i, mutant) for i, mutant in drawn if given.only is None or i in given.only]
    print("no mutants of Gluon kernels, which run on a GPU alone: " + ", ".join(map(str, left_out(ROOT))))
    if given.list:
        print("\n".join(f"{i} {mutant.describe(ROOT)}" for i, mutant in drawn))
        return 0
    runner = Runner(given.limit, given.gpu)

    def run(numbered: tuple[int, Mutant]) -> bool:
        began = time.monotonic()
        i, mutant = numbered
        outcome = runner.run(mutant)
        seconds = time.monotonic() - began
        print(f"{i} {mutant.describe(ROOT)} | {outcome} ({seconds:.0f} s)", flush=True)
        return outcome.test is not None

    with ThreadPoolExecutor(given.workers) as pool:
        caught = sum(pool.map(run, drawn))
    print(f"seed {given.seed}: {caught} of {len(drawn)} mutants caught")
    return 0 if caught >= ENOUGH * len(drawn) else 1


if __name__ == "__main__":
    sys.exit(main())
