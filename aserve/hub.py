"""Models on the Hugging Face hub: which files of a repository are needed, and getting them into its cache.

Downloads are huggingface_hub's, so HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE mean what they
mean elsewhere. Pickles are never downloaded.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from aserve.errors import ConfigError
from aserve.model_files import ModelFiles, explain_refusal, pick_gguf

logger = logging.getLogger(__name__)

METADATA_TIMEOUT_S = 10.0
SIDE_FILES = (".json", ".jinja", ".model", ".txt")


def fetch(repo: str, revision: str | None, file: str | None) -> ModelFiles:
    """Download what is needed of ``repo`` at ``revision`` and return it; ``file`` is a GGUF in it or part of its name.

    Files already in the hub's cache are not downloaded again, and without a network the cache alone serves.
    Raises ConfigError for a repository that is unknown, closed, not a model or cannot be reached.
    """
    where = f"{repo} at revision {revision}" if revision else repo
    try:
        # Unlike a listing of the tree, this call is not tried again and again where there is no network.
        info = HfApi().model_info(repo, revision=revision, timeout=METADATA_TIMEOUT_S)
    except RevisionNotFoundError as error:
        raise ConfigError(f"the hub's repository {repo} has no revision {revision}") from error
    except GatedRepoError as error:
        raise ConfigError(f"{repo} is gated: accept its terms on the hub and set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"{repo} is neither a local path nor a repository on the hub; if it is private, set HF_TOKEN"
        ) from error
    except HFValidationError as error:
        raise ConfigError(f"{repo} is not a valid hub id: {error}") from error
    except Exception as error:  # offline or unreachable: what is raised depends on the HTTP library
        return _find_cached(repo, revision, file, error)
    try:
        return _download(repo, revision, file, [sibling.rfilename for sibling in info.siblings or ()])
    except (OSError, EntryNotFoundError) as error:
        raise ConfigError(f"the download of {where} failed: {error}") from error


def choose_files(names: Sequence[str]) -> list[str]:
    """Return which files of a repository with config.json and safetensors are needed; empty if it is none."""
    top = [name for name in names if "/" not in name]
    weights = [name for name in top if name.endswith(".safetensors")]
    if "config.json" not in top or not weights:
        return []
    # Some repositories hold the same weights twice, once under the original code's names.
    own_format = [name for name in weights if not name.startswith("consolidated")]
    templates = [name for name in names if name.startswith("additional_chat_templates/") and name.endswith(".jinja")]
    return [*(own_format or weights), *(name for name in top if name.endswith(SIDE_FILES)), *templates]


def _download(repo: str, revision: str | None, file: str | None, names: Sequence[str]) -> ModelFiles:
    if file is None and (needed := choose_files(names)):
        logger.info("getting %d files of %s from the hub", len(needed), repo)
        return ModelFiles(Path(snapshot_download(repo, revision=revision, allow_patterns=needed)), "safetensors", repo)
    gguf = pick_gguf(names, file)
    if gguf is None:
        raise ConfigError(f"{repo} cannot be served: {explain_refusal(names, file)}")
    logger.info("getting %s of %s from the hub", gguf, repo)
    path = Path(hf_hub_download(repo, gguf, revision=revision))
    return ModelFiles(path, "gguf", path.stem)


def _find_cached(repo: str, revision: str | None, file: str | None, cause: Exception) -> ModelFiles:
    """Return the model out of the hub's cache; ``cause`` is why the hub could not be asked."""
    snapshot = _cached_snapshot(repo, revision)
    names = [str(path.relative_to(snapshot)) for path in snapshot.rglob("*")] if snapshot else []
    reason = str(cause).partition("\n")[0]
    if snapshot is not None and file is None and choose_files(names):
        logger.warning("the hub cannot be asked (%s); %s is served from its cache", reason, repo)
        return ModelFiles(snapshot, "safetensors", repo)
    if snapshot is not None and (gguf := pick_gguf(names, file)):
        logger.warning("the hub cannot be asked (%s); %s is served from its cache", reason, gguf)
        return ModelFiles(snapshot / gguf, "gguf", Path(gguf).stem)
    raise ConfigError(
        f"{repo} is not in the hub's cache {constants.HF_HUB_CACHE}, and the hub cannot be asked: {reason}"
    ) from cause


def _cached_snapshot(repo: str, revision: str | None) -> Path | None:
    """Return the folder of a revision in the hub's cache: refs/ maps branches and tags to commits."""
    storage = Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"
    reference = storage / "refs" / (revision or "main")
    commit = reference.read_text(encoding="utf-8").strip() if reference.is_file() else revision
    snapshot = storage / "snapshots" / (commit or "main")
    return snapshot if snapshot.is_dir() else None
