"""Find personal data by its form: mail addresses, phone numbers, card numbers, IBANs and IP addresses."""

import ipaddress
import re
from collections.abc import Callable, Collection
from functools import partial
from typing import NamedTuple

from raymill.data.filters.options import PIIKind


class Pattern(NamedTuple):
    expression: re.Pattern[str]
    is_valid: Callable[[str], bool]
    placeholder: str


def _has_luhn_digit(text: str) -> bool:
    """Return whether the last digit is the check digit of the others (ISO/IEC 7812-1, annex B)."""
    digits = [int(one) for one in text if one.isdigit()]
    doubled = [sum(divmod(2 * digit, 10)) for digit in digits[-2::-2]]
    return 13 <= len(digits) <= 19 and len(set(digits)) > 1 and (sum(digits[-1::-2]) + sum(doubled)) % 10 == 0


def _is_iban(text: str) -> bool:
    """Return whether the check digits are right (ISO 13616)."""
    compact = text.replace(" ", "")
    number = "".join(str(int(one, 36)) for one in compact[4:] + compact[:4])
    return 15 <= len(compact) <= 34 and int(number) % 97 == 1


def _is_address(text: str) -> bool:
    """Return whether this is an IP address of the internet, not a version number such as 1.2.3.4 in a private range."""
    try:
        return ipaddress.ip_address(text).is_global
    except ValueError:
        return False


def _is_phone(text: str) -> bool:
    return 8 <= sum(map(str.isdigit, text)) <= 15


PATTERNS: dict[PIIKind, Pattern] = {
    "email": Pattern(
        re.compile(r"(?<![\w.+-])[\w.+-]{1,64}@(?:[\w-]{1,63}\.){1,8}[^\W\d_]{2,24}(?![\w-])"),
        lambda text: True,
        "<EMAIL>",
    ),
    "iban": Pattern(re.compile(r"(?i)\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?\b"), _is_iban, "<IBAN>"),
    "card": Pattern(re.compile(r"(?<![\w.-])\d(?:[ -]?\d){12,18}(?![\w-])"), _has_luhn_digit, "<CARD>"),
    "ip": Pattern(
        re.compile(
            r"(?<![\w.:])(?:\d{1,3}(?:\.\d{1,3}){3}(?!\w|\.\d)|(?:[0-9a-fA-F]{0,4}:){2,7}[0-9a-fA-F]{0,4}(?![\w:]))"
        ),
        _is_address,
        "<IP>",
    ),
    # with the country's code, or in brackets, or in groups: a bare number is more often something else
    "phone": Pattern(
        re.compile(
            r"(?<![\w.+-])(?:\+\d{1,3}[ .-]?(?:\(\d{1,4}\)[ .-]?)?|\(\d{2,5}\)[ .-]?|0\d{1,4}[ /-])"
            r"\d{2,4}(?:[ .-]?\d{2,4}){1,4}(?![\w-])"
        ),
        _is_phone,
        "<PHONE>",
    ),
}
"""In the order in which they are looked for: a card's number is no phone's."""


def replace(text: str, kinds: Collection[PIIKind]) -> str:
    """Return a text with each find replaced by a placeholder, such as <EMAIL>."""
    for kind, pattern in PATTERNS.items():
        if kind in kinds:
            text = pattern.expression.sub(partial(_replaced, pattern), text)
    return text


def _replaced(pattern: Pattern, found: re.Match[str]) -> str:
    """Return what replaces a match. Other numbers may follow what is looked for, so its beginnings are tried, too."""
    words = re.split(r"([ -])", found[0])
    for stop in range(len(words), 0, -2):
        if pattern.is_valid("".join(words[:stop])):
            return pattern.placeholder + "".join(words[stop:])
    return found[0]
