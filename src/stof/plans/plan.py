"""Plans: a mask compiled for its lengths, ready to run."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stof.errors import (
    ArgumentError,
    KernelError,
    UnfitLayoutError,
)
from stof.kernels.implementation import BoundCall, tensors_of
from stof.layout import Layout, LayoutConfig, LayoutStatistics, build_layout, in_columns, statistics
from stof.layout.extend import extend_layout
from stof.layout.head_mask import HeadMask
from stof.layout.limits import allocator_errors, check_tiles
from stof.masks import Mask
from stof.masks.parse import readable
from stof.plans.calls import CallSizes, call_sizes_of, check_fit, check_rows
from stof.plans.file import read_plan, write_plan
from stof.plans.filled import keep_choice, kept_choice
from stof.plans.host_layout import host_layout
from stof.plans.kept_choices import kept_by_structure, structure_key
from stof.plans.numbers import Numbered
from stof.plans.used_masks import present
from stof.runtime.memory import capturing, made_for_calls, outside_graph_pool, refuse_capture, tensors_on_host
from stof.selection import (
    IMPLEMENTATIONS,
    CallSpec,
    Candidate,
    Geometry,
    KernelChoice,
    LayoutGeometry,
    MaskGeometry,
    TokenOrder,
    better_token_order,
    candidates,
    choose,
    default_config,
    default_implementation,
    failures,
    first_of,
    gpu_choices,
    reads_unseen_too,
)
from stof.validation import usable_device

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# What was chosen for each kind of call, by the implementation that the user named, or None.
Decisions = dict[tuple[CallSpec, str | None], KernelChoice]
# Bound calls that one plan stores: shapes and strides rarely vary under one pair of lengths.
_MOST_CALLS = 64
# Bytes of small lists.
_SMALL = 2**21
# No layout has fewer tiles.
_FEWEST_TILES = LayoutConfig(256, 256)


def call_key(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    scale: float | None,
    softcap: float | None,
    implementation: str | None,
    *rest: Any,
) -> Hashable:
    """Return the key under which a bound call is stored: calls with equal keys can use the same one.

    Calls are bound to strides, which also decide the memory order of the output.

    Args:
        rest: tensors, the scales of 8-bit ones, or a float, the probability of dropout.
    """
    key = (
        q.shape, q.stride(), q.dtype, q.device, k.shape, k.stride(), k.dtype, k.device, v.shape, v.stride(), v.dtype,
        v.device, scale, softcap, implementation,
    )  # fmt: skip
    if bias is None and sinks is None and not rest:
        return key
    extra = [
        # Not `isinstance`: every call asks.
        x if x is None or type(x) is float else (x.shape, x.stride(), x.dtype, x.device)
        for x in (bias, sinks, *rest)
    ]
    return (*key, *extra)


class Plan(Numbered):
    """A mask compiled for one `q_len` and `kv_len` on one device. Make it with `stof.plan`, reuse it freely.

    On a GPU, layouts are built when a call first needs them, in the block sizes that suit the call. A plan made with
    a `config` or a `row_order`, or read from a file, uses that one layout for every call.

    Two plans are equal when their layouts have the same tiles and bitmaps, on the same device.

    Attributes:
        mask_text: repr of the mask it was made from.
        mask_batch, mask_heads: leading sizes of the mask, each 1 where one mask serves all.
        batch, heads: sizes that a call must have; None where the mask serves any.
        mask_geometry: the mask with its lengths and sizes; None where `mask` is.
        geometry: answers the selector's questions on a GPU; None elsewhere, where no time is estimated.
    """

    is_dynamic = False  # whether the mask is replaced in every step
    updates = 0  # how often the mask was replaced
    is_filled = False  # whether it holds nothing but small lists that a GPU filled from a program
    when_grown: Callable[[], object] | None = None  # called when `bytes` has become more

    def __init__(
        self,
        mask_text: str,
        lengths: tuple[int, int],
        mask_sizes: tuple[int, int],
        device: torch.device,
        *,
        call_sizes: CallSizes,
        layout: Layout | None = None,
        contiguous: Layout | None = None,
        geometry: MaskGeometry | None = None,
    ) -> None:
        self.mask_text = mask_text
        self.q_len, self.kv_len = lengths
        self.mask_batch, self.mask_heads = mask_sizes
        self.batch, self.heads = call_sizes
        self.device = device
        given = layout if contiguous is None else contiguous
        self.permuted_rows = given is not None and given.row_order is not None
        self.fixed = layout.config if layout is not None and device.type == "cuda" else None
        self.mask_geometry = geometry
        self.geometry: Geometry | None = None
        if device.type == "cuda":
            self.geometry = geometry if layout is None else LayoutGeometry(layout)
        self._layout = layout
        self._contiguous = contiguous  # contiguous tiles of `layout`, which is made of them when it is asked for
        self._layouts: dict[tuple[LayoutConfig, str | None], Layout] = {}
        self._prepared: dict[KernelChoice, Any] = {}
        self._choices: Decisions = {}
        self._calls: dict[Hashable, BoundCall] = {}
        self._in_graphs: set[Any] = set()
        self._layout_errors: dict[Hashable, str] = {}
        self._rejected: set[KernelChoice] = set()
        self._serving: dict[tuple[CallSpec, str | None], str] = {}  # calls whose choice was made for another mask
        self.gradients: Any = None  # a `plans.backward.PlanGradients`, made by the first backward pass
        self._take_number()
        if device.type != "cuda" and given is not None:
            # Prepared here, so that a first call that is timed or compiled does not include it.
            self.prepared(default_implementation(device))

    def __getstate__(self) -> dict[str, Any]:
        """State for pickles and copies, without stored calls and without the number by which compiled code finds it."""
        left_out: dict[str, Any] = {"number": 0, "_first": None, "when_grown": None, "gradients": None}
        return self.__dict__ | left_out | {"_calls": {}, "_in_graphs": set()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._take_number()

    def __eq__(self, other: object) -> bool:
        if self is other or type(self) is not Plan or type(other) is not Plan:
            return self is other
        sizes = [(p.q_len, p.kv_len, p.batch, p.heads, p.device) for p in (self, other)]
        return sizes[0] == sizes[1] and self.layout.equals(other.layout)

    def __hash__(self) -> int:
        return hash((self.q_len, self.kv_len, self.batch, self.heads))

    @staticmethod
    def of_layout(
        layout: Layout, mask_text: str, origin: MaskGeometry | None = None, call_sizes: CallSizes | None = None
    ) -> Plan:
        """Return a plan that uses one layout for every call.

        Args:
            layout: the mask's.
            mask_text: the mask's repr.
            origin: the mask that the layout was built from, where it is known.
            call_sizes: `batch` and `heads` of the plan; default those of `origin`'s mask, else of the layout.
        """
        sizes = (layout.mask_batch, layout.mask_heads)
        if call_sizes is None:
            call_sizes = call_sizes_of(None if origin is None else origin.mask, sizes)
        lengths = (layout.q_len, layout.kv_len)
        return Plan(mask_text, lengths, sizes, layout.device, call_sizes=call_sizes, layout=layout, geometry=origin)

    @staticmethod
    def of_contiguous_tiles(layout: Layout, geometry: MaskGeometry) -> Plan:
        """Return a plan on the CPU of a mask's layout of contiguous tiles, which every call uses."""
        sizes = (layout.mask_batch, layout.mask_heads)
        return Plan(
            repr(geometry.mask),
            (layout.q_len, layout.kv_len),
            sizes,
            layout.device,
            call_sizes=call_sizes_of(geometry.mask, sizes),
            contiguous=layout,
            geometry=geometry,
        )

    @staticmethod
    def of_mask(geometry: MaskGeometry, config: LayoutConfig | None = None, row_order: Tensor | None = None) -> Plan:
        """Return a new plan; the mask must already be checked against its lengths.

        Args:
            geometry: the mask with lengths, batch, heads and device.
            config, row_order: as for `stof.plan`.
        """
        mask, device, lengths = geometry.mask, geometry.device, (geometry.q_len, geometry.kv_len)
        mask.refuse_changed()
        with allocator_errors():
            if device.type == "cuda" and config is None and row_order is None:
                sizes = mask.dims(geometry.batch, geometry.heads, device)
                check_tiles(HeadMask(mask, *lengths, 0, 0, None, device), _FEWEST_TILES)  # too many are refused now
                call_sizes = call_sizes_of(mask, sizes)
                return Plan(mask.key, lengths, sizes, device, call_sizes=call_sizes, geometry=geometry)
            if config is None:
                make = partial(host_layout, geometry, row_order)
            else:
                of_call: dict[str, Any] = {"batch": geometry.batch, "heads": geometry.heads, "device": device}
                make = partial(build_layout, mask, *lengths, config, **of_call, row_order=row_order)
            layout = outside_graph_pool(device, make)
            mask.refuse_changed()  # meanwhile, by another thread
            if config is not None:
                return Plan.of_layout(layout, repr(mask), geometry)
            if device.type == "cuda":
                return Plan.of_layout(in_columns(layout), repr(mask), geometry)
            return Plan.of_contiguous_tiles(layout, geometry)

    def check_call(self, q: Tensor, k: Tensor) -> None:
        """Raise if the call's lengths, batch, heads or device are not the plan's; errors as of `calls.check_fit`."""
        check_fit(q, k, (self.q_len, self.kv_len), (self.batch, self.heads), self.device)

    def refuse_first_call(self) -> None:
        """Raise UnsupportedError during the capture of a CUDA graph: a first call works on the host."""
        refuse_capture(self.device)

    def prepare_backward(self, call: CallSpec) -> None:
        """Nothing: the first backward pass builds what it reads, as the mask stays the same."""

    def wait_for_update(self) -> None:
        """Nothing, as the mask stays the same."""

    def for_call(self, q: Tensor, k: Tensor) -> Plan:
        """Return the plan that computes a call, here itself; errors as of `check_call`."""
        self.check_call(q, k)
        return self

    @property
    def mask(self) -> Mask | None:
        """The mask it was made from; None if the plan was read from a file or moved to another device."""
        return None if self.mask_geometry is None else self.mask_geometry.mask

    @property
    def layout(self) -> Layout:
        """The layout that is saved, drawn and counted. Calls may use other layouts."""
        if self._layout is None:
            if self._contiguous is not None:
                build = partial(in_columns, self._contiguous)
            else:
                build = partial(self._build, default_config(self.device), None)
            self._layout = outside_graph_pool(self.device, build)
            self.note_growth()
        return self._layout

    @property
    def call_layout(self) -> Layout:
        """The layout of calls for which no other is chosen."""
        return self.layout if self._contiguous is None else self._contiguous

    def choice(self, call: CallSpec, implementation: str | None = None) -> KernelChoice:
        """Return the fastest candidate for a call, among those of `implementation` if it is given; decided once."""
        key = (call, implementation)
        choice = self._choices.get(key)
        if choice is None:
            choice = self._choices[key] = self._decided(call, implementation)
        return choice

    def serving(self, call: CallSpec) -> str:
        """Say which choice runs a call, if it was made for another mask, and for which; else ""."""
        return self._serving.get((call, None), "")

    def _decided(self, call: CallSpec, implementation: str | None) -> KernelChoice:
        """Decide as for an earlier mask of the same structure, or else by surveying this one."""
        geometry = self.geometry if self.device.type == "cuda" else None
        if not isinstance(geometry, MaskGeometry):
            return choose(call, self.device, geometry, implementation, self._layout_errors)
        self._check_unchanged()
        key = structure_key(geometry, call, implementation)
        kept = None if key is None else kept_by_structure.of(key)
        if kept is not None:
            arguments = kept, geometry, call, self.device, self._prepared, self._layout_errors, self.mask_text
            serves = made_for_calls(self.device, partial(kept_choice, *arguments))
            if serves is not None and serves.choice not in self._rejected:
                if serves.prepared is not None:
                    self._prepared[replace(serves.choice, widened=False)] = serves.prepared
                    held = sum(tensor.nbytes for tensor in tensors_of(serves.prepared))
                    is_program = geometry.evaluated.as_tensor(self.q_len, self.kv_len) is None
                    self.is_filled = is_program and held <= _SMALL and not self._layouts
                    self.note_growth()
                self._serving[call, implementation] = f"{serves.choice} runs, chosen for {readable(serves.mask_text)}"
                return serves.choice
        ranked = candidates(call, self.device, geometry, layout_errors=self._layout_errors)
        choice = first_of(ranked, call, implementation)
        if kept is not None and not self._layout_errors:
            of_implementation = [one for one in ranked if implementation in (None, one.name)]
            keep_choice(kept, geometry, of_implementation, choice, self.mask_text)
        return choice

    def candidates(self, call: CallSpec) -> list[Candidate]:
        """Return every candidate for a call, see `stof.explain`."""
        return candidates(call, self.device, self.geometry, layout_errors=self._layout_errors)

    def better_token_order(self, call: CallSpec) -> TokenOrder | None:
        """Return an order of the tokens that computes less, see `stof.explain`; None without the plan's mask."""
        geometry = self.mask_geometry
        if geometry is None or geometry.mask.changed() or self.fixed is not None:
            return None
        return better_token_order(
            geometry, call, self.device, layout=None if self.device.type == "cuda" else self.layout
        )

    def reject(self, choice: KernelChoice, call: CallSpec, error: KernelError) -> None:
        """Exclude a choice that failed on this device, or with this plan's layout, from later calls."""
        self._rejected.add(choice)
        if isinstance(error, UnfitLayoutError):
            self._layout_errors[choice.layout_key] = str(error)
            if error.unseen_keys and self.geometry is not None:  # other layouts then hold such keys too
                for other in gpu_choices(call, self.geometry, choice.implementation):
                    if reads_unseen_too(other, choice):
                        self._layout_errors.setdefault(other.layout_key, str(error))
        else:
            failures.add(choice, call, self.device, str(error))
        self._choices.clear()
        self._serving.clear()
        self._calls.clear()

    def find_call(self, *arguments: Any) -> BoundCall | None:
        """Return the bound call stored for arguments with this `call_key`, or None. A hit needs no further checks.

        Args:
            arguments: those of `call_key`, as the user gave them.
        """
        if not self._calls:
            return None
        try:
            call = self._calls.get(call_key(*arguments))
        except (AttributeError, TypeError, RuntimeError):
            # An argument that is no tensor, a nested tensor, or a scale that is no number: the caller's checks refuse
            # these with a message.
            return None
        if call is not None:
            self.keep_in_graph(call)
        return call

    def store_call(self, arguments: tuple[Any, ...], call: BoundCall) -> None:
        """Store a bound call under the `call_key` of the arguments that the user gave."""
        if len(self._calls) >= _MOST_CALLS:
            self._calls.clear()
        self._calls[call_key(*arguments)] = call
        self.keep_in_graph(call)

    def keep_in_graph(self, call: Any) -> None:
        """Keep a bound call that is being captured in a CUDA graph: replays read its memory."""
        if capturing(self.device):
            self._in_graphs.add(call)

    def prepared(self, choice: KernelChoice | str) -> Any:
        """Return a choice's layout in the form that its implementation reads; computed once."""
        choice = KernelChoice(choice) if isinstance(choice, str) else replace(choice, widened=False)
        prepared = self._prepared.get(choice)
        if prepared is None:
            prepared = self._prepared[choice] = made_for_calls(self.device, partial(self._prepare, choice))
            self.note_growth()
        return prepared

    def note_growth(self) -> None:
        """Tell the cache that the plan, or what it holds for backward passes, has got another layout or lists."""
        if self.when_grown is not None:
            self.when_grown()

    def _prepare(self, choice: KernelChoice) -> Any:
        implemented, layout = IMPLEMENTATIONS[choice.implementation], self._layout_of(choice)
        with tensors_on_host():
            return implemented.prepare(layout, choice.kernel)

    def _layout_of(self, choice: KernelChoice) -> Layout:
        if choice.layout is None or self.fixed is not None:
            return self.call_layout
        key = (choice.layout, choice.row_order)
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._layouts[key] = self._build(*key)
            self.note_growth()
        return layout

    def _build(self, config: LayoutConfig, row_order: str | None) -> Layout:
        assert self.mask_geometry is not None
        self._check_unchanged()
        self.is_filled = False
        return self.mask_geometry.build(config, row_order)

    def _check_unchanged(self) -> None:
        """Raise if the mask's functions changed since the plan was made: its layouts would differ."""
        if self.mask is not None:
            self.mask.refuse_changed()

    def extended(self, rows: int, mask: Mask | None = None) -> Plan:
        """Return a plan for `rows` more queries and as many more keys (a growing KV cache); it equals a new plan.

        Under the plan's own mask, only the new rows are evaluated if old rows do not see new keys (see
        `stof.layout.extend`), and the choices made for calls carry over. Under another mask everything is evaluated,
        because it may keep other scores of the old rows. For a chunk of new queries alone, make a plan of
        `mask.with_query_offset(cached)`.

        Args:
            rows: tokens to add, 0 or more.
            mask: the mask of all tokens; default the plan's own, which serves any length unless it lists its tokens.

        Raises:
            ArgumentError: fewer than 0 rows, or a plan read from a file without a mask given.
            MaskError: what a function of the plan's own mask reads was changed since.
            ShapeError: the mask does not fit the new lengths.
        """
        check_rows(rows)
        origin = self.mask_geometry
        if mask is None:
            if origin is None:
                raise ArgumentError("this plan was made of a layout alone; give its mask to extended()")
            self._check_unchanged()
            mask = origin.mask
        else:
            mask = present(mask, self.device)
            mask.refuse_changed()
        mask.check(self.q_len + rows, self.kv_len + rows)
        sizes = (self.mask_batch, self.mask_heads) if origin is None else (origin.batch, origin.heads)
        lengths = (self.q_len + rows, self.kv_len + rows)
        geometry = MaskGeometry(mask, *lengths, batch=sizes[0], heads=sizes[1], device=self.device)

        mask_key = self.mask_text if origin is None and "<" not in self.mask_text else origin and origin.mask.key
        if mask.key != mask_key or self.permuted_rows:  # another number of rows needs another row order
            refuse_capture(self.device)
            return Plan.of_mask(geometry, self.fixed)
        grown = functools.partial(
            extend_layout, mask=mask, q_len=lengths[0], kv_len=lengths[1], batch=sizes[0], heads=sizes[1]
        )
        if self.device.type != "cuda" or self.fixed is not None:
            layout = outside_graph_pool(self.device, partial(grown, self.call_layout))
            if self._contiguous is not None:
                return Plan.of_contiguous_tiles(layout, geometry)
            return Plan.of_layout(layout, repr(mask), geometry)
        plan = Plan.of_mask(geometry)
        every = {key: layout for key, layout in self._layouts.items() if key[1] is None}
        plan._layouts = outside_graph_pool(self.device, lambda: {key: grown(each) for key, each in every.items()})
        for (call, name), choice in self._choices.items():
            # With more keys, a bias may no longer need the copy that TMA needed, so such calls are decided again.
            if choice.row_order is None and not call.bias_to_copy:
                of_layout = replace(choice, filled=False)
                plan._choices[replace(call, q_len=lengths[0], kv_len=lengths[1]), name] = of_layout
        return plan

    def statistics(self) -> LayoutStatistics:
        """Return density, scores computed for each one kept, tiles by kind, the heaviest row block, and bytes."""
        return statistics(self.layout)

    def bytes(self) -> int:
        """Return the bytes of all layouts, of what is prepared from them, and of tensors that the mask holds."""
        # list() copies: another thread may add an entry meanwhile.
        layouts = [*self._layouts.values(), *(one for one in (self._layout, self._contiguous) if one is not None)]
        tensors = [tensor for layout in layouts for tensor in layout.tensors().values()]
        for prepared in list(self._prepared.values()):
            tensors += tensors_of(prepared)
        if self.gradients is not None:
            tensors += self.gradients.tensors()
        origin = self.mask_geometry
        copies = [] if origin is None else origin.mask.copies() + origin.copies()
        held = sum(copy.untyped_storage().nbytes() for copy in copies)
        return held + sum(t.numel() * t.element_size() for t in tensors)

    def to_dense(self) -> Tensor:
        """Return the mask as a tensor, bool `[mask_batch, mask_heads, q_len, kv_len]`."""
        return self.layout.to_dense()

    def draw(self, *, title: str | None = None, pattern: int = 0) -> Figure:
        """Draw the mask and its tiles: a matplotlib figure, which notebooks show, with `savefig(path)`.

        Args:
            title: heading; default the mask's text.
            pattern: which distinct (batch, head) mask to draw.

        Raises:
            MissingDependencyError: matplotlib is not installed.
            ArgumentError: no such pattern.
        """
        # By name: it lies above this layer.
        figure: Figure = import_module("stof.drawing").draw_figure(self, title=title, pattern=pattern)
        return figure

    def to(self, device: torch.device | str) -> Plan:
        """Return the same plan on another device; it uses this plan's layout for every call.

        Raises:
            DeviceError: this machine has no such device.
        """
        return Plan.of_layout(
            self.layout.to(usable_device(device)), self.mask_text, call_sizes=(self.batch, self.heads)
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to one safetensors file, atomically."""
        write_plan(path, self.layout, self.mask_text, (self.batch, self.heads))

    @staticmethod
    def load(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> Plan:
        """Read a saved plan.

        Raises:
            PlanFileError: the file is damaged, was changed, or has another format version.
            DeviceError: this machine has no such device.
        """
        layout, mask_text, call_sizes = read_plan(path, usable_device(device))
        return Plan.of_layout(layout, mask_text, call_sizes=call_sizes)

    def __repr__(self) -> str:
        text = readable(self.mask_text)
        text = text if len(text) <= 80 else text[:77] + "..."
        tiles = "not built" if self._layout is None and self._contiguous is None else str(self.layout.tiles)
        return f"Plan({text}, q_len={self.q_len}, kv_len={self.kv_len}, tiles={tiles}, device={str(self.device)!r})"
