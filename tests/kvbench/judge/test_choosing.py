from __future__ import annotations

import pytest

from kvbench.errors import LeftOut, UserError
from kvbench.judge.choosing import choose


def test_flag_then_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVBENCH_JUDGE", raising=False)
    monkeypatch.setenv("KVBENCH_JUDGE_URL", "http://localhost:1/v1")
    monkeypatch.setenv("KVBENCH_JUDGE_MODEL", "org/model")
    assert choose().mark == "judge org/model"
    assert choose().origin == "org/model at localhost:1"
    assert "are sent there" in choose().notice
    assert choose("local").mark == "local judge"
    monkeypatch.setenv("KVBENCH_JUDGE", "local")
    assert choose().mark == "local judge"
    assert choose("endpoint").mark == "judge org/model"
    monkeypatch.setenv("KVBENCH_JUDGE", "locl")
    with pytest.raises(UserError, match="unknown KVBENCH_JUDGE 'locl'; did you mean local"):
        choose()
    with pytest.raises(UserError, match="unknown judge 'gpt'; choose from auto, local, endpoint"):
        choose("gpt")
    monkeypatch.setenv("KVBENCH_JUDGE_MODEL", "")
    with pytest.raises(UserError, match="KVBENCH_JUDGE_MODEL names no model"):
        choose("endpoint")
    monkeypatch.delenv("KVBENCH_JUDGE_URL")
    with pytest.raises(LeftOut, match="set KVBENCH_JUDGE_URL and KVBENCH_JUDGE_MODEL"):
        choose("endpoint")
