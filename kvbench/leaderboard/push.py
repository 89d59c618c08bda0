"""Upload of publications to a dataset of the Hugging Face hub."""

from __future__ import annotations

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils._validators import validate_repo_id

from kvbench.data.hub import unreachable
from kvbench.errors import UserError, first_lines
from kvbench.leaderboard.publication import Publication


def check_push(repo_id: str) -> None:
    """Refuse an upload that could only fail.

    Raises:
        UserError: The name is not valid, there is no token, or the hub cannot be reached.
    """
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise UserError(f"--push {repo_id}: {first_lines(error)}") from None
    if problem := unreachable():
        raise UserError(f"--push {repo_id}: the hub {problem}; publish without --push, and upload the folder later")
    if not get_token():
        raise UserError(f"--push {repo_id} needs a token; log in with `hf auth login` or set HF_TOKEN")


def push(publication: Publication, repo_id: str) -> str:
    """Upload a publication to a dataset, in a folder of its name, and return the dataset's address.

    Args:
        publication: The publication.
        repo_id: Dataset such as `user/kvbench-runs`; created, and public, if there is none.

    Raises:
        UserError: The hub refuses the upload.
    """
    folder_name = publication.folder.name
    api = HfApi()
    try:
        repository = api.create_repo(repo_id, repo_type="dataset", exist_ok=True)
        api.upload_folder(
            repo_id=repo_id,
            repo_type="dataset",
            folder_path=publication.folder,
            path_in_repo=folder_name,
            allow_patterns=list(publication.files),
            commit_message=f"Publish {folder_name}",
        )
    except Exception as error:  # the hub's errors share no base class
        raise UserError(
            f"--push {repo_id}: the upload failed ({first_lines(error)}); {publication.folder} is written, "
            "so run the same command again"
        ) from None
    return str(repository)
