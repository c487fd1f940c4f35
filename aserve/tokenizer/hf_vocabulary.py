"""A tokenizer from a checkpoint folder in Hugging Face's layout.

tokenizer.json holds the vocabulary; tokenizer_config.json names BOS and EOS and may hold the chat template;
config.json and generation_config.json say which ids end a text.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import pre_tokenizers

from aserve.builtin_models import DEFAULT_VOCAB_SIZES
from aserve.errors import ConfigError
from aserve.tokenizer.tokenizer import TokenizerSettings

logger = logging.getLogger(__name__)

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def build_hf_tokenizer(folder: Path) -> tuple[tokenizers.Tokenizer, TokenizerSettings]:
    """Return the tokenizer and settings of the checkpoint in ``folder``; raise ConfigError if there is none."""
    backend = _load_backend(folder)
    prefix_space = _free_from_position(backend)
    tokenizer_config = _read_json(folder / "tokenizer_config.json")
    config = _read_json(folder / "config.json")
    names = {name: text for name in NAMED_TOKENS if (text := _token_text(tokenizer_config.get(name)))}
    bos_id, eos_id = (
        backend.token_to_id(names[name]) if name in names else None for name in ("bos_token", "eos_token")
    )
    ends = {*_token_ids(config), *_token_ids(_read_json(folder / "generation_config.json"))}
    prefix_ids, suffix_ids = _read_affixes(backend, tokenizer_config, bos_id, eos_id)
    settings = TokenizerSettings(
        vocab_size=_vocab_size(config, backend),
        bos_token_id=bos_id if bos_id is not None else config.get("bos_token_id"),
        eos_token_ids=frozenset(ends or ({eos_id} if eos_id is not None else set())),
        prefix_ids=prefix_ids,
        suffix_ids=suffix_ids,
        prefix_space=prefix_space,
        templates=_read_templates(folder, tokenizer_config),
        template_variables=names,
    )
    return backend, settings


def _load_backend(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if path.is_file():
        try:
            return tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(f"cannot read {path}: {error}") from error
    return _convert_backend(folder)


def _convert_backend(folder: Path) -> tokenizers.Tokenizer:
    """Let transformers build the tokenizer from the older files; slow to import, so only here."""
    logger.info("%s has no tokenizer.json; converting its tokenizer with transformers", folder)
    from transformers import AutoTokenizer

    try:
        backend = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        ).backend_tokenizer
    except Exception as error:  # transformers raises many kinds for missing or unknown files
        raise ConfigError(f"{folder} has no tokenizer.json and no tokenizer that can be converted: {error}") from error
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ConfigError(f"{folder} has no tokenizer.json and its tokenizer cannot be converted into one")
    return backend


def _free_from_position(backend: tokenizers.Tokenizer) -> bool:
    """Take the "space before the first word" out of the pre-tokenizer and return whether it was there.

    Prompts are encoded in pieces between control tokens, and only the first piece is the text's beginning.
    """
    step = backend.pre_tokenizer
    if not isinstance(step, pre_tokenizers.Metaspace) or step.prepend_scheme != "first":
        return False
    backend.pre_tokenizer = pre_tokenizers.Metaspace(step.replacement, "never", step.split)
    return True


def _read_affixes(
    backend: tokenizers.Tokenizer, tokenizer_config: Mapping[str, Any], bos_id: int | None, eos_id: int | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids that go before and after a raw prompt: by tokenizer.json, else by the flags beside it."""
    if backend.post_processor is None:
        prefix = (bos_id,) if bos_id is not None and tokenizer_config.get("add_bos_token") else ()
        suffix = (eos_id,) if eos_id is not None and tokenizer_config.get("add_eos_token") else ()
        return prefix, suffix
    probe = backend.encode("a", add_special_tokens=True)
    inner = [index for index, special in enumerate(probe.special_tokens_mask) if not special]
    first, last = (inner[0], inner[-1] + 1) if inner else (len(probe.ids), len(probe.ids))
    return tuple(probe.ids[:first]), tuple(probe.ids[last:])


def _vocab_size(config: Mapping[str, Any], backend: tokenizers.Tokenizer) -> int:
    text_config = config.get("text_config") or config  # a model that sees images as well has one
    size = text_config.get("vocab_size") or DEFAULT_VOCAB_SIZES.get(text_config.get("model_type", ""))
    return size if isinstance(size, int) and size > 0 else backend.get_vocab_size(with_added_tokens=True)


def _token_text(token: Any) -> str | None:
    """Return the text of a token that is named plainly or as an object."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None


def _token_ids(config: Mapping[str, Any]) -> list[int]:
    ids = config.get("eos_token_id")
    return [token_id for token_id in (ids if isinstance(ids, list) else [ids]) if isinstance(token_id, int)]


def _read_templates(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates by name, from files of their own first."""
    if (path := folder / "chat_template.jinja").is_file():
        named = {
            file.stem: file.read_text(encoding="utf-8") for file in folder.glob("additional_chat_templates/*.jinja")
        }
        return {"default": path.read_text(encoding="utf-8"), **named}
    template = _read_json(folder / "chat_template.json").get("chat_template") or tokenizer_config.get("chat_template")
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}
    return {"default": template} if isinstance(template, str) else {}


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in ``path``, empty if there is no such file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"cannot read {path}: it does not hold a JSON object")
    return content
