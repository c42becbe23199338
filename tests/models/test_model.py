"""Names become checked models; what is installed is listed by the name to type."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from models.hub_server import Repo, serve
from spillover.errors import ModelError
from spillover.models import TAGS, installed, resolve
from spillover.models.tags import Source


def test_a_folder_is_used_where_it_is(tiny: Path, home: Path) -> None:
    model = resolve(f"{tiny}+banking")
    assert model.path == tiny
    assert model.ref.adapters == ("banking",)
    assert model.bytes == sum(path.stat().st_size for path in tiny.iterdir())
    assert model.index().bytes == sum(part.stop - part.start for part in model.index().tensors.values())
    assert model.tokenizer().stop_ids
    assert not installed()


def test_a_folder_that_is_no_model(tmp_path: Path, home: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        resolve(str(tmp_path))


def test_installed_models_are_named_as_they_are_typed(
    tiny: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPILL_DISK_FLOOR_GB", "0")
    monkeypatch.setenv("HF_HOME", str(home / "hf"))
    monkeypatch.setitem(TAGS, "tiny:1k", Source("acme/tagged"))
    files = {path.name: path.read_bytes() for path in tiny.iterdir()}
    with serve() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        for repo in ("acme/tagged", "acme/tiny"):
            hub.repos[repo] = Repo("a" * 40, files)
            hub.repos[repo].history["v1"] = files
        names = ["acme/tiny", "acme/tiny@v1", "tiny:1k"]
        for name in names:
            resolve(name)
    resolve("acme/any", weights=str(tiny))
    (home / "models" / ".x.partial").mkdir()
    found = installed()
    assert [model.name for model in found] == sorted([*names, str(tiny)])
    assert all(model.bytes > 60_000 for model in found)
    assert {resolve(model.name).fingerprint for model in found} == {resolve(str(tiny)).fingerprint}


def test_importing_loads_nothing_heavy() -> None:
    code = """
import sys, spillover.models, spillover.models.adapters
print([name for name in ("torch", "transformers", "numpy", "tokenizers", "jinja2", "huggingface_hub", "gguf")
       if name in sys.modules])
"""
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
