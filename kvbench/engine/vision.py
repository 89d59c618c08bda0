"""Images and videos on their way into a prefill: placeholder tokens, pixels and positions."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kvbench.benchmark import Medium
from kvbench.engine.loading import read_model
from kvbench.engine.models import rotary_model
from kvbench.errors import UserError

Pixels = Mapping[str, Tensor]
"""What a processor makes of media, as keywords of the model's forward: `pixel_values` and more."""

_TEXT = {"input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"}
_QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
_TILED = ("LlavaOnevision", "LlavaNext")
"""Processors whose tiles of an image can depend on how many images there are."""


# --- processors -----------------------------------------------------------------------------------


def load_processor(name: str, revision: str | None, family: str, tokenizer: Any) -> Any:
    """Load the processor of a vision-language model.

    Without torchvision the processors of the Qwen-VL families read images, but no videos.

    Args:
        name: A named model, a folder or a hub id.
        revision: Revision of a hub model.
        family: The `model_type` of its configuration.
        tokenizer: The tokenizer that it uses.

    Raises:
        UserError: It cannot be loaded.
    """
    # Processors import torchvision, which takes seconds and which text models do without.
    from transformers import AutoImageProcessor, AutoProcessor

    try:
        processor = read_model(AutoProcessor, name, revision)
        processor.tokenizer = tokenizer
        return processor
    except UserError as error:
        if family not in _QWEN or "orchvision" not in str(error):
            raise
    return images_only(family, read_model(AutoImageProcessor, name, revision), tokenizer)


def images_only(family: str, image_processor: Any, tokenizer: Any) -> Any:
    """Make a processor of a Qwen-VL family without a video processor, which needs torchvision."""
    from transformers import Qwen2VLProcessor, Qwen3VLProcessor
    from transformers.processing_utils import ProcessorMixin

    base: Any = Qwen3VLProcessor if family == "qwen3_vl" else Qwen2VLProcessor

    class ImagesOnly(base):  # type: ignore[misc]
        # ProcessorMixin goes by the names of these parameters.
        def __init__(self, image_processor: Any, tokenizer: Any, chat_template: str | None) -> None:
            for kind in ("image", "video"):
                token = getattr(tokenizer, f"{kind}_token", None) or f"<|{kind}_pad|>"
                setattr(self, f"{kind}_token", token)
                setattr(self, f"{kind}_token_id", tokenizer.convert_tokens_to_ids(token))
            ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)

    return ImagesOnly(image_processor, tokenizer, tokenizer.chat_template)


class Vision:
    """Turns media into tokens and pixels with a model's processor.

    Args:
        processor: The processor, as `load_processor` returns it.
        model: Name of the model in messages.
    """

    def __init__(self, processor: Any, model: str) -> None:
        self.processor = processor
        self.model = model
        self._tokens: dict[tuple[str, ...], list[str]] = {}
        self._joint = type(processor).__name__.startswith(_TILED)

    def expand(self, text: str, media: Sequence[Medium]) -> str:
        """Replace the placeholder of every medium in a text by the tokens that it takes.

        Raises:
            UserError: The text has another number of placeholders, or a medium cannot be read.
        """
        parts = self._cut(text, media)
        out = [parts[0]]
        for tokens, part in zip(self._expansions(media), parts[1:], strict=True):
            out += [tokens, part]
        return "".join(out)

    def counts(self, media: Sequence[Medium]) -> list[int]:
        """How many tokens each medium takes that stand for parts of it."""
        pairs = zip(media, self._expansions(media), strict=True)
        return [tokens.count(self._placeholder(medium)) for medium, tokens in pairs]

    def pixels(self, media: Sequence[Medium], device: torch.device) -> Pixels:
        """What the model's forward takes for media, in their order; empty if there are none."""
        if not media:
            return {}
        made = self._process(media)
        return {
            name: value.to(device)
            for name, value in made.items()
            if name not in _TEXT and isinstance(value, Tensor)
        }

    def _placeholder(self, medium: Medium) -> str:
        token: str | None = getattr(self.processor, f"{medium.kind}_token", None)
        if token is None:
            raise UserError(f"model {self.model} takes no {medium.kind}s")
        return token

    def _cut(self, text: str, media: Sequence[Medium]) -> list[str]:
        """The pieces of a text around its placeholders, which must be those of the media."""
        parts, rest = [], text
        for medium in media:
            before, token, rest = rest.partition(self._placeholder(medium))
            if not token:
                break
            parts.append(before)
        else:
            kinds = {self._placeholder(medium) for medium in media}
            if not any(token in rest for token in kinds):
                return [*parts, rest]
        raise UserError(
            f"a prompt has {len(media)} images and videos but another number of placeholders; the "
            f"chat template of model {self.model} must write one for each"
        )

    def _expansions(self, media: Sequence[Medium]) -> list[str]:
        """The tokens of each medium, as text."""
        if self._joint:
            return self._expand_together(media)
        return [tokens for medium in media for tokens in self._expand_together([medium])]

    def _expand_together(self, media: Sequence[Medium]) -> list[str]:
        key = tuple(medium.digest for medium in media)
        if key not in self._tokens:
            replaced = self._process(media, offsets=True)["text_replacement_offsets"][0]
            self._tokens[key] = [one["replacement"] for one in replaced]
        return self._tokens[key]

    def _process(self, media: Sequence[Medium], offsets: bool = False) -> Any:
        videos = [medium for medium in media if medium.kind == "video"]
        if videos and getattr(self.processor, "video_processor", None) is None:
            raise UserError(
                f"model {self.model} reads videos only with torchvision; install the build that "
                "fits your torch (docs/vision.md)"
            )
        options: dict[str, Any] = {"text": ["".join(map(self._placeholder, media))]}
        if offsets:
            options["return_text_replacement_offsets"] = True
        else:
            options["return_tensors"] = "pt"
        images = [_loaded(medium) for medium in media if medium.kind == "image"]
        if images:
            options["images"] = images
        if videos:
            shown = [_loaded(medium) for medium in videos]
            options |= {"videos": shown, "do_sample_frames": False}
            if all(medium.rate for medium in videos):  # Qwen's positions and texts tell the time
                options["video_metadata"] = [
                    {
                        "fps": medium.rate,
                        "total_num_frames": len(frames),
                        "frames_indices": list(range(len(frames))),
                    }
                    for medium, frames in zip(videos, shown, strict=True)
                ]
        return self.processor(**options)


def _loaded(medium: Medium) -> Any:
    try:
        return medium.load()
    except (OSError, ValueError, SyntaxError) as error:  # what pillow raises about damaged files
        raise UserError(f"an {medium.kind} cannot be read: {error}") from error


# --- positions ------------------------------------------------------------------------------------


def media_positions(
    model: nn.Module, ids: Tensor, mask: Tensor | None, pixels: Pixels
) -> tuple[Tensor, Tensor]:
    """Positions of new tokens with media, as a model with M-RoPE counts them from 0.

    What follows an image or a video continues at the largest position so far, over all three axes,
    plus one, whether it is part of the same forward or of a later one. transformers advances by the
    height or width within a forward, so that text after a long video would repeat positions of its
    frames; Qwen trained its models with the maximum (Qwen2-VL, arXiv:2409.12191, section 2.1).

    Args:
        model: A model for which `rotary_model` is not None.
        ids: New tokens `[B, n]`.
        mask: Which of them are tokens, `[B, n]`; None: all.
        pixels: Their media.

    Returns:
        Positions `[3, B, n]`, and by how much the next position of each sequence differs from its
        number of tokens, `[B]`.
    """
    inner, config = rotary_model(model), model.config
    kinds = torch.zeros_like(ids, dtype=torch.int32)
    for kind, name in enumerate(("image_token_id", "video_token_id"), 1):
        kinds[ids == getattr(config, name)] = kind
    known = inspect.signature(inner.get_rope_index).parameters
    grids = {name: value for name, value in pixels.items() if name in known}
    raw, _ = inner.get_rope_index(
        ids,
        mm_token_type_ids=kinds,
        attention_mask=None if mask is None else mask.long(),
        **grids,
    )
    position, shift = raw.clone(), []
    for row, row_kinds in enumerate(kinds):
        columns = torch.arange(ids.shape[1], device=ids.device)
        if mask is not None:
            columns = columns[mask[row].bool()]
        following = 0
        _, counts = row_kinds[columns].unique_consecutive(return_counts=True)
        for run in columns.split(counts.tolist()):
            own = raw[:, row, run]
            position[:, row, run] = own + (following - own.min())
            following = int(position[:, row, run].max()) + 1
        shift.append(following - len(columns))
    return position, torch.tensor(shift, device=ids.device)
