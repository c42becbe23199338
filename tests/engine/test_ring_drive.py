"""How a drive is measured and remembered, and how a budget of memory is divided."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from engine.stored import LAYERS, SMALL, store
from spillover.engine.ring import Drive, Layout, Statistics, known_drive, measure_drive
from spillover.engine.ring import sample as sampling
from spillover.engine.ring.drive import identity
from spillover.engine.ring.layout import spread
from spillover.engine.ring.sample import CannotMeasure, sample
from spillover.errors import EngineError, ModelError
from spillover.models import home, models_home

MIB = 1 << 20


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return store(tmp_path_factory.mktemp("llama"), inner=2000)


@pytest.fixture(autouse=True)
def empty_home(tmp_path, monkeypatch):
    monkeypatch.setenv("SPILL_HOME", str(tmp_path / "home"))


def test_a_drive_is_measured_once_and_kept(llama):
    assert known_drive(llama.folder) == Drive() == Drive(4, 16 << 20, 0.0, 0.0)
    told = []
    drive = measure_drive(llama.files, lambda *seconds: told.append(seconds), seconds=0.2)
    assert drive.rate > 1e6 and drive.threads * drive.read_bytes <= 256 << 20
    assert told == sorted(told) and told[0][0] > 0 and told[-1][0] == told[-1][1] > 0.2
    assert known_drive(llama.folder) == known_drive(llama.files[0]) == drive
    assert time.time() - drive.measured < 60 and drive.direct


def test_each_drive_has_its_own_numbers(llama, tmp_path):
    measure_drive(llama.files, seconds=0.2)
    there = identity(llama.folder)
    assert [*json.loads((home() / "drives.json").read_text())] == [there]
    assert identity(Path("/dev/shm")) != there == identity(llama.files[0])
    assert "tmpfs" in identity(Path("/dev/shm"))
    other = store(Path(tmp_path / "other"), layers=1)
    assert known_drive(Path("/dev/shm")) == Drive()
    assert identity(other.folder) == there  # by the drive, not by the model


def test_a_folder_that_is_not_there_yet_is_on_the_drive_above_it(llama):
    assert known_drive(models_home()) == Drive()
    drive = measure_drive(llama.files, seconds=0.1, source="three files")
    assert not models_home().exists() and known_drive(models_home()) == drive
    assert drive.source == "three files"


def test_where_the_page_cache_cannot_be_passed_by_that_is_said(llama, monkeypatch):
    opened = os.open

    def refuse(path, flags, *more, **named):
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument", str(path))
        return opened(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", refuse)
    drive = measure_drive(llama.files, seconds=0.1)
    assert drive.rate > 0 and not drive.direct


def test_old_numbers_and_damaged_files_are_forgotten(llama):
    drive = measure_drive(llama.files, seconds=0.1)
    path = home() / "drives.json"
    kept = json.loads(path.read_text())
    kept[identity(llama.folder)]["measured"] -= 40 * 24 * 3600
    path.write_text(json.dumps(kept))
    assert known_drive(llama.folder) == Drive() != drive
    for damaged in ("", "{", "[]", '{"x": 3}', '{"x": {"threads": "many"}}'):
        path.write_text(damaged)
        assert known_drive(llama.folder) == Drive()
    measure_drive(llama.files, seconds=0.1)
    assert known_drive(llama.folder).rate > 0


def test_a_home_that_cannot_be_written_only_forgets(llama, monkeypatch):
    monkeypatch.setenv("SPILL_HOME", "/proc/nowhere")
    assert measure_drive(llama.files, seconds=0.1).rate > 0
    assert known_drive(llama.folder) == Drive()


def test_a_file_that_ends_while_it_is_measured_is_one_line(tmp_path):
    stored = store(tmp_path)

    def truncate(done, total):
        with stored.files[0].open("r+b") as file:
            file.truncate(5000)

    with pytest.raises(ModelError, match=r"00001-of-00003\.safetensors is truncated"):
        measure_drive(stored.files, truncate, seconds=1.0)
    assert known_drive(stored.folder) == Drive()


# What is read


def test_a_large_model_file_is_read_as_it_is():
    one, two = (models_home() / name for name in ("one", "two"))
    one.mkdir(parents=True)
    (one / "model.safetensors").write_bytes(os.urandom(40 * MIB))
    two.mkdir()
    with (two / "sparse.safetensors").open("wb") as file:
        file.truncate(100 * MIB)
    before = {*home().rglob("*")}
    with sample(large=32 * MIB) as (file, source):
        assert (file, source) == (one / "model.safetensors", "model.safetensors")
        assert {*home().rglob("*")} == before
    with sample(large=64 * MIB) as (_, source):
        assert source == "0.1 GB written for it"
    assert {*home().rglob("*")} == before


def test_a_file_on_another_drive_is_not_read():
    (models_home() / "one").mkdir(parents=True)
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as other:
        other.write(os.urandom(2 * MIB))
        other.flush()
        (models_home() / "one" / "model.safetensors").symlink_to(other.name)
        with sample(large=MIB) as (file, _):
            assert file.parent == models_home()


def test_without_one_a_file_is_written_and_deleted():
    home().mkdir()
    with sample(large=32 * MIB) as (file, source):
        assert file.stat().st_size == 32 * MIB <= file.stat().st_blocks * 512
        assert source == "0.0 GB written for it"
        assert measure_drive([file], seconds=0.1) == known_drive(models_home())
    assert [path.name for path in home().iterdir()] == ["drives.json"]


def test_what_a_killed_measurement_left_is_removed_and_no_other():
    home().mkdir()
    code = "import time; from spillover.engine.ring.sample import sample\n"
    code += "with sample(large=1 << 20) as (file, _): print(file.name, flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        left = home() / process.stdout.readline().strip()
        with sample(large=MIB) as (file, _):
            assert left.exists() and file.exists() and file != left
        process.kill()
    assert left.exists()
    (models_home() / "one").mkdir(parents=True)
    (models_home() / "one" / "model.safetensors").write_bytes(os.urandom(MIB))
    left = left.rename(models_home() / left.name)
    with sample(large=MIB) as (file, _):
        assert file.name == "model.safetensors" and not left.exists()


def test_a_slow_drive_gets_a_small_file():
    with sample(seconds=0.0) as (file, _):
        assert file.stat().st_size == 16 * MIB
        assert measure_drive([file], seconds=0.1).rate > 0


def test_a_drive_that_is_full_or_refuses_is_not_measured(monkeypatch):
    home().mkdir()
    with pytest.raises(CannotMeasure, match=r"has no room for a file of \d+"), sample(large=1 << 60):
        pass

    def refuse(**named):
        raise PermissionError(13, "Permission denied", named["dir"])

    monkeypatch.setattr(sampling.tempfile, "NamedTemporaryFile", refuse)
    with pytest.raises(CannotMeasure, match=f"{home()}: Permission denied"), sample(large=32 * MIB):
        pass


def test_a_drive_that_fails_is_not_measured(monkeypatch):
    home().mkdir()
    monkeypatch.setattr(
        sampling.os, "fsync", lambda _: (_ for _ in ()).throw(OSError(5, "Input/output error"))
    )
    with pytest.raises(CannotMeasure, match="Input/output error"), sample(large=32 * MIB):
        pass
    assert not [*home().iterdir()]


# Memory and time


def test_the_statistics_of_a_stretch_are_a_difference():
    early, late = Statistics(1.0, 100, 0.5, 0.25), Statistics(3.0, 500, 2.0, 1.0)
    assert late - early == Statistics(2.0, 400, 1.5, 0.75)
    assert (late - early).rate == 200.0
    assert (late - early).share(Drive(rate=250.0)) == 0.8
    assert (late - early).share(Drive()) is None
    assert (late - late).rate == 0.0


def test_a_budget_holds_as_many_layers_as_fit(llama):
    everything = Layout.of(llama.layers, SMALL, pinned=range(LAYERS))
    assert everything.bytes == sum(llama.layers.bytes(number) for number in range(LAYERS))
    assert everything.slots == everything.pass_bytes == 0
    counts = []
    for budget in range(everything.bytes, 0, -(everything.bytes // 40)):
        try:
            layout = Layout.within(llama.layers, SMALL, budget)
        except EngineError:
            break
        assert layout.bytes <= budget
        more = spread(LAYERS, min(len(layout.pinned) + 1, LAYERS))
        assert more == layout.pinned or Layout.of(llama.layers, SMALL, pinned=more).bytes > budget
        counts.append(len(layout.pinned))
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == LAYERS and counts[-1] == 0


def test_pinned_layers_are_apart(llama):
    size = llama.layers.layers[0].size
    layout = Layout.within(llama.layers, SMALL, 5 * size + 4096 * LAYERS)
    assert layout.pinned == {0, 3} and layout.slots == 3


def test_two_buffers_are_the_least(llama):
    size = max(part.size for part in llama.layers.layers)
    assert Layout.within(llama.layers, SMALL, 2 * size).slots == 2
    with pytest.raises(EngineError, match="streaming needs buffers of") as refused:
        Layout.within(llama.layers, SMALL, 2 * size - 1)
    assert refused.value.hint is not None


def test_small_layers_get_as_many_buffers_as_keep_all_threads_reading(llama):
    size = max(part.size for part in llama.layers.layers)
    assert Layout.of(llama.layers, SMALL).slots == 3
    assert Layout.of(llama.layers, Drive(2, size)).slots == 4
    assert Layout.of(llama.layers, Drive(8, size)).slots == LAYERS  # more hold nothing
    assert Layout.of(llama.layers, Drive(8, size), slots=2).slots == 2


def test_experts_count(tmp_path):
    stored = store(tmp_path, "mixtral")
    plain = Layout.of(stored.layers, SMALL)
    expert = stored.layers.experts[0][0].size
    assert plain.expert_size >= expert and plain.expert_slots >= 2
    assert plain.bytes == plain.slots * plain.slot_size + plain.expert_slots * plain.expert_size
    assert plain.pass_bytes == sum(stored.layers.bytes(number) for number in range(LAYERS))
    assert stored.layers.bytes(0) > 5 * expert * 0.9
    pinned = Layout.of(stored.layers, SMALL, pinned=[0])
    assert pinned.pass_bytes == plain.pass_bytes - stored.layers.bytes(0)
    assert pinned == replace(
        plain, pinned=frozenset([0]), pinned_bytes=stored.layers.bytes(0), pass_bytes=pinned.pass_bytes
    )
