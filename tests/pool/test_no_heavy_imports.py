"""Bytes and JSON cost neither NumPy nor PyTorch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
from spillover.pool import Pool, Record

with Pool.open(sys.argv[1], create=True) as pool:
    ref = pool.publish([Record("b", b"bytes"), Record("j", {"a": [1, None]}, {"m": 1})], submission="s")
    found = pool.read(ref)
    assert found["b"].payload == b"bytes"
    assert found["j"].payload == {"a": [1, None]}
    buffer = bytearray(5)
    assert pool.reader().read_into(ref.at(0), buffer) == 5 and buffer == b"bytes"
    with pool.owners() as owners:
        owners.retain("me", [ref])
        pool.seal()
        assert owners.collect().deleted == 0
    assert pool.verify().damaged == []
    assert pool.receipt("s") == [ref]
loaded = sorted({"numpy", "torch", "ml_dtypes", "safetensors", "obstore"} & sys.modules.keys())
assert not loaded, loaded
print("done")
"""


def test_bytes_and_json_import_no_numpy_and_no_torch(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "pool")], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "done\n", done.stderr


def test_a_tensor_is_read_where_nothing_was_imported(tmp_path: Path) -> None:
    import numpy as np

    from spillover.pool import Pool, Record

    with Pool.open(tmp_path / "pool", create=True) as pool:
        ref = pool.publish([Record("t", np.arange(5, dtype=np.int16))]).at(0)
    program = (
        "import sys; from spillover.pool import Pool, Ref\n"
        "tensor = Pool.open(sys.argv[1]).tensor(Ref.parse(sys.argv[2]))\n"
        "assert (tensor.dtype, tensor.shape) == ('int16', (5,))\n"
        "assert 'numpy' not in sys.modules\n"
        "assert tensor[1:3].tolist() == [1, 2]\n"
        "assert 'torch' not in sys.modules\n"
        "assert tensor.torch().tolist() == [0, 1, 2, 3, 4]\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "pool"), str(ref)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
