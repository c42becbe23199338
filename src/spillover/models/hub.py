"""Models from the Hugging Face hub: fetched once, resumed after an interruption, verified against pins.

A pin is the commit and the size and sha256 of every file. Some tags carry theirs (`spillover.models.tags`);
every other repository is pinned on first use, in ``models/pins``, from what the hub says (its sha256 of large
files, the git hash of small ones) and what arrived. From then on the same name means the same bytes on this
machine: a later download asks for the pinned commit, and a file that differs is refused.

A file grows as ``NAME.part`` beside its place and is renamed once its hash is right; a later run asks the
server for the rest of a ``.part``. ``HF_ENDPOINT`` and ``HF_TOKEN`` are honoured.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import msgspec

from spillover.errors import ModelError
from spillover.models.fingerprint import counts, hash_files
from spillover.models.folders import check_disk, models_home, publish
from spillover.models.pins import File, Pin, read_pin, verify, write_pin
from spillover.models.tags import Source

Report = Callable[[str, int, int], None]

_IDLE_TRIES = 3
_PAUSE = 1.0  # seconds


def download(source: Source, report: Report | None = None) -> Path:
    """The folder of `source` on this machine, fetched when it is missing and verified in any case.

    Raises `ModelError` in one line: no such repository or revision, no access, no network, no room, wrong
    content.
    """
    name = _name(source)
    folder = models_home() / name

    def build(partial: Path) -> None:
        with _translated(source):
            pin = read_pin(name) or _ask(source)
            write_pin(name, pin)  # before the first file, so that one attempt and its continuation agree
            _check_disk(pin, partial)
            files = _fetch_all(pin, partial, report)
        write_pin(name, msgspec.structs.replace(pin, files=files))

    publish(folder, build)
    verify(folder, name)
    return folder


def _check_disk(pin: Pin, partial: Path) -> None:
    there = sum(path.stat().st_size for path in partial.iterdir() if path.is_file())
    check_disk(max(sum(file.size for file in pin.files.values()) - there, 0), partial)


def _ask(source: Source) -> Pin:
    """The commit and the files of a repository, as the hub describes them; facts of a tag win."""
    from huggingface_hub import HfApi

    api = HfApi(endpoint=_endpoint(), token=_token())
    info = api.model_info(source.repo, revision=source.revision, files_metadata=True)
    files = {}
    for entry in info.siblings or []:
        if counts(entry.rfilename):
            sha256 = entry.lfs.sha256 if entry.lfs else None
            files[entry.rfilename] = File(entry.size or 0, sha256, None if entry.lfs else entry.blob_id)
    files |= {name: File(size, sha256) for name, (size, sha256) in source.files.items()}
    if not any(fnmatch(name, "*.safetensors") for name in files):
        raise ModelError(
            f"{source.repo} has no safetensors weights", hint="use a repository that offers model.safetensors"
        )
    return Pin(source.repo, source.revision or "main", str(info.sha), files)


def _fetch_all(pin: Pin, partial: Path, report: Report | None) -> dict[str, File]:
    done, total, files = 0, sum(file.size for file in pin.files.values()), {}

    def grown(size: int) -> None:
        if report is not None:
            report(f"download {pin.repo}", done + size, total)

    for name in sorted(pin.files):
        files[name] = _fetch(pin, name, partial, grown)
        done += files[name].size
        grown(0)
    return files


def _fetch(pin: Pin, name: str, partial: Path, grown: Callable[[int], None]) -> File:
    """Bring one file to ``partial/name`` and return what it is. A file that is there was verified before."""
    final, part = partial / name, partial / f"{name}.part"
    if not final.exists():
        _receive(pin, name, part, grown)
        _check(pin, name, part)
        part.rename(final)
    return File(final.stat().st_size, hash_files([final])[final])


def _receive(pin: Pin, name: str, part: Path, grown: Callable[[int], None]) -> None:
    """Bring ``part`` to its full size, over as many connections as it takes; three that bring nothing end it.

    The hub client's own download begins every file anew, and its progress bars do not fit a headless run.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    size, idle = pin.files[name].size, 0
    url = hf_hub_url(pin.repo, name, revision=pin.commit, endpoint=_endpoint())
    while True:
        before = part.stat().st_size if part.exists() else 0
        try:
            # Large files live on other hosts under signed addresses: the token stays with the hub.
            address = get_hf_file_metadata(url, token=_token(), endpoint=_endpoint()).location
            token = _token() if urlsplit(address).netloc == urlsplit(url).netloc else False
            _append(address, token, part, size, grown)
            return
        except HfHubHTTPError:
            raise  # an answer, if not the wished one
        except _transport_error():
            idle = 0 if part.exists() and part.stat().st_size > before else idle + 1
            if idle == _IDLE_TRIES:
                raise
            time.sleep(_PAUSE)


def _append(address: str, token: str | bool, part: Path, size: int, grown: Callable[[int], None]) -> None:
    """Ask for the bytes that `part` lacks and add what comes, each piece as it comes, up to `size`."""
    from huggingface_hub import get_session

    headers = {"Accept-Encoding": "identity"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    with part.open("ab") as file:
        if file.tell() >= size:
            return
        if file.tell():
            headers["Range"] = f"bytes={file.tell()}-"
        with get_session().stream(
            "GET", address, headers=headers, follow_redirects=True, timeout=60
        ) as answer:
            answer.raise_for_status()
            if answer.status_code != 206:  # the server ignored the range and sends the whole
                file.truncate(0)
            for piece in answer.iter_bytes():
                file.write(piece)
                grown(file.tell())
                if file.tell() > size:
                    return


def _check(pin: Pin, name: str, part: Path) -> None:
    """Compare an arrived file with its pin; a wrong one is deleted, so that the next run starts it anew."""
    wanted, size = pin.files[name], part.stat().st_size
    found = hash_files([part])[part]
    wrong = size != wanted.size or (wanted.sha256 is not None and found != wanted.sha256)
    if not wrong and wanted.sha256 is None and wanted.blob is not None:
        wrong = _git_hash(part) != wanted.blob
    if wrong:
        part.unlink()
        raise ModelError(
            f"{name} of {pin.repo}@{pin.commit[:12]} arrived with the wrong content: "
            f"{size:,} bytes, sha256 {found[:12]}",
            hint="run the command again; if it stays so, check HF_ENDPOINT and proxies",
        )


def _git_hash(path: Path) -> str:
    """Git's object id of a file, which the hub gives for files outside large file storage."""
    data = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _name(source: Source) -> str:
    revision = f"@{source.revision}" if source.revision else ""
    return f"{source.repo}{revision}".replace("/", "--")


def _endpoint() -> str:
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def _token() -> str | bool:
    from huggingface_hub import get_token

    return get_token() or False


@contextmanager
def _translated(source: Source) -> Iterator[None]:
    """Turn what the hub client raises into one line."""
    from huggingface_hub.errors import HFValidationError

    try:
        yield
    except (_transport_error(), HFValidationError, ConnectionError) as error:
        message, hint = _explain(error, source.repo, source.revision)
        raise ModelError(message, hint=hint) from None


def _transport_error() -> type[Exception]:
    """The base of what the HTTP client under the hub client raises: no connection, cut, timeout.

    It is asked for this way because the hub client has changed that library between its versions.
    """
    from huggingface_hub.errors import HfHubHTTPError

    return cast("type[Exception]", HfHubHTTPError.__bases__[0])


def _explain(error: Exception, repo: str, revision: str | None) -> tuple[str, str]:
    """What happened, and what to do next; the most precise error of the hub client comes first."""
    from huggingface_hub import errors

    where = _endpoint()
    if isinstance(error, errors.GatedRepoError):
        message = f"{repo} is gated: its owner must grant you access first"
        return message, f"accept the terms at {where}/{repo}, then set HF_TOKEN"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repo} has no revision {revision}", f"see {where}/{repo}/commits/main"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"{where} has no repository {repo}, or it is private",
            "check the name; set HF_TOKEN if it is private",
        )
    if isinstance(error, errors.HFValidationError):
        return f"{repo} is no repository id: {_line(error)}", "write org/name, org/name@revision or a folder"
    if isinstance(error, errors.HfHubHTTPError):
        status = getattr(error.response, "status_code", "nothing")
        hint = (
            "set HF_TOKEN to one that may read it" if status in (401, 403) else "run the command again later"
        )
        return f"{where} answered {status} for {repo}", hint
    message = f"{repo} could not be fetched from {where}: {_line(error)}"
    return message, "run the command again: it continues where it stopped"


def _line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]
