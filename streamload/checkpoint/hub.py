"""Names of the Hugging Face hub, looked up in the local cache only; nothing is downloaded."""

from __future__ import annotations

import re

from streamload.errors import CheckpointError

_REPO_ID = re.compile(r"[\w.-]+/[\w.-]+")


def cached_snapshot(name: str, revision: str | None = None) -> str:
    """The folder of the cached snapshot of the repository ``name`` (``organisation/model``).

    Uses huggingface_hub, and with it ``HF_HOME`` and ``HF_HUB_CACHE``. Raises CheckpointError when ``name`` is neither
    an existing path nor in the cache.
    """
    if not _REPO_ID.fullmatch(name):
        raise CheckpointError(f"{name}: no such file or folder", path=name)
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ImportError:
        raise CheckpointError(
            f"{name}: no such file or folder (a name from the Hugging Face hub needs `pip install huggingface_hub`)",
            path=name,
        ) from None
    try:
        return str(snapshot_download(name, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        at = f" at revision {revision}" if revision else ""
        raise CheckpointError(
            f"{name}: no such file or folder, and no model of that name in the Hugging Face cache{at}; "
            f"`hf download {name}` would fetch it",
            path=name,
        ) from None
