"""A coordinator in figures, as Prometheus reads them (text exposition format 0.0.4)."""

from __future__ import annotations

from spillover.queue.coordinator import Coordinator
from spillover.queue.schema import STATUS

__all__ = ["prometheus"]


def prometheus(coordinator: Coordinator) -> str:
    """All metrics as text."""
    lines = [
        "# HELP spill_tasks Tasks by queue and status.",
        "# TYPE spill_tasks gauge",
    ]
    queues = coordinator.queues()
    for queue in queues:
        for status in STATUS:
            lines.append(
                f'spill_tasks{{queue="{_label(queue.queue)}",status="{status}"}} {getattr(queue, status)}'
            )
    lines += ["# HELP spill_accepted_total Results accepted.", "# TYPE spill_accepted_total counter"]
    lines += [f'spill_accepted_total{{queue="{_label(queue.queue)}"}} {queue.positions}' for queue in queues]
    counters = coordinator.counters
    lines += ["# HELP spill_calls_total Calls by kind and outcome.", "# TYPE spill_calls_total counter"]
    for (kind, outcome), count in sorted(counters.calls.items()):
        lines.append(f'spill_calls_total{{call="{kind}",outcome="{outcome}"}} {count}')
    lines += [
        "# HELP spill_commit_seconds Time of a group commit.",
        "# TYPE spill_commit_seconds summary",
        f"spill_commit_seconds_sum {counters.seconds:.6f}",
        f"spill_commit_seconds_count {counters.commits}",
        "# HELP spill_generation Fencing token of this coordinator.",
        "# TYPE spill_generation gauge",
        f"spill_generation {coordinator.owners.generation}",
    ]
    return "\n".join(lines) + "\n"


def _label(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
