"""The columns of the result tables: each is declared here once. Users rely on names and types.

A column that is measured for every response is a field of `Response`, with what it means. The
schemas of the tables, what old tables lack, the means over responses, what is checked when a table
is read, and the tables of docs/results.md follow from these declarations.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import pyarrow as pa

from kvbench.runs.index import Key

if TYPE_CHECKING:
    import pandas as pd

SCHEMA_VERSION = 7
OLDEST_VERSION = 2
"""The oldest schema whose tables can be read."""

Columns: TypeAlias = dict[str, Sequence[Any]]
"""Rows of a table, column by column."""

_TEXT, _SHORT, _LONG = pa.string(), pa.int32(), pa.int64()
_REAL, _BOOL = pa.float64(), pa.bool_()


Row: TypeAlias = dict[str, Any]
"""A row of a result table."""


@dataclass(frozen=True)
class ResultColumn:
    """A column of a result table.

    Attributes:
        type: Its Arrow type in `samples.parquet`, or in `cells.parquet` if it is only there.
        meaning: What it holds, with its unit, in Markdown. "" if the column before it says so.
        name: Its name.
        since: The first version of the schema that has it.
        substitute: What stands for it in tables of earlier versions.
        copy_of: The column that stands for it in tables of earlier versions.
        shared: Whether many samples share a text: such texts can be read as categories.
        sampled: Whether the column is in `samples.parquet`.
        averaged: Whether its mean over responses is in `cells.parquet`.
        summarised: Whether the mean over the tasks of a benchmark has it.
        paged: Whether the page of `kvbench view` has it.
        always: Whether every cell that has a score has it, as a number.
        text: Whether it quotes the data or the model, so that published samples leave it out.
    """

    type: Any
    meaning: str = ""
    name: str = ""
    since: int = 1
    substitute: float | str | bool | tuple[()] | None = None
    copy_of: str = ""
    shared: bool = False
    sampled: bool = True
    averaged: bool = False
    summarised: bool = False
    paged: bool = False
    always: bool = False
    text: bool = False


def _field(kind: Any, meaning: str = "", **options: Any) -> Mapping[str, ResultColumn]:
    """Metadata of a field of `Response` that is a column."""
    return {"column": ResultColumn(kind, meaning, **options)}


def _cost(kind: Any, meaning: str = "", **options: Any) -> Mapping[str, ResultColumn]:
    """Metadata of a field that is also averaged over the responses of a cell."""
    return _field(kind, meaning, averaged=True, **options)


@dataclass(frozen=True)
class Response:
    """What a cell answered to one question, and what it cost: a line of `responses.jsonl`.

    Attributes:
        cell: Hash of the cell.
        request: Digest of the request (`Request.digest`); "" in runs of earlier versions.
    """

    cell: str
    sample_id: str = field(
        metadata=_field(
            _TEXT,
            "which response; `doc_id` is the row of the data, `question_id` its question, `repeat` "
            "counts the answers to a question from 0",
            shared=True,
        )
    )
    doc_id: int = field(metadata=_field(_SHORT))
    question_id: int = field(metadata=_field(_SHORT))
    repeat: int = field(metadata=_field(_SHORT))
    context_id: str = field(metadata=_field(_TEXT, "the context, which several questions may share", shared=True))
    response: str = field(default="", metadata=_field(_TEXT, "the text of the response", substitute="", text=True))
    stop: str = field(
        default="",
        metadata=_field(
            _TEXT,
            "why the response ended: `eos`, `stop` (a stop string), `length`, or `given`. With "
            "`given`, a text of the task was measured; the response is then its negative "
            'log-likelihood in nats and its number of tokens, such as `{"nll": 71.3, "tokens": '
            "24}`. For several texts, such as the choices of a question, it lists the log-likelihood "
            "of each, whether greedy decoding would produce it, and its number of tokens: "
            '`{"loglikelihood": [-1.2, -3.4], "greedy": [true, false], "tokens": [1, 2]}`',
            shared=True,
        ),
    )
    error: str = field(
        default="",
        metadata=_field(
            _TEXT,
            "why the response failed, or empty. Its score is then NaN, and resuming tries again",
            shared=True,
        ),
    )
    context_tokens: int = field(default=0, metadata=_field(_SHORT, "token counts"))
    question_tokens: int = field(default=0, metadata=_field(_SHORT))
    generated_tokens: int = field(default=0, metadata=_field(_SHORT))
    budget_entries: int = field(
        default=0,
        metadata=_cost(
            _LONG,
            "entries that the budget allows, summed over layers and KV heads, and entries held "
            "right after compression (at `chunked` after the last compression, at `turns` when the "
            "turn begins). The two are equal, or the cell fails; with a policy that reads few "
            "entries, the first is what a query reads and the second all entries. At `decode`, and "
            "in the first turn at `turns`, there may be nothing to evict; `held_entries` is then "
            "the peak after the first eviction, which at `decode` includes the buffer: until then, "
            "the whole prompt is held",
            summarised=True,
            always=True,
        ),
    )
    held_entries: int = field(default=0, metadata=_cost(_LONG, summarised=True, always=True))
    kv_bytes_live: int = field(
        default=0,
        metadata=_cost(
            _LONG,
            "bytes of the held entries, between two forwards, of the full-attention layers: K, V "
            "(codes, scales and zeros of a quantised cache, the kept channels of pruned keys and "
            "their index), and whatever else a policy stores per entry or, with a reader, per "
            "block",
            summarised=True,
            paged=True,
            always=True,
        ),
    )
    kv_bytes_read: int = field(
        default=0,
        metadata=_cost(
            _LONG,
            "bytes that a decode step reads of them once they are compressed: all, except with a "
            "policy that reads few entries of a cache that it holds whole (`quest`, "
            "`seerattn_r`). There, `budget_entries` is what a query reads. In tables of schema 3 "
            "and before, which lack the column, it equals `kv_bytes_live`",
            since=4,
            copy_of="kv_bytes_live",
            summarised=True,
            paged=True,
        ),
    )
    kv_bytes_allocated: int = field(
        default=0,
        metadata=_cost(
            _LONG,
            "bytes allocated for them, including room for the answer and bookkeeping. A cell that reads its "
            "entries in the prefill of its context, instead of copying them, counts the whole prefill and the "
            "columns of its entries; all such cells of a context share one prefill. At moments `decode` and "
            "`turns` it also depends on the other sequences of a batch, because a layer grows for all of them at "
            "once; `kv_bytes_live` does not. Blocks of a quantised cache are allocated ahead, so its share of the "
            "full cache is larger than that of `kv_bytes_live`: 47.8% instead of 35.6% for `full:bits=4` on SmolLM2 "
            "([smollm2.md](smollm2.md#fewer-bytes-instead-of-fewer-entries)). The report shows "
            "both where a policy holds codes. Neither counts the layer that a forward reads: it is "
            "decoded to full precision and dropped again",
            sampled=False,
            summarised=True,
            always=True,
        ),
    )
    kv_bytes_full: int = field(
        default=0,
        metadata=_cost(
            _LONG,
            "bytes of K and V that the full cache would hold for the same tokens: the context, "
            "plus the question if it is compressed too, plus the answer at `decode`. There, a policy whose answers are "
            "longer holds a smaller share with the same bytes: compare bytes (`kvbench report --x bytes`)",
            sampled=False,
            summarised=True,
            paged=True,
            always=True,
        ),
    )
    visual_tokens: int = field(
        default=0,
        metadata=_cost(
            _LONG,
            "tokens of images and videos in the context, and how many of the held entries are "
            "theirs (at `decode`, when the answer ends); the rest of `held_entries` is text. Both "
            "are 0 for text models and in tables of schema 2, which lack them",
            since=3,
            substitute=0,
        ),
    )
    held_visual: int = field(default=0, metadata=_cost(_LONG, since=3, substitute=0))
    state_bytes: int = field(
        default=0,
        metadata=_cost(
            _LONG,
            "bytes of recurrent and convolution states of hybrid models. They have a constant size, nothing evicts "
            "them, and no other column counts them. 0 for other models and in tables of schema 5 and before",
            since=6,
            substitute=0,
        ),
    )
    prefill_s: float = field(
        default=0.0,
        metadata=_cost(
            _REAL,
            "seconds per sample. All cells of a context share its prefill and what their policies observe in it; "
            "cells may share scores, and the first of them pays for them; the decode time of a batch is divided evenly",
            sampled=False,
            paged=True,
        ),
    )
    compress_s: float = field(default=0.0, metadata=_cost(_REAL, sampled=False, paged=True))
    decode_s: float = field(default=0.0, metadata=_cost(_REAL, sampled=False, paged=True))
    kl: float | None = field(
        default=None,
        metadata=_cost(
            _REAL,
            "with `--fidelity`, how far the cell is from the full cache on the full cache's own greedy answer, which "
            "is fed to the cell's cache: mean KL divergence of the full cache's next-token distribution from that of "
            "the cell, in nats per token; at the first token, at the last one, and the mean of those between (empty "
            "for answers of one or two tokens)",
            since=7,
            substitute=math.nan,
            summarised=True,
        ),
    )
    kl_first: float | None = field(default=None, metadata=_cost(_REAL, since=7, substitute=math.nan))
    kl_middle: float | None = field(default=None, metadata=_cost(_REAL, since=7, substitute=math.nan))
    kl_last: float | None = field(default=None, metadata=_cost(_REAL, since=7, substitute=math.nan))
    agreement: float | None = field(
        default=None,
        metadata=_cost(
            _REAL,
            "likewise: fraction of the answer's tokens that are also the cell's most likely token; by how much the "
            "mean negative log-likelihood of a token is larger, in nats; number of tokens before the first one that "
            "the cell does not find most likely (all, if there is none), and of all tokens. These columns are empty "
            "without `--fidelity`, for texts that are measured, for repeats of a question after the first, and in "
            "tables of schema 6 and before",
            since=7,
            substitute=math.nan,
        ),
    )
    nll_diff: float | None = field(default=None, metadata=_cost(_REAL, since=7, substitute=math.nan))
    first_difference: float | None = field(default=None, metadata=_cost(_REAL, since=7, substitute=math.nan))
    fidelity_tokens: float | None = field(default=None, metadata=_cost(_REAL, since=7, substitute=math.nan))
    request: str = ""

    @property
    def key(self) -> Key:
        """What makes it unique in a run."""
        return (self.cell, self.sample_id, self.question_id, self.repeat)


def _columns(names: str, meaning: str, *types: Any, **options: Any) -> Iterator[ResultColumn]:
    """Declare columns that are explained together, each with its type."""
    for index, (name, kind) in enumerate(zip(names.split(), types, strict=True)):
        yield ResultColumn(kind, "" if index else meaning, name, **options)


def _measured() -> list[ResultColumn]:
    """The fields of a response that are columns."""
    return [
        replace(entry.metadata["column"], name=entry.name) for entry in fields(Response) if "column" in entry.metadata
    ]


_SCORE_COLUMNS: tuple[ResultColumn, ...] = (
    *_columns(
        "score",
        "mean over samples (0 to 1 unless the task says otherwise; see `is_mean`), standard error clustered by "
        "context, 95% interval",
        _REAL,
        paged=True,
        always=True,
    ),
    *_columns("score_se", "", _REAL),
    *_columns("score_lo score_hi", "", _REAL, _REAL, paged=True, always=True),
    *_columns(
        "full_score",
        "score of the full cache on the same samples; paired difference to it with its 95% interval, bootstrapped over "
        "contexts (NaN with `--no-full`)",
        _REAL,
    ),
    *_columns("diff diff_lo diff_hi", "", _REAL, _REAL, _REAL, paged=True),
)
"""A score with its uncertainty and its difference from the full cache."""

CELL_COLUMNS: tuple[ResultColumn, ...] = (
    *_columns("schema", "version of these columns", _SHORT),
    *_columns("cell", "hash of everything that can change a response; runs resume by it", _TEXT),
    *_columns(
        "match",
        "hash of what was measured: model id, task, length, policy, budget, moment, seed, data, and how answers are "
        "generated if not greedily. It joins runs from different machines or versions",
        _TEXT,
    ),
    *_columns(
        "model model_revision",
        "the model as given to `--model`; the commit on the hub or a digest of the local files",
        *(_TEXT, _TEXT),
    ),
    *_columns(
        "task group length",
        "task; its benchmark; tokens of prompt and answer, or 0 for data that kvbench does not resize",
        *(_TEXT, _TEXT, _SHORT),
    ),
    *_columns(
        "policy budget moment seed",
        "canonical spellings. `full` has the budget `full` and no moment, except at `turns`: a live dialogue has the "
        "full cache's own answers in its history",
        *(_TEXT, _TEXT, _TEXT, _LONG),
    ),
    *_columns(
        "informed",
        "whether the policy sees question and answer, such as `oracle`: a reference that competes with no policy. "
        "False in tables of schema 6 and before",
        _BOOL,
        since=7,
        substitute=False,
    ),
    *_columns(
        "samples metric higher_is_better",
        "number of samples; name and direction of the metric. If responses are judged, the metric's name ends with the "
        "judge, such as `(judge gpt-4o-2024-08-06)` or `(local judge)`; `versions` names the judge too, and `match` "
        "differs between judges ([judge.md](judge.md))",
        *(_SHORT, _TEXT, _BOOL),
    ),
    *_columns(
        "status error",
        "`ok`, or `error` and the reason. A policy or metric that fails affects only its own cells; their scores are "
        "NaN",
        *(_TEXT, _TEXT),
    ),
    *_SCORE_COLUMNS,
    *_columns(
        "is_mean",
        "whether `score` is the mean of the samples' scores. It is not for a metric such as a perplexity, Matthews' "
        "correlation or a BLEU of the corpus: its interval and its difference are bootstrapped by computing the metric "
        "on every resample, and means over tasks leave it out. True in tables of schema 4 and before",
        _BOOL,
        since=5,
        substitute=True,
    ),
    *_columns(
        "discriminative",
        "whether the full cache is above the task's chance level. If it is not, differences mean nothing, and the "
        "report leaves the task out of means and says so",
        _BOOL,
    ),
    *(replace(column, type=_REAL) for column in _measured() if column.averaged),
    *_columns(
        "task_version data_hash dtype device attention versions",
        "what the cell was made with; `versions` is a JSON object, described below",
        *[_TEXT] * 6,
    ),
)
"""`cells.parquet`: a row per model, task, length, policy, budget, moment and seed."""

SAMPLE_COLUMNS: tuple[ResultColumn, ...] = (
    *_columns("schema", "version of these columns", _SHORT),
    *_columns("cell task policy budget moment", "the cell, as in `cells.parquet`", *[_TEXT] * 5, shared=True),
    *_columns("length", "", _SHORT),
    *_columns(
        "target",
        "the reference answers, and the score of the response: its value by the task's metric, NaN if that is no "
        "number",
        pa.list_(_TEXT),
        substitute=(),
        text=True,
    ),
    *_columns("score", "", _REAL),
    *_columns(
        "metrics",
        'a JSON object with the value of the response by every metric that gives it a number, such as `{"acc": 1.0, '
        '"acc_norm": 0.0}`; the names are those of `--metric`. Empty if the task has only one metric, and in tables of '
        "schema 4 and before",
        _TEXT,
        since=5,
        substitute="",
        shared=True,
    ),
    *(column for column in _measured() if column.sampled),
    *_columns(
        "extra",
        "a JSON object with what the task knows about the question, such as difficulty, type, domain or `depth` "
        "(percent of the context before the needle)",
        _TEXT,
        shared=True,
    ),
    *_columns(
        "prompt_end",
        "the last 400 characters of the prompt, after `…` if there are more. Lines before them show up to 6 places "
        "where a reference answer of up to 399 characters occurs verbatim, with 120 characters on either side. In a "
        "live dialogue the history before it has the model's own answers. Empty in tables of schema 2",
        _TEXT,
        since=3,
        substitute="",
        shared=True,
        text=True,
    ),
)
"""`samples.parquet`: a row per cell, sample, question and repeat."""

METRIC_COLUMNS: tuple[ResultColumn, ...] = (
    *_columns("schema", "version of these columns", _SHORT),
    *_columns(
        "cell model task policy budget moment length seed",
        "the cell, as in `cells.parquet`",
        *(_TEXT, _TEXT, _TEXT, _TEXT, _TEXT, _TEXT, _SHORT, _LONG),
    ),
    *_columns(
        "metric filter higher_is_better",
        "name of the metric, with the judge if there is one; the filter that the responses went through, empty if the "
        "task has only one; direction. The first row of a cell is the metric of `cells.parquet`",
        *(_TEXT, _TEXT, _BOOL),
    ),
    *_columns("is_mean", "as in `cells.parquet`, for this metric. A score is NaN if the metric failed", _BOOL),
    *(replace(column, meaning="") for column in _SCORE_COLUMNS),
)
"""`metrics.parquet`: a row per cell and metric."""

MEASURED = tuple(column.name for column in _measured() if column.sampled)
"""Columns of the samples that are fields of their responses."""
TEXTS = tuple(column for column in SAMPLE_COLUMNS if column.text)
"""Columns of the samples that a published run leaves out."""
SCORES = tuple(column.name for column in _SCORE_COLUMNS)
"""Columns of a score and of its difference from the full cache."""
AVERAGED = tuple(column.name for column in CELL_COLUMNS if column.averaged)
"""Columns of the cells that are means of a field of their responses."""
LOG_KL = "log_kl"
"""Metric of fidelity for tests: the logarithm of the KL divergence plus `KL_OFFSET`."""
KL_OFFSET = 1e-3
FIDELITY = {"kl": False, LOG_KL: False, "agreement": True, "nll_diff": False, "first_difference": True}
"""Metrics of fidelity, and whether higher is better."""
UNBOUNDED = frozenset(FIDELITY) - {"agreement"}
"""Metrics that are never shown in points, even where all of their values lie in [0, 1]."""


class ScoredCell(NamedTuple):
    """What the tables say of a cell.

    Attributes:
        row: Its row of `cells.parquet`.
        metric_rows: Its rows of `metrics.parquet`, the task's metric first.
        samples: Its part of `samples.parquet`.
    """

    row: dict[str, Any]
    metric_rows: list[dict[str, Any]]
    samples: Columns


def _schema(columns: Iterable[ResultColumn], *types: Any) -> Any:
    """Columns of a table, by type and then as they are declared."""
    ordered = sorted(columns, key=lambda column: types.index(column.type))
    return pa.schema([(column.name, column.type) for column in ordered])


CELLS_SCHEMA = _schema(CELL_COLUMNS, _TEXT, _SHORT, _LONG, _REAL, _BOOL)
SAMPLES_SCHEMA = _schema(SAMPLE_COLUMNS, _TEXT, pa.list_(_TEXT), _SHORT, _REAL, _LONG)
METRICS_SCHEMA = _schema(METRIC_COLUMNS, _TEXT, _SHORT, _LONG, _REAL, _BOOL)


def missing_columns(version: int) -> Iterator[ResultColumn]:
    """Yield the columns that tables of an earlier version lack."""
    known = {column.name: column for column in (*CELL_COLUMNS, *SAMPLE_COLUMNS)}
    return (column for column in known.values() if column.since > version)


def to_table(frame: pd.DataFrame, schema: Any) -> Any:
    """Turn a frame into a table with exactly the columns and types of a schema.

    Args:
        frame: It must have every column of the schema and no other; `schema` is filled in.
        schema: `CELLS_SCHEMA`, `SAMPLES_SCHEMA` or `METRICS_SCHEMA`.

    Raises:
        ValueError: A column is missing or unknown, or does not fit its type.
    """
    frame = frame.assign(schema=SCHEMA_VERSION)
    _check(frame.columns, schema)
    table = pa.Table.from_pandas(frame[schema.names], schema=schema, preserve_index=False)
    return table.replace_schema_metadata()


def from_columns(columns: Columns, schema: Any) -> Any:
    """Turn columns into a table of a schema; a score that is not a number is missing.

    Args:
        columns: By name; each column of the schema and no other.
        schema: `CELLS_SCHEMA`, `SAMPLES_SCHEMA` or `METRICS_SCHEMA`.

    Raises:
        ValueError: A column is missing or unknown, or does not fit its type.
    """
    _check(columns, schema)
    arrays = [pa.array(columns[entry.name], entry.type, from_pandas=True) for entry in schema]
    return pa.Table.from_arrays(arrays, schema=schema)


def _check(columns: Iterable[str], schema: Any) -> None:
    """Refuse columns that are not those of a schema."""
    differing = set(columns) ^ set(schema.names)
    if differing:
        raise ValueError(f"columns missing or unknown: {', '.join(sorted(differing))}")
