"""Pins: the exact content that a fetched model has on this machine.

They live in ``models/pins`` and not in the model's folder, so that deleting the folder to save space does not
forget them: what is fetched again must be the same.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from spillover.errors import ModelError
from spillover.models.fingerprint import hash_files
from spillover.models.folders import models_home, write_atomic


class File(msgspec.Struct, frozen=True):
    """One file of a pin. `sha256` is None only until a small file of an unpinned repository has arrived."""

    size: int
    sha256: str | None = None
    blob: str | None = None


class Pin(msgspec.Struct, frozen=True):
    """The exact content that a repository id means on this machine."""

    repo: str
    revision: str
    commit: str
    files: dict[str, File]


def verify(folder: Path, name: str) -> None:
    """Compare a downloaded folder with its pin; unchanged files are not read again."""
    pin = read_pin(name)
    if pin is None:
        return
    missing = next((file for file in pin.files if not (folder / file).is_file()), None)
    if missing is not None:
        raise ModelError(f"{folder / missing} is missing", hint=f"rm -r {folder} to download it again")
    hashes = hash_files(folder / file for file in pin.files)
    for path, found in hashes.items():
        if found != pin.files[path.name].sha256:
            raise ModelError(
                f"{path} changed since it was downloaded", hint=f"rm -r {folder} to download it again"
            )


def _path(name: str) -> Path:
    return models_home() / "pins" / f"{name}.json"


def read_pin(name: str) -> Pin | None:
    """The pin of a folder under ``models``, or None before its first use."""
    path = _path(name)
    try:
        return msgspec.json.decode(path.read_bytes(), type=Pin)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise ModelError(f"{path} is damaged: {error}", hint=f"rm {path} to pin the model anew") from None


def write_pin(name: str, pin: Pin) -> None:
    """Record what a folder under ``models`` holds from now on."""
    write_atomic(_path(name), msgspec.json.format(msgspec.json.encode(pin), indent=2))
