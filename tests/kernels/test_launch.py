"""Launching: the JIT once, the compiled kernel from then on, and one error for kernels that cannot run on a device."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import triton
from triton import knobs
from triton.backends.nvidia import driver
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from stof.errors import KernelError
from stof.runtime import launch
from stof.runtime.launch import Launch, TensorMap
from stof.runtime.memory import record_streams
from stof.runtime.private import launcher_of, without_encoding

STREAM = 77


class Kernel:
    """Stands in for a `triton.jit` function: counts compilations and keeps what it was launched with."""

    __name__ = "some_kernel"

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.through_jit: list[tuple[Any, ...]] = []
        self.direct: list[tuple[Any, ...]] = []
        self.options: dict[str, Any] = {}

    def __getitem__(self, grid: tuple[int]) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            if self.error is not None:
                raise self.error
            self.through_jit.append((grid, *args))
            self.options = options
            source = SimpleNamespace(signature={f"p{place}": kind_of(value) for place, value in enumerate(args)})
            return Compiled(source, self)

        return call


class Compiled:
    """Stands in for `triton.compiler.CompiledKernel`."""

    function, packed_metadata = "function", "meta"

    def __init__(self, source: Any, kernel: Kernel) -> None:
        self.src, self.run, self.metadata = source, Run(source, kernel), kernel


class Run:
    """Stands in for Triton's launcher, which is made for the parameters that it is given."""

    def __init__(self, source: Any, kernel: Kernel) -> None:
        self.signature, self.kernel = source.signature, kernel

    def __call__(self, *args: Any) -> None:
        assert "constexpr" not in self.signature.values()
        assert len(args) == 9 + len(self.signature)
        self.kernel.direct.append(args)


def kind_of(value: Any) -> Any:
    """As Triton specialises arguments."""
    if isinstance(value, tuple):
        return type(value)(*map(kind_of, value)) if hasattr(value, "_fields") else tuple(map(kind_of, value))
    if value is None or isinstance(value, (bool, str)) or (isinstance(value, int) and value == 1):
        return "constexpr"
    return "*fp32" if isinstance(value, torch.Tensor) else "fp32" if isinstance(value, float) else "i32"


@pytest.fixture(autouse=True)
def _a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As much of a GPU as launching asks for."""
    monkeypatch.setattr(launch.triton, "JITFunction", Kernel)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STREAM + index, raising=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    stream = SimpleNamespace(cuda_stream=STREAM, wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device=None: None)


def made(kernel: Kernel, tensors: tuple[torch.Tensor, ...] = (), index: int = 0, **options: int) -> Launch:
    settings = {"num_warps": 4, "num_stages": 3, **options}
    return Launch(kernel, 5, tensors, (1, 2.5), (True,), device=torch.device("cuda", index), **settings)


def test_compiled_once_then_launched_directly() -> None:
    kernel, fixed, first, second = Kernel(), torch.zeros(8), torch.zeros(8), torch.zeros(8)
    ready = made(kernel, (fixed,))
    ready(first)
    assert kernel.through_jit == [((5,), first, fixed, 1, 2.5, True)]
    ready(second)
    ready(second)
    assert len(kernel.through_jit) == 1
    arguments = (second.data_ptr(), fixed.data_ptr(), 2.5)  # neither constants nor 1, which is one
    assert kernel.direct == [(5, 1, 1, STREAM, "function", "meta", None, None, None, *arguments)] * 2


def test_one_launcher_for_one_compiled_kernel() -> None:
    """Launches that differ in numbers may run the same machine code."""
    kernel = Kernel()
    one, other = (Compiled(SimpleNamespace(signature={"p0": "*fp32"}), kernel) for _ in range(2))
    assert launcher_of(one) is launcher_of(one)
    assert launcher_of(one) is not launcher_of(other)


class Sizes(NamedTuple):
    rows: tuple[int, ...]
    one: int
    scale: float


def test_named_tuples_are_passed_field_by_field() -> None:
    kernel, first, second = Kernel(), torch.zeros(8), torch.zeros(8)
    lists = Lists(first, second)
    device = torch.device("cuda", 0)
    ready = Launch(kernel, 5, (lists, first), (Sizes((3, 1, 4), 1, 0.5), 7), (True,), device=device)
    for _ in range(2):
        ready(second)
    assert kernel.through_jit == [((5,), second, lists, first, Sizes((3, 1, 4), 1, 0.5), 7, True)]
    a, b = first.data_ptr(), second.data_ptr()
    assert [launched[9:] for launched in kernel.direct] == [(b, a, b, a, 3, 4, 0.5, 7)]


class Lists(NamedTuple):
    columns: torch.Tensor
    bitmaps: torch.Tensor


@pytest.mark.parametrize(("registers", "wanted"), [(0, {}), (168, {"maxnreg": 168})])
def test_compile_options(registers: int, wanted: dict[str, int]) -> None:
    kernel = Kernel()
    made(kernel, max_registers=registers)(torch.zeros(1))
    assert kernel.options == {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": True, **wanted}


def test_tensors_that_are_not_aligned_go_through_the_jit() -> None:
    """A kernel compiled for aligned pointers loads 16 bytes at once; the JIT compiles another one for the rest."""
    kernel, aligned, odd = Kernel(), torch.zeros(8), torch.zeros(8)[1:]
    ready = made(kernel)
    for tensor in (odd, aligned, odd, aligned):
        ready(tensor)
    assert [args[1].data_ptr() % 16 > 0 for args in kernel.through_jit] == [True, False, True]
    assert len(kernel.direct) == 1
    ready = made(kernel, (odd,))
    ready(aligned)
    ready(aligned)
    assert len(kernel.direct) == 1


def test_another_current_device_goes_through_the_jit() -> None:
    kernel, tensor = Kernel(), torch.zeros(8)
    ready = made(kernel, index=1)
    ready(tensor)
    ready(tensor)
    assert len(kernel.through_jit) == 2
    assert not kernel.direct


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_profilers_see_every_launch(hook: str) -> None:
    kernel, tensor, chain = Kernel(), torch.zeros(8), getattr(knobs.runtime, hook)
    ready = made(kernel)
    ready(tensor)
    chain.add(print)
    try:
        ready(tensor)
    finally:
        chain.remove(print)
    assert len(kernel.through_jit) == 2
    ready(tensor)
    assert len(kernel.through_jit) == 2


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OutOfResources(300_000, 232_448, "shared memory"), "OutOfResources: out of resource: shared memory"),
        (PTXASError("line 1\nptxas fatal: no"), "PTXASError: .*ptxas fatal: no"),
        (CompilationError("x", None, "told\nwhy"), "CompilationError"),
    ],
    ids=["resources", "ptxas", "compilation"],
)
def test_failures_are_kernel_errors(error: Exception, text: str) -> None:
    ready = made(Kernel(error))
    for _ in range(2):
        with pytest.raises(KernelError, match=f"some_kernel does not run on this device: {text}") as caught:
            ready(torch.zeros(8))
        assert caught.value.__cause__ is error
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), RuntimeError("illegal address")])
def test_other_errors_stay_what_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        made(Kernel(error))(torch.zeros(8))
    assert caught.value is error


def triton_launcher(received: list[list[Any]]) -> Any:
    """Triton's own launcher of a kernel with the parameters (map, map, tensor), but for what starts it."""
    launcher = driver.CudaLauncher.__new__(driver.CudaLauncher)
    signature = {0: "tensordesc<fp16[64, 64]>", 1: "tensordesc<fp16[64, 64]>", 2: "*fp32"}

    def start(*args: Any) -> None:
        kernel_args = list(args[-1]) if isinstance(args[-1], (list, tuple)) else list(args[-7:])
        received.append(kernel_args)

    launcher.launch = driver.wrap_handle_tensordesc(start, signature, [{"slot": 0}, {"slot": 1}])
    for size in ("global_scratch_size", "profile_scratch_size"):
        setattr(launcher, size, 0)
    for other in ("global_scratch_align", "profile_scratch_align", "launch_cooperative_grid", "launch_pdl"):
        setattr(launcher, other, 1)
    launcher.num_ctas, launcher.arg_annotations, launcher.kernel_signature = 1, (), ()
    launcher.gsan_enabled = False
    return launcher


class Rows(NamedTuple):
    columns: int

    def at(self, tensor: torch.Tensor) -> TensorMap:
        return TensorMap(tensor, [8, self.columns], [8, 1], [4, 4], None)


def test_tensor_maps_are_encoded_once_for_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernel gets is what Triton's launcher would have made of the same maps."""
    encoded: list[tuple[int, int]] = []

    def encode(tensor_map: TensorMap, metadata: dict[str, int], *unread: object) -> list[Any]:
        encoded.append((metadata["slot"], tensor_map.base.data_ptr()))
        return [encoded[-1], *tensor_map.shape]

    monkeypatch.setattr(driver, "make_tensordesc_arg", encode)
    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace())  # Triton 3.8 asks for one in every launch
    a, b, c = (torch.zeros(8, 8, dtype=torch.float16) for _ in range(3))
    windows = (Rows(1), None, Rows(2))
    received: list[list[Any]] = []
    run = triton_launcher(received)
    direct, metadata = without_encoding(run)
    assert metadata is not None
    keeps = launch._EncodedMaps(windows, metadata)
    assert direct is not run
    head = (5, 1, 1, STREAM, "function", "meta", None, None, None)
    calls = [(a, a, b), (a, b, b), (b, c, a), (c, a, c), (a, a, b)]
    for bases in calls:
        direct(*head, *keeps(bases), "pointer")
    assert len(encoded) == 6  # three addresses in either place
    with_memory, received[:] = list(received), []
    plain = Launch(Kernel(), 5, (), (), (), num_warps=4, num_stages=1, windows=windows, device=torch.device("cpu"))
    for bases in calls:
        run(*head, *filter(None, plain.maps(bases)), "pointer")
    assert with_memory == received
    assert len(encoded) == 6 + 2 * len(calls)


def test_few_encoded_maps_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = []

    def encode(tensor_map: TensorMap, metadata: object, *unread: object) -> list[Any]:
        encoded.append(tensor_map.base.data_ptr())
        return [encoded[-1]]

    monkeypatch.setattr(driver, "make_tensordesc_arg", encode)
    keeps = launch._EncodedMaps((Rows(1),), [{}])
    tensors = [torch.zeros(8) for _ in range(3 * launch._MOST_ENCODED)]
    for _ in range(2):
        for tensor in tensors:
            assert keeps((tensor,)) == [tensor.data_ptr()]
    assert len(encoded) == 2 * len(tensors)  # gone when asked for again


def test_a_launcher_built_otherwise_encodes_itself() -> None:
    for run in (SimpleNamespace(launch=lambda *args: None), SimpleNamespace(launch=print)):
        assert without_encoding(run) == (run, None)


def test_memory_outlasts_launches_on_every_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator is told once of each stream, but for those that are captured; and streams wait for the default."""
    recorded: list[tuple[int, ...]] = []
    waits: list[tuple[int, str]] = []
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device=None: "default")
    kernel, fixed, tensor = Kernel(), torch.zeros(8), torch.zeros(8)
    ready = made(kernel, (fixed,))

    def counted(tensors: tuple[torch.Tensor, ...], device: torch.device, seen: set[int]) -> None:
        known = len(seen)
        record_streams(tensors, device, seen)
        recorded.extend([tuple(map(id, tensors))] * (len(seen) - known))

    monkeypatch.setattr(launch, "record_streams", counted)

    def launched_on(stream: int, capturing: bool = False) -> int:
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: stream, raising=False)
        current = SimpleNamespace(cuda_stream=stream, wait_stream=lambda other: waits.append((stream, other)))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
        before = len(recorded)
        ready(tensor)
        return len(recorded) - before

    assert [launched_on(1), launched_on(1), launched_on(2, True), launched_on(2), launched_on(2), launched_on(1)] == [
        1, 0, 0, 1, 0, 0,
    ]  # fmt: skip
    assert launched_on(0) == 1
    assert waits == [(1, "default"), (2, "default")]
    assert recorded == [(id(fixed),)] * 3
    assert len(kernel.through_jit) == 1
