"""Rules from the command line: `--tensor-type REGEX=TYPE` and `--group-size ROLE=N`. They come before every rule of a file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches

from a3b_gguf.errors import UsageError
from a3b_gguf.llama.ggml import WRITABLE
from a3b_gguf.tensors import TYPES
from a3b_quantize.kernels import GROUP_SIZES
from a3b_quantize.policy_file import KEEP
from a3b_quantize.rule import Rule, expand_roles, known_roles

TENSOR_TYPE, GROUP_SIZE = "--tensor-type", "--group-size"


def override_rules(tensor_types: Sequence[str], group_sizes: Sequence[str]) -> tuple[Rule, ...]:
    """One rule for each flag, in the order given: as everywhere, the first that matches wins. Raises UsageError for a flag that is none."""
    return (*map(tensor_type_rule, tensor_types), *map(group_size_rule, group_sizes))


def tensor_type_rule(text: str) -> Rule:
    """`REGEX=TYPE`: the regular expression is looked for anywhere in the name, with its case; ^ and $ are the name's ends."""
    where = f"{TENSOR_TYPE} {text}"
    regex, equals, name = text.rpartition("=")
    if not equals or not regex:
        raise UsageError(f"{where}: expected REGEX=TYPE", r"write it like 'blk\.[0-3]\.ffn_down_exps=q5_k'")
    try:
        re.compile(regex)
    except re.error as error:
        raise UsageError(
            f"{where}: {regex!r} is no regular expression: {error}", "put a backslash before characters with a meaning"
        ) from error
    kinds = [kind.name for kind in WRITABLE]
    if name.lower() not in (*kinds, KEEP):
        near = get_close_matches(name.lower(), kinds, 1)
        asked = f"; did you mean {near[0]}?" if near else ""
        raise UsageError(f"{where}: there is no type {name!r}{asked}", f"known: {', '.join(kinds)}, {KEEP}")
    keep = name.lower() == KEEP
    return Rule(where, regex=regex, type=None if keep else TYPES[name.lower()], keep=keep, why=where)


def group_size_rule(text: str) -> Rule:
    """`ROLE=N`: how many weights share a scale in the tensors of a role."""
    where = f"{GROUP_SIZE} {text}"
    role, equals, size = text.partition("=")
    if not equals or not role:
        raise UsageError(f"{where}: expected ROLE=N", "write it like ffn=64")
    if role not in known_roles():
        near = get_close_matches(role, known_roles(), 1)
        asked = f"; did you mean {near[0]}?" if near else ""
        raise UsageError(f"{where}: there is no role {role!r}{asked}", f"known: {', '.join(known_roles())}")
    if size not in map(str, GROUP_SIZES):
        raise UsageError(f"{where}: {size!r} is no group size", f"known: {', '.join(map(str, GROUP_SIZES))}")
    return Rule(where, roles=expand_roles([role]), group_size=int(size), why=where)
