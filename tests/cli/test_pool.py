"""``spill pool``: what it says and does, as text and as JSON, and every mistake in one line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cli.command import Outcome, Shell, eventually, tree
from spillover.cli.pool_lines import shown_size
from spillover.errors import InputError, StoreFull
from spillover.pool import Link, Pool, Record, Ref
from spillover.sizes import parse_size

HEAVY = ("numpy", "torch", "transformers", "safetensors", "rich", "sqlite3")
HELP = f"""
import sys
from spillover.cli import main
try:
    main()
finally:
    print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)
"""
OWNER = """
import sys
from spillover.pool import Pool
with Pool.open(sys.argv[1]) as pool, pool.owners() as owners:
    print("open", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """A shell in a folder with a pool: 1 MB owned by ``ckpt`` through a link, 3 MB by nobody."""
    work = tmp_path / "work"
    (tmp_path / "logs").mkdir()
    work.mkdir()
    fill(work / "pool")
    shell = Shell(work, tmp_path / "home", tmp_path / "logs")
    yield shell
    for process in shell.started:
        if process.child.poll() is None:
            process.child.kill()
            process.child.wait()


def fill(path: Path) -> None:
    with Pool.open(path, create=True) as pool:
        tensor = np.arange(250_000, dtype=np.float32).reshape(500, 500)
        base = pool.publish(
            [Record("note", {"step": 1}), Record("w", tensor, {"lr": 0.1}), Record("raw", b"a")]
        )
        pool.publish([Record("garbage", bytes(3_000_000))])
        pool.seal()
        head = pool.publish([Link("weights", base.at(1)), Record("step", 2)])
        with pool.owners() as owners:
            owners.retain("ckpt", [head])


def packs(shell: Shell, pool: str = "pool") -> list[Path]:
    return sorted((shell.folder / pool / "packs").iterdir())


def document(outcome: Outcome) -> Any:
    """The one JSON document on stdout."""
    assert outcome.err == ""
    assert outcome.out.count("\n") == 1
    return json.loads(outcome.out)


def refused(shell: Shell, *words: str) -> str:
    """The one line that refuses a command, which wrote nothing."""
    before = tree(shell.folder)
    outcome = shell("pool", *words)
    assert (outcome.code, outcome.out) == (1, "")
    [line] = outcome.err.splitlines()
    assert line.startswith("spill: ")
    assert tree(shell.folder) == before
    return line


@contextmanager
def another_owner(pool: Path) -> Iterator[subprocess.Popen[str]]:
    """A live process that has the catalogue of a pool open."""
    child = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(pool)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "open\n"
        yield child
    finally:
        child.kill()
        child.communicate()


def test_stats_shows_figures_and_a_bar(shell):
    lines = shell("pool", "stats", "pool").out.splitlines()
    identity = json.loads((shell.folder / "pool" / "pool.json").read_bytes())["id"]
    assert lines == [
        f"pool {identity} at {shell.folder / 'pool'}",
        "holds    2 packs, 4.0 MB, no limit",
        "owned    2 publications by 1 owner, 1.0 MB (25%)",
        "written  by 0 registered writers",
        "█" * 13 + "▒" * 37,
        "█ owned 1.0 MB  ▒ unowned 3.0 MB",
    ]
    shell("pool", "limit", "pool", "8MB")
    lines = shell("pool", "stats", "pool").out.splitlines()
    assert lines[1] == "holds    2 packs, 4.0 MB, of at most 8.0 MB"
    assert re.fullmatch("█{6}▒{19}·{25}", lines[-2])
    assert lines[-1] == "█ owned 1.0 MB  ▒ unowned 3.0 MB  · free 4.0 MB"
    found = document(shell("pool", "stats", "pool", "--json"))
    size = sum(path.stat().st_size for path in packs(shell))
    assert (found["pool"], found["bytes"], found["max_bytes"]) == (identity, size, 8_000_000)
    assert (found["owners"], found["owned_extents"], found["catalogue"]) == (1, 2, None)


def test_an_empty_pool_has_no_bar(shell):
    Pool.open(shell.folder / "empty", create=True).close()
    assert shell("pool", "stats", "empty").out.splitlines()[1:] == [
        "holds    0 packs, 0 B, no limit",
        "owned    0 publications by 0 owners, 0 B (0%)",
        "written  by 0 registered writers",
    ]
    assert shell("pool", "ls", "empty").out == f"nobody owns anything in {shell.folder / 'empty'}\n"
    assert document(shell("pool", "ls", "empty", "--json")) == []


def test_ls_lists_owners_and_what_they_own(shell):
    assert re.fullmatch(r"ckpt +2 publications +1\.0 MB\n", shell("pool", "ls", "pool").out)
    [owner] = document(shell("pool", "ls", "pool", "--json"))
    assert (owner["name"], owner["refs"], owner["publications"]) == ("ckpt", 1, 2)
    [owned] = document(shell("pool", "ls", "pool", "--owner", "ckpt", "--json"))
    link, step = owned["records"]
    assert (link["id"], link["codec"], step["id"], step["codec"]) == ("weights", "link", "step", "json")
    with Pool.open(shell.folder / "pool") as pool:
        assert pool.read(Ref.parse(owned["ref"]))["step"].payload == 2
        assert pool.tensor(Ref.parse(link["target"])).shape == (500, 500)
    lines = shell("pool", "ls", "pool", "--owner", "ckpt").out.splitlines()
    assert lines[0].startswith(f"{owned['ref']}  {owned['pack']} at ")
    assert lines[1:3] == [
        f"    needs {owned['dependencies'][0]}",
        f"    weights{' ' * 18}link to {link['target']}",
    ]


def test_ls_shows_what_is_in_a_pack(shell):
    first = packs(shell)[0]
    found = document(shell("pool", "ls", "pool", "--pack", first.stem, "--json"))
    assert (found["pack"], found["bytes"], found["sealed"], found["torn"]) == (
        first.stem,
        first.stat().st_size,
        True,
        0,
    )
    publication, garbage = found["publications"]
    assert [record["id"] for record in garbage["records"]] == ["garbage"]
    facts = [
        (r["id"], r["codec"], r["bytes"], r["dtype"], r["shape"], r["metadata"])
        for r in publication["records"]
    ]
    assert facts == [
        ("note", "json", 10, None, None, None),
        ("w", "tensor", 1_000_000, "float32", [500, 500], {"lr": 0.1}),
        ("raw", "bytes", 1, None, None, None),
    ]
    outcome = shell("pool", "ls", "pool", "--pack", str(first))
    assert re.search(r"^    w +float32 \[500, 500\] +1\.0 MB  [\w-]{64}$", outcome.out, re.MULTILINE)
    [ref] = re.findall(r"^    raw .* (\S{64})$", outcome.out, re.MULTILINE)
    with Pool.open(shell.folder / "pool") as pool:
        assert pool.record(Ref.parse(ref)).payload == b"a"


def test_verify_is_silent_about_what_is_whole_and_names_every_damage(shell):
    assert shell("pool", "verify", "pool").out == "2 packs, 3 publications, 4.0 MB: nothing damaged\n"
    assert document(shell("pool", "verify", "pool", "--json"))["damaged"] == []
    first = packs(shell)[0]
    data = bytearray(first.read_bytes())
    for at in (64 + 64 + 64 + 70_000, 2_000_000):
        data[at] ^= 1
    first.write_bytes(data)
    outcome = shell("pool", "verify", "pool")
    assert (outcome.code, outcome.err) == (1, "")
    one, two, last = outcome.out.splitlines()
    assert one.startswith(f"{first}: record 'w' of the extent at 64 is damaged in chunk 1, ")
    assert re.match(rf"{first}: record 'garbage' of the extent at \d+ is damaged in chunk 15, ", two)
    assert last == "2 packs, 1 publication, 4.0 MB: 2 damaged"
    outcome = shell("pool", "verify", "pool", "--json")
    assert (outcome.code, document(outcome)["damaged"]) == (1, [one, two])


def test_a_torn_end_is_no_damage_and_is_told(shell):
    with Pool.open(shell.folder / "pool") as pool:
        ref = pool.publish([Record("cut", bytes(1000))])
        data = pool.folder.path_of(ref.pack).read_bytes()
    pool.folder.path_of(ref.pack).write_bytes(data[:-100])
    outcome = shell("pool", "verify", "pool")
    assert outcome.code == 0
    assert outcome.out.splitlines()[1:] == [
        "1.2 kB at the ends of packs were never acknowledged: their writers died"
    ]


def test_gc_deletes_what_nobody_owns_once_it_may(shell):
    assert shell("pool", "gc", "pool").out == "deleted 0 packs, 0 B\n2 packs left, 4.0 MB\n"
    with Pool.open(shell.folder / "pool") as pool, pool.owners() as owners:
        owners.release("ckpt")
    before = tree(shell.folder / "pool" / "packs")
    assert (
        shell("pool", "gc", "pool", "--dry-run").out == "would delete 2 packs, 4.0 MB\n2 packs left, 4.0 MB\n"
    )
    assert tree(shell.folder / "pool" / "packs") == before
    found = document(shell("pool", "gc", "pool", "--json"))
    assert (found["deleted"], found["packs"], packs(shell)) == (2, 0, [])


def test_gc_waits_for_readers_and_writers_and_says_so(shell):
    with Pool.open(shell.folder / "pool") as pool:
        with pool.owners() as owners:
            [ref] = owners.owned("ckpt")
            owners.release("ckpt")
        with pool.pin([ref]):
            lines = shell("pool", "gc", "pool").out.splitlines()
    assert lines[1] == "kept 2 packs that a reader has open or a live writer has not settled"
    assert len(packs(shell)) == 2


def test_compact_rewrites_and_references_stay(shell):
    with Pool.open(shell.folder / "pool") as pool, pool.owners() as owners:
        [ref] = owners.owned("ckpt")
    outcome = shell("pool", "compact", "pool")
    assert outcome.out == "rewrote 1 pack as 1: 1.0 MB copied, 4.0 MB deleted\n"
    with Pool.open(shell.folder / "pool") as pool:
        assert pool.read(ref)["weights"].payload[2:3].tolist() == [[*range(1000, 1500)]]
    assert document(shell("pool", "compact", "pool", "--json"))["rewritten"] == 0
    assert document(shell("pool", "compact", "pool", "--min-owned", "1", "--json"))["rewritten"] == 0


def test_export_and_import_carry_owners_to_another_pool(shell):
    outcome = shell("pool", "export", "pool", "carried.pack", "ckpt")
    assert (
        outcome.out
        == "2 publications, 1.0 MB, written to carried.pack\nnext: spill pool import POOL carried.pack\n"
    )
    outcome = shell("pool", "import", "other", "carried.pack", "--create")
    assert outcome.out == "2 publications, 1.0 MB taken in; owners: ckpt\n"
    again = document(shell("pool", "import", "other", "carried.pack", "--json"))
    assert (again["owners"], again["publications"], again["bytes"]) == (["ckpt"], 0, 0)
    found = document(shell("pool", "export", "other", "back.pack", "ckpt", "--json"))
    assert (found["publications"], (shell.folder / "back.pack").stat().st_size) == (2, found["bytes"])
    with Pool.open(shell.folder / "pool") as pool, pool.owners() as owners:
        [ref] = owners.owned("ckpt")
    with Pool.open(shell.folder / "other") as other:
        assert other.read(ref)["weights"].payload[0:1].tolist() == [[*range(500)]]


def test_limit_is_felt_by_writers_and_taken_away(shell):
    assert shell("pool", "limit", "pool", "3.5 MB").out.splitlines() == [
        f"{shell.folder / 'pool'}: at most 3.5 MB",
        "it holds 4.0 MB already, so nothing can be published until some is collected",
    ]
    with Pool.open(shell.folder / "pool") as pool:
        with pytest.raises(StoreFull):
            pool.publish([Record("x", 1)])
        assert document(shell("pool", "limit", "pool", "none", "--json"))["max_bytes"] is None
        pool.publish([Record("x", 1)])
    assert shell("pool", "limit", "pool", "none").out == f"{shell.folder / 'pool'}: no limit\n"


@pytest.mark.parametrize(
    ("text", "size"),
    [("20GB", 20 * 10**9), ("1.5 TB", 15 * 10**11), ("512MiB", 512 << 20), ("7k", 7000), ("0", 0), ("9b", 9)],
)
def test_sizes_are_read(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1", "1 XB", "1e9", "1.5.2MB", "all"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(InputError, match="is no size"):
        parse_size(text)


def test_sizes_are_shown_in_the_unit_that_suits():
    assert [shown_size(size) for size in (0, 999, 1000, 999_960, 2.5e9, 3e15)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "1.0 MB",
        "2.5 GB",
        "3,000.0 TB",
    ]


def test_qualify_tries_two_folders_and_writes_what_they_proved(shell):
    (shell.folder / "mount").mkdir()
    (shell.folder / "other").mkdir()
    outcome = shell("pool", "qualify", "mount", "--peer", "mount", "--out", "declared.json")
    assert outcome.code == 0
    lines = outcome.out.splitlines()
    assert lines[0].startswith("local, ")
    assert all(line.startswith("holds   ") for line in lines[1:-1])
    assert lines[-1] == "next: export SPILL_STORAGE_DECLARATION=declared.json"
    declared = json.loads((shell.folder / "declared.json").read_bytes())
    assert declared["path"] == str(shell.folder / "mount")
    assert [*(shell.folder / "mount").iterdir()] == []


@pytest.mark.slow
def test_qualify_says_what_failed(shell):
    for name in ("mount", "other", "mount2", "other2"):
        (shell.folder / name).mkdir()
    words = ("pool", "qualify", "mount", "--peer", "other", "--out", "declared.json")
    first = shell.start(*words)  # each waits for ten seconds
    second = shell.start("pool", "qualify", "mount2", "--peer", "other2", "--json")
    outcome = first.end()
    assert outcome.code == 1
    assert re.search(r"^FAILED  one folder: .* does not appear in ", outcome.out, re.MULTILINE)
    assert not (shell.folder / "declared.json").exists()
    outcome = second.end()
    assert (outcome.code, document(outcome)["checks"][0]["passed"]) == (1, False)


@pytest.mark.parametrize(
    ("command", "words", "next"),
    [
        ("stats nowhere", "nowhere holds no pool", "Pool.open"),
        ("verify nowhere", "nowhere holds no pool", "Pool.open"),
        ("ls .", "holds no pool", ""),
        ("gc s3://bucket/pool", "s3://bucket/pool: a pool lies in a folder", "use a path"),
        ("import s3://bucket/pool x --create", "s3://bucket/pool: a pool lies in a folder", "use a path"),
        ("ls pool --owner a --pack b", "either --owner or --pack", "spill pool ls --help"),
        ("ls pool --pack first", "'first' is not the name of a pack", "ls POOL/packs"),
        ("ls pool --pack 0000000001-000001", "has no pack 0000000001-000001", "ls "),
        ("compact pool --min-owned 0", "--min-owned 0.0 is no share", "--min-owned 0.5"),
        ("compact pool --min-owned 50", "--min-owned 50.0 is no share", "--min-owned 0.5"),
        ("limit pool much", "'much' is no size", "20GB"),
        ("limit nowhere 1GB", "nowhere holds no pool", ""),
        ("qualify pool", "Missing option '--peer'", "spill pool qualify --help"),
        ("qualify absent --peer pool", "absent is not a folder", "create it"),
        ("export pool", "Missing argument", "spill pool export --help"),
        ("dance pool", "No such command 'dance'", "spill pool --help"),
    ],
)
def test_a_mistake_is_told_in_one_line_and_nothing_is_written(shell, command, words, next):
    line = refused(shell, *command.split())
    assert words in line
    assert f". Try: {next}" in line


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("ls pool --owner nobody", "has no owner 'nobody'. Try: spill pool ls"),
        ("export pool new.pack ckpt nobody", "has no owner 'nobody'. Try: spill pool ls"),
        ("export pool pool/pool.json ckpt", "pool/pool.json exists. Try: choose another name"),
        ("export pool absent/new.pack ckpt", "absent/new.pack: No such file or directory"),
        ("import pool absent.pack", "absent.pack: No such file or directory"),
        ("import pool pool/pool.json", "pool/pool.json is not a pack"),
        ("import pool pool", "pool is no file"),
    ],
)
def test_a_mistake_behind_the_catalogue_is_one_line_and_packs_stay(shell, command, words):
    before = tree(shell.folder / "pool" / "packs")
    outcome = shell("pool", *command.split())
    assert (outcome.code, outcome.out) == (1, "")
    [line] = outcome.err.splitlines()
    assert words in line
    assert tree(shell.folder / "pool" / "packs") == before
    assert not (shell.folder / "new.pack").exists()


def test_a_damaged_pack_is_named_by_every_command_that_meets_it(shell):
    first = packs(shell)[0]
    data = bytearray(first.read_bytes())
    data[1_000_500] ^= 1  # in the index
    first.write_bytes(data)
    outcome = shell("pool", "export", "pool", "new.pack", "ckpt")
    assert outcome.code == 1
    assert str(first) in outcome.err
    assert len(outcome.err.splitlines()) == 1
    assert [path.name for path in shell.folder.iterdir()] == ["pool"]
    line = refused(shell, "ls", "pool", "--pack", first.stem)
    assert str(first) in line


def test_an_export_that_was_cut_off_is_refused_whole(shell):
    shell("pool", "export", "pool", "carried.pack", "ckpt")
    file = shell.folder / "carried.pack"
    file.write_bytes(file.read_bytes()[:-300])
    outcome = shell("pool", "import", "other", "carried.pack", "--create")
    told = "spill: carried.pack is cut off, or is no export. Try: export it again\n"
    assert (outcome.code, outcome.err) == (1, told)
    assert packs(shell, "other") == []


def test_a_catalogue_that_another_process_has_open_is_left_alone(shell):
    pool = shell.folder / "pool"
    with another_owner(pool) as child:
        lines = shell("pool", "stats", "pool").out.splitlines()
        assert lines[1] == "holds    2 packs, 4.0 MB, no limit"
        assert re.fullmatch(
            rf"owned    not known: the catalogue is open in process {child.pid} on \S+", lines[2]
        )
        assert lines[-1] == "▒ in packs 4.0 MB"
        found = document(shell("pool", "stats", "pool", "--json"))
        assert (found["owned_bytes"], found["catalogue"]["pid"]) == (None, child.pid)
        for command in ("ls pool", "gc pool", "compact pool", "export pool x ckpt", "import pool x"):
            line = refused(shell, *command.split())
            assert line.startswith(f"spill: the catalogue of {pool} is open in process {child.pid} on ")
        for command in ("verify pool", "limit pool none", f"ls pool --pack {packs(shell)[0].stem}"):
            assert shell("pool", *command.split()).code == 0
        child.kill()
        child.wait()
        assert "ckpt" in shell("pool", "ls", "pool").out


@pytest.mark.slow
def test_a_pool_on_a_read_only_mount_can_be_looked_at(shell):
    mounted = shell.folder / "mounted"
    mounted.mkdir()
    done = subprocess.run(
        ["mount", "--bind", "pool", "mounted"], cwd=shell.folder, capture_output=True, text=True
    )
    assert done.returncode == 0, f"this test must be allowed to mount: {done.stderr.strip()}"
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", str(mounted)], check=True)
        assert shell("pool", "verify", "mounted").code == 0
        assert shell("pool", "ls", "mounted", "--pack", packs(shell)[0].stem).code == 0
        outcome = shell("pool", "stats", "mounted")
        assert outcome.code == 0
        assert "not known: " in outcome.out
        assert "is on a read-only mount" in outcome.out
        for command in ("gc mounted", "ls mounted", "limit mounted 1GB"):
            assert "is on a read-only mount. Try: " in refused(shell, *command.split())
    finally:
        subprocess.run(["umount", str(mounted)], check=True)


@pytest.mark.parametrize("words", [["pool"], ["pool", "--help"], ["pool", "export", "--help"]])
def test_help_loads_nothing_heavy(shell, words):
    done = subprocess.run(
        [sys.executable, "-c", HELP, *words], env=shell.environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "[]\n")
    assert done.stdout.startswith(f"Usage: -c {' '.join(words).removesuffix(' --help')}")


def test_a_writer_that_died_is_retired_by_gc(shell):
    code = "import os, sys\nfrom spillover.pool import Pool, Record\n"
    code += "Pool.open(sys.argv[1]).publish([Record('lost', bytes(5000))])\nos._exit(0)"
    subprocess.run([sys.executable, "-c", code, str(shell.folder / "pool")], check=True)
    eventually(lambda: len(packs(shell)) == 3, lambda: "no third pack")
    lines = shell("pool", "gc", "pool").out.splitlines()
    assert lines == [
        "deleted 1 pack, 5.4 kB",
        "retired 1 writer whose process is dead",
        "2 packs left, 4.0 MB",
    ]
