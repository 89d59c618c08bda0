"""The task API: a benchmark, its rows, and the hub tables that it loads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kvbench.errors import UserError

Doc = dict[str, Any]
"""A row of a task's data. See `Benchmark.docs`."""

DocsHook = Callable[..., "Sequence[Doc] | Path"]

LEXICONS = ("natural", "reference")

FIDELITY = "kl"
"""Metric of a benchmark without reference answers: how far a cell is from the full cache, in nats per token."""

IMAGE, VIDEO = "<|kvb_image|>", "<|kvb_video|>"
"""Markers in the `context` of a row, one in the place of each image or video."""


@dataclass(frozen=True)
class Source:
    """One hub table that a task loads.

    Attributes:
        dataset: Dataset id on the hub.
        config: Configuration name.
        split: Split name.
        file: A raw file of the dataset's repository, loaded instead of the table that `load_dataset` returns:
            `x.jsonl`, `x.json` (a list, or one object), `x.csv`, `x.tsv` or `x.parquet`, each also with `.gz`. `*`
            matches anything; matching files are loaded in order of name. `data.zip:data/x.jsonl` names a member of an
            archive, and `data.zip:pics/*` its images, as rows with `path` and `bytes`. Use it for repositories with
            only a loading script (scripts are never run), and for the hub's own conversion of a table:
            `CONFIG/SPLIT/*.parquet` at the revision `refs/convert/parquet`.
        columns: Fields of a row to keep; empty keeps all.
        revision: Branch, tag or commit; None for the newest.
    """

    dataset: str
    config: str | None = None
    split: str = "test"
    file: str | None = None
    columns: tuple[str, ...] = ()
    revision: str | None = None

    @property
    def label(self) -> str:
        """Dataset and table, for messages."""
        return f"{self.dataset} {self.table}"

    @property
    def table(self) -> str:
        """Table within the dataset: configuration and split, or file."""
        return self.file or " ".join(filter(None, [self.config, self.split]))


@dataclass(frozen=True)
class Medium:
    """An image or a video of a prompt, loaded on demand. Media with the same content are equal.

    Attributes:
        kind: `image` or `video`.
        digest: Hash of the content; identifies contexts and data.
        load: Returns an RGB image (`PIL.Image.Image`), or the frames of a video as a list of such images.
        rate: Frames per second of the frames returned by `load`; 0 if unknown.
    """

    kind: Literal["image", "video"]
    digest: str
    load: Callable[[], Any] = field(compare=False, repr=False)
    rate: float = 0.0


@dataclass(frozen=True)
class Ask:
    """A judge's question about one response. See docs/judge.md.

    Attributes:
        rubric: Name of the rubric, with `:variant` if it has variants.
        fields: Texts for the fields of the prompt: usually `question`, `answer` (the reference answer) and `response`.
    """

    rubric: str
    fields: Mapping[str, str]


Marks = Mapping[str, float]
"""A judge's marks for a response: `score`, from 0 to 1, and the other measures of the rubric."""


@dataclass(frozen=True)
class Benchmark:
    """A group of tasks: the value of a `kvbench.tasks` entry point, built in or a third party's.

    Attributes:
        name: Name of the group, e.g. "ruler".
        leaves: Names of its tasks, unique across all benchmarks.
        docs: `docs(task, *, length, samples, seed, tokenizer, lexicon, cache_dir, size)` returns the rows of a task;
            see below. The first argument is positional.
        yaml: Folder with lm-eval's task YAML: `<task>.yaml`, or `<name>.yaml` for all tasks. Its `doc_to_text` contains
            `{{context}}<|kvb_split|>{{question}}`.
        version: Version of data, prompts and metric.
        versions: Versions that differ from `version`, by lexicon and task, so that results of unchanged tasks stay
            comparable.
        summary: One line.
        source: URL or paper.
        licence: SPDX name of the licence of prompts and data.
        sources: Hugging Face hub tables by task, loaded with `kvbench.data.sources.rows`. `kvbench data` downloads and
            checks these tables.
        needs_hub: Tasks that cannot run without the hub; None for all that have `sources`.
        harness: Name of the harness.
        metric: The YAML's metric to use as the score; `metric,filter` if it has several filters. With `FIDELITY`, rows
            have no reference answers (`outputs` is empty), and only runs with `--fidelity` can score them.
        chance: Chance level, the score without seeing the context: one number, or a mapping by task (0 for tasks not
            in it).
        judge: Rubric by which a judge marks the responses, without its variant; "" if the metric needs no judge. The
            tasks are left out if no judge is configured.
        ask: `ask(row, response)` returns the judge's question about a response. Required if `judge` is set, and only
            then. The YAML's `process_results(row, results)` receives `results == [response, marks]`; `marks` is a
            mapping such as `{"score": 1.0}`.
        sized: Whether rows are generated to fit `length`. The user's own data is not sized: its cells have length 0 at
            every `--length`.
        lexicons: The lexicons that the benchmark has prompts for.
        media: Kinds of media in its prompts: `image`, `video`. Only a vision-language model can run its tasks.
        plain: Tasks whose prompts use the chat template only with `--chat-template-everywhere`, because the model
            continues the text itself.
        subsets: Tasks by subset name, such as a domain. A subset can be run by its name, and a report shows its means.
            The name must differ from those of all tasks and benchmarks.

    If `sized`, `docs` returns the first `samples` rows, and row i must not depend on `samples`.
    `size(context, question, gen_prefix="", shots=())` counts the tokens of the prompt as the model sees it, with chat
    template and BOS; prompt and answer must fit into `length`. Otherwise `docs` returns all rows, or the path of a
    JSONL file of them. It raises `NeedsHub` if data is not available; the message continues "<task> is left out: ".

    A row has `context` (str), `question` (str) and `outputs` (list of str), and may have

    - `gen_prefix` (str): start of the answer, appended to the prompt;
    - `shots` (list): worked examples, each a mapping to the texts `user`, `assistant` and `end`. With a chat template
      they are turns before the prompt; without one, `user`, `assistant` and `end` are joined in front of `context`;
    - `max_new_tokens` (int) and `until` (list of str);
    - `given` (str), in all rows or in none: text directly after the prompt; see `Request.given`;
    - `variant` (str): name of the data variant, if it differs between machines; appended to the version;
    - `media` (list): the images and videos of `context`, which has the marker `IMAGE` or `VIDEO` in the place of each,
      in this order. An image is `{"bytes": base64 of a file}`, as in hub tables; a video is
      `{"kind": "video", "path": file}`;
    - `extra` (mapping): becomes `Request.extra`.

    Further fields are for the YAML and must be of one type in all rows.

    With the harness `lmms_eval`, a row is a document in the schema of lmms-eval's task, with images encoded as above;
    kvbench uses only `extra`.

    A row can also be a dialogue: `turns` is a list of rows as above without `gen_prefix`, `shots` and `given`. The
    `context` of a turn is its new text, and `answer` (str, stripped of white space) its reference answer in the history
    of later turns. Dialogues whose turns have no `answer` can only be live (moment `turns`); the row that `ask`
    receives then has the model's answers to the earlier turns as `history`. `frame` maps to the texts before a turn
    (`user`), before its answer (`assistant`) and after it (`end`) if there is no chat template. Other fields of the
    dialogue apply to all turns. A dialogue is one sample; `size.dialogue(row)` counts the prompt of its last turn,
    which must fit into `length` together with the `max_new_tokens` of all turns.
    """

    name: str
    leaves: tuple[str, ...]
    docs: DocsHook
    yaml: Path
    version: str = "1"
    versions: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    summary: str = ""
    source: str = ""
    licence: str = ""
    sources: Mapping[str, tuple[Source, ...]] = field(default_factory=dict)
    needs_hub: frozenset[str] | None = None
    harness: str = "lm_eval"
    metric: str = "score"
    chance: float | Mapping[str, float] = 0.0
    judge: str = ""
    ask: Callable[[Doc, str], Ask] | None = None
    sized: bool = True
    lexicons: tuple[str, ...] = LEXICONS
    media: tuple[Literal["image", "video"], ...] = ()
    plain: frozenset[str] = frozenset()
    subsets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if bool(self.judge) != (self.ask is not None):
            present_field, missing_field = ("judge", "ask") if self.judge else ("ask", "judge")
            raise UserError(f"benchmark {self.name} sets {present_field} but not {missing_field}; set both")

    def identity(self, leaf: str) -> tuple[str, str]:
        """Return what two tasks of one name share only if they are the same."""
        return (self.name, self.source)

    def version_of(self, leaf: str, lexicon: str) -> str:
        """Return the version of a task's data, prompts and metric in a lexicon."""
        return self.versions.get(lexicon, {}).get(leaf, self.version)

    @property
    def has_references(self) -> bool:
        """Whether the rows have reference answers."""
        return self.metric != FIDELITY

    @property
    def hub_leaves(self) -> frozenset[str]:
        """Tasks that cannot run without the hub."""
        return frozenset(self.sources) if self.needs_hub is None else self.needs_hub
