"""YAML as patchkit reads it: strict, and with the line on which each mapping starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from patchkit.problem import Problem


class Mapping(dict):
    """A mapping of a YAML file; `line` (1-based) is where it starts."""

    line: int = 0


class _StrictLoader(yaml.SafeLoader):
    pass


def _mapping(loader: _StrictLoader, node: yaml.MappingNode) -> Mapping:
    result = Mapping()
    result.line = node.start_mark.line + 1
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if key in result:  # PyYAML would keep the last one and say nothing
            raise yaml.MarkedYAMLError(
                problem=f"the key {key!r} stands twice", problem_mark=key_node.start_mark
            )
        result[key] = loader.construct_object(value_node, deep=True)
    return result


_StrictLoader.add_constructor("tag:yaml.org,2002:map", _mapping)


def load(path: Path) -> Any:
    """Parse one YAML file. A file that is missing or is not YAML is a `Problem`."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)
    except FileNotFoundError:
        raise Problem(f"{path} is missing; is this a whole checkout of the project?") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise Problem(f"{path} is not the YAML that patchkit reads: {error}") from None
