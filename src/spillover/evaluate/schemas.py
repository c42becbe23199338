"""JSON Schema, by the ``jsonschema`` package. No reference is ever fetched from anywhere."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from spillover.errors import InputError

__all__ = ["allows", "read", "validator"]


def read(path: Path) -> bytes:
    """The schema in a file, checked; `InputError` naming the file if it is none."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}", hint="json_schema:FILE") from None
    try:
        validator(data)
    except InputError as error:
        raise InputError(f"{path}: {error}", hint=error.hint) from None
    return data


@lru_cache(256)
def validator(schema: bytes) -> Any:
    """What validates against a schema, by the draft that it names or else the newest.

    Raises:
        InputError: it is no schema, or ``jsonschema`` is not installed.
    """
    try:
        from jsonschema import Draft202012Validator, SchemaError
        from jsonschema.validators import validator_for
        from referencing import Registry
    except ImportError:
        raise InputError(
            "json_schema needs the package jsonschema", hint="pip install 'spillover[eval]'"
        ) from None
    try:
        document = msgspec.json.decode(schema)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InputError(f"not valid JSON: {error}") from None
    if not isinstance(document, dict | bool):
        raise InputError("a schema is an object", hint='{"type": "object"}')
    if isinstance(document, dict) and not isinstance(document.get("$schema", ""), str):
        raise InputError("its $schema is no text", hint="leave it out")
    kind = validator_for(document, default=Draft202012Validator)
    try:
        kind.check_schema(document)
    except SchemaError as error:
        raise InputError(f"{error.message} (at {error.json_path})") from None
    return kind(document, registry=Registry())


def allows(schema: bytes, value: Any) -> bool:
    """Whether a value is valid; ``format`` is not checked, as the specification leaves it.

    Raises:
        InputError: a reference leads nowhere, or round in a circle.
    """
    from referencing.exceptions import Unresolvable

    try:
        valid: bool = validator(schema).is_valid(value)
    except Unresolvable as error:
        raise InputError(f"the schema refers to {error.ref!r}, which is not in it") from None
    except RecursionError:
        raise InputError("the schema refers to itself without end") from None
    except OverflowError:  # a number with hundreds of digits, which no float can be compared with
        return False
    return valid
