"""Why a request is not answered, as the OpenAI API says it."""

from __future__ import annotations

from typing import Any

__all__ = ["Refused", "error_object"]

_TYPES = {
    401: "authentication_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    507: "server_error",
}


class Refused(Exception):
    """Raised for a request that gets an error: its HTTP status, one line, and the field that is wrong."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        """The error object."""
        return error_object(self.status, self.message, self.param, self.code)


def error_object(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """``{"error": {...}}`` of an HTTP status."""
    kind = _TYPES.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
