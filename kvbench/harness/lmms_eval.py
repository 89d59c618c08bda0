"""lmms-eval (0.7.3) as a harness: its own definitions of tasks, on our rows.

A benchmark's YAML names a definition of lmms-eval (`definition: mmstar/mmstar.yaml`). It may also
have `percent: true`, if the metric is a percentage there (scores here are from 0 to 1), and
`metric`, if the leaf has another one than the benchmark. What else stands in it replaces what the
definition says.

lmms-eval neither downloads data nor generates: its functions make the messages of a prompt and
score a response, one row at a time. Its chat-style models apply no stop strings, so none are
applied here.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.benchmark import IMAGE, VIDEO, Benchmark, Doc, Marks, Medium
from kvbench.data import records
from kvbench.data.media import is_medium, medium, video
from kvbench.data.sources import hinting
from kvbench.decoding import Thinking, scored_text
from kvbench.errors import LeftOut, UserError
from kvbench.harness import chat, loading
from kvbench.harness import rows as data
from kvbench.harness.optional import provide_latex2sympy2
from kvbench.harness.protocol import Key, LoadedTask, Request, TaskSettings
from kvbench.harness.requests import Asked, arranged

_OWN = ("definition", "metric", "percent")
"""What our YAML says to kvbench; the rest replaces what the definition says."""

_MAX_NEW_TOKENS = 128
"""The limit of lmms-eval's models where a definition has none."""


class LmmsEvalHarness:
    """Loads tasks that lmms-eval defines."""

    name = "lmms_eval"

    def load(
        self, task: str, settings: TaskSettings, benchmark: Benchmark | None = None
    ) -> LmmsEvalTask:
        """Load a leaf task; see `Harness.load`.

        Raises:
            LeftOut: lmms-eval or a package that the task needs is not installed.
        """
        leaf, bench = loading.find(task, benchmark)
        settings = loading.settle(leaf, bench, settings)
        if bench.judge:
            raise UserError(f"{bench.name}: only tasks of the harness lm_eval can have a judge")
        render = loading.renderer(settings)
        assert render is not None  # `settle` refuses media without a chat template
        with hinting(leaf):
            given = bench.docs(
                leaf,
                length=0,
                samples=settings.samples,
                seed=settings.seed,
                tokenizer=settings.tokenizer,
                lexicon=settings.lexicon,
                cache_dir=settings.cache_dir,
                size=None,
            )
        assert isinstance(given, list)  # documents in lmms-eval's schema; no JSONL has images
        rows = given[: settings.samples]
        with _quiet():
            table = Table(rows)
            built, own = _build(bench, leaf, table)
            made = _requests(built, leaf, table, [row.get("extra", {}) for row in rows], render)
        if not built.config.process_results_use_image:
            table.forget_media()
        metric = own.get("metric", bench.metric)
        if metric not in (known := list(built.aggregation())):
            raise UserError(f"{bench.name}: {leaf} has no metric {metric!r}; it has {known}")
        return LmmsEvalTask(
            **loading.facts(bench, leaf, settings),
            data_hash=_data_hash(bench, leaf, settings),
            metric=metric,
            higher_is_better=bool(built.higher_is_better()[metric]),
            requests=made,
            built=built,
            table=table,
            percent=bool(own.get("percent")),
            thinks=Thinking.of(settings.tokenizer) is not None,
        )


@dataclass(frozen=True, eq=False)
class LmmsEvalTask(LoadedTask):
    """A task of lmms-eval with its rows. See `LoadedTask`.

    Attributes:
        built: The task object of lmms-eval.
        table: The rows, by `Request.doc_id`.
        percent: Whether lmms-eval's metric is a percentage; scores here are from 0 to 1.
        thinks: Whether the model can think; only the text after the thinking is scored.
    """

    built: Any = None
    table: Any = None
    percent: bool = False
    thinks: bool = False

    def score(
        self, responses: Mapping[Key, str], marks: Sequence[Marks] | None = None
    ) -> tuple[dict[Key, float], float]:
        """Score responses with the task's `process_results`; see `LoadedTask.score`.

        The aggregate is the mean over responses, which an interval can be given for. lmms-eval's
        own aggregate is the same, or a mean of the means of categories.
        """
        if not responses:
            return {}, float("nan")
        places = self.places
        scores = {}
        with _quiet():
            for key, text in responses.items():
                request = self.requests[places[key[:2]]]
                if self.thinks:
                    text = scored_text(text, request.until)
                random.seed(0)  # where a response names no option, some definitions draw one
                scores[key] = self._score(request, text)
        return scores, sum(scores.values()) / len(scores)

    def _score(self, request: Request, text: str) -> float:
        doc = self.table[request.doc_id]
        # The undecorated method: lmms-eval tries five times, two seconds apart.
        process = type(self.built).process_results.__wrapped__
        value = process(self.built, doc, [text])[self.metric]
        if isinstance(value, Mapping) and isinstance(value.get("score"), int | float):
            return float(value["score"])
        if not isinstance(value, int | float):
            value = self.built.aggregation()[self.metric]([value])
        return float(value) / (100 if self.percent else 1)


def _data_hash(bench: Benchmark, leaf: str, settings: TaskSettings) -> str:
    """Hash of version and data, by the records of the tables: few of their rows are read."""
    found = [records.head(source, settings.cache_dir) for source in bench.sources.get(leaf, ())]
    hashes = [record.sha256 for record in found if record is not None]
    return data.digest([leaf, bench.version_of(leaf, settings.lexicon), *hashes])


# --- prompts --------------------------------------------------------------------------------------


def _requests(
    built: Any, leaf: str, table: Table, extras: Sequence[Doc], render: chat.Render
) -> Sequence[Request]:
    """Ask lmms-eval for every prompt, and split it after its last medium."""
    kwargs = built.config.generation_kwargs or {}
    limit = int(kwargs.get("max_new_tokens") or _MAX_NEW_TOKENS)
    docs, parted, media = [], [], []
    known: dict[Medium, Medium] = {}  # an image of several questions is held once
    for doc, extra in zip(table, extras, strict=True):
        messages, seen = _messages(built, leaf, doc)
        context, _, question = render(messages).partition(data.SENTINEL)
        target = built.doc_to_target(doc)
        targets = target if isinstance(target, list) else [target]
        docs.append(
            {
                "outputs": [str(one) for one in targets],
                "extra": extra,
                "max_new_tokens": limit,
                "until": [],
            }
        )
        parted.append((context, question))
        media.append(tuple(known.setdefault(one, one) for one in seen))
    places = [None] * len(docs)
    asked = Asked(kwargs, int(built.config.repeats or 1))
    return arranged(leaf, docs, places, parted, media, render, asked)


def _messages(built: Any, leaf: str, doc: Doc) -> tuple[list[chat.Message], list[Medium]]:
    """The messages of a prompt, with the sentinel after the last medium, and the media.

    Raises:
        LeftOut: A video is not where lmms-eval expects it.
        UserError: The prompt has no media, or sound.
    """
    try:
        messages = built.doc_to_messages(doc)
    except SystemExit as stopped:  # how definitions of lmms-eval report a missing video
        path = str(stopped).removeprefix("video path:").partition(" does not exist")[0]
        folder, dataset = Path(path).parent, built.config.dataset_path
        raise LeftOut(
            f"it needs the video {path}; run `hf download --repo-type dataset {dataset}` and "
            f"unpack the videos of its archives into {folder}"
        ) from None
    media: list[Medium] = []
    made: list[chat.Message] = []
    for message in messages:
        text = ""
        for part in message["content"]:
            if part["type"] == "text":
                text += part["text"]
                continue
            found = part["url"]
            if part["type"] == "video" and isinstance(found, str):
                found = Picture(video(found))
            if not isinstance(found, Picture):
                raise UserError(f"{leaf}: kvbench cannot pass on its {part['type']}")
            media.append(found.medium)
            text += VIDEO if found.medium.kind == "video" else IMAGE
        made.append({"role": message["role"], "content": text})
    last = max((i for i, m in enumerate(made) if _end(m["content"])), default=None)
    if last is None:
        raise UserError(f"{leaf}: a prompt of lmms-eval has neither images nor videos")
    content = made[last]["content"]
    at = _end(content)
    made[last]["content"] = content[:at] + data.SENTINEL + content[at:]
    return made, media


def _end(text: str) -> int:
    """Where the last medium of a text ends; 0 if it has none."""
    return max((text.rfind(mark) + len(mark) for mark in (IMAGE, VIDEO) if mark in text), default=0)


class Picture:
    """A medium of a row, as lmms-eval's functions take it: an image that converts to itself.

    lmms-eval's definitions call `convert("RGB")` on every image. It is not decoded for that.
    """

    def __init__(self, value: Mapping[str, Any]) -> None:
        self._value = value

    @functools.cached_property
    def medium(self) -> Medium:
        """The medium for a request."""
        return medium(self._value)

    def convert(self, mode: str) -> Picture:
        """The image itself: its pixels are RGB when they are loaded."""
        if mode != "RGB":
            raise UserError(f"kvbench gives RGB images, not {mode}")
        return self

    def __deepcopy__(self, memo: Any) -> Picture:
        return self


class Table:
    """Rows as lmms-eval reads them: a new mapping each time, in which media are `Picture`s."""

    def __init__(self, rows: Sequence[Doc]) -> None:
        self._rows = [{k: _seen(v) for k, v in row.items() if k != "extra"} for row in rows]
        self.features = dict.fromkeys(self._rows[0])

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Doc]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int) -> Doc:
        return copy.deepcopy(self._rows[index])

    def forget_media(self) -> None:
        """Drop the columns of media; lmms-eval does not see them either when it scores."""
        for row in self._rows:
            for name in [name for name, value in row.items() if isinstance(value, Picture)]:
                del row[name]


def _seen(value: Any) -> Any:
    if is_medium(value):
        return Picture(value)
    return [_seen(part) for part in value] if isinstance(value, list) else value


# --- lmms-eval's task -----------------------------------------------------------------------------


def _build(bench: Benchmark, leaf: str, table: Table) -> tuple[Any, dict[str, Any]]:
    """Build the task object of lmms-eval from its definition and our rows.

    Returns:
        The object, and what our YAML says to kvbench.
    """
    path, yaml = loading.yaml_of(bench, leaf)
    own = {name: yaml.pop(name) for name in _OWN if name in yaml}
    definition = own.get("definition")
    if not isinstance(definition, str):
        raise UserError(f"{path} must name a definition of lmms-eval, such as mme/mme.yaml")
    config = {**_definition(definition), **yaml, "task": leaf}
    for name in ("dataset_kwargs", "process_docs"):  # what loads and changes data
        config.pop(name, None)
    split = config["test_split"]

    from lmms_eval.api.task import ConfigurableMessagesTask

    class OnOurRows(ConfigurableMessagesTask):  # type: ignore[misc]
        def download(self, dataset_kwargs: Any = None) -> None:
            self.dataset = self.dataset_no_image = {split: table}

        @classmethod
        def _visual_to_content(cls, visual: Any) -> dict[str, Any]:
            if isinstance(visual, Picture):
                return {"type": visual.medium.kind, "url": visual}
            content: dict[str, Any] = super()._visual_to_content(visual)
            return content

    built = OnOurRows(config=config)
    if built.OUTPUT_TYPE != "generate_until" or built.config.filter_list:
        raise UserError(f"{definition}: only generate_until without filters can run here")
    return built, own


def _definition(name: str) -> dict[str, Any]:
    """Read a definition of lmms-eval, such as `mmstar/mmstar.yaml`.

    Raises:
        LeftOut: A package that its functions import is not installed.
        UserError: There is no such definition.
    """
    _prepare()
    try:
        import lmms_eval.tasks
        from lmms_eval.utils import load_yaml_config

        path = Path(lmms_eval.tasks.__file__).parent / name
        if not path.is_file():
            raise UserError(f"lmms-eval has no definition {name}")
        found: dict[str, Any] = load_yaml_config(str(path))
    except ImportError as error:
        package = (error.name or "").partition(".")[0] or str(error)
        raise LeftOut(f"it needs {package}, which is not installed; run `make vision`") from None
    return found


def _prepare() -> None:
    """Meet what lmms-eval's modules expect when they are imported."""
    from huggingface_hub import constants

    os.environ.setdefault("HF_HOME", constants.HF_HOME)  # their videos lie there
    provide_latex2sympy2()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence lmms-eval, and preserve the global generator, which it uses."""
    from loguru import logger

    for name in ("lmms_eval", "utils"):  # the functions of a definition are in a module `utils`
        logger.disable(name)
    state = random.getstate()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        random.setstate(state)
        for name in ("lmms_eval", "utils"):
            logger.enable(name)
