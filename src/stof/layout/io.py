"""Layouts on disk: one safetensors file, refused unless every invariant holds."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from stof.errors import PlanFileError, StofError
from stof.layout.config import LayoutConfig
from stof.layout.layout import Layout
from stof.runtime.files import write_atomically

FORMAT = "stof-layout"
VERSION = 2
# Version 1 also held these, which nothing reads.
_DROPPED = {1: ("cost", "order"), 2: ()}


def save_layout(layout: Layout, path: str | os.PathLike[str], extra: Mapping[str, str] | None = None) -> None:
    """Write `layout` to `path` atomically; `extra` strings travel in the header."""
    from safetensors.torch import save

    config = layout.config
    header: dict[str, object] = {
        "format": FORMAT,
        "version": VERSION,
        "q_len": layout.q_len,
        "kv_len": layout.kv_len,
        "block_m": config.block_m,
        "block_n": config.block_n,
        "slab": config.slab,
        "compact_columns": config.compact_columns,
        "extra": dict(extra or {}),
    }
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in layout.tensors().items()}
    header["digest"] = _digest(header, tensors)
    write_atomically(Path(path), save(tensors, metadata={FORMAT: json.dumps(header)}))


def _digest(header: Mapping[str, object], tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over everything in the file: a flipped bit of a bitmap is still a valid layout, of another mask."""
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def load_layout(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> tuple[Layout, dict[str, str]]:
    """Read what `save_layout` wrote: the layout on `device`, and the extra strings.

    Raises:
        FileNotFoundError: no such file.
        OSError: the file cannot be read, for example for lack of permission.
        PlanFileError: not a layout file, another version, truncated, or inconsistent in any way.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    source = Path(path)
    if not source.is_file():
        raise FileNotFoundError(f"no plan file at {source}")
    raw = source.read_bytes()  # once: another process may replace the file meanwhile
    advice = "make it again with plan.save(path)"
    try:
        tensors = load(raw)
        # The format begins with the length of its JSON header. `load` has checked both and leaves out the metadata.
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(json.loads(raw[8 : 8 + length])["__metadata__"][FORMAT])
        if header["version"] not in _DROPPED:
            raise PlanFileError(f"{source} has format version {header['version']}, this is version {VERSION}; {advice}")
        if header.pop("digest") != _digest(header, tensors):
            raise PlanFileError(f"{source} is corrupt: its contents do not match their digest; {advice}")
        for name in _DROPPED[header["version"]]:
            del tensors[name]
        compacted = header.get("compact_columns", header.get("aside", False))  # files of version 0.1 say aside
        config = LayoutConfig(header["block_m"], header["block_n"], header["slab"], compacted)
        layout = Layout(q_len=int(header["q_len"]), kv_len=int(header["kv_len"]), config=config, **tensors)
        layout.validate()
        extra = {str(k): str(v) for k, v in header["extra"].items()}
    except PlanFileError:
        raise
    except StofError as error:
        raise PlanFileError(f"{source} is corrupt: {error}\n{advice}") from error
    except (
        SafetensorError,
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        OverflowError,
        RuntimeError,  # JSON nested too deeply, or dtypes that do not fit their shapes
    ) as error:
        raise PlanFileError(f"{source} is not a plan file ({type(error).__name__}: {error}); {advice}") from error
    return layout.to(device), extra
