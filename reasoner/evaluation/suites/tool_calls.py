"""Tool calls: a request in words, several functions, and the calls that answer it, with their arguments.

An answer is right if its calls are the expected ones as JSON, in any order. Licence: that of this repository.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from reasoner.answers.equivalence import Equivalence
from reasoner.answers.spec import AnswerSpec
from reasoner.evaluation.suites.problem import Problem, hash_problem
from reasoner.evaluation.suites.suite import Suite
from reasoner.jobs.tool_specs import FunctionTool
from reasoner.tools.formats.call import MalformedCall, ToolCall, vote_key

TEMPERATURE = 0.7
NUM_SHOWN = 4
"""Number of functions that a problem shows."""
LEVELS: tuple[str, ...] = ("one", "near", "two")
"""Names of the levels: one call; one call beside a function for something similar; two calls."""

CITIES = ("Lisbon", "Oslo", "Graz", "Lyon", "Ghent", "Turin", "Riga", "Bergen")
PEOPLE = ("Mia", "Tom", "Ana", "Ben", "Lea", "Max")
CURRENCIES = ("EUR", "USD", "JPY", "GBP", "CHF")
LENGTHS = ("metres", "feet", "miles", "yards")
ARTISTS = ("Nina Simone", "Miles Davis", "Clara Schumann", "Fela Kuti")
TEXT, WHOLE, NUMBER, YES_OR_NO = ({"type": kind} for kind in ("string", "integer", "number", "boolean"))
TIME = {"type": "string", "pattern": "^[0-9]{2}:[0-9]{2}$", "description": "HH:MM, 24 hours."}

Request = tuple[str, dict[str, Any]]
"""A request in words, and the arguments of the call that answers it."""


@dataclass(frozen=True, slots=True)
class Skill:
    """A function, and how it is asked for. Functions of one ``topic`` are for similar things."""

    topic: str
    tool: FunctionTool
    sample: Callable[[random.Random], Request]


def _define(name: str, description: str, **arguments: dict[str, Any]) -> FunctionTool:
    schema = {
        "type": "object",
        "properties": arguments,
        "required": list(arguments),
        "additionalProperties": False,
    }
    return FunctionTool(type="function", name=name, description=description, parameters=schema)


def _ask_weather(rng: random.Random) -> Request:
    city, day, unit = rng.choice(CITIES), rng.choice(("today", "tomorrow")), rng.choice(("celsius", "fahrenheit"))
    return f"How is the weather in {city} {day}, in {unit}?", {"city": city, "day": day, "unit": unit}


def _ask_forecast(rng: random.Random) -> Request:
    city, days = rng.choice(CITIES), rng.randint(3, 10)
    return f"What will the weather in {city} be over the next {days} days?", {"city": city, "days": days}


def _ask_currency(rng: random.Random) -> Request:
    given, wanted = rng.sample(CURRENCIES, 2)
    amount = rng.randint(100, 99_999) / 100
    return f"How much is {amount} {given} in {wanted}?", {"amount": amount, "given": given, "wanted": wanted}


def _ask_length(rng: random.Random) -> Request:
    given, wanted = rng.sample(LENGTHS, 2)
    value = rng.randint(2, 9_999)
    return f"How many {wanted} are {value} {given}?", {"value": value, "given": given, "wanted": wanted}


def _ask_table(rng: random.Random) -> Request:
    place, people, time = rng.choice(("Luna", "The Anchor", "Verde")), rng.randint(2, 9), _sample_time(rng)
    return (
        f"Reserve a table for {people} at the restaurant {place} at {time}.",
        {"restaurant": place, "people": people, "time": time},
    )


def _ask_room(rng: random.Random) -> Request:
    hotel, nights, has_breakfast = rng.choice(("Astoria", "Park Inn", "Mirador")), rng.randint(1, 9), rng.random() < 0.5
    words = "with" if has_breakfast else "without"
    return (
        f"Book {nights} nights at the hotel {hotel}, {words} breakfast.",
        {"hotel": hotel, "nights": nights, "breakfast": has_breakfast},
    )


def _ask_timer(rng: random.Random) -> Request:
    minutes, label = rng.randint(2, 90), rng.choice(("tea", "bread", "laundry"))
    return f"Set a timer of {minutes} minutes called {label}.", {"minutes": minutes, "label": label}


def _ask_alarm(rng: random.Random) -> Request:
    time, is_daily = _sample_time(rng), rng.random() < 0.5
    return f"Wake me at {time}{' every day' if is_daily else ', only once'}.", {"time": time, "daily": is_daily}


def _ask_artist(rng: random.Random) -> Request:
    artist, is_shuffled = rng.choice(ARTISTS), rng.random() < 0.5
    order = "shuffled" if is_shuffled else "in order"
    return f"Play songs by {artist}, {order}.", {"artist": artist, "shuffle": is_shuffled}


def _ask_message(rng: random.Random) -> Request:
    person, text = rng.choice(PEOPLE), rng.choice(("I am late", "The train left", "Lunch at one"))
    return f'Send {person} the message "{text}".', {"to": person, "text": text}


def _ask_call(rng: random.Random) -> Request:
    person, has_video = rng.choice(PEOPLE), rng.random() < 0.5
    return f"Call {person} {'with' if has_video else 'without'} video.", {"to": person, "video": has_video}


def _sample_time(rng: random.Random) -> str:
    return f"{rng.randint(6, 22):02}:{rng.choice((0, 15, 30, 45)):02}"


def _list_skills() -> Sequence[Skill]:
    currency, length = {"enum": list(CURRENCIES)}, {"enum": list(LENGTHS)}
    day, unit = {"enum": ["today", "tomorrow"]}, {"enum": ["celsius", "fahrenheit"]}
    return (
        Skill("weather", _define("get_weather", "Weather of one day.", city=TEXT, day=day, unit=unit), _ask_weather),
        Skill("weather", _define("get_forecast", "Weather of the next days.", city=TEXT, days=WHOLE), _ask_forecast),
        Skill(
            "units",
            _define("convert_currency", "Converts money.", amount=NUMBER, given=currency, wanted=currency),
            _ask_currency,
        ),
        Skill(
            "units",
            _define("convert_length", "Converts lengths.", value=NUMBER, given=length, wanted=length),
            _ask_length,
        ),
        Skill(
            "booking",
            _define("book_table", "Reserves a table.", restaurant=TEXT, people=WHOLE, time=TIME),
            _ask_table,
        ),
        Skill(
            "booking",
            _define("book_room", "Books a hotel room.", hotel=TEXT, nights=WHOLE, breakfast=YES_OR_NO),
            _ask_room,
        ),
        Skill("clock", _define("set_timer", "Starts a timer.", minutes=WHOLE, label=TEXT), _ask_timer),
        Skill("clock", _define("set_alarm", "Sets an alarm clock.", time=TIME, daily=YES_OR_NO), _ask_alarm),
        Skill("people", _define("send_message", "Sends a text message.", to=TEXT, text=TEXT), _ask_message),
        Skill("people", _define("start_call", "Calls somebody.", to=TEXT, video=YES_OR_NO), _ask_call),
        Skill("music", _define("play_artist", "Plays music.", artist=TEXT, shuffle=YES_OR_NO), _ask_artist),
    )


SKILLS = _list_skills()


def generate_problem(seed: int | str, level: str) -> Problem:
    """Generate a problem of this level, deterministically from the arguments."""
    rng = random.Random(f"tools/{level}/{seed}")
    chosen = [rng.choice([skill for skill in SKILLS if level != "near" or _list_near(skill)])]
    if level == "two":
        chosen.append(rng.choice([skill for skill in SKILLS if skill.topic != chosen[0].topic]))
    shown = [*chosen, *(_list_near(chosen[0]) if level == "near" else [])]
    topics = {skill.topic for skill in shown}
    others = [skill for skill in SKILLS if skill.topic not in topics]
    shown += rng.sample(others, NUM_SHOWN - len(shown))
    rng.shuffle(shown)
    requests = [skill.sample(rng) for skill in chosen]
    calls = [
        {"name": skill.tool.name, "arguments": arguments}
        for skill, (_, arguments) in zip(chosen, requests, strict=True)
    ]
    text, answer = " ".join(words for words, _ in requests), json.dumps(calls)
    names = ",".join(skill.tool.name for skill in shown)
    return Problem(
        id=f"tools-{level}-{hash_problem(f'{text}{answer}{names}'):016x}",
        suite="tools",
        level=level,
        text=text,
        answer=answer,
        data={},
        tools=tuple(skill.tool for skill in shown),
    )


def _list_near(skill: Skill) -> list[Skill]:
    return [other for other in SKILLS if other.topic == skill.topic and other is not skill]


async def check(problem: Problem, answer: str, equal: Equivalence) -> bool:  # noqa: ARG001
    """Return True if the answer's calls, the JSON text of a list, are the expected ones."""
    try:
        return _find_key(answer) == _find_key(problem.answer)
    except (MalformedCall, KeyError, TypeError, ValueError):
        return False


def _find_key(calls: str) -> str:
    return vote_key((ToolCall(call["name"], json.dumps(call["arguments"])) for call in json.loads(calls)), "arguments")


def open_suite(limit: int, seed: int) -> Suite:
    """Return ``limit`` problems, with the levels in turn; another seed generates others."""
    problems = [generate_problem(f"{seed}/{index}", LEVELS[index % len(LEVELS)]) for index in range(limit)]
    return Suite(
        "tools",
        problems,
        rule=check,
        temperature=TEMPERATURE,
        answer=AnswerSpec(compare="json", instruct=False),
    )
