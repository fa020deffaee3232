"""Files of measurements: rows, and the GPU that they were measured on."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from stof.errors import ArgumentError
from stof.runtime.files import read_json, write_atomically
from stof.selection.device_model import DeviceModel, load_model
from stof.tuning.timing import time_calls

_READ_BYTES = 2**30


def measured_device() -> DeviceModel:
    """The current GPU: its properties, its memory bandwidth by a timed read, and the other constants in use."""
    properties = torch.cuda.get_device_properties()
    source = torch.zeros(_READ_BYTES // 8, dtype=torch.int64, device="cuda")
    us = time_calls({"read": source.sum}, source.device)["read"].gpu_us
    assert us is not None
    return _model(
        properties.name, properties.multi_processor_count, properties.shared_memory_per_multiprocessor,
        _READ_BYTES / us,
    )  # fmt: skip


def _model(name: str, multiprocessors: int, shared_bytes: int, bytes_per_us: float) -> DeviceModel:
    return replace(
        load_model(name), device=name, multiprocessors=multiprocessors, shared_bytes=shared_bytes,
        bytes_per_us=bytes_per_us, stands_in_for="",
    )  # fmt: skip


def write(file: Path, model: DeviceModel, rows: Iterable[Any]) -> None:
    """Write rows, which are dataclasses, and the properties of the model's device."""
    device = {
        "name": model.device,
        "multiprocessors": model.multiprocessors,
        "shared_bytes": model.shared_bytes,
        "bytes_per_us": model.bytes_per_us,
    }
    write_atomically(file, json.dumps({"device": device, "rows": [asdict(row) for row in rows]}))


def read(files: Iterable[Path], model: DeviceModel | None = None) -> tuple[DeviceModel, list[dict[str, Any]]]:
    """Read files of one device.

    Args:
        files: what `write` wrote.
        model: of the device that they have to be from; default that of the first file.

    Returns:
        `(model, rows)`: the device's constants so far, or the default device's where it was never tuned, with the
        properties in the file; the rows of all files as mappings.

    Raises:
        ArgumentError: a file holds something else, or is of another device.
        OSError: a file cannot be read.
    """
    rows: list[dict[str, Any]] = []
    for file in files:
        try:
            values = read_json(file)
            of, measured = _model(**values["device"]), list(values["rows"])
        except (ValueError, TypeError, KeyError) as error:
            raise ArgumentError(f"{file} holds no measurements of stof tune --device: {error!r}") from None
        if model is not None and of.device != model.device:
            raise ArgumentError(f"{file} was measured on {of.device}, not on {model.device}: give files of one device")
        model = model or of
        rows += measured
    if model is None:
        raise ArgumentError("no file of measurements was given")
    return model, rows
