"""How much a model is asked to think, as the variables by which chat templates know it; no I/O."""

from collections.abc import Mapping
from typing import Any, Literal, get_args

from aserve.errors import ClientError

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def read_effort(effort: Any, reasoning: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables for ``reasoning_effort``, or for ``reasoning``, an object that some clients send instead.

    Of that, ``effort`` and ``enabled`` (false is an effort of "none") have an effect.
    """
    if effort is not None:
        return reasoning_variables(effort, "reasoning_effort")
    enabled = reasoning.get("enabled")
    if enabled is not None and not isinstance(enabled, bool):
        raise ClientError("reasoning.enabled must be true or false", param="reasoning.enabled")
    return reasoning_variables("none" if enabled is False else reasoning.get("effort"), "reasoning.effort")


def reasoning_variables(effort: Any, where: str) -> dict[str, Any]:
    """Return the variables for ``effort``, none for None; a template ignores those that it does not know.

    ``reasoning_effort`` is gpt-oss's, ``enable_thinking`` Qwen's, ``thinking`` DeepSeek's.
    """
    if effort is None:
        return {}
    if effort not in get_args(ReasoningEffort):
        raise ClientError(f"{where} must be one of {', '.join(get_args(ReasoningEffort))}", param=where)
    thinks = effort != "none"
    return {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks}
