"""`python -m benchmarks embed`: sentence embeddings as sentence-transformers computes them, and without padding."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stof.cli.common import device_of, must_be_writable, table_console


def embed(
    texts: Annotated[int, typer.Option(min=1, help="Documentation strings of Python's standard library.")] = 500,
    batch: Annotated[int, typer.Option(min=1, help="Texts in a batch.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds; medians are reported.")] = 3,
    dtype: Annotated[str, typer.Option(help="float32 or float16; default by device.")] = "",
    device: Annotated[str, typer.Option(help="cpu or cuda; default the GPU if there is one.")] = "",
    output: Annotated[Path | None, typer.Option(help="Write the JSON here.")] = None,
) -> None:
    """Time `SentenceTransformer.encode` of all-MiniLM-L6-v2 with and without `enable`, after comparing embeddings."""
    import copy
    from collections.abc import Callable

    import torch
    from rich.table import Table
    from sentence_transformers import SentenceTransformer
    from torch import Tensor

    import stof.integrations.transformers as stof_hf
    from benchmarks.results_io import provenance, write_json
    from stof.demo.jobs import checkpoint
    from stof.demo.texts import passages
    from stof.tuning.machine import device_name
    from stof.tuning.timing import wall_us

    must_be_writable(output)
    where = device_of(device)
    precision = getattr(torch, dtype or ("float32" if where.type == "cpu" else "float16"))
    plain = SentenceTransformer(str(checkpoint()), device=str(where), local_files_only=True).to(precision)
    unpadded = copy.deepcopy(plain)
    stof_hf.enable(unpadded)
    sentences = passages(texts)

    def calls(model: SentenceTransformer) -> dict[str, Callable[[], Tensor]]:
        def encode(part: list[str]) -> Tensor:
            embedded: Tensor = model.encode(part, batch_size=batch, convert_to_tensor=True, show_progress_bar=False)
            return embedded.float()

        parts = [sentences[start : start + batch] for start in range(0, len(sentences), batch)]
        return {
            "batches in the order of the texts": lambda: torch.cat([encode(part) for part in parts]),
            "encode, which sorts by length": lambda: encode(sentences),
        }

    table = Table(
        "", "as it is, ms", "enable, ms", "speed-up", "least cosine", title=f"{texts} texts, {device_name(where)}"
    )
    rows = []
    ways = calls(plain), calls(unpadded)
    for name in ways[0]:
        before, after = ways[0][name], ways[1][name]
        cosine = float(torch.nn.functional.cosine_similarity(before(), after()).min())
        row: dict[str, object] = {"way": name, "cosine": cosine}
        if cosine > 0.999:
            us = wall_us({"before": before, "after": after}, where, rounds=rounds, warmup=1)
            row |= {
                "before_ms": us["before"] / 1e3,
                "after_ms": us["after"] / 1e3,
                "speed_up": us["before"] / us["after"],
            }
            cells = f"{us['before'] / 1e3:.0f}", f"{us['after'] / 1e3:.0f}", f"{us['before'] / us['after']:.2f}x"
        else:
            cells = "wrong", "", ""
        table.add_row(name, *cells, f"{cosine:.6f}")
        rows.append(row)
    table_console().print(table)
    if output is not None:
        write_json(output, {"provenance": provenance(where), "texts": texts, "batch": batch, "rows": rows})
