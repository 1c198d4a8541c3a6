"""Dates in running text: "May 4th, 2024", "5. Mai 2024", "2024-05-04", "17.05.2021", "15/12/2025"."""

import re
from collections.abc import Iterator

_MONTH_NAMES = (
    "jan january januar janvier enero",
    "feb february februar f\u00e9vrier febrero",
    "mar march m\u00e4rz mars marzo",
    "apr april avril abril",
    "may mai mayo",
    "jun june juni juin junio",
    "jul july juli juillet julio",
    "aug august ao\u00fbt agosto",
    "sep sept september septembre septiembre",
    "oct october okt oktober octobre octubre",
    "nov november novembre noviembre",
    "dec december dez dezember d\u00e9cembre diciembre",
)
_MONTHS = {name: number for number, names in enumerate(_MONTH_NAMES, 1) for name in names.split()}
_MONTH = "|".join(sorted(_MONTHS, key=len, reverse=True))
_YEAR = r"20\d\d|199\d"
_IN_WORDS = re.compile(
    rf"\b(?:(?P<m1>{_MONTH})\.?\s+(?P<d1>[0-3]?\d)(?:st|nd|rd|th)?,?\s+(?P<y1>{_YEAR})"
    rf"|(?P<d2>[0-3]?\d)(?:st|nd|rd|th|\.)?\s+(?:de\s+)?(?P<m2>{_MONTH})\.?,?\s+(?:de\s+)?(?P<y2>{_YEAR}))\b",
    re.IGNORECASE,
)
_IN_DIGITS = re.compile(
    rf"(?<![\d./-])(?:(?P<y1>{_YEAR})-(?P<m1>\d\d)-(?P<d1>\d\d)"
    rf"|(?P<first>\d\d?)(?P<mark>[./])(?P<second>\d\d?)(?P=mark)(?P<y2>{_YEAR}))(?![\d./-]\d|\d)"
)


def dates_in_text(text: str) -> Iterator[str]:
    """Dates as YYYY-MM-DD: those with the name of a month (English, German, French, Spanish), then those in digits."""
    for match in _IN_WORDS.finditer(text):
        parts = match.groupdict()
        month, day = parts["m1"] or parts["m2"], int(parts["d1"] or parts["d2"])
        if 1 <= day <= 31:
            yield f"{parts['y1'] or parts['y2']}-{_MONTHS[month.lower()]:02d}-{day:02d}"
    for match in _IN_DIGITS.finditer(text):
        yield _in_digits(match)


def _in_digits(match: re.Match[str]) -> str:
    """Day.month.year, month/day/year; day/month/year where the second number is no month's day."""
    parts = match.groupdict()
    if parts["y1"]:
        return f"{parts['y1']}-{parts['m1']}-{parts['d1']}"
    day, month = int(parts["first"]), int(parts["second"])
    if parts["mark"] == "/" and day <= 12:
        day, month = month, day
    return f"{parts['y2']}-{month:02d}-{day:02d}" if 1 <= month <= 12 and 1 <= day <= 31 else ""
