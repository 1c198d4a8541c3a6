"""Divisors of a number: what error messages suggest and what the planner tries."""

from math import isqrt


def divisors(number: int) -> list[int]:
    """12 -> [1, 2, 3, 4, 6, 12]."""
    small = [candidate for candidate in range(1, isqrt(number) + 1) if number % candidate == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def nearest(values: list[int], wanted: int) -> int:
    """The value next to the wanted one, the smaller of two. [1, 2, 4, 8], 6 -> 4."""
    return min(values, key=lambda value: (abs(value - wanted), value))
