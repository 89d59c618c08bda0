"""Facts about installed plugins, kept in the cache.

Plugins import torch, which takes longer than everything else that a list or a report does. What such a command has to
know about them is therefore computed once per state of their code.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, ClassVar, Self

from kvbench import registry
from kvbench.files import cache_dir, digest_of, store_json


class PluginFacts:
    """Answers to questions about installed plugins; those that had to be computed are stored at the end of `with`.

    Attributes:
        uses_cache: Whether answers are stored: only by the command line, whose processes end before plugins change.
    """

    uses_cache: ClassVar[bool] = False

    def __enter__(self) -> Self:
        if self.uses_cache:
            self._cache_path = cache_dir() / f"plugins-{digest_of(sys.prefix)}.json"
            self._code_state = registry.code_state()
            self._answers = self._stored()
            self._stored_count = len(self._answers)
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.uses_cache and len(self._answers) > self._stored_count:
            store_json(self._cache_path, {"state": self._code_state, "answers": self._answers})

    def get(self, question: str, compute: Callable[[], Any]) -> Any:
        """Return the answer to a question, a JSON value; an answer that raises an error is not stored.

        Args:
            question: All that the answer depends on, besides the code of installed plugins.
            compute: Returns the answer; it may import plugins.
        """
        if not self.uses_cache:
            return compute()
        if question not in self._answers:
            self._answers[question] = compute()
        return self._answers[question]

    def get_of_policy(self, spelling: str, question: str, compute: Callable[[], Any]) -> Any:
        """Return the answer to a question about a policy; it is computed each time if the policy is a user's file."""
        return compute() if registry.split_file(spelling) else self.get(f"{question} {spelling}", compute)

    def _stored(self) -> dict[str, Any]:
        try:
            stored = json.loads(self._cache_path.read_text(encoding="utf-8"))
            return dict(stored["answers"]) if stored["state"] == self._code_state else {}
        except (OSError, ValueError, KeyError, TypeError):
            return {}
