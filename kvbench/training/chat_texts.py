"""Words, sentences and fact kinds of the synthetic conversations; see `chats`."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

FIRST = (
    "Amara Boris Carla Daniel Elena Farid Greta Hassan Ingrid Jonas Keiko Luis Marta Nadia Omar "
    "Petra Quentin Rosa Samuel Tomas Ursula Viktor Wendy Xavier Yusuf Zoe Agnes Bruno Clara Dmitri"
).split()
LAST = (
    "Abbott Berger Castillo Dubois Eriksen Fischer Gallo Hoffman Ivanov Jensen Keller Lindqvist "
    "Moreau Novak Okafor Petrov Quinn Romano Schmidt Tanaka Ueda Vargas Weber Xu Young Zimmer"
).split()
CITIES = (
    "Lisbon Oslo Prague Nairobi Lima Kyoto Toronto Dublin Athens Warsaw Hanoi Quito Cairo Vienna "
    "Geneva Bergen Seville Turin Ghent Porto Leeds Boston Denver Austin Perth Osaka Lyon Riga"
).split()
JOBS = (
    "carpenter,nurse,pilot,librarian,chemist,farmer,photographer,lawyer,baker,surgeon,translator,"
    "geologist,plumber,violinist,banker,clerk,journalist,dentist,gardener,mechanic"
).split(",")
ITEMS = (
    "lamp,kettle,bicycle,carpet,violin,tent,compass,blanket,camera,ladder,teapot,mirror,hammer,"
    "saddle,wardrobe,radio,canoe,telescope,pillow,drill,basket,printer,clock,helmet"
).split(",")
PETS = "cat,dog,parrot,rabbit,tortoise,hamster,goldfish,pony,canary,ferret".split(",")
PROJECTS = (
    "harbour,bridge,orchard,museum,tunnel,stadium,lighthouse,railway,hospital,observatory,dam,"
    "market,airport,theatre,aquarium,canal"
).split(",")
_CODE_A = "amber cobalt silent frozen golden hollow crimson distant gentle iron lunar misty".split()
_CODE_B = "falcon river anchor lantern meadow compass thunder willow glacier raven cedar".split()

STORY = (
    "{p} walked along the {place} and thought about the {thing} from {city}",
    "It rained in {city} for most of the {time}, and the {place} was almost empty",
    "The {thing} on the table belonged to nobody, so {p} left it where it was",
    "In the {time} the {place} filled with people who had come to look at the {thing}",
    "Nobody at the {place} could say why the {thing} had been moved during the {time}",
    "{p} wrote a long letter about the {place}, but most of it was about the weather",
    "A {thing} is easy to carry, although few people in {city} would ever need one",
    "The road from the {place} to the old mill is narrow and full of stones",
    "For a while they talked about music, about food, and about the {time} they had spent in {city}",
    "{p} prefers tea to coffee and usually reads for an hour before going to sleep",
    "The owner of the {place} had painted the door green, which surprised everyone",
    "Later that {time} the wind grew stronger and the boats returned to the shore",
    "There is a bench near the {place} where old friends meet and talk about nothing in particular",
    "The lecture was long, and only the part about the {thing} was worth the trip to {city}",
    "Every {time} the same bus stops at the {place}, and every {time} it is late",
    "Some of the guests had brought a {thing}, others had brought nothing but good humour",
    "{p} laughed, closed the window, and went back to the kitchen to finish the soup",
    "The newspaper printed a short note on the {place} and a longer one on the {thing}",
)
_PLACES = "market station garden library harbour school bakery park square workshop river".split()
_TIMES = "morning afternoon evening night week summer winter spring".split()

DULL = (
    "The sea is calm. The wind is low. A boat goes by. The shore is far.",
    "Snow falls on the hill. The lamp is lit. We wait inside. It is late.",
    "One more page, one more line. Nothing happens here. Keep reading.",
    "The train moves on. The fields are wide. The windows are closed.",
)

INTROS = (
    "Read the following text carefully. I will ask you about it afterwards.",
    "Here are my notes. Remember them, since I will have a question at the end.",
    "Below is a document. Please keep its details in mind.",
    "I will give you a text first and a question second.",
    "Some useful details are spread over the text below. Try to remember them.",
    "",
)


def person(generator: random.Random) -> str:
    """Return a full name."""
    return f"{generator.choice(FIRST)} {generator.choice(LAST)}"


def digits(generator: random.Random, min_digits: int, max_digits: int) -> str:
    """Return a number of `min_digits` to `max_digits` digits without a leading 0."""
    digit_count = generator.randint(min_digits, max_digits)
    return str(generator.randint(10 ** (digit_count - 1), 10**digit_count - 1))


def code_word(generator: random.Random) -> str:
    """Return two words, or letters and digits."""
    if generator.random() < 0.5:
        return f"{generator.choice(_CODE_A)} {generator.choice(_CODE_B)}"
    letters = "".join(generator.choices("ABCDEFGHJKLMNPQRSTUVWXYZ", k=generator.randint(2, 4)))
    return f"{letters}{generator.choice('- ')}{digits(generator, 2, 4)}"


def serial(generator: random.Random) -> str:
    """Return a serial number: groups of hexadecimal digits."""
    group_count = generator.randint(2, 5)
    return "-".join("".join(generator.choices("0123456789abcdef", k=4)) for _ in range(group_count))


def clock(generator: random.Random) -> str:
    """Return a time of day."""
    return f"{generator.randint(5, 22)}:{generator.randint(0, 59):02d}"


def story(generator: random.Random) -> str:
    """Return a sentence without facts."""
    return (
        generator.choice(STORY).format(
            p=generator.choice(FIRST),
            place=generator.choice(_PLACES),
            thing=generator.choice(ITEMS),
            city=generator.choice(CITIES),
            time=generator.choice(_TIMES),
        )
        + "."
    )


@dataclass(frozen=True)
class FactKind:
    """A kind of fact.

    Attributes:
        subject: Generates the fact's subject.
        value: Generates the value that is asked for.
        statements: Sentence templates with subject `{s}` and value `{v}`.
        questions: Question templates with subject `{s}`.
        answers: Answer templates with subject `{s}` and value `{v}`.
    """

    subject: Callable[[random.Random], str]
    value: Callable[[random.Random], str]
    statements: tuple[str, ...]
    questions: tuple[str, ...]
    answers: tuple[str, ...]


KINDS = (
    FactKind(
        person,
        lambda generator: generator.choice(JOBS),
        ("{s} works as a {v}.", "For many years {s} has been a {v}.", "{s}, a {v}, arrived first."),
        ("What does {s} do for a living?", "What is the profession of {s}?"),
        ("{s} is a {v}.", "{v}"),
    ),
    FactKind(
        person,
        lambda generator: f"{generator.choice(CITIES)} in {generator.randint(1921, 2004)}",
        ("{s} was born in {v}.", "The parents of {s} met before {s} was born in {v}."),
        ("Where and when was {s} born?", "Tell me the place and year of birth of {s}."),
        ("{s} was born in {v}.", "In {v}."),
    ),
    FactKind(
        person,
        lambda generator: digits(generator, 6, 9),
        (
            "You can call {s} at {v}.",
            "The telephone of {s} has the number {v}.",
            "Dial {v} for {s}.",
        ),
        ("How can I call {s}?", "Which telephone number does {s} have?"),
        ("You can call {s} at {v}.", "The number is {v}.", "{v}"),
    ),
    FactKind(
        person,
        lambda generator: digits(generator, 3, 8),
        (
            "The locker of {s} opens with {v}.",
            "{s} chose {v} as a pin.",
            "Badge {v} belongs to {s}.",
        ),
        ("Which digits belong to {s}?", "What is the pin, badge or locker code of {s}?"),
        ("{s}: {v}", "The digits are {v}.", "{v}"),
    ),
    FactKind(
        lambda generator: generator.choice(CITIES),
        clock,
        ("The train to {s} leaves at {v}.", "At {v} the last bus departs for {s}."),
        ("When does one leave for {s}?", "What is the departure time to {s}?"),
        ("The departure to {s} is at {v}.", "At {v}."),
    ),
    FactKind(
        lambda generator: generator.choice(ITEMS),
        lambda generator: f"{generator.randint(2, 990)}.{generator.randint(0, 99):02d} euros",
        ("The {s} costs {v}.", "Somebody paid {v} for the {s}.", "They ask {v} for a used {s}."),
        ("What does the {s} cost?", "How much was asked or paid for the {s}?"),
        ("The price of the {s} is {v}.", "{v}"),
    ),
    FactKind(
        lambda generator: f"{generator.choice(PROJECTS)} project",
        code_word,
        ("The code word of the {s} is {v}.", "Say {v} to enter the {s}.", 'In the {s}, use "{v}".'),
        ("What is the code word of the {s}?", "What do I have to say in the {s}?"),
        ("The code word is {v}.", "{v}"),
    ),
    FactKind(
        lambda generator: generator.choice(ITEMS),
        serial,
        ("The serial number of the {s} is {v}.", "Engraved on the {s}: {v}.", "The {s} reads {v}."),
        ("Which serial number does the {s} have?", "What is engraved on the {s}?"),
        ("The {s} has the serial number {v}.", "{v}"),
    ),
    FactKind(
        person,
        lambda generator: f"a {generator.choice(PETS)} named {generator.choice(FIRST)}",
        ("{s} has {v}.", "At home, {s} keeps {v}.", "Last year {s} adopted {v}."),
        ("Which animal does {s} have?", "What pet does {s} keep, and what is its name?"),
        ("{s} has {v}.", "It is {v}."),
    ),
    FactKind(
        lambda generator: f"{generator.choice(PROJECTS)} team",
        lambda generator: f"room {generator.randint(2, 980)}",
        ("The {s} meets in {v}.", "You will find the {s} in {v} on Monday."),
        ("Where does the {s} meet?", "In which room is the {s}?"),
        ("The {s} meets in {v}.", "In {v}."),
    ),
)
