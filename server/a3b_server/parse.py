"""A JSON body as a request. What is unknown or wrong is named, as an error or, where the policy says so, as a warning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from a3b_gguf.prompt import verify_body
from a3b_server.errors import APIError
from a3b_server.refusals import refuse_errors
from a3b_server.schema import not_served
from a3b_server.service import UnknownPolicy

Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Parsed(Generic[Model]):
    """warnings: fields that were left out, for a header. body: as it was sent, for the rules that judge it."""

    request: Model
    body: dict[str, Any]
    warnings: tuple[str, ...]


def read_json(data: bytes) -> dict[str, Any]:
    """The JSON object that a client sent. Raises APIError 400 with the rule that its bytes break."""
    value, findings = verify_body(data)
    refuse_errors(findings)
    if not isinstance(value, dict):
        raise APIError(400, f"the body must be a JSON object, not {type(value).__name__}", "invalid_json")
    return value


def parse(kind: type[Model], body: dict[str, Any], unknown: UnknownPolicy = "refuse") -> Parsed[Model]:
    """The request in `body`. Raises APIError 400 that names the field."""
    served, warnings = _served(kind, body, unknown)
    try:
        request = kind.model_validate(served)
    except ValidationError as error:
        raise _refusal(error) from error
    return Parsed(request, body, warnings)


def _served(kind: type[BaseModel], body: Mapping[str, Any], unknown: UnknownPolicy) -> tuple[dict[str, Any], tuple[str, ...]]:
    """What of the body this server reads, and what it leaves out. Fields that are null were not sent."""
    harmless: Mapping[str, tuple[Any, ...]] = getattr(kind, "not_served", {})
    left_out = []
    for name, values in harmless.items():
        value = body.get(name)
        if value is not None and not any(_same(value, one) for one in values):
            if unknown == "refuse":
                raise not_served(name, value, values)
            left_out.append(name)
    known = {name: value for name, value in body.items() if name not in harmless}
    strange = [name for name in known if name not in _names(kind)]
    if unknown == "warn":
        left_out += strange
        known = {name: value for name, value in known.items() if name not in strange}
    return known, tuple(f"unknown field {name}" if name in strange else f"{name} is not served" for name in left_out)


def _names(kind: type[BaseModel]) -> set[str]:
    return {field.alias or name for name, field in kind.model_fields.items()}


def _same(found: Any, harmless: Any) -> bool:
    """Equal, and not because True is 1 in Python."""
    return bool(found == harmless) and isinstance(found, bool) == isinstance(harmless, bool)


def _refusal(error: ValidationError) -> APIError:
    """pydantic's findings as one message. Unknown fields are all named, of other faults the first."""
    faults = error.errors(include_url=False, include_context=False)
    unknown = [_where(fault["loc"]) for fault in faults if fault["type"] == "extra_forbidden"]
    if unknown:
        return APIError(400, f"unknown field{'s' if unknown[1:] else ''} {', '.join(unknown)}", "unknown_parameter", unknown[0])
    where = _where(faults[0]["loc"])
    if faults[0]["type"] == "missing":
        return APIError(400, f"{where} is missing", "missing_required_parameter", where)
    found = f", found {str(faults[0]['input'])[:60]!r}" if not isinstance(faults[0]["input"], dict) else ""
    return APIError(400, f"{where or 'a field'}: {faults[0]['msg']}{found}", "invalid_value", where or None)


def _where(path: tuple[int | str, ...]) -> str:
    return ".".join(map(str, path))
