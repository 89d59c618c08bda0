"""The curriculum that produced the shipped weights: what the model is shown, in which order.

The stages are read by :mod:`kvbench.reference.train`. Why they look as they do: retrieval by
content forms suddenly, after one to two million tokens of short sequences full of questions;
several values of a key and chains of variables need an easy start (two values, one hop); once a
skill works at 160 tokens, 2048 is nearly free; and the decay of the learning rate at the end is
worth 15 to 25 points on everything that counts or enumerates.
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
        tokens: tokens a step, padding included.
        lengths: sequence lengths, of which each step takes one at random; repeats add weight.
        mix: share of each task in the rows.
        weight: share of the feed in the loss of the step, on any scale.
        language: share of the positions outside answers that are trained as a language model,
            and the weight of that loss. In a bag of words it teaches to count: the best
            prediction of the next word is how frequent each has been.
        any_of: whether one of several right words is enough; else all shall be equally likely.
    """

    tokens: int
    lengths: tuple[int, ...]
    mix: Mapping[str, float]
    weight: float = 1.0
    language: tuple[float, float] = (0.1, 0.05)
    any_of: bool = False


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stretch of training.

    Attributes:
        name: for the log.
        tokens: how many tokens it lasts.
        rate: factor on the full learning rates (Muon 0.02, AdamW 0.002) at its start and its end,
            linear in between.
        feeds: what every step is made of.
        knobs: difficulty of the samples.
    """

    name: str
    tokens: int
    rate: tuple[float, float]
    feeds: tuple[Feed, ...]
    knobs: Knobs = _FULL


_EASY = Knobs(values=(2, 2), hops=(0, 1), long_hops=0, items=8, copied=24, questions=16)
_MIDDLE = Knobs(values=(2, 3), hops=(0, 3), long_hops=8, items=16, copied=48)
_DENSE = Knobs(values=(2, 3), plural=16, spread=24)
_ORDINALS = Knobs(values=(1, 4), spread=24)
_SPARSE = Knobs(plural=16, spread=32)
_LAST = Knobs(
    values=(1, 4),
    plural=16,
    spread=32,
    questions=40,
    noise=0.25,
    plain_noise=0.6,
    full=0.35,
    fewest=1,
)
_VALUES = Knobs(
    values=(2, 4), plural=12, spread=24, questions=32, noise=0.2, plain_noise=0.6, full=0.35, fewest=1
)

CURRICULUM: tuple[Stage, ...] = (
    Stage(
        "warm-up",
        1_706_816,
        (1.0, 1.0),
        (
            Feed(
                4096,
                (64, 96),
                {"repeat": 0.12, "multikey": 0.5, "mixed": 0.2, "multiquery": 0.1, "copy": 0.08},
            ),
        ),
        _EASY,
    ),
    Stage(
        "induction",
        3_000_000,
        (1.0, 1.0),
        (
            Feed(
                4096,
                (32, 32, 48, 64),
                {"repeat": 0.35, "multikey": 0.55, "copy": 0.1},
            ),
        ),
        _EASY,
    ),
    Stage(
        "retrieval",
        1_944_976,
        (0.85, 0.7851675),
        (
            Feed(
                5120,
                (96, 128, 160),
                {
                    "repeat": 0.02,
                    "multikey": 0.35,
                    "mixed": 0.25,
                    "multiquery": 0.1,
                    "vt": 0.1,
                    "multivalue": 0.08,
                    "copy": 0.04,
                    "uuid": 0.06,
                },
            ),
        ),
        _EASY,
    ),
    Stage(
        "retrieval, slower",
        255_024,
        (0.7615920, 0.75),
        (
            Feed(
                5120,
                (96, 128, 160),
                {
                    "repeat": 0.02,
                    "multikey": 0.35,
                    "mixed": 0.25,
                    "multiquery": 0.1,
                    "vt": 0.1,
                    "multivalue": 0.08,
                    "copy": 0.04,
                    "uuid": 0.06,
                },
            ),
        ),
        _EASY,
    ),
    Stage(
        "enumeration",
        3_500_000,
        (0.75, 0.75),
        (
            Feed(
                5120,
                (128, 160, 224),
                {
                    "multikey": 0.18,
                    "mixed": 0.17,
                    "multiquery": 0.06,
                    "vt": 0.17,
                    "multivalue": 0.22,
                    "list": 0.06,
                    "copy": 0.04,
                    "uuid": 0.06,
                    "dialogue": 0.04,
                },
                0.85,
            ),
            Feed(1024, (128,), {"cwe": 0.5, "fwe": 0.5}, 0.15),
        ),
        _EASY,
    ),
    Stage(
        "longer",
        3_337_648,
        (0.75, 0.7166235),
        (
            Feed(
                6144,
                (256, 256, 384, 512),
                {
                    "single": 0.02,
                    "multikey": 0.14,
                    "mixed": 0.18,
                    "multiquery": 0.07,
                    "vt": 0.17,
                    "multivalue": 0.22,
                    "list": 0.06,
                    "copy": 0.04,
                    "uuid": 0.06,
                    "dialogue": 0.04,
                },
                0.8,
            ),
            Feed(2048, (128, 256), {"cwe": 0.5, "fwe": 0.5}, 0.2),
        ),
        _MIDDLE,
    ),
    Stage(
        "counting",
        1_846_272,
        (0.7221863, 0.7068007),
        (
            Feed(
                5120,
                (256, 256, 384, 512),
                {
                    "single": 0.02,
                    "multikey": 0.12,
                    "mixed": 0.18,
                    "multiquery": 0.07,
                    "vt": 0.17,
                    "multivalue": 0.27,
                    "list": 0.04,
                    "copy": 0.04,
                    "uuid": 0.06,
                    "dialogue": 0.04,
                },
                0.7,
            ),
            Feed(3072, (128, 256, 256), {"cwe": 0.45, "fwe": 0.55}, 0.3),
        ),
        _MIDDLE,
    ),
    Stage(
        "long",
        1_916_928,
        (0.7, 0.6680512),
        (
            Feed(
                5120,
                (256, 256, 512, 512, 1024),
                {
                    "single": 0.06,
                    "multikey": 0.1,
                    "mixed": 0.14,
                    "multiquery": 0.06,
                    "vt": 0.12,
                    "multivalue": 0.36,
                    "list": 0.03,
                    "copy": 0.04,
                    "uuid": 0.06,
                    "dialogue": 0.03,
                },
                0.7,
            ),
            Feed(3072, (128, 256, 256, 512), {"cwe": 0.5, "fwe": 0.5}, 0.3),
        ),
        _DENSE,
    ),
    Stage(
        "decay",
        3_284_992,
        (0.6, 0.5044366),
        (
            Feed(
                5120,
                (128, 256, 256, 512, 512, 1024),
                {
                    "single": 0.06,
                    "multikey": 0.11,
                    "mixed": 0.14,
                    "multiquery": 0.06,
                    "vt": 0.13,
                    "multivalue": 0.32,
                    "list": 0.05,
                    "copy": 0.04,
                    "uuid": 0.06,
                    "dialogue": 0.03,
                },
                0.7,
            ),
            Feed(3072, (128, 256, 256, 512, 512), {"cwe": 0.5, "fwe": 0.5}, 0.3),
        ),
        _SPARSE,
    ),
    Stage(
        "ordinals",
        2_617_344,
        (0.52, 0.4676531),
        (
            Feed(
                3072,
                (96, 128, 128, 192, 256, 256),
                {
                    "single": 0.04,
                    "multikey": 0.1,
                    "mixed": 0.12,
                    "multiquery": 0.05,
                    "vt": 0.12,
                    "multivalue": 0.42,
                    "list": 0.03,
                    "copy": 0.03,
                    "uuid": 0.06,
                    "dialogue": 0.03,
                },
                0.7,
            ),
            Feed(1536, (128, 192, 256), {"cwe": 0.4, "fwe": 0.6}, 0.3),
        ),
        _ORDINALS,
    ),
    Stage(
        "slower",
        1_668_096,
        (0.24, 0.2177587),
        (
            Feed(
                3072,
                (96, 128, 128, 192, 256, 256),
                {
                    "single": 0.04,
                    "multikey": 0.1,
                    "mixed": 0.12,
                    "multiquery": 0.05,
                    "vt": 0.12,
                    "multivalue": 0.42,
                    "list": 0.03,
                    "copy": 0.03,
                    "uuid": 0.06,
                    "dialogue": 0.03,
                },
                0.7,
            ),
            Feed(1536, (128, 192, 256), {"cwe": 0.4, "fwe": 0.6}, 0.3),
        ),
        _ORDINALS,
    ),
    Stage(
        "frequency",
        2_548_224,
        (0.3, 0.2708774),
        (
            Feed(
                3072,
                (96, 128, 128, 192, 256, 256),
                {
                    "single": 0.04,
                    "multikey": 0.1,
                    "mixed": 0.12,
                    "multiquery": 0.05,
                    "vt": 0.12,
                    "multivalue": 0.42,
                    "list": 0.03,
                    "copy": 0.03,
                    "uuid": 0.06,
                    "dialogue": 0.03,
                },
                0.7,
            ),
            Feed(1536, (128, 192, 256), {"cwe": 0.5, "fwe": 0.5}, 0.3, (0.5, 0.4)),
        ),
        _ORDINALS,
    ),
    Stage(
        "decay to zero",
        15_500_000,
        (0.34, 0.003),
        (
            Feed(
                2560,
                (128, 256, 256, 512),
                {
                    "single": 0.07,
                    "multikey": 0.1,
                    "mixed": 0.1,
                    "multiquery": 0.05,
                    "vt": 0.14,
                    "multivalue": 0.37,
                    "list": 0.03,
                    "copy": 0.03,
                    "uuid": 0.08,
                    "dialogue": 0.03,
                },
                0.3,
            ),
            Feed(
                4096,
                (512, 1024, 1024, 2048),
                {
                    "single": 0.07,
                    "multikey": 0.2,
                    "mixed": 0.06,
                    "multiquery": 0.07,
                    "vt": 0.12,
                    "multivalue": 0.25,
                    "list": 0.04,
                    "copy": 0.02,
                    "uuid": 0.15,
                    "dialogue": 0.02,
                },
                0.4,
            ),
            Feed(
                2048,
                (128, 256, 256, 512, 512, 512, 1024, 2048),
                {"cwe": 0.5, "fwe": 0.5},
                0.3,
                (0.3, 0.15),
            ),
        ),
        _LAST,
    ),
    Stage(
        "values",
        6_000_000,
        (0.3, 0.2),
        (
            Feed(
                3072,
                (128, 192, 256, 384),
                {
                    "single": 0.04,
                    "multikey": 0.07,
                    "mixed": 0.08,
                    "multiquery": 0.04,
                    "vt": 0.12,
                    "multivalue": 0.52,
                    "list": 0.02,
                    "copy": 0.02,
                    "uuid": 0.07,
                    "dialogue": 0.02,
                },
                0.45,
            ),
            Feed(
                2048,
                (512, 1024, 1024, 2048),
                {
                    "single": 0.06,
                    "multikey": 0.2,
                    "mixed": 0.05,
                    "multiquery": 0.09,
                    "vt": 0.13,
                    "multivalue": 0.25,
                    "list": 0.04,
                    "copy": 0.02,
                    "uuid": 0.14,
                    "dialogue": 0.02,
                },
                0.27,
            ),
            Feed(
                2048,
                (128, 256, 256, 512, 512, 1024),
                {"cwe": 0.7, "fwe": 0.3},
                0.28,
                (0.2, 0.1),
                any_of=True,
            ),
        ),
        _VALUES,
    ),
    Stage(
        "last",
        7_000_000,
        (0.2, 0.002),
        (
            Feed(
                3072,
                (128, 192, 256, 384),
                {
                    "single": 0.04,
                    "multikey": 0.07,
                    "mixed": 0.08,
                    "multiquery": 0.04,
                    "vt": 0.12,
                    "multivalue": 0.52,
                    "list": 0.02,
                    "copy": 0.02,
                    "uuid": 0.07,
                    "dialogue": 0.02,
                },
                0.45,
            ),
            Feed(
                2048,
                (512, 1024, 1024, 2048),
                {
                    "single": 0.06,
                    "multikey": 0.2,
                    "mixed": 0.05,
                    "multiquery": 0.09,
                    "vt": 0.13,
                    "multivalue": 0.25,
                    "list": 0.04,
                    "copy": 0.02,
                    "uuid": 0.14,
                    "dialogue": 0.02,
                },
                0.27,
            ),
            Feed(
                2048,
                (128, 256, 256, 512, 512, 1024),
                {"cwe": 0.7, "fwe": 0.3},
                0.28,
                (0.2, 0.1),
                any_of=True,
            ),
        ),
        _VALUES,
    ),
)
