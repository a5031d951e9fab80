"""Who sees whom: the laws of the drafter's attention mask, in one place for every path.

A slot at offset j of the block with anchor a stands at position a + j. It sees context tokens of its own document
strictly before the anchor (the target has not yet run the anchor itself), in sliding layers only those at
u >= a + j - (window - 1); and slots of its own block, in sliding layers those up to itself.
"""

from torch import Tensor


def sees_context(
    anchors: Tensor, offsets: Tensor, positions: Tensor, same_document: Tensor, window: int | None
) -> Tensor:
    """Say which slots see which context tokens. The arguments broadcast.

    Args:
        anchors: Position of the anchor of the slot's block.
        offsets: Offset j of the slot in its block.
        positions: Position of the context token in its document.
        same_document: True where token and block belong to one document; False for padding.
        window: Tokens a sliding layer sees, the slot's own included; None = full attention.
    """
    seen = same_document & (positions < anchors)
    return seen if window is None else seen & (positions > anchors + offsets - window)


def sees_slot(offsets: Tensor, other_offsets: Tensor, window: int | None) -> Tensor:
    """Say which slots see which slots of the same block: all in full layers, those up to itself in sliding layers.

    Args:
        offsets: Offset j of the seeing slot.
        other_offsets: Offset of the seen slot.
        window: As in ``sees_context``.
    """
    if window is None:
        return (offsets >= 0) & (other_offsets >= 0)
    return (other_offsets <= offsets) & (other_offsets > offsets - window)
