"""The convert command: prepare, copy what is missing, finish."""

import errno
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from dflash_tools.config import TargetSection
from dflash_tools.contracts.manifest import Codec, HiddenStatesDtype
from dflash_tools.convert.fill import write_shards
from dflash_tools.convert.finish import finish_store, summarise
from dflash_tools.convert.job import Job, LayerIdsAre, Options, resolve_job
from dflash_tools.convert.layouts import LayoutName, NormState
from dflash_tools.convert.prepare import prepare
from dflash_tools.convert.record import check_settings, read_record
from dflash_tools.errors import ConfigError, StoreError
from dflash_tools.progress import say
from dflash_tools.store.lock import StoreLock
from dflash_tools.store.manifest_file import MANIFEST_NAME, read_manifest
from dflash_tools.store.verify import verify_store
from dflash_tools.store.writer import StoreWriter

_FULL_DISK = (errno.ENOSPC, errno.EDQUOT)


def run_conversion(
    source: Path,
    layout: LayoutName,
    store_dir: Path,
    *,
    target: str,
    target_layer_ids: Sequence[int],
    layer_ids_are: LayerIdsAre | None = None,
    revision: str | None = None,
    gguf_file: str | None = None,
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16",
    trust_remote_code: bool = False,
    keep_last_hidden_state: bool = False,
    last_hidden_state_is: NormState | None = None,
    masks: Path | None = None,
    loss_on: Literal["all"] | None = None,
    hidden_states_dtype: HiddenStatesDtype = "bfloat16",
    codec: Codec = "none",
    buckets: int = 6,
    validation_fraction: float = 0.02,
) -> dict[str, Any]:
    """Turn the per-sample files of another tool into a store; go on with what an earlier start left.

    Args:
        source: Folder of the cache.
        layout: The tool that wrote it.
        store_dir: Folder of the store.
        target: The cached target: folder, hub id or package:NAME.
        target_layer_ids: Layers of the cache, in its order, without the last hidden state.
        layer_ids_are: How they are counted: zlab, output of layer i is i; vllm, it is i + 1.
        revision: Of the target on the hub.
        gguf_file: GGUF weights of the target.
        dtype: In which the target ran when it was cached.
        trust_remote_code: Run model code that comes with the target's checkpoint.
        keep_last_hidden_state: Keep the last hidden state too.
        last_hidden_state_is: Its norm state where the tool was told otherwise.
        masks: Dataset that holds the loss masks, for files without.
        loss_on: "all" supervises every token of files without a mask.
        hidden_states_dtype: Of the store.
        codec: Of the store.
        buckets: Length buckets.
        validation_fraction: Share of conversations that is held out.

    Returns:
        Figures of the store by the keys of docs/convert.md.

    Raises:
        ConfigError, DataError, StoreError: Whatever the user can fix; all finished shards stay.
    """
    options = Options(
        target=TargetSection(
            model=target,
            revision=revision,
            gguf_file=gguf_file,
            dtype=dtype,
            device="cpu",
            trust_remote_code=trust_remote_code,
        ),
        target_layer_ids=target_layer_ids,
        layer_ids_are=layer_ids_are,
        keep_last_hidden_state=keep_last_hidden_state,
        last_hidden_state_is=last_hidden_state_is,
        masks=masks,
        loss_on=loss_on,
        hidden_states_dtype=hidden_states_dtype,
        codec=codec,
        num_buckets=buckets,
        validation_fraction=validation_fraction,
    )
    if store_dir.absolute().is_relative_to(source.absolute()):
        raise ConfigError(f"--store {store_dir}: lies inside SOURCE {source}; give a folder outside it")
    job = resolve_job(source, layout, options)
    with StoreLock(store_dir):
        if (store_dir / MANIFEST_NAME).exists():
            return _report_finished(store_dir, job)
        try:
            return _convert(store_dir, job)
        except OSError as error:
            if error.errno not in _FULL_DISK:
                raise
            raise StoreError(
                f"{store_dir}: the disk is full; make room and run the same command again, it goes on where it stopped"
            ) from None


def _convert(store: Path, job: Job) -> dict[str, Any]:
    record = read_record(store)
    if record is None:
        record = prepare(store, job)
    check_settings(store, record, job.settings)
    writer = StoreWriter(store, job.shape, record.buckets)
    writer.clean_uncommitted()
    writer = write_shards(store, job, writer)
    manifest = finish_store(store, job, writer, record)
    _refuse_damage(store)
    return summarise(store, job, manifest, record)


def _report_finished(store: Path, job: Job) -> dict[str, Any]:
    """Say that a store is finished already, if it is of this job and whole."""
    manifest, record = read_manifest(store), read_record(store)
    if record is None:
        raise StoreError(f"{store}: is a finished store that was not converted; give another folder")
    check_settings(store, record, job.settings)
    _refuse_damage(store)
    say(f"{store} is finished already; nothing to do")
    return summarise(store, job, manifest, record)


def _refuse_damage(store: Path) -> None:
    damage = verify_store(store, deep=False)
    if damage:
        raise StoreError(
            f"{store}: {len(damage)} damaged places, the first is {damage[0]}; check the disk, and convert into "
            "another folder"
        )
