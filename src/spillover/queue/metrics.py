"""A coordinator in figures, as Prometheus reads them (text exposition format 0.0.4)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from spillover.queue.coordinator import Coordinator
from spillover.queue.messages import Stats
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
    lines += ["# HELP spill_undelivered Results that a consumer has still to acknowledge."]
    lines += ["# TYPE spill_undelivered gauge"]
    lines += [f'spill_undelivered{{queue="{_label(queue.queue)}"}} {queue.undelivered}' for queue in queues]
    lines += ["# HELP spill_bound Most tasks unfinished, or results undelivered, where there is a bound."]
    lines += ["# TYPE spill_bound gauge", *_bounds(queues)]
    counters, inbox = coordinator.counters, coordinator.inbox
    lines += ["# HELP spill_calls_total Calls by kind and outcome.", "# TYPE spill_calls_total counter"]
    for (kind, outcome), count in sorted(counters.calls.items()):
        lines.append(f'spill_calls_total{{call="{kind}",outcome="{outcome}"}} {count}')
    lines += [
        "# HELP spill_commit_seconds Time of a group commit.",
        "# TYPE spill_commit_seconds summary",
        f"spill_commit_seconds_sum {counters.seconds:.6f}",
        f"spill_commit_seconds_count {counters.commits}",
        "# HELP spill_waiting_calls Calls that wait for their answers.",
        "# TYPE spill_waiting_calls gauge",
        f"spill_waiting_calls {inbox.calls}",
        "# HELP spill_waiting_bytes Bytes of waiting and arriving calls.",
        "# TYPE spill_waiting_bytes gauge",
        f"spill_waiting_bytes {inbox.bytes}",
        "# HELP spill_busy_total Calls refused because too many waited.",
        "# TYPE spill_busy_total counter",
        f"spill_busy_total {inbox.refused}",
        "# HELP spill_generation Fencing token of this coordinator.",
        "# TYPE spill_generation gauge",
        f"spill_generation {coordinator.owners.generation}",
    ]
    return "\n".join(lines) + "\n"


def _bounds(queues: Sequence[Stats]) -> Iterator[str]:
    for queue in queues:
        for of, bound in (("unfinished", queue.max_unfinished), ("undelivered", queue.max_undelivered)):
            if bound is not None:
                yield f'spill_bound{{queue="{_label(queue.queue)}",of="{of}"}} {bound}'


def _label(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
