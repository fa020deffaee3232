"""What `stof.explain` and `stof inspect` report: an order of the tokens that needs fewer tiles than theirs."""

from __future__ import annotations

from dataclasses import dataclass

from stof.layout import LayoutConfig

# An order is reported if at most this share of the scores, and of the estimated time, is left.
_WORTH = 0.9


@dataclass(frozen=True)
class TokenOrder:
    """A better order of the tokens.

    Attributes:
        order: its description.
        tiles: the layout whose scores are counted: the one that the call would use with tokens in this order.
        scores, scores_now: computed for one head in such tiles, with tokens in this order and as they are. On a CPU
            the layout of `scores_now` may have a row order; on a GPU it has none.
        estimate_us, estimate_us_now: GPU time by the cost model, each in the layout and row order that suit it best,
            without permuting q, k and v; None on a CPU.
    """

    order: str
    tiles: LayoutConfig
    scores: int
    scores_now: int
    estimate_us: float | None = None
    estimate_us_now: float | None = None

    @property
    def helps(self) -> bool:
        """Whether at least a tenth is saved."""
        us, us_now = self.estimate_us, self.estimate_us_now
        faster = us is None or us_now is None or us <= _WORTH * us_now
        return faster and 0 < self.scores <= _WORTH * self.scores_now

    def __str__(self) -> str:
        tiles = f"{self.tiles.block_m}x{self.tiles.block_n} tiles ({self.tiles.columns})"
        fewer, scores, now = f"{self.scores_now / self.scores:.1f}x", _short(self.scores), _short(self.scores_now)
        text = (
            f"tokens in {self.order} (masks.reordered) would compute {fewer} fewer scores in {tiles}: "
            f"{scores} instead of {now} per head; "
        )
        if self.estimate_us is not None:
            text += f"est. {self.estimate_us:.1f} us instead of {self.estimate_us_now:.1f} in the best layout of each; "
        return text + "permuting q, k and v not counted"


def _short(scores: int) -> str:
    return f"{scores / 1e6:.1f} M" if scores >= 1e6 else f"{scores:,}"
