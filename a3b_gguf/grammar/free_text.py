"""Text that may hold anything but some strings, up to the string that ends it: a finite automaton written as rules.

The states are those of Aho and Corasick's matcher (1975): how much of which string the end of the text so far spells.
"""

from __future__ import annotations

from collections.abc import Sequence

from a3b_gguf.grammar.gbnf import Ranges, Rules, literal, one_of, without


def text_until(rules: Rules, name: str, end: str, allowed: Ranges, never: Sequence[str] = (), atoms: Sequence[str] = ()) -> str:
    """The rule for text of `allowed` characters without the strings `never`, and the `end` behind it, which occurs only there.

    A string of `never` may be part of the end. atoms: further symbols that may stand anywhere in the text and spell nothing, such as the
    escapes of a JSON string.
    """
    strings = (end, *never)
    states = _states(strings)
    names = {state: rules.reserve(f"{name}-{index}" if state else name) for index, state in enumerate(states)}
    alphabet = sorted({character for string in strings for character in string})
    for state in states:
        if any(string in state for string in never):  # only the end can go on from here
            following = end[len(state)]
            target = state + following
            rules.set(names[state], literal(following) + ("" if target == end else f" {names[target]}"))
            continue
        alternatives, special = [], set[str]()
        for character in alphabet:
            found = state + character
            target = _longest(found, states)
            if any(found.endswith(string) and string not in target for string in never):
                special.add(character)
            elif found.endswith(end):
                special.add(character)
                alternatives.append(literal(character))
            elif target:
                special.add(character)
                alternatives.append(f"{literal(character)} {names[target]}")
        alternatives.append(f"{one_of(without(allowed, special))} {names['']}")
        alternatives += [f"{atom} {names['']}" for atom in atoms]
        rules.set(names[state], " | ".join(alternatives))
    return names[""]


def _states(strings: Sequence[str]) -> list[str]:
    """Every beginning of a string that is not all of it; the empty one first."""
    return sorted({string[:n] for string in strings for n in range(len(string))}, key=lambda state: (len(state), state))


def _longest(text: str, states: Sequence[str]) -> str:
    """The longest state that `text` ends with."""
    return max((state for state in states if text.endswith(state)), key=len)
