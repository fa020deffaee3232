"""Masks: what may attend to what, as composable values. See `docs/how-to/masks.md` for the cookbook."""

from stof.masks.compose import Mask, placed, transposed
from stof.masks.dynamic import block_topk, from_bits, vertical_slash
from stof.masks.functions import from_function
from stof.masks.index import Index
from stof.masks.named_masks import (
    bigbird,
    causal,
    dilated_window,
    documents,
    full,
    global_tokens,
    longformer,
    neighborhood_2d,
    padding,
    per_head,
    prefix_lm,
    random_blocks,
    sink_tokens,
    sliding_window,
    strided,
)
from stof.masks.parse import NAMED_MASKS, parse
from stof.masks.reorder import reordered
from stof.masks.tensors import as_mask, from_block_mask, from_dense

__all__ = [
    "NAMED_MASKS",
    "Index",
    "Mask",
    "as_mask",
    "bigbird",
    "block_topk",
    "causal",
    "dilated_window",
    "documents",
    "from_bits",
    "from_block_mask",
    "from_dense",
    "from_function",
    "full",
    "global_tokens",
    "longformer",
    "neighborhood_2d",
    "padding",
    "parse",
    "per_head",
    "placed",
    "prefix_lm",
    "random_blocks",
    "reordered",
    "sink_tokens",
    "sliding_window",
    "strided",
    "transposed",
    "vertical_slash",
]
