"""The words of the vision-language reference model, one token each, and its chat template."""

from __future__ import annotations

PAD, UNK, BOS, END = "<pad>", "<unk>", "<bos>", "<end>"
USER, ASSISTANT = "<user>", "<assistant>"
VISION_START, VISION_END, IMAGE, VIDEO = "<vs>", "<ve>", "<img>", "<vid>"
SPECIAL = (PAD, UNK, BOS, END, USER, ASSISTANT, VISION_START, VISION_END, IMAGE, VIDEO)

COLOURS = ("red", "green", "blue", "yellow", "purple", "orange", "cyan", "pink")
SHAPES = ("circle", "square", "triangle", "cross", "diamond", "ring")
EMPTY = "empty"
NAMES = tuple("12345678")
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
COUNTS = ("none", "one", "two", "three", "four", "five")
CELLS = tuple(f"{row}{column}" for row in "abcd" for column in "1234")
YES, NO = "yes", "no"
TAGS = (
    "apple bread cloud drum eagle flute grape honey ivory jelly kite lemon mango needle onion "
    "piano queen river sugar tiger uncle violin wagon yacht"
).split()

_GRAMMAR = "image : . look colour shape which count more same note"
_FILLER = (
    "ash bay cap den ear fan gap hat ink jar key lid map net oak pan rag sap tag urn van wax yak "
    "zip arm bag can dog egg fog gum hen ice jam kit log mud nut owl pie rug sun toy vow web yam "
    "air bee cup dot elm fig gas hut inn jet kin leg mix nap oil pea rib sea tea use vet wig axe "
    "bar cow dam era fur gem hop ivy jaw keg lap mop nod ore pad rim ski tub vat wok arc bud cod"
).split()
FILLER = tuple(_FILLER)

VOCABULARY: tuple[str, ...] = (
    *SPECIAL,
    *_GRAMMAR.split(),
    *COLOURS,
    *SHAPES,
    EMPTY,
    *NAMES,
    *ORDINALS,
    *COUNTS,
    *CELLS,
    YES,
    NO,
    *TAGS,
    *FILLER,
)
IDS: dict[str, int] = {word: index for index, word in enumerate(VOCABULARY)}

CHAT_TEMPLATE = (
    "{{ '<bos>' }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ('user', 'assistant') %}"
    "{{ raise_exception('only roles user and assistant are known, not ' + message['role']) }}"
    "{% endif %}"
    "{{ ' <' + message['role'] + '>' }}"
    "{% if message['content'] is string %}{{ ' ' + message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ ' <vs><img><ve>' }}"
    "{% elif part['type'] == 'text' %}{{ ' ' + part['text'] }}"
    "{% else %}{{ raise_exception('unknown type of content: ' + part['type']) }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{% if message['role'] == 'assistant' %}{{ ' <end>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ ' <assistant>' }}{% endif %}"
)
"""Messages with roles user and assistant; content is a string, or a list of images and texts."""
