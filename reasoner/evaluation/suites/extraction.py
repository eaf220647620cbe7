"""Extraction: a message, a JSON schema, and the data of the message as JSON that is valid under the schema.

Values and sentences are generated; a message also tells of things that the schema does not ask for, some of them close
to what it asks for. An answer is right if it is valid and equal to the data as JSON. Licence: that of this repository.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, timedelta
from functools import partial
from typing import Any

from reasoner.answers.equivalence import Equivalence
from reasoner.answers.json_schema import is_valid_json
from reasoner.answers.spec import AnswerSpec
from reasoner.evaluation.suites.problem import Problem, hash_problem
from reasoner.evaluation.suites.suite import Suite
from reasoner.jobs.constraint_spec import ConstraintSpec

TEMPERATURE = 0.7

PEOPLE = ("Mia Berg", "Tom Okafor", "Ana Silva", "Ben Weiss", "Lea Novak", "Max Dubois", "Ida Holm", "Raj Patel")
CITIES = ("Lisbon", "Oslo", "Graz", "Lyon", "Ghent", "Turin", "Riga", "Bergen")
GOODS = ("lamp", "kettle", "chair", "rug", "clock", "mirror", "shelf", "vase")
TITLES = ("budget review", "site visit", "design session", "safety briefing")
TEXT, WHOLE, NUMBER, YES_OR_NO = ({"type": kind} for kind in ("string", "integer", "number", "boolean"))
DAY = {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$"}
TIME = {"type": "string", "pattern": "^[0-9]{2}:[0-9]{2}$"}


@dataclass(frozen=True, slots=True)
class Message:
    """The data of a message, and its sentences, which may stand in any order."""

    data: dict[str, Any]
    sentences: tuple[str, ...]


def _make_schema(**properties: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an object with exactly these members."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


BOOKING = _make_schema(guest=TEXT, city=TEXT, arrival=DAY, nights=WHOLE, breakfast=YES_OR_NO, price=NUMBER)
ORDER = _make_schema(
    customer=TEXT,
    items={"type": "array", "items": _make_schema(name=TEXT, quantity=WHOLE, price=NUMBER)},
    express=YES_OR_NO,
    total=NUMBER,
)
MEETING = _make_schema(
    title=TEXT,
    day=DAY,
    start=TIME,
    place=_make_schema(building=TEXT, room=WHOLE),
    people={"type": "array", "items": TEXT},
    status={"enum": ["planned", "moved", "cancelled"]},
)


def _write_booking(rng: random.Random) -> Message:
    guest, other = rng.sample(PEOPLE, 2)
    city, elsewhere = rng.sample(CITIES, 2)
    arrival, nights, price = _sample_day(rng), rng.randint(2, 9), _sample_price(rng)
    has_breakfast = rng.random() < 0.5
    return Message(
        {
            "guest": guest,
            "city": city,
            "arrival": arrival.isoformat(),
            "nights": nights,
            "breakfast": has_breakfast,
            "price": price,
        },
        (
            f"Please book a room in {city} for {guest}.",
            f"The guest arrives on {_write_day(arrival)} and leaves {nights} nights later.",
            "Breakfast is included." if has_breakfast else "No breakfast is needed.",
            f"The whole stay costs {price:.2f} euros.",
            f"{other} stayed in {elsewhere} last month for {_sample_price(rng):.2f} euros.",
        ),
    )


def _write_order(rng: random.Random) -> Message:
    customer, other = rng.sample(PEOPLE, 2)
    *names, returned = rng.sample(GOODS, rng.randint(3, 5))
    rows = [(name, rng.randint(1, 9), _sample_price(rng)) for name in names]
    is_express = rng.random() < 0.5
    items = [{"name": name, "quantity": quantity, "price": price} for name, quantity, price in rows]
    total = round(sum(quantity * price for _, quantity, price in rows), 2)
    lines = [f"{quantity} × {name} at {price:.2f} euros" for name, quantity, price in rows]
    return Message(
        {"customer": customer, "items": items, "express": is_express, "total": total},
        (
            f"{customer} orders: {'; '.join(lines)}.",
            f"All of it comes to {total:.2f} euros.",
            "It is urgent, so send it by express." if is_express else "Ordinary delivery will do.",
            f"{other} has sent back a {returned} that cost {_sample_price(rng):.2f} euros.",
        ),
    )


def _write_meeting(rng: random.Random) -> Message:
    *people, absent = rng.sample(PEOPLE, rng.randint(3, 5))
    title, day, hour, minute = rng.choice(TITLES), _sample_day(rng), rng.randint(8, 17), rng.choice((0, 15, 30, 45))
    building, room = rng.choice(("North Wing", "Old Mill", "Harbour House")), rng.randint(101, 420)
    earlier = day - timedelta(days=rng.randint(1, 6))
    status = rng.choice(("planned", "moved", "cancelled"))
    clock = f"{hour % 12 or 12}:{minute:02} {'p.m.' if hour >= 12 else 'a.m.'}"
    told = {
        "planned": f"The {title} is on {_write_day(day)}.",
        "moved": f"The {title} was to be on {_write_day(earlier)}, but has been moved to {_write_day(day)}.",
        "cancelled": f"The {title} of {_write_day(day)} has been cancelled.",
    }
    return Message(
        {
            "title": title,
            "day": day.isoformat(),
            "start": f"{hour:02}:{minute:02}",
            "place": {"building": building, "room": room},
            "people": people,
            "status": status,
        },
        (
            told[status],
            f"It was set for {clock}, room {room} of {building}.",
            f"Invited were, in this order, {', '.join(people)}.",
            f"{absent} had not been asked.",
        ),
    )


def _sample_day(rng: random.Random) -> date:
    return date(2026, 1, 1) + timedelta(days=rng.randrange(365))


def _write_day(day: date) -> str:
    return f"{day.day} {day:%B} {day.year}"


def _sample_price(rng: random.Random) -> float:
    return rng.randint(500, 40_000) / 100


KINDS: dict[str, tuple[dict[str, Any], Callable[[random.Random], Message]]] = {
    "flat": (BOOKING, _write_booking),
    "list": (ORDER, _write_order),
    "nested": (MEETING, _write_meeting),
}
"""Schema and writer of each level."""


def generate_problem(seed: int | str, level: str, *, is_held: bool = False) -> Problem:
    """Generate a problem, deterministically from the arguments. ``is_held``: its job holds solutions to the schema."""
    rng = random.Random(f"extraction/{level}/{seed}")
    schema, write = KINDS[level]
    message = write(rng)
    text = " ".join(rng.sample(message.sentences, len(message.sentences)))
    answer = json.dumps(message.data)
    return Problem(
        id=f"extraction-{level}-{hash_problem(answer + text):016x}",
        suite="extraction",
        level=level,
        text=f"Write the data of the message as JSON that is valid under the schema.\n\n"
        f"Schema: {json.dumps(schema)}\n\nMessage: {text}",
        answer=answer,
        data={"schema": schema},
        constraint=ConstraintSpec(json_schema=schema) if is_held else None,
    )


async def check(problem: Problem, answer: str, equal: Equivalence) -> bool:
    """Return True if the answer is equal to the data as JSON, and valid under the schema."""
    return await equal.are_same(answer, problem.answer, "json") and await is_valid_json(answer, problem.data["schema"])


def open_suite(limit: int, seed: int, *, is_held: bool = False) -> Suite:
    """Return ``limit`` problems, with the levels in turn; another seed generates others."""
    levels = tuple(KINDS)
    make = partial(generate_problem, is_held=is_held)
    problems = [make(f"{seed}/{index}", levels[index % len(levels)]) for index in range(limit)]
    return Suite(
        "extraction-held" if is_held else "extraction",
        problems,
        rule=check,
        temperature=TEMPERATURE,
        answer=AnswerSpec(compare="json"),
    )
