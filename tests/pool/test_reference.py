"""References survive as bytes and as text; what is no reference is refused."""

from __future__ import annotations

import base64
import copy
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillover.errors import Collected, Corrupt, InputError, Mismatch
from spillover.pool import Pool, Record, Ref
from spillover.pool.reference import pack_id, pack_name, writer_of

REFS = st.builds(
    Ref,
    pool=st.integers(0, 2**63 - 1),
    pack=st.integers(0, 2**63 - 1),
    offset=st.integers(0, 2**62),
    length=st.integers(0, 2**62 - 1),
    check=st.integers(0, 2**64 - 1),
    ordinal=st.none() | st.integers(0, 2**32 - 2),
    linked=st.booleans(),
)


@given(ref=REFS)
def test_bytes_and_text(ref: Ref) -> None:
    assert len(ref.pack_bytes()) == 48
    assert Ref.from_bytes(ref.pack_bytes()) == ref
    assert Ref.from_bytes(memoryview(ref.pack_bytes())) == ref
    text = str(ref)
    assert len(text) == 64
    assert Ref.parse(text) == ref
    assert hash(Ref.parse(text)) == hash(ref)
    assert copy.deepcopy(ref) == pickle.loads(pickle.dumps(ref)) == ref


@given(ref=REFS, ordinal=st.integers(0, 1000))
def test_a_record_and_its_publication(ref: Ref, ordinal: int) -> None:
    assert ref.at(ordinal).ordinal == ordinal
    assert ref.at(ordinal).whole() == ref.whole()
    assert ref.whole().ordinal is None
    assert (ref.at(ordinal) == ref) == (ref.ordinal == ordinal)


@given(data=st.binary(max_size=100))
def test_other_bytes_are_refused_or_are_a_reference(data: bytes) -> None:
    try:
        ref = Ref.from_bytes(data)
    except InputError:
        return
    assert ref.pack_bytes() == data


@given(data=st.binary(min_size=48, max_size=48))
def test_48_bytes_are_refused_or_are_a_reference(data: bytes) -> None:
    data = data[:44] + bytes([data[44] & 1, 0, 0, 0])
    try:
        ref = Ref.from_bytes(data)
    except InputError as error:
        assert "no file" in str(error)
        return
    assert ref.pack_bytes() == data


@given(text=st.text() | st.binary(max_size=60).map(lambda data: base64.urlsafe_b64encode(data).decode()))
def test_other_text_is_refused(text: str) -> None:
    try:
        ref = Ref.parse(text)
    except InputError as error:
        assert "\n" not in str(error)
        return
    assert str(ref) == text


@given(writer=st.integers(1, 2**39 - 1), serial=st.integers(1, 2**24 - 1))
def test_names_of_packs(writer: int, serial: int) -> None:
    pack = pack_id(writer, serial)
    assert pack < 2**63
    assert writer_of(pack) == writer
    assert pack_name(pack) == f"{writer:010x}-{serial:06x}"


def test_a_reference_that_leads_nowhere(tmp_path: Path) -> None:
    """Every field but one is right; no answer is another publication's."""
    with Pool.open(tmp_path / "pool", create=True) as pool:
        refs = [pool.publish([Record("n", number)]) for number in range(3)]
        ref = refs[1]
        for wrong, errors in [
            (Ref(ref.pool ^ 1, *fields(ref)[1:]), Mismatch),
            (Ref(ref.pool, ref.pack + 1, *fields(ref)[2:]), Collected),
            (Ref(ref.pool, ref.pack, ref.offset + 64, *fields(ref)[3:]), Corrupt),
            (Ref(ref.pool, ref.pack, refs[0].offset, *fields(ref)[3:]), Corrupt),
            (Ref(ref.pool, ref.pack, ref.offset, ref.length + 64, ref.check), Corrupt),
            (Ref(ref.pool, ref.pack, ref.offset, 0, ref.check), Corrupt),
            (Ref(ref.pool, ref.pack, ref.offset, 2**61, ref.check), Corrupt),
            (Ref(ref.pool, ref.pack, 2**61, ref.length, ref.check), Corrupt),
            (Ref(ref.pool, ref.pack, ref.offset, ref.length, ref.check ^ 1), Corrupt),
            (ref.at(1), InputError),
        ]:
            with pytest.raises(errors):  # type: ignore[arg-type]
                pool.record(wrong if wrong.ordinal is not None else wrong.at(0))
        with pytest.raises(InputError, match="whole publication"):
            pool.record(ref)
        assert pool.record(ref.at(0)).payload == 1


def fields(ref: Ref) -> tuple[int, int, int, int, int]:
    return ref.pool, ref.pack, ref.offset, ref.length, ref.check
