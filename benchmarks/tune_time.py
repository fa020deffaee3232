"""Where the time of a search goes: one model tuned in a fresh process, phase by phase.

python benchmarks/tune_time.py [--model bert] [--batch 8] [--length 512] [--mask bigbird] [--store FOLDER]
"""

from __future__ import annotations

import argparse
import time

BEGIN = time.perf_counter()

import torch  # noqa: E402  (the imports are what is timed first)

import stof  # noqa: E402
from stof.bench.models import Case, build, inputs_of, mask_of  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="bert")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--mask", default="bigbird")
    parser.add_argument("--store", default="")
    parser.add_argument("--budget", type=float, default=30.0)
    given = parser.parse_args()
    marks = [("imports", time.perf_counter() - BEGIN)]
    device = torch.device("cuda")
    case = Case(given.model, given.batch, given.length, given.mask)
    model = build(case.model, case.seq).to(device, torch.float16)
    inputs = inputs_of(case, device)
    torch.cuda.synchronize()
    marks.append(("model", time.perf_counter() - BEGIN))
    seen: list[tuple[float, object]] = []
    reports = []
    fast = stof.optimize(
        model,
        mask=mask_of(case),
        dynamic=False,
        cuda_graphs=True,
        effort="quick",
        budget_s=given.budget,
        store=given.store or False,
        report=reports.append,
        progress=lambda step: seen.append((time.perf_counter() - BEGIN, step)),
    )
    marks.append(("optimize", time.perf_counter() - BEGIN))
    with torch.inference_mode():
        fast(**inputs)
        torch.cuda.synchronize()
        marks.append(("first call", time.perf_counter() - BEGIN))
        for _ in range(3):
            fast(**inputs)
        torch.cuda.synchronize()
    from rich.console import Console

    for when, step in seen:
        print(f"{when:6.1f} {step}")
    for report in reports:
        Console(width=170).print(report)
        print("measurements", report.measurements)
    print("seconds since the start:", ", ".join(f"{name} {at:.1f}" for name, at in marks), flush=True)


if __name__ == "__main__":
    main()
