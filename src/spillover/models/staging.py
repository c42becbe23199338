"""Models from shared storage (``--weights URI``), copied to this machine once and verified from then on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from spillover.errors import ModelError
from spillover.models.fingerprint import counts, hash_files, remember
from spillover.models.folders import check_disk, models_home, publish
from spillover.models.pins import File, Pin, verify, write_pin
from spillover.store import Store, open_store

Report = Callable[[str, int, int], None]


def stage(uri: str, report: Report | None = None) -> Path:
    """The local copy of the model folder at `uri`, made when there is none.

    `uri` is whatever `spillover.store.open_store` understands. A staging that was killed continues with the
    files that it lacks. Raises `ModelError` when there is no model at `uri`, no room, or a file that did not
    arrive whole.
    """
    place = uri if "://" in uri else str(Path(uri).expanduser().absolute())
    name = _name(place)
    folder = models_home() / name

    def build(partial: Path) -> None:
        store = open_store(place)
        sizes = {entry.key: entry.size for entry in store.list() if counts(entry.key)}
        if "config.json" not in sizes or not any(key.endswith(".safetensors") for key in sizes):
            raise ModelError(
                f"there is no model at {uri}", hint="it needs config.json, tokenizer.json, model.safetensors"
            )
        for stray in partial.iterdir():
            if sizes.get(stray.name) != stray.stat().st_size:
                stray.unlink()
        check_disk(sum(size for key, size in sizes.items() if not (partial / key).exists()), partial)
        write_pin(name, Pin(place, "", "", _copy(store, sizes, partial, report)))

    publish(folder, build)
    verify(folder, name)
    return folder


def _copy(store: Store, sizes: dict[str, int], partial: Path, report: Report | None) -> dict[str, File]:
    files, done, total = {}, 0, sum(sizes.values())
    for key, size in sizes.items():
        final = partial / key
        if not final.exists():  # one that is there arrived whole before the staging was killed
            _bring(store, key, size, final)
        files[key] = File(size, hash_files([final])[final])
        done += size
        if report is not None:
            report("stage weights", done, total)
    return files


def _bring(store: Store, key: str, size: int, final: Path) -> None:
    part = final.with_name(f"{key}.part")
    digest = store.fetch(key, part)
    if digest.size != size:
        raise ModelError(
            f"{key} of {store.uri} arrived with {digest.size:,} of {size:,} bytes",
            hint="run the command again",
        )
    remember({part: digest.sha256})
    part.rename(final)


def _name(place: str) -> str:
    """A readable folder name that no other URI has."""
    last = place.rstrip("/").rsplit("/", 1)[-1]
    return f"staged--{last}-{hashlib.sha256(place.encode()).hexdigest()[:12]}"
