"""Inputs of the kernels that build and count: the programs of a mask, or the memory of a dense mask."""

from __future__ import annotations

import ctypes
import functools
import itertools
import warnings
from collections.abc import Callable
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from stof.errors import KernelError
from stof.layout.fill.input_forms import BYTES, PROGRAM, QUADS
from stof.masks import Mask
from stof.masks.gpu_program import Programs, programs_of
from stof.runtime.memory import current_device

# Scores that one thread block handles at once, bounded by the registers of its threads. A mask's program yields packed
# bits, which take no register a score; a dense mask read as int32 takes a quarter of a register a score, read byte by
# byte a whole one. The constants are for a mask's program, bytes, and four bytes as one int32.
_SCORES_RUN, _SCORES_BYTES, _SCORES_QUADS = 2**14, 2**10, 2**13
# Numbers that one thread block of `prepare` clears.
_CLEARED = 2**10
# Mailboxes of at most this many numbers are kept for later builds, in `_free_mailboxes`.
_MAILBOX_SIZE = 2**12
# Polls of a mailbox, some 0.2 ms, before the host synchronises with the stream.
_POLLS = 1000
_free_mailboxes: list[PinnedMailbox] = []
# Mailboxes of running builds. Those of failed builds stay: kernels may still write to them, and freed pinned memory
# is reused at once.
_in_use: set[PinnedMailbox] = set()

# Devices whose Triton does not compile the kernels, or has none.
_without: set[torch.device] = set()

P = ParamSpec("P")
T = TypeVar("T")


def on_device(make: Callable[P, T | None]) -> Callable[P, T | None]:
    """Run a function on the CUDA device of its keyword argument `device`, which gets its index.

    The function returns None on devices without a Triton that compiles its kernels.
    """

    @functools.wraps(make)
    def made(*args: P.args, **kwargs: P.kwargs) -> T | None:
        device = kwargs["device"]
        assert isinstance(device, torch.device)
        if device.type == "cuda" and device.index is None:
            kwargs["device"] = device = torch.device("cuda", torch.cuda.current_device())
        if device in _without:
            return None
        try:
            with current_device(device):
                return make(*args, **kwargs)
        except (KernelError, ImportError) as error:
            _without.add(device)
            reason = f"stof: layouts are built by torch from now on, which is slower: {error}"
            warnings.warn(reason, RuntimeWarning, stacklevel=3)
            return None

    return made


class PinnedMailbox:
    """Numbers on the host that kernels read and write where they lie: in pinned memory for those of a GPU.

    Having them copied, and making tensors of them, takes several times as long as all kernels of a build. One mailbox
    belongs to one build, until it is read.

    Attributes:
        tensor: int32.
        numbers: the same memory as a ctypes array.
        is_shared: whether later builds may have it.
    """

    def __init__(self, size: int, pinned: bool, is_shared: bool = False) -> None:
        self.is_shared = is_shared
        self.tensor = torch.empty(size, dtype=torch.int32, device="cpu", pin_memory=pinned)
        self.numbers = (ctypes.c_int32 * size).from_address(self.tensor.data_ptr())

    @staticmethod
    def of(results: int, numbers: list[int], pinned: bool, room: int = 0) -> PinnedMailbox:
        """A mailbox that holds `results` zeros and `numbers`; with room for more numbers, it belongs to one build."""
        end = results + len(numbers)
        if room or not pinned or end > _MAILBOX_SIZE:
            mailbox = PinnedMailbox(max(end, results + room), pinned)
        else:
            try:
                mailbox = _free_mailboxes.pop()  # by one thread only
            except IndexError:
                mailbox = PinnedMailbox(_MAILBOX_SIZE, pinned, is_shared=True)
        mailbox.put(results, numbers)
        return mailbox

    def put(self, results: int, numbers: list[int]) -> None:
        """Write zeros for `results` numbers, which kernels write, followed by `numbers`."""
        if self in _in_use and self.tensor.is_pinned():  # what kernels wrote last was not read: they may still run
            torch.cuda.synchronize()
        _in_use.add(self)
        self.numbers[: results + len(numbers)] = [0] * results + numbers  # type: ignore[assignment]  # as c_int32

    def wait(self, count: int, device: torch.device) -> None:
        """Wait until kernels have written the first `count` numbers, none of them 0, or until they have ended."""
        if device.type != "cuda":
            return
        if count:
            # A number is seen much earlier than the driver says that its kernel has ended.
            for _ in range(_POLLS):
                if 0 not in self.numbers[:count]:
                    return
        torch.cuda.current_stream(device).synchronize()

    def read(self, count: int) -> list[int]:
        """The first numbers. The kernels have ended: the next build may have the mailbox."""
        results = self.numbers[:count]
        _in_use.discard(self)
        if self.is_shared:
            _free_mailboxes.append(self)
        return results


class Prepared(NamedTuple):
    """Memory that kernels start from.

    Attributes:
        state: int32 on the device: zeros, then what may be anything, then the numbers of the programs.
        mailbox: kernels write its first numbers, the results; those of the programs follow.
        results: how many numbers the kernels write for the host.
        zeros: how many numbers are 0 at first.
        first: where the numbers of the programs begin in `state`.
        room: how many of them there may be.
        drawn, draws: numbers of the tables that are drawn, and how many tables there are.
    """

    state: Tensor
    mailbox: PinnedMailbox
    results: int
    zeros: int
    first: int
    room: int
    drawn: int
    draws: int

    def write(self) -> None:
        """Write the state, from what the mailbox holds."""
        from stof.layout.fill.tile_bits import prepare
        from stof.runtime.launch import launch

        sizes = (self.results, self.zeros, self.first, self.room, self.draws)
        programs = -(-max(self.zeros, self.room, self.drawn) // _CLEARED)
        launch(prepare, programs, (self.mailbox.tensor, self.state), sizes, (), device=self.state.device)


class Source(NamedTuple):
    """What the kernels read.

    Attributes:
        dense: bytes of a dense mask `[.., Sq, Skv]`, as they are or four as one int32; None where there are programs.
        kind: PROGRAM, BYTES or QUADS.
        programs: of the masks; or in their place, which (batch, head) entry of a dense mask each pattern is.
        strides: of batch, heads, queries and keys of a dense mask; of four int32 where it is read so.
        heads: entries of a dense mask in one batch entry.
        patterns: masks there are.
    """

    dense: Tensor | None
    kind: int
    programs: Programs
    strides: tuple[int, ...]
    heads: int
    patterns: int

    def rows_at_once(self, block_m: int, columns: int) -> int:
        """Rows of a row block that a thread block handles at once: a power of two that divides them."""
        scores = (_SCORES_RUN, _SCORES_BYTES, _SCORES_QUADS)[self.kind]
        return min(block_m & -block_m, max(1, scores // columns))

    def in_bytes(self) -> Source:
        """The same, where a bool tensor is read byte by byte."""
        if self.dense is None or self.kind != QUADS:
            return self
        strides = (*(stride * 16 for stride in self.strides[:3]), 1)
        return self._replace(dense=self.dense.view(torch.uint8), kind=BYTES, strides=strides)

    def prepared(self, zeros: int, rest: int, results: int, device: torch.device, room: int = 0) -> Prepared:
        """What kernels start from, made without waiting for what the device does.

        Args:
            zeros, rest: numbers that are 0 at first, and numbers that may be anything.
            results: how many numbers the kernels write for the host.
            device: the current one.
            room: numbers of later programs that there is to be room for, if these draw nothing; 0 if there are none.
        """
        numbers, draws, drawn = self.programs
        first, most = zeros + rest + drawn, max(0 if draws else room, len(numbers))
        state = torch.empty(first + most, dtype=torch.int32, device=device)
        mailbox = PinnedMailbox.of(results, list(itertools.chain(numbers, *draws)), device.type == "cuda", room)
        prepared = Prepared(state, mailbox, results, zeros, first, most, drawn, len(draws))
        prepared.write()
        return prepared


def source_of(
    mask: Mask, q_len: int, kv_len: int, mask_heads: int, entries: list[int], device: torch.device
) -> Source | None:
    """What the kernels read of some entries, `batch entry * mask_heads + head`; None for masks they do not serve."""
    keep = mask.as_tensor(q_len, kv_len)
    if keep is None:
        programs = programs_of(mask, q_len, kv_len, [divmod(entry, mask_heads) for entry in entries])
        if programs is None:
            return None
        return Source(None, PROGRAM, programs, (0, 0, 0, 0), 1, len(entries))
    if keep.device != device:
        return None
    strides = keep.stride()
    if max(map(abs, strides)) >= 2**31:
        return None
    heads, places = keep.shape[1], Programs(entries, [], 0)
    aligned = not (kv_len % 16 or keep.data_ptr() % 16 or any(n % 16 for n in strides[:3]))
    if aligned and strides[3] == 1:
        strides = (*(n // 16 for n in strides[:3]), 1)
        return Source(keep.view(torch.int32), QUADS, places, strides, heads, len(entries))
    return Source(keep.view(torch.uint8), BYTES, places, strides, heads, len(entries))
