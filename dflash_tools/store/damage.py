"""What ``verify`` finds: a damaged file, and whose states are hurt."""

from dataclasses import dataclass

_SHOWN_SAMPLES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """One damaged file of a store.

    Attributes:
        file: Name relative to the store.
        problem: What is wrong with it, in words.
        bucket_id: Bucket of the shard that is hurt; None if no states are.
        shard_id: Shard inside the bucket.
        sample_ids: Samples whose data are hurt; all of the shard where that cannot be told.
    """

    file: str
    problem: str
    bucket_id: int | None = None
    shard_id: int | None = None
    sample_ids: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = f"{self.file}: {self.problem}"
        if self.bucket_id is None:
            return text
        shown = ", ".join(self.sample_ids[:_SHOWN_SAMPLES])
        more = len(self.sample_ids) - _SHOWN_SAMPLES
        samples = f"{shown} and {more} more" if more > 0 else shown
        return f"{text} (bucket {self.bucket_id}, shard {self.shard_id}, samples {samples or 'unknown'})"
