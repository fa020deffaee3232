"""A pre-forward hook that finds packed sequences in a call's arguments, and checks that the model keeps them apart.

A *part* is a `PreTrainedModel`: the model or one within it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from stof.errors import UnsupportedError
from stof.handles import FULL
from stof.integrations.transformers.forward_inspection import hands_mask_on
from stof.integrations.transformers.layer_code import calls_interface
from stof.integrations.transformers.mask_recognition import documents_outside_graphs
from stof.integrations.transformers.model_mask import ModelMask
from stof.integrations.transformers.packing_check import PASSED, TRACED_WIDTH, Argument, Verdict, check, describe
from stof.integrations.transformers.served import refuse_attention_weights
from stof.integrations.transformers.sparse_mask import NAME
from stof.masks import documents
from stof.masks.rules import Documents
from stof.runtime.private import is_exporting

# Arguments of models that hold earlier tokens: the second since transformers 5.24, which still accepts the first.
_CACHE = ("past_key_values", "cache")
# Of flattened batches: where the sequences of queries and of keys begin, and the longest of them.
_BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k")
_FLATTENED = (*_BOUNDARIES, "max_length_q", "max_length_k")
_CALL_INFO = "_stof_called"
# An attribute of classes: their `forward`, if it refuses padding masks that number sequences.
FORWARD_READS_MASKS = "_stof_forward_reads_masks"
_CAPTURED = "_stof_captured"
_NUMBERED = (
    "attention_mask [B, tokens] holds values above 1, as where it numbers packed sequences, and stof reads it as "
    "padding: 1 at tokens, 0 at padding. Give position_ids that begin anew at every sequence, and mask.clamp(max=1)"
)


class _CallInfo(NamedTuple):
    """What is known of a part's calls.

    Attributes:
        parameters: names of the arguments given by position.
        takes_mask: whether it takes an `attention_mask`.
        attends: whether it has attention layers that do not belong to another part within it.
        hands_mask_on: see `forward_inspection`.
        is_inner: whether it is a part of another model.
    """

    parameters: tuple[str, ...]
    takes_mask: bool
    attends: bool
    hands_mask_on: bool
    is_inner: bool


@torch.compiler.assume_constant_result
def _stof_check(part: nn.Module, arguments: tuple[Argument, ...], rows: int, width: int) -> Verdict:
    """`check`, which Dynamo runs while it traces: the verdict is a constant, and the graph holds no part of the check.

    A method, as PyTorch 2.11 takes no module among the arguments of such a function; it is looked up by this name.
    """
    return check(part, arguments, rows, width)


PreTrainedModel._stof_check = _stof_check


def watch(model: nn.Module) -> None:
    """Look at the calls of the parts of a model that run stof's attention; packing is checked anew in each."""
    for part in model.modules():
        if not isinstance(part, PreTrainedModel) or part.config._attn_implementation != NAME:
            continue
        part.__dict__.pop(PASSED, None)
        before: _CallInfo | None = getattr(part, _CALL_INFO, None)
        if before is None:
            part.register_forward_pre_hook(before_forward, with_kwargs=True)
        is_inner = part is not model or (before is not None and before.is_inner)
        setattr(part, _CALL_INFO, _CallInfo(*_parameters(part), _attends(part), hands_mask_on(type(part)), is_inner))


def will_be_captured(model: nn.Module, captured: bool) -> None:
    """Tell a model whether its calls will be captured whole by CUDA graphs, where nothing can be read on the host."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            setattr(part, _CAPTURED, captured)


def _parameters(part: PreTrainedModel) -> tuple[tuple[str, ...], bool]:
    """`parameters` and `takes_mask` of `_CallInfo`.

    Wrappers that take `*args` say nothing of either, whether they replace `forward` on the instance or in its class.
    """
    inherited = [vars(kind)["forward"].__get__(part) for kind in type(part).__mro__ if "forward" in vars(kind)]
    signatures = [inspect.signature(forward).parameters.values() for forward in (part.forward, *inherited)]
    known = [signature for signature in signatures if all(one.kind is not one.VAR_POSITIONAL for one in signature)]
    if not known:
        return (part.main_input_name,), True
    positional = tuple(one.name for one in known[0] if one.kind not in (one.KEYWORD_ONLY, one.VAR_KEYWORD))
    return positional, any(one.name == "attention_mask" for signature in known for one in signature)


def _attends(module: nn.Module) -> bool:
    """Whether a module has attention layers that do not belong to another part within it."""
    inner = [child for child in module.children() if not isinstance(child, PreTrainedModel)]
    return calls_interface(type(module)) or any(map(_attends, inner))


def before_forward(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Give a part of a model the mask of its packed sequences, checked.

    Raises:
        UnsupportedError: packed sequences, and the part does not keep them apart, or there are earlier tokens; an
            `attention_mask` that numbers sequences; attention weights are asked for.
    """
    config: Any = module.config
    if config._attn_implementation != NAME:
        return None
    tracing, called = torch.compiler.is_dynamo_compiling(), getattr(module, _CALL_INFO)
    arguments = dict(zip(called.parameters, args, strict=False)) | kwargs
    # Models take this away from what they hand to their layers.
    refuse_attention_weights(arguments.get("output_attentions", getattr(config, "output_attentions", False)))
    packed = next((value for value in arguments.values() if _is_unchecked(value)), None)
    changed: dict[str, Any] = {}
    if called.attends:
        if len(args) > len(called.parameters):
            raise UnsupportedError(
                f"{type(module).__name__}.forward was replaced by a function that does not name its arguments, and "
                f"was called with {len(args)} of them by position; give all but the first by name",
                {},
            )
        # Dynamo traces the hooks of the compiled module separately; an assertion there would add a graph.
        if called.is_inner if tracing else not _forward_reads_masks(module):
            refuse_numbered_mask(arguments, tracing)
        if packed is None:
            how = called.takes_mask, arguments, tracing, getattr(module, _CAPTURED, False)
            packed = _mask_of_boundaries(*how)
            if packed is None:
                packed = _mask_of_positions(*how)
            else:  # layers refuse boundaries that this function has not read
                for name in _FLATTENED:
                    arguments.pop(name, None)
                kwargs = {name: value for name, value in kwargs.items() if name not in _FLATTENED}
            mask = _mask_of_whole_rows(arguments) if packed is None and called.hands_mask_on else packed
            changed = {} if mask is None else {"attention_mask": mask}
    if packed is not None and (packed.is_packed or tracing):
        # Not checked in CUDA graphs and exports: the check cannot run the model there.
        arguments |= changed
        tokens = _tokens(arguments)
        rows, width = packed.shape[::2] if tokens is None else tokens.shape[:2]
        described = describe(arguments, rows, width, with_tensors=not tracing)
        size = (1, TRACED_WIDTH) if tracing else (rows, width)
        verdict = module._stof_check(described, *size)  # type: ignore[operator]
        if verdict.apart is None and not called.attends:
            return None  # the parts within it are checked in their turn
        if not verdict.apart:
            raise _not_apart(module, packed, verdict)
        changed |= {name: value.after_check() for name, value in arguments.items() if _is_unchecked(value)}
    if not changed:
        return None
    positional = tuple(changed.pop(name, value) for name, value in zip(called.parameters, args, strict=False))
    return positional + args[len(positional) :], kwargs | changed


def _not_apart(module: nn.Module, packed: ModelMask, verdict: Verdict) -> UnsupportedError:
    advice = verdict.advice or (
        "Pass the padded batch instead: input_ids and attention_mask as they were before pack(), and no position_ids "
        "that begin anew within a row"
        if packed.is_packed
        else "Compiled code cannot tell whether position_ids begin anew within a row, as those of packed sequences: "
        "leave position_ids out, or do not compile this model"
    )
    return UnsupportedError(f"{type(module).__name__} cannot run packed sequences: {verdict.reason}. {advice}", {})


def cache_of(arguments: Mapping[str, Any]) -> Any:
    """The cache among the named arguments of a model's call, None without one."""
    return next((arguments[name] for name in _CACHE if arguments.get(name) is not None), None)


def _is_unchecked(value: object) -> bool:
    return isinstance(value, ModelMask) and value.is_packed and not value.checked


def _tokens(arguments: dict[str, Any]) -> Tensor | None:
    tokens = arguments.get("input_ids") if arguments.get("inputs_embeds") is None else arguments["inputs_embeds"]
    return tokens if isinstance(tokens, Tensor) and tokens.ndim > 1 else None


def _cannot_read(values: Tensor, tracing: bool) -> bool:
    """Whether reading values would break a graph.

    `tracing` is an argument, because Dynamo may trace this function alone in an eager call.
    """
    return tracing or is_exporting() or (values.is_cuda and torch.cuda.is_current_stream_capturing())


def _forward_reads_masks(module: nn.Module) -> bool:
    """Whether the `forward` that will run refuses masks that number sequences; others may have replaced it."""
    kind = type(module)
    return "forward" not in vars(module) and getattr(kind, FORWARD_READS_MASKS, None) is kind.forward


def refuse_numbered_mask(arguments: dict[str, Any], tracing: bool = False) -> None:
    """Refuse padding masks with values above 1; compiled code raises an error when it runs."""
    tokens = _tokens(arguments)
    if tokens is not None and tokens.shape[1] == 1:
        return  # a token of a generation, whose first call was looked at
    for name in ("attention_mask", "encoder_attention_mask"):
        mask = arguments.get(name)
        if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.dtype == torch.bool:
            continue
        if tracing and not is_exporting():
            # A literal message, as Dynamo asks of the assertions that it moves into graphs.
            assert (mask <= 1).all(), "attention_mask holds values above 1: stof reads it as padding, not as sequences"
        elif not _cannot_read(mask, tracing) and bool((mask > 1).any()):
            raise UnsupportedError(_NUMBERED, {})


def _mask_of_whole_rows(arguments: dict[str, Any]) -> ModelMask | None:
    """A mask that keeps everything, for a call without positions and padding; the model's own mask still applies.

    Without it, transformers looks for packed sequences in its default positions. Compiled code cannot look, and would
    evaluate a mask of every score, all true.
    """
    tokens = _tokens(arguments)
    if tokens is None or cache_of(arguments) is not None:
        return None
    if arguments.get("attention_mask") is not None or arguments.get("position_ids") is not None:
        return None
    rows, width = tokens.shape[:2]
    return ModelMask(FULL, (rows, 1, width, width), includes_model_mask=False)


def _mask_of_boundaries(takes_mask: bool, arguments: dict[str, Any], tracing: bool, captured: bool) -> ModelMask | None:
    """The mask of a flattened batch, from the boundaries that FlashAttention reads; None where none can be read.

    Compiled code computes the document of each token from them, and asserts that they are boundaries.

    Args:
        captured: see `will_be_captured`.

    Raises:
        ShapeError: boundaries of another number of tokens.
        MaskError: boundaries that decrease, or do not begin at 0.
        UnsupportedError: several rows, a cache, other boundaries of keys than of queries, or a model without an
            `attention_mask`.
    """
    (ends, kv_ends), tokens = (arguments.get(name) for name in _BOUNDARIES), _tokens(arguments)
    valid = arguments.get("attention_mask")
    if not isinstance(ends, Tensor) or not isinstance(kv_ends, Tensor) or tokens is None:
        return None
    rows, width = tokens.shape[:2]
    if valid is not None and (not isinstance(valid, Tensor) or valid.shape != (rows, width)):
        return None
    in_graph = _cannot_read(ends, tracing)
    if in_graph and (not tracing or is_exporting() or captured):
        return None
    alike = ends is kv_ends or (ends.shape == kv_ends.shape if in_graph else torch.equal(ends, kv_ends))
    if rows != 1 or cache_of(arguments) is not None or not alike or not takes_mask:
        raise UnsupportedError(
            f"{' and '.join(_BOUNDARIES)} are read of a flattened batch: one row of tokens, the same boundaries for "
            "queries and keys, no cache, and a model that takes an attention_mask; pass the padded batch",
            {},
        )
    if in_graph:
        torch._assert_async((ends == kv_ends).all(), "cu_seq_lens_q and cu_seq_lens_k differ")
        is_boundaries = (ends[0] == 0) & (ends[-1] == width) & (ends.diff() >= 0).all()
        torch._assert_async(is_boundaries, "cu_seq_lens_q are not boundaries")
        ids = torch.bucketize(torch.arange(width, device=ends.device, dtype=ends.dtype), ends, right=True)[None] - 1
        ids = ids if valid is None else torch.where(valid.to(ids.device, torch.bool), ids, -1)
        return ModelMask(documents(ids), (1, 1, width, width), includes_model_mask=False)
    mask = documents(cu_seqlens=ends.tolist())
    mask.check(width, width)
    if valid is not None:
        ids = torch.repeat_interleave(torch.arange(len(ends) - 1), ends.diff().cpu())
        mask = documents(torch.where(valid[0].cpu().bool(), ids, -1))
    return ModelMask(mask, (1, 1, width, width), includes_model_mask=False)


def _mask_of_positions(takes_mask: bool, arguments: dict[str, Any], tracing: bool, captured: bool) -> ModelMask | None:
    """The mask of sequences whose positions begin anew within a row; None where none do.

    transformers looks for such positions only where a decoder is called without a mask and without a cache. Compiled
    code keeps sequences apart whatever the positions are, by documents whose ids it computes. They are read on the host
    when it runs; in CUDA graphs and exported programs, which cannot do that, a tensor says so of every score.

    Args:
        captured: see `will_be_captured`.

    Raises:
        UnsupportedError: such positions and a cache, or a model without an `attention_mask`.
    """
    tokens, positions, valid = _tokens(arguments), arguments.get("position_ids"), arguments.get("attention_mask")
    if tokens is None or not isinstance(positions, Tensor):
        return None
    rows, width = tokens.shape[:2]
    cache, graph = cache_of(arguments), _cannot_read(positions, tracing)
    if positions.ndim not in (2, 3) or positions.shape[-1] != width or width == 1 or rows == 0:
        return None
    if graph and (cache is not None or not takes_mask):
        return None
    # Time, the first of several kinds of positions, never decreases within a sequence, except in videos with sound.
    time = positions[0] if positions.ndim == 3 else positions
    if not graph and not bool((time.diff(dim=1) <= 0).any()):
        return None
    if valid is not None:
        if not isinstance(valid, Tensor) or valid.ndim != 2 or valid.shape[1] < width:
            return None
        valid = valid[:, -width:].to(positions.device, torch.bool)
    numbers = sequence_numbers(positions.expand(*positions.shape[:-2], rows, width), valid)
    shape = (rows, 1, width, width)
    if graph and (not tracing or is_exporting() or captured):
        keep = numbers[:, None, :, None] == numbers[:, None, None, :]
        keep = keep if valid is None else keep & valid[:, None, None, :]
        return ModelMask(FULL, shape, keep=keep, includes_model_mask=False, sequences_unknown=True)
    ids = numbers if valid is None else torch.where(valid, numbers, -1)
    if graph:
        return ModelMask(documents(ids), shape, includes_model_mask=False)
    mask = documents_outside_graphs(ids)
    assert isinstance(mask, Documents)
    if max(number for runs in mask.runs for number, _ in runs) < 1:
        return None
    if cache is not None or not takes_mask:
        what = f"a cache ({' or '.join(_CACHE)}) is given" if takes_mask else "the model takes no attention_mask"
        raise UnsupportedError(
            f"position_ids begin anew within a row (packed sequences), and {what}; a packed batch runs once: leave the "
            "cache out, or pass the padded batch",
            {},
        )
    return ModelMask(mask, shape, includes_model_mask=False)


def sequence_numbers(positions: Tensor, valid: Tensor | None) -> Tensor:
    """How many sequences began before each token, int64 `[B, S]`.

    A token begins a sequence if its position is not above that of the token before it. Within an image or video, height
    and width decrease and time stays constant: in a row that has them, a token begins a sequence if none of its
    positions is above any position before it in the row.

    Args:
        positions: `[B, S]`; or `[3, B, S]`, time, height and width; or `[4, B, S]`, text first, which alone is read.
        valid: bool `[B, S]`, false at padding, which is passed over: positions may stay constant there; None without.
    """
    positions = positions[None] if positions.ndim == 2 else positions
    positions = positions[:1] if positions.shape[0] > 3 else positions
    several = positions.shape[0] > 1
    if valid is None:
        if not several:
            return nn.functional.pad(positions[0].diff(dim=1) <= 0, (1, 0)).cumsum(1)
        valid = torch.ones_like(positions[0], dtype=torch.bool)
    low, high = (positions.amin(0), positions.amax(0)) if several else (positions[0], positions[0])
    place = torch.arange(low.shape[1], device=low.device).expand_as(low)
    last_valid = torch.where(valid, place, -1).cummax(1).values
    previous = nn.functional.pad(last_valid[:, :-1], (1, 0), value=-1)
    bound = low
    if several:
        # Frames of one token repeat a position. So a sequence begins at the row's lowest position, and in a row of text
        # alone where positions decrease.
        is_text = ((low == high) | ~valid).all(1, keepdim=True)
        lowest = torch.where(valid, low, high.amax()).cummin(1).values
        bound = torch.where(is_text, torch.maximum(low - 1, lowest), lowest)
    begins = valid & (previous >= 0) & (high <= bound.gather(1, previous.clamp(min=0)))
    return begins.cumsum(1)
