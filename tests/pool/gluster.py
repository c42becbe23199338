"""A real GlusterFS volume on this machine: a brick on 127.0.0.1, mounted by as many clients as a test needs.

    def test_something(gluster):
        here, there = gluster

The brick and the clients are the processes of Debian's ``glusterfs-server``, run from volume files written
here: no management daemon, no fixed port, nothing outside one temporary folder. They die with the test run.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

SECONDS = 20
VOLUME = uuid.uuid4()
BRICK = f"""
volume posix
    type storage/posix
    option directory {{brick}}
    option volume-id {VOLUME}
end-volume
volume locks
    type features/locks
    subvolumes posix
end-volume
volume io-threads
    type performance/io-threads
    subvolumes locks
end-volume
volume brick
    type debug/io-stats
    subvolumes io-threads
end-volume
volume server
    type protocol/server
    option transport-type tcp
    option transport.address-family inet
    option transport.socket.bind-address 127.0.0.1
    option transport.socket.listen-port {{port}}
    option auth.addr.brick.allow 127.0.0.1
    subvolumes brick
end-volume
"""
CLIENT = """
volume client
    type protocol/client
    option transport-type tcp
    option transport.address-family inet
    option remote-host 127.0.0.1
    option remote-port {port}
    option remote-subvolume brick
end-volume
volume distribute
    type cluster/distribute
    subvolumes client
end-volume
volume utime
    type features/utime
    option noatime on
    subvolumes distribute
end-volume
"""
STRICT = ("write-behind", "io-threads")
"""What a client may keep between an application and the bricks; see docs/design/filesystems.md."""
AS_SHIPPED = ("write-behind", "open-behind", "quick-read", "md-cache", "io-threads")
UNCACHED = ("--attribute-timeout=0", "--entry-timeout=0", "--direct-io-mode=enable")
"""``mount -t glusterfs -o attribute-timeout=0,entry-timeout=0,direct-io-mode=enable``."""


class Volume:
    """A brick that serves, and the clients that have it mounted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clients: dict[Path, subprocess.Popen[bytes]] = {}
        self.port = _free_port()
        self._brick: subprocess.Popen[bytes] | None = None

    def serve(self) -> None:
        """Start the brick. Like `mount`, raises `OSError` with the end of its log if it does not come up."""
        folder, brick = self.folder, self.folder / "brick"
        brick.mkdir()
        os.setxattr(brick, "trusted.glusterfs.volume-id", VOLUME.bytes)
        volume = folder / "brick.vol"
        volume.write_text(BRICK.format(brick=brick, port=self.port))
        self._brick = self._run("glusterfsd", "-f", volume, "-l", folder / "brick.log")
        self._await(self._serves, folder / "brick.log")

    def mount(self, layers: tuple[str, ...] = STRICT, options: tuple[str, ...] = UNCACHED) -> Path:
        """Mount the volume by one more client, with these performance layers and mount options."""
        name = secrets.token_hex(4)
        folder, volume, log = (self.folder / f"{name}{suffix}" for suffix in ("", ".vol", ".log"))
        folder.mkdir()
        volume.write_text(CLIENT.format(port=self.port) + _stack(layers))
        self.clients[folder] = self._run("glusterfs", *options, "-f", volume, "-l", log, folder)
        self._await(lambda: os.path.ismount(folder), log)
        return folder

    def unmount(self, folder: Path) -> None:
        for command in (["umount", folder], ["umount", "--lazy", folder]):
            if subprocess.run(command, capture_output=True).returncode == 0:
                break
        _end(self.clients.pop(folder))

    def close(self) -> None:
        for folder in [*self.clients]:
            self.unmount(folder)
        if self._brick is not None:
            _end(self._brick)

    def _run(self, *command: object) -> subprocess.Popen[bytes]:
        """Run in the foreground, to end when this process does, however that ends."""
        prefix = ["setpriv", "--pdeathsig", "TERM", "--"]
        program, *arguments = map(str, command)
        return subprocess.Popen(
            [*prefix, program, "--no-daemon", *arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def _serves(self) -> bool:
        with socket.socket() as connection:
            return connection.connect_ex(("127.0.0.1", self.port)) == 0

    def _await(self, condition, log: Path) -> None:
        end = time.monotonic() + SECONDS
        while not condition():
            if time.monotonic() > end:
                text = log.read_text(errors="replace") if log.exists() else "it wrote no log"
                raise OSError(f"not up in {SECONDS} s: " + " ".join(text.split())[-300:])
            time.sleep(0.01)


def _stack(layers: tuple[str, ...]) -> str:
    """The part of a client's volume file that stacks ``layers`` on what `CLIENT` ends with."""
    text, below = "", "utime"
    for layer in layers:
        text += f"volume {layer}\n    type performance/{layer}\n    subvolumes {below}\nend-volume\n"
        below = layer
    return text + f"volume spill\n    type debug/io-stats\n    subvolumes {below}\nend-volume\n"


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _missing() -> str:
    """Why there can be no volume here; empty if nothing is known to be in the way."""
    if os.geteuid() != 0:
        return "mounting needs root"
    if not Path("/dev/fuse").exists():
        return "there is no /dev/fuse"
    for program in ("glusterfsd", "glusterfs", "setpriv"):
        if shutil.which(program) is None:
            return f"{program} is not installed: apt-get install glusterfs-server"
    return ""


@pytest.fixture(scope="session")
def gluster_volume() -> Iterator[Volume]:
    """A volume that nobody has mounted yet. Skips, and says why, where there can be none."""
    if missing := _missing():
        pytest.skip(f"no GlusterFS volume: {missing}")
    volume = Volume(Path(tempfile.mkdtemp(prefix="gluster-")))
    try:
        try:
            volume.serve()
            volume.unmount(volume.mount())
        except OSError as error:
            pytest.skip(f"no GlusterFS volume: {error}")
        yield volume
    finally:
        volume.close()
        shutil.rmtree(volume.folder, ignore_errors=True)


@pytest.fixture(scope="session")
def gluster(gluster_volume: Volume) -> Iterator[tuple[Path, Path]]:
    """The folders of two clients of one volume, mounted as docs/design/filesystems.md says."""
    folders = gluster_volume.mount(), gluster_volume.mount()
    yield folders
    for folder in folders:
        gluster_volume.unmount(folder)
