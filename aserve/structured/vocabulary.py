"""The model's vocabulary as llguidance needs it: the bytes of each token, and how forced text is cut into tokens."""

from llguidance import LLTokenizer, TokenizerWrapper

from aserve.errors import ClientError
from aserve.tokenizer.tokenizer import Tokenizer


def build_vocabulary(tokenizer: Tokenizer) -> LLTokenizer:
    """Tabulate the tokens of ``tokenizer``; takes about half a second.

    Raises ClientError if no token ends an output: a grammar could not say that it is complete.
    """
    if not tokenizer.eos_token_ids:
        raise ClientError("structured output needs a model with an end token", param="grammar")
    ends = sorted(tokenizer.eos_token_ids)
    words = _Words(tokenizer, ends[0])
    vocabulary = LLTokenizer(TokenizerWrapper(words), n_vocab=tokenizer.vocab_size, eos_token=ends)
    words.vocabulary = vocabulary
    return vocabulary


class _Words:
    """What TokenizerWrapper wraps. Where only one text can follow, llguidance allows the token that ``__call__`` says.

    Tokens past the model's rows do not exist for it; rows without a token have no bytes and are never allowed.
    """

    def __init__(self, tokenizer: Tokenizer, eos_token_id: int) -> None:
        self.eos_token_id = eos_token_id
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_token_ids)
        self.vocabulary: LLTokenizer | None = None
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        """Cut ``text`` as the model learned to, or greedily where that would change a byte.

        Returns nothing for what the vocabulary cannot express, which leaves no token to allow.
        """
        if isinstance(text, bytes):
            raise TypeError("TokenizerWrapper asks first whether bytes will do")
        token_ids = self._tokenizer.encode_fragment(text)
        if not self._spells(token_ids, text):
            token_ids = self.vocabulary.greedy_tokenize(text) if self.vocabulary is not None else []
        return token_ids if self._spells(token_ids, text) else []

    def _spells(self, token_ids: list[int], text: str) -> bool:
        size = len(self.tokens)
        return b"".join(self.tokens[i] if i < size else b"" for i in token_ids) == text.encode()
