"""A model of transformers on a sequence that is split over ranks: inputs are split, and attention exchanges."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from stof.distributed import Shards, attention, shard
from stof.distributed.agreement import agree, digest
from stof.distributed.shards import check_mesh, device_of
from stof.errors import ArgumentError, ShapeError, StofError, UnsupportedError
from stof.handles import FULL, intersection
from stof.integrations.transformers.mask_interface import padding_of
from stof.integrations.transformers.model_mask import ModelMask
from stof.integrations.transformers.packed_calls import cache_of, sequence_numbers
from stof.integrations.transformers.packing_check import check, describe
from stof.integrations.transformers.served import check_module
from stof.integrations.transformers.sparse_mask import NAME
from stof.masks import Mask, causal, documents
from stof.masks.snapshots import memory_words
from stof.runtime.private import is_traced

# Splits that are kept, by mask and length: counting tiles takes time, and batches of one length have one mask.
_MOST_SPLITS = 8


class SplitSequence:
    """The tokens of a model's call on each rank, under the mask of any layer."""

    def __init__(self, shards: Shards) -> None:
        self.shards = shards
        self._by_mask = {shards.mask.key: shards}

    @torch.compiler.disable(reason="stof.distributed exchanges tensors between ranks outside of compiled graphs")
    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, **options: Any) -> Tensor:
        """`stof.distributed.attention` under a mask of all tokens."""
        if mask.may_change:  # shards have the values of one moment
            return attention(q, k, v, self.shards.with_mask(mask), **options)
        shards = self._by_mask.get(mask.key)
        if shards is None:
            shards = self._by_mask[mask.key] = self.shards.with_mask(mask)
        return attention(q, k, v, shards, **options)


class Parallelised:
    """A model that was given to `parallelise`.

    Attributes:
        shards: who holds which tokens of the latest call; None before the first.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        self.model, self.mesh = model, mesh
        self.shards: Shards | None = None
        self._splits: dict[tuple[str, int], SplitSequence] = {}
        self._parameters = tuple(inspect.signature(model.forward).parameters)
        self._has_labels = False
        self._called = False  # with gradients, since they were reduced
        # Whether all ranks were found to hold the same parameters, at the first call.
        self._same_parameters = mesh.size() == 1
        # Before the hooks of `enable`, which look at whole sequences.
        self._hooks = [
            model.register_forward_pre_hook(torch.compiler.disable(self._before), prepend=True, with_kwargs=True),
            model.register_forward_hook(torch.compiler.disable(self._after)),
        ]

    def join(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """An output of the latest call, of all tokens on every rank; see `stof.distributed.Shards.join`."""
        if self.shards is None:
            raise ArgumentError("the model was not called yet, so no tokens are split")
        return self.shards.join(tensor, dim)

    def reduce_gradients(self) -> None:
        """Sum the gradients of all parameters over the mesh, after the backward pass and before the optimizer's step.

        Each rank's are its share, None for 0: of an expert that none of its tokens chose. All ranks call it.

        Raises:
            ArgumentError: parameters are sharded over the mesh; or the model was not called, or through a wrapper that
                calls its `forward` (PEFT), so that its gradients are of whole sequences.
        """
        if not self._called:
            raise ArgumentError(
                f"{type(self.model).__name__} was not called with gradients since the last reduction; call the model "
                "that parallelise was given, not a wrapper of it, which calls its forward without splitting the tokens"
            )
        self._called = False
        parameters, group = list(self.model.parameters()), self.mesh.get_group()
        ranks = dist.get_process_group_ranks(group)
        if any(_is_sharded_over(parameter, ranks) for parameter in parameters):
            raise ArgumentError(
                "parameters are sharded over the ranks that share a sequence, so their gradients cannot be summed "
                "over these; give fully_shard another dimension of the mesh than parallelise"
            )
        has_gradient = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32)
        has_gradient = has_gradient.to(device_of(self.mesh))
        dist.all_reduce(has_gradient, dist.ReduceOp.MAX, group=group)
        for parameter, of_some_rank in zip(parameters, has_gradient.tolist(), strict=True):
            if not of_some_rank:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = parameter.grad
            dist.all_reduce(gradient.to_local() if isinstance(gradient, DTensor) else gradient, group=group)

    def remove(self) -> None:
        """Have the model take whole sequences again."""
        for hook in self._hooks:
            hook.remove()

    def __enter__(self) -> Parallelised:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def _before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Split the arguments of a call."""
        arguments = dict(zip(self._parameters, args, strict=False)) | kwargs
        error: StofError | None = None
        facts: dict[str, object] = {}
        try:
            tokens = _check_call(module, arguments)
            rows, length = tokens.shape[:2]
            positions = arguments.get("position_ids")
            mask = _mask_of_call(arguments, rows, length)
            arguments["position_ids"] = (
                torch.arange(length, device=tokens.device)[None] if positions is None else positions
            )
            _check_tokens_apart(module, arguments, rows, length)
            facts = {
                "the batch size": rows,
                "the length": length,
                "the mask": mask.key,
                "the arguments": sorted(arguments),
            }
            if self.mesh.size() > 1:
                # Numbers that ranks may round differently are not compared.
                facts |= {
                    f"the hash of {name}": digest(value)
                    for name, value in arguments.items()
                    if isinstance(value, Tensor) and not value.is_floating_point()
                }
            if not self._same_parameters:
                facts |= _checksums(self.model, dist.get_process_group_ranks(self.mesh.get_group()))
        except StofError as refused:
            error = refused
        if self.mesh.size() > 1:
            agree(self.mesh.get_group(), facts, error)
            self._same_parameters = True
        elif error is not None:
            raise error
        split = self._split_of(mask, length)
        self.shards = split.shards
        self._called = self._called or torch.is_grad_enabled()
        self._has_labels = arguments.get("labels") is not None
        if self._has_labels:
            _shift_labels(arguments)
        local = {name: _local(name, value, split.shards, rows) for name, value in arguments.items()}
        count = len(split.shards.positions)
        local["attention_mask"] = ModelMask(
            mask, (rows, 1, count, count), includes_model_mask=False, checked=True, split=split
        )
        if "use_cache" in self._parameters:
            local["use_cache"] = False
        return (), local

    def _split_of(self, mask: Mask, length: int) -> SplitSequence:
        """The split of a call; equal on all ranks, which agreed on the mask."""
        key = (mask.key, length)
        split = self._splits.get(key)
        if split is None:
            if len(self._splits) >= _MOST_SPLITS:
                self._splits.pop(next(iter(self._splits)))
            is_causal = any(getattr(layer, "is_causal", False) for layer in self.model.modules())
            # As `make_mask` writes it for such layers, so that they need no other shards.
            work = intersection(causal(), mask) if is_causal else mask
            split = self._splits[key] = SplitSequence(shard(work, length, self.mesh))
        return split

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        """The loss has the value of all tokens, and the gradient of this rank's."""
        if not self._has_labels:
            return output
        share = output[0]
        total = share.detach().clone()
        dist.all_reduce(total, group=self.mesh.get_group())
        loss = share + (total - share.detach())
        if isinstance(output, tuple):
            return loss, *output[1:]
        output.loss = loss
        return output


def parallelise(model: nn.Module, mesh: DeviceMesh) -> Parallelised:
    """Have a decoder or encoder work on sequences that are split over the ranks of a mesh.

    Every rank calls the model with the same whole sequences, as it would in one process: `input_ids` or
    `inputs_embeds`, and where needed a 2-D `attention_mask`, `position_ids` (which may begin anew: packed sequences)
    and `labels`. The model then sees this rank's tokens and their positions. Layers attend under their own masks and
    those of `sparsify`, each to the tokens of all ranks. Outputs are those of this rank's tokens; `join` gives all.

    With `labels`, a causal language model's loss is that of all tokens on every rank. Gradients of parameters are this
    rank's share: call `reduce_gradients()` before the optimizer's step.

    Args:
        model: a model of transformers that runs stof's attention (`enable`). Call it, not a wrapper of it: of a model
            with PEFT's adapters, give and call `peft_model.get_base_model()`, which has the adapters.
        mesh: as for `stof.distributed.shard`.

    Returns:
        a handle with `shards`, `join`, `reduce_gradients` and `remove`; the end of a `with` block removes it as well.

    Raises:
        ArgumentError: no model of transformers with stof's attention, or no mesh of one dimension with this rank.
        UnsupportedError: a model that takes no `position_ids`, whose rotary embeddings depend on the length, or with
            an encoder and a decoder; and in a call: a model that counts positions otherwise than from 0, or whose
            layers mix tokens outside attention, a cache, masks for every score, labels of other tasks, and masks that
            transformers builds of functions stof does not know.
        RankMismatchError: in a call, ranks that differ in length, batch size, mask, arguments, or values of integers;
            in the first call also in parameters.

    Examples:
        >>> import torch.distributed as dist
        >>> import stof.integrations.transformers as stof_hf
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(hidden_size=32, intermediate_size=64, num_attention_heads=2, num_hidden_layers=2)
        >>> model = stof_hf.enable(BertModel(config).eval())
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> with torch.no_grad(), stof_hf.parallelise(model, init_device_mesh("cpu", (1,))) as parallel:
        ...     parallel.join(model(torch.arange(40)[None]).last_hidden_state).shape
        torch.Size([1, 40, 32])
        >>> dist.destroy_process_group()
    """
    check_module(model)
    check_mesh(mesh)
    if not isinstance(model, PreTrainedModel):
        names = [name for name, part in model.named_modules() if isinstance(part, PreTrainedModel)]
        inner = f"; give the one within it, model.{names[0]}, and call that one" if names else ""
        raise ArgumentError(f"parallelise takes a model of transformers, got {type(model).__name__}{inner}")
    config = model.config
    if config._attn_implementation != NAME:
        raise ArgumentError(
            f"{type(model).__name__} does not run stof's attention; call stof.integrations.transformers.enable(model)"
        )
    parameters = inspect.signature(model.forward).parameters
    missing = [name for name in ("input_ids", "attention_mask", "position_ids") if name not in parameters]
    if missing or getattr(config, "is_encoder_decoder", False):
        why = f"takes no {', '.join(missing)}" if missing else "has an encoder and a decoder"
        raise UnsupportedError(f"{type(model).__name__} {why}, so its tokens cannot be split by position", {})
    _check_rotary(model)
    return Parallelised(model, mesh)


def _check_rotary(model: nn.Module) -> None:
    """Refuse rotary embeddings whose frequencies depend on the largest position: each rank has another one."""
    for name, module in model.named_modules():
        types = getattr(module, "rope_type", None)
        for of_layers in types.values() if isinstance(types, dict) else [types]:
            if isinstance(of_layers, str) and ("dynamic" in of_layers or of_layers == "longrope"):
                raise UnsupportedError(
                    f"{name} has rotary embeddings of type {of_layers!r}, whose frequencies depend on the length of "
                    "the sequence; a rank knows its own positions alone",
                    {},
                )


def _is_sharded_over(parameter: nn.Parameter, ranks: Sequence[int]) -> bool:
    """Whether some of these ranks hold different parts of a parameter, as with FSDP2."""
    if not isinstance(parameter, DTensor):
        return False
    return any(
        not placement.is_replicate()
        and len(set(ranks).intersection(dist.get_process_group_ranks(parameter.device_mesh.get_group(dim)))) > 1
        for dim, placement in enumerate(parameter.placements)
    )


@torch.no_grad()
def _checksums(model: nn.Module, ranks: Sequence[int]) -> dict[str, object]:
    """Sums of the words of parameters that all ranks of a sequence hold."""
    sums = {
        f"the checksum of {name}": memory_words(p.to_local() if isinstance(p, DTensor) else p).sum(dtype=torch.int64)
        for name, p in model.named_parameters()
        if not _is_sharded_over(p, ranks)
    }
    return {name: int(value) for name, value in sums.items()}


def _check_call(module: nn.Module, given: dict[str, Any]) -> Tensor:
    """The tokens of a call, `[B, S]` or `[B, S, hidden]`."""
    tokens = given.get("input_ids") if given.get("inputs_embeds") is None else given["inputs_embeds"]
    if is_traced(tokens):
        raise UnsupportedError("a model on split sequences is not exported or traced", {})
    if module.config._attn_implementation != NAME:  # type: ignore[union-attr]
        raise UnsupportedError(f"{type(module).__name__} no longer runs stof's attention; call enable(model)", {})
    if not isinstance(tokens, Tensor) or tokens.ndim < 2:
        raise ArgumentError("a model on split sequences is called with input_ids [B, S] or inputs_embeds")
    if cache_of(given) is not None or given.get("use_cache"):
        raise UnsupportedError("split sequences have no cache: leave past_key_values and use_cache out", {})
    if not isinstance(given.get("logits_to_keep", 0), int) or given.get("logits_to_keep", 0):
        raise UnsupportedError("logits_to_keep counts the tokens of one rank; leave it out", {})
    padding = given.get("attention_mask")
    if padding is not None and (not isinstance(padding, Tensor) or tuple(padding.shape) != tuple(tokens.shape[:2])):
        shape = list(padding.shape) if isinstance(padding, Tensor) else type(padding).__name__
        raise ShapeError(f"attention_mask is {list(tokens.shape[:2])}, one value per token, got {shape}")
    if given.get("labels") is None:
        if given.get("shift_labels") is not None:
            raise ArgumentError("shift_labels of split sequences go with labels; give both")
    else:
        accepts = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(module.forward).parameters.values())
        if getattr(module, "loss_type", None) != "ForCausalLM" or not accepts:
            raise UnsupportedError(
                f"the loss of {type(module).__name__} is not known to be a sum over tokens; leave labels out, and "
                "compute it from the outputs of this rank's tokens",
                {},
            )
    return tokens


def _mask_of_call(given: dict[str, Any], rows: int, length: int) -> Mask:
    """Padding and packed sequences of a call, read on the host."""
    padding, positions = given.get("attention_mask"), given.get("position_ids")
    valid = torch.ones(rows, length, dtype=torch.bool) if padding is None else padding.bool()
    begins_late = bool((valid.int().diff(dim=1) > 0).any())
    if positions is None:
        if begins_late:
            raise UnsupportedError(
                "the attention_mask drops tokens before others, and models count positions differently then; pad on "
                "the right, or give position_ids",
                {},
            )
    elif positions.ndim != 2 or positions.shape[1] != length:
        raise UnsupportedError(f"position_ids are [B, S] for split sequences, got {list(positions.shape)}", {})
    else:
        valid = valid.to(positions.device)
        numbers = sequence_numbers(positions.expand(rows, -1), valid)
        if begins_late or bool((numbers > 0).any()):
            return documents(torch.where(valid, numbers, -1))
    mask = padding_of(valid)
    return FULL if mask is None else mask


def _check_tokens_apart(module: nn.Module, given: dict[str, Any], rows: int, length: int) -> None:
    """Refuse a model whose layers mix tokens outside attention, or whose positions do not count from 0, as RoBERTa's.

    It is run on a short row, once for each signature.
    """
    mask = ModelMask(FULL, (rows, 1, length, length), includes_model_mask=False, first_position="0")
    arguments = {name: value for name, value in given.items() if name not in ("labels", "attention_mask")}
    described = describe(arguments | {"attention_mask": mask}, rows, length, with_tensors=True)
    verdict = check(module, described, rows, length)
    if not verdict.apart:
        raise UnsupportedError(f"{type(module).__name__} cannot run on split sequences: {verdict.reason}", {})


def _shift_labels(given: dict[str, Any]) -> None:
    """Labels of the next tokens, which other ranks may hold, and how many there are on all ranks."""
    ignored = given.get("ignore_index", -100)
    if given.get("shift_labels") is None:
        given["shift_labels"] = nn.functional.pad(given["labels"], (0, 1), value=ignored)[:, 1:].contiguous()
    if given.get("num_items_in_batch") is None:
        given["num_items_in_batch"] = (given["shift_labels"] != ignored).sum()


def _local(name: str, value: Any, shards: Shards, rows: int) -> Any:
    """This rank's part of an argument: of tensors with one entry per token."""
    if isinstance(value, Tensor) and name == "position_ids":
        return shards.split(value, 1)
    if isinstance(value, Tensor) and value.ndim > 1 and tuple(value.shape[:2]) == (rows, shards.length):
        return shards.split(value, 1)
    return value
