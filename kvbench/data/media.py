"""Images and videos in the rows of tasks: encoded in JSON, decoded when a model reads them."""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.util
import io
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.benchmark import Medium
from kvbench.errors import LeftOut, UserError
from kvbench.files import State, sha256_of, state_of

if TYPE_CHECKING:
    from PIL import Image

FRAMES = 32
"""Number of video frames for the model, unless a row has `frames`: the default of lmms-eval."""


def is_medium(value: object) -> bool:
    """Return whether a value of a row is an image or a video; see `Benchmark.docs`."""
    return isinstance(value, Mapping) and (isinstance(value.get("bytes"), str) or value.get("kind") == "video")


def image(image_bytes: bytes) -> dict[str, str]:
    """Return an image for a row, from the content of a file such as a PNG."""
    return {"bytes": base64.b64encode(image_bytes).decode()}


def picture(pixels: Image.Image) -> Medium:
    """Return the medium of an image of Pillow. It is held as a PNG, and identified by its RGB pixels."""
    rgb = pixels.convert("RGB")
    rgb.info.clear()  # a PNG would keep an EXIF rotation, which nothing has applied
    encoded = io.BytesIO()
    rgb.save(encoded, "PNG", compress_level=1)
    digest = hashlib.sha256(f"{rgb.width}x{rgb.height}".encode() + rgb.tobytes()).hexdigest()
    return Medium("image", digest, functools.partial(_image, encoded.getvalue()))


def video(path: str | Path, frames: int = FRAMES) -> dict[str, Any]:
    """Return a video for a row.

    Args:
        frames: Number of frames for the model, evenly spread from the first to the last.
    """
    return {"kind": "video", "path": str(path), "frames": frames}


def medium(description: Mapping[str, Any], max_frames: int | None = None) -> Medium:
    """Convert a row's value to a medium.

    Args:
        max_frames: Number of frames of a video for the model, in place of the row's; None: the row's, or `FRAMES`.

    Raises:
        LeftOut: It is a video, and opencv is not installed.
        UserError: It cannot be read, or an image is not base64.
    """
    if description.get("kind") == "video":
        return _video(Path(description["path"]), max_frames or int(description.get("frames", FRAMES)))
    try:
        image_bytes = base64.b64decode("".join(description["bytes"].split()), validate=True)
    except ValueError as error:
        raise UserError(f"an image is not base64: {str(error).lower()}") from None
    return Medium("image", hashlib.sha256(image_bytes).hexdigest(), functools.partial(_image, image_bytes))


def identity(value: object) -> Any:
    """Return a JSON value in which media are replaced by their kind and digest.

    Unreadable media stay unchanged; the code that needs them knows their row.
    """
    if isinstance(value, Mapping):
        if is_medium(value):
            try:
                loaded_medium = medium(value)
            except LeftOut:
                raise
            except UserError:
                return dict(value)
            return {"kind": loaded_medium.kind, "digest": loaded_medium.digest}
        return {key: identity(item) for key, item in value.items()}
    return [identity(item) for item in value] if isinstance(value, list) else value


def _image(image_bytes: bytes) -> Any:
    """Decode an image.

    Raises:
        UserError: It is damaged, or too large to decode.
    """
    from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError

    # lmms-eval lets Pillow fill the missing rest of any image of the process with grey.
    loads_truncated, ImageFile.LOAD_TRUNCATED_IMAGES = ImageFile.LOAD_TRUNCATED_IMAGES, False
    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            # Rotate camera photographs upright, as `datasets` does.
            return ImageOps.exif_transpose(Image.open(io.BytesIO(image_bytes))).convert("RGB")
        except (Image.DecompressionBombWarning, Image.DecompressionBombError):
            raise UserError(f"it has more than {Image.MAX_IMAGE_PIXELS:,} pixels; scale it down") from None
        except UnidentifiedImageError:
            raise UserError("Pillow does not know its format; convert it to PNG or JPEG") from None
        except Exception as error:  # Pillow raises many kinds of errors for damaged files
            raise UserError(str(error) or type(error).__name__) from error
        finally:
            ImageFile.LOAD_TRUNCATED_IMAGES = loads_truncated


def _video(path: Path, frame_count: int) -> Medium:
    if importlib.util.find_spec("cv2") is None:
        raise LeftOut("its videos need opencv, which is not installed; run: pip install 'kvbench[vision]'")
    try:
        digest = _file_digest(path, state_of(path))
    except OSError as error:
        raise UserError(f"cannot read the video {path}: {error.strerror}") from None
    load_frames = functools.partial(_frames, path, frame_count)
    return Medium("video", f"{digest}/{frame_count}", load_frames, _rate(path, frame_count))


@functools.cache
def _file_digest(path: Path, state: State) -> str:
    return sha256_of(path)


def _rate(path: Path, frame_limit: int) -> float:
    """Return the frames per second of the result of `_frames`; 0 if the file does not say."""
    import cv2

    capture = cv2.VideoCapture(str(path))
    try:
        total_frames = int(capture.get(cv2.CAP_PROP_FRAME_COUNT))
        used_frames = min(frame_limit, total_frames)
        if used_frames < 2:
            return 0.0
        return float(capture.get(cv2.CAP_PROP_FPS)) * (used_frames - 1) / (total_frames - 1)
    finally:
        capture.release()


def spread(total_frames: int, frame_count: int) -> list[int]:
    """Return indices from 0 to `total_frames - 1`, evenly spread and rounded down as by `np.linspace`."""
    step_size = (total_frames - 1) / max(1, frame_count - 1)
    return [
        total_frames - 1 if frame_index and frame_index == frame_count - 1 else int(frame_index * step_size)
        for frame_index in range(frame_count)
    ]


def _frames(path: Path, frame_limit: int) -> list[Any]:
    """Return frames of a video, evenly spread from the first to the last; all if there are fewer.

    Raises:
        UserError: The file has no frames, or ends before the last ones.
    """
    import cv2
    from PIL import Image

    capture = cv2.VideoCapture(str(path))
    try:
        total_frames = int(capture.get(cv2.CAP_PROP_FRAME_COUNT))
        frames: list[Any] = []
        for frame_index in spread(total_frames, min(frame_limit, total_frames)):
            capture.set(cv2.CAP_PROP_POS_FRAMES, frame_index)
            was_read, frame = capture.read()
            # Some files count a few frames more than they have, which is acceptable.
            if not was_read and frames and total_frames - frame_index > 2 + total_frames // 100:
                raise UserError(
                    f"the video {path} breaks off: it has {total_frames} frames, and "
                    f"frame {frame_index} cannot be read; download it again"
                )
            if not was_read:
                break
            frames.append(Image.fromarray(cv2.cvtColor(frame, cv2.COLOR_BGR2RGB)))
    finally:
        capture.release()
    if not frames:
        raise UserError(f"cannot read the video {path}: opencv finds no frames in it")
    return frames
