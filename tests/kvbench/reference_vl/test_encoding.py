"""Training sequences are token for token what the chat template gives at evaluation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerFast, Qwen2VLForConditionalGeneration

from kvbench.reference_vl import dialogues
from kvbench.reference_vl.dialogues import DialogueSample, DialogueSettings
from kvbench.reference_vl.pictures import Picture
from kvbench.reference_vl.words import ASSISTANT, BOS, END, IDS, IMAGE, USER
from scripts.reference_vl.batches import encode, make_batch
from scripts.reference_vl.model import build_tokenizer, model_config


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


def _expanded(tokenizer: PreTrainedTokenizerFast, text: str, pictures: list[Picture]) -> list[int]:
    """Tokenize after replacing each image token by one per cell, as a processor does."""
    pieces = text.split(IMAGE)
    assert len(pieces) == len(pictures) + 1
    for piece, picture in zip(pieces[1:], pictures, strict=True):
        pieces[0] += IMAGE * picture.side**2 + piece
    return tokenizer(pieces[0])["input_ids"]


def test_training_tokens_equal_the_chat_template(
    samples: list[DialogueSample], tokenizer: PreTrainedTokenizerFast
) -> None:
    for sample in samples:
        exchanges = sample.exchanges()
        encoded = encode(exchanges)
        for last in (0, len(exchanges) - 1):
            text = tokenizer.apply_chat_template(
                dialogues.messages(exchanges[: last + 1]),
                tokenize=False,
                add_generation_prompt=True,
            )
            prompt = _expanded(tokenizer, text, dialogues.pictures(exchanges[: last + 1]))
            answer = encoded.answers[last]
            assert prompt == encoded.ids[:answer]
            assert encoded.ids[answer : answer + 2] == [
                IDS[exchanges[last][1].answer],
                IDS[END],
            ]


def test_training_positions_equal_those_of_transformers(samples: list[DialogueSample]) -> None:
    model = Qwen2VLForConditionalGeneration(model_config())
    for sample in samples[::5]:
        encoded = encode(sample.exchanges())
        ids = torch.tensor([encoded.ids])
        sides = [picture.side for picture in dialogues.pictures(sample.exchanges())]
        positions, _ = model.model.get_rope_index(
            ids,
            mm_token_type_ids=(ids == IDS[IMAGE]).int(),
            image_grid_thw=torch.tensor([[1, 2 * side, 2 * side] for side in sides]),
        )
        assert positions[:, 0].T.tolist() == [list(place) for place in encoded.positions]


def test_the_template_takes_strings_and_adds_the_prompt_only_when_asked(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    history = [
        {"role": "user", "content": "colour image 1 a1"},
        {"role": "assistant", "content": "red"},
    ]
    ids = tokenizer.apply_chat_template(history, return_dict=False)
    words = f"{BOS} {USER} colour image 1 a1 {ASSISTANT} red {END}".split()
    assert tokenizer.convert_ids_to_tokens(ids) == words
    longer = tokenizer.apply_chat_template(history, add_generation_prompt=True, return_dict=False)
    assert tokenizer.convert_ids_to_tokens(longer) == [*words, ASSISTANT]
    with pytest.raises(TemplateError, match="only roles user and assistant"):
        tokenizer.apply_chat_template([{"role": "system", "content": "red"}])


def test_tokens_that_are_special_are_named_and_skipped(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.image_token == IMAGE
    assert tokenizer.eos_token == END
    assert tokenizer.padding_side == "left"
    ids = [IDS[word] for word in ("red", END)]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "red"


def test_batches_know_where_answers_and_cells_are() -> None:
    drawn = [dialogues.vqa(DialogueSettings(questions=2), 1, n) for n in range(3)]
    batch = make_batch([encode(each.exchanges()) for each in drawn], np.random.default_rng(0))
    flat = batch.ids.flatten()
    assert (flat[batch.visual] == IDS[IMAGE]).all()
    answers = [question.answer for each in drawn for _, question in each.exchanges()]
    assert flat[batch.answers].tolist() == [IDS[answer] for answer in answers]
    assert (flat[batch.answers - 1] == IDS[ASSISTANT]).all()
    shown = [p for each in drawn for p in dialogues.pictures(each.exchanges())]
    assert len(batch.order) == sum(p.side**2 for p in shown) == len(batch.visual)
    assert sum(len(patches) for patches in batch.patches.values()) == 4 * len(batch.order)
    texts = [part for each in drawn for part in each.turns[0].parts if isinstance(part, str)]
    tags = [words[words.index("note") + 3 :][0] for words in map(str.split, texts) if "note" in words]
    assert tags
    noted = batch.named[len(batch.visual) :]
    assert flat[noted].tolist() == [IDS[tag] for tag in tags]
