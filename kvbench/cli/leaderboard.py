"""`kvbench publish` and `kvbench leaderboard`. Heavy modules are imported inside the commands."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated

import typer

from kvbench.cli.options import Quiet, option
from kvbench.cli.screen import complain, progress, say, stopping
from kvbench.progress import Silent
from kvbench.runs.options import FLAG

PUBLISHED_FOLDER = "leaderboard"
SITE_FOLDER = "leaderboard-site"


def publish(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, or of a published one to upload.")],
    out: Annotated[
        Path | None,
        option(None, "DIR", f"Folder in which the published run is created. Default: {PUBLISHED_FOLDER}."),
    ] = None,
    push: Annotated[
        str | None,
        option(None, "REPO_ID", "Also upload it to this dataset of the Hugging Face hub, which is created if needed."),
    ] = None,
    hardware: Annotated[
        str,
        option(None, "TEXT", "The machine, such as '8 x NVIDIA H200'. Default: the GPU or CPU that the run recorded."),
    ] = "",
    quiet: Quiet = False,
) -> None:
    """Write a run as a small folder for leaderboards, which its digest identifies.

    It holds scores, costs, versions and the command, but no prompt, response or reference answer.
    """
    from kvbench.leaderboard.publication import MANIFEST, load_publication
    from kvbench.leaderboard.publication import publish as publish_run
    from kvbench.tables.numbers import size

    if push is not None:
        from kvbench.leaderboard.push import check_push
        from kvbench.leaderboard.push import push as upload

        check_push(push)
    if quiet:
        warnings.simplefilter("ignore")
    reporter = Silent() if quiet else progress()
    with stopping(reporter):
        reporter.busy(f"publishing {run}")
        is_published = (run / MANIFEST).exists()
        publication = (
            load_publication(run) if is_published else publish_run(run, out or Path(PUBLISHED_FOLDER), hardware)
        )
        if push is not None:
            reporter.busy(f"uploading to {push}")
            address = upload(publication, push)
    if quiet:
        print(publication.folder)
        return
    for remark in publication.remarks:
        say(f"remark: {remark}")
    print(f"{'checked' if is_published else 'wrote'} {publication.folder} ({size(publication.byte_count)})")
    if push is not None:
        print(f"uploaded to {address}")
    else:
        print(f"leaderboard: kvbench leaderboard {publication.folder.parent}")


def leaderboard(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="FOLDER...", help="Folders of published runs, or folders that hold them."),
    ],
    out: Annotated[
        Path | None, option(None, "DIR", f"Folder of the site, one index.html. Default: {SITE_FOLDER}.")
    ] = None,
    opens: Annotated[bool, option(None, FLAG, "Open the site in the browser.", "--open")] = False,
    quiet: Quiet = False,
) -> None:
    """Build one static page from published runs: scores, Pareto fronts, and where runs disagree."""
    import webbrowser

    from kvbench.leaderboard.entries import leaderboard_data
    from kvbench.leaderboard.publication import find_publications
    from kvbench.leaderboard.site import write_site

    reporter = Silent() if quiet else progress()
    with stopping(reporter):
        reporter.busy("checking digests")
        publications = find_publications(folders)
        page_data = leaderboard_data(publications, reporter)
    page_path = write_site(page_data, out or Path(SITE_FOLDER))
    print(page_path)
    if opens and not webbrowser.open(page_path.resolve().as_uri()):
        complain("cannot open a browser; open the file yourself, or copy it to another machine")
