"""Ways into STOF that take more than a line: another process, a model, a kernel in the interpreter."""

from __future__ import annotations

import atexit
import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import stof

_LOADER = """
import sys, torch, stof
from stof import masks
stof.plan(masks.causal(), 8)  # its numbers are not those of the process that exported
for line in sys.stdin:
    program, inputs, result = line.split("\\t")
    try:
        with torch.no_grad():
            found = torch.export.load(program).module()(*torch.load(inputs))
        torch.save(found, result.strip())
        print("done", flush=True)
    except Exception as error:
        print(type(error).__name__, repr(str(error))[:300], flush=True)
"""


@functools.cache
def _loader() -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", _LOADER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    atexit.register(process.kill)
    return process


def in_another_process(path: str, *inputs: Any) -> Any:
    """The results of an exported program that another process loads."""
    given, result = f"{path}.inputs", f"{path}.result"
    program = f"{path}.pt2"
    Path(path).rename(program)
    torch.save(inputs, given)
    loader = _loader()
    assert loader.stdin is not None
    assert loader.stdout is not None
    loader.stdin.write(f"{program}\t{given}\t{result}\n")
    loader.stdin.flush()
    answer = loader.stdout.readline().strip()
    if answer != "done":
        refusal = getattr(stof.errors, answer.split(" ")[0], RuntimeError)
        raise refusal(f"the process that loads exported programs says: {answer or 'nothing, it died'}")
    return torch.load(result)


def encoded(mask: Any, keep: Tensor, *, batch: int, heads: int, seed: int, device: str) -> tuple[Tensor, Tensor]:
    """A tiny BERT's output under a mask and the diagonal, by STOF and by eager attention told what is kept."""
    from transformers import BertConfig, BertModel

    import stof.integrations.transformers as stof_hf

    torch.manual_seed(seed)
    length = keep.shape[-1]
    keep = (keep | torch.eye(length, dtype=torch.bool, device=device)).expand(batch, heads, length, length)
    config = BertConfig(
        vocab_size=50,
        hidden_size=8 * heads,
        num_hidden_layers=2,
        num_attention_heads=heads,
        intermediate_size=16,
        max_position_embeddings=256,
        initializer_range=0.3,
        attn_implementation="eager",
    )
    model = BertModel(config, add_pooling_layer=False).eval().to(device)
    ids = torch.randint(0, 50, (batch, length), device=device)
    with torch.inference_mode():
        bias = torch.zeros(keep.shape, device=device).masked_fill(~keep, torch.finfo(torch.float32).min)
        expected = model(ids, attention_mask=bias).last_hidden_state
        stof_hf.enable(model)
        with stof_hf.sparsify(model, mask):
            out = model(ids).last_hidden_state
    return out, expected


def kernel(
    name: str, q: Tensor, k: Tensor, v: Tensor, layout: Any, settings: Any, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """An implementation by name on a layout, past what its capabilities say of devices."""
    from stof.kernels.dropout import draw_seed
    from stof.kernels.implementation import Options, attend_once
    from stof.selection import IMPLEMENTATIONS
    from stof.validation import check_bias

    implementation = IMPLEMENTATIONS[name]
    bias = check_bias(options["bias"], q, k.shape[2])
    call_options = Options(
        **{**options, "scale": float(options["scale"]), "softcap": float(options["softcap"]), "bias": bias}
    )
    if call_options.dropout_p:
        call_options = call_options._replace(seed=draw_seed(q.device))
    return attend_once(implementation.bind, q, k, v, implementation.prepare(layout, settings), call_options)
