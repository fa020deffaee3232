"""Put measured choices into the package: what `stof tune MODEL --store DIR` left in `DIR/choices-DEVICE.json`.

`python -m benchmarks.package_configs FILE... [--only TEXT] [--to DIR]`. Entries go into `src/stof/device_data`, in the
place of older ones for the same shapes; later files go before earlier ones. One line for each that is new or changed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from stof.errors import ArgumentError
from stof.fusion.records.choices import ChoiceTable, choices_path, read_choices, read_table
from stof.runtime.files import DEVICE_DATA


def measured(path: Path) -> ChoiceTable:
    """What was measured on a device.

    Raises:
        ArgumentError: the file is no file of choices, is of another version, or was changed.
    """
    try:
        return read_table(path)
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{path} holds no choices: {error}") from None


def package(paths: list[Path], only: str = "", folder: Path = DEVICE_DATA) -> list[str]:
    """Write the file of the device that all paths are of; a line for each entry that is new or decides otherwise.

    Raises:
        ArgumentError: files of several devices, or what `measured` refuses.
    """
    held = [measured(path) for path in paths]
    devices = {table.device for table in held}
    if len(devices) != 1:
        raise ArgumentError(
            f"choices are packaged for one device at a time, got {', '.join(sorted(devices)) or 'none'}"
        )
    device = devices.pop()
    before = read_choices(folder, device)
    new = {key: one for table in held for key, one in table.choices.items() if only in key}
    ChoiceTable(device, choices=before | new).write(choices_path(folder, device))
    lines = []
    for key, one in sorted(new.items()):
        old = before.get(key)
        if old is None or old.config != one.config or old.pays != one.pays:
            was = "" if old is None else f", was {old.config or 'default'} {old.template_us:.1f}"
            ours = f"{one.config or 'default'} {one.template_us:.1f} us"
            lines.append(f"{key}: {ours}, Inductor {one.inductor_us:.1f} us{was}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--only", default="", help="entries whose problem contains this")
    parser.add_argument("--to", type=Path, default=DEVICE_DATA)
    given = parser.parse_args()
    for line in package(given.files, given.only, given.to):
        print(line)


if __name__ == "__main__":
    main()
