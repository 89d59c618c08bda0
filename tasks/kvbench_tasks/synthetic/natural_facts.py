"""Natural prompts of `facts`: a fact about a person among sentences of Python's manual.

They share nothing with other tasks: no numbers, no two-word keys, and no generated prose.
"""

from __future__ import annotations

from kvbench.data import manual
from kvbench_tasks.synthetic.fitting import Doc, HaystackPlan, Streams, scatter

_WHO = (
    "Astrid Benoit Celine Dorian Esther Filip Gudrun Hector Imani Jarek Katya Lorenzo Mireille "
    "Nikhil Olga Pascal Rania Stefan Tomoko Ulrich Valentina Walter Yara Zoltan"
).split()
_WHAT = "accordion umbrella typewriter lantern microscope chessboard suitcase globe sledge".split()
_FACTS = (
    (
        "{who} keeps an old {what} in the {value}.",
        "Where does {who} keep the {what}?",
        "{who} keeps the {what} in the",
        "attic cellar garage pantry greenhouse stable barn loft shed boathouse hallway studio",
    ),
    (
        "On the way home {who} saw a {value} beside the road.",
        "Which animal did {who} see beside the road?",
        "Beside the road {who} saw a",
        "heron badger fox hedgehog stork weasel pheasant squirrel peacock lizard swan donkey",
    ),
    (
        "As a child {who} learned to play the {value} from an uncle.",
        "Which instrument did {who} learn to play as a child?",
        "The uncle taught {who} to play the",
        "cello trumpet flute harp clarinet banjo trombone guitar mandolin saxophone oboe drums",
    ),
    (
        "Next year {who} is going to move to {value} with two sisters.",
        "To which country is {who} going to move next year?",
        "{who} is going to move to",
        "Bolivia Norway Portugal Vietnam Kenya Iceland Mexico Greece Poland Jamaica Nepal Chile",
    ),
    (
        "For lunch {who} ordered {value} and gave half of the plate to a friend.",
        "What did {who} order for lunch?",
        "For lunch {who} had",
        "lasagna pancakes risotto meatballs dumplings omelette salmon chili noodles salad curry",
    ),
    (
        "Last summer {who} painted the front door {value}.",
        "Which colour did {who} paint the front door?",
        "{who} painted the front door",
        "turquoise purple orange yellow green pink white brown black grey blue red",
    ),
)
"""Statement, question, beginning of the answer, and possible values."""


def fact(streams: Streams) -> list[HaystackPlan]:
    """Hide one fact at a random depth of the manual; the haystack is truncated at a sentence."""
    generator = streams["fact"]
    fact_template, question_template, prefix_template, value_words = generator.choice(_FACTS)
    value = generator.choice(value_words.split())
    fields = {"who": generator.choice(_WHO), "what": generator.choice(_WHAT), "value": value}
    statement = fact_template.format(**fields)
    depth = streams["depth"].random()
    start_index = streams["manual"].randrange(len(manual.sentences()))

    def build(sentence_count: int) -> Doc:
        sentences = manual.sentences()
        haystack = [sentences[(start_index + offset) % len(sentences)] for offset in range(sentence_count)]
        context = " ".join(scatter(haystack, [(depth, statement)]))
        return {
            "context": f"Read this text.\n\n{context}\n\n",
            "question": question_template.format(**fields),
            "gen_prefix": prefix_template.format(**fields),
            "outputs": [value],
            "until": [],
            "max_new_tokens": 32,
            "extra": {"needle": statement},
        }

    return [HaystackPlan(build)]
