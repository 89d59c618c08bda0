"""Samples of both tasks."""

from __future__ import annotations

import pytest

from kvbench.reference_vl import dialogues
from kvbench.reference_vl.dialogues import DialogueSample, DialogueSettings


@pytest.fixture(scope="session")
def samples() -> list[DialogueSample]:
    """Samples of both tasks in several settings."""
    settings = (
        DialogueSettings(questions=6),
        DialogueSettings(questions=6, shuffled=True, images=(2, 3)),
        DialogueSettings(images=(2, 2), hints=0, notes=0.0, filler=(0, 0), turns=(1, 2)),
    )
    return [
        make(each, 5, index) for make in (dialogues.vqa, dialogues.dialogue) for each in settings for index in range(12)
    ]
