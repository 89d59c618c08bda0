"""Choice of a setting: the cheapest within some points of the full cache, and the memory it saves."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pandas as pd
from rich.text import Text

from kvbench.budget import Budget
from kvbench.report.frames import Results, tasks_at_chance, unit_scale
from kvbench.report.panel import Panel, panels
from kvbench.report.sorted_samples import Samples
from kvbench.report.verdict import POINT, Verdict, cheapest
from kvbench.tables.numbers import NumberFormat, interval, number, percent, size
from kvbench.tables.outputs import plain_text
from kvbench.tables.table import Name
from kvbench.tables.text import code, counted, listed, mean_of, plain, tokens

_OF_SETTING = ("share", "kv_bytes_live", "diff", "diff_lo", "diff_hi")
_CONTEXT_ONLY = ("", "context")
"""Moments whose full bytes are those of the context, so that bytes per token can be computed."""

NO_VERDICT = {
    "silent": "no statement, because the full cache is not above chance.",
    "no full": "no statement, because there is no full cache to compare with.",
    "scale": "no statement, because the scores are not in [0, 1] and a point has no meaning.",
    "whole": "no setting in this run holds less than the full cache.",
    "empty": "no policy has a score.",
    "informed": "no policy competes, because all of them are informed.",
}


@dataclass(frozen=True)
class Voice:
    """Markup of names and warnings.

    Attributes:
        name: Formats a policy, a budget or a task.
        strong: Emphasises a warning.
    """

    name: Callable[[object], str]
    strong: Callable[[str], str]


PLAIN = Voice(plain, str)
MARKDOWN = Voice(code, "**{}**".format)


@dataclass(frozen=True)
class Serving:
    """Serving scenario for memory estimates.

    Attributes:
        batch: Number of concurrent sequences.
        context: Tokens per sequence; None for the mean context length of the run.
    """

    batch: int = 1
    context: int | None = None


@dataclass(frozen=True)
class Aim:
    """Requirements for the choice of a setting.

    Attributes:
        within: Tolerated loss relative to the full cache, as a score in [0, 1]: 0.02 is two points.
        serving: Scenario for memory estimates; None for no estimates.
    """

    within: float = POINT
    serving: Serving | None = None

    @classmethod
    def of(cls, within: float | None, batch: int | None, context: int | None) -> Aim:
        """Return the requirements for a user's options.

        Args:
            within: Points; by default one.
            batch: Sequences; by default one if `context` is set.
            context: Tokens; by default those of the run if `batch` is set.
        """
        serving = None if batch is context is None else Serving(batch or 1, context)
        return cls(POINT if within is None else within / 100, serving)

    @property
    def points(self) -> str:
        """The tolerance in words, such as `2 points`."""
        point_text = f"{100 * self.within:.4g}"
        return f"{point_text} point{'s' * (point_text != '1')}"


WITHIN_A_POINT = Aim()


@dataclass(frozen=True)
class MemorySaving:
    """Bytes of keys and values of a batch, for the full cache and for a setting."""

    full: float
    held: float

    @property
    def saved(self) -> float:
        """Bytes saved by the setting."""
        return self.full - self.held


@dataclass(frozen=True)
class Choice:
    """The choice for one task, or for the mean of a panel's tasks.

    Attributes:
        panel: The panel.
        task: The task; empty for the mean.
        tasks: Number of tasks in the mean.
        verdict: The cheapest setting, or why there is none.
    """

    panel: Panel
    task: str
    tasks: int
    verdict: Verdict


def panel_choices(panel: Panel, aim: Aim) -> Iterator[Choice]:
    """Yield the choices of a panel: the mean first, then every informative task."""
    overall = panel.overall
    if len(panel.tasks) > 1 and len(overall):
        verdict = cheapest(overall, unit_scaled=unit_scale(overall), within=aim.within)
        yield Choice(panel, "", int(overall["tasks"].max()), verdict)
    for task_name in panel.tasks:
        task_cells = panel.of_task(task_name)
        verdict = cheapest(task_cells, unit_scaled=unit_scale(task_cells), within=aim.within)
        if verdict.kind != "silent":
            yield Choice(panel, task_name, 1, verdict)


def lines(panel: Panel, samples: Samples | None, aim: Aim, voice: Voice) -> Iterator[str]:
    """Yield the choices of a panel as text, a line each."""
    panel_memory = PanelMemory.of(panel, samples)
    choices = list(panel_choices(panel, aim))
    if len(panel.tasks) > 1 and set(tasks_at_chance(panel.cells)) == set(panel.tasks):
        no_mean_text = "none, because the full cache is not above chance on any task."
        yield f"{voice.strong('Mean:')} {no_mean_text}"
    for choice in choices:
        heading = voice.name(choice.task) + ":"
        if not choice.task:
            heading = voice.strong(f"{mean_of(choice.tasks).capitalize()}:")
        yield f"{heading} {sentence(choice.verdict, aim, voice, panel_memory)}"


@dataclass(frozen=True)
class PanelMemory:
    """Memory requirements of a panel's model.

    Attributes:
        token_bytes: Bytes of keys and values per token, over all compressed layers; NaN if unknown.
        context: Mean context length in tokens; NaN if unknown.
    """

    token_bytes: float
    context: float

    @classmethod
    def of(cls, panel: Panel, samples: Samples | None) -> PanelMemory:
        """Return the memory requirements measured with the full caches of a panel.

        Layers, KV heads, head size and dtype need not be known: the run measured the bytes of contexts of known length,
        and every token takes the same number of bytes.
        """
        panel_cells = panel.cells
        context_cells = panel_cells[(panel_cells["status"] == "ok") & panel_cells["moment"].isin(_CONTEXT_ONLY)]
        if samples is None or not len(context_cells):
            return cls(math.nan, math.nan)
        full_bytes = context_cells.set_index("cell")["kv_bytes_full"]
        context_samples = samples.of(full_bytes.index)
        mean_tokens = context_samples.groupby("cell", observed=True)["context_tokens"].mean()
        return cls(float((full_bytes / mean_tokens).median()), float(mean_tokens.median()))

    def tokens_of(self, serving: Serving) -> float:
        """Return the context length of a scenario in tokens."""
        return self.context if serving.context is None else float(serving.context)

    def of_setting(self, setting_row: pd.Series, serving: Serving) -> MemorySaving:
        """Return the memory of a setting.

        Fractional budgets keep their measured share of the full cache, token budgets their measured bytes, regardless
        of the context length.

        Args:
            setting_row: Cell or group mean of the setting.
            serving: Batch and context.
        """
        sequence_bytes = self.token_bytes * self.tokens_of(serving)
        budget = Budget.parse(str(setting_row["budget"]))
        is_share = budget.tokens is None and not budget.visual
        held_bytes = (
            setting_row["share"] * sequence_bytes
            if is_share
            else min(sequence_bytes, float(setting_row["kv_bytes_live"]))
        )
        return MemorySaving(serving.batch * sequence_bytes, serving.batch * held_bytes)

    def note(self, panel: Panel, serving: Serving) -> str:
        """Return an explanation of the memory estimates of a panel."""
        if math.isnan(self.token_bytes):
            return "Memory is unknown: the run has no full cache of a context."
        note_text = (
            f"Memory counts keys and values, {size(self.token_bytes)} per token over all compressed layers, as "
            "measured in this run."
        )
        length = panel.variant.length or round(self.context)
        if serving.context is not None and serving.context > length:
            note_text += (
                f" The scores are for {tokens(length)}: this run does not show what a policy loses at "
                f"{tokens(serving.context)}."
            )
        return note_text


def render_choices(results: Results, aim: Aim) -> Text:
    """Return the choices for means over tasks and for single tasks as text for a terminal."""
    styled_text = Text().append(f"Cheapest policy within {aim.points} of the full cache\n", "bold")
    for panel in panels(results):
        choice_lines = "\n".join(f"  {choice_line}" for choice_line in lines(panel, results.samples, aim, PLAIN))
        panel_title = plain_text((Name(panel.model), " · ", *panel.title))
        memory_note = ""
        if aim.serving is not None:
            memory_note = f"\n  {PanelMemory.of(panel, results.samples).note(panel, aim.serving)}"
        styled_text.append(f"{panel_title}\n{choice_lines or '  ' + NO_VERDICT['silent']}{memory_note}\n")
    return styled_text


def as_records(results: Results, aim: Aim) -> list[dict[str, Any]]:
    """Return the choices as JSON-serialisable data.

    Returns:
        An object per choice: the panel (`model`, `group`, `length`, `moment`, `seed`), `task` (empty for the mean of a
        panel's tasks) and `tasks` (their number), `kind`, `sure` and `open` as in `Verdict`, `said` (the verdict in
        words); if a setting was found, `policy`, `budget`, `share`, `kv_bytes_live`, `samples`, `diff`, `diff_lo`,
        `diff_hi`; and, if a batch or context was requested and the bytes per token are known, `memory_full` and
        `memory_held`.
    """
    return [
        _record(choice, panel_memory, aim)
        for panel in panels(results)
        for panel_memory in [PanelMemory.of(panel, results.samples)]
        for choice in panel_choices(panel, aim)
    ]


def _record(choice: Choice, panel_memory: PanelMemory, aim: Aim) -> dict[str, Any]:
    verdict, setting_row = choice.verdict, choice.verdict.row
    record: dict[str, Any] = {
        "model": choice.panel.model,
        "group": choice.panel.group,
        "length": choice.panel.variant.length,
        "moment": choice.panel.variant.moment,
        "seed": choice.panel.variant.seed,
        "task": choice.task,
        "tasks": choice.tasks,
        "kind": verdict.kind,
        "sure": verdict.sure,
        "open": verdict.open,
        "said": sentence(verdict, aim, PLAIN, panel_memory),
    }
    if setting_row is not None:
        record |= {"policy": str(setting_row["policy"]), "budget": str(setting_row["budget"])}
        record |= {field_name: float(setting_row[field_name]) for field_name in _OF_SETTING}
        record["samples"] = int(setting_row["samples"])
        if aim.serving is not None and not math.isnan(panel_memory.token_bytes):
            batch_memory = panel_memory.of_setting(setting_row, aim.serving)
            record |= {"memory_full": batch_memory.full, "memory_held": batch_memory.held}
    return record


def sentence(
    verdict: Verdict,
    aim: Aim = WITHIN_A_POINT,
    voice: Voice = MARKDOWN,
    panel_memory: PanelMemory | None = None,
) -> str:
    """Return a verdict as text.

    Args:
        verdict: The verdict.
        aim: Requirements of the verdict.
        voice: Markup of names.
        panel_memory: Memory requirements of the model, if `aim` includes a scenario.
    """
    setting_row = verdict.row
    if setting_row is None:
        return NO_VERDICT[verdict.kind]
    gap = number(setting_row["diff"], NumberFormat.POINTS, signed=True)
    bounds = interval(setting_row["diff_lo"], setting_row["diff_hi"], NumberFormat.POINTS, signed=True)
    share = f"{percent(setting_row['share'])} of the bytes"
    setting = f"{_setting(setting_row, voice)} ({share}; {gap} {bounds} points from full)"
    if verdict.kind == "none":
        verdict_text = f"none; {setting} comes closest."
        if verdict.open:
            verdict_text += f" {voice.strong('Not certain:')} its interval includes losses within {aim.points}; "
            verdict_text += f"{resolution(verdict, setting_row)}."
        if verdict.equal:
            verdict_text += f" Equally close: {_settings(verdict.equal, voice, with_shares=True)}."
        return verdict_text
    if verdict.sure:
        verdict_text = f"{setting}. The whole interval is within {aim.points}."
    else:
        verdict_text = f"{setting}. {voice.strong('Not certain:')} the interval includes losses of more than "
        verdict_text += f"{aim.points}; {resolution(verdict, setting_row)}."
    if panel_memory is not None and aim.serving is not None and not math.isnan(panel_memory.token_bytes):
        verdict_text += f" {_saving(panel_memory, setting_row, aim.serving)}"
    if verdict.certain is not None and not verdict.sure:
        certain_text = _settings([verdict.certain], voice, with_shares=True)
        verdict_text += f" The cheapest whose whole interval is within: {certain_text}."
    if verdict.equal:
        verdict_text += f" Also within {aim.points} at the same bytes: {_settings(verdict.equal, voice)}."
    if verdict.cheaper:
        cheaper_text = _settings(verdict.cheaper, voice)
        verdict_text += f" Cheaper settings that this run cannot rule out: {cheaper_text}."
    return verdict_text


def resolution(verdict: Verdict, entry: pd.Series) -> str:
    """Return the minimum detectable drop as text: the distance from a difference to its worse end."""
    drop = number(verdict.resolution, NumberFormat.POINTS)
    return f"{counted(int(entry['samples']), 'sample')} can detect only drops of more than {drop} points"


def _saving(panel_memory: PanelMemory, setting_row: pd.Series, serving: Serving) -> str:
    batch_memory = panel_memory.of_setting(setting_row, serving)
    serving_text = f"At batch {serving.batch} and {tokens(round(panel_memory.tokens_of(serving)))}"
    held_text = f"it holds {size(batch_memory.held)} instead of {size(batch_memory.full)}"
    return f"{serving_text} {held_text}: {size(batch_memory.saved)} saved."


def _setting(setting_row: pd.Series, voice: Voice) -> str:
    return f"{voice.name(setting_row['policy'])} at {voice.name(setting_row['budget'])}"


def _settings(setting_rows: Iterable[pd.Series], voice: Voice, *, with_shares: bool = False) -> str:
    setting_texts = [
        _setting(setting_row, voice) + f" ({percent(setting_row['share'])})" * with_shares
        for setting_row in setting_rows
    ]
    return listed(setting_texts, 6)
