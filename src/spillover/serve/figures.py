"""A served model in figures, as Prometheus reads them (text exposition format 0.0.4)."""

from __future__ import annotations

from spillover.serve.batches import Batches
from spillover.serve.service import Service

__all__ = ["prometheus"]


def prometheus(service: Service, batches: Batches) -> str:
    """All metrics as text."""
    loop = service.loop
    prompt, generated = loop.tokens
    lines = [
        "# HELP spill_serve_requests_total Requests by path and HTTP status.",
        "# TYPE spill_serve_requests_total counter",
    ]
    for (path, status), count in sorted(service.requests.items()):
        lines.append(f'spill_serve_requests_total{{path="{path}",status="{status}"}} {count}')
    for name, kind, text, value in (
        ("prompt_tokens_total", "counter", "Tokens that were prefilled.", prompt),
        ("generated_tokens_total", "counter", "Tokens that were generated.", generated),
        ("running_rows", "gauge", "Rows that have a slot, those of batches included.", loop.running),
        ("waiting_rows", "gauge", "Rows of requests that wait for a slot.", loop.waiting),
        ("open_rows", "gauge", "Rows of requests that are under way or wait.", service.rows),
        ("slots", "gauge", "Rows that may run at once.", loop.slots),
        ("unfinished_batches", "gauge", "Batches that have not ended.", batches.unfinished),
    ):
        lines += [f"# HELP spill_serve_{name} {text}", f"# TYPE spill_serve_{name} {kind}"]
        lines.append(f"spill_serve_{name} {value}")
    return "\n".join(lines) + "\n"
