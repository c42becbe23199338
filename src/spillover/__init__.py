"""LLM post-training work that no interruption can take away.

The package is a row of layers that can be used alone: `spillover.store` (bytes at a URI),
`spillover.state` (one fenced owner, immutable payloads), `spillover.models`, `spillover.engine`,
`spillover.jobs` and the command line `spill`. Importing `spillover` imports none of them.
"""

__version__ = "0.1.0"
