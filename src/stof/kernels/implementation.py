"""What every implementation of attention provides, and the types it shares with its callers.

An implementation is two functions of its kernel's folder:

- `prepare(layout, config)`: the layout in the form that the kernel reads, an object of the folder's own class.
- `bind(q, k, v, prepared, options)`: a function `call(q, k, v, bias, sinks, *scales) -> (out, lse)` for tensors of
  these shapes, strides and dtypes; whatever does not depend on their values is decided before it is returned. Calls
  with dropout have an argument more, `seed=`.

What every call returns:

- `out [B, H, Sq, Dv]` in q's dtype and memory order (`stof.kernels.common.empty_output`); bfloat16 for 8-bit inputs.
- `lse [B, H, Sq]`, the natural log-sum-exp of each row's scores without sinks, float32; float64 for float64 inputs.
- A row that keeps nothing has output 0 and lse minus infinity.
- Keys and values that no query sees may hold NaN, which must not reach the result. Inputs have any strides.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple, cast

from torch import Tensor

from stof.errors import KernelError
from stof.kernels.dropout import Dropout
from stof.runtime.memory import record_streams

# `call(q, k, v, bias, sinks, *scales) -> (out, lse)` for tensors of the shapes, strides, dtypes and device that it was
# bound to; `scales` are those of 8-bit tensors, or none. With dropout, `seed=` is the call's.
BoundCall = Callable[..., tuple[Tensor, Tensor]]


class Options(NamedTuple):
    """Scalars and optional tensors of a call, checked.

    Attributes:
        scale, softcap: floats, softcap 0 for none.
        bias: None, or 4-D and broadcastable to `[B, H, Sq, Skv]`.
        sinks: None or `[H]`.
        scales: float32 `[B or 1, H]`, `[B or 1, Hkv]`, `[B or 1, Hkv]` of 8-bit q, k and v, else empty.
        dropout_p: the probability of dropout, 0 for none.
        seed: int64 `[2]` of a call with dropout, else None; see `stof.kernels.dropout`.
    """

    scale: float
    softcap: float = 0.0
    bias: Tensor | None = None
    sinks: Tensor | None = None
    scales: tuple[Tensor, ...] = ()
    dropout_p: float = 0.0
    seed: Tensor | None = None

    @property
    def dropout(self) -> Dropout | None:
        """Dropout of the call, None for none."""
        return None if self.seed is None else Dropout(self.dropout_p, self.seed)

    @property
    def key_values(self) -> tuple[Tensor | float, ...]:
        """What a key of bound calls has of these options at its end."""
        return self.scales if self.seed is None else (*self.scales, self.dropout_p)

    @property
    def scalars(self) -> Options:
        """The options without tensors, which a bound call may hold: it gets other tensors."""
        return Options(self.scale, self.softcap, dropout_p=self.dropout_p)


class Gradients(NamedTuple):
    """Gradients of a call's inputs, in their shapes and dtypes; None for what was not asked for.

    Rows that keep nothing have a gradient of 0, and so have keys and values that no query sees, whatever they hold.
    """

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    bias: Tensor | None = None
    sinks: Tensor | None = None


class NeedsGrad(NamedTuple):
    """Which gradients a backward call computes; those of k and v come together."""

    q: bool = True
    kv: bool = True
    bias: bool = False
    sinks: bool = False


# `call(q, k, v, out, lse, d_out, d_lse, bias, sinks, seed=None) -> Gradients`, with the results of the forward's call
# and their gradients, `d_lse` None for zero.
BackwardCall = Callable[..., Gradients]

_WITHOUT_TENSORS = frozenset({int, bool, float, str, type(None)})
# `prepared` is what the same implementation's `prepare` returned.
Bind = Callable[[Tensor, Tensor, Tensor, Any, Options], BoundCall]


def tensors_of(prepared: Any) -> Iterator[Tensor]:
    """All tensors in a prepared layout: in its fields, and in their lists, tuples and dataclasses."""
    if isinstance(prepared, Tensor):
        yield prepared
    elif isinstance(prepared, (list, tuple)):
        for value in prepared:
            yield from tensors_of(value)
    elif names := getattr(prepared, "__dataclass_fields__", None):  # `fields` takes several times as long
        for name in names:
            value = getattr(prepared, name)
            if type(value) not in _WITHOUT_TENSORS:
                yield from tensors_of(value)


def bind_nothing(attend: Callable[..., tuple[Tensor, Tensor]]) -> Bind:
    """`bind` of a function without anything to decide before a call.

    Args:
        attend: `attend(q, k, v, prepared, scale=, softcap=, bias=, sinks=) -> (out, lse)`; with `dropout=` too where
            the implementation has dropout.
    """

    def bind(q: Tensor, k: Tensor, v: Tensor, prepared: Any, options: Options) -> BoundCall:
        del q, k, v
        scale, softcap, dropout_p = options.scale, options.softcap, options.dropout_p  # the call gets other tensors
        streams: set[int] = set()

        def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
            if q.is_cuda:
                record_streams(tensors_of(prepared), q.device, streams)
            return attend(q, k, v, prepared, scale=scale, softcap=softcap, bias=bias, sinks=sinks)

        def call_with_dropout(
            q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, seed: Tensor
        ) -> tuple[Tensor, Tensor]:
            if q.is_cuda:
                record_streams(tensors_of(prepared), q.device, streams)
            dropout = Dropout(dropout_p, seed)
            return attend(q, k, v, prepared, scale=scale, softcap=softcap, bias=bias, sinks=sinks, dropout=dropout)

        return call_with_dropout if dropout_p else call

    return bind


def bind_of(module: str) -> Bind:
    """The `bind` of a module that imports Triton, which is imported at the first call.

    It raises KernelError where the installed Triton lacks what the module imports: Gluon came with Triton 3.4 and
    changes between releases.
    """

    def bind(q: Tensor, k: Tensor, v: Tensor, prepared: Any, options: Options) -> BoundCall:
        return cast(BoundCall, _imported(module).bind(q, k, v, prepared, options))

    return bind


def _imported(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except (ImportError, AttributeError) as error:
        raise KernelError(f"this Triton has no Gluon, or no other part, that {module} knows: {error}") from error


def attend_once(bind: Bind, q: Tensor, k: Tensor, v: Tensor, prepared: Any, options: Options) -> tuple[Tensor, Tensor]:
    """`(out, lse)` of one call that is bound for it alone."""
    call = bind(q, k, v, prepared, options)
    return call(q, k, v, options.bias, options.sinks, *options.scales, **seed_argument(options.seed))


def seed_argument(seed: Tensor | None) -> dict[str, Tensor]:
    """The argument that bound calls with dropout take and others do not."""
    return {} if seed is None else {"seed": seed}


def bind_backward_of(differentiate: Callable[..., Gradients]) -> Callable[..., BackwardCall]:
    """`bind` of a backward function without anything to decide before a call.

    Args:
        differentiate: `differentiate(q, k, v, out, lse, d_out, prepared, scale=, softcap=, bias=, sinks=, d_lse=,
            needs=, dropout=) -> Gradients`.
    """

    def bind(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, d_out: Tensor, d_lse: Tensor | None, prepared: Any,
        options: Options, needs: NeedsGrad,
    ) -> BackwardCall:  # fmt: skip
        del q, k, v, out, d_out, d_lse
        scale, softcap, dropout_p = options.scale, options.softcap, options.dropout_p  # the call gets other tensors

        def call(
            q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None,
            bias: Tensor | None, sinks: Tensor | None, seed: Tensor | None = None,
        ) -> Gradients:  # fmt: skip
            return differentiate(
                q, k, v, out, lse, d_out, prepared,
                scale=scale, softcap=softcap, bias=bias, sinks=sinks, d_lse=d_lse, needs=needs,
                dropout=None if seed is None else Dropout(dropout_p, seed),
            )  # fmt: skip

        return call

    return bind


def backward_of(module: str) -> Callable[..., BackwardCall]:
    """The `bind_backward` of a module that is imported at the first call, because it imports Triton; see `bind_of`."""

    def bind(*arguments: Any) -> BackwardCall:
        return cast(BackwardCall, _imported(module).bind_backward(*arguments))

    return bind
