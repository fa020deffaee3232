"""`torch.compile(model, backend="stof")`: templates for segments they have a kernel for, Inductor for everything else.

Inference only. The backend rewrites the graph Dynamo captured and hands it to Inductor, whose caches stay in use: its
keys hold the rewritten graph, this package's source and the fusion scheme.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from stof.errors import ArgumentError, UnsupportedError, shown
from stof.fusion.graph.fx_utils import copy_module
from stof.fusion.graph.mutations import may_mutate_inputs
from stof.fusion.measure.model_comparison import PLAIN, RULED, SEARCHED, ModelComparison, differing, pick_winner
from stof.fusion.measure.parallel_compile import compile_candidates
from stof.fusion.measure.segment_timer import SegmentTimer, check
from stof.fusion.passes.weight_packing import pack_weights, unpack_weights
from stof.fusion.pipeline import Search, fuse, rewrite_biases, rewrite_patches
from stof.fusion.planner.lock_replay import Replay
from stof.fusion.planner.progress import Progress
from stof.fusion.records.choices import ConfigLookup, choices_path, known_choices, update_choices
from stof.fusion.records.lock_file import read_lock
from stof.fusion.records.report import FusionReport
from stof.fusion.records.store import Records, Store, default_store, segment_key, source_digest
from stof.integrations.cuda_graph_runner import CudaGraphRunner
from stof.masks import Mask
from stof.runtime.files import cache_folder
from stof.runtime.private import init_triton_cache
from stof.tuning.machine import device_name
from stof.tuning.timing import replayed_us, wall_us
from stof.version import __version__

__all__ = ["CompileOptions", "FusionReport", "optimize", "pack_weights", "stof_backend", "unpack_weights"]


# The value of `cuda_graphs` that records whole calls.
WHOLE = "whole"
# Seconds, and configurations drawn for each segment in a round.
EFFORTS: dict[str, tuple[float, int]] = {"none": (0.0, 0), "quick": (40.0, 3), "full": (600.0, 8)}


@dataclass(frozen=True)
class CompileOptions:
    """Options of the backend, as `torch.compile(..., options={...})` takes them.

    Attributes:
        effort: "none" decides by rules, without measuring; "quick" and "full" search for the scheme and its parameters
            by measuring segments, and finally the whole model with and without templates.
        budget_s: seconds that searching may take; None for the effort's own: 40 or 600. A compiled model has one budget
            for each of its graphs.
        cuda_graphs: True lets Inductor replay the compiled model as CUDA graphs; for fixed shapes and few tokens.
            "whole", for `stof.optimize`, replays whole calls, one graph for each combination of argument shapes:
            see `CudaGraphRunner` for what is noticed between calls, and what is not.
        deterministic: equal choices in every run; nothing is measured, by Inductor neither.
        fold: fold the weights of RMSNorms into the GEMMs after them, in a copy that takes as much memory as those
            GEMMs' weights. For weights that stay as they are: a change between calls is noticed, but not through
            `.data`, and not by a CUDA graph that was recorded before. A lock that was tuned so folds as well.
        experimental: let a search try templates whose gain is not settled: two GEMMs in one kernel (adapters).
        twins: run the templates' PyTorch references where there is no kernel, on a CPU for example, to try and test
            templates. The references fuse nothing; without this option Inductor compiles those operators.
        report: True prints the report of each graph that is compiled to stderr, a callable is called with it.
        progress: True prints a line to stderr after each measurement, a callable is called with it.
        store: where measurements are kept for later processes: True for the user's cache folder, a path for another
            folder, False for nowhere. Without measuring, what it knows of a shape goes before the rules; what comes
            with the package does in any case.
        lock: a lock file (`stof tune MODEL --lock FILE`), whose choices are reproduced with nothing measured; what does
            not fit is reported, and left to the rules.

    Raises:
        ArgumentError: a value that is none of these.
        LockFileError: a lock that cannot be read.
    """

    effort: str = "none"
    budget_s: float | None = None
    cuda_graphs: bool | str = False
    deterministic: bool = False
    fold: bool = False
    experimental: bool = False
    twins: bool = False
    report: bool | Callable[[FusionReport], object] = False
    progress: bool | Callable[[Progress], object] = False
    store: bool | str | Path = True
    lock: str | Path | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.effort, str) or self.effort not in EFFORTS:
            raise ArgumentError(f"effort {shown(self.effort)} is none of {', '.join(EFFORTS)}")
        number = isinstance(self.budget_s, int | float) and not isinstance(self.budget_s, bool)
        if self.budget_s is not None and not (number and self.budget_s > 0):
            raise ArgumentError(f"budget_s must be a positive number of seconds, got {shown(self.budget_s)}")
        if self.budget_s is not None and self.effort == "none":
            raise ArgumentError("budget_s limits measuring, and effort 'none' measures nothing; use 'quick' or 'full'")
        if not isinstance(self.cuda_graphs, bool) and not (
            isinstance(self.cuda_graphs, str) and self.cuda_graphs == WHOLE
        ):
            raise ArgumentError(f'cuda_graphs is True, False or "whole", got {shown(self.cuda_graphs)}')
        for name in ("report", "progress"):
            if not isinstance(getattr(self, name), bool) and not callable(getattr(self, name)):
                raise ArgumentError(f"{name} is True, False or a function, got {shown(getattr(self, name))}")
        if not isinstance(self.store, bool | str | Path):
            raise ArgumentError(f"store is True, False or a folder, got {shown(self.store)}")
        if self.lock is not None and not isinstance(self.lock, str | Path):
            raise ArgumentError(f"lock is the path of a lock file, got {shown(self.lock)}")
        for name in ("deterministic", "fold", "experimental", "twins"):
            if not isinstance(getattr(self, name), bool):
                raise ArgumentError(f"{name} is True or False, got {shown(getattr(self, name))}")
        if self.deterministic and self.effort != "none":
            raise ArgumentError(f"deterministic=True measures nothing; effort {self.effort!r} does")
        if self.lock is not None:
            read_lock(Path(self.lock))
        if self.lock is not None and self.effort != "none":
            raise ArgumentError(
                f"lock reproduces choices, effort {self.effort!r} searches for them; give one of the two"
            )

    @classmethod
    def parse(cls, options: Mapping[str, Any] | None) -> CompileOptions:
        """Options from a mapping.

        Raises:
            ArgumentError: a name that is no option, or a value it cannot have.
        """
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(options or {}) - set(known))
        if unknown:
            raise ArgumentError(f"no such option: {', '.join(unknown)}; backend 'stof' takes {', '.join(known)}")
        return cls(**dict(options or {}))

    def search(self, device: torch.device) -> Search | None:
        """What the effort asks for."""
        if self.effort == "none":
            return None
        seconds, per_segment = EFFORTS[self.effort]
        seconds = self.budget_s or seconds
        return Search(
            SegmentTimer(),
            seconds,
            per_segment,
            self._shown(),
            store=self._store(device),
            compiler=compile_candidates,
        )

    def known(self, device: torch.device) -> ConfigLookup:
        """What was measured on this device before; with `deterministic` only what comes with the package."""
        folder = None if self.deterministic else self._folder()
        return known_choices(device_name(device), folder)

    def replay(self, device: torch.device) -> Replay | None:
        """The lock, if there is one."""
        if self.lock is None:
            return None
        return Replay(read_lock(Path(self.lock)), device_name(device), check, self._store(device))

    def _folder(self) -> Path | None:
        if isinstance(self.store, bool):
            return cache_folder() if self.store else None
        return Path(self.store)

    def _store(self, device: torch.device) -> Store | None:
        folder = self._folder()
        return None if folder is None else default_store(device, folder)

    def _shown(self) -> Callable[[Progress], object] | None:
        if callable(self.progress):
            return self.progress
        return (lambda step: print(step, file=sys.stderr)) if self.progress else None

    def tell(self, report: FusionReport) -> None:
        """Hand a report to whoever asked for it."""
        if callable(self.report):
            self.report(report)
        elif self.report:
            from rich.console import Console

            Console(stderr=True).print(report)


def stof_backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The backend: rewrites `gm`, then compiles it with Inductor.

    Args:
        options: see `CompileOptions`.
        mode: not used by this backend; anything but None or "default" is refused.

    Raises:
        ArgumentError: unknown options, or a mode.
        UnsupportedError: the graph is to be differentiated.
    """
    parsed = CompileOptions.parse(options)
    if mode not in (None, "default"):
        raise ArgumentError(f"backend 'stof' has no modes (got mode={mode!r}); use options={{'cuda_graphs': True}}")
    refuse_training(gm)
    devices = {value.device for value in example_inputs if isinstance(value, Tensor)}
    device = next((one for one in devices if one.type == "cuda"), torch.device("cpu"))
    if device.type == "cuda":
        init_triton_cache(device)
    search, known = parsed.search(device), parsed.known(device)
    copies = {name: copy_module(gm) for name in (RULED, PLAIN)} if search is not None else {}
    report = fuse(
        gm,
        search,
        twins=parsed.twins,
        fold=parsed.fold,
        experimental=parsed.experimental,
        known=known,
        replay=parsed.replay(device),
    )
    if search is None or not report.fused or may_mutate_inputs(copies[PLAIN].graph):
        if search is not None and report.fused:
            report.notes.append(
                "not compared as a whole: the graph may change what it is given, so it cannot run twice"
            )
        parsed.tell(report)
        return _inductor(gm, example_inputs, parsed, report.digest)

    # No templates: what they are compared with has these rewrites too.
    rewrite_patches(copies[PLAIN], FusionReport())
    rewrite_biases(copies[PLAIN], FusionReport())

    def by_rule() -> FusionReport:
        return fuse(copies[RULED], twins=parsed.twins, fold=parsed.fold, known=known)

    def version(name: str, digest: str) -> Callable[..., Any]:
        return _inductor(copies.get(name, gm), example_inputs, parsed, digest)

    return _fastest(report, by_rule, version, parsed, search.store, known)


def _fastest(
    searched: FusionReport,
    by_rule: Callable[[], FusionReport],
    version: Callable[[str, str], Callable[..., Any]],
    options: CompileOptions,
    store: Store | None,
    known: ConfigLookup,
) -> Callable[..., Any]:
    """The fastest version of a graph: what is known from an earlier process, or a race on the first call.

    Args:
        by_rule: chooses by rule.
        version: compiles one, given its name and its scheme's digest.
        known: what the rules went by.
    """
    rows = [(row.template, row.config) for row in searched.segments]
    key = segment_key((searched.digest, rows, options.cuda_graphs))
    keys = {SEARCHED: key, RULED: f"{key} by rule"}
    reports = {SEARCHED: searched}

    def settle(times: Mapping[str, float]) -> str:
        winner, report = pick_winner(reports, times)
        if winner == RULED and store is not None:
            # Else the rules, which go by what was measured, would choose what lost.
            lost = differing(searched, report)
            before = {key: tuned for key in lost if (tuned := known(key)) is not None}
            device = store.environment["device"]
            update_choices(choices_path(store.folder, device), device, before, without=lost)
        options.tell(report)
        return winner

    def compiled(name: str) -> Callable[..., Any]:
        return version(name, reports[name].digest if name in reports else "")

    races = store.load().races if store is not None else {}
    raced = {name: races[key] for name, key in keys.items() if key in races}
    if SEARCHED in raced:
        times = {name: us for name, (us, _) in raced.items()} | {PLAIN: raced[SEARCHED][1]}
        if min(times, key=times.__getitem__) == RULED:
            reports[RULED] = by_rule()
        return compiled(settle(times))
    ruled = by_rule()
    if ruled.fused and differing(searched, ruled):
        reports[RULED] = ruled

    def keep(times: Mapping[str, float]) -> str:
        if store is not None:
            store.update(Records(races={keys[name]: (times[name], times[PLAIN]) for name in reports}))
        return settle(times)

    timer = replayed_us if options.cuda_graphs == WHOLE else wall_us
    return ModelComparison({name: compiled(name) for name in (*reports, PLAIN)}, keep, timer)


def _inductor(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: CompileOptions, digest: str
) -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx

    patches: dict[str, Any] = {"post_grad_custom_post_pass": _inductor_cache_key(digest)} if digest else {}
    if options.cuda_graphs is True:
        patches["triton.cudagraphs"] = True
    if options.deterministic:
        patches["deterministic"] = True
    compiled: Callable[..., Any] = compile_fx(gm, list(example_inputs), config_patches=patches)
    return compiled


def optimize(
    model: nn.Module,
    *,
    mask: Mask | None = None,
    attention: bool = True,
    pack: bool = True,
    dynamic: bool | None = None,
    **options: Any,
) -> nn.Module:
    """Prepare a model's modules for fusion, in place, and compile it with backend "stof".

    Args:
        model: in evaluation mode.
        mask: a sparse mask for the self-attention layers of a Hugging Face model (`hf.sparsify`); None leaves them to
            the model's own mask.
        attention: let stof compute the attention of a Hugging Face model; other models choose theirs themselves.
        pack: pack the weights of query, key and value and of gate and up projection (`passes.weight_packing`).
        dynamic: as in `torch.compile`.
        options: of the backend, see `CompileOptions`.

    Returns:
        the compiled model. `unpack_weights(model)` undoes the packing; attention is set back by
        `model.set_attn_implementation`.

    Raises:
        UnsupportedError: the model is in training mode, or its attention cannot be served.
        ArgumentError: an unknown option, or a mask without `attention`.
        MaskError: something that is no mask. A refused model is as it was before.
    """
    parsed = CompileOptions.parse(options)
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"optimize takes a torch.nn.Module, got {type(model).__name__}")
    if model.training:
        raise UnsupportedError("stof.optimize compiles inference only; call model.eval() first", {})
    if mask is not None and not attention:
        raise ArgumentError("a mask needs stof's attention; leave attention=True")
    for name, value in (("attention", attention), ("pack", pack), ("dynamic", dynamic)):
        if not isinstance(value, bool) and (name != "dynamic" or value is not None):
            raise ArgumentError(
                f"{name} is True or False{', or None' if name == 'dynamic' else ''}, got {shown(value)}"
            )
    if attention and (mask is not None or _is_transformers(model)):
        from stof.integrations import transformers as hf

        if mask is not None:
            # A bad mask is refused before the model is changed.
            hf.check_can_serve(model)
            found = hf.layer_masks(model, mask)
        hf.enable(model)
        if mask is not None:
            hf.sparsify(model, dict(enumerate(found)))
    if pack:
        pack_weights(model)
    compiled: Any = torch.compile(model, backend=stof_backend, dynamic=dynamic, options=options)
    if parsed.cuda_graphs == WHOLE:
        compiled.forward = CudaGraphRunner(compiled.forward, model, folded_weights=parsed.fold)
    return cast(nn.Module, compiled)


def _is_transformers(model: nn.Module) -> bool:
    """Whether a module is, or holds, a model of Hugging Face transformers; it is not imported for that."""
    bases = (base for part in model.modules() for base in type(part).__mro__)
    return any(base.__name__ == "PreTrainedModel" and base.__module__.startswith("transformers.") for base in bases)


def refuse_training(gm: fx.GraphModule) -> None:
    """Raise UnsupportedError if gradients will be asked of the graph: the templates compute forward passes only."""
    if not torch.is_grad_enabled():
        return
    for node in gm.graph.nodes:
        value = node.meta.get("example_value")
        if isinstance(value, Tensor) and value.requires_grad:
            raise UnsupportedError(
                "backend 'stof' compiles inference only, and this call records gradients; call the model under "
                "torch.inference_mode() or torch.no_grad(), or train with backend='inductor'",
                {},
            )


def _inductor_cache_key(digest: str) -> Any:
    """A pass for Inductor that changes nothing and whose identity is this package's source and the scheme."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class CacheMark(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            """Nothing: the graph was rewritten before it came to Inductor."""

        def uuid(self) -> str:
            return f"stof-{__version__}-{source_digest()}-{digest}"

    return CacheMark()
