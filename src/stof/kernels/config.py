"""What a GPU kernel is compiled with."""

from __future__ import annotations

from dataclasses import dataclass

from stof.errors import ArgumentError


@dataclass(frozen=True)
class KernelConfig:
    """How a block-wise or Hopper kernel is compiled, and how its work is cut; results do not depend on it.

    Attributes:
        num_warps: warps of a thread block.
        num_stages: stages of the K and V pipeline, at least 2: without a pipeline, Triton 3.6 compiles a loop for
            sm_90 that reads shared memory out of bounds (seen on an H200).
        max_registers: registers of a thread at most (more thread blocks fit on a multiprocessor); 0 for no bound.
        pack: put the query heads of a key head into the rows of one tile (for few query rows).
        split_tiles: row blocks with more tiles are cut into equal chunks of at most so many; 0 never cuts.
        side: (batch, head) pairs that run the same item side by side, so that K and V stay in the L2 cache; 0 for all.
        paired: two row blocks to a work tile, a warpgroup for each, and never split (the Hopper kernel alone).
        zero_unseen: tiles with keys that no query sees read a copy of K and V, in which these keys are zeros (the
            Hopper kernel alone).
    """

    num_warps: int = 4
    num_stages: int = 3
    max_registers: int = 0
    pack: bool = False
    split_tiles: int = 0
    side: int = 0
    paired: bool = False
    zero_unseen: bool = False

    def __post_init__(self) -> None:
        if self.num_stages < 2:
            raise ArgumentError(f"num_stages is at least 2, got {self.num_stages}")
        if self.paired and self.zero_unseen:
            raise ArgumentError("row blocks in pairs read no copy of the keys")

    def __str__(self) -> str:
        parts = [f"{self.num_warps} warps", f"{self.num_stages} stages"]
        parts += [f"{self.max_registers} registers"] * (self.max_registers > 0)
        parts += ["heads packed"] * self.pack
        parts += [f"split at {self.split_tiles} tiles"] * (self.split_tiles > 0)
        parts += [f"{self.side} heads side by side"] * (self.side > 0)
        parts += ["row blocks in pairs"] * self.paired
        parts += ["unseen keys as zeros"] * self.zero_unseen
        return ", ".join(parts)
