"""Measure the vision-language reference model: with its full cache, and with parts of it masked.

    python -m scripts.reference_vl.evaluate

The first table comes from plain greedy `generate` of transformers, one sequence at a time, with
prompts from the chat template and pixels from the image processor. In the second, the question
sees only some entries of the context, per layer and KV head. Both are for fresh samples.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
)
from transformers.masking_utils import sdpa_mask

from kvbench import stats
from kvbench.reference_vl import dialogues, path
from kvbench.reference_vl.dialogues import DialogueSettings, Exchange
from kvbench.reference_vl.pictures import EMPTY
from kvbench.reference_vl.questions import KINDS, chance
from kvbench.reference_vl.words import IMAGE

TASKS = {"shapes_vqa": dialogues.vqa, "shapes_dialogue": dialogues.dialogue}
_MASKED = "reference_vl_masked"
_WINDOW = 8


@dataclasses.dataclass
class Case:
    """A question with its inputs.

    Attributes:
        exchanges: The dialogue up to the question.
        inputs: Inputs of the model.
        context: Tokens before the question.
        visual: Index of each visual token.
    """

    exchanges: list[Exchange]
    inputs: dict[str, torch.Tensor]
    context: int
    visual: torch.Tensor

    @property
    def kind(self) -> str:
        """Kind of the question."""
        return self.exchanges[-1][1].kind

    @property
    def answer(self) -> str:
        """The right answer."""
        return self.exchanges[-1][1].answer


class Reader:
    """Makes inputs of dialogues as a user would, with the shipped tokenizer and image settings."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
        settings = json.loads((folder / "preprocessor_config.json").read_text(encoding="utf-8"))
        self.images = Qwen2VLImageProcessorPil(**settings)

    def case(self, exchanges: list[Exchange]) -> Case:
        """Return the inputs for the last question of a dialogue."""
        shown = [picture.pixels() for picture in dialogues.pictures(exchanges)]
        pixels = self.images(images=shown, return_tensors="pt")
        prompt = self.tokenizer.apply_chat_template(
            dialogues.messages(exchanges), tokenize=False, add_generation_prompt=True
        )
        pieces = str(prompt).split(IMAGE)
        sizes = pixels["image_grid_thw"].prod(-1) // self.images.merge_size**2
        text = pieces[0]
        for size, piece in zip(sizes.tolist(), pieces[1:], strict=True):
            text += IMAGE * size + piece
        ids = self.tokenizer(text, return_tensors="pt")["input_ids"]
        token = self.tokenizer.convert_tokens_to_ids(IMAGE)
        inputs = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "mm_token_type_ids": (ids == token).int(),
            "pixel_values": pixels["pixel_values"],
            "image_grid_thw": pixels["image_grid_thw"],
        }
        context = ids.shape[1] - len(exchanges[-1][1].words) - 1
        return Case(exchanges, inputs, context, (ids[0] == token).nonzero()[:, 0])


def cases(reader: Reader, task: str, count: int, seed: int) -> list[Case]:
    """Return one question of each of `count` samples; of a dialogue, turns in rotation."""
    result = []
    for index in range(count):
        sample = TASKS[task](DialogueSettings(), seed, index)
        result.append(reader.case(sample.asked(index % len(sample.turns))))
    return result


@torch.no_grad()
def generated(model: Any, reader: Reader, case: Case) -> str:
    """Return the model's greedy answer with the full cache."""
    out = model.generate(**case.inputs, max_new_tokens=4, do_sample=False)
    words = reader.tokenizer.decode(out[0, case.inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return str(words)


class Masking:
    """Hides entries of the context from the question in the language model's attention.

    Args:
        model: The model; its language model gets the attention function.
    """

    def __init__(self, model: Qwen2VLForConditionalGeneration) -> None:
        self.model = model
        self.score: Callable[..., torch.Tensor] | None = None
        self.case: Case | None = None
        self.kept = 0
        AttentionInterface.register(_MASKED, self._attend)
        AttentionMaskInterface.register(_MASKED, sdpa_mask)
        self.plain = model.model.language_model.config._attn_implementation

    def _attend(
        self, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, **rest: Any
    ) -> tuple[torch.Tensor, None]:
        assert self.case is not None
        assert self.score is not None
        groups = q.shape[1] // k.shape[1]
        length, context = q.shape[2], self.case.context
        seen = torch.ones(length, length, dtype=torch.bool).tril().repeat(1, q.shape[1], 1, 1)
        kept = self.score(q, k, context, self.case).topk(self.kept, -1).indices
        open_ = torch.zeros(1, k.shape[1], context, dtype=torch.bool).scatter_(2, kept, True)
        seen[:, :, context:, :context] = open_.repeat_interleave(groups, 1)[:, :, None]
        k, v = (states.repeat_interleave(groups, 1) for states in (k, v))
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return out.transpose(1, 2).contiguous(), None

    @torch.no_grad()
    def answer(self, case: Case, score: Callable[..., torch.Tensor], ratio: float) -> int:
        """Return the first token of the answer when a share of the context's entries is seen."""
        self.case, self.score, self.kept = case, score, max(1, round(ratio * case.context))
        language = self.model.model.language_model
        language.set_attn_implementation(_MASKED)
        try:
            logits = self.model(**case.inputs, use_cache=False, logits_to_keep=1).logits
        finally:
            language.set_attn_implementation(self.plain)
        return int(logits[0, -1].argmax())


def attention_of(q: torch.Tensor, k: torch.Tensor, rows: slice, context: int) -> torch.Tensor:
    """Return the mean attention of query rows to the context, `[1, KV heads, context]`."""
    groups = q.shape[1] // k.shape[1]
    scores = q[:, :, rows] @ k.repeat_interleave(groups, 1).mT / q.shape[-1] ** 0.5
    at = torch.arange(q.shape[2])
    scores = scores.masked_fill(at > at[rows, None], -torch.inf).softmax(-1)[..., :context]
    mean: torch.Tensor = scores.mean(2).view(1, k.shape[1], groups, context).mean(2)
    return mean


def policies(seed: int) -> dict[str, Callable[..., torch.Tensor]]:
    """Return scores of entries, `[1, KV heads, context]`; the largest are seen."""
    generator = torch.Generator().manual_seed(seed)

    def random(q: torch.Tensor, k: torch.Tensor, context: int, case: Case) -> torch.Tensor:
        return torch.rand(1, k.shape[1], context, generator=generator)

    def recent(q: torch.Tensor, k: torch.Tensor, context: int, case: Case) -> torch.Tensor:
        return torch.arange(context).float().expand(1, k.shape[1], -1)

    def keydiff(q: torch.Tensor, k: torch.Tensor, context: int, case: Case) -> torch.Tensor:
        keys = functional.normalize(k[:, :, :context], dim=-1)
        anchor = functional.normalize(keys.mean(2, keepdim=True), dim=-1)
        return -(keys * anchor).sum(-1)

    def h2o(q: torch.Tensor, k: torch.Tensor, context: int, case: Case) -> torch.Tensor:
        return attention_of(q, k, slice(0, context), context)

    def snapkv(q: torch.Tensor, k: torch.Tensor, context: int, case: Case) -> torch.Tensor:
        score = attention_of(q, k, slice(context - _WINDOW, context), context)
        score[..., -_WINDOW:] = torch.inf
        return score

    def salient(q: torch.Tensor, k: torch.Tensor, context: int, case: Case) -> torch.Tensor:
        score = random(q, k, context, case)
        shown = dialogues.pictures(case.exchanges)
        objects = torch.tensor([thing != EMPTY for p in shown for thing in p.objects])
        large = torch.tensor([big for p in shown for big in p.large])
        score[..., case.visual] += objects.float() + large.float()
        return score

    def question(q: torch.Tensor, k: torch.Tensor, context: int, case: Case) -> torch.Tensor:
        return attention_of(q, k, slice(context, q.shape[2]), context)

    def last(q: torch.Tensor, k: torch.Tensor, context: int, case: Case) -> torch.Tensor:
        return attention_of(q, k, slice(q.shape[2] - 1, q.shape[2]), context)

    def asked(q: torch.Tensor, k: torch.Tensor, context: int, case: Case) -> torch.Tensor:
        score = random(q, k, context, case)
        starts = np.cumsum([0, *(len(p.objects) for p in dialogues.pictures(case.exchanges))])
        cells = [int(starts[n]) + cell for n, cell in case.exchanges[-1][1].cells]
        score[..., case.visual[cells]] += 1
        return score

    return {each.__name__: each for each in (random, recent, keydiff, h2o, snapkv, salient, question, last, asked)}


def _shares(hits: dict[str, list[bool]]) -> str:
    """Return cells of a table: the share of right answers, its interval, and that of each kind."""
    every = [hit for kind in KINDS for hit in hits[kind]]
    low, high = stats.wilson(float(np.mean(every)), len(every))
    kinds = (f"{np.mean(hits[kind]):.2f}" if hits[kind] else "" for kind in KINDS)
    return f"{np.mean(every):.3f} | {low:.3f} to {high:.3f} | {' | '.join(kinds)}"


def full_table(model: Any, reader: Reader, by_task: dict[str, list[Case]]) -> None:
    """Print accuracy by kind with the full cache, 95% intervals, and chance."""
    print("| task | kind | n | accuracy | 95% interval | chance |\n|---|---|--:|--:|---|--:|")
    for task, chosen in by_task.items():
        hits: dict[str, list[bool]] = defaultdict(list)
        guessed: dict[str, list[float]] = defaultdict(list)
        for case in chosen:
            right = generated(model, reader, case) == case.answer
            by_chance = chance(case.kind, len(dialogues.pictures(case.exchanges)))
            for kind in ("all", case.kind):
                hits[kind].append(right)
                guessed[kind].append(by_chance)
        for kind in ("all", *KINDS):
            if n := len(hits[kind]):
                share = float(np.mean(hits[kind]))
                low, high = stats.wilson(share, n)
                print(
                    f"| {task} | {kind} | {n} | {share:.3f} | {low:.3f} to {high:.3f} | {np.mean(guessed[kind]):.2f} |",
                    flush=True,
                )


def masked_table(
    model: Any,
    reader: Reader,
    by_task: dict[str, list[Case]],
    names: Sequence[str],
    ratios: Sequence[float],
    seed: int,
) -> None:
    """Print accuracy by kind when only a share of the context's entries is seen."""
    print(f"\n| task | ratio | entries seen | all | 95% interval | {' | '.join(KINDS)} |")
    print("|---|--:|---|--:|---|" + "--:|" * len(KINDS))
    masking = Masking(model)
    for task, chosen in by_task.items():
        # With all entries, every policy gives the full cache: the row to compare the others with.
        rows = [(1.0, "random"), *((ratio, name) for ratio in ratios for name in names)]
        for ratio, name in rows:
            score = policies(seed)[name]
            hits: dict[str, list[bool]] = defaultdict(list)
            for case in chosen:
                token = masking.answer(case, score, ratio)
                word = reader.tokenizer.convert_ids_to_tokens(token)
                hits[case.kind].append(word == case.answer)
            seen = "all" if ratio == 1.0 else name
            print(f"| {task} | {ratio} | {seen} | {_shares(hits)} |", flush=True)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description="Measure the vision-language reference model.")
    parser.add_argument("--model", type=Path, default=path(), help="folder of the model")
    parser.add_argument("--samples", type=int, default=500, help="questions per task")
    parser.add_argument("--masked", type=int, default=250, help="questions per masked cell")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.2, 0.05])
    parser.add_argument("--policies", nargs="+", default=list(policies(0)))
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    reader = Reader(options.model)
    model = AutoModelForImageTextToText.from_pretrained(options.model, dtype=torch.float32).eval()
    by_task = {task: cases(reader, task, options.samples, options.seed) for task in TASKS}
    full_table(model, reader, by_task)
    some = {task: chosen[: options.masked] for task, chosen in by_task.items()}
    masked_table(model, reader, some, options.policies, options.ratios, options.seed)


if __name__ == "__main__":
    main()
