"""The one tree of exceptions. Each carries its fields and builds its own text.

The server maps them to HTTP, SSE and WebSocket in one place (``server/errors.py``):

    AserveError
      ConfigError        a setting is wrong; raised before the port is ready
        WeightsError     a checkpoint is incomplete, damaged or of another shape
      ClientError        the request is wrong (400)
        ContextLengthError   its prompt has more tokens than the model takes
        NotFoundError    the thing it names does not exist (404)
      CapacityError      the engine cannot take the request now (429 or 503, Retry-After)
      EngineDeadError    the engine has failed or is closed (500)
"""

MAX_QUOTED_CHARS = 64


def quoted(value: object) -> str:
    """Return what a message says of ``value``, which may be anything: the beginning of a string, the type of others."""
    return repr(value[:MAX_QUOTED_CHARS]) if isinstance(value, str) else f"a value of type {type(value).__name__}"


class AserveError(Exception):
    """Root of every error that aserve raises on purpose."""


class ConfigError(AserveError):
    """A setting, model or machine does not allow the engine to start."""


class WeightsError(ConfigError):
    """A checkpoint is incomplete, damaged or does not fit the model."""


class ClientError(AserveError):
    """The request itself is at fault.

    ``param`` is the request field in question, ``code`` a machine-readable word (both may be None).
    """

    status = 400

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class ContextLengthError(ClientError):
    """The prompt has ``num_tokens`` (at least, unless ``is_exact``), and may have ``longest`` (None: not known).

    ``reason`` says what sets that limit. Clients tell this error from others, and agents shorten their history, by
    its code or by its first words, which are Anthropic's; by the reason, too, where it is OpenAI's sentence.
    """

    def __init__(
        self, num_tokens: int, longest: int | None, *, param: str, is_exact: bool = True, reason: str | None = None
    ) -> None:
        count = f"{'' if is_exact else 'at least '}{num_tokens} tokens"
        limit = "" if longest is None else f" > {longest} maximum"
        if reason is None and longest is not None:
            reason = f"this model's maximum context length is {longest} tokens"
        cause = "" if reason is None else f" ({reason})"
        super().__init__(f"prompt is too long: {count}{limit}{cause}", param=param, code="context_length_exceeded")


class NotFoundError(ClientError):
    """The model, response or route that the request names does not exist."""

    status = 404


class CapacityError(AserveError):
    """The engine cannot take the request now; it may be sent again after ``retry_after_s`` seconds."""

    def __init__(self, message: str, *, status: int = 503, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.retry_after_s = retry_after_s


class EngineDeadError(AserveError):
    """The engine has failed or was closed; the cause is chained."""
