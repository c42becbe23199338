"""Packed records and tensors that many processes share by small references.

>>> import tempfile
>>> with Pool.open(tempfile.mkdtemp(), create=True) as pool:
...     ref = pool.publish([Record("note", {"step": 1})])
...     pool.read(ref)["note"].payload
{'step': 1}
"""

from __future__ import annotations

from spillover.pool.collection import Collection
from spillover.pool.compaction import Compaction
from spillover.pool.extent import Link, Publication, Record
from spillover.pool.owners import Owners, Stats, WriterInfo
from spillover.pool.pool import Pool
from spillover.pool.reader import Pin, Reader, RecordSet
from spillover.pool.reference import Ref
from spillover.pool.tensors import Tensor
from spillover.pool.transfer import Transfer
from spillover.pool.verify import Verification
from spillover.pool.writer import Writer

__all__ = [
    "Collection",
    "Compaction",
    "Link",
    "Owners",
    "Pin",
    "Pool",
    "Publication",
    "Reader",
    "Record",
    "RecordSet",
    "Ref",
    "Stats",
    "Tensor",
    "Transfer",
    "Verification",
    "Writer",
    "WriterInfo",
]
