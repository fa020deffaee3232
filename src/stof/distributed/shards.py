"""Which tokens of a sequence each rank holds."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from stof.distributed.agreement import agree, mask_facts, rows_facts
from stof.distributed.exchange import Exchange, Join
from stof.distributed.row_ranges import Assignment, assign_rows, tile_config, tiles_by_row_block, weigh
from stof.distributed.ways import Costs, Sizes, choose_way, describe_ways
from stof.errors import ArgumentError, DtypeError, ShapeError, StofError, shown
from stof.layout import LayoutConfig
from stof.layout.survey import Survey
from stof.masks import Mask, as_mask
from stof.masks.base import check_lengths
from stof.masks.per_head import for_heads
from stof.masks.reorder import in_ranges, joined
from stof.plans.make import make_plan
from stof.plans.plan import Plan
from stof.runtime.private import past_modes
from stof.selection import MaskGeometry


class Shards:
    """The tokens of a sequence that each rank of a mesh holds, made by `shard`.

    In backward passes the loss is the sum of what the ranks compute. Each rank has its share of the gradient of what
    all ranks hold alike, such as parameters: the sum over ranks is the gradient.

    Attributes:
        mask: what each query sees, of all tokens.
        length: tokens of the sequence.
        mesh: the ranks.
        rank: this one, in the mesh's process group.
        tokens: number of tokens that each rank holds.
        positions: int64 `[tokens of this rank]`, ascending positions of its tokens, on the mesh's device.
    """

    def __init__(self, mask: Mask, length: int, mesh: DeviceMesh, assignment: Assignment, costs: Costs) -> None:
        self.mask, self.length, self.mesh = mask, length, mesh
        self.rank, self.device = dist.get_rank(mesh.get_group()), device_of(mesh)
        self.assignment, self.costs = assignment, costs
        self.ranges, self.tokens = assignment.ranges[self.rank], assignment.tokens
        self.exchange = Exchange(mesh.get_group(), self.rank, self.tokens)
        self.positions = torch.cat([torch.arange(first, stop, device=self.device) for first, stop in self.ranges])
        # Ranges of the sequence in the order of ranks, in which exchanges return tokens.
        self.rank_order = joined([held for ranges in assignment.ranges for held in ranges])
        # Whether all ranks were found to make the same first call of attention.
        self.agreed = self.ranks == 1
        self._ways: dict[Sizes, str] = {}
        self._plans: dict[tuple[Any, ...], Plan] = {}

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.tokens)

    def split(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's tokens of a full tensor; without communication.

        Differentiable: the gradient of the full tensor is this rank's share, 0 at other ranks' tokens.

        Args:
            tensor: the same on every rank, `length` in dimension `dim`; any dtype and device.
            dim: the dimension of tokens.

        Raises:
            ArgumentError: no such dimension.
            ShapeError: another length.
        """
        dim = self._dimension(tensor, dim, self.length, "a full tensor")
        if self.ranks == 1:
            return tensor
        return torch.cat([tensor.narrow(dim, first, stop - first) for first, stop in self.ranges], dim)

    def join(self, tensor: Tensor, dim: int) -> Tensor:
        """The full tensor on every rank, of each rank's tokens.

        Differentiable: the gradients of all ranks are summed, because the loss is the sum of the ranks' losses. Divide
        a loss that every rank computes alike by the number of ranks.

        Args:
            tensor: this rank's tokens in dimension `dim`; other dimensions and the dtype are the same on every rank.
            dim: the dimension of tokens.

        Raises:
            ArgumentError: no such dimension.
            ShapeError: another number of tokens.
        """
        dim = self._dimension(tensor, dim, self.exchange.local, f"a tensor of rank {self.rank}")
        if self.ranks == 1:
            return tensor
        return self.in_sequence_order(Join.apply(self.exchange, tensor, dim), dim)

    def in_sequence_order(self, tensor: Tensor, dim: int) -> Tensor:
        """Sort tokens of all ranks, which are in the order of ranks, by position."""
        if len(self.rank_order) == 1:
            return tensor
        parts = tensor.split([stop - first for first, stop in self.rank_order], dim)
        by_position = sorted(zip(self.rank_order, parts, strict=True), key=lambda each: each[0])
        return torch.cat([part for _, part in by_position], dim)

    def with_mask(self, mask: Any) -> Shards:
        """The same tokens on the same ranks under another mask: layers of one model have several.

        Every rank calls it. Split the sequence by the mask of the layers that cost most.

        Args:
            mask: as for `shard`.

        Raises:
            ShapeError, MaskError, RankMismatchError: as of `shard`.
        """
        frozen, survey, config = _agreed_mask(mask, self.length, self.mesh)
        tiles = tiles_by_row_block(survey, config)
        assignment = weigh(self.assignment.ranges, tiles, self.length, f"{self.assignment.why}, of another mask")
        costs = Costs.of(survey, config, assignment)
        return Shards(frozen, self.length, self.mesh, assignment, costs)

    def explain(self, q: Tensor | None = None, k: Tensor | None = None, v: Tensor | None = None) -> str:
        """Tokens and tile cost of each rank, and why; with this rank's q, k and v also which way a call takes and why.

        Args:
            q, k, v: as for `stof.distributed.attention`; meta tensors will do.
        """
        lines = [f"{self.length} tokens on {self.ranks} ranks: {self.assignment.why}"]
        lines.append(f"{'rank':<6}{'tokens':<10}{'tile cost / mean':<18}positions")
        for rank, (ranges, cost) in enumerate(zip(self.assignment.ranges, self.assignment.costs, strict=True)):
            text = ", ".join(f"{first} to {stop - 1}" for first, stop in ranges)
            lines.append(f"{rank:<6}{self.tokens[rank]:<10}{cost:<18.2f}{text}")
        if q is None or k is None or v is None:
            return "\n".join(lines)
        return "\n".join([*lines, *describe_ways(self.costs, Sizes.of(q, k, v))])

    @past_modes
    def way_for(self, sizes: Sizes) -> str:
        """The way that is estimated to be faster."""
        way = self._ways.get(sizes)
        if way is None:
            way = self._ways[sizes] = choose_way(self.costs, sizes)
        return way

    @past_modes
    def plan(self, way: str, sizes: Sizes, device: torch.device, sorted_keys: bool) -> Plan:
        """The plan of this rank's attention: of its heads, or of its rows.

        Keys are in the order of the sequence if `sorted_keys`, else in the order of ranks.
        """
        key = (way, sizes.batch, sizes.heads, device, sorted_keys)
        plan = self._plans.get(key)
        if plan is None:
            if way == "heads":
                heads, rows, ranges = sizes.heads // self.ranks, self.length, self.rank_order
                mask = for_heads(self.mask, self.rank * heads, heads, sizes.heads)
            else:
                heads, rows, ranges, mask = sizes.heads, self.exchange.local, self.ranges, self.mask
            columns = ((0, self.length),) if sorted_keys else self.rank_order
            mask = in_ranges(mask, ranges, columns, self.length, self.length)
            plan = make_plan(
                mask, rows, self.length, batch=sizes.batch, heads=heads, device=device, config=None, row_order=None
            )
            self._plans[key] = plan
        return plan

    @past_modes
    def facts(self, sizes: Sizes) -> dict[str, str]:
        """What ranks compare of a mask at its first call, if it depends on the batch entry or the head."""
        if not self.mask.depends_on_sizes:
            return {}
        length, device = self.length, self.device
        return rows_facts(MaskGeometry(self.mask, length, length, batch=sizes.batch, heads=sizes.heads, device=device))

    def _dimension(self, tensor: Tensor, dim: int, length: int, what: str) -> int:
        if not isinstance(tensor, Tensor):
            raise DtypeError(f"{what} is a torch.Tensor, got {type(tensor).__name__}")
        if isinstance(dim, bool) or not isinstance(dim, int) or not -tensor.ndim <= dim < tensor.ndim:
            raise ArgumentError(f"dim is a dimension of {list(tensor.shape)}, got {shown(dim)}")
        if tensor.shape[dim] != length:
            raise ShapeError(
                f"{what} has {length} tokens of {self.length} in its dimension of tokens, got {list(tensor.shape)} "
                f"and dim {dim}; split tensors by the shards of their sequence"
            )
        return dim % tensor.ndim

    def __repr__(self) -> str:
        return f"Shards({shown(self.mask)}, length={self.length}, rank={self.rank}, tokens={self.tokens})"


def shard(mask: Any, length: int, mesh: DeviceMesh) -> Shards:
    """Split a sequence over the ranks of a mesh, with about equal work under a mask.

    Every rank calls it with the same arguments, which is checked. Ranks hold about equal numbers of tokens if that
    balances the work, in one range or several: under a causal mask an early and a late one. The mask is copied: later
    changes of its tensors have no effect.

    Args:
        mask: a mask from `stof.masks`, a bool tensor, a FlexAttention `BlockMask`, a function, text or None, of all
            `length` queries and keys.
        length: tokens of the sequence, at least one for each rank.
        mesh: a `DeviceMesh` with one dimension, or one dimension of a larger mesh, as `mesh["sp"]`.

    Raises:
        ArgumentError: if `mesh` is not a `DeviceMesh` of one dimension, or does not contain this rank.
        ShapeError: if `length` is less than the number of ranks, or is not a length that the mask has.
        MaskError: if `mask` cannot be converted to a mask.
        RankMismatchError: if another rank has another mask or length, or raised an error.

    Examples:
        >>> import torch.distributed as dist
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> shards = stof.distributed.shard(masks.causal(), 100, init_device_mesh("cpu", (1,)))
        >>> shards.split(torch.randn(2, 100, 16), dim=1).shape
        torch.Size([2, 100, 16])
        >>> dist.destroy_process_group()
    """
    check_mesh(mesh)
    frozen, survey, config = _agreed_mask(mask, length, mesh)
    assignment = assign_rows(tiles_by_row_block(survey, config), length, mesh.size())
    return Shards(frozen, length, mesh, assignment, Costs.of(survey, config, assignment))


@past_modes
def _agreed_mask(mask: Any, length: int, mesh: DeviceMesh) -> tuple[Mask, Survey, LayoutConfig]:
    """The mask at its present values and its tiles, after the ranks were compared; errors as of `shard`."""
    ranks = mesh.size()
    facts: dict[str, object] = {"the number of ranks": ranks, "length": length}
    error: StofError | None = None
    try:
        check_lengths(length, length)
        if length < ranks:
            raise ShapeError(f"each rank holds at least one token, got {length} tokens and {ranks} ranks")
        frozen = as_mask(mask).frozen()
        frozen.check(length, length)
        config = tile_config(length, ranks)
        geometry = MaskGeometry(frozen, length, length, batch=frozen.batch, heads=frozen.heads, device=device_of(mesh))
        survey = geometry.survey((config,), None)
        if ranks > 1:
            facts |= mask_facts(geometry, survey)
    except StofError as refused:
        error = refused
    if ranks > 1:
        agree(mesh.get_group(), facts, error)
    elif error is not None:
        raise error
    return frozen, survey, config


def device_of(mesh: DeviceMesh) -> torch.device:
    """The device of this process in a mesh."""
    device = torch.device(mesh.device_type)
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device


def check_mesh(mesh: DeviceMesh) -> None:
    """Raise ArgumentError unless it is a mesh of one dimension with this rank."""
    if not isinstance(mesh, DeviceMesh):
        raise ArgumentError(
            f"mesh is a torch.distributed.device_mesh.DeviceMesh, got {type(mesh).__name__}; make one by "
            'init_device_mesh("cuda", (ranks,))'
        )
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names or ()
        raise ArgumentError(
            f"mesh has one dimension, the ranks of a sequence; got {mesh.ndim} dimensions {list(names)}: give one of "
            'them, as in mesh["sp"]'
        )
    if mesh.get_coordinate() is None:
        raise ArgumentError(f"mesh holds the ranks {mesh.mesh.tolist()}, and this process is none of them")
