"""`kvbench check` passes what is right and says what is wrong with what is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbench.checks import CheckResult, run_checks
from kvbench.errors import UserError
from tests.sweeps import slow_but

HEAD = """
from dataclasses import dataclass
import torch
from kvbench.errors import UserError
from kvbench.parts import TopK, Uniform
from kvbench.plugin import Allocator, Merger, Policy, Score, Scores, Selector, View
"""


NORM = """
@dataclass(frozen=True)
class Norm(Score):
    def score(self, v):
        return v.key.float().norm(dim=-1)
"""


def check(tmp_path: Path, body: str, name: str) -> dict[str, CheckResult]:
    file = tmp_path / "mine.py"
    file.write_text(HEAD + body)
    return {r.name: r for r in run_checks(f"{file}:{name}")}


def failed(results: dict[str, CheckResult]) -> set[str]:
    return {name for name, r in results.items() if not r.ok}


@pytest.mark.parametrize(
    "spec", slow_but(["full", "random", "criticalkv:window=8", "h2o:allocate=global"], "criticalkv:window=8")
)
def test_built_in_policies_pass(spec: str) -> None:
    results = run_checks(spec)
    assert [r for r in results if not r.ok] == []
    assert len(results) == 10


def test_what_cannot_be_loaded_is_the_users_to_mend() -> None:
    with pytest.raises(UserError, match="snapkv"):
        run_checks("snapvk")


def test_a_policy_of_ones_own_parts_without_names(tmp_path: Path) -> None:
    body = (
        "from dataclasses import dataclass\n"
        "from kvbench.parts import TopK, Uniform\n"
        "from kvbench.plugin import Policy, Score, View\n"
        "@dataclass(frozen=True)\n"
        "class Mine(Score):\n"
        "    def score(self, v: View):\n"
        "        return v.noise()\n"
        "OWN = Policy('own', Mine(), Uniform(), TopK())\n"
    )
    assert all(result.ok for result in check(tmp_path, body, "OWN").values())


def test_annotations_for_type_checkers_alone(tmp_path: Path) -> None:
    (tmp_path / "typed.py").write_text(
        "from __future__ import annotations\n"
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from kvbench.plugin import View\n    from torch import Tensor\n"
        "def mine(v: View, power: float = 1) -> Tensor:\n    return v.key.float().norm(dim=-1) ** power\n"
    )
    assert all(result.ok for result in run_checks(f"{tmp_path}/typed.py:mine:power=0.5"))


def test_a_parameter_without_a_default(tmp_path: Path) -> None:
    body = "@dataclass(frozen=True)\nclass Mine(Score):\n    power: float\n"
    with pytest.raises(UserError, match="parameter power of Mine needs a default"):
        check(tmp_path, body, "Mine")


def test_a_policy_that_gives_up(tmp_path: Path) -> None:
    results = check(tmp_path, "def mine(v):\n    raise SystemExit(7)\n", "mine")
    assert "SystemExit" in results["exactly N entries"].detail


def test_a_score_that_is_not_finite(tmp_path: Path) -> None:
    body = "def mine(v):\n    return torch.log(v.key.float().norm(dim=-1) - 4)\n"
    results = check(tmp_path, body, "mine")
    detail = results["scores are finite, inputs unmodified"].detail
    assert "of layer 0 are not finite" in detail
    assert "Llama, G=2" in detail


def test_what_fails_only_while_decoding(tmp_path: Path) -> None:
    stepping = check(
        tmp_path,
        "@dataclass(frozen=True)\n"
        "class Mine(Score):\n"
        "    extras = {'norm': torch.float32}\n"
        "    def score(self, v):\n"
        "        v.extras['norm'] = v.key.float().norm(dim=-1)\n"
        "        return v.extras['norm']\n"
        "    def step(self, v):\n        raise KeyError('mean')\n",
        "Mine",
    )
    assert failed(stepping) == {"eviction while decoding"}
    assert "KeyError: 'mean' (" in stepping["eviction while decoding"].detail
    merging = check(
        tmp_path,
        f"{NORM}"
        "class Nans(Merger):\n"
        "    def merge(self, v, keep, state):\n        return v.key, v.value * torch.nan\n"
        "OWN = Policy('own', Norm(), Uniform(), TopK(), merge=Nans())\n",
        "OWN",
    )
    assert failed(merging) == {"eviction while decoding"}
    assert "not finite" in merging["eviction while decoding"].detail


def test_a_score_that_changes_its_input(tmp_path: Path) -> None:
    body = "def mine(v):\n    return v.value.mul_(1.1).norm(dim=-1)\n"
    results = check(tmp_path, body, "mine")
    assert "value was modified in place" in results["scores are finite, inputs unmodified"].detail


def test_a_score_of_the_wrong_shape(tmp_path: Path) -> None:
    results = check(tmp_path, "def mine(v):\n    return v.value.float().sum(-1).mean(1)\n", "mine")
    detail = results["scores are finite, inputs unmodified"].detail
    assert "scores of shape [3, 61]; return [B, H, n] [3, 2, 61]" in detail


@pytest.mark.parametrize(
    ("cast", "kind", "mend"),
    [
        ("long()", "int64", "float"),
        ("bool()", "bool", "float"),
        ("to(torch.complex64)", "complex64", "abs"),
    ],
)
def test_a_score_that_is_not_floating_point(tmp_path: Path, cast: str, kind: str, mend: str) -> None:
    body = f"def mine(v):\n    return v.value.float().norm(dim=-1).{cast}\n"
    results = check(tmp_path, body, "mine")
    assert results["scores are finite, inputs unmodified"].detail == (
        f"layer 0: the score returned {kind}, not floating-point; convert it, for example with .{mend}()"
    )


@pytest.mark.parametrize(
    ("part", "code", "says"),
    [
        ("allocate", "return None", "the allocator returned NoneType; return int64 [B, layers, H]"),
        (
            "allocate",
            "return total[:, None]",
            "the allocator returned the shape [1, 1]; return int64 [B, layers, H] [1, 1, ",
        ),
        ("allocate", "return FAIR.allocate(layers, total).float()", "the allocator returned float32; return int64"),
        (
            "select",
            "return BEST.select(v, scores, share).float()",
            "the selector returned float32; return bool [B, H, n]",
        ),
        (
            "select",
            "return BEST.select(v, scores, share)[:, 0]",
            "the selector returned the shape [1, 61]; return bool [B, H, n]",
        ),
        ("merge", "return v.key", "the merger returned Tensor; return keys and values, [2, 2, 33, 'd'] each"),
        ("merge", "return v.key[:, :1], None", "the merger returned [2, 1, 33, 8] and None; return keys and values"),
    ],
)
def test_what_another_part_returns_is_named(tmp_path: Path, part: str, code: str, says: str) -> None:
    takes = {"allocate": "layers, total", "select": "v, scores, share", "merge": "v, keep, state"}[part]
    base = {"allocate": "Allocator", "select": "Selector", "merge": "Merger"}[part]
    body = (
        f"{NORM}FAIR, BEST = Uniform(), TopK()\n"
        f"@dataclass(frozen=True)\nclass Wrong({base}):\n    def {part}(self, {takes}):\n        {code}\n"
        f"OWN = Policy(**{{'name': 'own', 'score': Norm(), 'allocate': FAIR, 'select': BEST, '{part}': Wrong()}})\n"
    )
    detail = check(tmp_path, body, "OWN")["eviction while decoding" if part == "merge" else "exactly N entries"].detail
    assert says in detail


def test_a_score_that_sees_padding(tmp_path: Path) -> None:
    body = "def mine(v):\n    return (v.value.float() - v.value.float().mean(2, True)).norm(dim=-1)\n"
    results = check(tmp_path, body, "mine")
    assert failed(results) == {"padding does not change kept entries"}
    assert "of padding" in results["padding does not change kept entries"].detail


def test_a_score_that_sees_its_batch(tmp_path: Path) -> None:
    body = "def mine(v):\n    return (v.value.float() - v.value.float().mean(0)).norm(dim=-1)\n"
    results = check(tmp_path, body, "mine")
    assert "rows do not depend on their batch" in failed(results)
    assert "entries are kept" in results["rows do not depend on their batch"].detail


def test_a_score_from_a_global_generator(tmp_path: Path) -> None:
    results = check(tmp_path, "def mine(v):\n    return torch.rand(v.shape)\n", "mine")
    assert "deterministic" in failed(results)
    assert ", repeated: " in results["deterministic"].detail


def test_a_selector_that_keeps_too_many(tmp_path: Path) -> None:
    body = """
@dataclass(frozen=True)
class Greedy(Selector):
    def select(self, v, scores, share):
        return TopK().select(v, scores, (share + 1).clamp(max=v.shape[2]))

@dataclass(frozen=True)
class Length(Score):
    def score(self, v):
        return v.value.float().norm(dim=-1)

MINE = Policy("mine", Length(), Uniform(), Greedy())
"""
    results = check(tmp_path, body, "MINE")
    assert "exactly N entries" in failed(results)
    assert "exactly" in results["exactly N entries"].detail


def test_an_error_names_the_line(tmp_path: Path) -> None:
    results = check(tmp_path, "def mine(v):\n    return v.kee.norm(dim=-1)\n", "mine")
    detail = results["exactly N entries"].detail
    assert "AttributeError" in detail
    assert f"mine.py:{len(HEAD.splitlines()) + 2}" in detail


def test_parameters_must_be_readable(tmp_path: Path) -> None:
    body = """
@dataclass(frozen=True)
class Mine(Score):
    sizes: tuple[int, ...] = (1, 2)
    def score(self, v):
        return v.value.float().norm(dim=-1)
"""
    results = check(tmp_path, body, "Mine")
    assert "is not parsed as" in results["parameters round-trip"].detail


def test_parameters_out_of_range_must_say_so(tmp_path: Path) -> None:
    body = """
@dataclass(frozen=True)
class Mine(Score):
    size: int = 3
    def __post_init__(self):
        assert self.size > 0
    def score(self, v):
        return v.value.float().norm(dim=-1)
"""
    results = check(tmp_path, body, "Mine")
    detail = results["parameters round-trip"].detail
    assert "size=-1 raises AssertionError; raise UserError" in detail


def test_a_reader_that_does_wrong_is_told_what(tmp_path: Path) -> None:
    body = (
        "from kvbench.plugin import Reader\n"
        "class Nan(Reader):\n"
        "    def block(self, model): return 4\n"
        "    def summary(self, model): return 1\n"
        "    def rate(self, v):\n"
        "        return v.key.sum((2,3))[:, None].expand(-1, v.query.shape[2], -1) * float('nan')\n"
        "class Changes(Nan):\n"
        "    def rate(self, v):\n"
        "        v.key.mul_(2)\n"
        "        return v.key.sum((2, 3))[:, None].expand(-1, v.query.shape[2], -1)\n"
        "NAN = Policy('nan', None, Uniform(), TopK(), read=Nan())\n"
        "CHANGES = Policy('changes', None, Uniform(), TopK(), read=Changes())\n"
    )
    name = "scores are finite, inputs unmodified"
    assert "ratings of layer 0 are not finite" in check(tmp_path, body, "NAN")[name].detail
    assert "key was modified in place" in check(tmp_path, body, "CHANGES")[name].detail
