"""The command ``spill``.

Exit codes: 0 done, or stopped on purpose; 1 an error, told in one line; 75 preempted, run it again; 130
interrupted by a person. ``--debug``, anywhere on the line, shows the traceback of an error.
"""

from __future__ import annotations

import os
import sys

from spillover.errors import SpillError

__all__ = ["main"]


def main() -> None:
    """Run the command line of this process and exit."""
    arguments = sys.argv[1:]
    debug = "--debug" in arguments
    sys.argv[1:] = [argument for argument in arguments if argument != "--debug"]
    import typer

    from spillover.cli.app import app, usage_error

    try:
        code = app(standalone_mode=False)
    except SpillError as error:
        if debug:
            raise
        raise SystemExit(_told(error)) from None
    except typer.Abort:
        raise SystemExit(130) from None
    except typer.TyperException as error:
        raise SystemExit(_told(usage_error(error))) from None
    finally:
        _flush()
    raise SystemExit(code if isinstance(code, int) else 0)


def _told(error: SpillError) -> int:
    """Say an error in one line; returns the exit code."""
    from spillover.cli.terminal import error_line

    print(error_line(error), file=sys.stderr)
    return 1


def _flush() -> None:
    """Write what is left, unless nobody reads it any more (``spill runs | head -n 1``)."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # otherwise the interpreter tries again on its way out, and complains
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
