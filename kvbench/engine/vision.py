"""Images and videos in a prefill: placeholder tokens, pixels and positions."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvbench.benchmark import Medium
from kvbench.engine.models import decoder_of, rotary_model
from kvbench.errors import UserError

Pixels = Mapping[str, Tensor]
"""Processor outputs for media, as keywords of the model's forward: `pixel_values` and more."""

_TEXT = {"input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"}
QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""Families whose processors need torchvision for videos."""
_FRAME_TOKENS = 768
"""Largest number of tokens of a video frame in qwen-vl-utils (`VIDEO_MAX_TOKEN_NUM`)."""
_TILED = ("LlavaOnevision", "LlavaNext")
"""Processors whose tiling of an image can depend on the number of images."""
REMEMBERED = 1 << 27
"""Bytes of pixel values that are kept for further prefills."""
_TOKEN_BYTES = 1 << 15
"""Bytes kept per visual token: of Qwen2-VL, 18 KiB of pixel values, and what the encoder makes of them."""


# --- processors -----------------------------------------------------------------------------------


def images_only(family: str, image_processor: Any, tokenizer: Any) -> Any:
    """Return a Qwen-VL processor without its video processor, which needs torchvision."""
    from transformers import Qwen2VLProcessor, Qwen3VLProcessor
    from transformers.processing_utils import ProcessorMixin

    processor_class: Any = Qwen2VLProcessor if family.startswith("qwen2") else Qwen3VLProcessor

    class ImagesOnly(processor_class):  # type: ignore[misc]
        # ProcessorMixin looks at the names of these parameters.
        def __init__(self, image_processor: Any, tokenizer: Any, chat_template: str | None) -> None:
            for medium_kind in ("image", "video"):
                placeholder = getattr(tokenizer, f"{medium_kind}_token", None) or f"<|{medium_kind}_pad|>"
                setattr(self, f"{medium_kind}_token", placeholder)
                setattr(self, f"{medium_kind}_token_id", tokenizer.convert_tokens_to_ids(placeholder))
            ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)

    return ImagesOnly(image_processor, tokenizer, tokenizer.chat_template)


@dataclass(frozen=True)
class PixelLimits:
    """Limits of the number of pixels of an image, and of each frame of a video, after resizing by a Qwen-VL processor.

    Attributes:
        minimum: Smaller ones are enlarged; None: as the processor does.
        maximum: Larger ones are shrunk; None: as the processor does.
    """

    minimum: int | None = None
    maximum: int | None = None

    @property
    def are_set(self) -> bool:
        """Return whether there is a limit."""
        return self.minimum is not None or self.maximum is not None

    def image_size(self, processor: Any, model_name: str) -> dict[str, int]:
        """Return `size` for an image processor.

        Raises:
            UserError: The minimum is above the maximum.
        """
        shortest_edge = self.minimum or processor.size["shortest_edge"]
        longest_edge = self.maximum or processor.size["longest_edge"]
        if shortest_edge > longest_edge:
            raise UserError(
                f"images of model {model_name} cannot have at least {shortest_edge} and at most {longest_edge} pixels; "
                "change --min-pixels or --max-pixels"
            )
        return {"shortest_edge": shortest_edge, "longest_edge": longest_edge}

    def video_size(self, processor: Any, frame_count: int) -> dict[str, int]:
        """Return `size` for a video processor: as qwen-vl-utils, lmms-eval's package for videos, sizes each frame.

        A frame has at most `_FRAME_TOKENS` tokens, unless the minimum is more. Qwen3-VL's processor counts the pixels
        of all frames together, Qwen2-VL's those of one.
        """
        counted_frames = frame_count if type(processor).__name__.startswith("Qwen3") else 1
        most_pixels = _FRAME_TOKENS * (processor.patch_size * processor.merge_size) ** 2
        longest_edge = min(self.maximum or processor.size["longest_edge"] // counted_frames, most_pixels)
        shortest_edge = self.minimum or min(processor.size["shortest_edge"] // counted_frames, longest_edge)
        longest_edge = max(longest_edge, shortest_edge)
        return {"shortest_edge": shortest_edge * counted_frames, "longest_edge": longest_edge * counted_frames}


class Vision:
    """Turns media into tokens and pixels with a model's processor.

    Args:
        processor: Result of `load_processor`.
        model_name: Name of the model in messages.
        pixel_limits: Limits of the size of images and frames.

    Raises:
        UserError: The model is no Qwen-VL model and has limits, or the limits contradict each other.
    """

    def __init__(self, processor: Any, model_name: str, pixel_limits: PixelLimits | None = None) -> None:
        self.processor = processor
        self.model = model_name
        self._limits = pixel_limits if pixel_limits is not None and pixel_limits.are_set else None
        if self._limits is not None:
            if not type(processor.image_processor).__name__.startswith("Qwen"):
                raise UserError(
                    f"--min-pixels and --max-pixels are for Qwen-VL models, not for {model_name}; leave them out"
                )
            self._limits.image_size(processor.image_processor, model_name)
        self._tokens: dict[tuple[str, ...], list[str]] = {}
        self._pixels: OrderedDict[tuple[object, ...], Pixels] = OrderedDict()
        self._joint = type(processor).__name__.startswith(_TILED)

    def expand(self, text: str, media: Sequence[Medium]) -> str:
        """Replace every placeholder in a text by the tokens of its medium.

        Raises:
            UserError: The number of placeholders differs from the number of media, or a medium cannot be read.
        """
        text_pieces = self._cut(text, media)
        expanded = [text_pieces[0]]
        for medium_tokens, text_piece in zip(self._expansions(media), text_pieces[1:], strict=True):
            expanded += [medium_tokens, text_piece]
        return "".join(expanded)

    def counts(self, media: Sequence[Medium]) -> list[int]:
        """Return the number of visual tokens of each medium."""
        expansions = self._expansions(media)
        # InternVL shows the frames of a video as images.
        return [
            expansion.count(self._placeholder(medium)) or expansion.count(self.processor.image_token)
            for medium, expansion in zip(media, expansions, strict=True)
        ]

    def pixels(self, media: Sequence[Medium], device: torch.device) -> Pixels:
        """Return the forward's keywords for media, in their order; empty if there are none.

        The same media give the same tensors, up to `REMEMBERED` bytes of the most recent ones.
        """
        if not media:
            return {}
        key = (device, *((medium.kind, medium.digest, medium.rate) for medium in media))
        if key in self._pixels:
            self._pixels.move_to_end(key)
        else:
            self._pixels[key] = self._processed(media, device)
            while len(self._pixels) > 1 and sum(map(_bytes_of, self._pixels.values())) > REMEMBERED:
                self._pixels.popitem(last=False)
        return self._pixels[key]

    def _processed(self, media: Sequence[Medium], device: torch.device) -> Pixels:
        """Return what the processor makes of media."""
        # The limits of a video depend on its number of frames, so media are processed one by one.
        batches = [media] if self._limits is None else [[medium] for medium in media]
        fields: dict[str, list[Tensor]] = {}
        for batch in batches:
            for field_name, tensor in self._process(batch).items():
                if field_name not in _TEXT and isinstance(tensor, Tensor):
                    fields.setdefault(field_name, []).append(tensor)
        return {
            field_name: (tensors[0] if len(tensors) == 1 else torch.cat(tensors)).to(device)
            for field_name, tensors in fields.items()
        }

    def _placeholder(self, medium: Medium) -> str:
        placeholder: str | None = getattr(self.processor, f"{medium.kind}_token", None)
        if placeholder is None:
            raise UserError(f"model {self.model} takes no {medium.kind}s")
        return placeholder

    def _cut(self, text: str, media: Sequence[Medium]) -> list[str]:
        """Split a text at its placeholders, which must match the media."""
        text_pieces, remaining = [], text
        for medium in media:
            text_piece, placeholder, remaining = remaining.partition(self._placeholder(medium))
            if not placeholder:
                break
            text_pieces.append(text_piece)
        else:
            placeholders = {self._placeholder(medium) for medium in media}
            if not any(placeholder in remaining for placeholder in placeholders):
                return [*text_pieces, remaining]
        raise UserError(
            f"a prompt has {len(media)} images and videos but another number of placeholders; "
            f"the chat template of model {self.model} must write one for each"
        )

    def _expansions(self, media: Sequence[Medium]) -> list[str]:
        """Return the tokens of each medium, as text."""
        if self._joint:
            return self._expand_together(media)
        return [expansion for medium in media for expansion in self._expand_together([medium])]

    def _expand_together(self, media: Sequence[Medium]) -> list[str]:
        media_digests = tuple(medium.digest for medium in media)
        if media_digests not in self._tokens:
            replacements = self._process(media, offsets=True)["text_replacement_offsets"][0]
            self._tokens[media_digests] = [replacement["replacement"] for replacement in replacements]
        return self._tokens[media_digests]

    def _process(self, media: Sequence[Medium], offsets: bool = False) -> Any:
        videos = [medium for medium in media if medium.kind == "video"]
        if videos and getattr(self.processor, "video_processor", None) is None:
            raise UserError(
                f"model {self.model} reads videos only with torchvision; "
                "install the build for your torch (docs/vision.md)"
            )
        options: dict[str, Any] = {"text": ["".join(map(self._placeholder, media))]}
        if offsets:
            options["return_text_replacement_offsets"] = True
        else:
            options["return_tensors"] = "pt"
        images = [_loaded(medium) for medium in media if medium.kind == "image"]
        if images:
            options["images"] = images
            if self._limits is not None:
                options["images_kwargs"] = {"size": self._limits.image_size(self.processor.image_processor, self.model)}
        if videos:
            video_frames = [_loaded(medium) for medium in videos]
            options |= {"videos": video_frames, "do_sample_frames": False}
            if self._limits is not None:
                video_processor, frame_count = self.processor.video_processor, len(video_frames[0])
                options["videos_kwargs"] = {"size": self._limits.video_size(video_processor, frame_count)}
            if all(medium.rate for medium in videos):  # Qwen's positions and prompts include timestamps
                options["video_metadata"] = [
                    {
                        "fps": medium.rate,
                        "total_num_frames": len(frames),
                        "frames_indices": list(range(len(frames))),
                    }
                    for medium, frames in zip(videos, video_frames, strict=True)
                ]
        return self.processor(**options)


def _bytes_of(pixels: Pixels) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in pixels.values())


def _loaded(medium: Medium) -> Any:
    try:
        return medium.load()
    except (OSError, ValueError, SyntaxError) as error:  # what pillow raises about damaged files
        raise UserError(f"an {medium.kind} cannot be read: {error}") from error


def remembered_bytes(visual_tokens: int) -> int:
    """Return about how many bytes pixel values and encoders' outputs of media with this number of tokens take."""
    return min(visual_tokens * _TOKEN_BYTES, 2 * REMEMBERED)


# --- positions ------------------------------------------------------------------------------------


def token_kinds(model: nn.Module, token_ids: Tensor) -> Tensor:
    """Return 1 for image tokens, 2 for video tokens and 0 for others: transformers' `mm_token_type_ids`."""
    medium_kinds = torch.zeros_like(token_ids, dtype=torch.int32)
    for kind_number, field_name in enumerate(("image_token_id", "video_token_id"), 1):
        medium_kinds[token_ids == getattr(model.config, field_name)] = kind_number
    return medium_kinds


def mask_inputs(model: nn.Module, token_ids: Tensor) -> dict[str, Tensor]:
    """Return what the forward of a model needs to let image tokens see later ones of their image; {} for most."""
    config: Any = decoder_of(model).config
    if getattr(config, "use_bidirectional_attention", None) != "vision":
        return {}
    return {"mm_token_type_ids": token_kinds(model, token_ids)}  # without it, Gemma 4 makes causal masks


def media_positions(
    model: nn.Module, token_ids: Tensor, token_mask: Tensor | None, pixels: Pixels
) -> tuple[Tensor, Tensor]:
    """Return the M-RoPE positions of new tokens with media, counted from 0.

    Tokens after an image or a video continue at the largest position so far, over all three axes, plus one, whether in
    the same forward or a later one. transformers advances by the height or width within a forward, so that text after a
    long video would repeat positions of its frames; Qwen trained its models with the maximum (Qwen2-VL,
    arXiv:2409.12191, section 2.1).

    Args:
        model: A model for which `rotary_model` is not None.
        token_ids: New tokens `[B, n]`.
        token_mask: Columns that are tokens, `[B, n]`; None: all.
        pixels: Their media.

    Returns:
        Positions `[3, B, n]`, and the difference between each sequence's next position and its token count, `[B]`.
    """
    rope_model, medium_kinds = rotary_model(model), token_kinds(model, token_ids)
    rope_parameters = inspect.signature(rope_model.get_rope_index).parameters
    grids = {field_name: tensor for field_name, tensor in pixels.items() if field_name in rope_parameters}
    raw_positions = torch.zeros(3, *token_ids.shape, dtype=torch.int64, device=token_ids.device)
    has_tokens = slice(None) if token_mask is None else token_mask.any(1)  # get_rope_index fails on a row without any
    raw_positions[:, has_tokens], _ = rope_model.get_rope_index(
        token_ids[has_tokens],
        mm_token_type_ids=medium_kinds[has_tokens],
        attention_mask=None if token_mask is None else token_mask[has_tokens].long(),
        **grids,
    )
    positions, position_shifts = raw_positions.clone(), []
    for sequence_index, row_kinds in enumerate(medium_kinds):
        columns = torch.arange(token_ids.shape[1], device=token_ids.device)
        if token_mask is not None:
            columns = columns[token_mask[sequence_index].bool()]
        following = 0
        if not len(columns):
            position_shifts.append(0)
            continue
        _, run_lengths = row_kinds[columns].unique_consecutive(return_counts=True)
        for run_columns in columns.split(run_lengths.tolist()):
            run_positions = raw_positions[:, sequence_index, run_columns]
            positions[:, sequence_index, run_columns] = run_positions + (following - run_positions.min())
            following = int(positions[:, sequence_index, run_columns].max()) + 1
        position_shifts.append(following - len(columns))
    return positions, torch.tensor(position_shifts, device=token_ids.device)
