"""Rows in, batches out: reading and checking JSONL, tokenizing for training, and the order of examples."""

from spillover.jobs.data.check import FileSummary, check_file
from spillover.jobs.data.example import Example, collate
from spillover.jobs.data.lines import JsonLines, Stamp
from spillover.jobs.data.options import Options
from spillover.jobs.data.order import Order
from spillover.jobs.data.rows import Purpose, Row, generated_id, read_rows
from spillover.jobs.data.shapes import Shape
from spillover.jobs.data.training import TrainingSet

__all__ = [
    "Example",
    "FileSummary",
    "JsonLines",
    "Options",
    "Order",
    "Purpose",
    "Row",
    "Shape",
    "Stamp",
    "TrainingSet",
    "check_file",
    "collate",
    "generated_id",
    "read_rows",
]
