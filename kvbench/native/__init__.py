"""Native code for a CPU: `kernels.c`, compiled once per machine and loaded with ctypes.

The library is kept in kvbench's cache folder under a digest of its source, its flags, the compiler and the CPU, and is
compiled again if it is damaged. Without a compiler, or with `KVBENCH_NATIVE=0`, torch code computes the same;
`implementation` says which of the two runs.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvbench.errors import UserError
from kvbench.files import cache_dir, digest_of, is_off, replacing, state_of

SWITCH = "KVBENCH_NATIVE"
"""Environment variable; 0 turns native code off."""

_SOURCE = Path(__file__).with_name("kernels.c")
_COMPILERS = ("cc", "gcc", "clang")
# Not -ffast-math: it would change how the whole process treats denormal numbers, and break NaN.
_FLAGS = ("-std=gnu11", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math")
_FOR_THIS_CPU = "-march=native"
_COMPILE_SECONDS = 120
_CPU_FACTS = Path("/proc/cpuinfo")

_WORK = 1 << 22
"""Multiplications that are worth another thread."""

_POINTER, _SIZE, _FLOAT, _FLAG = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_SIGNATURES = {
    "ragged_attention": (
        *(_POINTER, _SIZE, _SIZE, _SIZE, *[_POINTER] * 6, *[_SIZE] * 9),
        *(_FLOAT, _FLAG, _POINTER, _POINTER),
    ),
    "entry_keys": (_POINTER, _SIZE, _SIZE, _POINTER),
    "mark_largest": (_POINTER, _SIZE, _SIZE, _POINTER, _SIZE, _POINTER),
    "marked_columns": (_POINTER, _SIZE, _SIZE, _POINTER, _POINTER),
}

POWERS = (1, 2)
"""Powers of attention weights that `ragged_attention` sums."""

DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes that attention computes."""

LEAST_WIDE = 8
"""Query heads of a KV head that `ragged_attention` computes side by side on every CPU; `MOST_WIDE` of `kernels.c`."""

_CAUSAL_TOKENS = 1 << 13
"""Tokens up to which `causal_attention` is used: it writes all weights of up to 32 queries to memory, SDPA none."""
_CAUSAL_BLOCK, _CAUSAL_BLOCKS = 128, 16
"""Fewest queries of a block, and most blocks before the last. What keys receive is summed block by block."""

WINDOW = 32
"""Queries of the last block of a prompt, so that what keys receive from these alone is known too."""


def library() -> ctypes.CDLL | None:
    """Return the compiled library; None if it is turned off or cannot be compiled here."""
    return load()[0]


def problem() -> str:
    """Return why there is no library although it is not turned off; "" if there is one."""
    return load()[1]


@functools.cache
def load() -> tuple[ctypes.CDLL | None, str]:
    """Compile and load the library, once; return it, or None and why there is none."""
    if is_off(SWITCH):
        return None, ""
    reason = "there is no C compiler"
    for compiler in dict.fromkeys(filter(None, map(shutil.which, _COMPILERS))):
        try:
            loaded = ctypes.CDLL(str(_compiled(compiler)))
        except (OSError, UserError, subprocess.SubprocessError) as error:
            reason = str(error).partition("\n")[0]
            continue
        for name, argument_types in _SIGNATURES.items():
            getattr(loaded, name).argtypes = argument_types
        return loaded, ""
    return None, reason


def implementation() -> str:
    """Return what computes on a CPU here: `native` or `torch`."""
    return "torch" if library() is None else "native"


def build() -> str:
    """Return the build that runs here, by a digest of source, flags, compiler and CPU; "" if torch computes."""
    loaded = library()
    return "" if loaded is None else Path(loaded._name).stem


def _compiled(compiler: str) -> Path:
    """Return the library for this machine; compile it unless it is there.

    Raises:
        OSError, UserError, subprocess.SubprocessError: It cannot be compiled, or stored.
    """
    compiler_file = Path(compiler).resolve()
    of_compiler = [str(compiler_file), *state_of(compiler_file)[:2]]
    described = [_SOURCE.read_text(encoding="utf-8"), _FLAGS, of_compiler, platform.machine(), _cpu_features()]
    target_path = cache_dir() / "native" / f"{digest_of(described)}.so"
    if not _is_whole(target_path):
        target_path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target_path) as partial_path:
            command = [compiler, *_FLAGS, "-shared", "-fPIC", str(_SOURCE), "-o", str(partial_path), "-lm"]
            tuned = [command[0], _FOR_THIS_CPU, *command[1:]]
            if _run(tuned) != 0 and _run(command) != 0:  # some compilers do not know the flag
                raise subprocess.SubprocessError(f"{compiler} cannot compile it")
            code = partial_path.read_bytes()
            partial_path.write_bytes(code + _seal(code))  # loaders ignore what follows the code
    return target_path


def _seal(code: bytes) -> bytes:
    return hashlib.sha256(code).digest()


def _is_whole(library_path: Path) -> bool:
    """Return whether a library is as it was compiled: damaged code would end the process without a word."""
    if not library_path.exists():
        return False
    content = library_path.read_bytes()
    size = len(content) - hashlib.sha256().digest_size
    return size > 0 and content[size:] == _seal(content[:size])


def _run(command: list[str]) -> int:
    return subprocess.run(command, capture_output=True, timeout=_COMPILE_SECONDS, check=False).returncode


def _cpu_features() -> str:
    """Return what the compiler may use of this CPU: code for another one could stop the process."""
    if not _CPU_FACTS.is_file():
        return platform.processor()
    fact_lines = _CPU_FACTS.read_text(encoding="utf-8", errors="replace").splitlines()
    features = (line for line in fact_lines if line.startswith(("flags", "Features", "model name", "CPU part")))
    return "\n".join(dict.fromkeys(features))


@functools.cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="kvbench-native")


os.register_at_fork(after_in_child=_threads.cache_clear)  # a child process has none of these threads


def _check(failed: int) -> None:
    if failed:
        raise MemoryError("not enough memory for native code")


def can_attend(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether `ragged_attention` computes this: float32 or bfloat16 on a CPU, without a gradient."""
    return (
        query.device.type == "cpu"
        and query.dtype in DTYPES
        and query.dtype == key.dtype == value.dtype
        and not (torch.is_grad_enabled() and query.requires_grad)
        and library() is not None
    )


def ragged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    columns: Tensor,
    segment_starts: Tensor,
    segment_lengths: Tensor,
    shared_addresses: Tensor | None,
    first_column: int,
    scale: float,
    powers: Sequence[int] = (),
    valid_queries: Tensor | None = None,
) -> tuple[Tensor, dict[int, Tensor]]:
    """Compute attention of new queries over segments; a sequence's result does not depend on the others.

    Args:
        query: `[B, H_q, n, d]`; a query of column `c` sees the entries up to `c`.
        key, value, columns: Own rows of all segments, `[rows, d]`, `[rows, d_v]` and int32 `[rows]`.
        segment_starts, segment_lengths: Own rows of every segment, int64 `[B * H]` entries.
        shared_addresses: Addresses of shared keys, values and columns, and the number of shared entries, int64
            `[B * H, 4]`; they come before the own rows, and every query sees them. None: nothing is shared.
        first_column: Logical column of the first query.
        scale: Scaling factor of the logits.
        powers: Also sum these powers of the attention weights over the queries, of `POWERS`; nothing is shared then.
        valid_queries: Queries whose weights are summed, bool `[B, n]`; None: all.

    Returns:
        Output `[B, H_q, n, d_v]`, zeros for a query that sees nothing; and by power what every entry receives from each
        query head, float32 `[entries, G]`, segment by segment.
    """
    batch_size, query_heads, query_count, head_dim = query.shape
    query = query if query.stride(-1) == 1 else query.contiguous()
    key, value, columns = key.contiguous(), value.contiguous(), columns.contiguous()
    segment_starts, segment_lengths = segment_starts.contiguous(), segment_lengths.contiguous()
    segments = segment_starts.numel()
    kv_heads, value_dim = segments // batch_size, value.shape[-1]
    output = query.new_empty(batch_size, query_count, query_heads, value_dim)
    sums, sums_to = {}, None
    if powers:
        entry_ends = segment_lengths.flatten().cumsum(0)
        first_entries = entry_ends - segment_lengths.flatten()
        sums_shape = (int(entry_ends[-1]), query_heads // kv_heads)
        sums = {power: query.new_zeros(sums_shape, dtype=torch.float32) for power in powers}
        counted = None if valid_queries is None else valid_queries.contiguous()
        addresses = (*(sums.get(power) for power in POWERS), first_entries, counted)
        sums_to = (_POINTER * 4)(*(None if tensor is None else tensor.data_ptr() for tensor in addresses))

    rows = (key, value, columns, segment_starts, segment_lengths)

    def compute(first_segment: int, last_segment: int) -> int:
        segment_range = (first_segment, last_segment, kv_heads)
        return _attend(query, rows, shared_addresses, segment_range, first_column, scale, sums_to, output)

    thread_count = torch.get_num_threads()
    if thread_count > 1:
        entries = int(segment_lengths.sum()) + (0 if shared_addresses is None else int(shared_addresses[:, 3].sum()))
        work = entries * query_count * (query_heads // kv_heads) * (head_dim + value_dim)
        thread_count = max(1, min(thread_count, segments, work // _WORK))
    bounds = [segments * part // thread_count for part in range(thread_count + 1)]
    _in_threads(compute, list(pairwise(bounds)), thread_count)
    return output.transpose(1, 2), sums


def _attend(
    query: Tensor,
    rows: Sequence[Tensor],
    shared_addresses: Tensor | None,
    segment_range: tuple[int, int, int],
    first_column: int,
    scale: float,
    sums_to: Any,
    output: Tensor,
) -> int:
    """Compute attention of some segments on this thread; return whether memory ran out.

    Args:
        query, first_column, scale, shared_addresses: As for `ragged_attention`.
        rows: Keys, values, columns, and first rows and lengths of the segments, all contiguous.
        segment_range: First segment, the one behind the last, in the order of KV heads, and the number of KV heads.
        sums_to: The `received` of `kernels.c`; None: nothing is summed.
        output: `[B, n, H_q, d_v]`, contiguous.
    """
    native = library()
    assert native is not None
    _, query_heads, query_count, head_dim = query.shape
    first_segment, last_segment, kv_heads = segment_range
    failed: int = native.ragged_attention(
        query.data_ptr(),
        *(stride * query.element_size() for stride in query.stride()[:3]),
        *(tensor.data_ptr() for tensor in rows),
        None if shared_addresses is None else shared_addresses.data_ptr(),
        first_segment,
        last_segment,
        len(query),
        kv_heads,
        query_heads // kv_heads,
        query_count,
        head_dim,
        output.shape[-1],
        first_column,
        float(scale),
        query.dtype == torch.bfloat16,
        sums_to,
        output.data_ptr(),
    )
    return failed


def _in_threads(compute: Callable[..., int], parts: Sequence[tuple[int, ...]], thread_count: int) -> None:
    """Call a function with each of some arguments, on several threads if there are to be more than one."""
    if thread_count == 1:
        for part in parts:
            _check(compute(*part))
        return
    pool = _threads(torch.get_num_threads())
    futures = [pool.submit(compute, *part) for part in parts]
    try:
        for future in futures:
            _check(future.result())
    finally:  # an interrupted caller frees what the others still use
        wait(futures)


def can_attend_causally(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether `causal_attention` computes this, and SDPA is not clearly faster because of its length."""
    return (
        query.shape[2] == key.shape[2] <= _CAUSAL_TOKENS
        and key.is_contiguous()
        and value.is_contiguous()
        and can_attend(query, key, value)
        and not (torch.is_grad_enabled() and (key.requires_grad or value.requires_grad))
        and not has_matrix_code(query.dtype)
    )


@functools.cache
def has_matrix_code(dtype: torch.dtype) -> bool:
    """Return whether torch multiplies matrices by instructions of this CPU (AMX) that `kernels.c` does not use."""
    return dtype == torch.bfloat16 and "amx_bf16" in _cpu_features()


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, powers: Sequence[int] = ()
) -> tuple[Tensor, dict[int, Tensor], Tensor | None]:
    """Compute attention of all tokens of prompts without padding, each over itself and those before it.

    Args:
        query: `[B, H_q, n, d]`.
        key, value: `[B, H, n, d]` and `[B, H, n, d_v]`, contiguous.
        scale: Scaling factor of the logits.
        powers: Also sum these powers of the attention weights over the queries, of `POWERS`.

    Returns:
        Output `[B, H_q, n, d_v]`; by power what every key receives from each query head, float32 `[B, H_q, n]`; and
        what it receives from the last `WINDOW` queries, with the bits of `window_attention_sum`. That is None if power
        1 is not summed, if there are fewer queries, or if a KV head has more than `LEAST_WIDE` query heads, which are
        not computed side by side everywhere. All depend on the shapes, not on the number of threads.
    """
    batch_size, query_heads, token_count, head_dim = query.shape
    kv_heads = key.shape[1]
    query = query if query.stride(-1) == 1 else query.contiguous()
    output = query.new_empty(batch_size, token_count, query_heads, value.shape[-1])
    block_size = -(-max(_CAUSAL_BLOCK, -(-token_count // _CAUSAL_BLOCKS)) // 4) * 4
    last_start = max(0, token_count - WINDOW)
    block_bounds = [*pairwise([*range(0, last_start, block_size), last_start, token_count])]
    columns = torch.arange(token_count, dtype=torch.int32, device=query.device).repeat(kv_heads)
    first_rows = torch.arange(kv_heads, device=query.device) * token_count
    sums_shape = (len(block_bounds), batch_size, kv_heads, token_count, query_heads // kv_heads)
    sums = {power: query.new_zeros(sums_shape, dtype=torch.float32) for power in powers}

    def compute(sequence: int, block: int, first_head: int, last_head: int) -> int:
        start, stop = block_bounds[block]
        rows = (key[sequence], value[sequence], columns, first_rows, torch.full_like(first_rows, stop))
        sums_to = None
        if sums:
            parts = [sums[power][block, sequence].data_ptr() if power in sums else None for power in POWERS]
            sums_to = (_POINTER * 4)(*parts, first_rows.data_ptr(), None)
        queries, results = query[sequence : sequence + 1, :, start:stop], output[sequence : sequence + 1, start:stop]
        return _attend(queries, rows, None, (first_head, last_head, kv_heads), start, scale, sums_to, results)

    thread_count = torch.get_num_threads()
    if batch_size * query_heads * token_count * token_count * head_dim < thread_count * _WORK:
        thread_count = 1
    head_bounds = [*pairwise(range(kv_heads + 1))] if thread_count > 1 else [(0, kv_heads)]
    blocks = reversed(range(len(block_bounds)))  # later ones take longer, but for the last
    _in_threads(
        compute, [(b, i, *heads) for i in blocks for b in range(batch_size) for heads in head_bounds], thread_count
    )
    received = {power: parts.sum(0).transpose(2, 3).flatten(1, 2) for power, parts in sums.items()}
    window_sums = None
    if 1 in sums and token_count >= WINDOW and query_heads <= LEAST_WIDE * kv_heads:
        last_sums = sums[1][-1].transpose(2, 3)  # copied, because a view would keep the sums of all blocks
        window_sums = last_sums.clone(memory_format=torch.contiguous_format).flatten(1, 2)
    return output.transpose(1, 2), received, window_sums


def window_attention_sum(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Sum the attention of the last tokens of contexts without padding, each over itself and the tokens before it.

    Args:
        query: Queries of the last tokens, `[B, H_q, w, d]`; with fewer than `w` tokens, the first ones count nothing.
        key: Keys of all tokens, `[B, H, n, d]`, contiguous.
        scale: Scaling factor of the logits.

    Returns:
        What every key receives from each query head, float32 `[B, H_q, n]`.
    """
    batch_size, kv_heads, token_count, head_dim = key.shape
    query = query[:, :, -token_count:]
    segments = batch_size * kv_heads
    columns = torch.arange(token_count, dtype=torch.int32).repeat(segments)
    starts = torch.arange(0, segments * token_count, token_count)
    rows = key.view(-1, head_dim), key.new_empty(segments * token_count, 0), columns  # no values: sums only
    first_column = token_count - query.shape[2]
    lengths = torch.full_like(starts, token_count)
    _, sums = ragged_attention(query, *rows, starts, lengths, None, first_column, scale, POWERS[:1])
    return sums[1].view(batch_size, kv_heads, token_count, -1).transpose(2, 3).flatten(1, 2)


def entry_keys(value: Tensor, protect: Tensor, position: Tensor, valid: Tensor) -> Tensor | None:
    """Compute `kvbench.parts.entry_key`; None if this cannot be done here.

    Args:
        value, protect, position, valid: float32, int8, int64 and bool, `[B, H, n]` each, or `[1, H, n]` if all
            sequences have the same.
    """
    inputs = (value, protect, position, valid)
    dtypes = (torch.float32, torch.int8, torch.int64, torch.bool)
    if value.dim() != 3 or value.device.type != "cpu" or tuple(tensor.dtype for tensor in inputs) != dtypes:
        return None
    native = library()
    if native is None:
        return None
    batch_size, (kv_heads, entry_count) = max(map(len, inputs)), value.shape[1:]
    laid_out = [_rows(tensor.detach()) for tensor in inputs]
    views = [number for tensor, stride in laid_out for number in (tensor.data_ptr(), stride, len(tensor) * kv_heads)]
    keys = torch.empty(batch_size, kv_heads, entry_count, dtype=torch.int64)
    native.entry_keys((_SIZE * len(views))(*views), batch_size * kv_heads, entry_count, keys.data_ptr())
    return keys


def _rows(tensor: Tensor) -> tuple[Tensor, int]:
    """Return a tensor `[B, H, n]` whose rows are contiguous, and the numbers from one row to the next."""
    batch_size, row_count, _ = tensor.shape
    if tensor.stride(2) == 1 and (batch_size == 1 or tensor.stride(0) == tensor.stride(1) * row_count):
        return tensor, tensor.stride(1)
    return tensor.contiguous(), tensor.shape[2]


def mark_largest(keys: Tensor, share: Tensor) -> Tensor | None:
    """Compute `kvbench.parts.best`; None if this cannot be done here.

    Args:
        keys: int64 `[..., m]`; the first axis may repeat the same memory.
        share: int64 `[...]`.
    """
    if keys.device.type != "cpu" or keys.dtype != torch.int64:
        return None
    native = library()
    if native is None:
        return None
    distinct = keys[:1] if keys.dim() > 1 and keys.stride(0) == 0 else keys
    distinct, share = distinct.contiguous(), share.to(torch.int64).expand(keys.shape[:-1]).contiguous()
    marks = torch.empty(keys.shape, dtype=torch.bool)
    row_count, entry_count = share.numel(), keys.shape[-1]
    if row_count:
        distinct_count = distinct.shape[:-1].numel()
        pointers = distinct.data_ptr(), distinct_count, entry_count, share.data_ptr(), row_count, marks.data_ptr()
        _check(native.mark_largest(*pointers))
    return marks


def marked_columns(marks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the columns of the marked entries of every row, row by row, and how many each row has.

    Args:
        marks: bool `[rows, n]` on a CPU.

    Returns:
        int32 `[marked]` and int64 `[rows]`.
    """
    native = library()
    assert native is not None
    marks = marks.contiguous()
    total, lengths = int(marks.sum()), torch.empty(len(marks), dtype=torch.int64)
    columns = torch.empty(total + 1, dtype=torch.int32)  # the kernel writes one more
    native.marked_columns(marks.data_ptr(), *marks.shape, columns.data_ptr(), lengths.data_ptr())
    return columns[:total], lengths
