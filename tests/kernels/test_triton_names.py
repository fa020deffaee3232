"""Names that Triton's releases give to the same functions of Gluon."""

from __future__ import annotations

import importlib.util
import runpy

import pytest

gl = pytest.importorskip("triton.experimental.gluon.language")
COPIES = ("async_load", "async_store"), ("async_copy_global_to_shared", "async_copy_shared_to_global")


@pytest.mark.parametrize("reinterpret", ["_reinterpret", "reinterpret"])
@pytest.mark.parametrize("copies", COPIES)
def test_intrinsics(monkeypatch: pytest.MonkeyPatch, copies: tuple[str, str], reinterpret: str) -> None:
    from triton.experimental.gluon.language.nvidia.hopper import tma

    module = importlib.util.find_spec("stof.kernels.hopper.intrinsics")
    assert module is not None
    assert module.origin is not None
    present = [next(getattr(tma, name) for name in names if hasattr(tma, name)) for names in zip(*COPIES, strict=True)]
    descriptor = gl.shared_memory_descriptor
    view = getattr(descriptor, "reinterpret", None) or descriptor._reinterpret
    for owner, names in ((tma, [*COPIES[0], *COPIES[1]]), (descriptor, ["_reinterpret", "reinterpret"])):
        for name in names:
            monkeypatch.delattr(owner, name, raising=False)
    for name, function in zip(copies, present, strict=True):
        monkeypatch.setattr(tma, name, function, raising=False)
    monkeypatch.setattr(descriptor, reinterpret, view, raising=False)
    loaded = runpy.run_path(module.origin)
    assert [loaded["async_load"], loaded["async_store"], loaded["reinterpret"]] == [*present, view]
