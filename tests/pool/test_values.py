"""Every value comes back as it went in, and what cannot is refused with one clear line."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from spillover.errors import InputError
from spillover.pool import Link, Pool, Publication, Record, Ref

INTEGERS = "uint8 int8 uint16 int16 uint32 int32 uint64 int64".split()
NUMPY = [*INTEGERS, *"float16 float32 float64 bool complex64 complex128".split()]
EXTENDED = "bfloat16 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu".split()
SHAPES: list[tuple[int, ...]] = [(), (0,), (4, 0, 2), (3, 5), (300, 257)]
FEW = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with Pool.open(tmp_path_factory.mktemp("values") / "pool", create=True) as found:
        yield found


def through(pool: Pool, value: Any) -> Any:
    """The payload that is read where ``value`` was published."""
    return pool.record(pool.publish([Record("v", value)]).at(0)).payload


def elements(shape: tuple[int, ...], dtype: str) -> np.ndarray[Any, Any]:
    """Random bytes as an array; any bit pattern may occur, NaNs with a payload included."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    data = np.random.default_rng(7).integers(0, 256, size, np.uint8)
    if dtype == "bool":
        data &= 1
    return data.view(dtype).reshape(shape)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return not left.numel() or torch.equal(
        left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8)
    )


@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_numpy_arrays(pool: Pool, dtype: str, shape: tuple[int, ...]) -> None:
    array = elements(shape, dtype)
    found = through(pool, array)
    assert (found.dtype, found.shape, found.nbytes) == (dtype, shape, array.nbytes)
    assert found.numpy().dtype == array.dtype
    assert found.numpy().shape == shape
    assert found.numpy().tobytes() == array.tobytes()
    assert same_bits(found.torch(), torch.from_numpy(array))


@pytest.mark.parametrize("dtype", EXTENDED)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dtypes_that_numpy_has_from_ml_dtypes(pool: Pool, dtype: str, shape: tuple[int, ...]) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    size = math.prod(shape) * np.dtype(getattr(ml_dtypes, dtype)).itemsize
    array = np.arange(size, dtype=np.uint32).astype(np.uint8).view(getattr(ml_dtypes, dtype)).reshape(shape)
    found = through(pool, array)
    assert (found.dtype, found.shape) == (dtype, shape)
    assert found.numpy().dtype == array.dtype
    assert found.numpy().tobytes() == array.tobytes()
    assert through(pool, found.torch()).numpy().tobytes() == array.tobytes()


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", [*NUMPY, *EXTENDED, "complex32"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_torch_tensors(pool: Pool, dtype: str, shape: tuple[int, ...]) -> None:
    kind = getattr(torch, dtype)
    raw = elements((math.prod(shape) * kind.itemsize,), "bool" if dtype == "bool" else "uint8")
    tensor = torch.from_numpy(raw).view(kind).reshape(shape) if raw.size else torch.empty(shape, dtype=kind)
    found = through(pool, tensor)
    assert (found.dtype, found.shape) == (dtype, shape)
    assert same_bits(found.torch(), tensor)


@pytest.mark.parametrize(
    "view",
    [
        lambda a: a[::2],
        lambda a: a[::-1],
        lambda a: a[:, ::-3],
        lambda a: a.T,
        lambda a: a[1:4, 2:5],
        lambda a: np.broadcast_to(a[0], (4, *a[0].shape)),
        lambda a: np.asfortranarray(a),
        lambda a: a.astype(a.dtype.newbyteorder(">")),
        lambda a: a.astype(a.dtype.newbyteorder(">"))[::-2],
        lambda a: a[3],
        lambda a: a[3, 3],
    ],
)
@pytest.mark.parametrize("dtype", ["int16", "float64", "complex64"])
def test_memory_of_any_layout(pool: Pool, view: Any, dtype: str) -> None:
    array = view(np.arange(60).reshape(6, 10).astype(dtype))
    found = through(pool, array)
    assert found.shape == array.shape
    assert found.numpy().dtype == dtype  # in the byte order of this machine
    np.testing.assert_array_equal(found.numpy(), array)


def test_extended_dtypes_of_any_layout(pool: Pool) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = np.arange(60).reshape(6, 10).astype(ml_dtypes.bfloat16)
    for view in (array[::2], array.T, array[:, ::-3], np.asfortranarray(array)):
        np.testing.assert_array_equal(through(pool, view).numpy(), view)


def test_a_dtype_that_numpy_lacks_is_read_with_torch(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.arange(6).reshape(2, 3).to(torch.bfloat16)
    found = through(pool, tensor)
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)  # as where it is not installed
    with pytest.raises(InputError, match="bfloat16") as refused:
        found.numpy()
    assert "torch" in str(refused.value.hint)
    assert torch.equal(found.torch_rows(1, 2), tensor[1:])


def test_torch_views(pool: Pool) -> None:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    number = torch.complex(base, -base)
    views = [
        base.T,
        base[:, ::2],
        base[1:3, 2:5],
        base[0].expand(5, 6),
        base.to(torch.bfloat16).T,
        number,
        number.conj(),
        number.conj().imag,  # its negative bit is set
        number.real,
        number.conj()[1:, ::3],
        base.clone().requires_grad_(),
        (base.clone().requires_grad_() * 2),  # a part of a graph
        torch.nn.Parameter(base),
        base.reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
    ]
    for view in views:
        found = through(pool, view).torch()
        assert not found.requires_grad
        assert found.dtype == view.dtype
        assert torch.equal(found, view.detach().resolve_conj().resolve_neg())


def test_scalars(pool: Pool) -> None:
    found = through(pool, np.float32(1.5))
    assert (found.dtype, found.shape, found.numpy().item()) == ("float32", (), 1.5)
    assert through(pool, np.bool_(True)).torch().item() is True
    with pytest.raises(InputError, match="no dimensions"):
        len(found)


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 65535, 65536, 65537, 200_000])
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_bytes(pool: Pool, kind: Any, size: int) -> None:
    data = np.random.default_rng(size).bytes(size)
    found = through(pool, kind(data))
    assert type(found) is bytes
    assert found == data


def test_memoryviews_of_any_form(pool: Pool) -> None:
    data = bytearray(range(240))
    for view in (
        memoryview(data)[7:100],
        memoryview(data)[::3],
        memoryview(data)[::-1],
        memoryview(data).cast("I"),
        memoryview(data).cast("d", (5, 6)),
        memoryview(np.arange(6).reshape(2, 3).T),
        memoryview(np.zeros((0, 3))),
        memoryview(np.arange(3, dtype=">i4")),
        memoryview(np.array([(1, 2.0)], dtype="i4,f8")),
        memoryview(np.array(5)),
        memoryview(b""),
    ):
        assert through(pool, view) == view.tobytes()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)
ENCODABLE = st.characters(exclude_categories=["Cs"])


@FEW
@given(value=JSON)
def test_json_values(pool: Pool, value: Any) -> None:
    try:
        found = through(pool, value)
    except InputError:
        assert "\\ud" in ascii(value)  # a lone surrogate is no text
        return
    assert found == value
    assert repr(found) == repr(value)  # 1, 1.0 and True are equal, and not the same


@FEW
@given(
    array=hnp.arrays(st.sampled_from(NUMPY), hnp.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=6))
)
def test_arrays(pool: Pool, array: np.ndarray[Any, Any]) -> None:
    found = through(pool, array).numpy()
    assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes())


@FEW
@given(
    records=st.lists(
        st.tuples(
            st.text(ENCODABLE),
            st.binary() | JSON,
            st.none() | st.dictionaries(st.text(ENCODABLE), st.integers() | st.text(ENCODABLE), min_size=1),
        ),
        unique_by=lambda record: record[0],
    ),
)
def test_sets_of_records(pool: Pool, records: list[tuple[str, Any, Any]]) -> None:
    if "\\ud" in ascii(records):
        return
    found = pool.read(pool.publish([Record(*record) for record in records]))
    assert [tuple(found[name]) for name in found] == records
    assert len(found) == len(records)


class Odd:
    """Nothing that anybody could store."""


REFUSED: list[Any] = [
    math.nan,
    {"deep": [1, {"down": math.inf}]},
    {"key": {1, 2}},
    Odd(),
    "\ud800",
    {"\ud800": 1},
    {(1, 2): 3},
    [np.int64(3)],
    10**5000,
    np.array([object()]),
    np.array(["text"]),
    np.array([b"bytes"]),
    np.array([(1, 2.0)], dtype="i4,f8"),
    np.array(["2026-01-01"], "datetime64[D]"),
    np.ma.masked_array([1, 2], [True, False]),
    Record("inner", 1),
    Link("inner", Ref(1, 2, 3, 4, 5, 6)),
    Publication([]),
    torch.eye(3).to_sparse(),
    torch.zeros(3, device="meta"),
]


@pytest.mark.parametrize("value", REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_stored_is_refused(pool: Pool, value: Any) -> None:
    with pytest.raises(InputError, match="'v'"):
        pool.publish([Record("before", 1), Record("v", value)])
    assert through(pool, "still works") == "still works"


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_tensors_of_odd_kinds_are_refused(pool: Pool) -> None:
    for value in (
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    ):
        with pytest.raises(InputError, match="'v'"):
            through(pool, value)


def test_bottomless_json_is_refused(pool: Pool) -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(InputError, match="JSON"):
        through(pool, value)
    deep: Any = 0
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InputError, match="JSON"):
        through(pool, deep)
    while deep:  # by hand: freeing it may not recurse either
        deep = deep[0]


@pytest.mark.parametrize("name", ["\ud800", 3, None, b"bytes"])
def test_names_that_are_no_text_are_refused(pool: Pool, name: Any) -> None:
    with pytest.raises(InputError, match="id"):
        pool.publish([Record(name, 1)])


def test_two_records_of_one_name_are_refused(pool: Pool) -> None:
    with pytest.raises(InputError, match="'a'"):
        pool.publish([Record("a", 1), Record("b", 2), Record("a", 3)])


@pytest.mark.parametrize("metadata", [None, {"a": [1, None, "é\n"]}])
def test_metadata(pool: Pool, metadata: Any) -> None:
    ref = pool.publish(
        [Record("j", 1, metadata), Record("t", np.ones((2, 3)), metadata), Record("b", b"x", metadata)]
    )
    assert [record.metadata for record in pool.read(ref).values()] == [metadata] * 3


def test_the_caller_may_change_what_it_published(pool: Pool) -> None:
    array, data = np.arange(10), bytearray(b"before")
    ref = pool.publish([Record("a", array), Record("d", data)])
    array[:] = -1
    data[:] = b"after!"
    found = pool.read(ref)
    np.testing.assert_array_equal(found["a"].payload.numpy(), np.arange(10))
    assert found["d"].payload == b"before"


def test_what_is_read_belongs_to_the_caller(pool: Pool) -> None:
    ref: Ref = pool.publish([Record("a", np.arange(10))]).at(0)
    first = pool.tensor(ref).numpy()
    first[:] = -1
    np.testing.assert_array_equal(pool.tensor(ref).numpy(), np.arange(10))


def test_a_folder_named_like_an_address_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="folder"):
        Pool.open("s3://bucket/pool", create=True)
    with pytest.raises(InputError, match="no pool"):
        Pool.open(tmp_path)
