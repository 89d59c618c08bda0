"""The model class that lmms-eval runs: prompts of lmms-eval, answered as `kvbench run` answers them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from lmms_eval.api.instance import GenerationResult, TokenCounts
from lmms_eval.api.model import lmms

from kvbench.budget import Budget
from kvbench.engine.block_quantizers import check_quantizer
from kvbench.engine.driver import engine
from kvbench.engine.loading import (
    load_config,
    load_model,
    load_processor,
    load_tokenizer,
    pick_attention,
    pick_device,
    pick_dtype,
)
from kvbench.engine.models import is_vision
from kvbench.engine.pruning import depth_problem, prunes
from kvbench.engine.threads import thread_budget
from kvbench.engine.vision import Vision
from kvbench.errors import UserError, nearest
from kvbench.harness import chat
from kvbench.harness.lmms_prompts import answer_settings, split_messages
from kvbench.harness.protocol import Request
from kvbench.harness.requests import arranged
from kvbench.harness.rows import SENTINEL
from kvbench.moments import Timing
from kvbench.named import resolve_model
from kvbench.progress import Silent
from kvbench.runs.answers import Prompt
from kvbench.runs.cell import Cell, CellVariant
from kvbench.runs.executors.base import answer
from kvbench.runs.index import Key
from kvbench.runs.prompts import Window, prompt_of
from kvbench.runs.schema import Response
from kvbench.runs.values import attention, batch, choice
from kvbench.runs.worker import Worker
from kvbench.spelling import policy as build_policy

MOMENTS = ("context", "question")

_IGNORED = ("max_batch_size",)
"""Arguments that lmms-eval passes to every model if they are set."""


class KVBenchLMM(lmms):  # type: ignore[misc]
    """A chat-style model of lmms-eval whose cache is compressed.

    Its context is the prompt up to the last image or video. It is prefilled once for all questions about it.

    Args:
        pretrained: A vision-language model as `--model` of `kvbench run` takes it.
        policy: A policy, in one spelling.
        budget: Budget of every (layer, head), also of visual tokens such as `visual:64`.
        moment: `question`: compress after the whole prompt; `context`: compress before the question.
        seed: Noise seed of the policy.
        revision: Revision of the model on the hub.
        dtype: Data type of the weights.
        device: The device; None for `auto`.
        attn: Attention implementation, as `--attn` of `kvbench run`.
        batch_size: Maximum number of responses decoded together, or `auto`.
        options: Arguments that have no meaning here; any that lmms-eval does not pass by itself is refused.

    Raises:
        UserError: A value is unknown, or the policy does not run on the model.
    """

    is_simple = False

    def __init__(
        self,
        pretrained: str = "reference-vl",
        policy: str = "full",
        budget: float | str = "full",
        moment: str = "question",
        seed: int = 0,
        revision: str | None = None,
        dtype: str = "auto",
        device: str | None = None,
        attn: str = "auto",
        batch_size: int | str = "auto",
        **options: Any,
    ) -> None:
        super().__init__()
        for option in options.keys() - {*_IGNORED}:
            known = (
                "pretrained",
                "policy",
                "budget",
                "moment",
                "seed",
                "revision",
                "dtype",
                "attn",
                "device",
                "batch_size",
            )
            raise UserError(f"model kvbench has no argument {option!r}{nearest(option, known)}")
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise UserError("model kvbench runs in one process; start lmms-eval without accelerate or torchrun")
        choice("moment", MOMENTS)(moment)
        self._batch_size = batch("batch_size")(str(batch_size))
        built_policy = build_policy(policy)
        check_quantizer(built_policy)
        variant = CellVariant(built_policy, Budget.parse(str(budget)), Timing.parse(moment))
        config = load_config(pretrained, revision)
        if not is_vision(config):
            raise UserError(f"model {pretrained} takes no images; use pretrained=reference-vl, or `kvbench lm-eval`")
        text_config = config.get_text_config()
        score = built_policy.score
        if score is not None and (problem := depth_problem(score, int(text_config.num_hidden_layers))):
            raise UserError(f"{policy} cannot run on {pretrained}: {problem}")
        torch_device = pick_device(device or "auto")
        torch_dtype = pick_dtype(dtype, torch_device)
        self.tokenizer = load_tokenizer(pretrained, revision)
        self._vision = Vision(load_processor(pretrained, revision, config.model_type, self.tokenizer), pretrained)
        self._window = Window(pretrained, int(getattr(text_config, "max_position_embeddings", 0) or 0))
        self._load: Callable[[], Any] = partial(
            load_model, pretrained, revision, torch_device, torch_dtype, attn=attention(attn)
        )
        self.model = self._load()
        self._cell = Cell(
            variant=variant,
            model=pretrained,
            model_revision="",
            task="",
            group="",
            length=0,
            seed=int(seed),
            dtype=str(torch_dtype).removeprefix("torch."),
            device=torch_device.type,
            attention=pick_attention(attn, torch_device, torch_dtype),
            chat_template="",
            data_hash="",
            task_version="",
            prompts="",
            files=built_policy.fingerprint(resolve_model(pretrained)),
        )

    def generate_until(self, requests: list[Any]) -> list[GenerationResult]:
        """Answer prompts, those of one task and one limit together.

        Raises:
            UserError: The policy fails, or a prompt does not fit.
        """
        groups: dict[tuple[str, str], list[int]] = {}
        for request_index, request in enumerate(requests):
            _, _, generation_kwargs, _, task_name, _ = request.args
            group_key = (task_name, json.dumps(generation_kwargs, sort_keys=True, default=str))
            groups.setdefault(group_key, []).append(request_index)
        results: dict[int, GenerationResult] = {}
        with thread_budget(self.model, _ignore), engine(self.model):
            for (task_name, _), members in groups.items():
                responses = self._answers(task_name, [requests[index].args for index in members])
                for request_index, response in zip(members, responses, strict=True):
                    input_tokens = response.context_tokens + response.question_tokens
                    counts = TokenCounts(input_tokens=input_tokens, output_tokens=response.generated_tokens)
                    results[request_index] = GenerationResult(response.response, counts)
        return [results[request_index] for request_index in range(len(requests))]

    def _answers(self, task_name: str, arguments: Sequence[tuple[Any, ...]]) -> list[Response]:
        """Answer requests of one task with the same generation settings.

        Args:
            arguments: Arguments of the requests. The repeats of a request follow it.
        """
        repeats: dict[tuple[str, int], list[int]] = {}
        for position, (_, _, _, doc_id, _, split) in enumerate(arguments):
            repeats.setdefault((split, doc_id), []).append(position)
        asked = self._requests(task_name, [arguments[positions[0]] for positions in repeats.values()])
        prompts: list[Prompt] = []
        positions_by_doc = list(repeats.values())
        keys: dict[int, tuple[str, int, int]] = {}
        for request in asked:
            prompt = prompt_of(request, self.tokenizer, self._vision, self._window.tokens)
            label = f"{task_name}, document {arguments[positions_by_doc[request.doc_id][0]][3]}"
            self._window.check(len(prompt.ids) + prompt.limit, label, "fewer or smaller images")
            for repeat, position in enumerate(positions_by_doc[request.doc_id]):
                prompts.append(Prompt(request, prompt.context_ids, prompt.question_ids, repeat=repeat))
                keys[position] = (request.sample_id, request.question_id, repeat)
        cell = replace(self._cell, task=task_name, group=task_name)
        sink = _Responses()
        worker = Worker(
            self.model,
            Silent(),
            self._vision,
            self._load,
            tokenizer=self.tokenizer,
            store=sink,
            batch_size=self._batch_size,
        )
        answer(worker, prompts, [cell])
        if worker.failed:
            raise UserError(f"{cell}: {next(iter(worker.failed.values()))}")
        return [sink.responses[(cell.cell, *keys[position])] for position in range(len(arguments))]

    def _requests(self, task_name: str, arguments: Sequence[tuple[Any, ...]]) -> Sequence[Request]:
        """Return requests for documents, those of one context adjacent; `doc_id` is the position in `arguments`.

        Raises:
            UserError: A prompt does not fit the moment, the budget or the policy.
        """
        token_limit, settings = answer_settings(task_name, arguments[0][2])
        render = partial(chat.chat, self._vision.processor, self._cell.model, parts=True)
        prompt_parts, media = [], []
        for _, doc_to_messages, _, doc_id, _, split in arguments:
            messages, prompt_media = split_messages(
                task_name, doc_to_messages(self.task_dict[task_name][split][doc_id])
            )
            context, _, question = render(messages).partition(SENTINEL)
            prompt_parts.append((context, question))
            media.append(tuple(prompt_media))
        if not all(media):
            self._check_text(task_name)
        rows = [{"outputs": [], "extra": {}, "max_new_tokens": token_limit, "until": []}] * len(arguments)
        return arranged(task_name, rows, [None] * len(arguments), prompt_parts, media, render, settings)

    def _check_text(self, task_name: str) -> None:
        """Refuse prompts without images where only images have a meaning.

        Raises:
            UserError: The moment, the budget or the policy needs images.
        """
        if self._cell.is_full:
            return
        if prunes(self._cell.policy):
            raise UserError(f"{task_name} has prompts without images, and {self._cell.policy} prunes images")
        if self._cell.budget.visual:
            raise UserError(f"{task_name} has prompts without images; use a budget such as 0.2 instead of a visual one")
        if self._cell.moment == "context":
            raise UserError(f"{task_name} has prompts without images, so none has a context; use moment=question")

    def generate_until_multi_round(self, requests: list[Any]) -> list[str]:
        """Refuse dialogues.

        Raises:
            UserError: Always.
        """
        raise UserError(f"{requests[0].args[4]} is a dialogue, which model kvbench does not answer; leave it out")

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        """Refuse to measure texts.

        Raises:
            UserError: Always.
        """
        raise UserError(
            f"{requests[0].task_name} compares log-likelihoods, and model kvbench generates answers; leave it out"
        )


class _Responses:
    """Holds the responses of a worker in memory."""

    def __init__(self) -> None:
        self.responses: dict[Key, Response] = {}

    def keys(self) -> frozenset[Key]:
        """Return nothing: every response is generated."""
        return frozenset()

    def append(self, responses: Sequence[Response]) -> None:
        """Take responses."""
        for response in responses:
            key = (response.cell, response.sample_id, response.question_id, response.repeat)
            self.responses[key] = response


def _ignore(message: str) -> None:
    """Ignore a remark about threads."""
