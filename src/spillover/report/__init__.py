"""What a run did, for people: a table, and a page of curves that needs nothing but itself.

Everything here is read from a run folder, which anybody may have written: a line that is no event is
skipped, what is missing is left out, and every text is escaped where it is shown.
"""

from __future__ import annotations

from spillover.report.history import History, read_history
from spillover.report.page import page
from spillover.report.summary import Summary, lines, summary

__all__ = ["History", "Summary", "lines", "page", "read_history", "summary"]
