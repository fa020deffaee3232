"""Constants of a device for the cost model, and the data files that hold them.

`stof tune --device` measures and fits them; they lie in `device_data/`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stof.runtime import files

# The device whose constants stand in for those of devices that were never tuned.
DEFAULT_DEVICE = "NVIDIA H200"


@dataclass(frozen=True)
class KernelTimes:
    """Microseconds of one kernel configuration when the machine is full.

    Attributes:
        item: fixed part of a work item.
        partial, full: one tile of that kind.
        merge: what an item costs more when it is a chunk of a split row block.
        collect: each chunk that the last one to finish reads back.
        solo: factor on all of them when few thread blocks run.
        start: before a thread block's first item, where blocks stay and take item after item.
    """

    item: float
    partial: float
    full: float
    merge: float
    collect: float
    solo: float
    start: float = 0.0

    def weights(self) -> Tensor:
        """float64 `[5]`: item, partial, full, merge, collect."""
        return torch.tensor(
            [self.item, self.partial, self.full, self.merge, self.collect], dtype=torch.float64, device="cpu"
        )


@dataclass(frozen=True)
class BackwardTimes:
    """Microseconds of one configuration of a backward kernel; they only rank its variants.

    Attributes:
        item: fixed part of a thread block.
        partial, full: one tile of that kind.
        chunk: what a chunk of a split row block costs more: its sums are written, and merged.
    """

    item: float
    partial: float
    full: float
    chunk: float

    def weights(self) -> Tensor:
        """float64 `[4]`, in the order above."""
        return torch.tensor([self.item, self.partial, self.full, self.chunk], dtype=torch.float64, device="cpu")


@dataclass(frozen=True)
class DeviceModel:
    """Constants of one device.

    Attributes:
        device: its name.
        multiprocessors: their number.
        shared_bytes: shared memory of a multiprocessor.
        launch: microseconds of an empty launch.
        bytes_per_us: memory bandwidth.
        row_wise: microseconds that a row and a kept key at head_dim 64 add to the row-wise kernel when the GPU is full.
        kernels: by the key of `cost_model.kernel_key`.
        backward: of the backward kernels, by the key of `BackwardTile.key`.
        stands_in_for: the device these constants are used for, where that was never tuned; else "".
    """

    device: str
    multiprocessors: int
    shared_bytes: int
    launch: float
    bytes_per_us: float
    row_wise: tuple[float, float]
    kernels: dict[str, KernelTimes]
    backward: dict[str, BackwardTimes] = field(default_factory=dict)
    stands_in_for: str = ""

    def notice(self) -> str:
        """A message to users that the constants are another device's; "" for a device that was tuned."""
        if not self.stands_in_for:
            return ""
        return (
            f"{self.stands_in_for} was never tuned, so kernels are chosen by times estimated with the constants of "
            f"{self.device}: results are right, but a faster kernel may be passed over. `stof tune --device --output "
            f"{_data_file(self.stands_in_for)}` measures this GPU, and later processes use what it writes"
        )


def load_model(device: str) -> DeviceModel:
    """Constants of a device by its name; for one that was never tuned those of the H200, which say so."""
    tuned = _load(_data_file(device))
    if tuned is not None:
        return tuned
    default = _load(_data_file(DEFAULT_DEVICE))
    assert default is not None
    return replace(default, stands_in_for=device)


def _data_file(device: str) -> Path:
    return files.DEVICE_DATA / f"cost-model-{files.slug(device)}.json"


@functools.cache
def _load(path: Path) -> DeviceModel | None:
    return model_from_dict(files.read_json(path)) if path.is_file() else None


def model_from_dict(values: dict[str, Any]) -> DeviceModel:
    """The model of a data file's content; constants of backward kernels that it lacks are the default device's."""
    backward = {key: BackwardTimes(**times) for key, times in values.get("backward", {}).items()}
    default = None if values["device"] == DEFAULT_DEVICE else _load(_data_file(DEFAULT_DEVICE))
    if default is not None:
        backward = default.backward | backward
    return DeviceModel(
        device=values["device"],
        multiprocessors=values["multiprocessors"],
        shared_bytes=values["shared_bytes"],
        launch=values["launch_us"],
        bytes_per_us=values["bytes_per_us"],
        row_wise=(values["row_wise"]["row_us"], values["row_wise"]["key_us"]),
        kernels={key: KernelTimes(**times) for key, times in values["kernels"].items()},
        backward=backward,
    )


def model_to_dict(model: DeviceModel) -> dict[str, Any]:
    """What a data file holds, rounded to what was measured."""

    def rounded(times: KernelTimes | BackwardTimes) -> dict[str, float]:
        return {name: float(f"{value:.4g}") for name, value in vars(times).items()}

    return {
        "device": model.device,
        "multiprocessors": model.multiprocessors,
        "shared_bytes": model.shared_bytes,
        "launch_us": model.launch,
        "bytes_per_us": model.bytes_per_us,
        "row_wise": {"row_us": model.row_wise[0], "key_us": model.row_wise[1]},
        "kernels": {key: rounded(model.kernels[key]) for key in sorted(model.kernels)},
        "backward": {key: rounded(model.backward[key]) for key in sorted(model.backward)},
    }
