"""A JSON Schema as rules for the JSON of its values.

Objects are written in the order in which their properties are declared, without others beside them unless the schema declares none or
has a schema for them. Keywords that no rule here says are named in `loosened`, unless they are annotations. What llama.cpp's
common/json-schema-to-grammar.cpp accepts is accepted; where it lets a keyword go without a word, this one says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from a3b_gguf.grammar.free_text import text_until
from a3b_gguf.grammar.gbnf import JSON_TEXT, MOST_REPETITIONS, NotExpressible, Ranges, Rules, either, literal, one_of, repeat, without
from a3b_gguf.grammar.keywords import ANNOTATIONS, count_in, not_said, number_in, types_of
from a3b_gguf.grammar.merge import merged
from a3b_gguf.grammar.numbers import integers, numbers
from a3b_gguf.grammar.pattern import pattern_rule
from a3b_gguf.schema_check import SchemaCheck
from a3b_gguf.strict_json import dumps

SPACE = '| " " | "\\n" [ \\t]{0,20}'
ESCAPE = r'"\\" (["\\/bfnrt] | "u" ([0-9A-Ca-cE-Fe-f] [0-9a-fA-F]{3} | [Dd] [0-7] [0-9a-fA-F]{2}))'
NUMBER = '"-"? ("0" | [1-9] [0-9]{0,14}) ("." [0-9]{1,15})? ([eE] [-+]? [0-9]{1,2})?'
INTEGER = '"-"? ("0" | [1-9] [0-9]{0,14})'
SHORT_DAYS = '"0" [1-9] | [12] [0-9]'
DAYS = (
    f'(("0" [13578] | "1" [02]) "-" ({SHORT_DAYS} | "3" [01]) | ("0" [469] | "11") "-" ({SHORT_DAYS} | "30") | "02-" ({SHORT_DAYS}))'
)
DATE = f'[0-9]{{3}} [1-9] "-" {DAYS}'
TIME = '([01] [0-9] | "2" [0-3]) ":" [0-5] [0-9] ":" [0-5] [0-9] ("." [0-9]{3})? ("Z" | [-+] ([01] [0-9] | "2" [0-3]) ":" [0-5] [0-9])'
HEX = "[0-9a-fA-F]"
UUID = f'{HEX}{{8}} "-" {HEX}{{4}} "-" {HEX}{{4}} "-" {HEX}{{4}} "-" {HEX}{{12}}'
FORMATS = {"date": DATE, "time": TIME, "date-time": f'{DATE} "T" {TIME}', "uuid": UUID}
Refs = tuple[str, ...]


class JSONRules:
    """Owns the rules that were made for one schema document. never: strings that no JSON string may spell out, the same for all
    documents that share `rules`."""

    def __init__(self, rules: Rules, root: Any, never: Sequence[str] = ()) -> None:
        self._rules, self._root, self._never = rules, root, tuple(never)
        self.loosened: list[str] = []
        self._of_ref: dict[str, str] = {}
        self._space = rules.once("space", SPACE)

    def value(self, schema: Any, path: str, refs: Refs = ()) -> str:
        """The symbol for values of `schema`. refs: references followed since the last character, which may not come round again.

        Raises NotExpressible with the path.
        """
        if schema is True or schema == {} or schema is None:
            return self.any()
        if not isinstance(schema, Mapping):
            raise NotExpressible(f"{path}: {'no value fits' if schema is False else 'this is no schema'}")
        if "$ref" in schema:
            return self._reference(schema, path, refs)
        if "allOf" in schema:
            return self.value(merged(schema, path, self.resolve), path, refs)
        for key in ("anyOf", "oneOf"):
            if key in schema:
                return self._alternatives(schema, key, path, refs)
        if "const" in schema or "enum" in schema:
            return self._constants(schema, path)
        return self._typed(schema, path)

    def any(self) -> str:
        """Any JSON value."""
        rules, space = self._rules, self._space
        if "json-value" not in rules:
            rules.set("json-value", "")
            member = f'{self.string()} {space} ":" {space} json-value'
            rules.set("json-object", f'"{{" {space} ({member} ("," {space} {member})*)? {space} "}}"')
            rules.set("json-array", f'"[" {space} (json-value ("," {space} json-value)*)? {space} "]"')
            rules.set("json-value", f'json-object | json-array | {self.string()} | {self._number()} | "true" | "false" | "null"')
        return "json-value"

    def object(self) -> str:
        """Any JSON object."""
        self.any()
        return "json-object"

    def string(self) -> str:
        """Any JSON string."""
        if "json-string" not in self._rules:
            escape = self._rules.once("json-escape", ESCAPE)
            inner = text_until(self._rules, "json-text", '"', JSON_TEXT, self._never, (escape,))
            self._rules.set("json-string", f'"\\"" {inner}')
        return "json-string"

    def _number(self) -> str:
        return self._rules.once("json-number", NUMBER)

    @property
    def _characters(self) -> Ranges:
        """For strings whose characters are counted or matched: none that could begin what may not be spelled."""
        return without(JSON_TEXT, {string[0] for string in self._never})

    # -- combinations ----------------------------------------------------------------------------------------------------

    def resolve(self, reference: Any, path: str) -> Any:
        """What a `$ref` points at. Raises NotExpressible."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise NotExpressible(f"{path}: $ref {str(reference)[:60]!r} points outside of the schema")
        found = self._root
        for part in reference[1:].split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            inside = found[int(key)] if isinstance(found, list) and key.isdecimal() and int(key) < len(found) else None
            found = found.get(key) if isinstance(found, Mapping) else inside
            if found is None:
                raise NotExpressible(f"{path}: $ref {reference[:60]!r} points at nothing")
        return found

    def _reference(self, schema: Mapping[str, Any], path: str, refs: Refs) -> str:
        reference = schema["$ref"]
        target = self.resolve(reference, path)
        if reference in refs:
            raise NotExpressible(f"{path}: $ref {reference[:60]!r} comes back to itself with nothing between")
        beside = {key: value for key, value in schema.items() if key not in ANNOTATIONS and key != "$ref"}
        if beside:
            return self.value(merged({"allOf": [target, beside]}, path, self.resolve), path, (*refs, reference))
        if reference not in self._of_ref:
            name = self._of_ref[reference] = self._rules.reserve("ref-" + reference.rpartition("/")[2])
            try:
                self._rules.set(name, self.value(target, reference, (*refs, reference)))
            except NotExpressible:
                del self._of_ref[reference]
                raise
        return self._of_ref[reference]

    def _alternatives(self, schema: Mapping[str, Any], key: str, path: str, refs: Refs) -> str:
        inner = schema[key]
        if not isinstance(inner, list) or not inner:
            raise NotExpressible(f"{path}: {key} is no list of schemas")
        beside = {name: value for name, value in schema.items() if name != key and name not in ANNOTATIONS}
        found = []
        for index, alternative in enumerate(inner):
            whole = merged({"allOf": [beside, alternative]}, path, self.resolve) if beside else alternative
            found.append(self.value(whole, f"{path}.{key}[{index}]", refs))
        if key == "oneOf" and not _apart(inner):
            self._loosen(path, "oneOf: that no second alternative fits too")
        return either(found)

    def _constants(self, schema: Mapping[str, Any], path: str) -> str:
        members = schema["enum"] if "enum" in schema else [schema["const"]]
        if not isinstance(members, list):
            raise NotExpressible(f"{path}: enum is no list")
        if "enum" in schema and "const" in schema:
            members = [member for member in members if member == schema["const"]]
        check = SchemaCheck({key: value for key, value in schema.items() if key not in ANNOTATIONS})
        fitting = [member for member in members if check.problem(member) is None]
        written = [dumps(member) for member in fitting]
        if any(string in text for text in written for string in self._never) or not written:
            raise NotExpressible(f"{path}: no value of the enum can be written")
        return either([literal(text) for text in written])

    # -- types -----------------------------------------------------------------------------------------------------------

    def _typed(self, schema: Mapping[str, Any], path: str) -> str:
        types = types_of(schema)
        for keyword in not_said(schema, types):
            self._loosen(path, keyword)
        if not types:
            return self.any()
        return either([self._of_type(kind, schema, path) for kind in types])

    def _of_type(self, kind: str, schema: Mapping[str, Any], path: str) -> str:
        if kind == "null":
            return '"null"'
        if kind == "boolean":
            return '("true" | "false")'
        if kind in ("integer", "number"):
            return self._bounded(kind, schema, path)
        if kind == "string":
            return self._bounded_string(schema, path)
        return self._array(schema, path) if kind == "array" else self._object(schema, path)

    def _bounded(self, kind: str, schema: Mapping[str, Any], path: str) -> str:
        least, most, above, below = (number_in(schema, key) for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
        if (least, most, above, below) == (None, None, None, None):
            return self._number() if kind == "number" else self._rules.once("json-integer", INTEGER)
        if kind == "integer":
            return self._rules.add(path, integers(_whole_bound(least, above, 1), _whole_bound(most, below, -1)))
        try:
            return self._rules.add(path, numbers(least, most, above, below))
        except NotExpressible as error:
            self._loosen(path, str(error))
            return self._number()

    def _bounded_string(self, schema: Mapping[str, Any], path: str) -> str:
        least, most, pattern = count_in(schema, "minLength") or 0, count_in(schema, "maxLength"), schema.get("pattern")
        if isinstance(pattern, str):
            if least or most is not None:
                self._loosen(path, "minLength and maxLength beside pattern")
            try:
                return self._rules.add(path, f'"\\"" {pattern_rule(pattern, self._characters, _in_json)} "\\""')
            except NotExpressible as error:
                self._loosen(path, str(error))
                return self.string()
        if schema.get("format") in FORMATS:
            return self._rules.once("json-" + schema["format"], f'"\\"" {FORMATS[schema["format"]]} "\\""')
        least, most = self.countable(least, most, path, "characters")
        if not least and most is None:
            return self.string()
        escape = self._rules.once("json-escape", ESCAPE)
        character = self._rules.once("json-character", f"{one_of(self._characters)} | {escape}")
        return self._rules.add(path, f'"\\"" {repeat(character, least, most)} "\\""')

    def _array(self, schema: Mapping[str, Any], path: str) -> str:
        space, comma = self._space, f'"," {self._space}'
        items, first = schema.get("items"), schema.get("prefixItems")
        if isinstance(first, Mapping):  # no JSON Schema, and common: one schema for all of them
            items, first = first, None
        if isinstance(items, list):  # draft 4 to 2019-09 called the first items so
            items, first = schema.get("additionalItems"), items
        least, most = self.countable(count_in(schema, "minItems") or 0, count_in(schema, "maxItems"), path, "items")
        if first:
            return self._tuple(first, items, least, path)
        if items is False or most == 0:
            if least:
                raise NotExpressible(f"{path}: at least {least} items of none")
            return f'"[" {space} "]"'
        item = self.value(items, f"{path}[]")
        if least == 0:
            more = repeat(f"({comma} {item})", 0, None if most is None else most - 1)
            return self._rules.add(path, f'"[" {space} ({item} {more})? {space} "]"')
        more = repeat(f"({comma} {item})", least - 1, None if most is None else most - 1)
        return self._rules.add(path, f'"[" {space} {item} {more} {space} "]"')

    def _tuple(self, first: Any, items: Any, least: int, path: str) -> str:
        """All of the first items, and no others unless more are demanded."""
        if not isinstance(first, list):
            raise NotExpressible(f"{path}: prefixItems is no list")
        wanted = [self.value(inner, f"{path}[{index}]") for index, inner in enumerate(first)]
        if least > len(wanted):
            wanted += [self.value(items, f"{path}[]")] * (least - len(wanted))
        return self._rules.add(path, f'"[" {self._space} ' + f' "," {self._space} '.join(wanted) + f' {self._space} "]"')

    def _object(self, schema: Mapping[str, Any], path: str) -> str:
        declared, required = schema.get("properties"), schema.get("required")
        properties = dict(declared) if isinstance(declared, Mapping) else {}
        demanded = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
        others = schema.get("additionalProperties", True)
        for name in demanded:
            if others is False and name not in properties:
                raise NotExpressible(f"{path}: property {name!r} is required and not allowed")
            properties.setdefault(name, others)
        if not properties:
            return self._map(others, path)
        return self._members(properties, set(demanded), path)

    def _map(self, others: Any, path: str) -> str:
        if others is False:
            return f'"{{" {self._space} "}}"'
        if others is True or others == {}:
            return self.object()
        member = f'{self.string()} {self._space} ":" {self._space} {self.value(others, path + ".*")}'
        return self._rules.add(path, f'"{{" {self._space} ({member} ("," {self._space} {member})*)? {self._space} "}}"')

    def _members(self, properties: Mapping[str, Any], required: set[str], path: str) -> str:
        """Members in order; one rule for each place with nothing written yet, and one with something."""
        space, end = self._space, f'{self._space} "}}"'
        fresh, behind = end, end
        for name, schema in reversed(list(properties.items())):
            if any(string in dumps(name) for string in self._never):
                raise NotExpressible(f"{path}: the property {name[:60]!r} cannot be written")
            try:
                value = self.value(schema, f"{path}.{name}")
            except NotExpressible:
                if name in required:
                    raise
                continue  # an optional member that no value fits is never there
            member = f'{literal(dumps(name))} {space} ":" {space} {value} {self._as_symbol(behind, path)}'
            optional = name not in required
            fresh = member + (f" | {fresh}" if optional else "")
            behind = f'"," {space} {member}' + (f" | {behind}" if optional else "")
            fresh, behind = (self._rules.add(f"{path}-{name}", each) for each in (fresh, behind))
        return self._rules.add(path, f'"{{" {space} {fresh}')

    def _as_symbol(self, body: str, path: str) -> str:
        return body if " " not in body else f"({body})"

    def countable(self, least: int, most: int | None, path: str, what: str) -> tuple[int, int | None]:
        """Bounds that llama.cpp can count to; what goes beyond is loosened."""
        if most is not None and most > MOST_REPETITIONS:
            self._loosen(path, f"at most {most} {what}: llama.cpp counts to {MOST_REPETITIONS}")
            most = None
        if least > MOST_REPETITIONS:
            self._loosen(path, f"at least {least} {what}: llama.cpp counts to {MOST_REPETITIONS}")
            least = MOST_REPETITIONS
        return least, most

    def _loosen(self, path: str, what: str) -> None:
        self.loosened.append(f"{path}: {what}")


def _in_json(code: int) -> str:
    return literal(dumps(chr(code))[1:-1])


def _apart(alternatives: Sequence[Any]) -> bool:
    """Whether the alternatives are of different types, so that no value fits two."""
    kinds = [alternative.get("type") for alternative in alternatives if isinstance(alternative, Mapping)]
    names = ["number" if kind == "integer" else kind for kind in kinds if isinstance(kind, str)]
    return len(names) == len(alternatives) == len(set(names))


def _whole_bound(closed: float | None, opened: float | None, step: int) -> int | None:
    """The integer bound; step 1 for a lower one, -1 for an upper one."""
    round_inward, pick = (math.ceil, max) if step > 0 else (math.floor, min)
    bounds = [] if closed is None else [round_inward(closed)]
    if opened is not None:
        bounds.append(round_inward(opened) + step if opened == round_inward(opened) else round_inward(opened))
    return pick(bounds) if bounds else None
