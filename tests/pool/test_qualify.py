"""Two mounts are tried: a right one passes, and each promise that one breaks is found and named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pool.gluster import AS_SHIPPED, STRICT, UNCACHED, Volume
from spillover.errors import InputError, StoreRefused
from spillover.pool.partner import Failed, Process
from spillover.pool.promises import CHECKS, PLACES, SAME
from spillover.pool.qualify import Check, Qualification, qualify, write_declaration
from spillover.store.filesystem import Declaration, declared, require_local

HASTE = {"rounds": 20, "patience": 4.0}
FAULTS = {
    "LocksAlone": ("flock excludes", "both hold the lock"),
    "LockOutlivesHolder": ("flock ends with its holder", "held on"),
    "CountsUnlocked": ("flock orders writes", "two were inside"),
    "CreatesAgain": ("exclusive create", "2 winners"),
    "LinksOver": ("exclusive link", "winners"),
    "KeepsSizes": ("appends reach an open reader", "the reader sees 0"),
    "ZeroTail": ("appends reach a new reader", "zeros from"),
    "KeepsPages": ("overwrites are seen", "other bytes from"),
    "RenameCopies": ("rename is atomic", "bytes, of version"),
    "RenameUnlinksFirst": ("rename is atomic", "No such file"),
    "KeepsNames": ("rename is seen", "no file"),
    "KeepsFolders": ("names are seen", "listed"),
    "OpensRemoved": ("names are seen", "can still be opened"),
    "ZeroesRemoved": ("unlink under a reader", "not those of the removed file"),
    "SharesDatabase": ("SQLite changes hands", "both own the database"),
    "LosesCommits": ("SQLite changes hands", "10 rows were committed, 9 are there"),
    "NeverAnswers": ("names are seen", "no answer from"),
    "Ends": ("names are seen", "ended"),
    "DiskFails": ("appends reach an open reader", "Input/output error"),
}
"""A wrong partner, the check that finds it, and a part of what that says."""


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A folder, and the same folder by a bind mount."""
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    bound = subprocess.run(["mount", "--bind", one, two], capture_output=True, text=True)
    if bound.returncode != 0:
        pytest.skip(f"no bind mount here: {bound.stderr.strip()}")
    yield one, two
    subprocess.run(["umount", "--lazy", two], check=True)  # a wrong partner may have left a process in it


def wrong(fault: str) -> tuple[str, ...]:
    return sys.executable, "-P", str(Path(__file__).with_name("partners.py")), fault


def failed(qualification: Qualification) -> dict[str, str]:
    return {check.name: check.seen for check in qualification.checks if not check.passed}


def test_a_local_disk_passes_and_proves_one_client(mounts: tuple[Path, Path]) -> None:
    qualification = qualify(*mounts)
    assert failed(qualification) == {}
    assert qualification.passed
    assert qualification.profile == "local"
    assert [check.name for check in qualification.checks] == [name for name, _ in CHECKS]
    declaration = qualification.declaration()
    assert "one client" in declaration.locks
    assert "flock excluded in 200 rounds" in declaration.locks
    assert "SIGKILL" in declaration.locks
    assert "power loss not tried" in declaration.durability_description
    assert [*mounts[0].iterdir()] == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_promise_is_found(mounts: tuple[Path, Path], fault: str) -> None:
    qualification = qualify(*mounts, **HASTE, partner=wrong(fault))
    name, part = FAULTS[fault]
    assert part in failed(qualification)[name]
    assert not qualification.passed
    with pytest.raises(StoreRefused, match="cannot be declared") as refusal:
        qualification.declaration()
    assert "\n" not in str(refusal.value)
    assert [*mounts[0].iterdir()] == []


def test_every_check_is_shown_to_fail() -> None:
    assert {name for name, _ in FAULTS.values()} == {name for name, _ in CHECKS} - {SAME, PLACES}


def test_a_partner_that_takes_nothing_is_given_up(tmp_path: Path) -> None:
    process = Process(("sh", "-c", "exec sleep 60"), tmp_path, patience=0.2)
    start = time.monotonic()
    with pytest.raises(Failed, match="took no request within"):
        process.ask("append", "name", "-" * (1 << 20))
    with pytest.raises(Failed, match="no answer from"):
        process.answer()
    process.kill()
    assert time.monotonic() - start < 30


def test_two_places_are_found(tmp_path: Path) -> None:
    one, copy = tmp_path / "one", tmp_path / "copy"
    one.mkdir()
    copy.mkdir()
    qualification = qualify(one, copy, patience=0.5)
    assert list(failed(qualification)) == [SAME]
    assert len(qualification.checks) == 1
    assert not qualification.passed
    assert [*one.iterdir(), *copy.iterdir()] == []


def test_one_client_of_a_shared_filesystem_is_not_enough(
    mounts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spillover.pool.qualify.filesystem", lambda _: "fuse.glusterfs")
    for peer, seen in ((mounts[1], "two mounts of one device"), (mounts[0], "one mount")):
        qualification = qualify(mounts[0], peer, **HASTE)
        assert failed(qualification)[PLACES].startswith(f"{seen}: this proves one client only")
        assert len(qualification.checks) == 2
        with pytest.raises(StoreRefused, match="one client only"):
            qualification.declaration()


def test_what_cannot_be_tried_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="missing is not a folder"):
        qualify(tmp_path, tmp_path / "missing")
    with pytest.raises(InputError, match="proc filesystem, for which there is no profile"):
        qualify(Path("/proc"), tmp_path)
    with pytest.raises(InputError, match=f"{tmp_path} on"):
        qualify(Path("/dev/shm"), tmp_path)
    with pytest.raises(InputError, match="profile is local, not gluster"):
        qualify(tmp_path, tmp_path, profile="gluster")


def proved(path: Path, peer: Path) -> Qualification:
    """A qualification as two Gluster clients give it."""
    checks = [Check(name, True, f"{name}: seen", 0.1) for name, _ in CHECKS]
    return Qualification("gluster", str(path), str(peer), "glusterfs 10.3", checks)


@pytest.fixture
def declaration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the declaration is, on a machine that has nothing but Gluster."""
    monkeypatch.setattr("spillover.store.filesystem.filesystem", lambda _: "fuse.glusterfs")
    monkeypatch.setenv("SPILL_STORAGE_DECLARATION", str(tmp_path / "storage" / "declaration.json"))
    return tmp_path / "storage" / "declaration.json"


def test_the_declaration_admits_both_mounts_and_nothing_else(tmp_path: Path, declaration: Path) -> None:
    written = proved(tmp_path / "a", tmp_path / "b").declaration(durability_description="replica 3")
    write_declaration(written, declaration)
    for folder in ("a", "a/queue", "b", "b/pool"):
        (tmp_path / folder).mkdir(parents=True)
        require_local(tmp_path / folder)
        assert declared(tmp_path / folder) == written
    with pytest.raises(StoreRefused, match=r"fuse\.glusterfs"):
        require_local(tmp_path / "c")
    assert written.durability_description == "replica 3"
    assert "glusterfs 10.3" in declaration.read_text()


UNSAFE = [("writeback", True), ("open_cache", 1), ("readdir_cache", True), ("direct_mount", False)]


@pytest.mark.parametrize(("field", "value"), UNSAFE)
def test_an_unsafe_setting_is_refused_by_name(
    tmp_path: Path, declaration: Path, field: str, value: float
) -> None:
    with pytest.raises(StoreRefused, match=f"{field} is"):
        proved(tmp_path, tmp_path).declaration(**{field: value})
    write_declaration(proved(tmp_path, tmp_path).declaration(), declaration)
    require_local(tmp_path)
    declaration.write_text(json.dumps(json.loads(declaration.read_text()) | {field: value}))
    with pytest.raises(StoreRefused, match=f"{declaration} rules out .*{field} is"):
        require_local(tmp_path)


def test_a_declaration_of_another_filesystem_is_refused(
    tmp_path: Path, declaration: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_declaration(proved(tmp_path, tmp_path).declaration(), declaration)
    monkeypatch.setattr("spillover.store.filesystem.filesystem", lambda _: "nfs4")
    with pytest.raises(StoreRefused, match=r"of profile gluster, and .* is on a nfs4"):
        require_local(tmp_path)


def test_a_declaration_from_before_these_fields_is_read(tmp_path: Path, declaration: Path) -> None:
    facts = {"profile": "gluster", "path": str(tmp_path), "direct_mount": True, "locks": "seen"}
    declaration.parent.mkdir()
    declaration.write_text(json.dumps(facts | {"durability_description": "replica 3"}))
    require_local(tmp_path)
    declaration.write_text(json.dumps(facts | {"durability_description": "", "profile": "floppy"}))
    with pytest.raises(InputError, match="floppy"):
        require_local(tmp_path)


def test_two_gluster_clients_pass(
    gluster: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = (folder / "qualified" for folder in gluster)
    here.mkdir()
    with pytest.raises(StoreRefused, match=r"fuse\.glusterfs"):
        require_local(here)
    qualification = qualify(here, there, profile="gluster", rounds=50)
    assert failed(qualification) == {}
    declaration = qualification.declaration(durability_description="one brick, a test")
    assert declaration.client_version.startswith("glusterfs ")
    assert "two clients" in declaration.locks
    assert [*os.scandir(here), *os.scandir(there)] == []
    write_declaration(declaration, tmp_path / "declaration.json")
    monkeypatch.setenv("SPILL_STORAGE_DECLARATION", str(tmp_path / "declaration.json"))
    require_local(here / "queue")
    require_local(there / "queue")
    here.rmdir()


CACHED = {
    "as shipped": (AS_SHIPPED, (), "appends reach an open reader"),
    "md-cache": ((*STRICT, "md-cache"), UNCACHED, "names are seen"),
    "page cache": (STRICT, UNCACHED[:2], "overwrites are seen"),
}
"""Layers and options of two clients that cache, and a check that finds it."""


@pytest.mark.parametrize("case", CACHED)
def test_gluster_clients_that_cache_are_found(gluster_volume: Volume, case: str) -> None:
    layers, options, name = CACHED[case]
    here, there = (gluster_volume.mount(layers, options) for _ in range(2))
    try:
        qualification = qualify(here, there, **HASTE)
        assert name in failed(qualification)
        assert list(here.glob(".spill-*")) == []
    finally:
        gluster_volume.unmount(here)
        gluster_volume.unmount(there)


def test_one_gluster_mount_is_one_client(gluster: tuple[Path, Path]) -> None:
    qualification = qualify(gluster[0], gluster[0], **HASTE)
    assert "one mount: this proves one client only" in failed(qualification)[PLACES]
    assert "mount gluster a second time" in failed(qualification)[PLACES]


def test_the_declaration_has_no_field_that_the_check_forgets() -> None:
    written = proved(Path("/a"), Path("/b")).declaration()
    assert written == Declaration(
        profile="gluster",
        path="/a",
        peer="/b",
        direct_mount=True,
        writeback=False,
        open_cache=0,
        readdir_cache=False,
        client_version="glusterfs 10.3",
        locks=f"{PLACES}: seen; flock excludes: seen; flock ends with its holder: seen",
        durability_description="power loss not tried; appends reach an open reader: seen",
    )
