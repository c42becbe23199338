"""Scoring answers: metrics, intervals, and comparing models on the same rows.

Nothing here knows of models or of where answers come from; `spillover.jobs.evaluate` brings both together.
"""

from spillover.evaluate.comparison import Comparison, compared, mcnemar
from spillover.evaluate.intervals import RESAMPLES, intervals, pass_at
from spillover.evaluate.judge import Judge, verdict
from spillover.evaluate.metrics import Metric, Question, Unfit, parse_metric
from spillover.evaluate.script import ScriptFault, script_scores

__all__ = [
    "RESAMPLES",
    "Comparison",
    "Judge",
    "Metric",
    "Question",
    "ScriptFault",
    "Unfit",
    "compared",
    "intervals",
    "mcnemar",
    "parse_metric",
    "pass_at",
    "script_scores",
    "verdict",
]
