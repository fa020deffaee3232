"""Masks in code that is being compiled: intersections, also with documents whose ids are a tensor of the graph."""

from __future__ import annotations

from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from stof.errors import UnsupportedError
from stof.masks.compose import Mask
from stof.runtime.memory import refuse_values
from stof.runtime.private import is_exporting
from stof.runtime.recomputation import saved_in_forward

# What handles of an `Intersection` begin with: without ids, and with them. Neither is the key of a mask.
NUMBERED, DOCUMENTS = "<mask>", "<documents>"
# Between the masks of an `Intersection`: in no key, and no new line, since Inductor writes arguments into comments.
SEPARATOR = "; "


class Intersection(NamedTuple):
    """Masks that the operators intersect: a score is kept if every mask keeps it.

    For compiled code. At least one of the masks has a number (see `Mask`), or there are ids. Their intersection, made
    at once, would get a number too, and Dynamo cannot trace how a mask gets its number.

    Attributes:
        masks: in the positions of the call.
        ids: None, or the ids of one more mask, of `documents`, as `ids_on_host` returns them.
    """

    masks: tuple[Mask, ...]
    ids: Tensor | None = None

    @property
    def number(self) -> int:
        """The operators' argument `number`: that of the first mask with a number, 0 if none has one."""
        return next((mask.number for mask in self.masks if mask.number), 0)

    @property
    def may_change(self) -> bool:
        """Whether one of the masks reads what may be written to."""
        return any(mask.may_change for mask in self.masks)

    @property
    def handle(self) -> str:
        """The operators' argument `mask`: `NUMBERED` or `DOCUMENTS`, then a text for each mask.

        The text is the mask's key; `?` for the first mask with a number; `#N` for others, which are thus constants of
        the compiled code: it is compiled anew where they change. Exported programs hold keys alone, as numbers mean
        nothing to the process that loads them.
        """
        texts, named = [NUMBERED if self.ids is None else DOCUMENTS], False
        for mask in self.masks:
            if not mask.number or is_exporting():
                texts.append(mask.key)
            else:
                # Dynamo cannot write a number that it made an input of its graph; int() makes it a constant.
                texts.append(f"#{int(mask.number)}" if named else "?")
                named = True
        return SEPARATOR.join(texts)

    def __and__(self, other: object) -> Intersection:
        if isinstance(other, Mask):
            return Intersection((*self.masks, other), self.ids)
        if not isinstance(other, Intersection):
            return NotImplemented
        if self.ids is not None and other.ids is not None:
            raise UnsupportedError(
                "compiled code intersects one mask of documents(ids) with named masks, not with another one of ids; "
                "number the pairs of both ids: documents(first * (second.max() + 1) + second) if none is negative",
                {},
            )
        return Intersection((*self.masks, *other.masks), other.ids if self.ids is None else self.ids)

    def __rand__(self, other: object) -> Intersection:
        return Intersection((other, *self.masks), self.ids) if isinstance(other, Mask) else NotImplemented

    def __or__(self, other: object) -> NoReturn:
        raise UnsupportedError(
            "compiled code combines documents(ids) of a tensor by & alone; make other masks outside of it", {}
        )

    def __ror__(self, other: object) -> NoReturn:
        self.__or__(other)


def documents_of_tensor(ids: Tensor) -> Intersection:
    """The mask `documents(ids)` in code that is being compiled; operators check the ids when they run."""
    return Intersection((), saved_in_forward(ids_on_host_op, ids))


def _ids_on_host(ids: Tensor) -> Tensor:
    """A copy of ids on the host, which nobody writes to: layers share it, and backward passes read it."""
    refuse_values(ids.device, also_own=True)
    return ids.to("cpu", copy=True, memory_format=torch.contiguous_format)


def _fake_ids(ids: Tensor) -> Tensor:
    return ids.new_empty(ids.shape, device="cpu")


# An operator, not `Tensor.to`, which compiled backward passes may compute again from ids that were written to since.
# Its tag keeps it out of Inductor's CUDA graphs.
ids_on_host_op = torch.library.custom_op(
    "stof::ids_on_host", _ids_on_host, mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,)
)
ids_on_host_op.register_fake(_fake_ids)
