"""`torch.compile(model, backend="stof")`: templates for segments they have a kernel for, Inductor for everything else.

Inference only. The backend rewrites the graph Dynamo captured and hands it to Inductor, whose caches stay in use: its
keys hold the rewritten graph, this package's source and the fusion scheme.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from stof.errors import ArgumentError, UnsupportedError, shown
from stof.fusion.graph.fx_utils import copy_module
from stof.fusion.graph.mutations import may_mutate_inputs
from stof.fusion.measure.model_comparison import PLAIN, RULED, SEARCHED, ModelComparison, differing, pick_winner
from stof.fusion.passes.horizontal_fusion import packed_call, packed_examples
from stof.fusion.passes.weight_packing import pack_weights, unpack_weights
from stof.fusion.pipeline import fuse, rewrite_biases, rewrite_patches
from stof.fusion.records.choices import Choices
from stof.fusion.records.report import FusionReport
from stof.fusion.records.store import Records, Store, segment_key, source_digest
from stof.integrations.torch.compile_options import WHOLE, CompileOptions
from stof.integrations.torch.cuda_graphs import CudaGraphRunner
from stof.integrations.torch.sdpa import replace_sdpa
from stof.masks import Mask
from stof.masks.tensors import as_mask
from stof.runtime.private import inductor, init_triton_cache
from stof.tuning.timing import replayed_us, wall_us
from stof.version import __version__

__all__ = ["CompileOptions", "FusionReport", "optimize", "pack_weights", "stof_backend", "unpack_weights"]

_log = logging.getLogger(__name__)
# The attribute of a model that holds the masks `optimize` set.
_MASKS = "_stof_optimized_masks"


def stof_backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The backend: rewrites `gm`, then compiles it with Inductor.

    Args:
        options: see `CompileOptions`.
        mode: not used by this backend; anything but None or "default" is refused.

    Raises:
        ArgumentError: unknown options, or a mode.
        UnsupportedError: the graph is to be differentiated.

    Examples:
        >>> model = nn.Sequential(nn.Linear(16, 16), nn.ReLU()).eval()
        >>> compiled = torch.compile(model, backend="stof", options={"deterministic": True})
        >>> with torch.inference_mode():
        ...     compiled(torch.randn(4, 16)).shape
        torch.Size([4, 16])
    """
    parsed = CompileOptions.parse(options)
    if mode not in (None, "default"):
        raise ArgumentError(f"backend 'stof' has no modes (got mode={mode!r}); use options={{'cuda_graphs': True}}")
    refuse_training(gm)
    devices = {value.device for value in example_inputs if isinstance(value, Tensor)}
    device = next((one for one in devices if one.type == "cuda"), torch.device("cpu"))
    if device.type == "cuda":
        init_triton_cache(device)
    search, known = parsed.search(device), parsed.known(device)
    copies = {name: copy_module(gm) for name in (RULED, PLAIN)} if search is not None else {}
    report = fuse(
        gm,
        search,
        references=parsed.references,
        fold=parsed.fold,
        known=known,
        replay=parsed.replay(device),
    )
    if search is None or not report.fused or may_mutate_inputs(copies[PLAIN].graph):
        if search is not None and report.fused:
            report.notes.append(
                "not compared as a whole: the graph may change what it is given, so it cannot run twice"
            )
        parsed.tell(report)
        return _compiled(gm, example_inputs, parsed, report.digest)

    # The version without templates gets these rewrites too, so that only templates differ.
    rewrite_patches(copies[PLAIN], FusionReport())
    rewrite_biases(copies[PLAIN], FusionReport())

    def by_rule() -> FusionReport:
        return fuse(copies[RULED], references=parsed.references, fold=parsed.fold, known=known)

    def version(name: str, digest: str) -> Callable[..., Any]:
        return _compiled(copies.get(name, gm), example_inputs, parsed, digest)

    return _fastest(report, by_rule, version, parsed, search.store, known)


def _fastest(
    searched: FusionReport,
    by_rule: Callable[[], FusionReport],
    version: Callable[[str, str], Callable[..., Any]],
    options: CompileOptions,
    store: Store | None,
    known: Choices,
) -> Callable[..., Any]:
    """The fastest version of a graph: what is known from an earlier process, or a race on the first call.

    Args:
        by_rule: chooses by rule.
        version: compiles one, given its name and its scheme's digest.
        known: what the rules went by.
    """
    rows = [(row.template, row.config) for row in searched.segments]
    key = segment_key((searched.digest, rows, options.cuda_graphs))
    keys = {SEARCHED: key, RULED: f"{key} by rule"}
    reports = {SEARCHED: searched}

    def settle(times: Mapping[str, float]) -> str:
        winner, report = pick_winner(reports, times)
        if winner == RULED and store is not None:
            # Rules prefer recorded configurations: without this they would choose the losing ones again.
            lost = differing(searched, report)
            store.update_choices({key: known[key] for key in lost if key in known}, without=lost)
        options.tell(report)
        return winner

    def compiled(name: str) -> Callable[..., Any]:
        return version(name, reports[name].digest if name in reports else "")

    races = store.load().races if store is not None else {}
    raced = {name: races[key] for name, key in keys.items() if key in races}
    if SEARCHED in raced:
        times = {name: us for name, (us, _) in raced.items()} | {PLAIN: raced[SEARCHED][1]}
        if min(times, key=times.__getitem__) == RULED:
            reports[RULED] = by_rule()
        return compiled(settle(times))
    ruled = by_rule()
    if ruled.fused and differing(searched, ruled):
        reports[RULED] = ruled

    def keep(times: Mapping[str, float]) -> str:
        if store is not None:
            store.update(Records(races={keys[name]: (times[name], times[PLAIN]) for name in reports}))
        return settle(times)

    timer = replayed_us if options.cuda_graphs == WHOLE else wall_us
    return ModelComparison({name: compiled(name) for name in (*reports, PLAIN)}, keep, timer)


def _compiled(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: CompileOptions, digest: str
) -> Callable[..., Any]:
    inputs = packed_examples(gm.graph, example_inputs)
    return packed_call(gm.graph, _inductor(gm, inputs, options, digest))


def _inductor(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: CompileOptions, digest: str
) -> Callable[..., Any]:
    patches: dict[str, Any] = {}
    if options.cuda_graphs is True:
        patches["triton.cudagraphs"] = True
    if options.deterministic:
        patches["deterministic"] = True
    mark = f"stof-{__version__}-{source_digest()}-{digest}" if digest else ""
    return inductor(gm, example_inputs, patches, mark)


def optimize(
    model: nn.Module,
    *,
    mask: Mask | None = None,
    attention: bool = True,
    pack: bool = True,
    unpad: bool = False,
    dynamic: bool | None = None,
    **options: Any,
) -> nn.Module:
    """Prepare a model's modules for fusion, in place, and compile it with backend "stof".

    In training mode, stof computes the attention of a Hugging Face model, forward and backward, and Inductor compiles
    the rest: stof's fused operators compute forward passes only. After `model.eval()`, optimize the model again.

    Args:
        model: in evaluation mode for fused inference, in training mode to train it.
        mask: a sparse mask for the self-attention layers of a Hugging Face model (`hf.sparsify`), or for those of
            another model in evaluation mode (`stof.replace_sdpa`); None leaves them to the model's own mask. Either
            takes the place of the mask of an earlier `optimize`; masks that `hf.sparsify` set stay.
        attention: let stof compute the attention of a Hugging Face model; other models choose theirs themselves.
        pack: pack the weights of query, key and value and of gate and up projection (`passes.weight_packing`), except
            in training mode.
        unpad: leave padding out of the batches of encoders of Hugging Face (`hf.enable(model, unpad=True)`). The
            encoders alone are compiled, for any number of tokens. With `cuda_graphs="whole"` they compute on some
            padding: the number of tokens is rounded up to a multiple of 256 and of a sixteenth of the next power of
            two. Recordings take up to 64 MB of GPU memory for each number of tokens and kind of attention mask. Calls
            beyond that (about 16,000 tokens), in 32 bits, or on GPUs other than Hopper run unrecorded, with a warning.
        dynamic: as in `torch.compile`.
        options: of the backend, see `CompileOptions`; in training mode `cuda_graphs=True` alone.

    Returns:
        the compiled model, in a module around it where `stof.replace_sdpa` applies the mask; with `unpad` the model
        itself. `unpack_weights(model)` undoes the packing; attention is set back by `model.set_attn_implementation`.

    Raises:
        UnsupportedError: the model's attention cannot be served.
        ArgumentError: an unknown option, an option of inference in training mode, or a mask without `attention`.
        MaskError: something that is no mask. A refused model is as it was before.

    Examples:
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(hidden_size=32, intermediate_size=64, num_attention_heads=2, num_hidden_layers=1)
        >>> model = BertModel(config).eval()
        >>> compiled = stof.optimize(model, mask=masks.sliding_window(7), cuda_graphs="whole")
        >>> with torch.inference_mode():
        ...     compiled(torch.arange(40)[None]).last_hidden_state.shape
        torch.Size([1, 40, 32])
    """
    parsed = CompileOptions.parse(options)
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"optimize takes a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, _Masked):
        (model,) = model.uncompiled
    of_transformers = _is_transformers(model)
    refused = [name for name in options if name != "cuda_graphs" or parsed.cuda_graphs == WHOLE]
    if model.training and refused:
        raise ArgumentError(
            f"{', '.join(refused)}: options of fused inference, and the model is in training mode; call model.eval() "
            "first, or leave them out. Training takes cuda_graphs=True alone"
        )
    if mask is not None and not attention:
        raise ArgumentError("a mask needs stof's attention; leave attention=True")
    if unpad and (not attention or not of_transformers or parsed.cuda_graphs is True or dynamic is False):
        raise ArgumentError(
            'unpad=True takes encoders of transformers, attention=True, cuda_graphs="whole" or False, and not '
            "dynamic=False: each batch has another number of tokens"
        )
    for name, value in (("attention", attention), ("pack", pack), ("unpad", unpad), ("dynamic", dynamic)):
        if not isinstance(value, bool) and (name != "dynamic" or value is not None):
            raise ArgumentError(
                f"{name} is True or False{', or None' if name == 'dynamic' else ''}, got {shown(value)}"
            )
    # A bad mask is refused before the model is changed.
    replaced = as_mask(mask) if mask is not None and not of_transformers else None
    if replaced is not None and model.training:
        raise UnsupportedError(
            "a mask for a model that is not of Hugging Face needs model.eval(): see stof.replace_sdpa; to train, call "
            "stof.nn.functional.scaled_dot_product_attention in the model",
            {},
        )
    if attention and of_transformers:
        from stof.integrations import transformers as hf

        if mask is not None:
            # A bad mask is refused before the model is changed.
            hf.check_can_serve(model)
            per_layer = hf.layer_masks(model, mask)
        hf.enable(model, unpad=unpad or None)
        _remove_masks(model)
        if mask is not None:
            setattr(model, _MASKS, hf.sparsify(model, dict(enumerate(per_layer))))
    else:
        _remove_masks(model)
    if of_transformers:
        from stof.integrations.transformers.packed_calls import will_be_captured

        will_be_captured(model, parsed.cuda_graphs == WHOLE)
    if model.training:
        _log.info("training mode: attention is stof's; Inductor compiles all else, forward and backward, unfused")
        # Inductor's CUDA graphs.
        how: dict[str, Any] = {"mode": "reduce-overhead" if parsed.cuda_graphs else None}
    else:
        if pack:
            pack_weights(model)
        how = {"backend": stof_backend, "options": options}
    if unpad:
        from stof.integrations.transformers.unpadded import compile_packed_calls

        compiler = functools.partial(torch.compile, dynamic=True, **how)
        recorder = functools.partial(CudaGraphRunner, folded_weights=parsed.fold)
        compile_packed_calls(model, compiler, recorder if parsed.cuda_graphs == WHOLE else None)
        return model
    compiled: Any = torch.compile(model, dynamic=dynamic, **how)
    if replaced is not None:
        compiled = _Masked(compiled, replaced, model).eval()
    if parsed.cuda_graphs == WHOLE:
        compiled.forward = CudaGraphRunner(compiled.forward, model, folded_weights=parsed.fold)
    return cast(nn.Module, compiled)


class _Masked(nn.Module):
    """A compiled model that computes its attention under a mask.

    Attributes:
        uncompiled: the model that was compiled, in a tuple, so that its parameters are listed once.
    """

    def __init__(self, compiled: Any, mask: Mask, uncompiled: nn.Module) -> None:
        super().__init__()
        self.compiled, self.mask, self.uncompiled = compiled, mask, (uncompiled,)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with replace_sdpa(self.mask):
            return self.compiled(*args, **kwargs)


def _remove_masks(model: nn.Module) -> None:
    """Remove the sparse masks that `optimize` set on a model or on parts of it, unless others replaced them."""
    for part in model.modules():
        masks = vars(part).pop(_MASKS, None)
        if masks is None:
            continue
        from stof.integrations.transformers.sparse_mask import sparse_mask_of

        layers = dict(part.named_modules())
        if any(
            mask is not None and name in layers and sparse_mask_of(layers[name]) is mask
            for name, mask in zip(masks.layers, masks.masks, strict=True)
        ):
            masks.remove()


def _is_transformers(model: nn.Module) -> bool:
    """Whether a module is, or holds, a model of Hugging Face transformers; it is not imported for that."""
    bases = (base for part in model.modules() for base in type(part).__mro__)
    return any(base.__name__ == "PreTrainedModel" and base.__module__.startswith("transformers.") for base in bases)


def refuse_training(gm: fx.GraphModule) -> None:
    """Raise UnsupportedError if gradients will be asked of the graph: the templates compute forward passes only."""
    if not torch.is_grad_enabled():
        return
    for node in gm.graph.nodes:
        value = node.meta.get("example_value")
        if isinstance(value, Tensor) and value.requires_grad:
            raise UnsupportedError(
                "backend 'stof' compiles inference only, and this call records gradients; call the model under "
                "torch.inference_mode() or torch.no_grad(), or train: with backend='inductor', or after "
                "stof.optimize(model.train())",
                {},
            )
