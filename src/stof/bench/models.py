"""Whole models from transformers with random weights: backend "stof" against torch.compile, same masks, same weights.

Every way is checked against the model in float32, run eagerly, before it is timed; a wrong one has no time. Ways run
one after another, each compiled afresh: compiled versions of one class slow each other's calls down.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stof
from stof import masks
from stof.bench.grid import GRID
from stof.bench.problem import first_line
from stof.errors import ArgumentError
from stof.masks import Mask
from stof.tuning.timing import wall_us

# Below this the outputs are not those of the model, unless half precision alone takes it there: see `lowest_cosine`.
COSINE = 0.999
WINDOW, SINKS = 512, 16

# Sizes as published; LLaMA's are those of a 1.0 B model.
_SIZES: dict[str, dict[str, Any]] = {
    "bert": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
    "bert-large": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
    "gpt2": {"n_embd": 768, "n_layer": 12, "n_head": 12},
    "llama": {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "vocab_size": 32000,
    },
    "t5": {"d_model": 768, "num_layers": 12, "num_heads": 12, "d_ff": 3072, "d_kv": 64},
    "vit": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
}
MODELS = tuple(_SIZES)
CAUSAL = ("gpt2", "llama")
MASKS = ("full", "window+sinks", "longformer", "bigbird")
_MODES = {"default": None, "reduce-overhead": "reduce-overhead", "max-autotune": "max-autotune"}
PEERS = tuple(f"{mode}-{kind}" for mode in ("eager", *_MODES) for kind in ("sdpa", "flex"))
# With our attention and no templates; with templates by rule, with norms folded, with whole calls as CUDA graphs (norms
# folded too), each also with the scheme searched for.
OURS = (
    "stof-attention",
    *(f"stof{how}{effort}" for how in ("", "-folded", "-whole") for effort in ("", "-quick", "-full")),
)


@dataclass(frozen=True)
class Case:
    """A model, `batch` sequences of `seq` tokens (ViT: images of 196 patches and a class token), and a mask."""

    model: str
    batch: int
    seq: int
    mask: str


@dataclass(frozen=True)
class Row:
    """One way to run a case; `ms` is None when it was wrong or failed (`problem` says how)."""

    model: str
    batch: int
    seq: int
    mask: str
    dtype: str
    impl: str
    ms: float | None
    first_call_s: float
    cosine: float | None
    problem: str = ""


def build(name: str, seq: int) -> nn.Module:
    """A model of random weights (seed 0) in evaluation mode, in float32 on the default device.

    Raises:
        ArgumentError: an unknown name.
    """
    import transformers as t

    if name not in _SIZES:
        raise ArgumentError(f"unknown model {name!r}; there are {', '.join(MODELS)}")
    sizes = _SIZES[name]
    torch.manual_seed(0)
    made: Any
    if name.startswith("bert"):
        made = t.BertModel(t.BertConfig(**sizes, max_position_embeddings=max(512, seq)), add_pooling_layer=False)
    elif name == "gpt2":
        made = t.GPT2Model(t.GPT2Config(**sizes, n_positions=max(1024, seq), use_cache=False))
    elif name == "llama":
        made = t.LlamaModel(t.LlamaConfig(**sizes, max_position_embeddings=max(2048, seq), use_cache=False))
    elif name == "t5":
        made = t.T5EncoderModel(t.T5Config(**sizes))
    else:
        made = t.ViTModel(t.ViTConfig(**sizes), add_pooling_layer=False)
    module: nn.Module = made.eval()
    return module


def inputs_of(case: Case, device: torch.device) -> dict[str, Tensor]:
    """Random tokens, or pixels for ViT (float32)."""
    generator = torch.Generator(device).manual_seed(1)
    if case.model == "vit":
        return {"pixel_values": torch.randn(case.batch, 3, 224, 224, generator=generator, device=device)}
    return {"input_ids": torch.randint(1, 30000, (case.batch, case.seq), generator=generator, device=device)}


def mask_of(case: Case) -> Mask | None:
    """The mask as a value; None when the model's own is all there is.

    Raises:
        ArgumentError: a mask that there is not, or one for ViT.
    """
    if case.mask not in MASKS or (case.model == "vit" and case.mask != "full"):
        raise ArgumentError(f"no mask {case.mask!r} for {case.model}; there are {', '.join(MASKS)} (ViT: full)")
    if case.mask == "full":
        return None
    if case.mask == "window+sinks":
        return masks.causal() & (masks.sliding_window(WINDOW - 1) | masks.sink_tokens(SINKS))
    mask = GRID[case.mask].mask(case.seq)
    return masks.causal() & mask if case.model in CAUSAL else mask


def flex_mask(case: Case, device: torch.device) -> Any:
    """The mask as FlexAttention's BlockMask, from the closed form its users would write; None for no mask."""
    from torch.nn.attention.flex_attention import create_block_mask

    if case.mask == "full" and case.model not in CAUSAL:
        return None
    mod: Callable[..., Tensor]
    if case.mask == "full":
        mod = GRID["causal"].mask_mod(case.seq, case.seq, device)
    elif case.mask == "window+sinks":

        def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (q >= k) & ((q - k < WINDOW) | (k < SINKS))

    else:
        inner = GRID[case.mask].mask_mod(case.seq, case.seq, device)

        def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            keep = inner(b, h, q, k)
            return (q >= k) & keep if case.model in CAUSAL else keep

    return create_block_mask(mod, None, None, case.seq, case.seq, device=str(device))


def with_attention(model: nn.Module, case: Case, kind: str, device: torch.device) -> tuple[nn.Module, dict[str, Any]]:
    """A copy of the model that runs its attention as "sdpa" or "flex", and what else its calls take."""
    changed: Any = copy.deepcopy(model)
    for part in changed.modules():
        if hasattr(part, "set_attn_implementation"):
            part.set_attn_implementation("sdpa" if kind == "sdpa" else "flex_attention")
    if kind == "flex":
        mask = flex_mask(case, device)
        return changed, {} if mask is None else {"attention_mask": mask}
    value = mask_of(case)
    if value is None:
        return changed, {}
    dense = value.to_dense(case.seq, device=device)
    return changed, {"attention_mask": dense.expand(case.batch, 1, case.seq, case.seq)}


def ways(
    model: nn.Module, case: Case, impls: Iterable[str], device: torch.device, budget_s: float | None
) -> dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]]:
    """For each implementation what prepares it: a compiled copy of the model, and further arguments of its calls.

    Raises:
        ArgumentError: an unknown implementation.
    """
    prepared: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {}
    for impl in impls:
        if impl in OURS:
            prepared[impl] = lambda impl=impl: (_ours(model, case, impl, budget_s), {})  # type: ignore[misc]
        elif impl in PEERS:
            prepared[impl] = lambda impl=impl: _peer(model, case, impl, device)  # type: ignore[misc]
        else:
            raise ArgumentError(f"unknown implementation {impl!r}; there are {', '.join((*PEERS, *OURS))}")
    return prepared


def _peer(model: nn.Module, case: Case, impl: str, device: torch.device) -> tuple[nn.Module, dict[str, Any]]:
    mode, kind = impl.rsplit("-", 1)
    changed, arguments = with_attention(model, case, kind, device)
    if mode != "eager":
        compiled: Any = torch.compile(changed, mode=_MODES[mode], dynamic=False)
        return compiled, arguments
    return changed, arguments


def _ours(model: nn.Module, case: Case, impl: str, budget_s: float | None) -> nn.Module:
    changed = copy.deepcopy(model)
    if impl == "stof-attention":
        stof.optimize(changed, mask=mask_of(case), pack=False)
        compiled: Any = torch.compile(changed, mode="reduce-overhead", dynamic=False)
        return compiled
    words = impl.split("-")
    options: dict[str, Any] = {
        "fold": "folded" in words or "whole" in words,
        "cuda_graphs": "whole" if "whole" in words else True,
    }
    if words[-1] in ("quick", "full"):
        options |= {"effort": words[-1], "budget_s": budget_s}
    return stof.optimize(changed, mask=mask_of(case), dynamic=False, report=True, **options)


def run_case(
    case: Case, impls: Iterable[str], device: torch.device, dtype: torch.dtype, rounds: int, budget_s: float | None
) -> list[Row]:
    """Check and time every implementation; wall time of a call, results awaited."""
    with torch.device(device):  # where drawing a billion weights takes no time
        model = build(case.model, case.seq)
    inputs = inputs_of(case, device)
    with torch.no_grad():
        changed, arguments = with_attention(model, case, "sdpa", device)
        exact = changed(**inputs, **arguments)[0].double().flatten()
        model.to(dtype)
        inputs = {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()}
        changed.to(dtype)
        plain = changed(**inputs, **arguments)[0].double().flatten()
        least = lowest_cosine(float(F.cosine_similarity(plain, exact, 0)))
        del changed, plain
        return [
            _run(case, impl, prepare, inputs, exact, least, device, dtype, rounds)
            for impl, prepare in ways(model, case, impls, device, budget_s).items()
        ]


def lowest_cosine(plain: float) -> float:
    """What an implementation must reach: 0.999, or half again the distance of plain eager half precision (`plain`).

    A 1.0 B LLaMA of random weights is at 0.9985 in float16 whoever runs it.
    """
    return min(COSINE, 1 - 1.5 * (1 - plain))


def _run(
    case: Case,
    impl: str,
    prepare: Callable[[], tuple[nn.Module, dict[str, Any]]],
    inputs: dict[str, Tensor],
    exact: Tensor,
    least: float,
    device: torch.device,
    dtype: torch.dtype,
    rounds: int,
) -> Row:
    torch.compiler.reset()
    start = time.perf_counter()
    cosine, problem, ms, first = None, "", None, 0.0
    try:
        compiled, arguments = prepare()
        out = compiled(**inputs, **arguments)[0]
        cosine = float(F.cosine_similarity(out.double().flatten(), exact, 0))
        first = time.perf_counter() - start
        del out
        if cosine < least:
            problem = f"WRONG: cosine {cosine:.6f} to float32"
        else:
            ms = wall_us({impl: lambda: compiled(**inputs, **arguments)}, device, rounds=rounds)[impl] / 1e3
    except Exception as failure:  # whatever a compiler or a model raises must not end the comparison
        problem = first_line(failure)
    text = str(dtype).removeprefix("torch.")
    return Row(case.model, case.batch, case.seq, case.mask, text, impl, ms, first, cosine, problem)
