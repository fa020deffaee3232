"""The order of updates and calls of a dynamic plan, which may be on any CUDA streams."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from stof.runtime.private import raw_stream


@dataclass(frozen=True, eq=False)
class Update:
    """An update of a dynamic plan: calls on other streams wait for it, and the next update waits for these streams.

    Attributes:
        done: event recorded after the update; None where only its own stream needs it.
        streams: by their ids, the stream it ran on and those that wait for it.
    """

    done: torch.cuda.Event | None = None
    streams: dict[int, torch.cuda.Stream] = field(default_factory=dict)

    @staticmethod
    def here() -> Update:
        """An update that was launched on the current stream just now."""
        stream = torch.cuda.current_stream()
        return Update(stream.record_event(), {stream.cuda_stream: stream})

    def join(self) -> None:
        """Let the current stream wait, once."""
        number = stream_id()
        if number in self.streams:
            return
        stream = torch.cuda.current_stream()
        if self.done is not None:
            stream.wait_event(self.done)
        self.streams[number] = stream

    def wait_for_calls(self, ordered: int) -> None:
        """Let the current stream wait for `streams`, except one (by its id) that it already waits for."""
        number = stream_id()
        for other, stream in self.streams.items():
            if other not in (number, ordered):
                torch.cuda.current_stream().wait_stream(stream)


def stream_id() -> int:
    """The id of the current stream. Every call needs it, and making a `torch.cuda.Stream` takes longer."""
    return raw_stream(torch.cuda.current_device())
