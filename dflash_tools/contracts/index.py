"""The sample index: one row per sample of a store, in ``index.parquet``.

The store keeps it as a Polars frame; planner, feed and report take its columns as NumPy arrays.
"""

TRAIN = "train"
VALIDATION = "validation"

# Column -> Polars type name. Row order is the sample row used by plans and by ``Store.read``.
INDEX_COLUMNS: dict[str, str] = {
    "sample_id": "String",  # 32 hex digits: hash of token ids, loss mask and occurrence
    "conversation_id": "String",  # 32 hex digits: hash of the conversation's content; decides the split
    "source": "String",  # input file (or source name) the row came from
    "source_row": "Int64",  # row number in the source, from 1; -1 if the sample joins several
    "split": "String",  # "train" or "validation"
    "bucket_id": "Int32",
    "shard_id": "Int32",  # shard inside the bucket
    "forward_id": "Int32",  # forward batch inside the shard
    "start": "Int64",  # first position on the bucket's token axis
    "num_tokens": "Int32",
    "num_supervised_tokens": "Int32",
    "num_valid_anchors": "Int32",  # positions a with loss_mask[a] and loss_mask[a + 1]
}
