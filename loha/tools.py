"""Bring tool definitions of any client or recording into the one form that the renderer renders.

The form is the one that vLLM's chat route hands to a chat template: it reads a request's tools into its own types
first. A trainer that kept recorded definitions verbatim would see other tokens than the server.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loha.errors import LohaError, shown
from loha.messages import clean_value

_EXPECTED = '{"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}'


def normalize_tools(tools: Any) -> list[dict[str, Any]] | None:
    """Return tool definitions with the keys, and in the order, in which vLLM renders them.

    Missing descriptions and parameters are null, `strict` and `defer_loading` stay where they are set, keys that are no
    part of the format are dropped. Parameters (a JSON schema) are kept as they are. Normal tools come back unchanged.

    Args:
        tools: OpenAI tool definitions, or None.

    Returns:
        New definitions; None when there are none.

    Raises:
        LohaError: for anything that vLLM would refuse; names the tool by its 0-based index.

    Source: `ChatCompletionToolsParam` and `FunctionDefinition` of vLLM 0.32.
    """
    if tools is None:
        return None
    if not isinstance(tools, (list, tuple)):
        raise LohaError(f"tools must be a list of tool definitions or null, got {type(tools).__name__}")
    return [_normalize(tool, f"tool {index}") for index, tool in enumerate(tools)] or None


def _normalize(tool: Any, where: str) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise LohaError(f"{where}: expected {_EXPECTED}, with a string name")
    if tool.get("type", "function") != "function":
        raise LohaError(f"{where}: type must be 'function', got {shown(tool['type'])}")
    deferred = _flag(tool, "defer_loading", where)
    clean: dict[str, Any] = {
        "name": function["name"],
        "description": _optional(function, "description", str, where),
        "parameters": _optional(function, "parameters", Mapping, where),
        **_flag(function, "strict", where),
        **(_flag(function, "defer_loading", where) or deferred),
    }
    return {"type": "function", "function": clean_value(clean), **deferred}


def _optional(function: Mapping[str, Any], key: str, kind: type, where: str) -> Any:
    value = function.get(key)
    if value is not None and not isinstance(value, kind):
        expected = "a string" if kind is str else "an object"
        got = type(value).__name__
        raise LohaError(f"{where} ({shown(function['name'])}): {key} must be {expected} or null, got {got}")
    return value


def _flag(holder: Mapping[str, Any], key: str, where: str) -> dict[str, bool]:
    """Return `{key: value}`, or nothing where it is not set."""
    value = holder.get(key)
    if value is None:
        return {}
    if not isinstance(value, bool):
        raise LohaError(f"{where}: {key} must be true, false or null, got {shown(value)}")
    return {key: value}
