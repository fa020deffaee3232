"""A model to tune, from its name, from a function of the user's, or from a folder of Hugging Face's."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stof.cli.common import imported
from stof.errors import ArgumentError, MissingDependencyError
from stof.masks import Mask, parse
from stof.testing.models import MASKS, MODELS, Case, build, inputs_of, mask_of


@dataclass(frozen=True)
class Loaded:
    """A model in evaluation mode on its device, the arguments of a call, and a mask for its attention."""

    name: str
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    mask: Mask | None


def load(text: str, batch: int, length: int, mask: str, device: torch.device, dtype: torch.dtype) -> Loaded:
    """The model that `text` names.

    Args:
        text: one of `testing.models.MODELS` (random weights), `module:function` with a function that returns the model
            and its example inputs (a tuple, a mapping of keywords, or one tensor), or a folder that
            `save_pretrained` wrote.
        batch, length: of random tokens; a function of the user's brings its own inputs.
        mask: "full" for the model's own, a mask as text ("sliding_window(256)"), or, for models of that list, a name of
            `testing.models.MASKS`.

    Raises:
        ArgumentError: no such model, or what it gives is none.
        MissingDependencyError: transformers is needed, and not installed.
    """
    if text in MODELS:
        _need_transformers()
        case = Case(text, batch, length, mask if mask in MASKS else "full")
        with device:  # drawing random weights is fastest there
            model = build(text, length)
        inputs = inputs_of(case, device)
        value = mask_of(case) if mask in MASKS else parse(mask)
        return _placed(f"{text}, {batch} x {length}", model, (), inputs, value, device, dtype)
    if mask in MASKS and mask != "full":
        raise ArgumentError(
            f"mask {mask!r} is sized for {', '.join(MODELS)}; give others theirs as text: sliding_window(256)"
        )
    value = None if mask == "full" else parse(mask)
    if ":" in text:
        model, args, kwargs = _called(_function(text), text)
        return _placed(text, model, args, kwargs, value, device, dtype)
    if (Path(text) / "config.json").is_file():
        model, inputs = _pretrained(Path(text), batch, length)
        return _placed(Path(text).resolve().name, model, (), inputs, value, device, dtype)
    raise ArgumentError(
        f"no model {text!r}: give one of {', '.join(MODELS)}, module:function that returns (model, example inputs), or "
        "a folder with a config.json and weights of Hugging Face's"
    )


def _placed(
    name: str,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    mask: Mask | None,
    device: torch.device,
    dtype: torch.dtype,
) -> Loaded:
    def place(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(device, dtype) if value.is_floating_point() else value.to(device)

    placed = {key: place(value) for key, value in kwargs.items()}
    return Loaded(name, model.eval().to(device, dtype), tuple(place(value) for value in args), placed, mask)


def _function(text: str) -> Callable[[], Any]:
    function = imported(text)
    if not callable(function):
        raise ArgumentError(f"{text} is no function, it is a {type(function).__name__}")
    return function


def _called(function: Callable[[], Any], text: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    try:
        with contextlib.suppress(ValueError):  # without a signature, the call itself reports wrong arguments
            inspect.signature(function).bind()
    except TypeError as error:
        raise ArgumentError(
            f"{text} has to take no arguments and return (model, example inputs); calling it without any: {error}"
        ) from None
    given = function()
    if not (isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], nn.Module)):
        raise ArgumentError(f"{text} must return (model, example inputs), it returned a {type(given).__name__}")
    model, inputs = given
    if isinstance(inputs, Mapping):
        return model, (), dict(inputs)
    return model, tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,), {}


def _need_transformers() -> None:
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError("models of Hugging Face need transformers: pip install transformers") from error


def _pretrained(folder: Path, batch: int, length: int) -> tuple[nn.Module, dict[str, Tensor]]:
    _need_transformers()
    import transformers

    try:
        model = transformers.AutoModel.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ArgumentError(f"{folder} does not hold a model that transformers can load: {error}") from error
    config = model.config
    if hasattr(config, "use_cache"):
        config.use_cache = False  # tuning is for one forward pass, without a key-value cache
    if hasattr(model, "get_encoder") and getattr(config, "is_encoder_decoder", False):
        model = model.get_encoder()
    generator = torch.Generator().manual_seed(1)
    if getattr(model, "main_input_name", "") == "pixel_values":
        size = config.image_size
        sides = (size, size) if isinstance(size, int) else tuple(size)
        pixels = torch.randn(batch, getattr(config, "num_channels", 3), *sides, generator=generator)
        return model, {"pixel_values": pixels}
    return model, {"input_ids": torch.randint(0, config.vocab_size, (batch, length), generator=generator)}
