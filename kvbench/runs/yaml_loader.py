"""Loading of user-written YAML: plain values only, of limited size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from kvbench.errors import quoted

_MOST_BYTES = 1 << 22
_MOST_VALUES = 100_000
"""Maximum number of values in a document, counting repetitions by aliases."""


class Loader(yaml.SafeLoader):
    """A `yaml.SafeLoader` that refuses exponential aliases and names unreadable values.

    A few lines in which each alias repeats the one before stand for billions of values.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._count = 0
        self._sizes: dict[yaml.Node, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a node and count its values."""
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        is_alias, earlier_count = self.check_event(yaml.AliasEvent), self._count
        node = super().compose_node(parent, index)
        if node is None:
            return None
        if not is_alias:
            self._count += 1
            self._sizes[node] = self._count - earlier_count
        elif node in self._sizes:
            self._count += self._sizes[node]
        else:
            raise yaml.composer.ComposerError(None, None, "an alias contains itself", mark)
        if self._count > _MOST_VALUES:
            problem = f"more than {_MOST_VALUES:,} values, counting what aliases repeat"
            raise yaml.composer.ComposerError(None, None, problem, mark)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Construct the value of a node; PyYAML itself raises many kinds of errors."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError, TypeError, OverflowError):
            problem = f"{quoted(node.value)} is not a valid {node.tag.rpartition(':')[2]}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None


def read_text(path: Path) -> str:
    """Read a YAML file.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is larger than 4 MB, or not UTF-8.
    """
    with path.open("rb") as yaml_file:
        content = yaml_file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:  # a device such as /dev/zero never ends
        raise ValueError(f"it is larger than {_MOST_BYTES >> 20} MB")
    return content.decode()
