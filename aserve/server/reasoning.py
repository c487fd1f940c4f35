"""How much a model is asked to think, as the variables by which chat templates know it; no I/O."""

from typing import Any, Literal, get_args

from aserve.errors import ClientError

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


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
