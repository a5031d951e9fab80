"""Put an export on the Hugging Face hub."""

from pathlib import Path

from dflash_tools.errors import ConfigError


def push_export(folder: Path, repo_id: str, *, private: bool = True) -> str:
    """Upload an export: config, weights and card.

    Args:
        folder: An export.
        repo_id: ``OWNER/NAME`` on the hub; made if it is not there.
        private: Whether a new repository is private.

    Returns:
        Address of the commit.

    Raises:
        ConfigError: If the hub refuses or cannot be reached.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    api = HfApi()
    try:
        api.create_repo(repo_id, private=private, exist_ok=True)
        commit = api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message="Upload DFlash drafter")
    except (OSError, HfHubHTTPError, HFValidationError, OfflineModeIsEnabled) as error:
        first_line = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"--push-to {repo_id}: {first_line}; the export lies in {folder}: log in with `hf auth login`, "
            "then upload it with `hf upload`"
        ) from None
    return str(commit.commit_url)
