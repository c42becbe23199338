"""The fingerprint of a model: one sha256 over the content of its config, tokenizer and weight files.

It is the sha256 of the lines ``name NUL size NUL sha256 LF``, sorted by name. File hashes are kept in
``models/.hashes.json`` under (device, inode, size, modification time), so that a large model is read once per
machine, and a file that is renamed is not read again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from spillover.models.folders import models_home, write_atomic
from spillover.models.index import INDEX, weight_files

DOCUMENTS = (
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    INDEX,
)
"""The files beside the weights that decide what a model computes and how text becomes tokens."""

WEIGHTS = "model*.safetensors"
"""The weight files of a repository; others, such as ``consolidated.safetensors``, repeat them."""

_CHUNK = 1 << 22


def counts(name: str) -> bool:
    """Whether a file of this name is one to fetch. Names come from servers: none may leave its folder."""
    return name in DOCUMENTS or ("/" not in name and "\\" not in name and fnmatchcase(name, WEIGHTS))


def model_files(folder: Path) -> list[Path]:
    """The files of a model folder that count, sorted by name; `ModelError` when a weight file is missing."""
    documents = [folder / name for name in DOCUMENTS if (folder / name).is_file()]
    return sorted([*documents, *weight_files(folder)], key=lambda path: path.name)


def fingerprint(folder: Path, report: Callable[[str, int, int], None] | None = None) -> str:
    """The fingerprint of the model in `folder`; `report` hears of files that must be read."""
    files = model_files(folder)
    hashes = hash_files(files, report)
    lines = (f"{path.name}\0{path.stat().st_size}\0{hashes[path]}\n" for path in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def hash_files(
    files: Iterable[Path], report: Callable[[str, int, int], None] | None = None
) -> dict[Path, str]:
    """The sha256 of each file, read only when its size, time or inode is new."""
    cache = _load()
    keys = {path: _key(path) for path in files}
    unread = [path for path, key in keys.items() if key not in cache]
    total, done = sum(path.stat().st_size for path in unread), 0
    for path in unread:
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
                done += len(chunk)
                if report is not None:
                    report("hash weights", done, total)
        if _key(path) == keys[path]:  # unchanged while it was read
            cache[keys[path]] = digest.hexdigest()
        keys[path] = _key(path)
    if unread:
        write_atomic(_cache(), json.dumps(cache, indent=0, sort_keys=True).encode())
    return {path: cache[key] for path, key in keys.items()}


def remember(hashes: Mapping[Path, str]) -> None:
    """Keep hashes that were taken while the files were written, so that they are not read for it again."""
    kept = _load() | {_key(path): sha256 for path, sha256 in hashes.items()}
    write_atomic(_cache(), json.dumps(kept, indent=0, sort_keys=True).encode())


def _key(path: Path) -> str:
    facts = path.stat()
    return f"{facts.st_dev}:{facts.st_ino}:{facts.st_size}:{facts.st_mtime_ns}"


def _cache() -> Path:
    return models_home() / ".hashes.json"


def _load() -> dict[str, str]:
    """The kept hashes; whatever is unreadable or malformed in the file is forgotten."""
    try:
        kept = json.loads(_cache().read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(kept, dict):
        return {}
    return {key: value for key, value in kept.items() if isinstance(value, str) and len(value) == 64}
