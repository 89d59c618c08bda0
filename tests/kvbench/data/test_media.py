"""Images and videos of rows: encoded in JSON, the same digest everywhere, decoded when loaded."""

from __future__ import annotations

import hashlib
import io
import json
import struct
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFile

from kvbench.benchmark import Source
from kvbench.data import fetching
from kvbench.data.formats import file_rows
from kvbench.data.media import identity, image, is_medium, medium, spread, video
from kvbench.data.sources import keep, rows
from kvbench.errors import UserError

from ...vision import encoded, picture
from .conftest import Hub


def png(color: str = "red") -> bytes:
    content = io.BytesIO()
    picture(color).save(content, "PNG")
    return content.getvalue()


def test_an_image_is_known_by_its_file_and_decoded_to_rgb_when_loaded() -> None:
    found = medium(image(png()))
    assert (found.kind, found.digest) == ("image", hashlib.sha256(png()).hexdigest())
    assert found == medium({"bytes": encoded()["bytes"], "path": "other name"})
    assert found != medium(image(png("blue")))
    shown = found.load()
    assert (shown.mode, shown.size, shown.getpixel((0, 0))) == ("RGB", (64, 48), (255, 0, 0))
    content = io.BytesIO()
    picture().convert("L").save(content, "PNG")
    assert medium(image(content.getvalue())).load().mode == "RGB"
    turned = picture().getexif()
    turned[0x0112] = 6  # the camera was held upright
    content = io.BytesIO()
    picture().save(content, "JPEG", exif=turned)
    assert medium(image(content.getvalue())).load().size == (48, 64)
    medium(image(b"no image"))  # nothing is decoded before it is needed


def bomb() -> bytes:
    """A PNG of a few bytes whose header promises 60,000 x 60,000 pixels."""
    content = bytearray(png())
    content[16:24] = struct.pack(">II", 60_000, 60_000)
    content[29:33] = struct.pack(">I", zlib.crc32(content[12:29]))
    return bytes(content)


@pytest.mark.parametrize("loads_truncated", [False, True])
def test_an_image_that_cannot_be_decoded_is_one_line(monkeypatch: pytest.MonkeyPatch, loads_truncated: bool) -> None:
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", loads_truncated)  # as lmms-eval sets it for the process
    with pytest.raises(UserError, match=r"^an image is not base64: \w"):
        medium({"bytes": "abc$"})
    split = image(png())["bytes"]
    assert medium({"bytes": f"{split[:9]}\n{split[9:]}"}) == medium(image(png()))
    for content, message in (
        (bomb(), r"^it has more than 89,478,485 pixels; scale it down$"),
        (b"no image", r"^Pillow does not know its format; convert it to PNG or JPEG$"),
        (png()[:50], r"^\w[^\n]*$"),
    ):
        with pytest.raises(UserError, match=message):
            medium(image(content)).load()


def test_a_hash_of_rows_has_the_digests_of_media_and_not_their_places(tmp_path: Path) -> None:
    row = {"media": [image(png())], "n": [1, {"deep": encoded()}], "text": "bytes"}
    digest = medium(image(png())).digest
    short = {"kind": "image", "digest": digest}
    assert identity(row) == {"media": [short], "n": [1, {"deep": short}], "text": "bytes"}
    assert not is_medium({"bytes": None, "path": "x"})
    assert not is_medium("bytes")


def test_kept_rows_have_their_images(tmp_path: Path) -> None:
    source = Source("me/pictures", columns=("q", "image", "more"))
    given = [{"q": "?", "image": {"bytes": png(), "path": None}, "more": [encoded()], "x": 1}]
    keep(source, given, tmp_path)
    [row] = rows(source, tmp_path)
    assert medium(row["image"]).digest == medium(row["more"][0]).digest
    assert row["q"] == "?"
    assert "x" not in row


def test_only_the_wanted_rows_are_returned_and_all_are_verified(tmp_path: Path) -> None:
    source = Source("me/numbers")
    keep(source, [{"n": n} for n in range(9)], tmp_path)
    assert rows(source, tmp_path, 2) == [{"n": 0}, {"n": 1}]
    assert rows(source, tmp_path, 2, lambda row: row["n"] % 3 == 1) == [{"n": 1}, {"n": 4}]
    assert len(rows(source, tmp_path, where=lambda row: row["n"] > 6)) == 2
    file = next((tmp_path / "hub").iterdir())
    file.write_text(file.read_text().replace('{"n": 8}', '{"n": 7}'))
    with pytest.raises(UserError, match="does not match its hash"):
        fetching.load(source, tmp_path, 1)


@pytest.mark.slow
def test_tables_of_the_hub_keep_their_images_encoded(hub: Hub, tmp_path: Path) -> None:
    import datasets

    features = datasets.Features(
        {
            "image": datasets.Image(),
            "more": datasets.List(datasets.Image()),
            "q": datasets.Value("string"),
        }
    )
    table = datasets.Dataset.from_list(
        [{"image": {"bytes": png(), "path": "a.png"}, "more": [{"bytes": png("blue")}], "q": "?"}],
        features=features,
    )
    content = io.BytesIO()
    table.to_parquet(content)
    hub.add("me/pictures", "data/test-00000-of-00001.parquet", content.getvalue())
    hub.add("me/pictures", "README.md", b"")
    code = (
        "import json; from pathlib import Path; from kvbench.benchmark import Source;"
        "from kvbench.data.sources import rows;"
        "source = Source('me/pictures', columns=('image', 'more'));"
        f"print('rows', json.dumps(rows(source, Path({str(tmp_path)!r}))))"
    )
    done = hub.python(code, tmp_path)
    assert done.returncode == 0, done.stderr
    [row] = json.loads(done.stdout.partition("rows ")[2])
    assert medium(row["image"]).digest == hashlib.sha256(png()).hexdigest()
    assert medium(row["more"][0]).digest == hashlib.sha256(png("blue")).hexdigest()
    assert "q" not in row


def test_the_images_of_an_archive_are_rows(tmp_path: Path) -> None:
    path = tmp_path / "pics.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("pics/b.png", "pics/a.jpg", "pics/note.txt", "other/c.png"):
            archive.writestr(name, name)
    found = list(file_rows(path, "pics/*"))
    assert found == [{"path": n, "bytes": n.encode()} for n in ("pics/a.jpg", "pics/b.png")]
    assert [row["path"] for row in file_rows(path, "*.png")] == ["other/c.png", "pics/b.png"]
    path.write_bytes(b"no archive")
    with pytest.raises(UserError, match=r"cannot read pics\.zip as zip"):
        list(file_rows(path, "pics/*"))


@pytest.mark.slow
def test_the_images_of_an_archive_are_fetched_from_the_hub(hub: Hub, tmp_path: Path) -> None:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("pics/a.png", png())
    hub.add("me/pictures", "pics.zip", content.getvalue())
    hub.add("me/pictures", "other.zip", b"")
    code = (
        "import json; from pathlib import Path; from kvbench.benchmark import Source;"
        "from kvbench.data.sources import rows;"
        "source = Source('me/pictures', file='pics.zip:pics/*');"
        f"print('rows', json.dumps(rows(source, Path({str(tmp_path)!r}))))"
    )
    done = hub.python(code, tmp_path)
    assert done.returncode == 0, done.stderr
    [row] = json.loads(done.stdout.partition("rows ")[2])
    assert row["path"] == "pics/a.png"
    assert medium(row).digest == hashlib.sha256(png()).hexdigest()
    assert not any("other.zip" in request for request in hub.requests)


@pytest.mark.parametrize(("total", "count"), [(1, 1), (2, 2), (10, 4), (100, 32), (97, 7)])
def test_frames_are_spread_as_numpy_does(total: int, count: int) -> None:
    assert spread(total, count) == np.linspace(0, total - 1, count, dtype=int).tolist()


def test_a_video_is_known_by_its_file_and_loaded_as_frames(tmp_path: Path) -> None:
    cv2 = pytest.importorskip("cv2", reason="videos need opencv")
    path = tmp_path / "clip.avi"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"MJPG"), 5, (64, 48))
    for level in range(0, 250, 25):
        writer.write(np.full((48, 64, 3), (level, 0, 0), np.uint8))  # blue, in opencv's order
    writer.release()
    found = medium(video(path, frames=4))
    assert found.kind == "video"
    assert found != medium(video(path, frames=5))
    frames = found.load()
    blues = [Image.Image.getpixel(frame, (5, 5))[2] for frame in frames]
    assert [round(blue / 25) for blue in blues] == [0, 3, 6, 9]
    assert len(medium(video(path)).load()) == 10
    assert medium(video(path), 4) == found
    assert medium(video(path, frames=4), 5) == medium(video(path, frames=5))
    assert medium(video(path)).rate == pytest.approx(5)
    assert found.rate == pytest.approx(5 * 3 / 9)  # 4 of the 10 frames, the first and the last too
    with pytest.raises(UserError, match=r"cannot read the video .*none\.mp4: No such file"):
        medium(video(tmp_path / "none.mp4"))
    (tmp_path / "empty.mp4").write_bytes(b"")
    with pytest.raises(UserError, match="finds no frames"):
        medium(video(tmp_path / "empty.mp4")).load()


def test_a_video_that_breaks_off_is_refused_instead_of_losing_frames(tmp_path: Path) -> None:
    cv2 = pytest.importorskip("cv2", reason="videos need opencv")
    path = tmp_path / "clip.avi"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"MJPG"), 5, (64, 48))
    noise = np.random.default_rng(0)
    for _ in range(100):
        writer.write(noise.integers(0, 255, (48, 64, 3), dtype=np.uint8))
    writer.release()
    assert len(medium(video(path, frames=8)).load()) == 8
    whole = path.read_bytes()
    path.write_bytes(whole[: int(0.55 * len(whole))])
    with pytest.raises(UserError, match=r"clip\.avi breaks off: it has 100 frames, and frame 56"):
        medium(video(path, frames=8)).load()
