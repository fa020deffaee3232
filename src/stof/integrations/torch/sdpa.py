"""PyTorch's attention computed by STOF inside a `with` block, for models whose code stays as it is."""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from stof.errors import ArgumentError, DeviceError, DtypeError, ShapeError, UnsupportedError
from stof.masks import Mask
from stof.masks.tensors import as_mask
from stof.nn.functional import scaled_dot_product_attention
from stof.runtime.locks import ForkSafeLock
from stof.runtime.private import has_function_mode

__all__ = ["replace_sdpa"]

# How `stof.attention` refuses what PyTorch may take.
_REFUSED = (ArgumentError, DeviceError, DtypeError, ShapeError, UnsupportedError)
_BLOCKS_LOCK = ForkSafeLock()
_BLOCKS = 0  # those with masks, of all threads
_HAD_FAST_PATHS = True  # whether PyTorch's fast paths were enabled before the first of them
# The arguments of `F.multi_head_attention_forward` in their order, and their defaults.
_LAYER_DEFAULTS: dict[str, Any] = {
    name: parameter.default for name, parameter in inspect.signature(F.multi_head_attention_forward).parameters.items()
}


class replace_sdpa(TorchFunctionMode):  # noqa: N801
    """Compute PyTorch's attention by `stof.attention` inside a `with` block, in inference.

    Serves `F.scaled_dot_product_attention`, `nn.MultiheadAttention` and what is built from them
    (`nn.TransformerEncoder`, timm, torchvision, diffusers), eagerly and compiled. Without a mask, results are those of
    PyTorch up to rounding. PyTorch still computes calls while gradients are enabled, with dropout, that return weights,
    and what `stof.attention` refuses.

    Args:
        mask: for self-attention: a score counts only if this mask keeps it as well. A mask of `stof.masks`, text, a
            mask function or a bool tensor, which is copied. **A call counts as self-attention if it has as many keys
            as queries**: give no mask to a model whose cross-attention may have as many. Calls with other lengths
            raise, except those of `nn.MultiheadAttention` in eager code, which are computed without the mask. With as
            many keys as queries, it raises unless query and key are one tensor.

    A block serves one thread. `torch.compile` compiles calls inside and outside of blocks separately. TorchScript does
    not see blocks. While there is a block with a mask, the fast paths of `torch.backends.mha` are disabled in all
    threads: they compute layers without calling attention, give 0 at padding, and take nested tensors, which
    `nn.MultiheadAttention` refuses without them.

    Raises:
        ArgumentError: a block inside another one.
        UnsupportedError: with a mask, where gradients are enabled: an activation checkpoint would compute again without
            the mask. Train with `stof.attention` or `stof.nn.functional.scaled_dot_product_attention` in the model.
        UnsupportedError: with a mask, a call that cannot have it, or none in the whole block that has it.

    Source: `torch.overrides.TorchFunctionMode`.

    Examples:
        >>> layer = nn.TransformerEncoderLayer(32, 4, batch_first=True).eval()
        >>> with torch.inference_mode(), stof.replace_sdpa(masks.sliding_window(7, 7)):
        ...     layer(torch.randn(2, 100, 32)).shape
        torch.Size([2, 100, 32])
    """

    def __init__(self, mask: Any = None) -> None:
        super().__init__()
        self.mask: Mask | None = None if mask is None else as_mask(mask)
        self._applied = False

    def __enter__(self) -> replace_sdpa:
        """Start serving this thread."""
        if has_function_mode(replace_sdpa):
            raise ArgumentError("replace_sdpa is inside another replace_sdpa; combine their masks with &")
        if self.mask is not None and torch.is_grad_enabled():
            raise UnsupportedError(
                "replace_sdpa with a mask needs gradients disabled: enter torch.inference_mode() or torch.no_grad() "
                "first; to train, call stof.nn.functional.scaled_dot_product_attention in the model",
                {},
            )
        self._applied = False
        if self.mask is not None:
            _count_blocks(1)
        super().__enter__()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Stop serving this thread."""
        super().__exit__(kind, error, trace)
        if self.mask is not None:
            _count_blocks(-1)
        if kind is None and self.mask is not None and not self._applied:
            raise UnsupportedError(
                "no attention was computed under the mask of replace_sdpa: nothing inside called "
                "F.scaled_dot_product_attention or self-attention of nn.MultiheadAttention",
                {},
            )

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by PyTorch in place of each of its functions; the block does not apply inside."""
        kwargs = kwargs or {}
        is_attention, is_layer = func is F.scaled_dot_product_attention, func is F.multi_head_attention_forward
        subclasses = [one.__name__ for one in types if one is not Tensor and one is not nn.Parameter]
        if subclasses and (is_attention or is_layer):  # they may compute attention in another way
            if self.mask is not None:
                self._refuse(f"{func.__name__} is given {', '.join(subclasses)}")
            return func(*args, **kwargs)
        if is_attention:
            return self._attention(*args, **kwargs)
        return self._layer(args, kwargs) if is_layer else func(*args, **kwargs)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        arguments = (query, key, value, attn_mask, dropout_p, is_causal)
        if self.mask is None:
            if torch.is_grad_enabled() or dropout_p > 0.0:
                return F.scaled_dot_product_attention(*arguments, **options)
            try:
                return scaled_dot_product_attention(*arguments, **options)
            except _REFUSED:
                return F.scaled_dot_product_attention(*arguments, **options)
        if torch.is_grad_enabled():
            self._refuse("gradients are enabled")
        if query.shape[-2] != key.shape[-2]:
            self._refuse(f"the call has {query.shape[-2]} queries and {key.shape[-2]} keys, so it is no self-attention")
        self._applied = True
        return scaled_dot_product_attention(*arguments, **options, mask=self.mask)

    def _layer(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        """`F.multi_head_attention_forward`, whose arguments these are."""
        call = _LAYER_DEFAULTS | dict(zip(_LAYER_DEFAULTS, args, strict=False)) | kwargs
        reason = _why_not_served(call)
        if self.mask is None:
            by_pytorch = bool(reason) or torch.is_grad_enabled() or bool(call["dropout_p"] and call["training"])
        else:
            by_pytorch = call["query"].shape[0] != call["key"].shape[0]  # cross-attention
            if not by_pytorch and call["query"] is not call["key"]:
                reason = (
                    "nn.MultiheadAttention is given as many keys as queries in another tensor, which may be "
                    "cross-attention (with batch_first=True, query and key are two tensors where value is another)"
                )
            if not by_pytorch and reason:
                self._refuse(reason)
        if by_pytorch:
            out: tuple[Tensor, Tensor | None] = F.multi_head_attention_forward(*args, **kwargs)
            return out
        return _layer_output(call, self._attention), None

    def _refuse(self, reason: str) -> NoReturn:
        raise UnsupportedError(f"replace_sdpa cannot apply its mask: {reason}", {})


def _count_blocks(added: int) -> None:
    """Count the blocks with masks; while there are any, PyTorch's layers call attention, also in compiled code."""
    global _BLOCKS, _HAD_FAST_PATHS
    with _BLOCKS_LOCK:
        if _BLOCKS == 0:
            _HAD_FAST_PATHS = torch.backends.mha.get_fastpath_enabled()
        _BLOCKS += added
        torch.backends.mha.set_fastpath_enabled(_BLOCKS == 0 and _HAD_FAST_PATHS)


def _why_not_served(call: Mapping[str, Any]) -> str:
    """Why `_layer_output` cannot compute a call of `F.multi_head_attention_forward`; "" if it can."""
    query, key, attn_mask = call["query"], call["key"], call["attn_mask"]
    if call["need_weights"]:
        return "nn.MultiheadAttention returns its weights; call it with need_weights=False"
    if call["add_zero_attn"] or any(call[name] is not None for name in ("bias_k", "bias_v", "static_k", "static_v")):
        return "nn.MultiheadAttention adds keys (add_bias_kv, add_zero_attn)"
    value, padding = call["value"], call["key_padding_mask"]
    if query.is_nested or key.is_nested or value.is_nested or query.ndim not in (2, 3):
        return "nn.MultiheadAttention is given other tensors than [tokens, batch, width] or [tokens, width]"
    between = query.shape[1:-1]  # (batch,) or ()
    shape = query.shape[0], key.shape[0]
    heads = call["num_heads"] * math.prod(between)
    fits = (
        (key.shape[:-1] == value.shape[:-1] == (shape[1], *between))
        and query.shape[-1] == call["embed_dim_to_check"]
        and (padding is None or padding.shape == (*between, shape[1]))
        and (attn_mask is None or tuple(attn_mask.shape) in (shape, (heads, *shape)))
        and (attn_mask is not None or not call["is_causal"])
    )
    return "" if fits else "the arguments of nn.MultiheadAttention do not fit each other"


def _layer_output(call: Mapping[str, Any], attention: Callable[..., Tensor]) -> Tensor:
    """The output of `F.multi_head_attention_forward`: `[tokens, batch, width]` or `[tokens, width]`."""
    query, key, value, heads, bias = (call[name] for name in ("query", "key", "value", "num_heads", "in_proj_bias"))
    if call["use_separate_proj_weight"]:
        weights = [call[f"{name}_proj_weight"] for name in "qkv"]
    else:
        weights = [call["in_proj_weight"]] if query is key and key is value else call["in_proj_weight"].chunk(3)
    if len(weights) == 1:
        projected = list(F.linear(query, weights[0], bias).chunk(3, -1))
    else:
        biases = (None, None, None) if bias is None else bias.chunk(3)
        projected = [F.linear(*one) for one in zip((query, key, value), weights, biases, strict=True)]
    is_batched = query.ndim == 3
    # [batch, heads, tokens, head_dim]
    q, k, v = (x.unflatten(-1, (heads, -1)).movedim(0, -2) for x in projected)
    if not is_batched:
        q, k, v = q[None], k[None], v[None]
    is_causal = call["is_causal"] and call["key_padding_mask"] is None
    attn_mask = _merged_mask(None if is_causal else call["attn_mask"], call["key_padding_mask"], q.shape[0], heads)
    out = attention(q, k, v, attn_mask, call["dropout_p"] if call["training"] else 0.0, is_causal)
    out = F.linear(out.movedim(-2, 0).flatten(-2), call["out_proj_weight"], call["out_proj_bias"])
    return out if is_batched else out[:, 0]


def _merged_mask(attn_mask: Tensor | None, padding: Tensor | None, batch: int, heads: int) -> Tensor | None:
    """The masks of `nn.MultiheadAttention`, where true means not seen, as one of `scaled_dot_product_attention`."""
    if attn_mask is not None and attn_mask.ndim == 3:
        attn_mask = attn_mask.unflatten(0, (batch, heads))
    if padding is not None:
        padding = padding.view(batch, 1, 1, -1)
    hidden = [x for x in (attn_mask, padding) if x is not None and x.dtype == torch.bool]
    added = [x for x in (attn_mask, padding) if x is not None and x.dtype != torch.bool]
    if not added:
        return ~functools.reduce(operator.or_, hidden) if hidden else None
    zero = torch.zeros((), dtype=added[0].dtype, device=added[0].device)
    added += [torch.where(x, -torch.inf, zero) for x in hidden]
    return functools.reduce(operator.add, added)
