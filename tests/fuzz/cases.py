"""Random calls: each is a short program, and what the mask in it keeps."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from stof.selection import IMPLEMENTATIONS
from tests.fuzz.terms import Kept, Sizes, Term, dense
from tests.fuzz.trees import Masks

LENGTHS = (1, 2, 3, 7, 13, 16, 17, 31, 47, 61, 63, 64, 65, 67, 97, 113, 127, 128, 129, 151, 200)
MEMORY = ("bhsd", "bhsd", "bshd", "packed", "strided", "transposed", "offset", "expanded")
DTYPES = ("float32", "float32", "float16", "bfloat16", "float64")
# How a call is made, and how often.
ENTRIES = {
    "eager": 40,
    "plan": 20,
    "sized plan": 14,
    "saved": 8,
    "extended": 4,
    "dynamic": 8,
    "written": 4,
    "refused": 4,
    "compiled": 0.6,
    "exported": 0.2,
    "transformers": 0.3,
}
ON_GPU = {"captured": 6, "captured update": 4}
# Entries that may end with gradients.
DIFFERENTIABLE = ("eager", "plan", "sized plan", "saved", "extended", "compiled", "dynamic")
# Entries that may drop weights.
DROPPING = (*DIFFERENTIABLE, "written", "kernel")
BACKENDS = ("eager", "eager", "aot_eager", "aot_eager", "inductor")


@dataclass
class Case:
    """A program that leaves its result in `out` and `lse`.

    Attributes:
        seed, number: name it.
        entry: a key of `ENTRIES` or `ON_GPU`, or "kernel".
        lines: the program, but for imports and `device`.
        options: of `stof.attention` beside the mask, for the oracle.
        keep: what is kept, bool `[B | 1, H | 1, Sq, Skv]`; None where single calls of its function raise.
        must_refuse: an answer would be wrong.
        implementation: forced, or None.
        differentiated: the program ends with gradients of a call, in `gradients`, for `d_out`.
        dropout_seed: of PyTorch's generator before each call with dropout; None without.
    """

    seed: int
    number: int
    entry: str
    sizes: dict[str, Any]
    lines: list[str] = field(default_factory=list)
    keep: Kept | None = None
    must_refuse: bool = False
    implementation: str | None = None
    differentiated: bool = False
    dropout_seed: int | None = None


def draw_case(seed: int, number: int, device: str, kernels: bool = False) -> Case:
    """The case of this seed and number; of Triton kernels in the interpreter, if asked for."""
    draw = random.Random(f"{seed} {number}")
    weights = ENTRIES | (ON_GPU if device == "cuda" else {})
    entry = "kernel" if kernels else draw.choices(list(weights), list(weights.values()))[0]
    kv_heads, group = draw.choice([(1, 1), (2, 1), (1, 3), (2, 2), (1, 4), (3, 1)])
    if entry == "transformers":
        group = 1
    dtype = draw.choice(DTYPES[:4] if kernels else DTYPES)
    few = kernels or entry == "transformers"
    lengths = [n for n in LENGTHS if n <= (70 if few else 200)]
    q_len = draw.choice(lengths)
    if device == "cuda" and draw.random() < 0.3:
        dtype, lengths = draw.choice(["float16", "bfloat16"]), [*lengths, 255, 256, 400, 521, 1024]
    head_dims = [16, 20, 64] if kernels else [1, 3, 8, 16, 31, 32, 64, 64, 80, 128]
    # Each pair of widths is a kernel to compile on a GPU, for each of many options.
    head_dim = draw.choice([3, 31, 64, 64, 80, 128] if device == "cuda" else head_dims)
    sizes = {
        "batch": draw.choice([1, 1, 2, 3]),
        "heads": kv_heads * group,
        "kv_heads": kv_heads,
        "q_len": q_len,
        "kv_len": q_len if entry == "transformers" else draw.choice([q_len, *draw.choices(lengths, k=2)]),
        "head_dim": head_dim,
        "value_dim": draw.choice([head_dim, head_dim, head_dim, 5, 24]),
        "dtype": f"torch.{dtype}",
        "memory": draw.choice(MEMORY),
        "seed": draw.randrange(10_000),
    }
    case = Case(seed, number, entry, sizes)
    _Drawing(draw, case, device).draw_all()
    return case


class _Drawing:
    """Fills in a case."""

    def __init__(self, draw: random.Random, case: Case, device: str) -> None:
        self.draw, self.case, self.device = draw, case, device
        own = case.sizes
        self.sizes = Sizes(own["batch"], own["heads"], own["q_len"], own["kv_len"])
        self.lengths = f"{own['q_len']}, {own['kv_len']}"
        self.both = f"batch={own['batch']}, heads={own['heads']}"

    def draw_all(self) -> None:
        term = self._mask()
        self._keep(term)
        while self.device == "cuda" and self.case.keep is None:
            # A mask function that indexes out of range raises on a CPU, and stops a GPU for the whole process.
            self.case.must_refuse = False
            term = self._mask()
            self._keep(term)
        lines, call = self._entry(term)
        inputs = self._inputs()
        options = self._options()
        if self._may_drop() and self.draw.random() < 0.3:
            seed = self.case.dropout_seed = self.draw.randrange(10_000)
            options.append(f"options['dropout_p'] = {self.draw.choice([1e-9, 0.1, 0.5, 0.9])}")
            call = [f"torch.manual_seed({seed}); {line}" if line.startswith("out") else line for line in call]
        if self._may_differentiate(term, options) and self.draw.random() < 0.6:
            self.case.differentiated = True
            call = [*call, *self._gradients(call)]
        self.case.lines = [*term.setup, *inputs, *options, *lines, *call]

    def _may_differentiate(self, term: Term, options: list[str]) -> bool:
        if self.case.entry != "dynamic":
            return self.case.entry in DIFFERENTIABLE
        with_bias = any("['bias']" in line for line in options)
        return "vertical_slash" not in term.text and not (with_bias and self.device == "cuda")

    def _may_drop(self) -> bool:
        name = self.case.implementation
        return self.case.entry in DROPPING and (name is None or IMPLEMENTATIONS[name].capabilities.dropout)

    def _mask(self) -> Term:
        entry, masks = self.case.entry, Masks(self.draw, self.sizes.heads)
        wanted = {
            "dynamic": lambda term: term.dynamic is not None,
            "captured update": lambda term: term.dynamic is not None,
            "written": lambda term: term.writable,
            "exported": lambda term: term.named or term.raw == "dense",
            "extended": lambda term: term.grows,
        }.get(entry, lambda term: True)
        for _ in range(300):
            term = masks.tree(self.sizes)
            if wanted(term):
                return term
        raise AssertionError(f"no mask for {entry}")

    def _keep(self, term: Term) -> None:
        try:
            self.case.keep = dense(term, *self.sizes_of())
        except Exception:  # a single call of the mask's function is invalid: it has to be refused
            self.case.keep, self.case.must_refuse = None, True

    def sizes_of(self) -> tuple[int, int, int, int]:
        return self.sizes.batch, self.sizes.heads, self.sizes.q_len, self.sizes.kv_len

    def _inputs(self) -> list[str]:
        lines = [self._made()]
        if self.draw.random() < 0.2:
            name = self.draw.choice("qkv")
            lines.append(f"{name} = spread({name}, {self.draw.choice(MEMORY[2:-1])!r})")
        return lines + self._poison()

    def _made(self, **others: int) -> str:
        own = self.case.sizes | others
        given = ", ".join(f"{name}={value if name == 'dtype' else repr(value)}" for name, value in own.items())
        return f"q, k, v = make_inputs({given}, device=device).qkv"

    def _poison(self) -> list[str]:
        """NaN in keys and values that nobody may read."""
        if self.case.sizes["memory"] == "expanded" or self.case.implementation == "reference":
            return []
        keep = self.case.keep
        if keep is None or self.draw.random() < 0.4:
            return []
        # A key head serves a group of query heads; sequences under one mask are computed together.
        seen = np.broadcast_to(keep, (keep.shape[0], self.sizes.heads, *keep.shape[2:])).any(2)
        groups = seen.reshape(seen.shape[0], self.case.sizes["kv_heads"], -1, self.sizes.kv_len).any(2)
        hidden = [
            (b, h, int(j))
            for b in range(self.sizes.batch)
            for h in range(groups.shape[1])
            for j in np.flatnonzero(~groups[b if len(groups) > 1 else 0, h])
        ]
        if not hidden:
            return []
        places = self.draw.sample(hidden, min(len(hidden), self.draw.choice([1, 8])))
        return [f"for b, h, j in {places}: k[b, h, j] = v[b, h, j] = torch.nan"]

    def _options(self) -> list[str]:
        draw, own = self.draw, self.case.sizes
        lines = ["options = {}"]
        if draw.random() < 0.3:
            lines.append(f"options['scale'] = {draw.choice([0.0, 0.3, -0.7, 1, 0.125])}")
        if draw.random() < 0.25:
            lines.append(f"options['softcap'] = {draw.choice([0.5, 5.0, 20])}")
        if draw.random() < 0.25 and self.case.entry != "transformers":
            lines += self._bias()
        if draw.random() < 0.2:
            dtype = draw.choice([own["dtype"], "torch.float32"])
            lines.append(f"options['sinks'] = (torch.arange({own['heads']}) - 1.5).to(device, {dtype})")
            if draw.random() < 0.2:
                lines.append("options['sinks'][0] = -torch.inf")
        return lines

    def _bias(self) -> list[str]:
        draw, own = self.draw, self.case.sizes
        every = (own["batch"], own["heads"], own["q_len"], own["kv_len"])
        shape = tuple(size if draw.random() < 0.6 else 1 for size in every)
        dtype = draw.choice([own["dtype"], own["dtype"], "torch.float32"])
        lines = [f"bias = torch.randn({shape}, generator=torch.Generator().manual_seed({draw.randrange(999)}))"]
        if draw.random() < 0.3:
            lines.append("bias[bias > 0.8] = -torch.inf")
        lines.append(f"options['bias'] = spread(bias.to(device, {dtype}), {draw.choice(MEMORY[:-1])!r})")
        keep = self.case.keep
        if keep is not None and shape == every and self.case.implementation != "reference" and draw.random() < 0.5:
            dropped = np.argwhere(~np.broadcast_to(keep, every))
            if len(dropped):
                places = [tuple(map(int, dropped[draw.randrange(len(dropped))])) for _ in range(3)]
                lines.append(f"for at in {places}: options['bias'][at] = torch.nan")
        elif shape[2:] == (1, 1) or draw.random() < 0.3:
            while shape[0] == 1 and len(shape) > 1:
                shape = shape[1:]
            lines.append(f"options['bias'] = options['bias'].reshape({shape})")
        return lines

    def _gradients(self, call: list[str]) -> list[str]:
        """The last call once more, differentiated in all its tensors."""
        ones = self.draw.random() < 0.2
        d_out = "torch.ones((), device=device).to(out).expand(out.shape)" if ones else "torch.randn_like(out)"
        return [
            "q, k, v = (x.detach().requires_grad_() for x in (q, k, v))",
            "tensors = {n: x.detach().requires_grad_() for n, x in options.items() if isinstance(x, torch.Tensor)}",
            "options |= tensors",
            call[-2] if call[-1] == "mask.check()" else call[-1],
            f"torch.manual_seed(0); d_out = {d_out}",
            "leaves = {'q': q, 'k': k, 'v': v} | tensors",
            "gradients = dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), d_out)))",
        ]

    def _forced(self) -> str:
        names = ["row_block", "batched", "reference"]
        if self.device == "cuda":
            names = ["batched", "hopper", "hopper", "block_wise", "block_wise", "row_wise", "decode"]
        if self.case.entry in ("dynamic", "captured update") and self.device == "cuda":
            names = ["hopper", "block_wise"]
        if self.draw.random() < 0.4:
            self.case.implementation = self.draw.choice(names)
            return f", implementation={self.case.implementation!r}"
        return ""

    def _entry(self, term: Term) -> tuple[list[str], list[str]]:
        """Lines that prepare a call, and those that make it."""
        forced = self._forced()
        raw = term.text if self.draw.random() < 0.5 else term.mask()
        if term.named and not term.raw and self.draw.random() < 0.1:
            raw = f"repr({raw})"
        call = [f"out, lse = stof.attention(q, k, v, mask, **options, return_lse=True{forced})"]
        make = getattr(self, "_" + self.case.entry.replace(" ", "_"))
        lines, call = make(term, [f"mask = {raw}"], call)
        if self.case.entry in ("eager", "plan", "sized plan", "saved") and self.draw.random() < 0.4:
            # Again with other values: ready calls take another way.
            call = [*call, self._made(seed=self.draw.randrange(10_000)), *call]
        elif self.case.entry == "eager" and self.draw.random() < 0.1:
            call = [call[0].replace("out, lse", "out").replace(", return_lse=True", "")]
        return lines, call

    def _eager(self, term: Term, lines: list[str], call: list[str]) -> tuple[list[str], list[str]]:
        return lines, call

    def _plan(self, term: Term, lines: list[str], call: list[str]) -> tuple[list[str], list[str]]:
        return [*lines, f"mask = stof.plan(mask, {self.lengths}, device=device)"], call

    def _sized_plan(self, term: Term, lines: list[str], call: list[str]) -> tuple[list[str], list[str]]:
        config = ""
        if self.draw.random() < 0.5:
            slab = self.draw.choice([None, 1, 8, 16])
            config = (
                f", config=stof.LayoutConfig({self.draw.choice([16, 32, 64])}, {self.draw.choice([16, 64])}, {slab})"
            )
        if self.draw.random() < 0.2:
            order = self.draw.sample(range(self.sizes.q_len), self.sizes.q_len)
            config += f", row_order=torch.tensor({order}, device=device)"
        return [*lines, f"mask = stof.plan(mask, {self.lengths}, {self.both}, device=device{config})"], call

    def _saved(self, term: Term, lines: list[str], call: list[str]) -> tuple[list[str], list[str]]:
        lines, call = self._sized_plan(term, lines, call)
        return [*lines, "mask.save(path)", "mask = stof.Plan.load(path, device)"], call

    def _extended(self, term: Term, lines: list[str], call: list[str]) -> tuple[list[str], list[str]]:
        most = min(self.sizes.q_len, self.sizes.kv_len) - 1
        rows = self.draw.randint(0, most)
        own = f"{self.sizes.q_len - rows}, {self.sizes.kv_len - rows}"
        sizes = self.draw.choice(["", f", {self.both}"])
        return [*lines, f"mask = stof.plan(mask, {own}{sizes}, device=device).extended({rows})"], call

    def _written(self, term: Term, lines: list[str], call: list[str]) -> tuple[list[str], list[str]]:
        """A bool tensor that is written to between two calls, if PyTorch counts it or not; masks keep its values."""
        assert self.case.keep is not None
        if lines == [f"mask = {term.writable}"]:
            self.case.keep = ~self.case.keep
        write = self.draw.choice(["{0}.logical_not_()", "{0}.data.logical_not_()", "{0}.data = ~{0}"])
        return lines, [*call, write.format(term.writable), *call]

    def _dynamic(self, term: Term, lines: list[str], call: list[str]) -> tuple[list[str], list[str]]:
        lines = [*lines, f"mask = stof.dynamic_plan(mask, {self.lengths}, {self.both}, device=device)"]
        if self.draw.random() < 0.6:
            lines += self._update(term)
        return lines, [*call, "mask.check()"]

    def _update(self, term: Term) -> list[str]:
        assert term.dynamic is not None
        lines, seen = term.dynamic
        self.case.keep = dense(replace(term, seen=seen), *self.sizes_of())
        return [*lines, "mask.update(again)"]

    def _captured(self, term: Term, lines: list[str], call: list[str]) -> tuple[list[str], list[str]]:
        lines = [*lines, f"mask = stof.plan(mask, {self.lengths}, {self.both}, device=device)"]
        return lines, _in_graph(call)

    def _captured_update(self, term: Term, lines: list[str], call: list[str]) -> tuple[list[str], list[str]]:
        assert term.dynamic is not None
        made, _ = term.dynamic
        lines = [*lines, f"mask = stof.dynamic_plan(mask, {self.lengths}, {self.both}, device=device)", *call, *made]
        lines[len(lines) - len(made) :] = self._update(term)[:-1]
        return lines, [*_in_graph(["mask.update(again)", *call]), "mask.check()"]

    def _refused(self, term: Term, lines: list[str], call: list[str]) -> tuple[list[str], list[str]]:
        """Calls that no answer is right for."""
        self.case.must_refuse = True
        own = self.case.sizes
        plan = f"stof.plan(mask, {own['q_len']}, {own['kv_len']}, {self.both}, device=device)"
        wrong = [
            f"mask = stof.plan(mask, {own['q_len'] + 1}, {own['kv_len']}, {self.both}, device=device)",
            f"mask = stof.plan(mask, {own['q_len']}, {own['kv_len'] + 1}, {self.both}, device=device)",
            "q = q.int()",
            "k = k[..., :0]",
            "v = v[:, :, :-1]",
            "options['scale'] = float('nan')",
            "options['softcap'] = -1.0",
            "options['dropout_p'] = 1.0",
            f"options['bias'] = torch.zeros({own['kv_len'] + 1}, device=device)",
            f"options['sinks'] = torch.zeros({own['heads'] + 1}, device=device)",
            "q = q[0]",
            f"mask = {plan}; k, v = (torch.cat([x, x], 2) for x in (k, v))",
            f"mask = torch.ones({own['q_len']}, {own['kv_len'] + 1}, dtype=torch.bool, device=device)",
            f"mask = masks.padding([{own['kv_len'] + 1}])",
            f"mask = masks.padding([1] * {own['batch'] + 1})",
            f"mask = masks.per_head([masks.full()] + [masks.causal()] * {own['heads']})",
            f"mask = stof.plan(masks.padding([1] * {own['batch'] + 1}), {self.lengths}, device=device)",
            "mask = torch.ones(3)",
            "mask = 'sliding_windw(3)'",
            "mask = lambda b, h, q, kv: q - kv",
            "mask = lambda b, h, q, kv: None",
            "mask = lambda b, h, q: q > 0",
        ]
        if self.draw.random() < 0.05:
            twice = ["(first,) = torch.autograd.grad(out.sum(), q, create_graph=True)", "first.sum().backward()"]
            return [*lines, "q = q.requires_grad_()"], [*call, *twice]
        return [*lines, self.draw.choice(wrong)], call

    def _compiled(self, term: Term, lines: list[str], call: list[str]) -> tuple[list[str], list[str]]:
        """A mask from outside, or a plan, in code compiled by one of PyTorch's backends."""
        shape = self.draw.choice(["mask", "mask", "plan"])
        lines = [f"mask = masks.as_mask({lines[0].removeprefix('mask = ')})"]
        if shape == "plan":
            lines.append(f"mask = stof.plan(mask, {self.lengths}, {self.both}, device=device)")
        backend = self.draw.choice(BACKENDS)
        # Inductor's own generator draws other seeds than eager calls.
        options = ", options={'fallback_random': True}" if backend == "inductor" else ""
        made = call[0].removeprefix("out, lse = ")
        return [
            *lines,
            f"def step(q, k, v): return {made}",
            f"compiled = torch.compile(step, backend={backend!r}, fullgraph=True{options})",
        ], ["out, lse = compiled(q, k, v)"] * self.draw.choice([1, 2])

    def _exported(self, term: Term, lines: list[str], call: list[str]) -> tuple[list[str], list[str]]:
        made = call[0].removeprefix("out, lse = ").replace("mask, ", "self.mask, ")
        return [
            *lines,
            "class Model(torch.nn.Module):\n    mask = mask\n    def forward(self, q, k, v, options): return " + made,
            "torch.export.save(torch.export.export(Model(), (q, k, v, options)), path)",
        ], ["out, lse = in_another_process(path, q, k, v, options)"]

    def _transformers(self, term: Term, lines: list[str], call: list[str]) -> tuple[list[str], list[str]]:
        """A tiny encoder under the mask; its own eager attention is told what the mask keeps."""
        mask = lines[0].removeprefix("mask = ")
        lines = [f"mask = masks.as_mask({mask}) | masks.sliding_window(0)"]  # eager attention has no empty rows
        return lines, [
            f"out, expected = encoded(mask, kept, {self.both}, seed={self.case.sizes['seed']}, device=device)"
        ]

    def _kernel(self, term: Term, lines: list[str], call: list[str]) -> tuple[list[str], list[str]]:
        """A Triton kernel in Triton's interpreter, on a layout of its own."""
        name = self.case.implementation = self.draw.choice(["block_wise", "block_wise", "row_wise"])
        slab, block_n = self.draw.choice([None, 1, 8, 16]), self.draw.choice([16, 32, 64])
        config = f"stof.LayoutConfig({self.draw.choice([16, 32, 64])}, {block_n}, {slab})"
        # Packed heads share one mask.
        pack = "plan.layout.pattern_of.shape[1] == 1" if self.draw.random() < 0.5 else "False"
        settings = f"KernelConfig(pack={pack}, split_tiles={self.draw.choice([0, 1, 2])})"
        return [
            *lines,
            f"plan = stof.plan(mask, {self.lengths}, {self.both}, config={config})",
            "given = {'scale': q.shape[-1] ** -0.5, 'softcap': 0.0, 'bias': None, 'sinks': None} | options",
        ], [f"out, lse = kernel({name!r}, q, k, v, plan.layout, {settings}, given)"]


def _in_graph(call: list[str]) -> list[str]:
    inner = "\n    ".join(call)
    return [
        *call,
        "torch.cuda.synchronize(); graph = torch.cuda.CUDAGraph()",
        f"with torch.cuda.graph(graph):\n    {inner}",
        "out.fill_(torch.nan); lse.fill_(torch.nan); graph.replay(); torch.cuda.synchronize()",
    ]
