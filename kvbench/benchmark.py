"""The page for authors of tasks: a benchmark, its rows and the tables of the hub that it reads."""

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

IMAGE, VIDEO = "<|kvb_image|>", "<|kvb_video|>"
"""Stand in the `context` of a row where its next medium belongs."""


@dataclass(frozen=True)
class Source:
    """One table of the hub that a leaf task reads.

    Attributes:
        dataset: Id on the hub.
        config: Configuration.
        split: Split.
        file: A raw file of the dataset's repository, read instead of the table that `load_dataset`
            returns: `x.jsonl`, `x.json` (a list, or one object), `x.csv`, `x.tsv` or `x.parquet`,
            each also with `.gz`. `*` matches anything; matching files are read in order of name.
            `data.zip:data/x.jsonl` names a member of an archive, and `data.zip:pics/*` the images
            of one, which are rows with `path` and `bytes`. Use it for repositories that hold
            only a loading script (scripts are never run), and for the hub's own conversion of a
            table: `CONFIG/SPLIT/*.parquet` at the revision `refs/convert/parquet`.
        columns: The fields of a row to keep; empty keeps all.
        revision: Branch, tag or commit; None is the newest.
    """

    dataset: str
    config: str | None = None
    split: str = "test"
    file: str | None = None
    columns: tuple[str, ...] = ()
    revision: str | None = None

    @property
    def label(self) -> str:
        """Dataset and table, as messages name them."""
        return f"{self.dataset} {self.table}"

    @property
    def table(self) -> str:
        """The table within the dataset: configuration and split, or file."""
        return self.file or " ".join(filter(None, [self.config, self.split]))


@dataclass(frozen=True)
class Medium:
    """An image or a video of a prompt, loaded when the model sees it.

    Two media are equal if they have the same content.

    Attributes:
        kind: `image` or `video`.
        digest: Hash of the content; contexts and data are identified by it.
        load: Returns an RGB image (`PIL.Image.Image`), or the frames of a video as a list of such
            images.
        rate: Frames per second of what `load` returns for a video; 0: unknown.
    """

    kind: Literal["image", "video"]
    digest: str
    load: Callable[[], Any] = field(compare=False, repr=False)
    rate: float = 0.0


@dataclass(frozen=True)
class Ask:
    """What a judge is asked about one response. See docs/judge.md.

    Attributes:
        rubric: Name of the rubric, with `:variant` if it has variants.
        fields: The texts that fill in its prompt, by field: usually `question`, `answer` (the
            reference answer) and `response`.
    """

    rubric: str
    fields: Mapping[str, str]


Marks = Mapping[str, float]
"""What a judge gives a response: `score`, from 0 to 1, and whatever else its rubric measures."""


@dataclass(frozen=True)
class Benchmark:
    """A group of tasks: the value of a `kvbench.tasks` entry point, built in or a third party's.

    Attributes:
        name: Name of the group, e.g. "ruler".
        leaves: Names of its tasks, unique over all benchmarks.
        docs: `docs(leaf, *, length, samples, seed, tokenizer, lexicon, cache_dir, size)` returns
            the rows of a leaf; the section below describes them.
        yaml: Folder with lm-eval's task YAML: `<leaf>.yaml`, or `<name>.yaml` for all leaves. Its
            `doc_to_text` holds `{{context}}<|kvb_split|>{{question}}`.
        version: Version of data, prompts and metric.
        versions: By lexicon and then by leaf, the versions that differ from `version`. A change
            that leaves the rows of one lexicon or leaf alone leaves its results comparable.
        summary: One line.
        source: URL or paper.
        licence: SPDX name of the licence of prompts and data.
        sources: By leaf, the tables of the Hugging Face hub that it reads with
            `kvbench.data.sources.rows`. `kvbench data` fetches and checks these tables.
        needs_hub: Leaves that cannot run without the hub; None: all that have `sources`.
        harness: Name of the harness.
        metric: The metric of the YAML that is the score; `metric,filter` if it has several filters.
        chance: Score of a responder that has not seen the context: one number, or a mapping by leaf
            (0 for leaves that it does not name).
        judge: The rubric by which a judge marks the responses, without its variant; "" if the
            metric needs no judge. The tasks are left out if no judge is configured.
        ask: `ask(row, response)` returns what the judge is asked about a response. Required if
            `judge` is set, and only then. The YAML's `process_results(row, results)` receives
            `results == [response, marks]`; `marks` is a mapping such as `{"score": 1.0}`.
        sized: Whether rows are made to fit `length`. The user's own data is not sized: its cells
            have length 0 at every `--length`.
        lexicons: The lexicons that the benchmark has prompts for.
        media: The kinds of media in its prompts: `image`, `video`. Only a vision-language model
            can run its tasks.
        plain: Leaves whose prompts never use the chat template, because the model continues the
            text itself.
        subsets: Leaves by the name of a subset, such as a domain. A subset can be run by its name,
            and a report shows its means. No leaf or benchmark has the name of a subset.

    Where `sized`, `docs` returns the first `samples` rows, and row i must not depend on `samples`.
    `size(context, question, gen_prefix="", shots=())` counts the tokens of the prompt as the model
    will see it, with chat template and BOS; prompt and answer must fit into `length`. Elsewhere
    `docs` returns all rows, or the path of a JSONL file of them. It raises `NeedsHub` where data is
    not available; the message continues "<leaf> is left out: ".

    A row has `context` (str), `question` (str) and `outputs` (list of str), and may have

    - `gen_prefix` (str): start of the answer, given in the prompt;
    - `shots` (list): worked examples, each a mapping to the texts `user`, `assistant` and `end`.
      With a chat template they are turns before the prompt; without one, `user`, `assistant` and
      `end` are joined in front of `context`;
    - `max_new_tokens` (int) and `until` (list of str);
    - `given` (str), in all rows or in none: it follows the prompt directly; see `Request.given`;
    - `variant` (str): which data the row is made of, where machines differ; it joins the version;
    - `media` (list): the images and videos of `context`, which has the marker `IMAGE` or `VIDEO`
      in the place of each, in this order. An image is `{"bytes": base64 of a file}`, as the hub's
      tables have it; a video is `{"kind": "video", "path": file}`;
    - `extra` (mapping): becomes `Request.extra`.

    Further fields are for the YAML and must be of one type in all rows.

    With the harness `lmms_eval` a row is a document in the schema of lmms-eval's task, whose images
    are encoded as above, and only `extra` is known to kvbench.

    A row can also be a dialogue: `turns` is a list of rows as above whose `context` is what the
    turn tells, without `gen_prefix`, `shots` and `given`, and with `answer` (str: the reference
    answer as later turns have it in their history, stripped of white space). `frame` maps to the
    texts that stand before a turn (`user`), before its answer (`assistant`) and after that (`end`)
    where there is no chat template. Other fields of the dialogue hold for all its turns. A dialogue
    is one sample; `size.dialogue(row)` counts the prompt of its last turn, and the `max_new_tokens`
    of all turns must fit into `length` beside it.
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

    def version_of(self, leaf: str, lexicon: str) -> str:
        """The version of a leaf's data, prompts and metric in a lexicon."""
        return self.versions.get(lexicon, {}).get(leaf, self.version)

    @property
    def hub_leaves(self) -> frozenset[str]:
        """Leaves that cannot run without the hub."""
        return frozenset(self.sources) if self.needs_hub is None else self.needs_hub
