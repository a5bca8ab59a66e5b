"""Build transformers models without their weights."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from streamload.checkpoint import Checkpoint
from streamload.errors import LoadError
from streamload.loading.skeleton import skeleton
from streamload.sources.dtypes import torch_dtype

if TYPE_CHECKING:
    import torch
    from torch import nn

_FLOATS = ("F32", "BF16", "F16", "F64")

#: Without the second, transformers asks on the terminal whether to run the code that lies in the folder.
_LOCAL = {"local_files_only": True, "trust_remote_code": False}


def folder_of(checkpoint: Checkpoint) -> str:
    """The folder in which ``config.json`` and the tokenizer lie."""
    location = checkpoint.location
    return location if os.path.isdir(location) else os.path.dirname(location) or "."


def build_model(checkpoint: Checkpoint, *, base: bool = False, dtype: torch.dtype | None = None) -> nn.Module:
    """The model that the folder of ``checkpoint`` names in its ``config.json``, its parameters on meta, in eval mode.

    ``base`` takes the class without a head (transformers' ``AutoModel``) instead of the one in ``architectures``.
    ``dtype`` is that of the parameters; ``None`` means the config's, else that of the first floats in the checkpoint,
    which is what transformers does. Code shipped with a checkpoint is not run. Raises LoadError when transformers cannot
    build the model.
    """
    folder = folder_of(checkpoint)
    config = _config(folder)
    model_class = _class(config, folder, base)
    if dtype is None and config.dtype is None:
        dtype = next((torch_dtype(spec.dtype) for spec in checkpoint.tensors.values() if spec.dtype in _FLOATS), None)
    try:
        with skeleton():
            model: nn.Module = model_class._from_config(config, **({} if dtype is None else {"dtype": dtype}))
    except Exception as error:
        raise LoadError(
            f"{folder}: transformers cannot build {model_class.__name__}: {type(error).__name__}: {error}"
        ) from error
    return model.eval()


def load_tokenizer(folder: str) -> Any:
    """The tokenizer that lies in ``folder``. Raises LoadError when there is none that transformers can read."""
    transformers = _library()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **_LOCAL)
    except Exception as error:
        raise LoadError(f"{folder}: no tokenizer: {_first_line(error)}") from error
    # Without its files transformers makes a tokenizer that knows no word, and says nothing.
    files = list(dict.fromkeys([*tokenizer.vocab_files_names.values(), "tokenizer.json"]))
    if tokenizer.vocab_files_names and not any(os.path.exists(os.path.join(folder, name)) for name in files):
        raise LoadError(f"{folder}: no tokenizer: none of {', '.join(files)} is there")
    return tokenizer


def _config(folder: str) -> Any:
    path = os.path.join(folder, "config.json")
    if not os.path.exists(path):
        raise LoadError(f"{path}: not there, so the class of the model is not known")
    transformers = _library()
    try:
        return transformers.AutoConfig.from_pretrained(folder, **_LOCAL)
    except Exception as error:
        version = transformers.__version__
        raise LoadError(f"{path}: not a config that transformers {version} knows: {_first_line(error)}") from error


def _class(config: Any, folder: str, base: bool) -> Any:
    transformers = _library()
    if base or not config.architectures:
        try:
            found = transformers.AutoModel._model_mapping[type(config)]
        except KeyError:
            raise LoadError(f"{folder}: transformers has no base model for {type(config).__name__}") from None
        return found[0] if isinstance(found, tuple) else found  # Funnel has two, the full one first
    name = config.architectures[0]
    found = getattr(transformers, name, None)
    if found is None:
        raise LoadError(
            f"{folder}: config.json names the class {name}, which transformers {transformers.__version__} does not have (code "
            "shipped with a checkpoint is not run); build the model yourself and give it to streamload.load"
        )
    return found


def _library() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise LoadError("this needs transformers: pip install 'streamload[transformers]'") from error
    return transformers


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
