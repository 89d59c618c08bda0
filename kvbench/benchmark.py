"""The page for authors of tasks: a benchmark, its rows and the tables of the hub that it reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Doc = dict[str, Any]
"""A row of a task's data. See `Benchmark.docs`."""

DocsHook = Callable[..., "list[Doc] | Path"]

LEXICONS = ("natural", "reference")


@dataclass(frozen=True)
class Source:
    """One table of the hub that a leaf task reads.

    Attributes:
        dataset: Id on the hub.
        config: Configuration.
        split: Split.
        file: A raw file of the dataset's repository that is read instead of what `load_dataset`
            gives: `x.jsonl`, `x.json` (a list, or one object), `x.csv`, `x.tsv`, `x.parquet`, each
            also with `.gz`; `*` in it stands for anything, and files are read in order of name. A
            member of an archive is `data.zip:data/x.jsonl`. For repositories that hold a loading
            script alone (no script is ever run), and for the hub's own conversion of a table:
            `CONFIG/SPLIT/*.parquet` at the revision `refs/convert/parquet`.
        columns: The fields that are kept of a row; none keeps all.
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
        """What a reader calls it: dataset and table."""
        return f"{self.dataset} {self.table}"

    @property
    def table(self) -> str:
        """Which of the dataset's tables: configuration and split, or file."""
        return self.file or " ".join(filter(None, [self.config, self.split]))


@dataclass(frozen=True)
class Benchmark:
    """A group of tasks: the value of a `kvbench.tasks` entry point, built in or a third party's.

    Attributes:
        name: Name of the group, e.g. "ruler".
        leaves: Names of its tasks, unique over all benchmarks.
        docs: `docs(leaf, *, length, samples, seed, tokenizer, lexicon, cache_dir, size)` gives the
            data. Sized: the first `samples` rows, of which row i must not depend on `samples`;
            `size(context, question, gen_prefix="")` counts the tokens of the prompt as the model
            will see it, chat template and BOS included, and prompt and answer must fit into
            `length`. Not sized: all rows, or the path of a JSONL that holds them. A row has
            `context` (str), `question` (str), `outputs` (list of str), and may have `gen_prefix`
            (str: start of the answer, given in the prompt), `max_new_tokens` (int), `until` (list
            of str), `given` (str; see `Request.given`: it follows the prompt directly, in all rows
            or in none), `variant` (str: which data it is, where that differs between machines;
            joins the version) and `extra` (mapping; becomes `Request.extra`). Further fields are
            for the YAML and must be of one type in all rows. It raises `NeedsHub` where
            data cannot be had; the message goes on from "<leaf> is left out: ".
            A row can be a dialogue: `turns`, a list of rows as above whose `context` is what the
            turn tells, with `answer` (str: the reference answer as later turns have it in their
            history, no white space at its ends) and without `gen_prefix`; and `frame`, a mapping to
            the texts that stand before a turn (`user`), before its answer (`assistant`) and after
            that (`end`) where there is no chat template. What is beside them in the row counts for
            all its turns. A dialogue is one sample; `size.dialogue(row)` counts the prompt of its
            last turn, and all turns' `max_new_tokens` must fit into `length` beside it.
        yaml: Folder with lm-eval's task YAML: `<leaf>.yaml`, or `<name>.yaml` for all leaves. Its
            `doc_to_text` holds `{{context}}<|kvb_split|>{{question}}`.
        version: Version of the data and the prompts.
        summary: One line.
        source: URL or paper.
        licence: SPDX name of the licence of prompts and data.
        sources: By leaf, the tables of the Hugging Face hub that it reads, with
            `kvbench.data.sources.rows`; `kvbench data` goes by it.
        needs_hub: Leaves that cannot do without the hub.
        harness: Name of the harness.
        metric: Which metric of the YAML is the score; `metric,filter` where it has several filters.
        chance: Score of a responder that has not seen the context; by leaf where it differs between
            them, 0 for those that are not named.
        judge: The rubric (see `kvbench.judge`) by which the metric has responses judged; "" where
            it does not. Without a judge the tasks are left out.
        default_lengths: Lengths to run where the user names none.
        sized: Whether `length` plays a part. The user's own data is not sized: its cells have
            length 0, whatever `--length` says.
        lexicons: The lexicons that the benchmark has prompts for.
        plain: Leaves whose prompts are given no chat template, even where there is one: what the
            model is to go on with is the text itself.
        subsets: Leaves by the name of a subset, e.g. of a domain. A subset can be run by its name,
            which no leaf and no benchmark has, and a report gives its means.
    """

    name: str
    leaves: tuple[str, ...]
    docs: DocsHook
    yaml: Path
    version: str = "1"
    summary: str = ""
    source: str = ""
    licence: str = ""
    sources: Mapping[str, tuple[Source, ...]] = field(default_factory=dict)
    needs_hub: frozenset[str] = frozenset()
    harness: str = "lm_eval"
    metric: str = "score"
    chance: float | Mapping[str, float] = 0.0
    judge: str = ""
    default_lengths: tuple[int, ...] = (1024,)
    sized: bool = True
    lexicons: tuple[str, ...] = LEXICONS
    plain: frozenset[str] = frozenset()
    subsets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
