"""Tasks for instruct models, without dependencies. Prompts and answers are printable ASCII.

protocol/06-tasks.md specifies them: every draw follows from a hash of the question's address.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from swarmnode.tasks.builtin import Item
from swarmnode.tasks.statement import states

VERSION = "2"
"""Part of the version of every task here. Change it when a prompt, an answer or a reward below, or
`statement.states`, changes."""
T = TypeVar("T")
_JSON_ANSWER = re.compile(r"(?as)\s*(?:`{3}(?:json)?\s*)?(\{.*\})\s*(?:`{3}\s*)?")

NAMES = (
    "Adam Alice Amir Anna Ben Bruno Carla Chen Clara Daniel David Diana Elena Emma Eric"
    " Fatima Frank George Grace Greta Henry Ines Jack Jonas Julia Karim Karin Kofi Laura Leo"
    " Lina Lucas Maria Mei Mina Nadia Nils Nora Olga Oscar Paul Petra Priya Rachel Ravi Rosa"
    " Samuel Sara Simon Sofia Stefan Tariq Theo Thomas Vera Victor Yuki Zoe"
)
CITIES = (
    "Accra Amsterdam Bangkok Berlin Bogota Boston Budapest Cairo Chicago Dakar Dallas Delhi"
    " Denver Dubai Dublin Hamburg Hanoi Helsinki Istanbul Jakarta Lagos Lisbon London Madrid"
    " Melbourne Miami Montreal Moscow Osaka Paris Porto Prague Rome Seattle Sydney Tokyo"
    " Toronto Vienna Warsaw"
)
"""Names and cities that SmolLM2-135M copies in most answers, once it has learned to write JSON
(benchmarks/RESULTS.md)."""
PEOPLE = (
    "{name} is {age} years old and lives in {city}.",
    "{name} lives in {city} and is {age} years old.",
    "{name}, who is {age} years old, lives in {city}.",
    "My friend {name} from {city} is {age} years old.",
    "In {city} lives {name}, who is {age} years old.",
    "{name} turned {age} this year and moved to {city}.",
)
DATES = (
    "Rewrite this date in the format YYYY-MM-DD: {month} {day}, {year}",
    "Write the date {day} {month} {year} in the form YYYY-MM-DD.",
)
UNITS = (
    ("meters", "centimeters", 100),
    ("meters", "decimeters", 10),
    ("centimeters", "millimeters", 10),
    ("decimeters", "centimeters", 10),
    ("liters", "centiliters", 100),
    ("liters", "deciliters", 10),
    ("quintals", "kilograms", 100),
    ("dollars", "cents", 100),
    ("euros", "cents", 100),
    ("dimes", "cents", 10),
    ("centuries", "years", 100),
    ("decades", "years", 10),
)
MONTHS = "January February March April May June July August September October November December"
SUMS = ("addition", "problem")
RESULT = "Give only the result as your final answer."
"""Wording with which SmolLM2-135M most often answers with an equation, and then ends."""


class Draws:
    """Numbers that follow from the name of a task and an address: at most 32."""

    def __init__(self, name: str, address: int) -> None:
        text = f"swarmnode/chat/{name}/{address}"
        self._digest = hashlib.blake2b(text.encode(), digest_size=64).digest()
        self._used = 0

    def below(self, limit: int) -> int:
        """Return a number from 0 to `limit` - 1."""
        drawn = int.from_bytes(self._digest[self._used : self._used + 2], "big")
        self._used += 2
        return drawn % limit

    def choose(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def word(self, text: str) -> str:
        return self.choose(text.split())


def json_fields_item(address: int) -> Item:
    """Return a sentence about a person, to be written as a JSON object."""
    draws = Draws("json_fields", address)
    person = {
        "name": draws.word(NAMES),
        "age": 18 + draws.below(72),
        "city": draws.word(CITIES),
    }
    sentence = draws.choose(PEOPLE).format(**person)
    prompt = f"{sentence}\nWrite this as a JSON object with the keys name, age and city."
    return Item(prompt, json.dumps(person), lambda text: float(is_json_of(person, text)))


def date_item(address: int) -> Item:
    """Return a date, to be written as YYYY-MM-DD."""
    draws = Draws("date", address)
    day, month, year = 1 + draws.below(28), draws.below(12), 1900 + draws.below(150)
    name, answer = MONTHS.split()[month], f"{year}-{month + 1:02}-{day:02}"
    prompt = draws.choose(DATES).format(day=day, month=name, year=year)
    return Item(prompt, answer, lambda text: float(states(text, answer)))


def units_item(address: int) -> Item:
    """Return a quantity, to be written in a smaller unit."""
    draws = Draws("units", address)
    count, (unit, smaller, factor) = 2 + draws.below(74), draws.choose(UNITS)
    terms = f"{count} {unit} are {count} times {factor} {smaller}"
    return _number(f"Solve the following multiplication: {terms}. {RESULT}", count * factor)


def sum_item(address: int) -> Item:
    """Return a sum of two numbers."""
    draws = Draws("sum", address)
    one, other = 1 + draws.below(20), 1 + draws.below(20)
    wanted = draws.choose(SUMS)
    return _number(f"Solve the following {wanted}: {one} plus {other}. {RESULT}", one + other)


def _number(prompt: str, result: int) -> Item:
    answer = str(result)
    return Item(prompt, answer, lambda text: float(states(text, answer)))


GENERATORS: dict[str, Callable[[int], Item]] = {
    "json_fields": json_fields_item,
    "date": date_item,
    "units": units_item,
    "sum": sum_item,
}


def is_json_of(fields: dict[str, object], text: str) -> bool:
    """Return True if the text is a JSON object with these fields, in a fenced block or not, and
    nothing else. Other text would change no reward, so peers could teach it.
    """
    found = _JSON_ANSWER.fullmatch(text)
    try:
        pairs = json.loads(found[1], object_pairs_hook=list) if found else []
    except (ValueError, RecursionError):
        return False
    return len(pairs) == len(fields) and dict(pairs) == fields
