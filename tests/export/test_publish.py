"""What is at the destination of an export: nobody else's files are lost, and an interruption loses none."""

from __future__ import annotations

from pathlib import Path

import pytest

from spillover.errors import InputError
from spillover.export.publish import RECORD, check_target, publish_file, publish_folder, workplace
from spillover.models import folders


def exported(folder: Path, content: str) -> Path:
    folder.mkdir()
    (folder / RECORD).write_text("{}")
    (folder / "model").write_text(content)
    return folder


def test_only_an_export_is_overwritten(tmp_path: Path) -> None:
    foreign, folder, link = tmp_path / "x.gguf", tmp_path / "y.gguf", tmp_path / "z.gguf"
    foreign.write_bytes(b"somebody's")
    exported(folder, "a folder with the name of a file")
    link.symlink_to(foreign)
    for target in (foreign, folder, link):
        with pytest.raises(InputError, match="is no export"):
            check_target(target, overwrite=True)
        with pytest.raises(InputError, match="exists already"):
            check_target(target, overwrite=False)
    (tmp_path / "x.export.json").write_text("{}")
    check_target(foreign, overwrite=True)


@pytest.mark.parametrize("name", ["x.export.json", "x.Modelfile"])
def test_what_would_lie_beside_a_file_is_not_overwritten_either(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("by hand")
    with pytest.raises(InputError, match=f"{name} exists already"):
        check_target(tmp_path / "x.gguf", overwrite=False)
    check_target(tmp_path / "x.gguf", overwrite=True)
    check_target(tmp_path / "x", overwrite=False)


def test_what_a_former_export_had_beside_it_goes_with_it(tmp_path: Path) -> None:
    target = tmp_path / "x.gguf"
    for names in (("x.gguf", RECORD, "Modelfile"), ("x.gguf", RECORD)):
        made = tmp_path / "made"
        made.mkdir()
        for name in names:
            (made / name).write_text(str(len(names)))
        publish_file(made, target)
        made.rmdir()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.export.json", "x.gguf"]
    assert target.read_text() == "2"


class Killed(BaseException):
    """A process that ends here; nothing of it is run any more."""


@pytest.mark.parametrize("handled", [True, False])
def test_without_a_swap_an_interrupted_overwrite_keeps_the_old_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handled: bool
) -> None:
    """An exception puts it back; after a kill the next export does, whatever becomes of itself."""
    target = exported(tmp_path / "out", "old")
    monkeypatch.setattr(folders, "_swap", lambda *_: False)
    usual, calls = Path.rename, []

    def rename(path: Path, to: Path) -> Path:
        calls.append(path.name)
        if len(calls) == 2 or (len(calls) > 2 and not handled):
            raise Killed
        return usual(path, to)

    with pytest.raises(Killed), workplace(target) as partial:
        made = exported(partial / "made", "new")
        monkeypatch.setattr(Path, "rename", rename)
        publish_folder(made, target)
    monkeypatch.setattr(Path, "rename", usual)
    if not handled:
        assert not target.exists()
        with pytest.raises(ZeroDivisionError), workplace(target):
            raise ZeroDivisionError
    assert (target / "model").read_text() == "old"
    with workplace(target) as partial:
        publish_folder(exported(partial / "made", "new"), target)
    assert (target / "model").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
