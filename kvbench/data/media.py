"""Images and videos in the rows of tasks: encoded in JSON, decoded when a model sees them."""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.util
import io
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvbench.benchmark import Medium
from kvbench.errors import LeftOut, UserError
from kvbench.files import State, state_of

FRAMES = 32
"""Frames of a video that a model sees, unless a row has `frames`: the default of lmms-eval."""


def is_medium(value: object) -> bool:
    """Whether a value of a row is an image or a video; see `Benchmark.docs`."""
    return isinstance(value, Mapping) and (
        isinstance(value.get("bytes"), str) or value.get("kind") == "video"
    )


def image(content: bytes) -> dict[str, str]:
    """An image for a row, from the content of a file such as a PNG."""
    return {"bytes": base64.b64encode(content).decode()}


def video(path: str | Path, frames: int = FRAMES) -> dict[str, Any]:
    """A video for a row.

    Args:
        path: The file.
        frames: How many frames the model sees, evenly spread from the first to the last.
    """
    return {"kind": "video", "path": str(path), "frames": frames}


def medium(value: Mapping[str, Any]) -> Medium:
    """Make a medium of the value of a row.

    Raises:
        LeftOut: It is a video, and opencv is not installed.
        UserError: It cannot be read, or an image is not base64.
    """
    if value.get("kind") == "video":
        return _video(Path(value["path"]), int(value.get("frames", FRAMES)))
    try:
        content = base64.b64decode("".join(value["bytes"].split()), validate=True)
    except ValueError as error:
        raise UserError(f"an image is not base64: {str(error).lower()}") from None
    return Medium("image", hashlib.sha256(content).hexdigest(), functools.partial(_image, content))


def identity(value: object) -> Any:
    """A JSON value in which media are replaced by their kind and digest.

    Media that cannot be read stay as they are: whoever needs them knows their row.
    """
    if isinstance(value, Mapping):
        if is_medium(value):
            try:
                found = medium(value)
            except LeftOut:
                raise
            except UserError:
                return dict(value)
            return {"kind": found.kind, "digest": found.digest}
        return {name: identity(part) for name, part in value.items()}
    return [identity(part) for part in value] if isinstance(value, list) else value


def _image(content: bytes) -> Any:
    """Decode an image.

    Raises:
        UserError: It is damaged, or too large to decode.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            # Upright, as `datasets` decodes photographs that a camera has turned.
            return ImageOps.exif_transpose(Image.open(io.BytesIO(content))).convert("RGB")
        except (Image.DecompressionBombWarning, Image.DecompressionBombError):
            raise UserError(
                f"it has more than {Image.MAX_IMAGE_PIXELS:,} pixels; scale it down"
            ) from None
        except UnidentifiedImageError:
            raise UserError("it is in no format that Pillow knows") from None
        except Exception as error:  # a damaged file makes Pillow raise errors of many kinds
            raise UserError(str(error) or type(error).__name__) from error


def _video(path: Path, frames: int) -> Medium:
    if importlib.util.find_spec("cv2") is None:
        raise LeftOut(
            "its videos need opencv, which is not installed; run: pip install 'kvbench[vision]'"
        )
    try:
        digest = _file_digest(path, state_of(path))
    except OSError as error:
        raise UserError(f"cannot read the video {path}: {error.strerror}") from None
    load = functools.partial(_frames, path, frames)
    return Medium("video", f"{digest}/{frames}", load, _rate(path, frames))


@functools.cache
def _file_digest(path: Path, state: State) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _rate(path: Path, count: int) -> float:
    """Frames per second of the frames that `_frames` returns; 0 if the file does not say."""
    import cv2

    video = cv2.VideoCapture(str(path))
    try:
        total = int(video.get(cv2.CAP_PROP_FRAME_COUNT))
        shown = min(count, total)
        if shown < 2:
            return 0.0
        return float(video.get(cv2.CAP_PROP_FPS)) * (shown - 1) / (total - 1)
    finally:
        video.release()


def spread(total: int, count: int) -> list[int]:
    """Indices from 0 to `total - 1`, evenly spread and rounded down, as `np.linspace` has them."""
    step = (total - 1) / max(1, count - 1)
    return [total - 1 if i and i == count - 1 else int(i * step) for i in range(count)]


def _frames(path: Path, count: int) -> list[Any]:
    """Frames of a video, evenly spread from the first to the last; all if there are fewer.

    Raises:
        UserError: The file has no frames, or breaks off before the last ones.
    """
    import cv2
    from PIL import Image

    video = cv2.VideoCapture(str(path))
    try:
        total = int(video.get(cv2.CAP_PROP_FRAME_COUNT))
        found: list[Any] = []
        for index in spread(total, min(count, total)):
            video.set(cv2.CAP_PROP_POS_FRAMES, index)
            ok, frame = video.read()
            # Some files count a few frames more than they have: no reason to refuse them.
            if not ok and found and total - index > 2 + total // 100:
                raise UserError(
                    f"the video {path} breaks off: it has {total} frames, and frame {index} cannot "
                    "be read; download it again"
                )
            if not ok:
                break
            found.append(Image.fromarray(cv2.cvtColor(frame, cv2.COLOR_BGR2RGB)))
    finally:
        video.release()
    if not found:
        raise UserError(f"cannot read the video {path}: opencv finds no frames in it")
    return found
