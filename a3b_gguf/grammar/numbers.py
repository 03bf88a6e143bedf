"""Numbers within bounds, as rules over their digits."""

from __future__ import annotations

import math
from collections.abc import Callable

from a3b_gguf.grammar.gbnf import NotExpressible, either, literal

LARGEST = 10**15 - 1  # what every reader of JSON keeps exactly as a float; numbers without a bound end here
MOST_DECIMALS = 15


def integers(least: int | None, most: int | None) -> str:
    """Integers from `least` to `most`, written without leading zeros. Raises NotExpressible when there is none."""
    least = -LARGEST if least is None else max(least, -LARGEST)
    most = LARGEST if most is None else min(most, LARGEST)
    if least > most:
        raise NotExpressible(f"no integer lies between {least} and {most}")
    signs = []
    if least < 0:
        signs.append('"-" ' + _naturals(max(1, -most), -least))
    if most >= 0:
        signs.append(_naturals(max(0, least), most))
    return either(signs)


def numbers(least: float | None, most: float | None, above: float | None, below: float | None) -> str:
    """Decimal numbers, least <= x <= most and above < x < below. Raises NotExpressible when a bound is too fine to be said."""
    low, low_open = _tighter(least, above, max, -LARGEST)
    high, high_open = _tighter(most, below, min, LARGEST)
    signs = []
    if low < 0:
        signs += [f'"-" {part}' for part in _positive(max(0.0, -high), -low, high_open and high <= 0, low_open)]
    if high >= 0:
        signs += _positive(max(0.0, low), high, low_open and low >= 0, high_open)
    if not signs:
        raise NotExpressible(f"numbers between {low} and {high}")
    return either(signs)


def _tighter(closed: float | None, opened: float | None, choose: Callable[[float, float], float], otherwise: float) -> tuple[float, bool]:
    """The bound that decides, and whether it is excluded itself."""
    if closed is None and opened is None:
        return otherwise, False
    if opened is None or closed is None:
        return (otherwise if closed is None else closed, False) if opened is None else (opened, True)
    bound = choose(closed, opened)
    return bound, bound == opened


def _positive(low: float, high: float, low_open: bool, high_open: bool) -> list[str]:
    """Numbers from low to high, both at least 0: whole parts with any decimals, and the ends by themselves."""
    first, last = math.ceil(low), math.floor(high)
    fraction = f'("." [0-9]{{1,{MOST_DECIMALS}}})?'
    found = []
    if low_open and first == low:
        if first < last:
            found.append(f'{literal(str(first))} "." [0-9]{{0,{MOST_DECIMALS - 1}}} [1-9]')
        first += 1
    if first < last:
        found.append(f"{_naturals(first, last - 1)} {fraction}")
    if first <= last and not (high_open and last == high):
        found.append(literal(str(last)))
    return found or _decimals_below_one(low, high, low_open, high_open)


def _decimals_below_one(low: float, high: float, low_open: bool, high_open: bool) -> list[str]:
    """Within [0, 1], on the coarsest grid of decimals that has a point there."""
    for n_digits in range(1, 5):
        scale = 10**n_digits
        first, last = math.ceil(low * scale), math.floor(high * scale)
        first += low_open and first == low * scale
        last -= high_open and last == high * scale
        if 0 <= first <= last < scale:
            return [f'"0." {_same_length(f"{first:0{n_digits}}", f"{last:0{n_digits}}")}']
    return []


def _naturals(least: int, most: int) -> str:
    alternatives = []
    for n_digits in range(len(str(least)), len(str(most)) + 1):
        first, last = max(least, 10 ** (n_digits - 1) if n_digits > 1 else 0), min(most, 10**n_digits - 1)
        alternatives.append(_same_length(str(first), str(last)))
    return either(alternatives)


def _same_length(first: str, last: str) -> str:
    """Digits from `first` to `last`, which are equally long."""
    if first == last:
        return literal(first)
    if first[0] == last[0]:
        return f"{literal(first[0])} {_same_length(first[1:], last[1:])}"
    n_rest = len(first) - 1
    if not n_rest:
        return _digit(first, last)
    alternatives, low, high = [], int(first[0]), int(last[0])
    if int(first[1:]) > 0:
        alternatives.append(f"{literal(first[0])} {_same_length(first[1:], '9' * n_rest)}")
        low += 1
    if last[1:] != "9" * n_rest:
        high -= 1
    if low <= high:
        alternatives.append(f"{_digit(str(low), str(high))} [0-9]{{{n_rest}}}")
    if last[1:] != "9" * n_rest:
        alternatives.append(f"{literal(last[0])} {_same_length('0' * n_rest, last[1:])}")
    return either(alternatives)


def _digit(first: str, last: str) -> str:
    return literal(first) if first == last else f"[{first}-{last}]"
