"""Building of lm-eval's task objects: with its data, seeds and flags, as `lm_eval.simple_evaluate` does."""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import datasets
import numpy as np
from huggingface_hub import constants

from kvbench.data.hub import unreachable
from kvbench.data.records import NotFetched
from kvbench.errors import LeftOut, UserError, first_lines, reason_of
from kvbench.harness import lmms_tasks
from kvbench.harness.lm_eval import quiet
from kvbench.harness.named_tasks.benchmarks import NamedBenchmark, build, configured
from kvbench.harness.protocol import HarnessFlags, TaskSettings

_FEWSHOT_SEED, _NUMPY_SEED = 1234, 1234
"""lm-eval's default seeds of the sampler of examples and of numpy; that of Python is 0."""

GENERATE = "generate_until"
"""Output type of tasks whose answers are generated."""


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global generators as lm-eval does, because some tasks shuffle choices with them; then restore them."""
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002  (the global state)
    random.seed(seed)
    np.random.seed(seed or _NUMPY_SEED)  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002


def load_task(benchmark: NamedBenchmark, task_name: str, settings: TaskSettings) -> Any:
    """Build the task object, which loads its data.

    Raises:
        LeftOut: The data or a package is missing, or the task cannot run here.
        UserError: The YAML of the task is wrong, or it needs a flag.
    """
    config = configured(benchmark.specs[task_name], benchmark.include_path)
    if config.get("doc_to_image") or config.get("doc_to_audio"):
        hint = f"; lmms_eval:{benchmark.name} may be the same" if benchmark.name in lmms_tasks.names() else ""
        raise LeftOut(f"its prompts have images or audio, which kvbench shows only in tasks of lmms-eval{hint}")
    metadata = {"pretrained": settings.tokenizer_id, "tokenizer": settings.tokenizer_id}
    built = _build(benchmark, task_name, metadata)
    if getattr(built, "UNSAFE_CODE", False) and not settings.flags.confirm_run_unsafe_code:
        raise UserError(f"{task_name} executes code that the model writes; add --confirm-run-unsafe-code to allow it")
    return built


def fetch(benchmark: NamedBenchmark, task_name: str, *, fresh: bool = False) -> str:
    """Load the data of a task into the caches of the hub's clients, and describe it.

    Args:
        benchmark: The benchmark of the task.
        task_name: Name of the task.
        fresh: Whether to ask the hub for a newer version.

    Raises:
        UserError: The data cannot be fetched.
    """
    with quiet():
        built = _build(benchmark, task_name, {"pretrained": "reference", "tokenizer": "reference"}, fresh=fresh)
    source = " ".join(filter(None, [str(built.DATASET_PATH or ""), str(built.DATASET_NAME or "")]))
    return f"{len(built.eval_docs)} documents{source and f' of {source}'}"


def _build(benchmark: NamedBenchmark, task_name: str, metadata: dict[str, Any], *, fresh: bool = False) -> Any:
    """Build a task; see `load_task`."""
    spec, include_path = benchmark.specs[task_name], benchmark.include_path
    build_task = partial(build, spec, include_path, metadata)
    data_set = str(configured(spec, include_path).get("dataset_path") or "")
    return on_its_data(task_name, build_task, data_set, benchmark.name, fresh=fresh)


def on_its_data(
    task_name: str,
    build_task: Callable[[], Any],
    data_set: str,
    group: str,
    *,
    fresh: bool = False,
    harness: str = "lm-eval",
) -> Any:
    """Build a task object, which loads its data.

    Args:
        task_name: Name of the task.
        build_task: Builds it.
        data_set: Name of its data set, for messages.
        group: Name by which `kvbench data fetch` knows it and the tasks that it was named with.
        fresh: Whether to ask the hub for newer data.
        harness: Whose task it is, for messages.

    Raises:
        LeftOut: The data or a package is missing, or the data needs a loading script.
        UserError: The task cannot be loaded.
    """
    try:
        return _with_data(build_task, fresh)
    except UserError:
        raise
    except ImportError as error:
        raise LeftOut(f"something that it needs is missing ({first_lines(error)}); pip install the package") from error
    except OSError as error:
        raise _missing_data(task_name, error, data_set, group) from error
    except (Exception, SystemExit) as error:  # a task is third-party code
        if "scripts are no longer supported" in str(error):
            raise LeftOut("its data set needs a loading script, and kvbench never runs one") from error
        raise UserError(f"{task_name}: {harness} cannot load this task ({_cause(error)}); mend its YAML") from error


def _with_data(build_task: Callable[[], Any], fresh: bool) -> Any:
    """Build a task on the data in the caches of the hub's clients, or fetch the data if the hub can be reached."""
    with contextlib.redirect_stdout(io.StringIO()):  # some tasks print while they are imported
        try:
            with _offline() if not fresh or unreachable() else contextlib.nullcontext():
                return build_task()
        except OSError:
            if unreachable():
                raise
            return build_task()


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Keep the hub's clients from waiting for a hub that cannot be reached."""
    settings = [(constants, "HF_HUB_OFFLINE"), (datasets.config, "HF_HUB_OFFLINE")]
    before = [getattr(module, name) for module, name in settings]
    for module, name in settings:
        setattr(module, name, True)
    try:
        yield
    finally:
        for (module, name), value in zip(settings, before, strict=True):
            setattr(module, name, value)


def _missing_data(task_name: str, error: OSError, data_set: str, group: str) -> UserError:
    """Return the error for data that cannot be loaded."""
    if error.filename is not None or "Unable to find" in str(error):  # a file of the user's own
        return UserError(f"{task_name}: its data cannot be read ({first_lines(error)}); mend the path in its YAML")
    hub = unreachable()
    reason = f"the hub {hub}" if hub else first_lines(error)
    return NotFetched(
        f"its data set {data_set or 'of the task'} is not in the cache, and {reason}; "
        f"`kvbench data fetch {group}` gets it"
    )


def _cause(error: BaseException) -> str:
    """Return what went wrong in one line."""
    return first_lines(error) if isinstance(error, Exception) else reason_of(error)


def configure(built: Any, task_name: str, flags: HarnessFlags, seed: int) -> None:
    """Apply lm-eval's flags to a task, as `simple_evaluate` does.

    Raises:
        UserError: There are fewer examples than asked for.
    """
    if flags.gen_kwargs and built.get_config("output_type") == GENERATE:
        built.set_config("generation_kwargs", dict(flags.gen_kwargs), update=True)
    built.set_fewshot_seed(seed or _FEWSHOT_SEED)
    shots = built.get_config("num_fewshot")
    if shots is None or (flags.num_fewshot is not None and shots != 0):
        built.set_config("num_fewshot", flags.num_fewshot or 0)
    needed = built.get_config("num_fewshot")
    available = len(built.sampler.df) if hasattr(built, "sampler") else needed
    if available < needed:
        raise UserError(f"{task_name} has {available} examples, not {needed}; use a smaller --num-fewshot")
