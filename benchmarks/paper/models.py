"""Figures 11 and 12: whole models under the paper's BigBird mask, and what attention and fusion each contribute.

Every implementation gets the same mask: in decoders the intersection with the causal one; cross-attention has none.
Each is compared with the model in float64 before it is timed; a wrong one has no time.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stof
from benchmarks.failures import first_line
from benchmarks.models.compare import lowest_cosine
from benchmarks.paper.attention import native
from benchmarks.paper.experiment import NO_MEMORY, Cell, Report, Row
from benchmarks.paper.masks import paper_masks
from benchmarks.peers.mask_formats import MaskMod, WrittenMask
from stof import masks
from stof.errors import MissingDependencyError
from stof.integrations.torch.cuda_graphs import CudaGraphRunner
from stof.tuning.timing import wall_us

SIZES = ((1, 128), (8, 512), (16, 2048))
MASK = "bigbird"
# Patches of an image of 224 x 224 pixels, and the class token.
_VIT_TOKENS = 197


def _bert(layers: int, heads: int) -> dict[str, Any]:
    sizes = {"hidden_size": 64 * heads, "intermediate_size": 256 * heads}
    return sizes | {"num_hidden_layers": layers, "num_attention_heads": heads}


MODELS: dict[str, dict[str, Any]] = {
    "bert-base": _bert(12, 12),
    "gpt2": {"n_embd": 768, "n_layer": 12, "n_head": 12},
    "t5": {"d_model": 768, "num_layers": 12, "num_decoder_layers": 12, "num_heads": 12, "d_ff": 3072, "d_kv": 64},
    "llama": _bert(24, 16) | {"intermediate_size": 2816, "vocab_size": 32000},
    "vit-base": _bert(12, 12),
    "bert-large": _bert(24, 16),
    "bert-small": _bert(6, 8),
}
TINY: dict[str, dict[str, Any]] = {"bert-base": _bert(1, 2)}
CAUSAL = ("gpt2", "llama")
ABLATION = ("stof", "native", "native-compiled", "stof-attention", "stof-fusion")
# Wall time that is spent on timing an implementation, in ten rounds at least.
_TIMED_US = 1e6
_COMPILED = ("reduce-overhead-sdpa", "reduce-overhead-flex", "default-sdpa", "default-flex")
_AUTOTUNED = ("max-autotune-sdpa", "max-autotune-flex")
# Options of `stof.optimize` in every cell.
WHOLE: dict[str, Any] = {"dynamic": False, "fold": True, "cuda_graphs": "whole"}


def build(name: str, length: int, sizes: dict[str, Any]) -> nn.Module:
    """A model of random weights (seed 0) in evaluation mode, float32, on the default device.

    Raises:
        MissingDependencyError: transformers is not installed.
    """
    try:
        import transformers as t
    except ImportError as error:
        raise MissingDependencyError("models need transformers: pip install transformers") from error
    torch.manual_seed(0)
    made: Any
    if name.startswith("bert"):
        made = t.BertModel(t.BertConfig(**sizes, max_position_embeddings=max(512, length)), add_pooling_layer=False)
    elif name == "gpt2":
        made = t.GPT2Model(t.GPT2Config(**sizes, n_positions=max(1024, length), use_cache=False))
    elif name == "llama":
        made = t.LlamaModel(t.LlamaConfig(**sizes, max_position_embeddings=max(2048, length), use_cache=False))
    elif name == "t5":
        made = t.T5Model(t.T5Config(**sizes, use_cache=False))
    else:
        made = t.ViTModel(t.ViTConfig(**sizes), add_pooling_layer=False)
    module: nn.Module = made.eval()
    return module


def inputs_of(name: str, batch: int, length: int, device: torch.device) -> dict[str, Tensor]:
    """Random tokens, or pixels (float32)."""
    generator = torch.Generator(device).manual_seed(1)
    if name == "vit-base":
        return {"pixel_values": torch.randn(batch, 3, 224, 224, generator=generator, device=device)}
    names = ("input_ids", "decoder_input_ids") if name == "t5" else ("input_ids",)
    return {n: torch.randint(1, 30000, (batch, length), generator=generator, device=device) for n in names}


def _attend_native(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **given: Any) -> tuple[Tensor, None]:
    q = q * ((given.get("scaling") or q.shape[-1] ** -0.5) * q.shape[-1] ** 0.5)  # `native` scales by the default
    bias = _bias(module, given)
    if bias is None:
        out = native(q, k, v, module.paper_mask)
    else:
        scores = q @ k.mT * q.shape[-1] ** -0.5 + bias
        out = scores.masked_fill(module.paper_mask, float("-inf")).softmax(-1) @ v
    return out.transpose(1, 2).contiguous(), None


def _attend_sdpa(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **given: Any) -> tuple[Tensor, None]:
    added, bias = module.paper_mask, _bias(module, given)
    added = added if bias is None else added + bias
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=added, scale=given.get("scaling"))
    return out.transpose(1, 2).contiguous(), None


def _attend_flex(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **given: Any) -> tuple[Tensor, None]:
    from torch.nn.attention.flex_attention import flex_attention

    bias = _bias(module, given)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        assert bias is not None
        return score + bias[0, h, q_idx, k_idx]

    out: Any = flex_attention(
        q, k, v, score_mod=None if bias is None else score_mod, block_mask=module.paper_mask,
        scale=given.get("scaling"),
    )  # fmt: skip
    return out.transpose(1, 2).contiguous(), None


def _bias(module: Any, given: dict[str, Any]) -> Tensor | None:
    """T5's bias of relative positions; cross-attention has none (transformers gives zeros)."""
    return None if module.paper_mask is None else given.get("position_bias")


_ATTEND = {"native": _attend_native, "sdpa": _attend_sdpa, "flex": _attend_flex}


def with_attention(model: nn.Module, kind: str, mask: WrittenMask, length: int, causal: bool) -> nn.Module:
    """A copy of the model whose self-attention runs as "native", "sdpa" or "flex" with the mask.

    `causal`: models that are decoders as a whole; T5's decoder is recognized by its name.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(f"paper_{kind}", _ATTEND[kind])
    changed: Any = copy.deepcopy(model)
    for part in changed.modules():
        if hasattr(part, "set_attn_implementation"):
            part.set_attn_implementation(f"paper_{kind}")
    forms: dict[bool, Any] = {}
    first = next(changed.parameters())
    for name, part in changed.named_modules():
        own = causal or (name.startswith("decoder") and hasattr(part, "relative_attention_num_buckets"))
        if "EncDecAttention" in name:
            part.paper_mask = None
        elif hasattr(part, "is_causal") or hasattr(part, "relative_attention_num_buckets"):
            if own not in forms:
                forms[own] = _form(kind, mask, length, own, first.device, first.dtype)
            if kind == "flex":
                part.paper_mask = forms[own]
            else:  # CUDA graphs copy in every call what is not a buffer
                part.register_buffer("paper_mask", forms[own], persistent=False)
    return changed


def _form(kind: str, mask: WrittenMask, length: int, causal: bool, device: torch.device, dtype: torch.dtype) -> Any:
    """The mask as an implementation takes it: true where hidden, added to scores, or in FlexAttention's blocks."""
    if kind == "flex":
        from torch.nn.attention.flex_attention import create_block_mask

        assert mask.mod is not None
        inner = mask.mod(length, device)
        mod: MaskMod = (lambda b, h, q, k: (q >= k) & inner(b, h, q, k)) if causal else inner
        return create_block_mask(mod, None, None, length, length, device=str(device))
    value = mask.mask(length)
    keep = (masks.causal() & value if causal else value).to_dense(length, device=device)
    if kind == "native":
        return ~keep
    return torch.zeros(keep.shape, device=device, dtype=dtype).masked_fill_(~keep, float("-inf"))


@dataclass(frozen=True)
class Subject:
    """A model ready to run: its inputs, float64's result, and the lowest accepted cosine to it."""

    name: str
    length: int
    mask: WrittenMask
    model: nn.Module
    inputs: dict[str, Tensor]
    exact: Tensor
    least: float


@lru_cache(maxsize=1)
def subject_of(name: str, batch: int, length: int, device: torch.device, dtype: torch.dtype) -> Subject:
    sizes = MODELS[name] if device.type == "cuda" else TINY[name]
    with torch.device(device):
        model = build(name, length, sizes)
    mask, inputs = paper_masks(device)[MASK], inputs_of(name, batch, length, device)

    def result(precision: torch.dtype) -> Tensor:
        changed = with_attention(model.to(precision), "native", mask, length, name in CAUSAL)
        given = {n: x.to(precision) if x.is_floating_point() else x for n, x in inputs.items()}
        out: Tensor = changed(**given)[0].double()
        return out

    with torch.no_grad():
        exact, plain = result(torch.float64), result(dtype)
    inputs = {n: x.to(dtype) if x.is_floating_point() else x for n, x in inputs.items()}
    return Subject(name, length, mask, model, inputs, exact, lowest_cosine(cosine_to(plain, exact)))


def cosine_to(out: Tensor, exact: Tensor) -> float:
    """Cosine between all elements of a result and those of float64's."""
    return float(F.cosine_similarity(out.double().flatten(), exact.flatten(), 0))


def prepared(subject: Subject, impl: str) -> Callable[..., Any]:
    """The model compiled in a way."""
    attention = partial(
        with_attention, subject.model, mask=subject.mask, length=subject.length, causal=subject.name in CAUSAL
    )
    value = subject.mask.mask(subject.length)
    if impl == "stof":
        return stof.optimize(copy.deepcopy(subject.model), mask=value, **WHOLE)
    if impl == "stof-fusion":
        return stof.optimize(attention("sdpa"), attention=False, **WHOLE)
    compiled: Any
    if impl == "stof-attention":
        changed = copy.deepcopy(subject.model)
        stof.optimize(changed, mask=value, pack=False)  # in place
        # One graph of the whole model, as ours have: Inductor's own leave out attention under masks with tensors.
        return CudaGraphRunner(torch.compile(changed, dynamic=False), changed)
    mode, _, kind = impl.rpartition("-")
    if impl.startswith("native"):
        eager = attention("native")
        compiled = torch.compile(eager, dynamic=False) if impl == "native-compiled" else eager
    else:
        compiled = torch.compile(attention(kind), mode=None if mode == "default" else mode, dynamic=False)
    return compiled


def _run(subject: Subject, row: Row, device: torch.device, timed: bool) -> Row:
    """Check one implementation, then take the wall time of a call, results awaited."""
    torch.compiler.reset()
    try:
        with torch.no_grad():
            call: Callable[[], Any] = partial(prepared(subject, row.impl), **subject.inputs)
            out = call()[0]
            cosine = cosine_to(out, subject.exact)
            error = float((out.double() - subject.exact).abs().max() / subject.exact.abs().max())
            if not cosine >= subject.least:  # NaN is wrong as well
                return replace(row, max_rel_err=error, note=f"wrong result, not timed: cosine {cosine:.6f}")
            if not timed:
                return replace(row, max_rel_err=error)
            return replace(row, ms=wall_ms(call, device), max_rel_err=error)
    except torch.OutOfMemoryError:
        return replace(row, note=NO_MEMORY)
    except Exception as failure:  # whatever a compiler or a model raises must not end the comparison
        return replace(row, note=first_line(failure))


def wall_ms(call: Callable[[], Any], device: torch.device) -> float:
    """Median wall time of a call, results awaited."""
    from torch._inductor.async_compile import shutdown_compile_workers

    shutdown_compile_workers()  # they may still be starting, on every core
    rounds = _TIMED_US / wall_us({"": call}, device, rounds=3)[""]
    return wall_us({"": call}, device, rounds=min(max(int(rounds), 10), 1000))[""] / 1e3


def cells(names: Sequence[str], device: torch.device, dtype: torch.dtype) -> list[Cell]:
    """The ablation and the other compiled ways of every model and size, then those ways that compile longest.

    A model's two cells follow each other: their times are compared, so they should come from one machine.
    """
    cases = [(name, *size) for size in SIZES for name in names]
    if device.type != "cuda":
        cases = [(name, 1, 64) for name in names if name in TINY]

    def cell(case: tuple[str, int, int], impls: tuple[str, ...], *parts: str) -> Cell:
        name, batch, length = case
        tokens = _VIT_TOKENS if name == "vit-base" else length
        figures = ("11", "12") if "fig12" in parts else ("11",)
        rows = tuple(Row(figure, MASK, name, batch, tokens, impl) for figure in figures for impl in impls)
        return Cell(parts, rows, partial(_measure, device=device, dtype=dtype))

    kinds = ((ABLATION, "fig11", "fig12"), (_COMPILED, "fig11"))
    main = [cell(case, *kind) for case in cases for kind in kinds]
    return main + [cell(case, _AUTOTUNED, "fig11", "autotune") for case in cases]


def _measure(
    wanted: Sequence[Row], report: Report, timed: bool, *, device: torch.device, dtype: torch.dtype
) -> list[Row]:
    first = wanted[0]
    subject = subject_of(first.model, first.batch, first.length, device, dtype)
    by_impl: dict[str, Row] = {}
    for row in wanted:
        if row.impl not in by_impl:
            by_impl[row.impl] = found = _run(subject, row, device, timed)
            report(f"  {row.impl}: {found.note or f'{found.ms or 0:.3f} ms'}")
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return [replace(by_impl[row.impl], figure=row.figure) for row in wanted]
