"""A JSON body as a request. What is unknown or wrong is named, as an error or, where the policy says so, as a warning."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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
        return Parsed(kind.model_validate(served), body, warnings)
    except ValidationError as error:
        strange = _unknown(error)
        if unknown == "refuse" or not strange:
            raise _refusal(error) from error
    warnings += tuple(f"unknown field {_where(path)}" for path in strange)
    try:
        return Parsed(kind.model_validate(_without(served, strange)), body, warnings)
    except ValidationError as error:
        raise _refusal(error) from error


def _unknown(error: ValidationError) -> list[tuple[int | str, ...]]:
    """Where the fields are that are not known, those inside of others among them."""
    return [fault["loc"] for fault in error.errors(include_url=False, include_context=False) if fault["type"] == "extra_forbidden"]


def _without(value: Any, paths: Sequence[tuple[int | str, ...]]) -> Any:
    """A copy of a JSON value that lacks the fields at `paths`."""
    if not isinstance(value, dict) or not paths:
        return value
    gone = {path[0] for path in paths if len(path) == 1}
    return {name: _without(one, [path[1:] for path in paths if path[0] == name]) for name, one in value.items() if name not in gone}


def _served(kind: type[BaseModel], body: Mapping[str, Any], unknown: UnknownPolicy) -> tuple[dict[str, Any], tuple[str, ...]]:
    """What of the body this server reads, and what of the rest is not served. Fields that are null were not sent."""
    harmless: Mapping[str, tuple[Any, ...]] = getattr(kind, "not_served", {})
    left_out = []
    for name, values in harmless.items():
        value = body.get(name)
        if value is not None and not any(_same(value, one) for one in values):
            if unknown == "refuse":
                raise not_served(name, value, values)
            left_out.append(name)
    return {name: value for name, value in body.items() if name not in harmless}, tuple(f"{name} is not served" for name in left_out)


def _same(found: Any, harmless: Any) -> bool:
    """Equal, and not because True is 1 in Python."""
    return bool(found == harmless) and isinstance(found, bool) == isinstance(harmless, bool)


def _refusal(error: ValidationError) -> APIError:
    """pydantic's findings as one message. Unknown fields are all named, of other faults the first."""
    faults = error.errors(include_url=False, include_context=False)
    unknown = list(map(_where, _unknown(error)))
    if unknown:
        many, them = ("s", "them") if unknown[1:] else ("", "it")
        message = f"unknown field{many} {', '.join(unknown)}; leave {them} out, or have the server skip {them} with --unknown-fields warn"
        return APIError(400, message, "unknown_parameter", unknown[0])
    where = _where(faults[0]["loc"])
    if faults[0]["type"] == "missing":
        return APIError(400, f"{where} is missing", "missing_required_parameter", where)
    found = f", found {json.dumps(faults[0]['input'], ensure_ascii=False)[:60]}" if not isinstance(faults[0]["input"], dict) else ""
    return APIError(400, f"{where or 'a field'}: {faults[0]['msg']}{found}", "invalid_value", where or None)


def _where(path: tuple[int | str, ...]) -> str:
    return ".".join(map(str, path))
