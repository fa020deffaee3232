"""The implementations a benchmark can time, STOF among them, each in its best known configuration."""

from __future__ import annotations

from benchmarks.peers.interface import Call, Peer
from benchmarks.peers.pytorch import TORCH_PEERS
from benchmarks.peers.wheels import WHEEL_PEERS
from stof.errors import ArgumentError

__all__ = ["PEERS", "Call", "Peer", "peer"]

PEERS: dict[str, Peer] = {peer.name: peer for peer in (*TORCH_PEERS, *WHEEL_PEERS)}


def peer(name: str) -> Peer:
    """The implementation of that name.

    Raises:
        ArgumentError: no such implementation; lists those there are.
    """
    if name not in PEERS:
        raise ArgumentError(f"unknown implementation {name!r}; there are {', '.join(PEERS)}")
    return PEERS[name]
