"""Check a DFlash checkpoint, ours or released: every rule that an engine relies on gives one line."""

from pathlib import Path

from dflash_tools.drafter.check_config import check_config
from dflash_tools.drafter.check_target import TargetFacts, check_target
from dflash_tools.drafter.check_tensors import check_tensors
from dflash_tools.drafter.checkpoint_file import LayerIdConvention, read_checkpoint_file
from dflash_tools.drafter.checkpoint_view import layer_id_convention, zlab_view
from dflash_tools.drafter.finding import Finding

__all__ = ["Finding", "TargetFacts", "check_folder"]


def check_folder(
    folder: Path, target: TargetFacts | None = None, *, layer_ids_are: LayerIdConvention | None = None
) -> list[Finding]:
    """Check the config and the tensors of a drafter folder, and whether it belongs to a target.

    Args:
        folder: A drafter in the z-lab or the speculators layout.
        target: The target it is to serve with; None leaves those rules out.
        layer_ids_are: How its layer ids count, where the file cannot tell.

    Returns:
        One finding per rule, in a fixed order: config, tensors, target.

    Raises:
        ConfigError: If the folder holds no drafter at all, or a file is damaged.
    """
    file = read_checkpoint_file(folder)
    convention = layer_id_convention(file, layer_ids_are)
    view = zlab_view(file, convention)
    findings = [*check_config(file, view, convention), *check_tensors(file, view)]
    if target is not None:
        findings += check_target(file, view, target)
    return findings
