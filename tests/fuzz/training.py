"""Random training: what is checkpointed, frozen, wrapped and compiled, and how masks change between steps."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import numpy as np

from tests.fuzz.terms import Kept, Sizes, Term, dense
from tests.fuzz.training_models import HEADS
from tests.fuzz.trees import Masks

MODELS = {"plain": 5, "llama": 2, "gemma2": 1, "bert": 1, "t5": 1}
CHECKPOINTING = {"none": 2, "non-reentrant": 3, "reentrant": 2, "selective": 5}
# Operators whose results selective checkpointing saves, at random; "stof" is all of STOF's.
SAVED = [
    "stof",
    "mm",
    "addmm",
    "bmm",
    "max",
    "amax",
    "index",
    "arange",
    "equal",
    "any",
    "where",
    "eq",
    "le",
    "ge",
    "sum",
    "mul",
    "div",
    "tanh",
    "native_layer_norm",
    "_softmax",
    "exp",
    "clone",
    "cumsum",
    "nonzero",
    "randint",
    "empty",
    "cat",
    "logical_and",
    "bitwise_and",
    "_to_copy",
    "native_dropout",
    "gather",
    "sub",
    "add",
]
# F: forward, B: backward, R: backward that retains its graph, E: evaluation, each of the step of this number.
ORDERS = ("F0 B0 F1 B1 F2 B2", "F0 B0 E1 F1 B1 F2 R2 B2")
INTERLEAVED = ("F0 F1 B0 B1 F2 B2", "F0 F1 B1 B0", "F0 F1 B01 F2 B2", "F0 E1 B0 F2 B2", "E0 F0 F1 F2 B2 B0 B1")


@dataclass(frozen=True)
class Step:
    """A batch and its mask.

    Attributes:
        lines: leave the mask in `mask`.
        length: tokens of a row.
        padded: tokens of each row that are none; of packed rows where the sequences begin.
        layer: number of the one layer that has the mask; None for all.
        soft: the model is given embeddings that ask for gradients, as of soft prompts.
        keep: what the mask keeps, bool `[B | 1, H | 1, S, S]`.
    """

    lines: tuple[str, ...]
    length: int
    padded: tuple[int, ...]
    layer: int | None
    soft: bool
    keep: Kept | None = field(repr=False)


@dataclass
class Case:
    """What is trained.

    Attributes:
        entry: the model and its checkpointing, for reports.
        around: "block", "model" or "both" are checkpointed.
        saved: operators that selective checkpointing saves, every `every`-th call of them.
        frozen: parts without gradients: 1 the embedding, 2 also the first block.
        wrapped: what of the model has a wrapped `forward`: "attention", "block" or "model"; empty for nothing.
        wrapper: "args" takes `(*args, **kwargs)`, "wraps" also copies the name and signature.
        wrapped_first: before STOF is enabled.
        compiled: backend for each block or the model, empty without; `partitioner` are settings for it.
        offloaded: saved tensors are moved by hooks.
        order: what runs when, see `ORDERS`.
        removed: sparse masks end with the forward pass.
        batches: of transformers: "left" or "right" padding, "packed" positions, also with a mask of "ones"; or "none".
        kv_heads, options, scaled: of a stack of plain blocks.
    """

    seed: int
    number: int
    model: str
    checkpointing: str
    around: str
    order: str
    saved: frozenset[str] = frozenset()
    every: int = 1
    early_stop: bool = True
    frozen: int = 0
    wrapped: str = ""
    wrapper: str = "args"
    wrapped_first: bool = False
    compiled: str = ""
    compiles: str = "block"
    partitioner: tuple[tuple[str, Any], ...] = ()
    autocast: bool = False
    offloaded: bool = False
    removed: bool = False
    batches: str = "none"
    dropout: float = 0.0
    kv_heads: int = HEADS
    options: dict[str, Any] = field(default_factory=dict)
    scaled: str = ""
    masks: str = ""
    steps: list[Step] = field(default_factory=list)

    @property
    def entry(self) -> str:
        return f"{self.model} {self.checkpointing}{' compiled' if self.compiled else ''}"

    must_refuse: ClassVar[bool] = False

    @property
    def batch(self) -> int:
        return 1 if self.batches in ("packed", "ones") else 2

    @property
    def lines(self) -> list[str]:
        """What is not as by default."""
        own = [f"{x.name}: {value}" for x in fields(self)[:-1] if (value := getattr(self, x.name)) != x.default]
        return own + [f"step {number}: {step}" for number, step in enumerate(self.steps)]


def draw_case(seed: int, number: int, device: str = "cpu", kernels: bool = False) -> Case:
    """The case of this seed and number."""
    draw = random.Random(f"training {seed} {number}")
    model = draw.choices(list(MODELS), list(MODELS.values()))[0]
    checkpointing = draw.choices(list(CHECKPOINTING), list(CHECKPOINTING.values()))[0]
    case = Case(seed, number, model, checkpointing, draw.choice(["block", "block", "model", "both"]), "")
    if checkpointing == "selective":
        case.saved = frozenset(draw.sample(SAVED, draw.choice([1, 2, 3, 5, 15, 25])))
        case.every = draw.choice([1, 1, 2])
    if model == "plain" and draw.random() < 0.025:
        case.compiled = draw.choice(["eager", "aot_eager", "aot_eager_decomp_partition"])
        case.compiles = draw.choice(["block", "model"])
        settings = [(), (("aggressive_recomputation", True),), (("activation_memory_budget", draw.choice([0.0, 0.5])),)]
        case.partitioner = draw.choice(settings)
    case.early_stop = draw.random() < 0.8
    case.frozen = draw.choice([0, 0, 1, 2])
    if case.frozen == 2 and draw.random() < 0.5:  # calls of a frozen layer have a graph or none
        case.around = "model"
    case.wrapped = draw.choice(["", "", "attention", "block", "model"])
    case.wrapper, case.wrapped_first = draw.choice(["args", "wraps"]), draw.random() < 0.5
    case.offloaded = draw.random() < 0.1
    if model not in ("t5", "gemma2"):  # whose scores bfloat16 rounds too much to compare
        case.autocast = draw.random() < 0.25
    if not (case.compiled and case.saved):  # PyTorch has no random numbers of compiled code in selective checkpointing
        case.dropout = draw.choice([0.0, 0.0, 0.5])
        if case.dropout and case.partitioner == (("activation_memory_budget", 0.0),):
            case.partitioner = ()  # PyTorch draws other random numbers in the backward pass; stof warns
    kinds = ["trees", "trees", "documents", "windows", "constant", "tensor", "written", "function"]
    if model == "plain":
        kinds += ["plans", "dynamic"]
        case.options = {name: draw.choice([None, None, None, True]) for name in ("bias", "sinks")}
        case.options["softcap"] = draw.choice([None, None, 3.0])
        case.kv_heads, case.scaled = draw.choice([4, 2, 1]), draw.choice(["", "", "max", "amax"])
    else:
        kinds.append("none")
        packs = ["packed", "ones"] if model in ("llama", "gemma2") else []
        case.batches = draw.choice(["none", "left", "right", *packs, *packs])
        case.removed = draw.random() < 0.5
    case.masks = draw.choice(kinds)
    # A recomputation reads again what a mask is made of, so that must not change before it.
    must_wait = case.masks == "dynamic" or (case.masks in ("written", "function") and checkpointing != "none")
    case.order = draw.choice(ORDERS if must_wait else ORDERS + INTERLEAVED)
    if checkpointing == "selective":  # which is differentiated once
        case.order = case.order.replace("R2 ", "")
    case.steps = _steps(draw, case)
    return case


def _steps(draw: random.Random, case: Case) -> list[Step]:
    packed = case.batches in ("packed", "ones")
    fixed = case.masks in ("constant", "written", "function", "dynamic") or bool(case.compiled)
    length = draw.choice([7, 16, 24, 33])
    steps: list[Step] = []
    layer = draw.choice([None, 0] if case.frozen == 2 else [None, None, 0, 1])
    for number in range(3):
        length = length if fixed else draw.choice([7, 16, 24, 33])
        count = draw.randint(0, 2) if packed else case.batch
        padded = tuple(sorted(draw.randint(packed, length - 1) for _ in range(count)))
        lines, keep = _mask(draw, case.masks, number, Sizes(case.batch, HEADS, length, length), steps)
        soft = case.model in ("llama", "gemma2", "bert") and draw.random() < (0.4 if case.frozen == 2 else 0.1)
        steps.append(Step(lines, length, padded, layer, soft, keep))
    return steps


def _mask(
    draw: random.Random, kind: str, number: int, sizes: Sizes, before: list[Step]
) -> tuple[tuple[str, ...], Kept | None]:
    """Lines that make the mask of a step of those before, and what it keeps."""
    length = sizes.q_len
    q, kv = np.arange(length)[:, None], np.arange(length)[None]
    lengths = f"{length}, {length}, batch={sizes.batch}, heads={sizes.heads}"
    match kind:
        case "none":
            return ("mask = None",), None
        case "constant" if before:
            return (), before[-1].keep
        case "trees" | "plans" | "constant":
            term, keep = _tree(draw, sizes)
            if kind == "plans":
                return (*term.setup, f"mask = stof.plan({term.text}, {lengths})"), keep
            return (*term.setup, f"mask = {term.mask()}"), keep
        case "documents":
            cuts = sorted({0, length, *(draw.randint(1, length) for _ in range(2))})
            ids = np.searchsorted(cuts, np.arange(length), side="right")
            text = f"mask = masks.causal() & masks.documents(cu_seqlens={cuts})"
            return (text,), ((q >= kv) & (ids[:, None] == ids))[None, None]
        case "windows":
            left, right = draw.randint(0, length), draw.randint(0, 3)
            return (f"mask = masks.sliding_window({left}, {right})",), ((kv >= q - left) & (kv <= q + right))[
                None, None
            ]
        case "function":
            seed = draw.randrange(10_000)
            ids = np.random.default_rng(seed).integers(0, 3, length)
            text = f"torch.from_numpy(np.random.default_rng({seed}).integers(0, 3, {length}))"
            first = f"ids = {text}", "mask = masks.from_function(lambda b, h, q, kv: (ids[q] == ids[kv]) & (q >= kv))"
            return first if not before else (f"ids.copy_({text})",), ((ids[:, None] == ids) & (q >= kv))[None, None]
        case _:  # "tensor", "written" or "dynamic"
            seed = draw.randrange(10_000)
            text = f"torch.from_numpy(np.random.default_rng({seed}).random(({length}, {length})) < 0.4)"
            made = f"stof.dynamic_plan(masks.from_dense({text}), {lengths})"
            if kind == "dynamic":
                lines = (f"mask.update(masks.from_dense({text}))" if before else f"mask = {made}",)
            else:
                write = f"table.copy_({text})" if before and kind == "written" else f"table = {text}"
                lines = write, "mask = masks.from_dense(table)"
            return lines, (np.random.default_rng(seed).random((length, length)) < 0.4)[None, None]


def _tree(draw: random.Random, sizes: Sizes) -> tuple[Term, Kept]:
    while True:
        term = Masks(draw, sizes.heads).tree(sizes)
        try:
            return term, dense(term, sizes.batch, sizes.heads, sizes.q_len, sizes.kv_len)
        except Exception:  # single calls of the mask's function are invalid
            continue
