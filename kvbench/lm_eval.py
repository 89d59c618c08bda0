"""kvbench as a model of lm-eval: real eviction behind lm-eval's own command line.

`kvbench lm-eval run --model kvbench --model_args pretrained=ID,policy=snapkv,budget=0.2,moment=question --tasks ...`
takes every other argument of lm-eval, and so does `python -m kvbench.lm_eval`. With the full cache the model is
lm-eval's `hf`: prompts, tokens, truncation and stop strings are lm-eval's, as this class is a subclass of its own.
"""

from __future__ import annotations

import inspect
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import model_registry
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import handle_stop_sequences, postprocess_generated_text

from kvbench.budget import Budget
from kvbench.engine.cache import RaggedCache
from kvbench.engine.decode import NOT_FINITE, Batch, DecodeRow, Stop, end_tokens
from kvbench.engine.driver import engine
from kvbench.engine.loading import load_model, load_tokenizer, pick_device, pick_dtype
from kvbench.engine.measure import MeasuredText, feed_texts, log_probabilities
from kvbench.engine.prefix import Compression, Prefix
from kvbench.engine.pruning import prunes
from kvbench.errors import UserError, nearest
from kvbench.harness.named_tasks.generation import generation_settings
from kvbench.harness.named_tasks.prompts import common_length, longest_passage
from kvbench.moments import Moment
from kvbench.runs.values import attention, choice
from kvbench.spelling import policy as build_policy

MOMENTS = ("context", "question")
CONTEXTS = ("document", "fewshot")
_SHORTEST = 16
"""Fewest characters that examples must share to count as a context."""


class KVBenchLM(HFLM):  # type: ignore[misc]
    """lm-eval's `hf` with a compressed cache.

    The context of a prompt is prefilled and compressed once for all requests that share it; the rest of the prompt is
    fed to the compressed cache, and the choices of a question are branches behind it, measured in one ragged batch.

    Args:
        pretrained: A model as `--model` of `kvbench run` takes it.
        policy: A policy, in one spelling.
        budget: Budget of every (layer, head); may be left out if the policy evicts nothing.
        moment: `question`: compress after the whole prompt but its last token; `context`: compress before the question.
        context: For moment `context`, what the context is. `document`: up to the end of the longest field of the
            document that stands in the prompt and has text behind it. `fewshot`: what all prompts of a task begin
            with, such as its description and examples.
        seed: Noise seed of the policy.
        revision: Revision of the model on the hub.
        dtype: Data type of the weights.
        device: The device; None for `auto`.
        attn: Attention implementation, as `--attn` of `kvbench run`.
        options: Other options of lm-eval's `hf`, such as `max_length` or `add_bos_token`.

    Raises:
        UserError: A value or an option is unknown, the budget is missing, or the policy does not run here.
    """

    def __init__(
        self,
        pretrained: str = "reference",
        policy: str = "full",
        budget: float | str | None = None,
        moment: str = "question",
        context: str = "document",
        seed: int = 0,
        revision: str | None = None,
        dtype: str = "auto",
        device: str | None = None,
        attn: str = "auto",
        **options: Any,
    ) -> None:
        known = [*inspect.signature(KVBenchLM.__init__).parameters, *inspect.signature(HFLM.__init__).parameters]
        for option in options.keys() - set(known):
            raise UserError(f"model kvbench has no argument {option!r}{nearest(option, known)}")
        choice("moment", MOMENTS)(moment)
        choice("context", CONTEXTS)(context)
        when: Moment = "context" if moment == "context" else "question"
        built_policy = build_policy(policy)
        if prunes(built_policy):
            raise UserError(f"{policy} prunes images, which lm-eval's text tasks do not have; use another policy")
        if budget is None and built_policy.evicts:
            raise UserError(f"policy={policy} needs a budget, such as budget=0.2; budget=full evicts nothing")
        self.compression = Compression(built_policy, Budget.parse(str(budget or "full")), when, int(seed))
        torch_device = pick_device(device or "auto")
        torch_dtype = pick_dtype(dtype, torch_device)
        model = load_model(pretrained, revision, torch_device, torch_dtype, attn=attention(attn))
        super().__init__(pretrained=model, tokenizer=load_tokenizer(pretrained, revision), **options)
        self.context = context
        self._ends = end_tokens(model, self.tokenizer)
        self._context_lengths: dict[str, int] = {}

    # -- where the context ends --------------------------------------------------------------------

    def _find_contexts(self, requests: Sequence[Any]) -> None:
        """Find the length in characters of the context of every prompt.

        Raises:
            UserError: A task has none.
        """
        self._context_lengths = {}
        if self.compression.moment != "context" or not self.compression.policy.evicts:
            return
        prompts: dict[str, dict[str, Any]] = defaultdict(dict)
        for request in requests:
            if request.args[0].strip():  # unconditional choices have an empty prompt
                prompts[request.task_name][request.args[0]] = request.doc
        for task_name, docs in prompts.items():
            if self.context == "fewshot":
                length = common_length([*docs])
                lengths = dict.fromkeys(docs, 0 if length < _SHORTEST else length)
            else:
                lengths = {prompt: longest_passage(doc, prompt)[1] for prompt, doc in docs.items()}
            missing = sum(not length for length in lengths.values())
            if missing:
                lacks = {"document": "no document before the question", "fewshot": "no examples in common"}
                raise UserError(
                    f"{task_name}: {missing} of {len(lengths)} prompts have {lacks[self.context]}; use moment=question "
                    f"or context={CONTEXTS[self.context == 'document']}"
                )
            self._context_lengths |= lengths

    def _context_tokens(self, token_ids: Sequence[int], prompt: str, encoded_text: str) -> int:
        """Return how many tokens of a prompt are its context; at least one token follows them.

        Args:
            token_ids: Tokens of the prompt, perhaps truncated on the left.
            prompt: The prompt.
            encoded_text: The part of it that was encoded.
        """
        most = len(token_ids) - 1
        length = self._context_lengths.get(prompt)
        if length is None or most < 1:
            return most
        encoded = self.tokenizer(encoded_text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        inside: int = sum(end <= length for _, end in encoded["offset_mapping"])
        # Truncation removes tokens on the left; a beginning-of-sequence token adds one.
        inside += len(token_ids) - len(encoded["input_ids"])
        return min(max(inside, 1), most)

    # -- the engine --------------------------------------------------------------------------------

    def _compress(self, token_ids: Sequence[int]) -> RaggedCache:
        """Prefill tokens and compress them."""
        prefix = Prefix(self.model, self.compression.policy.needs)
        prefix.extend(torch.tensor([list(token_ids)], device=self.device))
        (cache,) = prefix.compress([self.compression])
        return cache

    def _rows(self) -> int:
        """Return how many rows are decoded together."""
        size = self.batch_size
        return size if isinstance(size, int) and size > 0 else 8

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return log-likelihood and greediness of every continuation, as lm-eval asks for them."""
        self._find_contexts(requests)
        measured: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        return measured

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of whole texts, which only the full cache can measure here.

        Raises:
            UserError: The policy evicts: no text stands before a rolling window.
        """
        if self.compression.policy.evicts:
            raise UserError(
                f"{requests[0].task_name} measures whole texts (loglikelihood_rolling), before which there is nothing "
                "to compress; leave it out, or use policy=full"
            )
        measured: list[float] = super().loglikelihood_rolling(requests, disable_tqdm=disable_tqdm)
        return measured

    @torch.no_grad()
    def _loglikelihood_tokens(
        self, requests: list[Any], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Measure continuations given as tokens: `((context, continuation), context_ids, continuation_ids)`."""
        # As in `hf`, the input is cut on the left; its last token is only predicted.
        groups: dict[tuple[int, ...], list[int]] = {}
        for request_index, (_, context_ids, continuation_ids) in enumerate(requests):
            overflow = max(len(context_ids) + len(continuation_ids) - self.max_length - 1, 0)
            groups.setdefault(tuple(context_ids[overflow:]), []).append(request_index)
        split = []
        for token_ids, members in groups.items():
            prompt = (requests[members[0]][0] or ("", ""))[0]
            # `hf` moves white space at the end of a prompt to the continuation.
            split.append((token_ids, self._context_tokens(token_ids, prompt, prompt.rstrip()), members))
        results: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        with engine(self.model):
            # Prompts that share their context are neighbours: it is compressed once.
            split.sort(key=lambda entry: entry[0][: entry[1]])
            for context_ids, group in groupby(split, key=lambda entry: entry[0][: entry[1]]):
                cache = self._compress(context_ids) if context_ids else None
                for token_ids, length, members in group:
                    branches = [requests[request_index][2] for request_index in members]
                    for request_index, measured in zip(
                        members, self._measure(cache, token_ids[length:], branches), strict=True
                    ):
                        results[request_index] = measured
                        if requests[request_index][0] is not None:
                            self.cache_hook.add_partial("loglikelihood", requests[request_index][0], measured)
        return results

    def _measure(
        self, cache: RaggedCache | None, question_ids: Sequence[int], branches: Sequence[Sequence[int]]
    ) -> Iterator[tuple[float, bool]]:
        """Feed a question once, and every branch behind it; yield sum of log-likelihoods and greediness."""
        if cache is None:  # nothing stands before the question: keep all of it
            prefix = Prefix(self.model, ())
            first_logits = prefix.extend(torch.tensor([list(question_ids)], device=self.device))[0]
            (asked,) = prefix.compress([_KEEP_ALL])
        else:
            batch = Batch(self.model, [cache], 1)
            first_logits, asked = batch.feed([question_ids], len(question_ids))[0], batch.cache
        texts = [MeasuredText((*question_ids[-1:], *branch[:-1]), tuple(branch)) for branch in branches]
        log_probs = log_probabilities(first_logits[None])
        for text in texts:
            text.advance(log_probs)
        longer = [text for text in texts if text.pending_ids]
        for start in range(0, len(longer), self._rows()):
            together = longer[start : start + self._rows()]
            batch = Batch(self.model, [asked] * len(together), len(together))
            feed_texts(batch, together, max(len(text.pending_ids) for text in together))
        for text in texts:
            if not text.is_finite:
                raise UserError(NOT_FINITE)
            yield text.loglikelihood, text.is_greedy

    @torch.no_grad()
    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Answer prompts greedily until their stop strings.

        Raises:
            UserError: A task samples its answers.
        """
        self._find_contexts(requests)
        answers: list[str] = []
        with engine(self.model):
            for start in range(0, len(requests), self._rows()):
                answers += self._generate(requests[start : start + self._rows()])
        return answers

    def _generate(self, requests: Sequence[Any]) -> Iterable[str]:
        """Answer some prompts in one batch."""
        eos_text = self.tok_decode(self.eot_token_id, skip_special_tokens=False)
        caches, questions, responses, stop_strings = [], [], [], []
        for request in requests:
            settings = generation_settings(request.args[1], request.task_name, self.max_gen_toks)
            if settings.get("do_sample"):
                raise UserError(f"{request.task_name} samples its answers, and model kvbench answers greedily")
            until = handle_stop_sequences(settings["until"], eos=eos_text)
            limit = settings["max_gen_toks"]
            encoded, _ = self.tok_batch_encode(
                [request.args[0]], left_truncate_len=self.max_length - limit, truncation=self.truncation
            )
            token_ids = encoded[0].tolist()
            length = self._context_tokens(token_ids, request.args[0], request.args[0])
            caches.append(self._compress(token_ids[:length]))
            questions.append(token_ids[length:])
            stop_strings.append(until)
            responses.append(DecodeRow(limit, Stop(self.tokenizer, self._ends, until)))
        batch = Batch(self.model, caches, len(caches))
        logits = batch.feed(questions, max(map(len, questions)))
        batch.answer(responses, logits, pause_ended=bool(batch.cache.readings))
        thinking_end = self.think_end_token if isinstance(self.think_end_token, str) else None
        for request, response, until in zip(requests, responses, stop_strings, strict=True):
            if response.error:
                raise UserError(response.error)
            text = postprocess_generated_text(self.tok_decode(response.tokens), until, thinking_end)
            self.cache_hook.add_partial("generate_until", request.args, text)
            yield text


_KEEP_ALL = Compression(build_policy("full"), Budget.parse("full"), "context", 0)


def run_lm_eval(arguments: Sequence[str]) -> None:
    """Run lm-eval's command line with one more model, `kvbench`.

    Args:
        arguments: Arguments of `lm-eval`, without its name.
    """
    if "kvbench" not in model_registry:
        model_registry.register("kvbench", target="kvbench.lm_eval:KVBenchLM")
    sys.argv = ["lm-eval", *arguments]
    cli_evaluate()


def main() -> None:
    """Run `python -m kvbench.lm_eval`."""
    try:
        run_lm_eval(sys.argv[1:])
    except UserError as error:
        sys.exit(f"kvbench: {error}")


if __name__ == "__main__":
    main()
