"""The curriculum of the vision-language reference model: what it sees, and in which order.

- One-cell pictures and names in random order, mixed in from the first step, teach that a picture
  has a name. With one picture first and several later, names were not learned.
- Counts, comparisons and notes follow when single cells are found.
- The learning rate falls over the last two stages.

The curriculum was adapted during training: stages were stopped at a checkpoint and followed by
others. The lengths and rates are those that were trained.
"""

from __future__ import annotations

import dataclasses

from kvbench.reference_vl.dialogues import DialogueSettings


@dataclasses.dataclass(frozen=True)
class Feed:
    """One kind of batch; the steps of a stage go through its feeds in turn.

    Attributes:
        settings: What the samples look like.
        dialogue: Whether samples are dialogues; otherwise, all pictures come first.
    """

    settings: DialogueSettings
    dialogue: bool = False


@dataclasses.dataclass(frozen=True)
class Stage:
    """A part of the training.

    Attributes:
        name: Name in the log.
        tokens: Tokens that the stage lasts for, without padding.
        feeds: What the steps see, in turn.
        rate: Factor of the learning rates at the start and at the end of the stage.
        batch: Tokens per step.
        hints: Weight of the auxiliary losses.
    """

    name: str
    tokens: int
    feeds: tuple[Feed, ...]
    rate: tuple[float, float] = (1.0, 1.0)
    batch: int = 2600
    hints: float = 0.3


def _simple(count: int, sides: tuple[int, ...]) -> Feed:
    return Feed(
        DialogueSettings(
            images=(count, count),
            sides=sides,
            filler=(0, 0),
            questions=14,
            kinds=(3, 3, 2.5, 1.5, 0, 0, 0, 0),
            shuffled=True,
            hints=0,
            notes=0.0,
            blank=0.0,
        )
    )


_HARD = (2.0, 2.0, 2.0, 2.0, 3.0, 2.0, 4.0, 2.0)
_MIXED = DialogueSettings(
    kinds=_HARD,
    images=(2, 4),
    sides=(2, 3),
    filler=(0, 8),
    questions=14,
    shuffled=True,
    ordinals=0.0,
)
_COUNTS = (2.0, 1.5, 1.5, 1.5, 4.0, 2.5, 3.0, 2.0)
_RARE = (2.0, 1.5, 1.0, 1.0, 5.0, 3.0, 2.0, 4.0)
_MANY = DialogueSettings(questions=12, kinds=_COUNTS)
_TURNS = DialogueSettings(questions=2, kinds=_COUNTS)

CURRICULUM = (
    Stage("cells", 1_400_000, (_simple(1, (3,)), _simple(4, (1,)), _simple(2, (2,)), _simple(2, (3,)))),
    Stage("names", 600_000, (_simple(4, (1,)), _simple(2, (2,)), _simple(3, (1, 2, 3)))),
    Stage(
        "kinds",
        4_000_000,
        (
            Feed(_MIXED),
            Feed(dataclasses.replace(_MIXED, images=(4, 4), sides=(1, 2))),
            Feed(dataclasses.replace(_MIXED, shuffled=False, ordinals=0.25)),
        ),
    ),
    Stage(
        "all",
        2_000_000,
        (
            Feed(_MANY),
            Feed(_TURNS, dialogue=True),
            Feed(dataclasses.replace(_MANY, shuffled=True)),
        ),
        batch=3600,
    ),
    Stage(
        "slower",
        1_800_000,
        (Feed(_MANY), Feed(_TURNS, dialogue=True)),
        rate=(1.0, 0.455),
        batch=3600,
        hints=0.2,
    ),
    Stage(
        "decay",
        2_200_000,
        (
            Feed(dataclasses.replace(_MANY, kinds=_RARE)),
            Feed(dataclasses.replace(_TURNS, kinds=_RARE), dialogue=True),
        ),
        rate=(0.48, 0.02),
        batch=3600,
        hints=0.2,
    ),
)
