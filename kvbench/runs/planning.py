"""Planning: tasks loaded, prompts tokenised and cells named, without any model weights."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from transformers.utils import logging as transformers_logging

from kvbench.benchmark import Benchmark
from kvbench.decoding import Thinking
from kvbench.engine.block_quantizers import check_quantizer
from kvbench.engine.gguf import gguf_packages
from kvbench.engine.loading import (
    dtype_label,
    load_config,
    load_processor,
    load_tokenizer,
    model_revision,
    pick_attention,
    pick_device,
    pick_dtype,
)
from kvbench.engine.models import is_vision
from kvbench.engine.quantization import check_quantization, quantization_packages
from kvbench.engine.vision import PixelLimits, Vision
from kvbench.errors import LeftOut, UserError
from kvbench.files import cache_dir
from kvbench.harness.chat import check_template, check_thinking
from kvbench.harness.encode import tokenizer_hash
from kvbench.harness.harnesses import HARNESSES
from kvbench.harness.named_tasks.benchmarks import HARNESS as NAMED
from kvbench.harness.protocol import HarnessFlags, LoadedTask, Request, TaskSettings
from kvbench.judge.base import Judge
from kvbench.judge.choosing import choose
from kvbench.judge.rubrics import origin
from kvbench.named import lexicon_of, local_model, resolve_model
from kvbench.plugin import Policy
from kvbench.progress import Reporter
from kvbench.runs.cell import Cell, CellVariant
from kvbench.runs.fitting import check_moments, say_visual_budgets, unfit_policies
from kvbench.runs.grid import Grid
from kvbench.runs.prompt_lengths import TokenRange, select_by_length
from kvbench.runs.prompts import Prompts, Window, prompt_of, prompts_of

Say = Callable[[str], None]


@dataclass(frozen=True)
class Job:
    """One task at one length on one model.

    Attributes:
        cells: The cells that answer them.
        judge: Judges the responses; None if the metric needs no judge.
        truncated: Number of contexts truncated to fit the model.
    """

    task: LoadedTask
    prompts: Prompts
    cells: list[Cell]
    judge: Judge | None = None
    truncated: int = 0


@dataclass(frozen=True)
class Stage:
    """One model and all its jobs."""

    model: str
    device: torch.device
    dtype: torch.dtype
    tokenizer: Any
    jobs: list[Job]
    vision: Vision | None = None


@dataclass(frozen=True)
class RunPlan:
    """All stages of a run.

    Attributes:
        stages: The models with their jobs.
        left_out: Why tasks and policies are left out, by name.
    """

    stages: list[Stage]
    left_out: dict[str, str]


class JobName(NamedTuple):
    """Identity of a job in its grid.

    Attributes:
        model: Name of the model.
        task: Name of the task.
        length: Its length; 0 if its data is not sized.
    """

    model: str
    task: str
    length: int

    @classmethod
    def of(cls, stage: Stage, job: Job) -> JobName:
        """Return the name of a planned job."""
        return cls(stage.model, job.task.name, job.task.length)


def plan(
    grid: Grid,
    notify: Say,
    *,
    scored: bool = True,
    only: JobName | None = None,
    reporter: Reporter | None = None,
) -> RunPlan:
    """Load the tasks and name the cells, without any model weights.

    Args:
        notify: Receives messages about tasks and policies that are left out.
        scored: Whether responses are scored; otherwise no task needs a judge.
        only: The job to plan; None plans all of them.
        reporter: Progress reporter of reading and tokenising, if they take seconds.

    Raises:
        UserError: A policy, task, model or option is unknown or out of range, or a prompt is longer than the model's
            window.
    """
    quiet_libraries()
    variants = grid.variants()
    tasks = grid.leaves()
    if not any(benchmark.harness == NAMED for _, benchmark in tasks) and grid.harness_flags != HarnessFlags():
        raise UserError(
            f"--{_set_flag(grid.harness_flags)} is for tasks of lm-eval by name, and --task has none; leave it out"
        )
    if grid.lmms_model is not None and not any(benchmark.harness == "lmms_eval" for _, benchmark in tasks):
        raise UserError("--lmms-model is for tasks of lmms-eval, and --task has none; leave it out")
    for name in ("min_pixels", "max_pixels", "max_frames"):
        if getattr(grid, name) is not None and not any(benchmark.media for _, benchmark in tasks):
            raise UserError(
                f"--{name.replace('_', '-')} is for tasks with images or videos, and --task has none; leave it out"
            )
    if not variants:
        raise UserError("nothing to run: no policy is left after --no-full")
    if any(budget.absolute == 1 for budget in grid.parsed_budgets):
        notify("budget 1 keeps 1 entry per KV head; use 1.0 or full to keep everything, or a fraction such as 0.2")
    planner = _Planner(grid, notify, tasks, variants, scored, only, reporter)
    stages = [planner.stage(model_name) for model_name in grid.models if only is None or model_name == only.model]
    if not any(stage.jobs for stage in stages):
        raise UserError("nothing to run: none of the tasks is available here")
    return RunPlan(stages, planner.left_out)


def _set_flag(flags: HarnessFlags) -> str:
    """Return the first of lm-eval's flags that is set."""
    defaults = vars(HarnessFlags())
    return next(name for name, value in vars(flags).items() if value != defaults[name]).replace("_", "-")


@dataclass(frozen=True)
class _Model:
    """Facts about a model that planning needs.

    Attributes:
        name: As the user names it.
        vision: Turns images into tokens and pixels; None for a text model.
        dtype_label: The dtype, with the quantisation in brackets.
        attention: Attention implementation.
        revision: Commit of a hub model, or digest of a local one.
        window: Its maximum number of tokens.
        template: Whether its chat template is applied.
        thinks: Whether its tokenizer has a token that ends thinking.
        depth: Number of its layers.
    """

    name: str
    tokenizer: Any
    vision: Vision | None
    device: torch.device
    dtype: torch.dtype
    dtype_label: str
    attention: str
    revision: str
    window: Window
    template: bool
    thinks: bool
    depth: int


@dataclass
class _Planner:
    grid: Grid
    say: Say
    leaves: list[tuple[str, Benchmark]]
    variants: list[CellVariant]
    scored: bool
    only: JobName | None = None
    reporter: Reporter | None = None

    def __post_init__(self) -> None:
        self.left_out: dict[str, str] = {}
        self._said: set[str] = set()
        self._judge: Judge | None = None
        self._judged: set[str] = set()

    def stage(self, model_name: str) -> Stage:
        """Plan everything for one model."""
        model = _model_facts(self.grid, model_name)
        fingerprints = self._policy_files(model_name)
        jobs = [
            job
            for task_name, benchmark in self.leaves
            for length in (self.grid.lengths if benchmark.sized else (0,))
            if self.only in (None, JobName(model_name, task_name, length))
            and (job := self._job(model, task_name, benchmark, length, fingerprints)) is not None
        ]
        self._say_left_out()
        return Stage(model_name, model.device, model.dtype, model.tokenizer, jobs, model.vision)

    def _policy_files(self, model_name: str) -> dict[Policy, str]:
        """Return digests of the files that policies read for a model, by policy.

        A policy included only through `all` is left out if the model has no files for it.

        Raises:
            UserError: A policy named explicitly has no files for the model, or needs a package.
        """
        model_source = resolve_model(model_name)
        fingerprints = {}
        for policy in dict.fromkeys(variant.policy for variant in self.variants):
            try:
                check_quantizer(policy)
                fingerprints[policy] = policy.fingerprint(model_source)
            except UserError as error:
                if str(policy) in self.grid.named_policies:
                    raise
                self.left_out[str(policy)] = str(error)
        return fingerprints

    def _job(
        self,
        model: _Model,
        task_name: str,
        benchmark: Benchmark,
        length: int,
        fingerprints: dict[Policy, str],
    ) -> Job | None:
        """Plan one task; None if it is left out."""
        grid = self.grid
        model.window.check(length, task_name)
        try:
            judge = self._judge_of(benchmark)
            task = self._load(model, task_name, benchmark, length)
        except LeftOut as error:
            self.left_out[task_name] = str(error)
            return None
        if not benchmark.has_references and not grid.fidelity:
            raise UserError(f"{task_name} has no reference answers; add --fidelity, which needs none")
        for note in task.notes:
            self.say(note)
        if judge is not None and benchmark.name not in self._judged:
            self._judged.add(benchmark.name)
            self.say(f"{benchmark.name} is {judge.notice}")
        prompts, truncated = prompts_of(
            task,
            model.tokenizer,
            model.window,
            grid.truncate,
            self.say,
            model.vision,
            self.reporter,
        )
        check_moments(grid, task, prompts, truncated, self.say)
        template_cell = Cell(
            variant=self.variants[0],
            model=model.name,
            model_revision=model.revision,
            task=task_name,
            group=benchmark.name,
            length=task.length,
            seed=grid.seed,
            dtype=model.dtype_label,
            device=model.device.type,
            attention=model.attention,
            chat_template=self._template_hash(model, task_name, benchmark),
            data_hash=task.data_hash,
            task_version=task.version,
            prompts=_prompt_digest(task),
            generation=self._generation(model, benchmark, task, task.requests[prompts.first_answered]),
            packages=(*gguf_packages(model.name), *quantization_packages(grid.quantization)),
        )
        unfit_reasons = unfit_policies(grid, task_name, prompts, model.depth)
        if model.vision is not None:
            say_visual_budgets(grid, task_name, prompts, model.vision, self.say)
        self.left_out |= unfit_reasons
        cells = [
            template_cell.of(variant, fingerprints[variant.policy])
            for variant in self.variants
            if variant.policy in fingerprints and str(variant.policy) not in unfit_reasons
        ]
        return Job(task, prompts, cells, judge, truncated)

    def _judge_of(self, benchmark: Benchmark) -> Judge | None:
        """Return the judge of a benchmark's responses; None if it needs none.

        Raises:
            LeftOut: It needs a judge and none is configured.
            UserError: A variable is wrong, or there is no such rubric.
        """
        if not benchmark.judge or not self.scored:
            return None
        origin(benchmark.judge)  # raises if there is no such rubric
        if self._judge is None:
            self._judge = choose(self.grid.judge, self.say)
        return self._judge

    def _load(self, model: _Model, task_name: str, benchmark: Benchmark, length: int) -> LoadedTask:
        """Load a task and apply the generation flags."""
        if benchmark.harness not in HARNESSES:
            harness_names = ", ".join(HARNESSES)
            raise UserError(
                f"{benchmark.name} needs the harness {benchmark.harness!r}, which does not exist; "
                f"choose from {harness_names}"
            )
        task = HARNESSES[benchmark.harness].load(
            task_name,
            TaskSettings(
                length=length,
                samples=self.grid.samples,
                seed=self.grid.seed,
                tokenizer=model.tokenizer,
                tokenizer_id=model.name,
                lexicon=lexicon_of(model.tokenizer),
                chat_template=self._has_template(model, benchmark),
                thinking=self.grid.generation.thinking,
                cache_dir=cache_dir(),
                processor=None if model.vision is None else model.vision.processor,
                reporter=self.reporter,
                flags=self.grid.harness_flags,
                lmms_model=self.grid.lmms_model,
                max_frames=self.grid.max_frames,
            ),
            benchmark,
        )
        requests = self.grid.generation.applied(task.requests, self.say)
        if self.grid.prompt_tokens is not None:
            requests = self._of_length(requests, model, TokenRange.parse(self.grid.prompt_tokens), task_name)
        return replace(task, requests=requests)

    def _of_length(
        self, requests: Sequence[Request], model: _Model, token_range: TokenRange, task_name: str
    ) -> Sequence[Request]:
        """Return the requests whose prompts are in a range of lengths.

        Raises:
            LeftOut: There are none.
        """

        def count_tokens(request: Request) -> int:
            prompt = prompt_of(request, model.tokenizer, model.vision, model.window.tokens)
            return sum(len(branch.answer_ids) for branch in prompt.branches) if request.rolling else len(prompt.ids)

        selected = select_by_length(requests, token_range, count_tokens)
        self.say(f"{task_name}: {len(selected)} of {len(requests)} prompts have {token_range} tokens")
        return selected

    def _has_template(self, model: _Model, benchmark: Benchmark) -> bool:
        """Return whether prompts use the chat template; for tasks of lm-eval by name only if a flag says so."""
        if benchmark.harness != NAMED:
            return model.template
        return self.grid.apply_chat_template is not None or self.grid.chat_template is True

    def _template_hash(self, model: _Model, task_name: str, benchmark: Benchmark) -> str:
        has_template = self._has_template(model, benchmark) and task_name not in benchmark.plain
        return tokenizer_hash(model.tokenizer) if has_template else ""

    def _generation(self, model: _Model, benchmark: Benchmark, task: LoadedTask, request: Request) -> str:
        flags = self.grid.generation
        if task.name in benchmark.plain:  # without a template the thinking flag has no effect
            flags = replace(flags, thinking=None)
        return flags.record(request, model.thinks, {**task.recorded, **self._media_settings(benchmark, task)})

    def _media_settings(self, benchmark: Benchmark, task: LoadedTask) -> dict[str, int]:
        """Return the options that change what a model sees of the task's images and videos."""
        if not benchmark.media:
            return {}
        has_videos = any(medium.kind == "video" for request in task.requests for medium in request.media)
        names = ("min_pixels", "max_pixels", *(["max_frames"] if has_videos else []))
        return {name: value for name in names if (value := getattr(self.grid, name)) is not None}

    def _say_left_out(self) -> None:
        """Report what is left out, once per reason."""
        by_reason: dict[str, list[str]] = {}
        for name, reason in self.left_out.items():
            if name not in self._said:
                by_reason.setdefault(reason, []).append(name)
        self._said.update(self.left_out)
        for reason, left_names in by_reason.items():
            group_names = self._by_group(left_names)
            verb = "is" if len(group_names) == 1 else "are"
            self.say(f"{', '.join(group_names)} {verb} left out: {reason}")

    def _by_group(self, names: list[str]) -> list[str]:
        """Replace the tasks of a benchmark by its name if all of them are included."""
        by_benchmark: dict[str, list[str]] = {}
        for task_name, benchmark in self.leaves:
            by_benchmark.setdefault(benchmark.name, []).append(task_name)
        complete_groups = {
            task_name: group
            for group, task_names in by_benchmark.items()
            if len(task_names) > 1 and set(task_names) <= set(names)
            for task_name in task_names
        }
        return list(dict.fromkeys(complete_groups.get(name, name) for name in names))


def _model_facts(grid: Grid, model_name: str) -> _Model:
    """Read a model's configuration and tokenizer, and check the options against them."""
    config = load_config(model_name, grid.revision)
    tokenizer = load_tokenizer(model_name, grid.revision)
    device = pick_device(grid.device, grid.device_map)
    dtype = pick_dtype(grid.dtype, device)
    quantised = check_quantization(model_name, config, grid.quantization, grid.device_map)
    if grid.revision is not None and local_model(model_name) is not None:
        raise UserError(f"model {model_name} is local and has no revisions; leave out --revision {grid.revision}")
    uses_template = grid.chat_template
    if uses_template is None:
        uses_template = tokenizer.chat_template is not None
    elif uses_template and tokenizer.chat_template is None:
        raise UserError(f"model {model_name} has no chat template; use --no-chat-template")
    if uses_template:
        check_template(tokenizer, model_name)
    if grid.thinking is not None:
        check_thinking(tokenizer, model_name, uses_template)
    text_config = config.get_text_config()
    vision = None
    if is_vision(config):
        processor = load_processor(model_name, grid.revision, config.model_type, tokenizer)
        vision = Vision(processor, model_name, PixelLimits(grid.min_pixels, grid.max_pixels))
    return _Model(
        name=model_name,
        tokenizer=tokenizer,
        vision=vision,
        device=device,
        dtype=dtype,
        dtype_label=dtype_label(dtype, quantised),
        attention=pick_attention(grid.attn, device, dtype),
        revision=model_revision(model_name, config),
        window=Window(model_name, int(getattr(text_config, "max_position_embeddings", 0) or 0)),
        template=uses_template,
        thinks=Thinking.of(tokenizer) is not None,
        depth=int(text_config.num_hidden_layers),
    )


def _prompt_digest(task: LoadedTask) -> str:
    """Return a digest of the prompt format, from the first request (the data hash covers the data)."""
    first_request = task.requests[0]
    prompt_fields = (
        first_request.context,
        first_request.question,
        first_request.until,
        first_request.max_new_tokens,
        *([first_request.continuations] if first_request.continuations else ()),
    )
    return hashlib.sha256(repr(prompt_fields).encode()).hexdigest()[:16]


def quiet_libraries() -> None:
    """Silence transformers' messages for developers."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
