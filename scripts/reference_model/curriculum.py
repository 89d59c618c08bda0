"""The curriculum that produced the shipped weights: what the model sees, and in which order.

Why the stages look as they do:

- Retrieval by content formed within two million tokens of very short sequences (32 to 64), after no
  progress at 64 to 96.
- Several values per key and chains of variables need an easy start (two values, one hop).
- What works at 160 tokens soon works at 1024.
- Naming several values in order, and counting, improved most while the learning rate fell.

The curriculum was adapted during training: a stage that had served its purpose was stopped at a
checkpoint, and the next stage was written. The lengths of the stages are those that were trained.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from kvbench.reference.samples import Knobs

_FULL = Knobs()


@dataclasses.dataclass(frozen=True)
class Feed:
    """One part of every step.

    Attributes:
        tokens: Tokens per step, including padding.
        lengths: Sequence lengths; each step draws one, and repeats in the tuple add weight.
        mix: Share of each task in the rows.
        weight: Weight of the feed in the loss of the step, on any scale.
        language: Share of the positions outside answers that are trained as a language model, and
            the weight of that loss. In a bag of words it teaches counting, because the best
            prediction of the next word is the frequency of each word so far.
        any_of: Whether one of several correct words is enough; otherwise all should be equally
            likely.
    """

    tokens: int
    lengths: tuple[int, ...]
    mix: Mapping[str, float]
    weight: float = 1.0
    language: tuple[float, float] = (0.1, 0.05)
    any_of: bool = False


@dataclasses.dataclass(frozen=True)
class Stage:
    """A section of the training.

    Attributes:
        name: Name in the log.
        tokens: Length in tokens.
        rate: Factor on the full learning rates (Muon 0.02, AdamW 0.002) at its start and at its
            end, linear in between.
        feeds: Parts of every step.
        knobs: Difficulty of the samples.
    """

    name: str
    tokens: int
    rate: tuple[float, float]
    feeds: tuple[Feed, ...]
    knobs: Knobs = _FULL


# The mixes of tasks, in percent of the sequences; "." is none. The order of the lines matters,
# because it decides which task a random number selects.
_TABLE = """
             A   B   C   D   E   F   G   H   I   J   K   L   M   N
repeat      12  35   2   .   .   .   .   .   .   .   .   .   .   .
single       .   .   .   .   2   2   6   6   4   7   7   4   6   6
multikey    50  55  35  18  14  12  10  11  10  10  20   7  20  16
mixed       20   .  25  17  18  18  14  14  12  10   6   8   5   3
multiquery  10   .  10   6   7   7   6   6   5   5   7   4   9   6
vt           .   .  10  17  17  17  12  13  12  14  12  12  13  14
multivalue   .   .   8  22  22  27  36  32  42  37  25  52  25  36
list         .   .   .   6   6   4   3   5   3   3   4   2   4   4
copy         8  10   4   4   4   4   4   4   3   3   2   2   2   3
uuid         .   .   6   6   6   6   6   6   6   8  15   7  14  10
dialogue     .   .   .   4   4   4   3   3   3   3   2   2   2   2
"""


def _mixes(table: str) -> dict[str, dict[str, float]]:
    """The columns of `table` by their letters."""
    (first, *rows) = [line.split() for line in table.strip().splitlines()]
    return {letter: {row[0]: int(row[n]) / 100 for row in rows if row[n] != "."} for n, letter in enumerate(first, 1)}


_MIX = _mixes(_TABLE)

_EASY = Knobs(values=(2, 2), hops=(0, 1), long_hops=0, items=8, copied=24, questions=16)
_MIDDLE = Knobs(values=(2, 3), hops=(0, 3), long_hops=8, items=16, copied=48)
_DENSE = Knobs(values=(2, 3), plural=16, spread=24)
_ORDINALS = Knobs(values=(1, 4), spread=24)
_SPARSE = Knobs(plural=16, spread=32)
_BENCHMARK = Knobs(
    values=(1, 4),
    plural=16,
    spread=32,
    questions=40,
    noise=0.25,
    plain_noise=0.6,
    full=0.35,
    fewest=1,
)
_FINAL = Knobs(
    values=(2, 4),
    plural=12,
    spread=24,
    questions=32,
    noise=0.2,
    plain_noise=0.6,
    full=0.35,
    fewest=1,
)

CURRICULUM: tuple[Stage, ...] = (
    Stage("warm-up", 1_706_816, (1.0, 1.0), (Feed(4096, (64, 96), _MIX["A"]),), _EASY),
    Stage("induction", 3_000_000, (1.0, 1.0), (Feed(4096, (32, 32, 48, 64), _MIX["B"]),), _EASY),
    Stage("retrieval", 1_944_976, (0.85, 0.7851675), (Feed(5120, (96, 128, 160), _MIX["C"]),), _EASY),
    Stage(
        "retrieval, slower",
        255_024,
        (0.761592, 0.75),
        (Feed(5120, (96, 128, 160), _MIX["C"]),),
        _EASY,
    ),
    Stage(
        "enumeration",
        3_500_000,
        (0.75, 0.75),
        (
            Feed(5120, (128, 160, 224), _MIX["D"], 0.85),
            Feed(1024, (128,), {"cwe": 0.5, "fwe": 0.5}, 0.15),
        ),
        _EASY,
    ),
    Stage(
        "longer",
        3_337_648,
        (0.75, 0.7166235),
        (
            Feed(6144, (256, 256, 384, 512), _MIX["E"], 0.8),
            Feed(2048, (128, 256), {"cwe": 0.5, "fwe": 0.5}, 0.2),
        ),
        _MIDDLE,
    ),
    Stage(
        "counting",
        1_846_272,
        (0.7221863, 0.7068007),
        (
            Feed(5120, (256, 256, 384, 512), _MIX["F"], 0.7),
            Feed(3072, (128, 256, 256), {"cwe": 0.45, "fwe": 0.55}, 0.3),
        ),
        _MIDDLE,
    ),
    Stage(
        "long",
        1_916_928,
        (0.7, 0.6680512),
        (
            Feed(5120, (256, 256, 512, 512, 1024), _MIX["G"], 0.7),
            Feed(3072, (128, 256, 256, 512), {"cwe": 0.5, "fwe": 0.5}, 0.3),
        ),
        _DENSE,
    ),
    Stage(
        "decay",
        3_284_992,
        (0.6, 0.5044366),
        (
            Feed(5120, (128, 256, 256, 512, 512, 1024), _MIX["H"], 0.7),
            Feed(3072, (128, 256, 256, 512, 512), {"cwe": 0.5, "fwe": 0.5}, 0.3),
        ),
        _SPARSE,
    ),
    Stage(
        "ordinals",
        2_617_344,
        (0.52, 0.4676531),
        (
            Feed(3072, (96, 128, 128, 192, 256, 256), _MIX["I"], 0.7),
            Feed(1536, (128, 192, 256), {"cwe": 0.4, "fwe": 0.6}, 0.3),
        ),
        _ORDINALS,
    ),
    Stage(
        "slower",
        1_668_096,
        (0.24, 0.2177587),
        (
            Feed(3072, (96, 128, 128, 192, 256, 256), _MIX["I"], 0.7),
            Feed(1536, (128, 192, 256), {"cwe": 0.4, "fwe": 0.6}, 0.3),
        ),
        _ORDINALS,
    ),
    Stage(
        "frequency",
        2_548_224,
        (0.3, 0.2708774),
        (
            Feed(3072, (96, 128, 128, 192, 256, 256), _MIX["I"], 0.7),
            Feed(1536, (128, 192, 256), {"cwe": 0.5, "fwe": 0.5}, 0.3, (0.5, 0.4)),
        ),
        _ORDINALS,
    ),
    Stage(
        "benchmark",
        3_960_320,
        (0.34, 0.253895),
        (
            Feed(2560, (128, 256, 256, 512), _MIX["J"], 0.3),
            Feed(4096, (512, 1024, 1024, 2048), _MIX["K"], 0.4),
            Feed(
                2048,
                (128, 256, 256, 512, 512, 512, 1024, 2048),
                {"cwe": 0.5, "fwe": 0.5},
                0.3,
                (0.3, 0.15),
            ),
        ),
        _BENCHMARK,
    ),
    Stage(
        "values",
        3_698_688,
        (0.3, 0.2383552),
        (
            Feed(3072, (128, 192, 256, 384), _MIX["L"], 0.45),
            Feed(2048, (512, 1024, 1024, 2048), _MIX["M"], 0.27),
            Feed(
                2048,
                (128, 256, 256, 512, 512, 1024),
                {"cwe": 0.7, "fwe": 0.3},
                0.28,
                (0.2, 0.1),
                any_of=True,
            ),
        ),
        _FINAL,
    ),
    Stage(
        "last",
        10_500_000,
        (0.2, 0.001),
        (
            Feed(3072, (128, 192, 256, 384), _MIX["L"], 0.4),
            Feed(2048, (512, 1024, 1024, 2048), _MIX["M"], 0.34),
            Feed(
                2048,
                (128, 256, 256, 512, 512, 1024),
                {"cwe": 0.7, "fwe": 0.3},
                0.26,
                (0.2, 0.1),
                any_of=True,
            ),
        ),
        _FINAL,
    ),
    Stage(
        "longest",
        6_500_000,
        (0.15, 0.001),
        (
            Feed(2048, (192, 256, 384, 512), _MIX["L"], 0.3),
            Feed(4096, (512, 1024, 1024, 2048, 2048), _MIX["N"], 0.5),
            Feed(
                2048,
                (256, 512, 512, 1024, 2048),
                {"cwe": 0.7, "fwe": 0.3},
                0.2,
                (0.2, 0.1),
                any_of=True,
            ),
        ),
        _FINAL,
    ),
)
